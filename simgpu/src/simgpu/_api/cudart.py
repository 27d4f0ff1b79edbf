"""`torch.cuda.cudart()`: the calls of CUDA's runtime that PyTorch hands on.

Models: the errors' names, the memory of the card, pages that the program pins by
itself, and streams that it makes. There is no profiler to start or to stop.
"""

import ctypes

from simgpu import _runtime as state
from simgpu._api.memory import mem_get_info
from simgpu._api.streams import FIRST_EXTERNAL
from simgpu._device.blocks import stream_handle
from simgpu._dispatch.named_devices import current_gpu
from simgpu._errors import NotSimulated

# Source: cudaGetErrorString in CUDA's reference, "CUDA Runtime API"
_MESSAGES = {
    0: "no error", 1: "invalid argument", 2: "out of memory",
    3: "initialization error", 4: "driver shutting down", 34: "CUDA driver is a stub",
    35: "CUDA driver version is insufficient for CUDA runtime version",
    46: "CUDA-capable device(s) is/are busy or unavailable",
    98: "invalid device function", 100: "no CUDA-capable device is detected",
    101: "invalid device ordinal", 201: "invalid device context",
    209: "no kernel image is available for execution on the device",
    304: "OS call failed or operation not supported on this OS",
    400: "invalid resource handle", 600: "device not ready",
    700: "an illegal memory access was encountered",
    701: "too many resources requested for launch",
    702: "the launch timed out and was terminated",
    704: "peer access is already enabled", 705: "peer access has not been enabled",
    710: "device-side assert triggered",
    712: "part or all of the requested memory range is already mapped",
    713: "pointer does not correspond to a registered memory region",
    716: "misaligned address", 719: "unspecified launch failure",
    801: "operation not supported", 999: "unknown error",
}  # fmt: skip
_ALREADY_REGISTERED, _NOT_REGISTERED = 712, 713


class _Error(int):
    """The number of an error."""

    success = 0


class Cudart:
    """The module `torch._C._cudart`. Its functions return 0, or an error's number."""

    cudaError = _Error

    def cudaGetErrorString(self, error: int) -> str:
        return _MESSAGES.get(int(error), "unrecognized error code")

    def cudaProfilerStart(self) -> int:
        return 0

    def cudaProfilerStop(self) -> int:
        return 0

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:
        """Bytes of the card that are free, and that there are."""
        return mem_get_info(device)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        """Pin memory that is there; the host takes its time for it."""
        ranges = state.current().registered
        if address in ranges:
            return _ALREADY_REGISTERED
        ranges[address] = size
        state.current().clock.pin(size)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        runtime = state.current()
        size = runtime.registered.pop(address, None)
        if size is None:
            return _NOT_REGISTERED
        runtime.sanitizer.host_copies.unpinned(address, size)
        return 0

    def cudaStreamCreate(self, where: int) -> int:
        """Make a stream on the current GPU, and write its handle to an address."""
        gpu = current_gpu()
        number = next(gpu.external_streams) + FIRST_EXTERNAL
        handle = stream_handle(gpu.index, number)
        ctypes.c_uint64.from_address(where).value = handle
        return 0

    def cudaStreamDestroy(self, handle: int) -> int:
        """What it was given goes on; the handle is not used again."""
        return 0

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotSimulated(f"torch.cuda.cudart().{name}")
