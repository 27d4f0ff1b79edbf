"""Where a training step begins and ends: at the calls of `Optimizer.step`.

A step lasts from one call's end to the next one's, of the optimizer that was first to
step; so it has all that the program does once for each batch. An optimizer in a CUDA
graph steps when that is replayed.
"""

import functools
import weakref
from collections.abc import Callable

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from simgpu._dispatch.captured_call import current_capture


class Over(BaseException):
    """Enough steps have been seen: the program is left."""


class Steps:
    """Counts the steps of a program.

    Args:
        most: after which it is left.
        before: called before an optimizer steps, with it.
        after: called after the first optimizer has stepped.
    """

    def __init__(self, most: int, before: Callable, after: Callable):
        self.most, self.done = most, 0
        self._before, self._after = before, after
        # weak: the program may drop it, and all that it has
        self._first: Callable[[], torch.optim.Optimizer | None] = lambda: None
        self._hooks = [
            register_optimizer_step_pre_hook(self._begins),
            register_optimizer_step_post_hook(self._ends),
        ]

    def _begins(self, optimizer, args, kwargs) -> None:
        if current_capture() is None:
            self._before(optimizer)

    def _ends(self, optimizer, args, kwargs) -> None:
        if (capture := current_capture()) is None:
            self._count(optimizer)
        else:
            capture.after_replay.append(
                functools.partial(self._replayed, weakref.ref(optimizer))
            )

    def _replayed(self, optimizer: Callable[[], torch.optim.Optimizer | None]) -> None:
        """A graph was replayed in which an optimizer steps."""
        if (its := optimizer()) is not None:
            self._before(its)
            self._count(its)

    def _count(self, optimizer: torch.optim.Optimizer) -> None:
        if self._first() is None:
            self._first = weakref.ref(optimizer)
        if optimizer is self._first():
            self.done += 1
            self._after(optimizer)
            if self.done >= self.most:
                raise Over

    def close(self) -> None:
        """No hook of it is left."""
        for hook in self._hooks:
            hook.remove()
