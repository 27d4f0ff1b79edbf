"""Published training runs beside the planner's figures."""

import sys
from pathlib import Path

from tests.recorded.comparison import Comparison, Omission
from tests.recorded.files import Recording

KINDS = ("train_llmfoundry", "train_other")
NOTEBOOKS = str(Path(__file__).resolve().parents[2] / "notebooks")


def compare(recording: Recording) -> tuple[list[Comparison], list[Omission]]:
    """Each run that the planner knows: tokens/s of a GPU as seconds of a token."""
    if NOTEBOOKS not in sys.path:  # where the planner lives
        sys.path.insert(0, NOTEBOOKS)
    from scripts.plan.published import left_out, predict_published

    found = []
    for label, predicted, recorded, fitted in predict_published(recording.data):
        card = next((word for word in label.split() if word in ("A100", "H100")), "")
        found.append(
            Comparison("training run", card, label, 1 / predicted, 1 / recorded, fitted)
        )
    omitted = left_out(recording.data)
    return found, [Omission(recording.kind, row, why) for row, why in omitted]
