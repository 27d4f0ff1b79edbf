"""Simulated GPUs: N pretend CUDA devices in this process, for code that is real.

    from helpers import simgpu
    simgpu.start(4)                      # now torch.cuda.device_count() == 4
    torch.ones(3, device="cuda:2").device
    simgpu.stop()                        # everything is as it was

Numbers are computed on the CPU and are real; devices and their errors are PyTorch's;
memory and time are counted by a model, never measured. What is not supported raises
`NotSimulated`.
"""

import contextlib
import functools
import os
import threading
from concurrent.futures.thread import _WorkItem
from types import FunctionType, ModuleType

import torch
from torch.overrides import _len_torch_function_stack, _pop_mode, _push_mode
from torch.utils import _python_dispatch

from helpers.simgpu import (
    autocast,
    cuda_api,
    distributed,
    parallel,
    placement,
    streams,
    sync_batch_norm,  # noqa: F401 - adds its operations
    tensor_api,
)
from helpers.simgpu.cards import Card, find_card, parse_memory
from helpers.simgpu.clock import Clock
from helpers.simgpu.placement import Functions, Gpu, NotSimulated, Placement
from helpers.simgpu.races import WAYS, Races
from helpers.simgpu.timeline import Timeline

__all__ = ["NotSimulated", "count", "host_busy", "start", "stop", "timeline"]

MOST_GPUS = 64
_INVALID_ORDINAL = (
    "CUDA error: invalid device ordinal\n"
    "GPU device may be out of range, do you have enough GPUs?\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so "
    "the stacktrace below might be incorrect.\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)
_BAD_FORK = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with "
    "multiprocessing, you must use the 'spawn' start method"
)


class Simulator:
    """A machine with simulated GPUs. `start()` makes one, `stop()` ends it."""

    def __init__(self, number: int, card: str, memory, honour_visible, races: str):
        self.request = (*check_request(number, card, memory), races)
        self.number, self.card, self.total, _ = self.request
        self.honour_visible = honour_visible
        self.seen = False  # the program looked for GPUs: the visible ones are fixed
        self.initialized = False  # and it has used one
        self.forked = False  # this is a forked child, where CUDA cannot be used
        self.thread = placement._PerThread()
        self.gpus = self._make(range(number))
        for gpu in self.gpus:
            gpu.generator = cuda_api.new_generator(gpu)
        self.generators = [gpu.generator for gpu in self.gpus]
        self.races = Races(races)
        self.clock = Clock(self.gpus, self.races)
        for gpu in self.gpus:
            gpu.memory.clock = self.clock
        self.handlers = tensor_api.handlers()
        self.undo: list[tuple[object, str, object]] = []
        self.modes = (Functions(self, self.handlers), Placement(self))

    def _make(self, ordinals) -> list[Gpu]:
        return [Gpu(i, self.card, self.total, n) for i, n in enumerate(ordinals)]

    def count(self) -> int:
        """GPUs that the program can see; asking does not initialise CUDA."""
        if self.honour_visible and not self.seen:
            return len(cuda_api.visible_ordinals(self.number))
        return len(self.gpus)

    def see(self) -> int:
        """How many GPUs there are; from now on the environment is not read again."""
        if not self.seen:
            self.seen = True
            if self.honour_visible:
                ordinals = cuda_api.visible_ordinals(self.number)
                self.gpus[:] = [self.gpus[n] for n in ordinals]
                self.generators[:] = [gpu.generator for gpu in self.gpus]
                for index, gpu in enumerate(self.gpus):
                    gpu.ordinal = ordinals[index]
                    gpu.index = gpu.memory.index = index
                    gpu.device = torch.device("cuda", index)
                self.clock.clear()
        return len(self.gpus)

    def initialize(self) -> None:
        """Use CUDA for the first time.

        Raises:
            RuntimeError: in a forked child, and where no GPU is visible.
        """
        if self.forked:
            raise RuntimeError(_BAD_FORK)
        if not self.see():
            raise RuntimeError("No CUDA GPUs are available")
        self.initialized = True

    def find(self, device) -> Gpu | None:
        """The GPU that `device` names (None for the host).

        Raises:
            torch.AcceleratorError: for an index that does not exist.
            RuntimeError: in a forked child.
        """
        if isinstance(device, int):
            device = torch.device("cuda", device)
        if device.type == "cpu":
            return None
        if device.type != "cuda":
            raise NotSimulated(f"the device {str(device)!r}")
        if not self.initialized or self.forked:
            self.initialize()
        index = device.index
        if index is None:  # in backward, each node makes its own GPU the current one
            gpu = placement.gpu_of_backward()
            index = self.thread.current if gpu is None else gpu.index
        if index >= len(self.gpus):
            raise torch.AcceleratorError(_INVALID_ORDINAL)
        return self.gpus[index]

    def log_copy(self, source: Gpu | None, target: Gpu | None, nbytes: int) -> None:
        """Log a small copy that PyTorch makes by itself; the host waits for it."""
        if not self.thread.quiet:
            ends = [gpu for gpu in (source, target) if gpu is not None]
            numbers = [self.thread.streams.get(gpu.index, 0) for gpu in ends]
            self.clock.copy(source, target, nbytes, numbers)

    @contextlib.contextmanager
    def in_this_thread(self):
        """Modes are per thread: enter them, unless this thread has."""
        stack = _python_dispatch._get_current_dispatch_mode_stack()
        if any(isinstance(mode, Placement) for mode in stack):
            yield
        else:
            with Functions(self, self.handlers), Placement(self):
                yield

    # -- on and off ------------------------------------------------------------------

    def table(self) -> list[tuple[object, str, object]]:
        """Everything that is replaced: (owner, attribute, new value)."""
        return [
            *tensor_api.replacements(),
            *cuda_api.replacements(self),
            *streams.replacements(),
            *parallel.replacements(),
            *distributed.replacements(),
            *autocast.replacements(),
            (threading.Thread, "_bootstrap_inner", _in_every_thread),
            (_WorkItem, "run", _in_every_pool),
        ]

    def enter(self) -> None:
        """Apply the table and enter the modes."""
        for owner, name, new in self.table():
            old = vars(owner).get(name, _ABSENT)
            self.undo.append((owner, name, old))
            if isinstance(owner, ModuleType) and isinstance(new, FunctionType):
                new = _while_running(new, old)
            setattr(owner, name, new)
            _share_name_in_torchscript(old, new)
        for mode in self.modes:
            mode.__enter__()
        autocast.start()

    def exit(self) -> None:
        """Undo what `enter` did, whatever was put on top of it since."""
        if torch.get_default_device().type == "cuda":
            torch.set_default_device(None)
        functions, dispatch = self.modes
        _take_out(functions, _len_torch_function_stack, _pop_mode, _push_mode)
        _take_out(
            dispatch,
            _python_dispatch._len_torch_dispatch_stack,
            _python_dispatch._pop_mode,
            _python_dispatch._push_mode,
        )
        autocast.stop()
        while self.undo:
            owner, name, old = self.undo.pop()
            if vars(owner).get(name) is not old:
                _builtins.pop(id(vars(owner).get(name)), None)
            if old is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
        for gpu in self.gpus:
            gpu.alive = False


_ABSENT = object()
_builtins = (
    torch.jit._builtins._get_builtin_table()
)  # id of a function -> its operation


def _share_name_in_torchscript(old, new) -> None:
    """TorchScript, which has code of its own for `old`, has the same for `new`."""
    if id(old) in _builtins and new is not old:
        _builtins[id(new)] = _builtins[id(old)]


def _while_running(new, old):
    """`new`, which other modules may keep: `old` again once no GPUs are simulated."""
    if old is _ABSENT:
        return new

    @functools.wraps(new)
    def either(*args, **kwargs):
        __tracebackhide__ = True
        return (old if placement.running is None else new)(*args, **kwargs)

    return either


_raw_bootstrap_inner = threading.Thread._bootstrap_inner
_raw_run_in_pool = _WorkItem.run


def _take_out(mode, length, pop, push) -> None:
    """Remove `mode` from its stack, wherever other modes have left it."""
    above = []
    while length():
        top = pop()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        push(other)


def _in_every_thread(thread) -> None:
    """Modes are per thread: each new thread enters the simulator's own pair."""
    sim = placement.running
    if sim is None:
        return _raw_bootstrap_inner(thread)
    with Functions(sim, sim.handlers), Placement(sim), parallel.time_of(thread, sim):
        return _raw_bootstrap_inner(thread)


def _in_every_pool(item, *args) -> None:
    """The threads of a pool may be older than the simulator."""
    sim = placement.running
    if sim is None:
        return _raw_run_in_pool(item, *args)
    with sim.in_this_thread(), parallel.time_of_item(item, sim):
        return _raw_run_in_pool(item, *args)


def _after_fork() -> None:
    """Another thread may have held a lock at that moment; it is not here to free it."""
    placement._random_lock._at_fork_reinit()
    distributed.made = 0  # the groups are the parent's
    if placement.running is not None:
        placement.running.forked = placement.running.seen
        placement.running.races.lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)


def start(
    number: int = 4, card: str = "A100", memory=None, *, honour_visible: bool = False,
    races: str = "raise",
) -> None:  # fmt: skip
    """Give this process `number` simulated GPUs.

    Starting again with the same arguments changes nothing. A thread that was running
    before, other than a pool's of `concurrent.futures`, does not see the GPUs.

    Args:
        number: 1 to 64.
        card: "T4", "A100", "H100" or "H200".
        memory: of each card, in bytes or as text ("512MB"); None is all it has.
        honour_visible: whether CUDA_VISIBLE_DEVICES hides some of them, as it does
            in a new process on a real machine.
        races: what happens where two streams use the same memory in no order: "raise"
            an error; or "show": the read returns what the memory held before.

    Raises:
        ValueError: for a number, card, memory or way with races that cannot be.
        RuntimeError: if other GPUs are simulated already, if CUDA is in use for real,
            or outside the main thread.

    Taught in 00-start-here.
    """
    if races not in WAYS:
        raise ValueError(f"races={races!r}; use one of {', '.join(WAYS)}")
    sim = Simulator(number, card, memory, honour_visible, races)
    _check_thread("start")
    if is_running(number, card, memory, races):
        return
    if placement.running is not None:
        raise RuntimeError(
            f"{placement.running.number} simulated GPUs are running; call "
            "simgpu.stop() before you start others"
        )
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "CUDA is in use for real in this process; simulate in a fresh one "
            "(restart the kernel)"
        )
    placement.running = sim
    sim.enter()


def check_request(number: int, card: str, memory) -> tuple[int, Card, int]:
    """A request for GPUs as (number, card, bytes of memory each).

    Raises:
        ValueError: for a number, card or memory that cannot be.
    """
    if not isinstance(number, int) or isinstance(number, bool):
        raise ValueError(f"the number of GPUs must be a whole number, not {number!r}")
    if not 1 <= number <= MOST_GPUS:
        raise ValueError(f"{number} GPUs cannot be simulated; choose 1 to {MOST_GPUS}")
    found = find_card(card)
    total = found.total_memory if memory is None else parse_memory(memory)
    if total > found.total_memory:
        raise ValueError(f"a {card} does not have {memory} of memory")
    return number, found, total


def is_running(number: int, card: str, memory, races: str = "raise") -> bool:
    """Whether just these GPUs are simulated already."""
    running = placement.running
    if running is None:
        return False
    return running.request == (*check_request(number, card, memory), races)


def stop() -> None:
    """Take the simulated GPUs away and restore all that `start()` replaced.

    Tensors that lived on them go on as CPU tensors. Does nothing if none is running.
    One thing stays: PyTorch's C++ remembers that CUDA was initialised, so that
    `torch.zeros(1, device="cuda")` still fails, but in other words than before.

    Raises:
        RuntimeError: outside the main thread.
    """
    _check_thread("stop")
    if placement.running is not None:
        placement.running.exit()
        placement.running = None


def _check_thread(action: str) -> None:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(f"{action} the simulated GPUs from the main thread")


def count() -> int:
    """How many simulated GPUs are running; 0 for none."""
    return 0 if placement.running is None else placement.running.number


def host_busy(seconds: float, what: str = "busy") -> None:
    """Let the simulated host do something else for so long, such as loading a batch.

    Its clock counts launches and waits, and no Python; this moves it on. Work that was
    launched before goes on meanwhile. The timeline shows `what` in the host's lane.

    Raises:
        RuntimeError: if the simulator is not running.
        ValueError: for negative seconds.
    """
    if not seconds >= 0:
        raise ValueError(f"the host cannot be busy for {seconds} seconds")
    placement.current().clock.busy(seconds, what)


def timeline() -> Timeline:
    """The log of what ran on the simulated GPUs; it draws itself in a notebook.

    Raises:
        RuntimeError: if the simulator is not running.
    """
    return Timeline(placement.current().clock)
