"""Causal attention over ranks: who computes what, a softmax in parts, and the times."""

from math import exp

from simgpu.pictures import COLOURS, HOST, INK, WIDEST, Lanes, Picture

_SIDE, _HEAD = 232, 64  # pixels: a grid; what stands above it
_LEFT, _RIGHT, _LANE = 70, 122, 15


def attention_squares(cuts: dict[str, list[list[int]]]) -> Picture:
    """The squares of queries and keys under a causal mask, in the colours of the ranks.

    A square holds the queries of one chunk and the keys of another. The number in it is
    the hop of a ring in which these keys reach the rank. A square on the diagonal is
    masked above it.

    Args:
        cuts: heading -> for each rank the numbers of its chunks; two headings.

    Taught in 21-stretch-the-sequence.
    """
    shares = {name: _shares(cut) for name, cut in cuts.items()}
    spoken = "; ".join(
        f"{name}: " + ", ".join(f"rank {r} {s:.0%}" for r, s in enumerate(found))
        for name, found in shares.items()
    )
    title = f"Who computes which squares of queries and keys. {spoken}"
    picture = Picture(WIDEST, _HEAD + _SIDE + 34, title)
    for number, (name, cut) in enumerate(cuts.items()):
        x = 8 + number * (WIDEST // 2)
        picture.text(x, 20, name, 14, weight="bold")
        picture.text(x + 62, _HEAD - 8, "keys, from the first token to the last", 11)
        _grid(picture, x + 62, _HEAD, cut)
        said = ", ".join(f"rank {r} {s:.0%}" for r, s in enumerate(shares[name]))
        picture.text(x, _HEAD + _SIDE + 22, f"work: {said}", 12)
    return picture


def ring_hop(ranks: int) -> Picture:
    """One hop of a ring: keys and values to the next rank, their gradients back.

    Args:
        ranks: how many; at most 7.

    Taught in 21-stretch-the-sequence.
    """
    ways = {
        "forward": ("keys, values", 1, "computes with what has arrived"),
        "backward": ("gradients", -1, "adds its own term to what has arrived"),
    }
    said = "; ".join(
        f"{way}: {what} go from "
        + ", ".join(f"rank {rank} to {(rank + step) % ranks}" for rank in range(ranks))
        + f", and each {then}"
        for way, (what, step, then) in ways.items()
    )
    picture = Picture(WIDEST, 208, f"One hop of a ring. {said}")
    wide = (WIDEST - 30) / ranks
    for row, (way, (what, step, then)) in enumerate(ways.items()):
        y = 18 + 112 * row
        picture.text(8, y, f"{way}: each rank {then}", 13, weight="bold")
        for rank in range(ranks):
            x = 14 + wide * rank
            picture.box(x, y + 14, 66, 34, COLOURS[rank])
            picture.text(x + 33, y + 36, f"rank {rank}", 12, "middle")
            if rank < ranks - 1:
                ends = (x + 70, x + wide - 4)[::step]
                picture.line(ends[0], y + 31, ends[1], y + 31, arrow=True)
                picture.text(x + 33 + wide / 2, y + 25, what, 11, "middle")
        first, last = 47, 47 + wide * (ranks - 1)  # the way round, below
        start, end = (last, first)[::step]
        picture.line(start, y + 48, start, y + 64)
        picture.line(start, y + 64, end, y + 64)
        picture.line(end, y + 64, end, y + 50, arrow=True)
        picture.text((first + last) / 2, y + 60, what, 11, "middle")
    return picture


def _owner(cut: list[list[int]], chunk: int) -> int:
    return next(rank for rank, chunks in enumerate(cut) if chunk in chunks)


def _shares(cut: list[list[int]]) -> list[float]:
    """The part of all allowed pairs of query and key that each rank has."""
    work = [sum(chunk + 0.5 for chunk in chunks) for chunks in cut]
    return [part / sum(work) for part in work]


def _grid(picture: Picture, x: float, y: float, cut: list[list[int]]) -> None:
    count = sum(map(len, cut))
    side = _SIDE / count
    for row in range(count):
        rank = _owner(cut, row)
        middle = y + row * side + side / 2 + 4
        picture.text(x - 6, middle, f"rank {rank}", 12, "end")
        for column in range(count):
            left, top = x + column * side, y + row * side
            fill = COLOURS[rank] if column <= row else "white"
            picture.box(left, top, side, side, fill, stroke=HOST)
            if column > row:
                continue
            hop = (rank - _owner(cut, column)) % len(cut)
            shift = side / 4 if column == row else 0  # below the diagonal
            size = 14 if side > 40 else 11
            centre = left + side / 2 - shift, top + side / 2 + shift + 4
            picture.text(*centre, hop, size, "middle")
            if column == row:
                corners = f"{left},{top} {left + side},{top} {left + side},{top + side}"
                triangle = f'<polygon points="{corners}" fill="white" stroke="{HOST}"/>'
                picture.parts.append(triangle)


def online_softmax(scores: list[list[float]], values: list[list[float]]) -> Picture:
    """One query and two blocks of keys: a mean by softmax, in two parts, then together.

    Args:
        scores: of the query with the keys of both blocks.
        values: of these keys, a number each.

    Taught in 21-stretch-the-sequence.
    """
    parts = [_part(s, v) for s, v in zip(scores, values, strict=True)]
    most = max(part[0] for part in parts)
    shrinks = [exp(part[0] - most) for part in parts]
    tops = [part[2] * shrink for part, shrink in zip(parts, shrinks, strict=True)]
    lows = [part[3] * shrink for part, shrink in zip(parts, shrinks, strict=True)]
    result = sum(tops) / sum(lows)
    title = f"A softmax over two blocks of keys, joined: {result:.4g}"
    picture = Picture(WIDEST, 252, title)
    for line, words in enumerate(
        (
            "scores",
            "values",
            "largest score",
            "exp(score − largest)",
            "numerator",
            "denominator",
            "result",
        )
    ):
        picture.text(8, 56 + 30 * line, words, 13)
    for number, (s, v, part) in enumerate(zip(scores, values, parts, strict=True)):
        x = 144 + 160 * number
        picture.box(x, 8, 148, 236, "white", stroke=COLOURS[number])
        picture.text(x + 74, 28, f"block {number + 1}", 13, "middle", "bold")
        rows = (
            _row(s),
            _row(v),
            _row([part[0]]),
            _row(part[1]),
            _row([part[2]]),
            _row([part[3]]),
        )
        for line, words in enumerate(rows):
            picture.text(x + 74, 56 + 30 * line, words, 12, "middle")
    x = 144 + 160 * 2
    picture.box(x, 8, WIDEST - 8 - x, 236, "white", stroke=INK)
    middle = (x + WIDEST - 8) / 2
    picture.text(middle, 28, "both", 13, "middle", "bold")
    factors = [f"{shrink:.4g} · " if shrink < 1 else "" for shrink in shrinks]
    small = int(parts[0][0] == most)  # the block with the smaller largest score
    rows = (
        f"block {small + 1} shrinks by",
        f"exp({parts[small][0]:.3g} − {most:.3g}) = {shrinks[small]:.4g}",
        f"{most:.3g}",
        "",
        f"{_sum(factors, [part[2] for part in parts])} = {sum(tops):.4g}",
        f"{_sum(factors, [part[3] for part in parts])} = {sum(lows):.4g}",
        f"{sum(tops):.4g} / {sum(lows):.4g} = {result:.4g}",
    )
    for line, words in enumerate(rows):
        picture.text(middle, 56 + 30 * line, words, 12, "middle")
    return picture


def _row(numbers: list[float]) -> str:
    return " and ".join(f"{number:.3g}" for number in numbers)


def _sum(factors: list[str], terms: list[float]) -> str:
    each = (f"{f}{term:.4g}" for f, term in zip(factors, terms, strict=True))
    return " + ".join(each)


def _part(scores: list[float], values: list[float]) -> tuple:
    """Largest score, weights, numerator and denominator of one block."""
    most = max(scores)
    weights = [exp(score - most) for score in scores]
    top = sum(weight * value for weight, value in zip(weights, values, strict=True))
    return most, weights, top, sum(weights)


def attention_times(logs: dict) -> Picture:
    """For each log and rank a lane of computing and, below it, one of messages.

    A message is coloured while its rank computes as well, and white while it waits.

    Args:
        logs: heading -> what `ranks.timeline()` returned.

    Taught in 21-stretch-the-sequence.
    """
    lanes = {
        name: [_spans(log.events(rank)) for rank in log.ranks]
        for name, log in logs.items()
    }
    ends = {
        name: max(end for kernels, sent in found for _, end in kernels + sent)
        for name, found in lanes.items()
    }
    longest = max(ends.values())
    spoken = "; ".join(
        f"{name}: {ends[name] * 1e6:,.0f} µs, the ranks compute "
        + ", ".join(f"{_total(kernels) * 1e6:,.0f}" for kernels, _ in found)
        for name, found in lanes.items()
    )
    rows = [len(found) * (2 * _LANE + 6) + 30 for found in lanes.values()]
    title = f"Attention on the ranks, simulated. {spoken}"
    axis = Lanes(title, sum(rows) + 42, longest, _LEFT, right=_RIGHT)
    y = 4
    for name, found in lanes.items():
        words = f"{name}: {ends[name] * 1e6:,.0f} µs"
        axis.text(8, y + 16, words, 13, weight="bold")
        y += 24
        for rank, (kernels, sent) in enumerate(found):
            axis.text(8, y + 14, f"rank {rank}", 12)
            for start, end in kernels:
                axis.bar(y, _LANE - 1, start, end, COLOURS[rank])
            for start, end in sent:
                _message(axis, y + _LANE, start, end, kernels, rank)
            end = max(end for _, end in kernels + sent)
            said = f"computes {_total(kernels) * 1e6:,.0f} µs"
            axis.text(axis.at(end) + 6, y + 14, said, 11)
            y += 2 * _LANE + 6
        y += 6
    axis.rule(y)
    axis.footer(y + 16)
    legend = (
        "above: computing · below: a message, coloured: hidden, white: the GPU waits"
    )
    axis.text(_LEFT, y + 32, legend, 11)
    return axis


def _spans(events) -> tuple[list, list]:
    """(start, end) of computing and of messages, neighbours joined."""
    found: tuple[list, list] = ([], [])
    for event in sorted(events, key=lambda event: event.start):
        if event.kind == "copy":
            continue
        row = found[event.kind == "collective"]
        if row and event.start - row[-1][1] < 4e-6:
            row[-1] = row[-1][0], max(row[-1][1], event.end)
        else:
            row.append((event.start, event.end))
    return found


def _total(spans: list) -> float:
    return sum(end - start for start, end in spans)


def _message(
    axis: Lanes, y: float, start: float, end: float, kernels: list, rank: int
) -> None:
    """A message, cut where its rank begins or ends to compute."""
    marks = sorted({start, end, *(m for k in kernels for m in k if start < m < end)})
    for first, last in zip(marks, marks[1:], strict=False):
        middle = (first + last) / 2
        if any(begin <= middle <= stop for begin, stop in kernels):
            axis.bar(y, _LANE - 1, first, last, COLOURS[rank])
        elif (last - first) * axis.scale > 1:
            axis.bar(y, _LANE - 1, first, last, "white", stroke=INK)
