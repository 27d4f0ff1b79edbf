"""Ranks on their nodes, joined by the axes of a mesh; what each rank has of a model."""

from collections.abc import Sequence

from simgpu.pictures import COLOURS, HOST, WIDEST, Picture

_BOX, _HIGH, _STEP = 52, 34, 72  # pixels: a rank, and from one rank to the next
_TOP, _NODE = 78, 118
_SQUARE, _GAP, _PANEL = 42, 8, 150
LIGHT, DARK = "#CFE6F5", COLOURS[6]
Part = tuple[float, float, float, float]  # left, top, width, height, of 1 each


def mesh(axes: dict[str, Sequence[Sequence[int]]], per_node: int) -> Picture:
    """For each axis: which ranks are a group, and which links join them.

    Ranks of one colour are a group. A thin line is NVLink inside a node, a thick dashed
    one is the network.

    Args:
        axes: name of the axis -> its groups of ranks.
        per_node: ranks on each node.

    Taught in 23-combine-them.
    """
    nodes = 1 + max(max(group) for group in _all(axes)) // per_node
    said = []
    for name, groups in axes.items():
        listed = ", ".join("-".join(map(str, group)) for group in groups)
        said.append(f"{name}: {listed}, {_links(groups, per_node)}")
    picture = Picture(WIDEST, _TOP + _NODE * nodes - 44, "Groups. " + "; ".join(said))
    for panel, (name, groups) in enumerate(axes.items()):
        left = 8 + panel * WIDEST / 2
        picture.text(left, 18, f"axis {name!r}", 14, weight="bold")
        words = f"{len(groups)} groups of {len(groups[0])}: {_links(groups, per_node)}"
        picture.text(left, 36, words, 12)
        for node in range(nodes):
            y = _TOP + _NODE * node
            picture.box(left, y - 24, 10 + _STEP * per_node, 88, stroke=HOST)
        for number, group in enumerate(groups):
            ring = [*group, group[0]] if len(group) > 2 else group
            for a, b in zip(ring, ring[1:], strict=False):
                _link(picture, left, min(a, b), max(a, b), per_node, number)
        for node in range(nodes):  # over the links
            y = _TOP + _NODE * node
            picture.box(left + 3, y - 20, 44, 14, stroke="none")
            picture.text(left + 6, y - 9, f"node {node}", 11)
        for number, group in enumerate(groups):
            for rank in group:
                x, y = _place(left, rank, per_node)
                fill = COLOURS[number % len(COLOURS)]
                picture.box(x, y, _BOX, _HIGH, fill)
                picture.text(x + _BOX / 2, y + 22, f"rank {rank}", 12, "middle")
    return picture


def _all(axes: dict) -> list:
    return [group for groups in axes.values() for group in groups]


def _links(groups: Sequence[Sequence[int]], per_node: int) -> str:
    far = any(len({rank // per_node for rank in group}) > 1 for group in groups)
    return "over the network" if far else "inside a node, NVLink"


def _place(left: float, rank: int, per_node: int) -> tuple[float, float]:
    """The top left corner of a rank's box."""
    node, column = divmod(rank, per_node)
    return left + 14 + _STEP * column, _TOP + _NODE * node


def _link(picture: Picture, left, a: int, b: int, per_node: int, lane: int) -> None:
    """From rank a to rank b of a group."""
    (x1, y1), (x2, y2) = (_place(left, rank, per_node) for rank in (a, b))
    x1, x2 = x1 + _BOX / 2, x2 + _BOX / 2
    if y1 == y2 and abs(a - b) == 1:
        picture.line(x1, y1 + _HIGH / 2, x2, y2 + _HIGH / 2)
    elif y1 == y2:  # under the ranks between them
        below = y1 + _HIGH + 6 + 6 * (lane % 2)
        picture.line(x1, y1 + _HIGH, x1, below)
        picture.line(x1, below, x2, below)
        picture.line(x2, below, x2, y2 + _HIGH)
    else:
        picture.parts.append(
            f'<line x1="{x1:g}" y1="{y1 + _HIGH:g}" x2="{x2:g}" y2="{y2:g}" '
            f'stroke="{COLOURS[5]}" stroke-width="4" stroke-dasharray="7 4"/>'
        )


def shares(ways: dict[str, list[tuple[Part, Part, str]]], per_node: int) -> Picture:
    """What each rank computes and stores of a model, and with which samples.

    A square is the model: the layers from top to bottom, their width from left to
    right. Light is what the rank computes, dark what it stores.

    Args:
        ways: name -> for each rank the part that it computes, the part that it stores,
            and its samples in words.
        per_node: ranks on each node, which are a row.

    Taught in 23-combine-them.
    """
    across, rows = 2, -(-len(ways) // 2)
    said = []
    for name, ranks in ways.items():
        computed, stored, samples = ranks[0]
        said.append(
            f"{name}: rank 0 computes {_percent(computed)}, stores {_percent(stored)}, "
            f"samples {samples}"
        )
    picture = Picture(WIDEST, 44 + _PANEL * rows, "Of the model. " + "; ".join(said))
    picture.box(8, 8, 16, 16, LIGHT)
    picture.text(30, 21, "computed by the rank", 12)
    picture.box(182, 8, 16, 16, DARK)
    picture.text(204, 21, "stored by the rank", 12)
    words = "a square: all layers from top to bottom; below: the samples"
    picture.text(WIDEST - 8, 21, words, 12, "end")
    for number, (name, ranks) in enumerate(ways.items()):
        left = 8 + (number % across) * WIDEST / across
        top = 40 + _PANEL * (number // across)
        picture.text(left, top + 14, name, 14, weight="bold")
        for rank, (computed, stored, samples) in enumerate(ranks):
            node, column = divmod(rank, per_node)
            x = left + 52 + column * (_SQUARE + 3 * _GAP)
            y = top + 22 + node * (_SQUARE + 20)
            if column == 0:
                picture.text(left, y + 26, f"node {node}", 11)
            picture.box(x, y, _SQUARE, _SQUARE)
            for part, fill in ((computed, LIGHT), (stored, DARK)):
                a, b, width, height = (_SQUARE * share for share in part)
                picture.box(x + a, y + b, width, height, fill, stroke="none")
            picture.text(x + _SQUARE / 2, y + _SQUARE + 13, samples, 11, "middle")
    return picture


def _percent(part: Part) -> str:
    return f"{100 * part[2] * part[3]:.4g} %"


def mesh_ways() -> Picture:
    """DDP and the five ways of lesson 23, on two nodes with four ranks each.

    Taught in 23-combine-them.
    """
    full: Part = (0, 0, 1, 1)
    ways: dict[str, list] = {
        name: [] for name in ("DDP", "FSDP", "HSDP", "FSDP x TP", "TP x PP", "DDP x PP")
    }
    for rank in range(8):
        node, column = divmod(rank, 4)
        four = f"{4 * rank}–{4 * rank + 3}"
        eight = f"{8 * column}–{8 * column + 7}"
        half = f"{16 * node}–{16 * node + 15}"
        slice_: Part = (column / 4, 0, 1 / 4, 1)
        shard: Part = (column / 4 + node / 8, 0, 1 / 8, 1)
        stage: Part = (0, node / 2, 1, 1 / 2)
        part: Part = (column / 4, node / 2, 1 / 4, 1 / 2)
        ways["DDP"].append((full, full, four))
        ways["FSDP"].append((full, (rank / 8, 0, 1 / 8, 1), four))
        ways["HSDP"].append((full, slice_, four))
        ways["FSDP x TP"].append((slice_, shard, half))
        ways["TP x PP"].append((part, part, "0–31"))
        ways["DDP x PP"].append((stage, stage, eight))
    return shares(ways, per_node=4)
