"""Where compiled code begins and ends.

A call of a compiled module or function is a region, and so is its part of the backward
pass, from the gradients of its results to those of its inputs. Compiled code within
compiled code belongs to the outer one.
"""

import functools
from collections.abc import Callable, Iterator

import torch
from torch import nn

from simgpu import _runtime as state
from simgpu._compat import current_graph_task_id, execution_engine
from simgpu._dispatch import sanitizing
from simgpu._dispatch.placement import DeviceMemory, memory_of
from simgpu._fusing.call import FusingCall
from simgpu._fusing.fusing import Fusing
from simgpu._fusing.kernels import Lazy


def compiled(model):
    """What `torch.compile` gives back: the same module, or a function around one."""
    if isinstance(model, nn.Module):
        model.compile()  # which calls this with a method, around which hooks run
        return model

    @functools.wraps(model)
    def call(*args, **kwargs):
        __tracebackhide__ = True
        fusing = getattr(state.running, "fusing", None)
        if fusing is None or fusing.region is not None or not _fuses(state.running):
            return model(*args, **kwargs)
        return _Region(fusing).run(model, args, kwargs)

    return call


def in_memory(memory: DeviceMemory | None) -> DeviceMemory | None:
    """A mark of which the program asks where it is: it is written now."""
    if type(memory) is Lazy and memory.node is not None:
        state.current().fusing.write_now(memory)
    return memory


def begin(runtime) -> bool:
    """From now on operations may be parts of compiled code; False if they cannot be."""
    if runtime.fusing is None and runtime.call_kind in (None, runtime.usual_kind):
        runtime.fusing = Fusing(runtime)
        runtime.call_kind = runtime.usual_kind = runtime.usual_kind or FusingCall
    return runtime.fusing is not None


def _fuses(runtime) -> bool:
    """Whether operations can be fused now; those of a CUDA graph are not."""
    return runtime.call_kind is runtime.usual_kind


class _Region:
    """One call of compiled code, and its backward pass."""

    def __init__(self, fusing):
        self.fusing = fusing

    def run(self, function: Callable, args: tuple, kwargs: dict):
        __tracebackhide__ = True
        fusing, results = self.fusing, []
        fusing.enter(self)
        try:
            out = function(*args, **kwargs)
            results = list(_tensors(out))
        finally:
            fusing.leave(results)
        runtime = fusing.runtime
        if runtime.sanitizer.mode != "off":
            written = [t for t in results if type(memory_of(t)) is Lazy]
            sanitizing.after_compiled(runtime, written)
        if torch.is_grad_enabled():
            self._follow_gradients(results, _tensors((args, kwargs)))
        return out

    def _follow_gradients(self, results, inputs) -> None:
        before = {t.grad_fn for t in inputs if t.grad_fn is not None}
        after = {t.grad_fn for t in results if t.grad_fn is not None} - before
        for node in after:
            node.register_prehook(self._begin)
        for node in before if after else ():
            node.register_prehook(self._end)

    def _begin(self, _gradients) -> None:
        fusing = self.fusing
        if fusing.region is self or fusing.runtime is not state.running:
            return
        if not _fuses(fusing.runtime):
            return
        if fusing.region is not None:
            fusing.leave(None)
        fusing.enter(self)
        if current_graph_task_id() != -1:
            execution_engine.queue_callback(self._end)

    def _end(self, *_gradients) -> None:
        if self.fusing.region is self:
            self.fusing.leave(None)


def _tensors(value) -> Iterator[torch.Tensor]:
    """The tensors in what a function takes or returns."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dataclass_fields__"):
        yield from _tensors(vars(value))
