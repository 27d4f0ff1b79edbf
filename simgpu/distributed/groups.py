"""Process groups: where one would use NCCL, gloo carries the values."""

import functools
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from simgpu import runtime
from simgpu.errors import NotSimulated
from simgpu.hosts import LOOPBACK

NCCL_VERSION = (2, 28, 9)  # what PyTorch 2.11 for CUDA 13.0 comes with
_LOOPBACK_ADDRESSES = ("localhost", "127.0.0.1", "::1")

_raw_new_group = distributed_c10d._new_process_group_helper
_raw_object_device = distributed_c10d._get_object_coll_device
_raw_init_mesh = DeviceMesh.__init__


def nccl_version() -> tuple[int, int, int]:
    """`torch.cuda.nccl.version`"""
    return NCCL_VERSION


class Communicator:
    """What NCCL would know of this rank in one process group."""

    def __init__(self, bound: torch.device | None, earlier: int):
        self.bound = bound  # the GPU that was given as device_id
        self.ordinal: int | None = None  # of the GPU of its collectives so far
        self.earlier = earlier  # how many groups had this name before


def new_group(size, rank, ranks, backend, store, name, *args, **kwargs):
    """A process group: where it would use NCCL, gloo does the work."""
    now = runtime.current()
    asked = str(backend)
    if "nccl" not in _backends(asked).values():
        return _raw_new_group(size, rank, ranks, backend, store, name, *args, **kwargs)
    bound = kwargs.pop("device_id", None)  # gloo cannot connect before it is used
    if kwargs.pop("backend_options", None) is not None:
        raise NotSimulated("NCCL's options (pg_options=)", "Leave them out.")
    if not ranks:
        _bind_to_loopback()
    before = now.communicators.get(name)
    earlier = 0 if before is None else before.earlier + 1
    if earlier:  # gloo would find the addresses of the group that had this name
        store = dist.PrefixStore(f"again {earlier}", store)
    gloo = distributed_c10d.Backend("gloo")
    group, store = _raw_new_group(size, rank, ranks, gloo, store, name, *args, **kwargs)
    if isinstance(group, dist.ProcessGroup):
        distributed_c10d._world.pg_map[group] = (asked, store)  # for get_backend()
        now.communicators[name] = Communicator(bound, earlier)
        now.gloo_groups.append(group)
        if len(now.gloo_groups) == 1 and rank == 0:
            processes = "1 process" if size == 1 else f"{size} processes"
            print(
                f"simulated GPUs in {processes}: gloo answers for NCCL",
                file=sys.stderr,
                flush=True,
            )
    return group, store


def _bind_to_loopback() -> None:
    """Where all ranks are on one machine, no other need reach their sockets."""
    found = os.environ
    local = found.get("LOCAL_WORLD_SIZE", "many") == found.get("WORLD_SIZE")
    if LOOPBACK and (local or found.get("MASTER_ADDR") in _LOOPBACK_ADDRESSES):
        found.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)


@functools.cache
def _backends(asked: str) -> dict[str, str]:
    """Kind of device -> backend, for what a script has asked for."""
    if asked == "undefined":  # nothing: PyTorch takes what the machine has
        return {"cpu": "gloo", "cuda": "nccl"}
    config = distributed_c10d.BackendConfig(distributed_c10d.Backend(asked))
    return config.get_device_backend_map()


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    asked, _ = distributed_c10d._world.pg_map.get(group, ("gloo", None))
    return _backends(str(asked))


def is_nccl(group: dist.ProcessGroup) -> bool:
    """Whether the group has NCCL alone, which knows only GPUs."""
    return set(backends_of(group).values()) == {"nccl"}


def object_device(group: dist.ProcessGroup | None = None) -> str:
    """On which kind of device pickled objects travel."""
    if is_nccl(group or dist.group.WORLD):
        return "cuda"
    return _raw_object_device(group)


def init_mesh(mesh, device_type: str, *args, **kwargs) -> None:
    """FSDP2, tensor and pipeline parallel begin with a mesh of devices."""
    over_nccl = dist.is_initialized() and is_nccl(dist.group.WORLD)
    if over_nccl or torch.device(device_type).type == "cuda":
        raise NotSimulated(
            "DeviceMesh('cuda')",
            "FSDP2, tensor and pipeline parallel need real GPUs, or a mesh of 'cpu' "
            "without simgpu.",
        )
    _raw_init_mesh(mesh, device_type, *args, **kwargs)
