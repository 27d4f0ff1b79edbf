"""Process groups: where one would use NCCL, the simulator carries the values."""

import atexit
import functools
import operator
import os
import socket

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from simgpu import _runtime as state
from simgpu._compat import (
    FakeProcessGroup,
    backend_plugins,
    ensure_backend,
    fake_backend,
    is_absent,
    process_groups,
    raw_get_backend,
    raw_new_process_group,
    raw_object_device,
)
from simgpu._distributed import fingerprints, flight_recorder, watchdog
from simgpu._distributed.cluster import Cluster
from simgpu._distributed.communicator import Communicator
from simgpu._distributed.group_calls import GroupCall
from simgpu._errors import NotSimulated
from simgpu._frames import called_from
from simgpu._lines import write_line
from simgpu._loopback import LOOPBACK
from simgpu._timing.topology import Topology

NCCL_VERSION = (2, 28, 9)  # what PyTorch 2.11 for CUDA 13.0 comes with
_LOOPBACK_ADDRESSES = ("localhost", "127.0.0.1", "::1")
# PyTorch's own backend that does nothing: it stands where NCCL's would
_STAND_IN = "fake"
_NO = ("", "0", "false", "FALSE", "no", "n")  # what C++ takes for false

_raw_shutdown = dist.ProcessGroup.shutdown
_raw_barrier = dist.ProcessGroup.barrier
_raw_rendezvous = distributed_c10d.rendezvous


def nccl_version() -> tuple[int, int, int]:
    """`torch.cuda.nccl.version`"""
    return NCCL_VERSION


def new_group(size, rank, ranks, backend, store, name, *args, **kwargs):
    """A process group: where it would use NCCL, the simulator does the work."""
    runtime = state.current()
    ranks = [operator.index(one) for one in ranks]  # NumPy's, too
    spec = str(backend)
    engine = next(filter(_is_engine, backends_named(spec).values()), None)
    call = _note_call(runtime, name, ranks, engine)
    if "gloo" in backends_named(spec).values():
        its = call if engine is None else None
        _wait_for_members(runtime, name, ranks, its, kwargs["timeout"])
    if engine is None and runtime.peers is not None:
        fake_backend()
        backend = distributed_c10d.Backend(_STAND_IN)
    if engine is None:
        return raw_new_process_group(
            size, rank, ranks, backend, store, name, *args, **kwargs
        )
    options = kwargs.pop("backend_options", None)
    if options is None:
        options = dist.ProcessGroupNCCL.Options()
    elif not isinstance(options, dist.ProcessGroupNCCL.Options):
        raise AssertionError(
            "Expected backend_options argument to be of type ProcessGroupNCCL.Options"
        )
    fake_backend()

    if "gloo" in backends_named(spec).values() and runtime.peers is None:
        _bind_to_loopback()
    alone = runtime.peers is not None
    stand_in = ",".join(
        f"{device}:{_STAND_IN if alone or _is_engine(its) else its}"
        for device, its in backends_named(spec).items()
    )
    group, its_store = raw_new_process_group(
        size, rank, ranks, distributed_c10d.Backend(stand_in), store, name, *args,
        **kwargs,
    )  # fmt: skip
    if not isinstance(group, dist.ProcessGroup):
        return group, its_store
    # PyTorch 2.15 would record what the stand-in is told, beside us
    getattr(process_groups, "pg_flight_recorder_hooks", {}).pop(group, None)
    _call_it_nccl(group)
    process_groups.pg_map[group] = (spec, its_store)  # for get_backend()
    config = ",".join(f"{kind}:{its}" for kind, its in backends_named(spec).items())
    process_groups.pg_backend_config[group] = config
    if not ranks:
        _begin_job(runtime, store, rank, size)
    bound = kwargs.get("device_id")
    members = ranks or list(range(size))
    options._timeout, options.group_name = kwargs["timeout"], name
    options.global_ranks_in_group = ranks
    is_split = call is not None and call.number != name
    called = call.number if is_split else name
    communicator = _communicate(runtime, group, called, members, rank, bound, options)
    communicator.engine, communicator.call = engine, call
    communicator.is_split = is_split
    if fingerprints.wanted():
        communicator.fingerprints = fingerprints.Fingerprints(communicator)
    if "gloo" in backends_named(spec).values():
        runtime.gloo_groups.append(group)
    if bound is not None:
        runtime.initialize_in_cpp()
        what = f"a process group with device_id ({called_from()})"
        communicator.connect(runtime.gpus[bound.index], runtime.clock, what)
    return group, its_store


def _note_call(runtime, name: str, ranks: list[int], engine) -> GroupCall | None:
    """This rank makes a group, or takes no part in it; None if nobody counts it.

    NCCL splits what is made from a bound group of all ranks: in the order of the calls,
    whatever PyTorch's number. All others meet in the store, under that number.
    """
    if not ranks or runtime.cluster is None or not name.isdecimal() or runtime.peers:
        return None
    everyone = communicator_of(dist.group.WORLD)
    bound = everyone is not None and _is_bound(dist.group.WORLD)
    if bound and engine == everyone.engine:
        everyone.made += 1
        name = f"{everyone.made} of those split from all ranks"
    return GroupCall(runtime.cluster.board, name, ranks, called_from())


def _wait_for_members(runtime, name: str, ranks, call: GroupCall | None, limit) -> None:
    """Until all members make a group of gloo, which would wait for them unnamed.

    Raises:
        torch.distributed.DistBackendError: if one never does.
    """
    __tracebackhide__ = True
    cluster = runtime.cluster
    if cluster is None or runtime.peers is not None or cluster.rank not in ranks:
        return
    if os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in _NO:
        return
    members, where = ", ".join(map(str, ranks)), called_from()
    doing = f"rank {cluster.rank}: a group of gloo ({where}) of ranks {members}"
    if call is not None:
        call.compare(False, doing, limit.total_seconds())
        return
    life = runtime.lives[f"gloo {name}"] = runtime.lives.get(f"gloo {name}", 0) + 1
    cluster.board.post(f"gloo/{name}/{life}/{cluster.rank}", where)
    keys = {f"gloo/{name}/{life}/{rank}": rank for rank in ranks}
    cluster.board.read(keys, doing, limit.total_seconds())


def _is_bound(group: dist.ProcessGroup) -> bool:
    """Whether it has been made with `device_id`: groups are split from it then."""
    return group.bound_device_id is not None


def _call_it_nccl(group: dist.ProcessGroup) -> None:
    """C++, such as DDP's logger, knows a group's backend by this."""
    kind, device = dist.ProcessGroup.BackendType.NCCL, torch.device("cuda")
    group._register_backend(device, kind, raw_get_backend(group, device))
    group._set_default_backend(kind)


def _communicate(runtime, group, name: str, members, rank: int, bound, options):
    """The communicator of a new group."""
    life = runtime.lives.get(name, 0)
    runtime.lives[name] = life + 1
    # ranks that make groups of their own at the same time give them one name
    which = f"{hash(tuple(members)) & 0xFFFFFFFF:x}"
    own_name = runtime.thread.name_of_group or f"{name}.{life}.{which}"
    make = Communicator if runtime.peers is None else runtime.peers.communicator
    communicator = make(runtime.cluster, own_name, members, rank, bound, options)
    runtime.communicators[group.group_name] = communicator
    nccl = ".".join(map(str, NCCL_VERSION))
    communicator.record = flight_recorder.begin(
        runtime, group, members, nccl, watchdog.was_told
    )
    return communicator


def alone(store, rank: int, size: int, options) -> dist.ProcessGroup:
    """A group that `torch.distributed` does not know: `ProcessGroupNCCL(store, ...)`.

    Raises:
        NotSimulated: if its ranks are not those of the job.
    """
    runtime = state.current()
    if runtime.cluster is None:
        _begin_job(runtime, store, rank, size)
    if (runtime.cluster.rank, runtime.cluster.size) != (rank, size):
        raise NotSimulated("a ProcessGroupNCCL of some ranks", "Call dist.new_group().")
    name = "ProcessGroupNCCL"
    life = runtime.lives.get(name, 0)
    group = dist.ProcessGroup(store, rank, size)
    stand_in = FakeProcessGroup._create_internal(rank, size)
    kind = dist.ProcessGroup.BackendType.NCCL
    group._register_backend(torch.device("cuda"), kind, stand_in)
    group._set_default_backend(kind)
    group._set_group_name(f"{name} {life}")
    _communicate(runtime, group, name, list(range(size)), rank, None, options)
    return group


def rendezvous(*args, **kwargs):
    """The ranks of a job meet: what earlier ones left in the store is not theirs."""
    runtime = state.current()
    _end_job(runtime)
    if runtime.peers is not None:
        yield dist.HashStore(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return
    for store, rank, size in _raw_rendezvous(*args, **kwargs):
        if (number := _times_at(store, "meetings", rank)) > 1:
            store = dist.PrefixStore(f"meeting {number}", store)
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if restarts != "0" and os.environ.get("GROUP_WORLD_SIZE") == "1":
            # torchrun keeps its store; several agents count restarts differently
            store = dist.PrefixStore(f"restart {restarts}", store)
        yield store, rank, size


def _end_job(runtime) -> None:
    """Whoever keeps the store of the job before waits until the others have left it."""
    if runtime.cluster is not None:
        runtime.cluster.end()
        runtime.cluster.arena.close()
        runtime.cluster = None


def _begin_job(runtime, store, rank: int, size: int) -> None:
    """The first process group: from now on this process is a rank of a job."""
    _end_job(runtime)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    nodes = size // here if size % here == 0 else 1
    topology = Topology(runtime.request.card, size // nodes, nodes, runtime.network)
    runtime.jobs += 1
    number = _times_at(store, "jobs", rank) if runtime.peers is None else runtime.jobs
    prefix = f"simgpu {number}"
    runtime.lives.clear()  # names count from 0 again, and not on all ranks alike before
    if runtime.peers is None:
        job = Cluster(dist.PrefixStore(prefix, store), rank, size, topology)
    else:
        job = runtime.peers.cluster(prefix, rank, size, topology)
    runtime.cluster = job
    runtime.sanitizer.is_first = runtime.cluster.board.is_first
    atexit.unregister(_warn_of_leak)
    atexit.register(_warn_of_leak)
    if rank == 0 and runtime.jobs == 1 and runtime.peers is None:
        ranks = "1 rank" if size == 1 else f"{size} ranks"
        write_line(f"{ranks} on simulated GPUs: no NCCL, one simulated time for all")


def _times_at(store, what: str, rank: int) -> int:
    """How often this process has had such a thing at a store, this time included.

    All ranks have had as many there, and not in all: one may have had a job by itself.
    """
    return store.add(f"{what} of {rank}, {socket.gethostname()} {os.getpid()}", 1)


def _warn_of_leak() -> None:
    """This process ends: a group that NCCL still has is not destroyed."""
    runtime = state.running
    if runtime is None or runtime.cluster is None or not runtime.communicators:
        return
    cluster = runtime.cluster
    if cluster.pid == os.getpid():
        members = [one.member for one in runtime.communicators.values()]
        watchdog.warn_of_leak(cluster.rank, min(members), len(runtime.gpus))


def _bind_to_loopback() -> None:
    """Where all ranks are on one machine, no other need reach gloo's sockets."""
    found = os.environ
    local = found.get("LOCAL_WORLD_SIZE", "many") == found.get("WORLD_SIZE")
    if LOOPBACK and (local or found.get("MASTER_ADDR") in _LOOPBACK_ADDRESSES):
        found.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)


@functools.cache
def backends_named(spec: str) -> dict[str, str]:
    """Kind of device -> backend, for what a script has asked for."""
    if spec == "undefined":  # nothing: PyTorch takes what the machine has
        return {"cpu": "gloo", "cuda": "nccl"}
    config = distributed_c10d.BackendConfig(distributed_c10d.Backend(spec))
    return config.get_device_backend_map()


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    spec, _ = process_groups.pg_map.get(group, ("gloo", None))
    return backends_named(str(spec))


def communicator_of(group: dist.ProcessGroup) -> Communicator | None:
    """What NCCL would have for a group; None if it does not use NCCL."""
    return state.current().communicators.get(group.group_name)


def is_nccl(group: dist.ProcessGroup) -> bool:
    """Whether the group has NCCL alone, which knows only GPUs."""
    return all(map(_is_engine, backends_of(group).values()))


@functools.cache
def names_of_nccl() -> frozenset[str]:
    """Under which names this PyTorch has NCCL: more than one since 2.14."""
    kin = ("nccl-legacy", "nccl2", "nccl-lazy")
    if is_absent(ensure_backend):
        return frozenset({"nccl"})
    for name in ("nccl", *kin):
        ensure_backend(name)
    return frozenset({"nccl", *(n for n in kin if n.upper() in backend_plugins)})


def _is_engine(backend: str) -> bool:
    return backend in names_of_nccl()


def object_device(group: dist.ProcessGroup | None = None) -> str:
    """On which kind of device pickled objects travel."""
    if is_nccl(group or dist.group.WORLD):
        return "cuda"
    return raw_object_device(group)


def shutdown(group: dist.ProcessGroup) -> None:
    """`destroy_process_group`: what was launched is done before."""
    runtime = state.current()
    communicator = runtime.communicators.pop(group.group_name, None)
    if communicator is not None:
        runtime.clock.settle()
        communicator.close(runtime.gpus)
        if dist.group.WORLD is group:
            runtime.cluster.board.say_ended(", with its process group")
    _raw_shutdown(group)


def split_source(group: dist.ProcessGroup, *args) -> None:
    """`_get_split_source`: a new group is never made by NCCL's split of another."""


def supports_coalescing(backend) -> bool:
    """`Backend.supports_coalescing`: NCCL does."""
    return state.running is not None


def barrier(group: dist.ProcessGroup, *args, **kwargs):
    """C++ would make a tensor on the GPU, to find the backend by it."""
    options = kwargs.get("opts", args[0] if args else None)
    if isinstance(options, dist.BarrierOptions):
        options.device = torch.device("cpu")
    return _raw_barrier(group, *args, **kwargs)
