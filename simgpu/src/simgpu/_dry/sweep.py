"""Runs the layouts of a sweep side by side, each a dry run in processes of its own.

What came of a layout is a file of its folder, named after its command and the files
that this names, so that a sweep that was stopped goes on where it was. Nothing here
needs PyTorch.
"""

import functools
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import simgpu
from simgpu._dry.axes import Layout, amount
from simgpu._dry.fresh import FreshRun

FITS, FULL, FAILED, SKIPPED = "fits", "does not fit", "failed", "not run"
_LEFT_OUT = {"kinds", "memory_by_line"}  # they are in the layout's own file
_EVERY = 0.05  # seconds between two looks at what runs
_ERROR = re.compile(r"([\w.]*(Error|Exception|Failed|Refused|Simulated)\b|simgpu )")
_LARGEST = 16 * 2**20  # bytes of a file that is looked at
_LONGEST = 120  # letters of a file's name


@dataclass
class Row:
    """What came of a layout.

    Attributes:
        layout: its number, values and words.
        state: "fits", "does not fit", "failed" or "not run".
        report: of the dry run, as its JSON has it; empty if it failed or was not run.
        why: it failed or was not run.
        seconds: that the dry run took, on this machine.
        kept: whether it was there from an earlier sweep.
        cost: dollars for a billion tokens, if the price of a card is known.
        beaten_by: a layout that is at least as fast, takes no more memory and has no
            more cards; None if there is none.
    """

    layout: Layout
    state: str
    report: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    seconds: float = 0.0
    kept: bool = False
    cost: float | None = None
    beaten_by: "Row | None" = None

    @property
    def rate(self) -> float | None:
        """Tokens of the whole job in a second, or samples where there are none."""
        of = "tokens_per_second", "samples_per_second"
        return next((self.report[key] for key in of if self.report.get(key)), None)

    @property
    def rate_of(self) -> str:
        """What the rate counts: "tokens", "samples" or "images"."""
        if self.report.get("tokens_per_second") or self.rate is None:
            return "tokens"
        return self.report.get("samples_are", "samples")

    def as_dict(self) -> dict[str, Any]:
        """For programs: the layout, and the report's figures beside it."""
        beaten = self.beaten_by
        return {
            "number": self.layout.number + 1,
            "layout": self.layout.values,
            "command": self.layout.words,
            "state": self.state,
            "why": self.why,
            "dollars_per_billion_tokens": self.cost,
            "beaten_by": None if beaten is None else beaten.layout.number + 1,
            **{k: v for k, v in self.report.items() if k not in _LEFT_OUT},
        }


def say(values: dict[str, str]) -> str:
    """A layout in words: "tp 2, batch 4"."""
    return ", ".join(f"{axis} {value or 'none'}" for axis, value in values.items())


class Runs:
    """The dry runs of a sweep.

    Args:
        layouts: to run.
        axes: name -> values.
        folder: where what comes of them is kept.
        jobs: that run at a time.
        seconds: that one may take.
        grows: axes along which memory only grows.
        done: is called with each row, as soon as it is there.
        tick: is called often, with how many run.
    """

    def __init__(self, layouts: Sequence[Layout], axes: dict[str, tuple[str, ...]],
                 folder: Path, *, jobs: int, seconds: float, grows: Sequence[str] = (),
                 done: Callable[[Row], None], tick: Callable[[int], None]):  # fmt: skip
        self.folder, self.jobs, self.seconds = folder, jobs, seconds
        self._axes, self._grows = axes, grows
        self._done, self._tick = done, tick
        self._digest = functools.cache(_digest)
        self.rows: list[Row] = []
        self._waiting = sorted(layouts, key=self._size)
        self._running: list[_Run] = []
        # of the same values in all that does not grow: the layouts that are not over,
        # and those that do not fit
        self._open: dict[tuple, list[Layout]] = {}
        self._full: dict[tuple, list[Layout]] = {}
        for layout in layouts:
            self._open.setdefault(self._rest(layout), []).append(layout)

    def run(self) -> list[Row]:
        """Run all; returns a row for each.

        Whatever ends it, a KeyboardInterrupt among it, nothing stays running, and
        `rows` has what is done.
        """
        try:
            while self._waiting or self._running:
                self._start()
                self._look()
                self._tick(len(self._running))
                if self._running:
                    time.sleep(_EVERY)
        finally:
            for run in self._running:
                run.kill()
        return self.rows

    def _size(self, layout: Layout) -> list[float]:
        values = layout.values
        return [amount(values[axis], self._axes[axis]) for axis in self._grows]

    def _rest(self, layout: Layout) -> tuple[str, ...]:
        """The values of the axes that do not grow."""
        return tuple(v for axis, v in layout.values.items() if axis not in self._grows)

    def _smaller(
        self, layout: Layout, among: dict[tuple, list[Layout]]
    ) -> Layout | None:
        """One of the same values, but smaller in those that grow; None without any."""
        size = self._size(layout)
        for other in among.get(self._rest(layout), ()) if self._grows else ():
            pairs = zip(self._size(other), size, strict=True)
            if other is not layout and all(its <= mine for its, mine in pairs):
                return other
        return None

    def _start(self) -> None:
        """Start what may run now: what has no smaller layout under way."""
        kept = []
        waiting = iter(self._waiting)
        for layout in waiting:
            if len(self._running) >= self.jobs:
                kept.append(layout)
                break
            if (full := self._smaller(layout, self._full)) is not None:
                grown = {axis: full.values[axis] for axis in self._grows}
                why = f"does not fit, as {say(grown)} does not"
                self._note(Row(layout, SKIPPED, why=why))
            elif self._smaller(layout, self._open) is not None:
                kept.append(layout)
            elif (row := _read(layout, path := self._path_of(layout))) is not None:
                self._note(row)
            else:
                self._running.append(_Run(layout, path))
        self._waiting = [*kept, *waiting]

    def _look(self) -> None:
        still = []
        for run in self._running:
            if (row := run.look(self.seconds)) is None:
                still.append(run)
            else:
                self._note(row)
        self._running = still

    def _note(self, row: Row) -> None:
        rest = self._rest(row.layout)
        self._open[rest].remove(row.layout)
        if row.state == FULL:
            self._full.setdefault(rest, []).append(row.layout)
        self.rows.append(row)
        self._done(row)

    def _path_of(self, layout: Layout) -> Path:
        """Its file: a readable name, another one for another command or script."""
        files = [self._digest(word.rpartition("=")[2]) for word in layout.words]
        words = json.dumps([simgpu.__version__, layout.words, files])
        key = hashlib.sha256(words.encode()).hexdigest()[:12]
        shown = ",".join(f"{axis}={value}" for axis, value in layout.values.items())
        shown = re.sub(r"[^\w=,.-]", "_", shown)[:_LONGEST]
        return self.folder / f"{shown}-{key}.json"


def _digest(word: str) -> str:
    """Of the text of a file that a command names, such as its script; else ""."""
    path = Path(word)
    if not word or not path.is_file() or path.stat().st_size > _LARGEST:
        return ""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read(layout: Layout, path: Path) -> Row | None:
    """What an earlier sweep has found."""
    try:
        its = json.loads(path.read_text(encoding="utf-8"))
        return _row(layout, its["report"], its["seconds"], kept=True)
    except (OSError, ValueError, KeyError):
        return None


def _row(layout: Layout, report: dict, seconds: float, kept: bool = False) -> Row:
    state = FITS if report["fits"] else FULL
    return Row(layout, state, report, seconds=seconds, kept=kept)


class _Run:
    """A dry run under way: a session of processes."""

    def __init__(self, layout: Layout, path: Path):
        self.layout, self._path = layout, path
        self._part = path.with_suffix(f".{os.getpid()}.part")
        self._since = time.monotonic()
        self._fresh = FreshRun(layout.words, self._part, threads=1)

    def look(self, limit: float) -> Row | None:
        """What has come of it; None if it is still under way."""
        status = self._fresh.status()
        took = time.monotonic() - self._since
        if status is None and took <= limit:
            return None
        report = self._report()
        self.kill()
        if status is None:
            why = f"it took longer than {limit:g} s (--seconds)"
            return Row(self.layout, FAILED, why=why, seconds=took)
        if status not in (0, 3) or report is None:
            return Row(self.layout, FAILED, why=self._why(status), seconds=took)
        whole = {
            "layout": self.layout.values, "command": self.layout.words,
            "seconds": took, "report": report,
        }  # fmt: skip
        self._part.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        self._part.replace(self._path)
        return _row(self.layout, report, took)

    def kill(self) -> None:
        """Nothing of it stays."""
        self._fresh.kill()
        self._part.unlink(missing_ok=True)

    def _report(self) -> dict | None:
        try:
            return json.loads(self._part.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def _why(self, status: int) -> str:
        """The last line of its error."""
        lines = [
            line.strip() for line in self._fresh.said().splitlines() if line.strip()
        ]
        errors = [line for line in lines if _ERROR.match(line)]
        last = (errors or lines or [""])[-1]
        if status < 0:
            return f"it was ended by signal {-status}" + (f"; {last}" if last else "")
        return last or f"exit status {status}"
