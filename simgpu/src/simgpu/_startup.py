"""Starts and stops the simulated GPUs of this process."""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from simgpu import _patches as patches
from simgpu import _runtime as state
from simgpu._api import (
    allocator_settings,
    autocast,
    fake_tensors,
    random_generators,
)
from simgpu._api.patch import Patches
from simgpu._compat import (
    len_function_stack,
    len_mode_stack,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
    warn_of_newer_torch,
)
from simgpu._dispatch import (  # noqa: F401 - the files register what runs operations
    attention_kernels,
    copies,
    determinism,
    factories,
    in_place,
    norms,
    packed_attention,
    scalars_elsewhere,
    special,
    sync_batch_norm,
)
from simgpu._dispatch.function_mode import FunctionMode
from simgpu._dispatch.mode import DispatchMode
from simgpu._request import Request, check_request
from simgpu._runtime import Runtime
from simgpu._timing.timeline import Timeline


def start(
    number: int = 4, card: str = "A100", memory: int | str | None = None, *,
    honour_visible: bool = False, races: str = "raise", overhead: bool | None = None,
    compile: str = "fuse",
) -> None:  # fmt: skip
    """Give this process `number` simulated GPUs.

    Starting again with the same arguments changes nothing. A thread that was running
    before, other than a pool's of `concurrent.futures`, does not see the GPUs. Should
    it fail, nothing of PyTorch stays replaced.

    Args:
        number: 1 to 64.
        card: "T4", "V100", "A100", "H100", "H200", "B200" or "L40S", one of
            `MORE_CARDS` in `_device/cards.py` ("A100-40GB", "RTX4090"), or a file that
            `simgpu measure` has written, "my.json".
        memory: of each card, in bytes or as text ("512MB"); None is all it has.
        honour_visible: whether CUDA_VISIBLE_DEVICES hides some of them, as it does
            in a new process on a real machine.
        races: what happens where two streams, or the host and a copy that it has not
            waited for, use the same memory in no order: "raise" an error; "show": the
            read returns what the memory held before; "warn":
            each two lines of the program that race are named once on stderr, and the
            values are those of the program's order; "off": nothing.
        overhead: whether libraries take memory, too: CUDA's context and NCCL's buffers
            of the card, cuBLAS's workspaces and what kernels take while they run as
            PyTorch counts it; None: if the card has all its memory.
        compile: what `torch.compile` does: "fuse": chains of pointwise operations and
            reductions are one kernel, in time, launches and memory, values are those of
            the operations; "eager": it gives back what it is given, as it is; "refuse":
            `NotSimulated`.

    Raises:
        ValueError: for a number, card, memory or way that cannot be.
        RuntimeError: if other GPUs are simulated already, if CUDA is in use for real,
            or outside the main thread.
    """
    warn_of_newer_torch()
    request = check_request(number, card, memory, races, overhead, compile)
    _check_thread("start")
    if state.running is not None:
        if state.running.request == request:
            return
        raise RuntimeError(
            f"{state.running.request.number} simulated GPUs are running; call "
            "simgpu.stop() before you start others"
        )
    runtime = Runtime(request, honour_visible)
    _begin(runtime)
    runtime.share_cards()


def _begin(runtime: Runtime) -> None:
    """Simulate the GPUs of a new runtime, where none is running."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError(
            "CUDA is in use for real in this process; simulate in a fresh one: restart "
            "the kernel or program, and start before PyTorch uses CUDA"
        )
    real_gpus()  # before they cannot be seen any more
    random_generators.give_generators(runtime)
    runtime.patches = Patches()
    state.running = runtime
    try:
        _enter(runtime)
    except BaseException:
        _exit(runtime)
        raise


@contextlib.contextmanager
def apart(runtime: Runtime) -> Iterator[None]:
    """Simulate other GPUs for a while; what is running then goes on as it was.

    What is replaced stays so, since all of it asks which runtime is the current one.

    Raises:
        RuntimeError: if CUDA is in use for real, or outside the main thread.
    """
    _check_thread("use")
    outer = state.running
    if outer is None:
        _begin(runtime)
        try:
            yield
        finally:
            _exit(runtime)
        return
    random_generators.give_generators(runtime)
    runtime.functions = outer.functions
    runtime.autocast_kernels = outer.autocast_kernels
    state.running = runtime
    try:
        allocator_settings.apply_environment()
        yield
    finally:
        outer.autocast_kernels = runtime.autocast_kernels
        for gpu in runtime.gpus:
            gpu.alive = False
        state.running = outer


def _enter(runtime: Runtime) -> None:
    """Replace what is in the table, and enter the modes."""
    runtime.patches.apply(patches.table(runtime))
    runtime.functions = runtime.patches.functions
    runtime.modes = (FunctionMode(runtime), DispatchMode(runtime))
    allocator_settings.apply_environment()
    for mode in runtime.modes:
        mode.__enter__()
    autocast.start()
    fake_tensors.start()
    runtime.norm_kernels = norms.register()


def stop() -> None:
    """Take the simulated GPUs away and restore all that `start()` replaced.

    Tensors that lived on them go on as CPU tensors. Does nothing if none is running.
    One thing stays: PyTorch's C++ remembers that CUDA was initialised, so that
    `torch.zeros(1, device="cuda")` still fails, but in other words than before.

    Raises:
        RuntimeError: outside the main thread.
    """
    _check_thread("stop")
    if state.running is not None:
        _exit(state.running)


def _exit(runtime: Runtime) -> None:
    """Undo what `_enter` did, or as much of it as was done."""
    try:
        _leave_modes(runtime)
    finally:
        fake_tensors.stop()
        if runtime.norm_kernels is not None:
            runtime.norm_kernels._destroy()
        runtime.patches.undo()
        for gpu in runtime.gpus:
            gpu.alive = False
        runtime.leave_cards()
        state.running = None


def _leave_modes(runtime: Runtime) -> None:
    """The thread has no mode of ours, and no default device that is simulated."""
    if torch.get_default_device().type == "cuda":
        torch.set_default_device(None)
    if runtime.modes:
        function_mode, dispatch_mode = runtime.modes
        _remove(
            function_mode, len_function_stack, pop_function_mode, push_function_mode
        )
        _remove(
            dispatch_mode,
            len_mode_stack,
            pop_dispatch_mode,
            push_dispatch_mode,
        )
    autocast.stop(runtime)


def _remove(
    mode: Any, length: Callable[[], int], pop: Callable[[], Any],
    push: Callable[[Any], None],
) -> None:  # fmt: skip
    """Remove `mode` from its stack, wherever other modes have left it."""
    above = []
    while length():
        top = pop()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        push(other)


def _check_thread(action: str) -> None:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(f"{action} the simulated GPUs from the main thread")


@functools.cache
def real_gpus() -> int:
    """How many GPUs this machine really has, as PyTorch sees them."""
    return torch.cuda.device_count()


def request() -> Request | None:
    """What the GPUs that are running were asked for; None if there are none."""
    return None if state.running is None else state.running.request


def is_running() -> bool:
    """Whether GPUs are simulated in this process, visible or not."""
    return state.running is not None


def count() -> int:
    """How many simulated GPUs the program sees, as `torch.cuda.device_count()` says.

    0 if none is running, and where CUDA_VISIBLE_DEVICES hides them all.
    """
    return 0 if state.running is None else state.running.count()


def installed() -> int:
    """How many simulated GPUs the machine has, whatever CUDA_VISIBLE_DEVICES hides."""
    return 0 if state.running is None else state.running.request.number


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
    state.current().clock.busy(seconds, what)


def timeline() -> Timeline:
    """The log of what ran on the simulated GPUs; it draws itself in a notebook.

    Raises:
        RuntimeError: if the simulator is not running.
    """
    return Timeline(state.current().clock)


def _after_fork() -> None:
    if state.running is not None:
        state.running.after_fork()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)
