"""Published training runs (`recordings/`) beside what lesson 26's planner says."""

import sys
from pathlib import Path

from recorded.comparison import Comparison, Omission
from recorded.files import Recording

KINDS = ("train_llmfoundry", "train_other")
NOTEBOOKS = str(Path(__file__).resolve().parents[1] / "notebooks")


def compare(recording: Recording) -> tuple[list[Comparison], list[Omission]]:
    """Each run that the planner knows: tokens/s of a GPU as seconds of a token."""
    if NOTEBOOKS not in sys.path:  # where the planner lives
        sys.path.insert(0, NOTEBOOKS)
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
