"""A collective in the schedule of one rank: when it could start, and when it ends.

Its members meet: it starts when the last of them is ready. What the others do is
learned as late as possible, when something has to be as late as its end.
"""

from collections.abc import Callable

Key = tuple[int, int]  # (GPU, number of the stream on it)


class Meeting:
    """One rank's part in a collective.

    Attributes:
        name: of the collective.
        key: the stream that it runs on.
        ready: simulated seconds at which this rank could start, as far as is known
            without the others.
        after: collectives of this rank, not settled yet, that must end before.
        seconds: that it takes once all are there.
        start: when all were there; None until it is settled.
        end: when it was over; None until it is settled.
        about: what a profiler that runs is told of it.
        settle: finds out what the others do, and calls `Clock.settled`.
    """

    __slots__ = ("name", "key", "ready", "after", "seconds", "start", "end", "settle",
                 "nbytes", "launched", "waiting", "about")  # fmt: skip

    def __init__(self, name: str, key: Key, ready: float, after: list["Meeting"],
                 seconds: float, nbytes: int, launched: float):  # fmt: skip
        self.name, self.key, self.ready, self.after = name, key, ready, after
        self.seconds, self.nbytes, self.launched = seconds, nbytes, launched
        self.start: float | None = None
        self.end: float | None = None
        self.settle: Callable[[], None] = _nobody
        self.about: dict | None = None
        self.waiting: set[Key] = set()  # streams that wait for its end


def _nobody() -> None:
    raise RuntimeError("a collective that nobody can settle")
