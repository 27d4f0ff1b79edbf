"""What a rank computes and what it sends, of several runs on one axis of time.

Unlike in `jobs.overlap`, nothing hides a message here: while it travels, the GPU waits.
"""

from simgpu.pictures import COLOURS, HOST, Lanes, Picture

_LEFT, _ROW, _LANE = 92, 104, 28


def exposed(runs: dict, rank: int = 0) -> Picture:
    """For each run two lanes of a rank: computing, and messages while the GPU waits.

    Args:
        runs: name -> the log of `ranks.timeline()`.
        rank: whose lanes are drawn.

    Taught in 19-slice-a-layer.
    """
    spans = {name: _spans(log.events(rank)) for name, log in runs.items()}
    longest = max(end for _, _, end in spans.values())
    said = [
        f"{name} {end * 1e6:,.0f} µs, of which it waits {_waits(*found) * 1e6:,.0f} µs"
        for name, (*found, end) in spans.items()
    ]
    title = f"Rank {rank}, simulated: {'; '.join(said)}"
    height = 24 + _ROW * len(runs)
    axis = Lanes(title, height, longest, _LEFT, size=11, letter=6, room=2, drop=5)
    for number, (name, (computing, messages, end)) in enumerate(spans.items()):
        y = 8 + _ROW * number
        wait = _waits(computing, messages)
        words = f"{name}: {end * 1e6:,.0f} µs, waits {wait * 1e6:,.0f} µs"
        axis.text(8, y + 14, words, 13, weight="bold")
        axis.text(8, y + 40, "computing", 12)
        axis.text(8, y + 40 + _LANE, "all-reduce", 12)
        for start, stop in computing:
            axis.bar(y + 24, _LANE - 6, start, stop, COLOURS[rank])
        for start, stop in messages:
            axis.bar(y + 24 + _LANE, _LANE - 6, start, stop, HOST, "all-reduce")
            axis.between(y + 40, start, stop, "waits")
        axis.rule(y + 28 + 2 * _LANE)
    axis.footer(height - 6)
    return axis


def _spans(events) -> tuple[list, list, float]:
    """(start, end) of what computes, what joins on; of messages; and the last end."""
    begin = min(event.start for event in events)
    computing: list[tuple[float, float]] = []
    messages = []
    for event in sorted(events, key=lambda event: event.start):
        span = event.start - begin, event.end - begin
        if event.kind == "collective":
            messages.append(span)
        elif computing and span[0] - computing[-1][1] < 1e-9:
            computing[-1] = computing[-1][0], max(computing[-1][1], span[1])
        else:
            computing.append(span)
    return computing, messages, max(event.end for event in events) - begin


def _waits(computing: list, messages: list) -> float:
    """Seconds of messages in which nothing is computed."""
    hidden = sum(
        max(0.0, min(stop, end) - max(start, begin))
        for start, stop in messages
        for begin, end in computing
    )
    return sum(stop - start for start, stop in messages) - hidden
