"""A call that computes every function of its own itself, so that it may look first."""

import weakref

from simgpu._dispatch.operation_call import Call


class WatchedCall(Call):
    """A call of whose functions none runs but by `execute`, whoever calls them."""

    __slots__ = ("_func", "__weakref__")

    @property
    def func(self):
        """What computes it: the operation's own, or what stands for it."""
        return Watched(self, self._func)

    @func.setter
    def func(self, func) -> None:
        self._func = func

    def execute(self, func, args, kwargs):
        """Compute `func`, or see to it in another way; returns what it returns."""
        raise NotImplementedError


class Watched:
    """What a handler finds as `call.func`: whoever calls it, the call computes it.

    It outlives the call where a handler has made a function of it; then nothing looks.
    """

    __slots__ = ("_call", "_func")

    def __init__(self, call: WatchedCall, func):
        # weak: a handler may let the call's function hold this
        self._call, self._func = weakref.ref(call), unwatched(func)

    def __call__(self, *args, **kwargs):
        __tracebackhide__ = True
        call = self._call()
        if call is None:
            return self._func(*args, **kwargs)
        return call.execute(self._func, args, kwargs)

    def __getattr__(self, name: str):
        return getattr(self._func, name)


def unwatched(func):
    """The function itself, where a call computes it."""
    return func._func if isinstance(func, Watched) else func
