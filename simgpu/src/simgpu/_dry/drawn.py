"""What the pictures of a dry run show: its last step, and its memory.

They are drawn in `_pictures/`; this is what a report keeps for them.
"""

from typing import NamedTuple

from simgpu._dry.memory import Course
from simgpu._timing.job import JobTimeline, RankLog


class Drawn(NamedTuple):
    """What the pictures of a rank show; it can be pickled."""

    log: RankLog  # of the last step, in the times of the whole run
    begin: float  # seconds at which that begins
    course: Course


def drawn_of(dry, full: bool) -> Drawn:
    """What is kept of a run that is over; `full`: its memory did not suffice."""
    clock, moments = dry.runtime.clock, dry.moments
    events, begin, end = dry.events, 0.0, clock.total()
    if len(moments) > 1:
        before, now = moments[-2:]
        events, begin = events[before.events : now.events], before.time
        end = now.time
    waits = [wait for wait in list(clock.waits) if begin <= wait.start < end]
    log = RankLog(dry.rank, list(events), waits, end)
    return Drawn(log, begin, dry.watch.course(whole=full))


def timeline_of(drawn: list[Drawn]) -> JobTimeline:
    """The logs of these ranks, from the time at which the first begins."""
    begin = min(its.begin for its in drawn)
    return JobTimeline([_moved(its.log, begin) for its in drawn])


def _moved(log: RankLog, begin: float) -> RankLog:
    """The same, `begin` seconds earlier."""
    events = [
        event._replace(
            start=event.start - begin, end=event.end - begin,
            launched=max(event.launched - begin, 0.0),
        )
        for event in log.events
    ]  # fmt: skip
    waits = [
        wait._replace(start=wait.start - begin, end=wait.end - begin)
        for wait in log.waits
    ]
    return RankLog(log.rank, events, waits, log.seconds - begin)
