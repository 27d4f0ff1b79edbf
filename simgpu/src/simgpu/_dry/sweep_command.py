"""The command: `simgpu sweep --world 64 'train.py --tp {1,2,4} --batch {1,2,4}'`.

Exit status: 0 if a layout fits, 3 if none does, 1 if all failed, 2 for a command line
that cannot be.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from simgpu._dry import command
from simgpu._dry.axes import Sweep
from simgpu._dry.sweep import FAILED, FITS, FULL, SKIPPED, Row, Runs, say
from simgpu._dry.sweep_table import judge, table

_SECONDS = 600.0
_OURS = {"--price", "--jobs", "--seconds", "--folder", "--grows", "--json"}
_ONE_RUN = {"--timeline", "--memory-snapshot"}  # files that each layout would write
_QUOTES = "a shell makes several words of {1,2} that is not in single quotes"
_HELP = """\
braces:
  --tp {1,2,4}      an axis, called "tp"; they may stand in dry-run's own options, too
  {pp}              the value of the axis that is called so: --kinds pp={pp}
  {size:8B,70B}     a name; braces of the same name go together
  {--fp8,}          a word, or none
  {1..8}            whole numbers
  {{ and }}         braces of the program's own
Put the command in single quotes, or each word with braces, so that the shell leaves
them. All options of `simgpu dry-run` are taken, but for its files.
"""


def parser() -> argparse.ArgumentParser:
    """Of the options that a dry run does not have."""
    made = argparse.ArgumentParser(
        prog="simgpu sweep",
        usage="%(prog)s [--price DOLLARS] [--grows AXIS] [--jobs N] [--seconds S] "
        "[--folder DIR] [--json FILE] [OPTION OF dry-run ...] "
        "'SCRIPT --option {1,2,4} ...'",
        description="Run a training script as a dry run with each choice of what "
        "stands in braces, and say which fit, how fast they are and what they cost.",
        epilog=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    add = made.add_argument
    add("--price", type=float, metavar="DOLLARS", help="of a card for an hour")
    add("--grows", action="append", default=[], metavar="AXIS",
        help="memory only grows with it: where a value does not fit, larger ones are "
        "not run; may be said of several")  # fmt: skip
    add("--jobs", type=int, default=_cores(), metavar="N",
        help="that run at a time (default: the cores of this machine)")  # fmt: skip
    add("--seconds", type=float, default=_SECONDS, metavar="S",
        help=f"that one layout may take (default {_SECONDS:g})")  # fmt: skip
    add("--folder", type=Path, metavar="DIR",
        help="keeps what comes of each layout that does not fail; one that is there is "
        "not run again while its command, and the files that it names, are the same; "
        "what a script imports is not looked at. Without it, only a sweep that is "
        "stopped leaves a folder")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="all for programs; - is stdout")
    return made


def _cores() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def split(words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Our words; the words of dry-run; the program and its own words."""
    ours: list[str] = []
    dry: list[str] = []
    words, place = list(words), 0
    while place < len(words) and words[place].startswith("-"):
        name, has, _ = words[place].partition("=")
        alone = has or name not in _OURS | command._WITH_VALUE
        to = ours if name in _OURS or name in ("-h", "--help") else dry
        to += words[place : place + (1 if alone else 2)]
        place += 1 if alone else 2
    rest = words[place:]
    if len(rest) == 1 and len(rest[0].split()) > 1 and not os.path.exists(rest[0]):
        rest = shlex.split(rest[0])
        if rest[:1] == ["-m"]:
            dry.append("-m")
            rest = rest[1:]
    return ours, dry, rest


def read(words: Sequence[str]):
    """Read the command line.

    Returns:
        The options, and `sweep`, all layouts of the command.
    """
    made = parser()
    ours, dry, program = split(words)
    options = made.parse_args(ours)
    for word in dry:
        if word.partition("=")[0] in _ONE_RUN:
            made.error(f"{word} is for one layout; run it with simgpu dry-run")
    if not program:
        made.error("the program is missing; " + _QUOTES)
    try:
        options.sweep = Sweep([*dry, *program])
    except ValueError as error:
        made.error(str(error))
    for axis in options.grows:
        if axis not in options.sweep.axes:
            there = ", ".join(options.sweep.axes)
            made.error(f"--grows {axis}: no axis is called {axis}; there are {there}")
    if options.jobs < 1 or not options.seconds > 0:
        made.error("--jobs and --seconds must be more than 0")
    if options.price is not None and not options.price >= 0:
        made.error(f"--price {options.price}: dollars for a card and hour, 0 or more")
    if options.json is not None and str(options.json) != "-":
        if not options.json.absolute().parent.is_dir():
            made.error(f"there is no folder {options.json.absolute().parent}")
    try:
        command.read(next(options.sweep.layouts()).words)
    except SystemExit:
        print(f"simgpu sweep: {_QUOTES}", file=sys.stderr)
        raise
    return options


class Said:
    """What a sweep says on stderr while it goes on.

    Args:
        count: layouts in all.
    """

    def __init__(self, count: int):
        self.count, self.over = count, 0
        self._ran, self._since = 0, time.monotonic()
        self._is_terminal = sys.stderr.isatty()
        self._line, self._shown = "", 0.0

    def done(self, row: Row) -> None:
        """A layout is over: a line that stays."""
        self.over += 1
        self._ran += not row.kept and row.state != SKIPPED
        what = row.why if row.state in (FAILED, SKIPPED) else row.state
        if row.state == FITS:
            seconds = row.report["step_seconds"]
            what += f", {row.report['peak_bytes'] / 2**30:,.2f} GiB"
            what += f", {seconds * 1e3:,.1f} ms a step"
        took = "was there" if row.kept else f"{row.seconds:.0f} s"
        took = "" if row.state == SKIPPED else f" ({took})"
        self._clear()
        place = f"[{self.over}/{self.count}]"
        line = f"{place} {say(row.layout.values)}: {what}{took}"
        print(line, file=sys.stderr, flush=True)

    def tick(self, running: int) -> None:
        """On a terminal: how far it is."""
        now = time.monotonic()
        if not self._is_terminal or now - self._shown < 1.0:
            return
        self._shown = now
        took = now - self._since
        line = f"sweep: {self.over} of {self.count} done, {running} run; {took:.0f} s"
        if self._ran:
            left = took / self._ran * (self.count - self.over)
            line += f", at most {left:,.0f} s more at this rate"
        self._clear()
        self._line = line[: shutil.get_terminal_size().columns - 1]
        print(self._line, end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        self._clear()

    def _clear(self) -> None:
        if self._line:
            print(f"\r{' ' * len(self._line)}\r", end="", file=sys.stderr)
            self._line = ""


def main(words: Sequence[str]) -> int:
    """Run all layouts, and print the table.

    Args:
        words: after `simgpu sweep`.

    Returns:
        The exit status.
    """
    options = read(words)
    layouts = list(options.sweep.layouts())
    said = Said(len(layouts))
    folder = options.folder
    try:
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="simgpu-sweep-"))
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"simgpu sweep: {error}", file=sys.stderr)
        return command.WRONG
    runs = Runs(
        layouts, options.sweep.axes, folder.absolute(), jobs=options.jobs,
        seconds=options.seconds, grows=options.grows, done=said.done, tick=said.tick,
    )  # fmt: skip
    stopped = False
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        runs.run()
    except KeyboardInterrupt:
        stopped = True
    finally:
        said.end()
        signal.signal(signal.SIGTERM, before)
        if options.folder is None and not (stopped and os.listdir(folder)):
            shutil.rmtree(folder, ignore_errors=True)
    rows = judge(runs.rows, options.price)
    _show(options, rows)
    if stopped:
        go_on = f"; go on with --folder {shlex.quote(str(folder))}" * folder.is_dir()
        print(f"simgpu sweep: stopped, {said.over} of {len(layouts)} layouts are done"
              f"{go_on}", file=sys.stderr)  # fmt: skip
        return 130
    states = {row.state for row in rows}
    if FITS in states:
        return command.FITS
    return command.FULL if FULL in states else command.FAILED


def _stop(*_) -> None:
    raise KeyboardInterrupt


def _show(options, rows: list[Row]) -> None:
    """The table, or all of it for programs."""
    axes, to = options.sweep.axes, options.json
    layouts = [row.as_dict() for row in rows]
    found = {"axes": axes, "price": options.price, "layouts": layouts}
    words = json.dumps(found, indent=1)
    if str(to) == "-":
        print(words)
        return
    if to is not None:
        to.write_text(words + "\n", encoding="utf-8")
    print(table(rows, list(axes), options.price))
