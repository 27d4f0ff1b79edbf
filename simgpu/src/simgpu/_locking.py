"""One lock for all: the clock, the stream sanitizer and the memories share it."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

_Method = TypeVar("_Method", bound=Callable[..., Any])


def one_at_a_time(method: _Method) -> _Method:
    """The method runs while `self.lock` is held."""

    @wraps(method)
    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        with self.lock:
            return method(self, *args, **kwargs)

    return locked  # type: ignore[return-value]
