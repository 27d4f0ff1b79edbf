"""Ways to average gradients: what ranks compute and send in a step, on one axis."""

from simgpu.pictures import COLOURS, HOST, INK, Lanes, Picture

_LANE, _HEAD, _LEFT = 20, 26, 118
_FORWARD, _STEP = "#E3E3E3", "#777777"
_PACKS = ("cat", "copy_", "_to_copy", "mul", "mul_", "div", "div_")
_STEPS = ("_foreach_add_", "_fused_sgd_")


def averaging(logs: dict, ranks=(0,)) -> Picture:
    """A step of each log: two lanes for each rank, computing and its all-reduces.

    A message has its rank's colour while the rank computes as well (hidden), and is
    white while the GPU waits for it.

    Args:
        logs: heading -> what `ranks.timeline()` returned after one step.
        ranks: to draw, of each log.

    Taught in 16-average-gradients.
    """
    ends = {name: _end(log) for name, log in logs.items()}
    longest = max(ends.values())
    waits = {name: _wait(log, ranks[0]) for name, log in logs.items()}
    spoken = "; ".join(
        f"{name}: {len(_messages(log, ranks[0]))} messages, the GPU waits "
        f"{waits[name] * 1e6:,.0f} of {ends[name] * 1e6:,.0f} µs"
        for name, log in logs.items()
    )
    each = _HEAD + len(ranks) * (2 * _LANE + 6) + 4
    axis = Lanes(f"A step, simulated. {spoken}", len(logs) * each + 46, longest, _LEFT,
                 size=11, letter=6.2, room=0, drop=4.5, least=1)  # fmt: skip
    y = 4
    for name, log in logs.items():
        words = f"{name}: {ends[name] * 1e6:,.0f} µs, of which the GPU waits "
        words += f"{waits[name] * 1e6:,.0f} µs for messages"
        axis.text(8, y + 16, words, 13, weight="bold")
        y += _HEAD
        for rank in ranks:
            _lanes(axis, y, log, rank)
            y += 2 * _LANE + 6
        y += 4
    axis.rule(y)
    axis.footer(y + 16)
    legend = "black: packing a bucket · last grey box: optimizer step · "
    legend += "colour: hidden message · white: the GPU waits"
    axis.text(_LEFT, y + 34, legend, 11)
    return axis


def _end(log) -> float:
    """Seconds until the last kernel or message; who copies results later adds none."""
    events = [e for rank in log.ranks for e in log.events(rank)]
    return max(e.end for e in events if e.kind != "copy")


def _messages(log, rank: int) -> list:
    found = [e for e in log.events(rank) if e.name.startswith("all_reduce")]
    return sorted(found, key=lambda event: event.start)


def _kernels(log, rank: int) -> list[tuple[str, float, float]]:
    """(phase, start, end), neighbours of a phase as one."""
    found = [e for e in log.events(rank) if e.kind == "kernel"]
    spans: list[tuple[str, float, float]] = []
    phase = "forward"
    for event in sorted(found, key=lambda event: event.start):
        if event.name == "ones_like":  # the gradient of the loss
            phase = "backward"
        its = "step" if event.name in _STEPS else phase
        if phase == "backward" and event.name in _PACKS:
            its = "pack"
        if spans and spans[-1][0] == its and event.start - spans[-1][2] < 6e-6:
            spans[-1] = (its, spans[-1][1], event.end)
        else:
            spans.append((its, event.start, event.end))
    return spans


def _backward_ends(log, rank: int) -> float:
    return max(end for phase, _, end in _kernels(log, rank) if phase == "backward")


def _wait(log, rank: int) -> float:
    """Seconds of messages after backward, in which nothing is computed."""
    end = _backward_ends(log, rank)
    return sum(max(0.0, e.end - max(e.start, end)) for e in _messages(log, rank))


def _lanes(axis: Lanes, y: float, log, rank: int) -> None:
    tall = _LANE - 3
    fills = {"forward": _FORWARD, "backward": HOST, "pack": INK, "step": _STEP}
    axis.text(8, y + 14, f"rank {rank} computes", 11)
    axis.text(8, y + _LANE + 14, "all-reduces", 11)
    for phase, start, end in _kernels(log, rank):
        words = () if phase == "pack" else (phase,)  # too dark for words
        axis.bar(y + 1, tall, start, end, fills[phase], *words)
    over, y = _backward_ends(log, rank), y + _LANE
    for number, event in enumerate(_messages(log, rank), 1):
        middle = min(max(event.start, over), event.end)
        if event.start < middle:
            words = (number,) if middle == event.end else ()
            colour = COLOURS[rank % len(COLOURS)]
            axis.bar(y, tall, event.start, middle, colour, *words)
        if middle < event.end:  # one outline around both parts
            fill = "none" if event.start < middle else "white"
            axis.bar(y, tall, event.start, event.end, fill, number, stroke=INK)
