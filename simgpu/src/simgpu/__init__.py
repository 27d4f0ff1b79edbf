"""Simulated GPUs: N pretend CUDA devices in this process, for code that is real.

    import simgpu
    simgpu.start(4)                      # now torch.cuda.device_count() == 4
    torch.ones(3, device="cuda:2").device
    simgpu.stop()                        # everything is as it was

Numbers are computed on the CPU and are real; devices and their errors are PyTorch's;
memory and time are counted by a model, never measured. What is not supported raises
`NotSimulated`.

What is public: the names in `__all__`, the modules `simgpu.costs` (constants and
formulas of the model), `simgpu.pictures` (drawing) and `simgpu.pytest_plugin`, and the
command `simgpu`. Everything else has an underscore and may change in any release.

Importing this package costs nothing: each name below is loaded when it is first used,
so that pytest, which looks at the plugin in every run, need not import PyTorch.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors read; at run time see `_HOMES`
    from simgpu._device.allocator import CachingAllocator
    from simgpu._device.cards import CARDS, Card, find_card
    from simgpu._device.sizes import parse_memory, show_bytes
    from simgpu._distributed.messages import Message
    from simgpu._dry.api import DryRunFailed, dry_run
    from simgpu._dry.report import DryReport
    from simgpu._errors import NotSimulated
    from simgpu._estimates import Estimate, Kernels, estimate, estimate_collective
    from simgpu._frames import add_foreign as hide_frames
    from simgpu._frames import is_program_code
    from simgpu._messages import Messages
    from simgpu._plan.search import Plan, PlannedLayout, plan
    from simgpu._prove import Finding, Report, assert_same_on_worlds, prove
    from simgpu._ranks.notebook import Ranks
    from simgpu._ranks.notebook import close as close_ranks
    from simgpu._ranks.notebook import current as current_ranks
    from simgpu._ranks.rank_error import RankError
    from simgpu._ranks.run_ranks import RanksFailed, run_ranks
    from simgpu._ranks.which_gpus import cap_memory
    from simgpu._request import Request, check_request
    from simgpu._sanitizer.race_report import RaceError
    from simgpu._startup import (
        count,
        host_busy,
        installed,
        is_running,
        real_gpus,
        request,
        start,
        stop,
        timeline,
    )
    from simgpu._timing.events import Event, Wait
    from simgpu._timing.job import JobTimeline, Lane, RankLog
    from simgpu._timing.timeline import Timeline, Totals
    from simgpu._timing.topology import Network

__version__ = "0.3.0"  # the only place: pyproject.toml reads it from here

__all__ = [
    "CARDS", "CachingAllocator", "Card", "DryReport", "DryRunFailed", "Estimate",
    "Event", "Finding", "JobTimeline", "Kernels", "Lane", "Message", "Messages",
    "Network", "NotSimulated", "Plan", "PlannedLayout", "RaceError", "RankError",
    "RankLog", "Ranks", "RanksFailed", "Report", "Request", "Timeline", "Totals",
    "Wait", "__version__", "assert_same_on_worlds", "cap_memory", "check_request",
    "close_ranks", "count", "current_ranks", "dry_run", "estimate",
    "estimate_collective", "find_card", "hide_frames", "host_busy", "installed",
    "is_program_code", "is_running", "parse_memory", "plan", "prove", "real_gpus",
    "request", "run_ranks", "show_bytes", "start", "stop", "timeline",
]  # fmt: skip

# public name -> the module that defines it, and there its name, if it has another
_HOMES = {
    "CARDS": "_device.cards",
    "CachingAllocator": "_device.allocator",
    "Card": "_device.cards",
    "DryReport": "_dry.report",
    "DryRunFailed": "_dry.api",
    "Estimate": "_estimates",
    "Event": "_timing.events",
    "Finding": "_prove",
    "JobTimeline": "_timing.job",
    "Kernels": "_estimates",
    "Lane": "_timing.job",
    "Message": "_distributed.messages",
    "Messages": "_messages",
    "Network": "_timing.topology",
    "NotSimulated": "_errors",
    "Plan": "_plan.search",
    "PlannedLayout": "_plan.search",
    "RaceError": "_sanitizer.race_report",
    "RankError": "_ranks.rank_error",
    "RankLog": "_timing.job",
    "Ranks": "_ranks.notebook",
    "RanksFailed": "_ranks.run_ranks",
    "Report": "_prove",
    "Request": "_request",
    "Timeline": "_timing.timeline",
    "Totals": "_timing.timeline",
    "Wait": "_timing.events",
    "assert_same_on_worlds": "_prove",
    "cap_memory": "_ranks.which_gpus",
    "check_request": "_request",
    "close_ranks": "_ranks.notebook:close",
    "count": "_startup",
    "current_ranks": "_ranks.notebook:current",
    "dry_run": "_dry.api",
    "estimate": "_estimates",
    "estimate_collective": "_estimates",
    "find_card": "_device.cards",
    "hide_frames": "_frames:add_foreign",
    "host_busy": "_startup",
    "installed": "_startup",
    "is_program_code": "_frames",
    "is_running": "_startup",
    "parse_memory": "_device.sizes",
    "plan": "_plan.search",
    "prove": "_prove",
    "real_gpus": "_startup",
    "request": "_startup",
    "run_ranks": "_ranks.run_ranks",
    "show_bytes": "_device.sizes",
    "start": "_startup",
    "stop": "_startup",
    "timeline": "_startup",
}
_MODULES = ("costs", "pictures", "pytest_plugin")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"simgpu.{name}")
    if name in _HOMES:
        if "simgpu._child_commands" in sys.modules:  # the GPUs may be about to come
            sys.modules["simgpu._child_commands"].come()
        home, _, there = _HOMES[name].partition(":")
        if home in ("_startup", "_estimates", "_dry.api", "_plan.search"):
            importlib.import_module("simgpu._compat").check_packages()
        return getattr(importlib.import_module(f"simgpu.{home}"), there or name)
    raise AttributeError(f"module 'simgpu' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_MODULES])
