"""How close the simulator comes to real GPUs: what was recorded, and what it predicts.

    python tests/fidelity.py                        # the recordings of this project
    python tests/fidelity.py --recordings FOLDER    # others, of the same formats
    python tests/fidelity.py --rows                 # each row that is not near as well

Prints one line for each kind and card, with the rows that constants were fitted to and
the others apart: the median of predicted over recorded seconds, its 10th and its 90th
percentile, and the share of the rows within a factor of 1.3. Lines of the planner are
below, and in no sum: its formulas know less than the simulator. Then the allocator:
blocks at their recorded place, and peaks in bytes. Rows that cannot be compared are
counted, with the reason. The formats are described in
`simgpu/tests/recordings/README.md`, what is predicted in `simgpu/tests/recorded`, and
for training runs in `tests/planned.py`.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

if __package__ in (None, ""):  # run as a script, maybe where nothing is installed
    here = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(here), str(here / "simgpu" / "tests")]

from layouts import rows as layouts
from recorded import files, memory, operations, steps
from recorded.comparison import OF_TIME, Comparison, Omission, figures_of
from recorded.files import Recording
from tests import planned

ROOT = Path(__file__).resolve().parents[1]
# of the simulator, and of the planner alone
FOLDERS = (ROOT / "simgpu" / "tests" / "recordings", ROOT / "tests" / "recordings")
SHOWN = 5  # reasons for rows that cannot be compared

_TIMES = {
    **dict.fromkeys(operations.PREDICT, operations.compare),
    **dict.fromkeys((*steps.PREDICT, "resnet50_v100"), steps.compare),
    **dict.fromkeys(planned.KINDS, planned.compare),
}


class Report(NamedTuple):
    """All that was compared."""

    times: list[Comparison]
    peaks: list[memory.Peak]
    blocks: list[memory.Replayed]
    omitted: list[Omission]
    steps: list[layouts.Step]
    planned: list[Comparison]  # the same steps, by the planner alone


def read(*folders: Path) -> list[Recording]:
    """The recordings in some folders, those of training runs among them."""
    kinds = (*files.KINDS, *planned.KINDS, *layouts.KINDS)
    return [recording for folder in folders for recording in files.read(folder, kinds)]


def compare(recordings: list[Recording]) -> Report:
    """Every recording beside what is predicted."""
    report = Report([], [], [], [], [], [])
    for recording in recordings:
        if recording.fault:
            report.omitted.append(
                Omission(recording.name, "the whole file", recording.fault)
            )
        elif recording.kind in layouts.KINDS:
            found, omitted = layouts.steps(recording)
            report.steps.extend(found)
            report.times.extend(row for _, row in layouts.comparisons(found))
            report.omitted.extend(omitted)
            rows, omitted = planned.compare_steps(found)
            report.planned.extend(rows)
            report.omitted.extend(omitted)
        elif recording.kind in _TIMES:
            found, omitted = _TIMES[recording.kind](recording)
            report.times.extend(found)
            report.omitted.extend(omitted)
        else:
            blocks, peaks, omitted = memory.compare(recording)
            report.blocks.extend(blocks)
            report.peaks.extend(peaks)
            report.omitted.extend(omitted)
    return report


def groups(times: list[Comparison]) -> dict[tuple[str, str, bool], list[Comparison]]:
    """(kind, card, fitted) -> comparisons, in this order."""
    found: dict = {}
    for row in times:
        found.setdefault((row.kind, row.card, row.fitted), []).append(row)
    return dict(sorted(found.items()))


def lines_of(report: Report) -> list[str]:
    """The report as it is printed; the last three lines sum it up."""
    lines = [
        f"{'':24}{'':16}{'':10}{'rows':>5}{'median':>8}{'10 %':>7}{'90 %':>7}"
        f"{'within ' + str(OF_TIME):>12}"
    ]
    for (kind, card, fitted), rows in groups(report.times).items():
        lines.append(_line(kind, card, "fitted" if fitted else "not fitted", rows))
    for fitted in (True, False):
        rows = [row for row in report.times if row.fitted == fitted]
        if rows:
            lines.append(_line("all", "", "fitted" if fitted else "not fitted", rows))
    for (kind, card, fitted), rows in groups(report.planned).items():
        lines.append(_line(kind, card, "fitted" if fitted else "not fitted", rows))
    for replayed in report.blocks:
        lines.append(
            f"allocator, {replayed.name}: {replayed.placed} of {replayed.blocks}"
            f" blocks at their place, reserved {replayed.reserved_error:+} bytes"
        )
    for peak in report.peaks:
        lines.append(
            f"{peak.what}: {peak.predicted:,}, recorded {peak.recorded:,}"
            f" ({peak.predicted / peak.recorded - 1:+.4%})"
        )
    reasons = Counter((o.kind, o.why) for o in report.omitted)
    for (kind, why), count in reasons.most_common(SHOWN):
        lines.append(f"not compared, {kind}: {count} times: {why}")
    if len(reasons) > SHOWN:
        lines.append(f"not compared: {len(reasons) - SHOWN} more reasons")
    *each, steps, choice = layouts.lines_of(report.steps)
    lines += each
    near = sum(row.is_near for row in report.times)
    share = 100 * near / len(report.times) if report.times else 0
    placed = sum(replayed.placed for replayed in report.blocks)
    blocks = sum(replayed.blocks for replayed in report.blocks)
    lines.append(
        f"within {OF_TIME}: {share:.1f} % of {len(report.times)} rows; "
        f"blocks at their place: {placed} of {blocks}"
    )
    return [*lines, steps, choice]


def _line(kind: str, card: str, which: str, rows: list[Comparison]) -> str:
    count, median, low, high, near = figures_of(rows)
    return (
        f"{kind:24}{card:16}{which:10}{count:5}{median:8.2f}{low:7.2f}{high:7.2f}"
        f"{near:11.0%}"
    )


def far_rows(times: list[Comparison]) -> list[str]:
    """The rows that are not near, the farthest first."""
    far = [row for row in times if not row.is_near]
    far.sort(key=lambda row: max(row.ratio, 1 / row.ratio), reverse=True)
    return [
        f"{row.ratio:6.2f}  {row.kind}, {row.card}: {row.what} "
        f"({1e6 * row.predicted:.4g} us, recorded {1e6 * row.recorded:.4g})"
        for row in far
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recordings", type=Path, help="a folder of others")
    parser.add_argument("--rows", action="store_true", help="each row that is not near")
    chosen = parser.parse_args(arguments)
    try:
        folders = [chosen.recordings] if chosen.recordings else FOLDERS
        recordings = read(*folders)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    report = compare(recordings)
    if chosen.rows:
        far = far_rows(report.times + report.planned)
        print("\n".join(far), end="\n\n")
    print("\n".join(lines_of(report)))


if __name__ == "__main__":
    main()
