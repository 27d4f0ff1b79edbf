"""The package `pynvml` (nvidia-ml-py), and `torch.cuda.utilization()` and its kin.

A module of this name stands in `sys.modules` while GPUs are simulated, where the
package is installed; elsewhere a program cannot import it, as on a machine with GPUs,
but what `torch.cuda` asks of it is answered. Models: the
GPUs of the machine, whatever CUDA_VISIBLE_DEVICES hides; the memory that each process
of the machine has in use, with its context and the cache of its allocator; and the
share of the last second of simulated time in which kernels of this process ran.
Leaves out: clocks that change: a card always has its highest. What has no answer, such
as power, temperature or errors of memory, is an `NVMLError_NotSupported`, as of a card
that cannot tell.
"""

import functools
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType, SimpleNamespace

from simgpu import _runtime as state
from simgpu._api.devices import CUDA_VERSION
from simgpu._api.properties import DeviceProperties
from simgpu._compat import get_device_index

_NO_INSTANCE = 0xFFFFFFFF  # the card is not divided (MIG)
_PERIOD = 1.0  # seconds of simulated time that utilization is about
_DRIVER_VERSION = "580.00 (simulated)"  # the first that CUDA 13.0 runs on is an R580
# Source: NVML's reference, nvmlReturn_t
_ERRORS = {
    1: ("Uninitialized", "Uninitialized"),
    2: ("InvalidArgument", "Invalid Argument"),
    3: ("NotSupported", "Not Supported"),
    4: ("NoPermission", "Insufficient Permissions"),
    5: ("AlreadyInitialized", "Already Initialized"),
    6: ("NotFound", "Not Found"),
    9: ("DriverNotLoaded", "Driver Not Loaded"),
    12: ("LibraryNotFound", "NVML Shared Library Not Found"),
    13: ("FunctionNotFound", "Function Not Found"),
    999: ("Unknown", "Unknown Error"),
}
_CONSTANTS = {
    "NVML_SUCCESS": 0, "NVML_TEMPERATURE_GPU": 0, "NVML_CLOCK_GRAPHICS": 0,
    "NVML_CLOCK_SM": 1, "NVML_CLOCK_MEM": 2, "NVML_CLOCK_VIDEO": 3,
}  # fmt: skip
_NOT_SUPPORTED = 3  # NVML_ERROR_NOT_SUPPORTED
_MEMORY_CLOCK = 2  # NVML_CLOCK_MEM; the others are the multiprocessors'


class NVMLError(Exception):
    """An error of NVML: `NVMLError(2)` is an `NVMLError_InvalidArgument`."""

    kinds: dict[int, type] = {}

    def __new__(cls, value: int):
        kind = NVMLError.kinds.get(value, cls) if cls is NVMLError else cls
        made = Exception.__new__(kind)
        made.value = value
        return made

    def __str__(self) -> str:
        return _ERRORS.get(self.value, ("", f"NVML Error with code {self.value}"))[1]


def _error_class(value: int, name: str) -> type:
    def make(cls):
        return NVMLError.__new__(cls, value)

    kind = type(f"NVMLError_{name}", (NVMLError,), {"__new__": make})
    NVMLError.kinds[value] = kind
    return kind


class Nvml:
    """What the functions of the module answer from."""

    def __init__(self):
        self.started = 0  # calls of nvmlInit without their nvmlShutdown

    def init(self, flags: int = 0) -> None:
        self.started += 1

    def shutdown(self) -> None:
        self._check()
        self.started -= 1

    def _check(self) -> None:
        if not self.started:
            raise NVMLError(1)

    def count(self) -> int:
        self._check()
        return len(state.current().machine)

    def by_index(self, index: int):
        """A GPU of the machine; the handle of NVML is the `Gpu` itself."""
        self._check()
        machine = state.current().machine
        if not 0 <= int(index) < len(machine):
            raise NVMLError(2)
        return machine[int(index)]

    def by_uuid(self, uuid):
        self._check()
        text = uuid.decode() if isinstance(uuid, bytes) else uuid
        for gpu in state.current().machine:
            if uuid_of(gpu) == text:
                return gpu
        raise NVMLError(6)

    def memory(self, gpu, version=None) -> SimpleNamespace:
        """Bytes of the card."""
        self._check()
        total = gpu.memory.total
        used = sum(gpu.memory.share.processes().values())
        found = SimpleNamespace(total=total, free=total - used, used=used)
        if version is not None:
            found.version, found.reserved = version, 0
        return found

    def utilization(self, gpu) -> SimpleNamespace:
        """Percent of the last second in which kernels ran, and used memory."""
        self._check()
        clock = state.current().clock
        first = max(clock.host - _PERIOD, 0.0)
        ran, used = [], []
        for event in list(clock.events):
            if event.device == gpu.name and event.end > first:
                if event.kind != "copy":
                    ran.append((event.start, event.end))
                if event.nbytes:
                    used.append((event.start, event.end))
        span = (first, clock.host)
        return SimpleNamespace(gpu=_percent(ran, *span), memory=_percent(used, *span))

    def processes(self, gpu) -> list[SimpleNamespace]:
        """Those that use CUDA on a card."""
        self._check()
        found = gpu.memory.share.processes()
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=used, gpuInstanceId=_NO_INSTANCE,
                            computeInstanceId=_NO_INSTANCE)
            for pid, used in found.items()
        ]  # fmt: skip

    def no_processes(self, gpu) -> list:
        self._check()
        return []

    def clock(self, gpu, kind: int) -> int:
        """MHz."""
        self._check()
        card = gpu.card
        return (card.memory_clock if kind == _MEMORY_CLOCK else card.clock) // 1000


def uuid_of(gpu) -> str:
    return f"GPU-{DeviceProperties(gpu).uuid}"


def _percent(spans: list[tuple[float, float]], first: float, last: float) -> int:
    """Of the time from `first` to `last`, the percentage that the spans cover."""
    if last <= first:
        return 0
    covered, until = 0.0, first
    for start, end in sorted(spans):
        start, end = max(start, until), min(end, last)
        if end > start:
            covered += end - start
            until = end
    return round(100 * covered / (last - first))


def nvml_index(device=None) -> int:
    """`torch.cuda._get_nvml_device_index`: the machine's number of a GPU."""
    index = get_device_index(device, optional=True)
    gpus = state.current().gpus
    if 0 <= index < len(gpus):
        return gpus[index].ordinal
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        raise NVMLError(2)
    raise RuntimeError(
        f"device {index} is not visible (CUDA_VISIBLE_DEVICES="
        f"{[gpu.ordinal for gpu in gpus]})"
    )


class _Loader:
    """Loads the module, which is there already, for who imports it before PyTorch."""

    def __init__(self, made: ModuleType):
        self._made = made

    def create_module(self, spec) -> ModuleType:
        return self._made

    def exec_module(self, made: ModuleType) -> None:
        """Nothing is left to do."""


def module() -> ModuleType:
    """The module `pynvml`, for the runtime that is about to start."""
    made = ModuleType("pynvml", __doc__)
    made.__spec__ = importlib.machinery.ModuleSpec("pynvml", _Loader(made))
    made.__version__ = "13.0.0"
    nvml = Nvml()
    functions = {
        "nvmlInit": nvml.init,
        "nvmlInitWithFlags": nvml.init,
        "nvmlShutdown": nvml.shutdown,
        "nvmlDeviceGetCount": nvml.count,
        "nvmlDeviceGetHandleByIndex": nvml.by_index,
        "nvmlDeviceGetHandleByUUID": nvml.by_uuid,
        "nvmlDeviceGetName": lambda gpu: DeviceProperties(gpu).name,
        "nvmlDeviceGetUUID": uuid_of,
        "nvmlDeviceGetIndex": lambda gpu: gpu.ordinal,
        "nvmlDeviceGetMinorNumber": lambda gpu: gpu.ordinal,
        "nvmlDeviceGetCudaComputeCapability": lambda gpu: gpu.card.capability,
        "nvmlDeviceGetMemoryInfo": nvml.memory,
        "nvmlDeviceGetUtilizationRates": nvml.utilization,
        "nvmlDeviceGetClockInfo": nvml.clock,
        "nvmlDeviceGetMaxClockInfo": nvml.clock,
        "nvmlSystemGetDriverVersion": lambda: _DRIVER_VERSION,
        "nvmlSystemGetNVMLVersion": lambda: _DRIVER_VERSION,
        "nvmlSystemGetCudaDriverVersion": _cuda_version,
        "nvmlSystemGetProcessName": lambda pid: sys.executable,
    }
    for version in ("", "_v2", "_v3"):
        functions[f"nvmlDeviceGetComputeRunningProcesses{version}"] = nvml.processes
        functions[f"nvmlDeviceGetGraphicsRunningProcesses{version}"] = nvml.no_processes
    for name in ("nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"):
        functions[f"{name}_v2"] = functions[name]
    vars(made).update(functions, NVMLError=NVMLError, **_CONSTANTS)
    for value, (name, _) in _ERRORS.items():
        kind = _error_class(value, name)
        setattr(made, kind.__name__, kind)

    made.__getattr__ = _not_supported
    return made


def _not_supported(name: str):
    """What stands for the functions of NVML that have no answer."""
    if not name.startswith("nvml"):
        raise AttributeError(f"module 'pynvml' has no attribute {name!r}")

    def function(*args, **kwargs):
        raise NVMLError(_NOT_SUPPORTED)

    function.__name__ = name
    return function


def importing(raw, pynvml: ModuleType):
    """A function of PyTorch that may import `pynvml`, though the program may not."""

    @functools.wraps(raw)
    def ask(*args, **kwargs):
        sys.modules["pynvml"] = pynvml
        try:
            return raw(*args, **kwargs)
        finally:
            del sys.modules["pynvml"]

    return ask


def is_installed() -> bool:
    """Whether a program that imports `pynvml` finds it here."""
    if "pynvml" in sys.modules:
        return sys.modules["pynvml"] is not None
    return importlib.util.find_spec("pynvml") is not None


def _cuda_version() -> int:
    major, minor = map(int, CUDA_VERSION.split("."))
    return 1000 * major + 10 * minor
