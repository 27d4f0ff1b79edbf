"""A prediction beside a measurement, and what many of them come to."""

import statistics
from collections.abc import Callable, Iterable
from typing import NamedTuple

from recorded.files import NOT_FITTED, Recording, is_fitted

OF_TIME = 1.3  # a prediction within this factor of its measurement counts as near


class Comparison(NamedTuple):
    """One figure: seconds, bytes/s or items/s, predicted and recorded alike."""

    kind: str  # of the recording, and of the row where a file has several
    card: str  # as the recording names it
    what: str  # was measured
    predicted: float
    recorded: float
    fitted: bool  # whether constants were chosen with this row in sight

    @property
    def ratio(self) -> float:
        return self.predicted / self.recorded

    @property
    def is_near(self) -> bool:
        return 1 / OF_TIME <= self.ratio <= OF_TIME


class Omission(NamedTuple):
    """A row that cannot be compared."""

    kind: str
    what: str
    why: str


class Figures(NamedTuple):
    """What a group of comparisons comes to."""

    rows: int
    median: float  # of predicted / recorded
    low: float  # 10th percentile
    high: float  # 90th percentile
    near: float  # share of the rows that are within `OF_TIME`


def figures_of(comparisons: Iterable[Comparison]) -> Figures:
    """Raises `statistics.StatisticsError` for no comparison at all."""
    rows = list(comparisons)
    ratios = sorted(row.ratio for row in rows)
    tenths = statistics.quantiles(ratios, n=10, method="inclusive") if rows[1:] else []
    low, high = (tenths[0], tenths[-1]) if tenths else (ratios[0], ratios[0])
    near = sum(row.is_near for row in rows) / len(rows)
    return Figures(len(rows), statistics.median(ratios), low, high, near)


def compare_rows(
    recording: Recording, predict: Callable[[list], Iterable[tuple]]
) -> tuple[list[Comparison], list[Omission]]:
    """Every row of a recording that can be predicted, and why the others cannot.

    Args:
        recording: whose rows.
        predict: for each figure of a row (kind, card, what, predicted, recorded).
    """
    found, omitted = [], []
    for row in recording.data["rows"]:
        what = " ".join(map(str, row)) if isinstance(row, list) else repr(row)
        try:
            if not isinstance(row, list):
                raise ValueError("a row is a list")
            fitted = recording.kind not in NOT_FITTED and is_fitted(row)
            figures = [Comparison(*figure, fitted) for figure in predict(row)]
            if not all(figure.recorded > 0 for figure in figures):
                raise ValueError("nothing was measured")
            found += figures
        except KeyError as error:
            omitted.append(Omission(recording.kind, what, f"unknown: {error}"))
        except (TypeError, ValueError, ArithmeticError) as error:
            omitted.append(Omission(recording.kind, what, str(error)))
    return found, omitted
