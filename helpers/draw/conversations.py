"""Who sends to whom and when: programs of the same ranks, on one axis of time."""

import re
from collections.abc import Sequence

from simgpu.pictures import COLOURS, HOST, Lanes, Picture

_MESSAGE = re.compile(r"(send to|recv from) (\d+)")
_LEFT, _LANE, _UPPER = 60, 32, 18  # pixels: margin, a rank's lane, its messages
_HEAD, _ROW = 26, 26


def conversations(logs: dict, ranks: Sequence[int] | None = None) -> Picture:
    """The messages and the computing of ranks, for each program under the other.

    In a rank's lane, messages are above and what the GPU computes is below, in grey. A
    message has the colour of the rank that sends it: the lane's own where the rank
    sends, alone or while it receives. Dashed: the other end is not there yet.

    Args:
        logs: title of a program -> its `ranks.timeline()`.
        ranks: which of them to draw; None: all.

    Taught in 15-talk-between-ranks.
    """
    shown = {title: list(ranks or log.ranks) for title, log in logs.items()}
    lanes = sum(map(len, shown.values()))
    height = _HEAD * len(logs) + _LANE * lanes + 26
    titles = [f"{title}: {log.seconds * 1e6:,.0f} µs" for title, log in logs.items()]
    longest = max(log.seconds for log in logs.values())
    spoken = f"Simulated time. {'; '.join(titles)}"
    axis = Lanes(spoken, height, longest, _LEFT, size=11, letter=6.6, room=2)
    y = 0
    for title, log in zip(titles, logs.values(), strict=True):
        axis.text(8, y + 18, title, 13, weight="bold")
        y += _HEAD
        for rank in shown[title.rpartition(":")[0]]:
            axis.text(8, y + 13, f"rank {rank}", 12)
            events = sorted(log.events(rank), key=lambda event: event.start)
            _messages(axis, y, rank, events)
            for event in events:
                if event.kind == "kernel":
                    words = event.name.strip("_")
                    axis.bar(y + _UPPER, 10, event.start, event.end, HOST, words)
            axis.rule(y + _LANE - 3, "#EEEEEE")
            y += _LANE
    axis.footer(height - 8)
    return axis


def streams_of_rank(logs: dict, rank: int = 0) -> Picture:
    """What ran in which stream of a rank's GPU, for each program under the other.

    A plain collective is in the current stream; one with `async_op=True` is in a stream
    of NCCL's own. Both have the rank's colour. White before the first is the launch.

    Args:
        logs: title of a program -> its `ranks.timeline()`.
        rank: whose GPU.

    Taught in 15-talk-between-ranks.
    """
    rows = {title: _by_stream(log.events(rank)) for title, log in logs.items()}
    titles = [f"{title}: {log.seconds * 1e6:,.0f} µs" for title, log in logs.items()]
    height = _HEAD * len(logs) + _ROW * sum(map(len, rows.values())) + 26
    longest = max(log.seconds for log in logs.values())
    where = [f"{title}: {' and '.join(found)}" for title, found in rows.items()]
    spoken = f"Simulated time. {'; '.join(titles)}. Rows of {', of '.join(where)}"
    axis = Lanes(spoken, height, longest, 112, size=12, letter=7.2, room=2)
    y = 0
    for title, streams in zip(titles, rows.values(), strict=True):
        axis.text(8, y + 18, title, 13, weight="bold")
        y += _HEAD
        for name, events in streams.items():
            axis.text(8, y + 15, name, 12)
            axis.bar(y + 2, _ROW - 6, 0, events[0].start, "white", "launch")
            for event in events:
                fill = COLOURS[rank] if event.kind == "collective" else HOST
                words = event.name.strip("_")
                axis.bar(y + 2, _ROW - 6, event.start, event.end, fill, words)
            axis.rule(y + _ROW - 2, "#EEEEEE")
            y += _ROW
    axis.footer(height - 8)
    return axis


def _by_stream(events: list) -> dict[str, list]:
    """Name of a stream -> what ran in it; NCCL's first, and none that is empty."""
    rows: dict[str, list] = {"NCCL's stream": [], "current stream": []}
    for event in events:
        if event.kind in ("kernel", "collective"):
            apart = event.stream != 0
            rows["NCCL's stream" if apart else "current stream"].append(event)
    return {name: found for name, found in rows.items() if found}


def _messages(axis: Lanes, y: float, rank: int, events: list) -> None:
    """What NCCL does; a batch of sends and receives is one box."""
    batches: dict[tuple, list] = {}
    for event in events:
        if event.kind == "collective":
            batches.setdefault((event.start, event.end), []).append(event)
    for (start, end), batch in batches.items():
        ready = start + min(event.waited for event in batch)
        if (ready - start) * axis.scale > 1:
            words = (f"waits for rank {batch[0].waited_for}", "waits")
            look = {"stroke": HOST, "dashed": True}
            axis.bar(y, _UPPER, start, ready, "white", *words, **look)
        sender, words = _who(rank, batch)
        axis.bar(y, _UPPER, ready, end, COLOURS[sender % len(COLOURS)], *words)


def _who(rank: int, batch: list) -> tuple[int, tuple[str, ...]]:
    """Who sends in a batch, and words for it: the longest first."""
    ends = sorted(_MESSAGE.findall(" ".join(event.name for event in batch)))[::-1]
    if not ends:
        return rank, (batch[0].name,)
    sends = [peer for what, peer in ends if what == "send to"]
    receives = [peer for what, peer in ends if what == "recv from"]
    long = [f"to {peer}" for peer in sends] + [f"from {peer}" for peer in receives]
    short = f"→{sends[0]}" if sends else f"←{receives[0]}"
    return rank if sends else int(receives[0]), (", ".join(long), long[0], short)
