"""What `torch._C._cuda_*` says: C++'s functions below `torch.cuda`.

PyTorch's own Python code and its tests call some of them by these names. Models: the
current GPU and stream, `_cuda_sleep` in cycles of the card's highest clock, and
warnings or errors where the host waits for a GPU (`set_sync_debug_mode`). Leaves out:
cuBLAS and cuSOLVER; their handles are numbers that no library would know.
"""

import threading
import warnings

from simgpu import _runtime as state
from simgpu._api import devices, streams
from simgpu._api.refused import refuse
from simgpu._device.blocks import stream_handle
from simgpu._device.cards import KIB
from simgpu._dispatch.named_devices import current_gpu, gpu_named

_FIRST_BLAS_HANDLE = 0x6000_0000_0000
_FIRST_SOLVER_HANDLE = 0x6100_0000_0000
_CUBLASLT_WORKSPACE = 1024 * KIB

# names of C++'s that have no model: states of pools, kernels from source, tuning
REFUSED = (
    "_cuda_checkPoolLiveAllocations", "_cuda_setCheckpointPoolState",
    "_cuda_getCheckpointState",
    "_cuda_customAllocator", "_cuda_changeCurrentAllocator", "_cuda_getAllocator",
    "_cuda_jiterator_compile_and_launch_kernel", "_cuda_allocationTraceback",
    *(
        f"_cuda_tunableop_{name}"
        for name in (
            "enable", "tuning_enable", "set_max_tuning_duration",
            "get_max_tuning_duration", "set_max_tuning_iterations",
            "get_max_tuning_iterations", "set_filename", "get_filename", "read_file",
            "get_results", "get_validators", "set_rotating_buffer_size",
            "get_rotating_buffer_size", "set_numerical_check_tolerances",
        )
    ),
    "_cuda_record_untuned_enable",
)  # fmt: skip
ABSENT_CLASSES = ("_cuda_CUDAAllocator_AllocatorState", "_cuda_CUDAAllocator")


def _device_count() -> int:
    """CUDA itself answers, and from now on keeps what it has seen."""
    return state.current().fix_visible()


def _set_device(index: int) -> None:
    devices.set_device(index)


def _has_primary_context(index: int) -> bool:
    """Whether the program has used this GPU."""
    if not 0 <= index < devices.device_count():
        raise RuntimeError(
            f"hasPrimaryContext expects a valid device index, not {index}"
        )
    runtime = state.current()
    if not devices.is_initialized():
        return False
    worked = any(gpu == index for gpu, _ in list(runtime.clock.done))
    return worked or runtime.gpus[index].memory.share.has_context


def _synchronize() -> None:
    devices.synchronize()


def _sleep(cycles: int) -> None:
    """The current stream does nothing for so many cycles of the card's clock."""
    gpu = current_gpu()
    gpu.memory.share.open_context()
    runtime = state.current()
    runtime.clock.spin(gpu, runtime.stream_of(gpu), cycles / (gpu.card.clock * 1e3))


def _stream_numbers(stream) -> tuple[int, int, int]:
    return stream.stream_id, stream.device_index, stream.device_type


def _set_stream(stream_id: int, device_index: int, device_type: int = 1) -> None:
    kind = streams.CudaStream
    streams.set_stream(kind(stream_id=stream_id, device_index=device_index))


def _raw_stream(index: int) -> int:
    """The handle of the current stream, as CUDA would know it."""
    gpu = gpu_named(index)
    return stream_handle(gpu.index, state.current().stream_of(gpu))


def _stream_from_external(handle: int, index: int) -> tuple[int, int, int]:
    return _stream_numbers(streams.ExternalStream(handle, index))


def _handle(first: int) -> int:
    """A number for this thread's handle on the current GPU."""
    thread = threading.get_ident() % 2**24
    return first + (thread << 16) + (current_gpu().index << 8)


def _can_access_peer(device: int, peer: int) -> bool:
    return devices.can_device_access_peer(device, peer)


def _workspace_size() -> int:
    return state.current().workspace_size(current_gpu())


def _lt_workspace_size() -> int:
    return state.current().blas_workspaces.get("cublaslt", _CUBLASLT_WORKSPACE)


def _set_workspace(library: str):
    def set_size(size: int) -> None:
        """What is larger than a workspace replaces it where that is used next."""
        state.current().blas_workspaces[library] = size
        _look_again()

    return set_size


def _reset_workspace(library: str):
    def reset() -> None:
        state.current().blas_workspaces.pop(library, None)
        _look_again()

    return reset


def _look_again() -> None:
    """The workspaces that there are may be too small."""
    for workspaces in _workspaces():
        workspaces.ready.clear()


def _clear_workspaces() -> None:
    for workspaces in _workspaces():
        workspaces.clear()


def _workspaces() -> list:
    """Those of each GPU, where they are counted."""
    found = [gpu.workspaces for gpu in state.current().gpus]
    return [workspaces for workspaces in found if workspaces is not None]


def _set_sync_debug_mode(mode: int) -> None:
    """What happens where the host waits for a copy: 0 nothing, 1 a warning, 2 an error.

    Raises:
        RuntimeError: for another mode.
    """
    if mode not in _SYNC_MODES:
        raise RuntimeError("invalid value of warn_level")
    runtime = state.current()
    runtime.sync_debug_mode = mode
    runtime.clock.when_host_waits = _SYNC_MODES[mode]


def _warn_of_wait() -> None:
    warnings.warn("called a synchronizing CUDA operation", stacklevel=2)


def _refuse_wait() -> None:
    raise RuntimeError("called a synchronizing CUDA operation")


_SYNC_MODES = {0: None, 1: _warn_of_wait, 2: _refuse_wait}


def _arch_flags() -> str:
    return " ".join(devices.get_arch_list())


def _compiled_version() -> int:
    major, minor = map(int, devices.CUDA_VERSION.split("."))
    return 1000 * major + 10 * minor


C_FUNCTIONS = {
    "_cuda_init": devices.init,
    "_cuda_getDevice": devices.current_device,
    "_cuda_setDevice": _set_device,
    "_cuda_exchangeDevice": devices.exchange_device,
    "_cuda_maybeExchangeDevice": devices.maybe_exchange_device,
    "_cuda_getDeviceCount": _device_count,
    "_cuda_hasPrimaryContext": _has_primary_context,
    "_cuda_canDeviceAccessPeer": _can_access_peer,
    "_cuda_synchronize": _synchronize,
    "_cuda_sleep": _sleep,
    "_cuda_getArchFlags": _arch_flags,
    "_cuda_getCompiledVersion": _compiled_version,
    "_cuda_getCurrentStream": lambda i: _stream_numbers(streams.current_stream(i)),
    "_cuda_getDefaultStream": lambda i: _stream_numbers(streams.default_stream(i)),
    "_cuda_getCurrentRawStream": _raw_stream,
    "_cuda_getStreamFromExternal": _stream_from_external,
    "_cuda_setStream": _set_stream,
    "_cuda_isCurrentStreamCapturing": lambda: False,
    "_cuda_getCurrentBlasHandle": lambda: _handle(_FIRST_BLAS_HANDLE),
    "_cuda_getCurrentSolverHandle": lambda: _handle(_FIRST_SOLVER_HANDLE),
    "_cuda_clearCublasWorkspaces": _clear_workspaces,
    "_cuda_getCublasWorkspaceSize": _workspace_size,
    "_cuda_setCublasWorkspaceSize": _set_workspace("cublas"),
    "_cuda_resetCublasWorkspaceSize": _reset_workspace("cublas"),
    "_cuda_getCublasLtWorkspaceSize": _lt_workspace_size,
    "_cuda_setCublasLtWorkspaceSize": _set_workspace("cublaslt"),
    "_cuda_resetCublasLtWorkspaceSize": _reset_workspace("cublaslt"),
    "_cuda_set_sync_debug_mode": _set_sync_debug_mode,
    "_cuda_get_sync_debug_mode": lambda: state.current().sync_debug_mode,
    "_cuda_tunableop_is_enabled": lambda: False,
    "_cuda_tunableop_tuning_is_enabled": lambda: False,
    "_cuda_record_untuned_is_enabled": lambda: False,
    **{name: refuse(f"torch._C.{name}") for name in REFUSED},
}


def absent_classes() -> dict[str, type]:
    """Classes of C++ that `torch._inductor` imports where PyTorch has CUDA."""
    return {name: type(name, (), {}) for name in ABSENT_CLASSES}
