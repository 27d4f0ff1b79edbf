"""A command that a program under `python -m simgpu --children` has started.

It has the same simulated GPUs. `_site/sitecustomize.py` arms it when Python starts, and
they come when it has imported PyTorch; one that never does pays a few milliseconds.
Leaves out: a Python that is told to ignore the environment (`-E`, `-I`, `-S`), and one
that imports PyTorch in another thread than the main one.
"""

import atexit
import json
import os
import signal
import sys
import threading
from importlib.machinery import PathFinder
from importlib.util import spec_from_loader
from types import ModuleType

VARIABLE = "SIMGPU_CHILDREN"  # tells children what they have, as JSON
_OF_A_RANK = {"nodes": 1, "timeline": None, "failures": None}  # not of its children

_finder = None  # of this process, until PyTorch has been imported
_failed = False


def arm(hidden: dict[str, ModuleType] | None = None) -> None:
    """Let the GPUs come once PyTorch has been imported.

    Args:
        hidden: PyTorch's modules, in a process that was forked with them.
    """
    global _finder
    words = json.loads(os.environ[VARIABLE])
    if "RANK" in os.environ:
        _lay_out(words["nodes"])
        os.environ[VARIABLE] = json.dumps(words | _OF_A_RANK)
    _finder = _AfterTorch(words, hidden)
    sys.meta_path.insert(0, _finder)


def disarm() -> None:
    """This process sees to its GPUs itself: it runs `python -m simgpu`."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
        if _finder.hidden is not None:
            from simgpu._launch import program

            sys.modules.update(_finder.hidden)
            program.renew_torch()


def come() -> None:
    """Somebody asks for the simulator before PyTorch is there: both come now."""
    if _finder in sys.meta_path:
        import torch  # noqa: F401


def _lay_out(nodes: int) -> None:
    if nodes == 1:
        return
    from simgpu._rank_variables import lay_out

    try:
        lay_out(nodes)
    except ValueError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)  # nothing of the program has begun


class _AfterTorch:
    """Finds PyTorch where it is, and starts the GPUs after it has been loaded."""

    def __init__(self, words: dict, hidden: dict[str, ModuleType] | None):
        self.words, self.hidden = words, hidden

    def find_spec(self, name, path=None, target=None):
        if name == "pynvml" and PathFinder.find_spec(name, path) is not None:
            import torch  # noqa: F401 - a stand-in comes with the GPUs

            return sys.modules[name].__spec__
        if name != "torch":
            return None
        if self.hidden is not None:
            return spec_from_loader(name, _Hidden(self.hidden, self.words))
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_start(module):
                disarm()  # not before: a program may only ask whether it is there
                load(module)
                start(self.words)

            spec.loader.exec_module = load_and_start
        return spec


class _Hidden:
    """Loads PyTorch where it is there already, and was only hidden."""

    def __init__(self, modules: dict[str, ModuleType], words: dict):
        self.modules, self.words = modules, words
        self.spec = modules["torch"].__spec__

    def create_module(self, spec):
        return self.modules["torch"]

    def exec_module(self, module):
        module.__spec__ = self.spec
        disarm()
        start(self.words)


def start(words: dict) -> None:
    """PyTorch is there: simulate GPUs, and see to the end of this process."""
    if threading.current_thread() is not threading.main_thread():
        print(
            "simgpu: PyTorch was imported outside the main thread, so this process has "
            "no simulated GPUs",
            file=sys.stderr,
            flush=True,
        )
        return
    atexit.register(_end)
    import simgpu
    from simgpu import _runtime as state

    simgpu.start(**words["gpus"])
    runtime = state.current()
    runtime.for_children, runtime.network = words["gpus"], words["network"]
    show = sys.excepthook

    def excepthook(kind, error, trace):
        global _failed
        _failed = True
        from simgpu import _failures as failures

        failures.report(kind, error, trace, show, words["failures"])

    sys.excepthook = excepthook
    if words["timeline"] is not None:
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, end_by_signal)
        # before what others registered: the job's store may go with that
        threading._register_atexit(_hand_in, words["timeline"])


def end_by_signal(number: int, frame) -> None:
    """torchrun ends a rank when another one has failed: it can hand in its log yet."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _hand_in(timeline: str) -> None:
    """What ran on the GPUs, if this process is a rank, or has used one alone."""
    from pathlib import Path

    from simgpu import _runtime as state
    from simgpu._distributed import gathering

    runtime = state.running
    if runtime is not None and (runtime.cluster is not None or runtime.initialized):
        gathering.write(Path(timeline), failed=_failed)


def _end() -> None:
    """After an error threads of gloo may still work, and would abort the process."""
    from simgpu import _runtime as state

    if _failed and state.running is not None and state.running.gloo_groups:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
