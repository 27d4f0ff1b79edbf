"""`ProcessGroupNCCL` and its kin: what a program may ask of NCCL itself, and options.

Models: the classes as `torch.distributed` shows them, for a group whose collectives the
simulator carries; its options are kept and given back. PyTorch 2.14 has a second engine
for NCCL, `ProcessGroupNCCL2`, which 2.15 takes for "nccl"; which class a group shows is
what PyTorch itself would make. Leaves out: what the options change on a real machine,
which is speed only; that the new engine connects when the group is made, and not at its
first collective; windows, memory pools and suspending; the estimate of time.
"""

import copy
import functools
import os
import zlib
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from simgpu import _runtime as state
from simgpu._compat import (
    ErrorType,
    FakeProcessGroup,
    backend_plugins,
    distributed_C,
    raw_backend_name,
    raw_begin_sequence,
    raw_enable_timing,
    raw_get_backend,
    raw_sequence_number,
)
from simgpu._distributed import flight_recorder, groups
from simgpu._distributed.communicator import Communicator
from simgpu._errors import NotSimulated

_NOT_SET = -(2**31)  # what NCCL calls NCCL_CONFIG_UNDEF_INT
_UNTIMED = (
    "ProcessGroupNCCL OnCompletion hook requires recording start and end events which "
    "require setting TORCH_NCCL_ENABLE_TIMING environment variable. This is only "
    "available for NCCL version >= 2.4."
)
_raw_abort = dist.ProcessGroup.abort
_raw_hooks = {
    name: getattr(dist.ProcessGroup, name)
    for name in ("_register_on_completion_hook", "_wait_for_pending_works")
}
_raw_name = dist.ProcessGroup.name
_raw_set_timeout = getattr(dist.ProcessGroup, "set_timeout", None)  # since 2.14


class NCCLConfig:
    """The fields of `ncclConfig_t`, which a program may set."""

    def __init__(self):
        self.blocking = self.cga_cluster_size = self.split_share = _NOT_SET
        self.min_ctas = self.max_ctas = self.cta_policy = self.traffic_class = _NOT_SET
        self.collnet_enable = self.nvls_ctas = self.shrink_share = _NOT_SET
        self.n_channels_per_net_peer = self.nvlink_centric_sched = _NOT_SET
        self.net_name = self.comm_name = ""


class Options:
    """`ProcessGroupNCCL.Options`"""

    def __init__(self, is_high_priority_stream: bool = False):
        self.is_high_priority_stream = is_high_priority_stream
        self.config = NCCLConfig()
        self.backend = "nccl"
        self.enable_reconfigure = self.lazy_init = False  # since 2.14 and 2.15
        self._timeout = timedelta(minutes=10)
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self.split_from = None
        self.split_color = 0

    def __deepcopy__(self, memo) -> "Options":
        other = copy.copy(self)  # the group that it was split from is not copied
        other.config = copy.copy(self.config)
        return other


class _Engine:
    """The backend of a group for GPUs; collectives go to the group itself.

    Args:
        store: where its members meet.
        rank: of this process in it.
        size: of the group.
        options: of NCCL, or how long a collective may take.
    """

    own_name: str  # what `name()` says
    Options = Options
    supports_splitting = supports_coalescing = True
    supports_window = supports_reconfigure = False
    # PyTorch must come to the method, which is refused by name
    supports_time_estimate = _supports_time_estimate = supports_shrinking = True

    def __init__(self, store, rank: int, size: int, options=None):
        options = copy.deepcopy(options) if isinstance(options, Options) else options
        if not isinstance(options, Options):
            limit, options = options, Options()
            options._timeout = limit or options._timeout
        self._show(groups.alone(store, rank, size, options), options)

    @classmethod
    def of(cls, group: dist.ProcessGroup, options: Options) -> "_Engine":
        """The backend of a group that there is."""
        backend = cls.__new__(cls)
        backend._show(group, options)
        return backend

    def _show(self, group: dist.ProcessGroup, options: Options) -> None:
        self._group, self.options = group, options

    def __getattr__(self, name: str):
        if name.startswith("__") or name == "_group":
            raise AttributeError(name)
        if name in _LEFT_OUT:
            raise NotSimulated(f"{type(self).__name__}.{name}")
        return getattr(self._group, name)  # allreduce, broadcast, rank, size, ...

    @property
    def _communicator(self) -> Communicator:
        found = groups.communicator_of(self._group)
        if found is None:
            raise RuntimeError("NCCL communicator was aborted")
        return found

    def name(self) -> str:
        return self.own_name

    @property
    def uid(self) -> int:
        """Which of the process groups of this process it is."""
        return list(state.current().communicators).index(self._group.group_name)

    def comm_split_count(self) -> int:
        return self._communicator.splits

    def get_error(self):
        return ErrorType.SUCCESS

    @staticmethod
    def get_build_nccl_version() -> tuple[int, int, int]:
        return groups.NCCL_VERSION

    get_runtime_nccl_version = get_build_nccl_version

    def eager_connect_single_device(self, device) -> None:
        """Connect now and not at the first collective."""
        runtime = state.current()
        runtime.initialize_in_cpp()
        gpu = runtime.gpus[torch.device(device).index]
        self._communicator.connect(gpu, runtime.clock, "eager_connect_single_device")

    def perform_nocolor_split(self, device) -> None:
        """This rank has no part in the split: nothing is to be done."""

    def _group_start(self) -> None:
        """ncclGroupStart: what is aborted until the end goes together."""

    def _group_end(self) -> None:
        """ncclGroupEnd"""

    def _is_initialized(self) -> bool:
        return self._communicator.ordinal is not None

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout
        self._communicator.set_limit(timeout.total_seconds())

    set_timeout = _set_default_timeout

    def _verify_work_timeout(self, work, timeout: timedelta) -> bool:
        """Whether a `Work` has this time limit: here all of a group have one."""
        return timeout == self.options._timeout

    def _set_enable_nan_check(self, enable: bool) -> None:
        if enable:
            raise NotSimulated(f"{type(self).__name__}._set_enable_nan_check")

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """A collective waits for others only; it needs no more time than it has."""

    def supports_tensor_alloc(self, device) -> bool:
        return False


class ProcessGroupNCCL(_Engine):
    """PyTorch's engine until 2.14: "nccl", and later "nccl-legacy"."""

    own_name = "nccl"
    NCCLConfig = NCCLConfig
    NCCL_CTA_POLICY_DEFAULT, NCCL_CTA_POLICY_EFFICIENCY = 0, 1
    NCCL_CTA_POLICY_ZERO = 2
    NCCL_SPLIT_NOCOLOR = -1


class ProcessGroupNCCL2(_Engine):
    """The engine that came with 2.14 as "nccl2", and is "nccl" since 2.15.

    Args:
        store, rank, size, options: as of the older one.
        device_id: over which GPU it connects.
    """

    own_name = "nccl2"

    def __init__(self, store, rank: int, size: int, options=None, device_id=None):
        super().__init__(store, rank, size, options)
        self.bound_device_id = device_id


class ProcessGroupNCCLLazy(ProcessGroupNCCL2):
    """The same, with a communicator of its own for each two ranks: "nccl-lazy"."""

    own_name = "nccl-lazy"


# what creates the backend in `distributed_c10d` -> the class that it makes
_ENGINES = {
    "_create_nccl_process_group": ProcessGroupNCCL,
    "_create_nccl2_process_group": ProcessGroupNCCL2,
    "_create_nccl_lazy_process_group": ProcessGroupNCCLLazy,
}
_LEFT_OUT = frozenset({
    "allocate_tensor", "register_mem_pool", "deregister_mem_pool", "mem_allocator",
    "new_window", "suspend", "resume", "memory_stats", "shrink", "merge", "reconfigure",
    "get_reconfigure_handle", "comm_ptr", "_comm_ptr", "register_abort_hook",
    "unregister_abort_hook", "allreduce_sparse", "split", "_num_active_channels",
    "setUsePgForSymmMemRendezvous", "_start_time_estimate", "_end_time_estimate",
})  # fmt: skip


def _class_of(backend: str) -> type[_Engine]:
    """The class of PyTorch's that "nccl" or one of its kin stands for."""
    plugin = backend_plugins.get(backend.upper())
    creator = None if plugin is None else plugin.creator_fn.__name__
    return _ENGINES.get(creator, ProcessGroupNCCL)


def engines() -> dict[str, type[_Engine]]:
    """The classes that this PyTorch has under `torch.distributed`."""
    known = groups.names_of_nccl()
    return {
        kind.__name__: kind
        for kind, name in ((ProcessGroupNCCL, "nccl"), (ProcessGroupNCCL2, "nccl2"),
                           (ProcessGroupNCCLLazy, "nccl-lazy"))
        if name in known
    }  # fmt: skip


def get_backend(group: dist.ProcessGroup, device):
    """`ProcessGroup._get_backend`: for GPUs, NCCL's."""
    communicator = groups.communicator_of(group)
    if communicator is None or torch.device(device).type != "cuda":
        return raw_get_backend(group, device)
    if communicator.backend is None:
        kind = _class_of(communicator.engine)
        communicator.backend = kind.of(group, communicator.options)
    return communicator.backend


def name(group: dist.ProcessGroup) -> str:
    """`ProcessGroup.name`"""
    communicator = groups.communicator_of(group)
    if communicator is None:
        return _raw_name(group)
    return _class_of(communicator.engine).own_name


def backend_name(group: dist.ProcessGroup) -> str:
    """`ProcessGroup._get_backend_name`"""
    communicator = groups.communicator_of(group)
    if communicator is None:
        return raw_backend_name(group)
    return _class_of(communicator.engine).own_name


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """`ProcessGroup.set_timeout`, new in 2.14: that of each of its backends."""
    _raw_set_timeout(group, timeout)
    if groups.communicator_of(group) is not None:
        get_backend(group, torch.device("cuda")).set_timeout(timeout)


def since_2_14() -> dict[str, object]:
    """Methods of `ProcessGroup` that older PyTorch does not have."""
    return {} if _raw_set_timeout is None else {"set_timeout": set_timeout}


def flattens(communicator: Communicator) -> bool:
    """Whether lists of tensors go through one that is made for it."""
    return not issubclass(_class_of(communicator.engine), ProcessGroupNCCL2)


def enable_timing(group: dist.ProcessGroup) -> None:
    """`_enable_collectives_timing`: each `Work` from now on has its duration."""
    communicator = groups.communicator_of(group)
    if communicator is None:
        raw_enable_timing(group)
    else:
        communicator.is_timed = True


def register_on_completion_hook(group: dist.ProcessGroup, hook) -> None:
    """`_register_on_completion_hook`

    Raises:
        ValueError: if timing was not enabled, in PyTorch's words.
        NotSimulated: otherwise; a thread of NCCL's would call the hook.
    """
    communicator = groups.communicator_of(group)
    if communicator is None:
        _raw_hooks["_register_on_completion_hook"](group, hook)
        return
    if not communicator.is_timed:
        raise ValueError(_UNTIMED)
    raise NotSimulated(
        "ProcessGroup._register_on_completion_hook",
        "Ask Work._get_duration(), or the timeline.",
    )


def wait_for_pending_works(group: dist.ProcessGroup) -> None:
    """`_wait_for_pending_works`: all that was launched has ended, and its hooks."""
    if groups.communicator_of(group) is None:
        _raw_hooks["_wait_for_pending_works"](group)
        return
    clock = state.current().clock
    for collective in groups.communicator_of(group).stashed:
        clock.wait_for_position(collective.position)


def sequence_number(group: dist.ProcessGroup) -> int:
    """`ProcessGroup._get_sequence_number_for_group`: collectives so far."""
    communicator = groups.communicator_of(group)
    if communicator is None:
        return raw_sequence_number(group)
    return communicator.launched


def begin_sequence(group: dist.ProcessGroup) -> None:
    """`ProcessGroup._set_sequence_number_for_group`: NCCL counts anyway."""
    if groups.communicator_of(group) is None:
        raw_begin_sequence(group)


def unique_id() -> bytes:
    """`torch.cuda.nccl.unique_id`: as long as NCCL's, and as random."""
    return os.urandom(128)


def abort(group: dist.ProcessGroup) -> None:
    """`ProcessGroup.abort`: what is under way is given up, and nobody waits for it."""
    runtime = state.current()
    communicator = runtime.communicators.pop(group.group_name, None)
    if communicator is None:
        _raw_abort(group)
        return
    communicator.give_up()
    communicator.close(runtime.gpus)


def unwrapped(raw):
    """TORCH_DISTRIBUTED_DEBUG=DETAIL: `fingerprints` compares for what stands in."""

    def create_process_group_wrapper(wrapped_pg, *args, **kwargs):
        if isinstance(wrapped_pg, FakeProcessGroup):
            return wrapped_pg
        return raw(wrapped_pg, *args, **kwargs)

    return create_process_group_wrapper


def recorders() -> dict[str, Callable]:
    """The flight recorder's functions that name a backend (since 2.15).

    Without a name, and before, they tell of gloo, which records for itself.
    """
    ours = {"_dump_fr_trace": flight_recorder.dump,
            "_dump_fr_trace_json": flight_recorder.dump_json,
            "_dump_fr_trace_file": flight_recorder.write_file,
            "_reset_fr_trace": flight_recorder.reset}  # fmt: skip
    known = {name: getattr(distributed_C, name, None) for name in ours}
    return {n: _by_backend(raw, ours[n]) for n, raw in known.items() if raw}


def _by_backend(raw: Callable, ours: Callable) -> Callable:
    """NCCL's recorder answers for its backends, C++ for all others."""

    @functools.wraps(raw)
    def told(*args, **kwargs):
        backend = kwargs.get("backend", next((a for a in args if type(a) is str), ""))
        if not backend.startswith("nccl"):
            return raw(*args, **kwargs)
        kwargs.pop("backend", None)
        return ours(*(a for a in args if type(a) is not str), **kwargs)

    return told


def hash_tensors(tensors: list[torch.Tensor]) -> int:
    """`_hash_tensors`, which NCCL's builds have: a number that PyTorch only logs."""
    return zlib.crc32(b"".join(tensor.cpu().numpy().tobytes() for tensor in tensors))
