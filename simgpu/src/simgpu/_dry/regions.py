"""Where compiled code begins and ends: `torch.compile` under `--compile fuse`.

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


def compiled(model):
    """What `torch.compile` gives back: the same module, or a function around one."""
    if isinstance(model, nn.Module):
        model.compile()  # which calls this with a method, around which hooks run
        return model

    @functools.wraps(model)
    def call(*args, **kwargs):
        dry = getattr(state.running, "dry", None)
        fusing = None if dry is None else dry.fusing
        if fusing is None or fusing.region is not None:
            return model(*args, **kwargs)
        return _Region(fusing).run(model, args, kwargs)

    return call


class _Region:
    """One call of compiled code, and its backward pass."""

    def __init__(self, fusing):
        self.fusing = fusing

    def run(self, function: Callable, args: tuple, kwargs: dict):
        fusing, out = self.fusing, None
        fusing.enter(self)
        try:
            out = function(*args, **kwargs)
        finally:
            fusing.leave(_tensors(out))
        if torch.is_grad_enabled():
            self._follow_gradients(_tensors(out), _tensors((args, kwargs)))
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
