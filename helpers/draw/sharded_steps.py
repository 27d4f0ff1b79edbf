"""Steps with sharded parameters: computing, gathers and reductions on one axis.

Before them, the life of one block: what a rank has of it at each moment of a step.
"""

import re

from simgpu.pictures import COLOURS, HOST, INK, WIDEST, Lanes, Picture

LEFT, TOP, LANE, ROW = 108, 40, 24, 128  # pixels
GAP = 10e-6  # seconds without a kernel that are drawn as a wait
LANES = {"compute": COLOURS[0], "all-gather": COLOURS[1], "reduce-scatter": COLOURS[2]}


def sharded_steps(
    runs: dict[str, tuple[float, float, list]], title: str, blocks: int = 0
) -> Picture:
    """One step of each run: when a rank computes, gathers, reduces, and waits.

    A collective carries the number of its block, if its name has one ("all_gather
    blocks.2"). In a run in which none has, the largest are taken for those of the
    blocks: gathered up and down again, reduced down. A dashed box is a time in which no
    kernel runs.

    Args:
        runs: name -> (the second at which the step begins, the one at which its
            forward pass ends, its events of `simgpu.timeline()`).
        title: above the picture.
        blocks: how many the network has.

    Taught in 18-shard-everything.
    """
    lanes = {
        name: _lanes(begin, _numbered(events, blocks))
        for name, (begin, _, events) in runs.items()
    }
    said = {name: _words(found) for name, found in lanes.items()}
    spoken = "; ".join(f"{name}: {words}" for name, words in said.items())
    longest = max(
        (
            end
            for found in lanes.values()
            for row in found.values()
            for _, end, _ in row
        ),
        default=1e-6,
    )
    height = TOP + ROW * len(runs) + 30
    axis = Lanes(f"{title}. {spoken}", height, longest, LEFT, size=11, room=0,
                 letter=0, drop=4.5, least=1)  # fmt: skip
    axis.text(8, 20, title, 14, weight="bold")
    axis.text(WIDEST - 8, 20, "rank 0, simulated", 12, "end")
    for row, (name, (begin, forward, _)) in enumerate(runs.items()):
        y = TOP + ROW * row
        axis.text(8, y + 12, f"{name}: {said[name]}", 13, weight="bold")
        turn = axis.at(forward - begin)
        axis.line(turn, y + 20, turn, y + 34 + LANE * len(LANES), INK)
        axis.text(turn - 6, y + 29, "forward", 11, "end")
        axis.text(turn + 6, y + 29, "backward", 11)
        for place, (lane, spans) in enumerate(lanes[name].items()):
            _lane(axis, y + 34 + LANE * place, lane, spans)
    axis.ticks(height - 32, "µs")
    return axis


def block_life(ranks: int, rank: int = 1) -> Picture:
    """What a rank has of one block from before a forward pass to after backward.

    A square is the block; the rank's shard has its colour, what others store is grey.

    Args:
        ranks: how many share the block; at most 7.
        rank: whose memory is drawn.

    Taught in 18-shard-everything.
    """
    moments = {  # name -> its parameters, its gradients, the message that follows
        "stored": ("shard", "none", "all-gather"),
        "forward": ("full", "none", ""),
        "freed": ("shard", "none", "all-gather"),
        "backward": ("full", "full", "reduce-scatter"),
        "stored again": ("shard", "shard", ""),
    }
    said = "; ".join(
        f"{name}: parameters {p}, gradients {g}" + (f", then {send}" if send else "")
        for name, (p, g, send) in moments.items()
    )
    picture = Picture(WIDEST, 176, f"One block on rank {rank} of {ranks}. {said}")
    words = f"one block on rank {rank} of {ranks}; grey: shards of other ranks"
    picture.text(8, 18, words, 13, weight="bold")
    for row, words in enumerate(("parameters", "gradients")):
        picture.text(8, 74 + 62 * row, words, 12)
    for place, (name, (*states, send)) in enumerate(moments.items()):
        x = 108 + 124 * place
        picture.text(x + 24, 40, name, 12, "middle", "bold")
        for row, state in enumerate(states):
            y = 50 + 62 * row
            fill = HOST if state == "full" else "white"
            picture.box(x, y, 48, 48, fill, dashed=state != "full", stroke=INK)
            if state != "none":
                high = 48 / ranks
                picture.box(x, y + high * rank, 48, high, COLOURS[rank])
        if send:
            y = 136 if send == "reduce-scatter" else 74
            picture.line(x + 52, y, x + 120, y, arrow=True)
            picture.text(x + 86, y - 8, send, 9, "middle")
    return picture


def _numbered(events: list, blocks: int) -> list:
    """The events; the largest collectives with their blocks, if no name has one."""
    sent = [e for e in events if e.kind == "collective"]
    if not blocks or any("blocks." in e.name for e in sent):
        return events
    up, most = [*range(blocks)], max((e.nbytes for e in sent), default=0)
    numbers = {"all_gather": iter(up + up[::-1]), "reduce_scatter": iter(up[::-1])}
    return [
        e._replace(name=f"{e.name} blocks.{next(numbers[e.name])}")
        if e.kind == "collective" and e.nbytes == most
        else e
        for e in events
    ]


def _lanes(begin: float, events: list) -> dict[str, list[tuple[float, float, str]]]:
    """Lane -> (start, end, number of the block); kernels in a row are one span."""
    found: dict[str, list] = {lane: [] for lane in LANES}
    for event in sorted(events, key=lambda event: event.start):
        start, end = event.start - begin, event.end - begin
        if event.kind == "collective":
            block = re.search(r"blocks\.(\d+)", event.name)
            lane = "all-gather" if "gather" in event.name else "reduce-scatter"
            found[lane].append((start, end, block[1] if block else ""))
        elif event.stream == 0:
            row = found["compute"]
            if row and start - row[-1][1] < GAP:
                start = row.pop()[0]
            row.append((start, end, ""))
    return found


def _words(lanes: dict[str, list[tuple[float, float, str]]]) -> str:
    total = max((end for row in lanes.values() for _, end, _ in row), default=0.0)
    waited = total - sum(end - start for start, end, _ in lanes["compute"])
    return f"{1e6 * total:,.0f} µs, of which the GPU waits {1e6 * waited:,.0f}"


def _lane(axis: Lanes, y: float, lane: str, spans: list) -> None:
    """Bars of one lane; in the lane of kernels, dashed ones between them."""
    axis.text(LEFT - 8, y + 14, lane, 12, "end")
    before = 0.0
    for start, end, words in spans:
        if lane == "compute" and start > before:
            axis.bar(y + 1, 17, before, start, "white", dashed=True, stroke=HOST)
        axis.bar(y + 1, 17, start, end, LANES[lane], words)
        before = end
