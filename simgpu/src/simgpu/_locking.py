"""One lock for all: the clock, the stream sanitizer and the memories share it."""

from functools import wraps


def one_at_a_time(method):
    """The method runs while `self.lock` is held."""

    @wraps(method)
    def locked(self, *args, **kwargs):
        __tracebackhide__ = True
        with self.lock:
            return method(self, *args, **kwargs)

    return locked
