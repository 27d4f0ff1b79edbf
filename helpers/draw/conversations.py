"""Who sends to whom and when: programs of the same ranks, on one axis of time."""

import re
from collections.abc import Sequence

from simgpu.pictures import COLOURS, HOST, WIDEST, Picture

_MESSAGE = re.compile(r"(send to|recv from) (\d+)")
_LEFT, _LANE, _UPPER = 60, 32, 18  # pixels: margin, a rank's lane, its messages
_HEAD = 26
_LETTER = 6.6  # pixels, at most, of one in size 11


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
    picture = Picture(WIDEST, height, f"Simulated time. {'; '.join(titles)}")
    longest = max(log.seconds for log in logs.values())
    scale = (WIDEST - _LEFT - 12) / longest
    y = 0
    for title, log in zip(titles, logs.values(), strict=True):
        picture.text(8, y + 18, title, 13, weight="bold")
        y += _HEAD
        for rank in shown[title.rpartition(":")[0]]:
            picture.text(8, y + 13, f"rank {rank}", 12)
            events = sorted(log.events(rank), key=lambda event: event.start)
            _messages(picture, y, rank, events, scale)
            for event in events:
                if event.kind == "kernel":
                    x, long = _LEFT + event.start * scale, event.end - event.start
                    words = (event.name.strip("_"),)
                    _span(picture, x, y + _UPPER, long * scale, 10, HOST, words)
            picture.line(_LEFT, y + _LANE - 3, WIDEST - 12, y + _LANE - 3, "#EEEEEE")
            y += _LANE
    picture.text(_LEFT, height - 8, "0", 12)
    words = f"{longest * 1e6:,.0f} µs (simulated)"
    picture.text(WIDEST - 12, height - 8, words, 12, "end")
    return picture


def _messages(picture: Picture, y: float, rank: int, events: list, scale: float):
    """What NCCL does; a batch of sends and receives is one box."""
    batches: dict[tuple, list] = {}
    for event in events:
        if event.kind == "collective":
            batches.setdefault((event.start, event.end), []).append(event)
    for (start, end), batch in batches.items():
        waited = min(event.waited for event in batch)
        x, pale = _LEFT + start * scale, waited * scale
        if pale > 1:
            words = (f"waits for rank {batch[0].waited_for}", "waits")
            _span(picture, x, y, pale, _UPPER, "white", words)
        sender, words = _who(rank, batch)
        fill = COLOURS[sender % len(COLOURS)]
        _span(picture, x + pale, y, (end - start) * scale - pale, _UPPER, fill, words)


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


def _span(picture: Picture, x, y, long, height, fill, words: Sequence[str]) -> None:
    """A box with the first of these words that fit in."""
    waits = fill == "white"
    picture.box(x, y, max(long, 0.5), height, fill, waits, HOST if waits else "none")
    fits = [some for some in words if len(some) * _LETTER + 2 < long]
    if fits:
        size = 11 if height > 10 else 10
        base = y + height / 2 + 4
        picture.text(x + long / 2, base, fits[0], size, "middle")
