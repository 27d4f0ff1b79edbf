"""Fit what launches and collectives cost a host, to the rows that are for fitting.

    python simgpu/tests/tools/fit_host.py

Prints, for `HOSTS` in `simgpu/_timing/cost.py` and `LATE` in `layouts/sweep.py`,
the constants with the least mean |log(predicted / recorded)|, and what they come to on
the fitted rows and on the others. Parts are dry-run once; only their sums change.
"""

import argparse
import math
import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from layouts import rows
from recorded import files
from simgpu._timing.cost import HOSTS, Launches

RECORDINGS = Path(__file__).resolve().parents[1] / "recordings"
FITS = {"fast": ("vtrain_node",), "slow": ("ultrascale",)}


def _steps(folder: Path, kinds: tuple[str, ...]) -> list[rows.Step]:
    found: list[rows.Step] = []
    for recording in files.read(folder, (*files.KINDS, *rows.KINDS)):
        if recording.kind in kinds:
            found += rows.steps(recording)[0]
    return [its for its in found if its.is_healthy and rows.counts(its)]


def _error(found: list[rows.Step], host: Launches) -> float:
    total = 0.0
    for its in found:
        ratio = its.predicted.with_host(host) / its.seconds
        total += min(abs(math.log(ratio)), 1.0)  # what is far off pulls no more
    return total / len(found)


def fit(found: list[rows.Step], start: Launches, only_calls: bool) -> Launches:
    """Steps along each constant, ever smaller."""
    best, least, step = start, _error(found, start), 1.4
    while step > 1.03:
        tried = [best._replace(call=best.call * by) for by in (step, 1 / step)]
        if not only_calls:
            tried += [best._replace(launch=best.launch * by) for by in (step, 1 / step)]
        errors = [_error(found, host) for host in tried]
        if min(errors) < least:
            least = min(errors)
            best = tried[errors.index(least)]
        else:
            step **= 0.5
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recordings", type=Path, default=RECORDINGS)
    folder = parser.parse_args().recordings
    launch = HOSTS["fast"].launch
    for name, kinds in FITS.items():
        found = _steps(folder, kinds)
        fitted = [its for its in found if its.fitted]
        others = [its for its in found if not its.fitted]
        start = HOSTS[name]._replace(launch=launch)
        best = fit(fitted, start, only_calls=name == "slow")
        launch = best.launch  # one for both: the calls tell them apart
        print(f'"{name}": Launches({best.launch:.3g}, {best.call:.3g}), ', end="")
        for what, its in (("fitted", fitted), ("others", others)):
            if its:
                print(f"{what}: {_error(its, best):.3f} of {len(its)} rows ", end="")
        print()


if __name__ == "__main__":
    main()
