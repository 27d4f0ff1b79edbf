"""A plan as text."""

import sys
from collections.abc import Callable
from dataclasses import replace

from simgpu._dry.api import dry_run
from simgpu._dry.report import DryReport
from simgpu._plan import flags
from simgpu._plan.search import Plan, PlannedLayout
from simgpu._plan.whole import train

_GIB = 2**30
_ROOM = 2**50  # bytes of a card: what a layout needs, whether or not it fits
_HOURS = 24
Column = tuple[str, Callable[[PlannedLayout], object]]
# those that have one value in all rows are said once, above them
_AXES: list[Column] = [
    ("replicas", lambda its: its.layout.replicas),
    ("shards", lambda its: its.layout.shards),
    ("tp", lambda its: its.layout.slices),
    ("cp", lambda its: its.layout.context),
    ("ep", lambda its: its.layout.spread),
    ("pp", lambda its: its.layout.stages),
    ("chunks", lambda its: its.layout.chunks),
    ("micro", lambda its: its.layout.micro),
    ("count", lambda its: its.layout.accumulate),
    ("ZeRO", lambda its: its.layout.zero),
    ("recompute", lambda its: its.layout.recompute),
]
_FIGURES: list[Column] = [
    ("GiB", lambda its: f"{its.used_bytes / _GIB:.1f}"),
    ("step ms", lambda its: f"{1e3 * its.step_seconds:,.1f}"),
    ("tokens/s", lambda its: f"{its.tokens_per_second:,.0f}"),
    ("MFU", lambda its: f"{its.mfu:.1%}"),
    ("lost most to", lambda its: f"{its.lost[0]} {its.lost[1]:.0%}"),
]


def progress(done: int, count: int) -> None:
    """On a terminal, how many of all parts are measured."""
    if sys.stderr.isatty():
        end = "\r" if done < count - 1 else "\r\x1b[K"
        print(f"parts: {done} of {count}", end=end, file=sys.stderr, flush=True)


def lines(found: Plan, top: int, total: int | None, price: float | None) -> list[str]:
    """The best layouts, and what the trainers are told for the first.

    Args:
        found: the plan.
        top: rows of the table.
        total: tokens of the whole run.
        price: dollars of a card for an hour.
    """
    shape, count = found.shape, len(found.fitting)
    name = shape.name or f"{shape.layers} blocks of {shape.hidden}"
    uneven = f"; the fullest rank of experts gets {found.imbalance:g} times the mean"
    made = [
        f"{name}, {shape.parameters / 1e9:.2f} billion parameters"
        + (f" ({shape.active / 1e9:.2f} active)" if shape.experts else "")
        + f", on {found.gpus:,} {found.machine.card.name}"
        + f" ({found.machine.node} in a node)" * (found.machine.node > 8)
        + ", simulated",
        f"{found.tokens:,} tokens a step: {found.tokens // found.sequence:,} sequences "
        f"of {found.sequence:,}" + uneven * (shape.experts > 0 and found.imbalance > 1),
        f"{count:,} of {len(found.layouts):,} layouts fit",
        "",
    ]
    rows = (found.fitting or found.layouts)[:top]
    asked = {"ep": shape.experts, "cp": any(its.layout.context > 1 for its in rows)}
    axes = [its for its in _AXES if asked.get(its[0], True)]
    columns = [its for its in axes if len({its[1](row) for row in rows}) > 1]
    same = [f"{name} {of(rows[0])}" for name, of in axes
            if name not in [its[0] for its in columns]]  # fmt: skip
    if not count:
        card = found.machine.card.total_memory / _GIB
        row = min(found.layouts, key=lambda its: its.used_bytes)
        made += [
            f"none fits: the smallest needs {row.used_bytes / _GIB:.1f} GiB of a card, "
            f"which has {card:.1f}; more GPUs or a shorter sequence need less",
            "",
        ]
        rows = sorted(found.layouts, key=lambda its: its.used_bytes)[:top]
    if same:
        made += [f"all: {', '.join(same)}"]
    figures = list(_FIGURES)
    if total:
        figures.append(("days", lambda its: f"{its.days(total):,.1f}"))
        if price:
            dollars = found.gpus * _HOURS * price
            figures.append(("$", lambda its: f"{its.days(total) * dollars:,.0f}"))
    made += _table([*columns, *figures], rows)
    if count:
        best = rows[0].layout
        made += ["", *_told(found, best)]
    return made


def _table(columns: list[Column], rows: list[PlannedLayout]) -> list[str]:
    cells = [["", *(name for name, _ in columns)]]
    cells += [[str(i), *(str(of(row)) for _, of in columns)]
              for i, row in enumerate(rows, 1)]  # fmt: skip
    wide = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return [
        "  ".join(cell.rjust(n) for cell, n in zip(row, wide, strict=True)).rstrip()
        for row in cells
    ]


def _told(found: Plan, best) -> list[str]:
    made = []
    job = best, found.tokens, found.sequence
    for name, words in (
        ("torchtitan", flags.torchtitan(*job)),
        ("Megatron-LM", flags.megatron(*job, found.shape.tied)),
    ):
        made.append(f"1 for {name}:")
        words = words or [f"({name} has no ZeRO 1: try --zero 2 3)"]
        made += [f"  {word}" for word in words]
    return made


def whole(found: Plan, place: int = 1) -> DryReport:
    """The whole program of a layout as a dry run.

    Args:
        found: the plan.
        place: of the layout; 1 is the best.

    Raises:
        ValueError: for a place that there is not, and for one with uneven routing.
    """
    row, machine = found.at(place), found.machine
    if found.imbalance > 1 and row.layout.spread > 1:
        raise ValueError(
            "the whole program gives all experts as many tokens: nothing to compare "
            f"with a plan whose imbalance is {found.imbalance:g}"
        )
    return dry_run(
        train, found.shape, row.layout, found.sequence, machine.compiled,
        world=found.gpus, node=machine.node, host=found.host,
        card=replace(machine.card, total_memory=_ROOM), network=machine.network,
        compile="fuse" if machine.compiled else "refuse",
        kinds=f"pp={row.layout.stages}" if row.layout.stages > 1 else None,
    )  # fmt: skip


def check(found: Plan, place: int = 1) -> list[str]:
    """That dry run beside the plan; takes and raises what `whole` does."""
    row, report = found.at(place), whole(found, place)
    seconds = report.step_seconds or float("nan")
    return [
        f"check: the whole program of {place}, as simgpu dry-run has it",
        f"  a step takes {1e3 * seconds:,.1f} ms; "
        f"the plan's is {row.step_seconds / seconds:.3f} of that",
        f"  tensors take {report.peak_bytes / _GIB:.2f} GiB; "
        f"the plan's are {row.peak_bytes / report.peak_bytes:.3f} of that",
    ]
