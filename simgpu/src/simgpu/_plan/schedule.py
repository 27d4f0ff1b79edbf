"""A step of a pipeline, from what its stages take: one forward, one backward.

Each stage has a host, which launches, and a card, which works. PyTorch's schedules let
the host run ahead of the card. In nanotron and Megatron-LM it waits for its card before
and after a message (one reads the shape that came with it, the other synchronizes): a
pass then takes the longer of the two, counted from the message.
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


def order(
    rank: int, ranks: int, count: int, chunks: int = 1
) -> list[tuple[bool, int, int]]:
    """(whether it is forward, chunk, micro-batch) in the order of one rank.

    With one chunk this is 1F1B; with more it is interleaved as Megatron-LM has it, and
    the micro-batches are a multiple of the ranks.
    """
    if chunks == 1:
        ahead = ranks - rank - 1
    else:
        ahead = 2 * (ranks - rank - 1) + (chunks - 1) * ranks
    total = count * chunks
    ahead = min(ahead, total)

    def which(at: int, forward: bool) -> tuple[bool, int, int]:
        chunk = at // ranks % chunks if chunks > 1 else 0
        micro = at // (ranks * chunks) * ranks + at % ranks if chunks > 1 else at
        return forward, chunk if forward else chunks - 1 - chunk, micro

    made = [which(i, True) for i in range(ahead)]
    for i in range(total - ahead):
        made += [which(ahead + i, True), which(i, False)]
    return made + [which(i, False) for i in range(total - ahead, total)]


@functools.lru_cache(4096)
def seconds(
    stages: tuple[Stage, ...], count: int, message: float, chunks: int = 1,
    waits: bool = False,
) -> float:  # fmt: skip
    """Until the last backward pass of the slowest stage has ended.

    Args:
        stages: from the first to the last; with several chunks on a rank, those of a
            rank lie as many stages apart as there are ranks.
        count: micro-batches.
        message: seconds from the end of a pass to its arrival at the next stage.
        chunks: stages of a rank.
        waits: whether hosts wait for their cards before and after a message.
    """
    if len(stages) == 1:
        (only,) = stages
        card = only.forward.card + only.backward.card
        host = only.forward.host + only.backward.host
        return count * max(card, host)
    last, ranks = len(stages) - 1, len(stages) // chunks
    orders = [iter(order(i, ranks, count, chunks)) for i in range(ranks)]
    todo = [next(its, None) for its in orders]
    free, hosts = [0.0] * ranks, [0.0] * ranks
    arrived: dict[tuple[bool, int, int], float] = {}
    waiting = set(range(ranks))
    while waiting:
        for rank in list(waiting):
            while todo[rank] is not None:
                ahead, chunk, which = todo[rank]
                i = chunk * ranks + rank
                given = 0.0
                if ahead and i or not ahead and i < last:
                    given = arrived.pop((ahead, i, which), None)
                    if given is None:
                        break
                its = stages[i].forward if ahead else stages[i].backward
                begun = max(free[rank], given)
                hosts[rank] = (begun if waits else hosts[rank]) + its.host
                free[rank] = max(begun + its.card, hosts[rank])
                to = i + 1 if ahead else i - 1
                if 0 <= to <= last:
                    arrived[ahead, to, which] = free[rank] + message
                    free[rank] += message  # it is sent before anything else
                todo[rank] = next(orders[rank], None)
            if todo[rank] is None:
                waiting.discard(rank)
    return max(free)
