"""A step of a pipeline, from what its stages take: one forward, one backward.

Each stage has a host, which launches, and a card, which works. Before and after a
message the host waits for its card, as both trainers do (one reads the shape that came
with it, the other synchronizes). So a pass takes the longer of the two, counted from
the message.
"""

import functools
from typing import NamedTuple


class Pass(NamedTuple):
    """Of one micro-batch through a stage, in seconds."""

    card: float
    host: float

    @property
    def seconds(self) -> float:
        return max(self.card, self.host)


class Stage(NamedTuple):
    """What a stage does for a micro-batch."""

    forward: Pass
    backward: Pass


def order(stage: int, stages: int, count: int) -> list[tuple[bool, int]]:
    """(whether it is forward, which micro-batch) in the order of one stage."""
    ahead = min(stages - stage - 1, count)
    made = [(True, i) for i in range(ahead)]
    for i in range(count - ahead):
        made += [(True, ahead + i), (False, i)]
    return made + [(False, i) for i in range(count - ahead, count)]


@functools.lru_cache(4096)
def seconds(stages: tuple[Stage, ...], count: int, message: float) -> float:
    """Until the last backward pass of the slowest stage has ended.

    Args:
        stages: from the first to the last.
        count: micro-batches.
        message: seconds from the end of a pass to its arrival at the next stage.
    """
    if len(stages) == 1:
        (only,) = stages
        card = only.forward.card + only.backward.card
        host = only.forward.host + only.backward.host
        return count * max(card, host)
    last = len(stages) - 1
    orders = [iter(order(i, len(stages), count)) for i in range(len(stages))]
    todo = [next(its, None) for its in orders]
    free = [0.0] * len(stages)
    arrived: dict[tuple[bool, int, int], float] = {}
    waiting = set(range(len(stages)))
    while waiting:
        for i in list(waiting):
            while todo[i] is not None:
                ahead, which = todo[i]
                given = 0.0
                if ahead and i or not ahead and i < last:
                    given = arrived.pop((ahead, i, which), None)
                    if given is None:
                        break
                its = stages[i].forward if ahead else stages[i].backward
                free[i] = max(free[i], given) + its.seconds
                to = i + 1 if ahead else i - 1
                if 0 <= to <= last:
                    arrived[ahead, to, which] = free[i] + message
                    free[i] += message  # it is sent before anything else
                todo[i] = next(orders[i], None)
            if todo[i] is None:
                waiting.discard(i)
    return max(free)
