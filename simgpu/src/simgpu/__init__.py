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
    "CARDS": "simgpu._device.cards",
    "Messages": "simgpu._messages",
    "NotSimulated": "simgpu._errors",
    "Timeline": "simgpu._timing.timeline",
    "RankError": "simgpu._ranks.report",
    "Ranks": "simgpu._ranks.notebook",
    "RanksFailed": "simgpu._ranks.run_ranks",
    "RaceError": "simgpu._sanitizer.report",
    "Estimate": "simgpu._estimates",
    "cap_memory": "simgpu._ranks.gpus",
    "check_request": "simgpu._request",
    "count": "simgpu._startup",
    "estimate": "simgpu._estimates",
    "estimate_collective": "simgpu._estimates",
    "host_busy": "simgpu._startup",
    "installed": "simgpu._startup",
    "is_running": "simgpu._startup",
    "prove": "simgpu._prove",
    "real_gpus": "simgpu._startup",
    "request": "simgpu._startup",
    "run_ranks": "simgpu._ranks.run_ranks",
    "start": "simgpu._startup",
    "stop": "simgpu._startup",
    "timeline": "simgpu._startup",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name in _HOMES:
        if "simgpu._child_commands" in sys.modules:  # the GPUs may be about to come
            sys.modules["simgpu._child_commands"].come()
        if _HOMES[name] in ("simgpu._startup", "simgpu._estimates"):
            importlib.import_module("simgpu._compat").check_packages()
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'simgpu' has no attribute {name!r}")


def __dir__() -> "list[str]":
    return sorted([*globals(), *_HOMES])
