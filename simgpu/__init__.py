"""Simulated GPUs: N pretend CUDA devices in this process, for code that is real.

    import simgpu
    simgpu.start(4)                      # now torch.cuda.device_count() == 4
    torch.ones(3, device="cuda:2").device
    simgpu.stop()                        # everything is as it was

Numbers are computed on the CPU and are real; devices and their errors are PyTorch's;
memory and time are counted by a model, never measured. What is not supported raises
`NotSimulated`.

Importing this package costs nothing: each name below is loaded when it is first used,
so that pytest, which looks at the plugin in every run, need not import PyTorch.
"""

import importlib
import sys

# public name -> the module that defines it
_HOMES = {
    "CARDS": "simgpu.device.cards",
    "NotSimulated": "simgpu.errors",
    "Timeline": "simgpu.timing.timeline",
    "RaceError": "simgpu.sanitizer.report",
    "Estimate": "simgpu.estimates",
    "check_request": "simgpu.asked",
    "count": "simgpu.startup",
    "estimate": "simgpu.estimates",
    "estimate_collective": "simgpu.estimates",
    "host_busy": "simgpu.startup",
    "installed": "simgpu.startup",
    "is_running": "simgpu.startup",
    "request": "simgpu.startup",
    "start": "simgpu.startup",
    "stop": "simgpu.startup",
    "timeline": "simgpu.startup",
}
__all__ = [
    "CARDS", "Estimate", "NotSimulated", "RaceError", "count", "estimate",
    "estimate_collective", "host_busy", "installed", "is_running", "start", "stop",
    "timeline",
]  # fmt: skip


def __getattr__(name: str):
    if name in _HOMES:
        if "simgpu.inherit" in sys.modules:  # the GPUs may be about to come
            sys.modules["simgpu.inherit"].come()
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'simgpu' has no attribute {name!r}")


def __dir__() -> "list[str]":
    return sorted([*globals(), *_HOMES])
