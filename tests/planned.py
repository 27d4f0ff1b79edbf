"""Recorded training runs (`recordings/`) beside what lesson 27's planner says.

Published runs, in seconds of a token; and the layouts of `layouts/`, good and bad ones,
in seconds of a step. Of a layout the planner knows the sizes, the degrees and how fast
the host is. States that are spread over ranks (ZeRO-1) are DDP to it.
"""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from layouts.rows import HOST_OF, Step, comparisons
from layouts.shapes import Layout
from recorded.comparison import OF_TIME, Comparison, Omission
from recorded.files import Recording
from support import checkout

KINDS = ("train_llmfoundry", "train_other")
NOTEBOOKS = str(Path(__file__).resolve().parents[1] / "notebooks")
# Gbit/s of each GPU: recorded of vTrain, assumed of the others
NETWORKS = {"A100": 100, "H100": 400}
# what the lesson's table calls some layouts of the sweep
GROUPS: dict[str, Callable[[Layout], bool]] = {
    "`tp` up to 8, no pipeline": lambda of: of.tp <= 8 and of.pp == 1,
    "`tp` up to 2, pipeline": lambda of: of.tp <= 2 and of.pp > 1,
    "`tp` 4 or 8, pipeline": lambda of: 2 < of.tp <= 8 and of.pp > 1,
    "`tp` over 8": lambda of: of.tp > 8,
}


def compare(recording: Recording) -> tuple[list[Comparison], list[Omission]]:
    """Each run that the planner knows: tokens/s of a GPU as seconds of a token."""
    _find_scripts()
    from scripts.plan_run import rate
    from scripts.published_runs import read, short

    found = []
    runs, omitted = read(recording.data)
    for run in runs:
        predicted = rate(run.model, run.plan)[0]
        label = f"{short(run)}, {run.plan.microbatches} x {run.plan.sequences}"
        times = 1 / predicted, 1 / run.rate
        card = run.plan.card
        found.append(Comparison("training run", card, label, *times, run.is_fitted))
    return found, [Omission(recording.kind, row, why) for row, why in omitted]


def compare_steps(steps: list[Step]) -> tuple[list[Comparison], list[Omission]]:
    """The healthy rows up to 32 nodes that the planner knows, in seconds of a step."""
    found, omitted = [], []
    for step, row in comparisons(steps):
        try:
            predicted = seconds(step.layout)
        except ValueError as error:
            omitted.append(Omission(f"planner, {step.kind}", row.what, str(error)))
        else:
            kind = f"planner, {step.kind}"
            found.append(row._replace(kind=kind, predicted=predicted))
    return found, omitted


def seconds(of: Layout) -> float:
    """What the planner says of a layout's step.

    Raises:
        ValueError: where it does not know.
    """
    _find_scripts()
    from scripts.plan_run import Model, Plan, step_seconds

    is_old = of.trainer == "megatron"  # GPT, and all blocks are computed twice
    model = Model(of.layers, of.hidden, of.heads, of.kv_heads or of.heads,
                  of.intermediate, of.vocab, of.tied, not is_old)  # fmt: skip
    plan = Plan(
        of.gpus, tp=of.tp, pp=of.pp, sequences=of.micro, microbatches=of.accumulate,
        tokens=of.tokens, again=float(is_old), card=of.card,
        network=NETWORKS.get(of.card, 0), host=HOST_OF[of.trainer],
    )  # fmt: skip
    return sum(step_seconds(model, plan).values())


def in_lesson() -> dict[str, list[str]]:
    """The lesson's table: of each group the runs, then median and share twice."""
    (path,) = checkout.here(Path(NOTEBOOKS), "27-*.ipynb")
    found = {}
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        for line in "".join(cell["source"]).splitlines():
            name, *figures = line.strip("| ").split(" | ")
            if name in GROUPS and line.startswith("|"):
                found[name] = figures
    return found


def as_in_lesson(ratios: list[float]) -> list[str]:
    """Median and share of the rows that are near, as the table has them."""
    near = sum(1 / OF_TIME <= ratio <= OF_TIME for ratio in ratios)
    return [f"{statistics.median(ratios):.2f}", f"{near / len(ratios):.0%}"]


def _find_scripts() -> None:
    if NOTEBOOKS not in sys.path:  # where the planner lives
        sys.path.insert(0, NOTEBOOKS)
