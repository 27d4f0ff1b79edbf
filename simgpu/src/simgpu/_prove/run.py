"""Runs a program on several numbers of ranks, and compares them.

Every run is a job of new processes on simulated GPUs, started as torchrun starts them,
in a folder of its own, so that no run finds what another one has written.
"""

import contextlib
import io
import os
import pickle
import re
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from simgpu._prove import rounding
from simgpu._prove.combine import combine
from simgpu._prove.compare import Finding, first_difference, unaligned
from simgpu._prove.noise import Rounding
from simgpu._prove.record import RankRecord
from simgpu._prove.recorder import Recorder
from simgpu._prove.within import look
from simgpu._ranks import pickling
from simgpu._ranks.run_ranks import RanksFailed, run_ranks

STEPS = 8
RUN_SECONDS = 120.0
_WIDE = 40  # letters of the longest line of progress
_ERROR = re.compile(r"[\w.]*(Error|Exception|Exit)\b")


@dataclass(frozen=True)
class Report:
    """What was found; true if that is nothing.

    Attributes:
        worlds: the numbers of ranks that were compared.
        steps: that were compared in each.
        findings: at most one difference for each number of ranks, and what is never
            right.
        notes: what could not be compared.
    """

    worlds: tuple[int, ...]
    steps: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        if self.findings:
            return "\n".join(map(str, [*self.findings, *self.notes]))
        worlds = ", ".join(map(str, self.worlds))
        what = "gradients, norms and updates"
        if not self.notes:
            what = f"samples, {what}"
        agree = (
            f"{self.steps} steps on {worlds} ranks: {what} agree as far as rounding "
            "allows"
        )
        return "\n".join([agree, *self.notes])

    __repr__ = __str__


def prove(
    program: str | Path | Callable[[], object], worlds: Sequence[int] = (1, 2), *,
    arguments: Sequence[str] = (), steps: int = STEPS, seconds: float = RUN_SECONDS,
    module: bool = False,
) -> Report:  # fmt: skip
    """Whether a training program does the same on any number of ranks.

    The program must train on the same global batch whatever the number of ranks: it
    divides the batch by the world size. It runs unmodified, but dropout drops nothing
    (what it would drop is compared). On one rank it runs some times more with rounding
    errors added, which say how far right runs may differ.

    Args:
        program: a script, or a function without arguments, of a notebook for example.
        worlds: numbers of ranks; one is always among them.
        arguments: of the script; "{folder}" in them is a new folder for each run, and
            "{ranks}" the number of its ranks, for what must grow with them.
        steps: of the optimizer, of which the first are compared.
        seconds: that one run may take.
        module: the program is the name of a module, as behind `python -m`.

    Raises:
        FileNotFoundError: if there is no such script.
        ValueError: for numbers of ranks that cannot be, a program that fails on one
            rank, or one that takes no step.
    """
    worlds = tuple(sorted({1, *worlds}))
    if worlds[0] < 1 or len(worlds) < 2:
        raise ValueError(f"worlds={worlds}: name at least one number of ranks above 1")
    if not callable(program) and not module and not Path(program).is_file():
        raise FileNotFoundError(f"there is no script {program}")
    work = _Work(program, list(arguments), steps, seconds, module)
    with _Line(rounding.RUNS + len(worlds)) as line:
        return _compare(work, worlds, line)


def _compare(work: "_Work", worlds: tuple[int, ...], line: "_Line") -> Report:
    """What `prove` says, once the program is known to be there."""
    try:
        alone = []
        for seed in (None, *range(rounding.RUNS)):
            line.next(1)
            alone.append(work.run(1, seed))
    except RanksFailed as failed:
        raise ValueError(f"the program fails on one rank: {_reason(failed)}") from None
    if not alone[0][0].steps:
        raise ValueError("the program has taken no step of a torch.optim optimizer")
    first = alone[0][0].steps[0]
    wholes = first.before | first.buffers
    reference, *noisy = (combine(records, wholes) for records in alone)
    allowed = rounding.Allowed(reference, noisy)
    findings = list(look(alone[0]))
    notes: list[str] = []
    for ranks in worlds[1:]:
        line.next(ranks)
        try:
            records = work.run(ranks)
        except RanksFailed as failed:
            rank = next(iter(failed.failures))
            findings.append(
                Finding(ranks, None, "error", f"rank {rank}", _reason(failed))
            )
            continue
        steps_of_all = combine(records, wholes)
        difference = first_difference(ranks, steps_of_all, reference, allowed)
        findings += filter(None, [difference])
        if difference is None:
            notes += filter(None, [unaligned(steps_of_all, reference, ranks)])
        findings += (f for f in look(records) if f.stage not in _stages(findings))
    return Report(worlds, len(reference), tuple(findings), tuple(notes))


def assert_same_on_worlds(
    program: str | Path | Callable[[], object], worlds: Sequence[int] = (1, 2), *,
    arguments: Sequence[str] = (), steps: int = STEPS, seconds: float = RUN_SECONDS,
    module: bool = False,
) -> Report:  # fmt: skip
    """`prove` for a test: fails with the report where the program does not agree.

        def test_it_trains_the_same_on_two_ranks():
            simgpu.assert_same_on_worlds("train.py", (1, 2))

    Args and errors are those of `prove`.

    Returns:
        The report of what was compared.

    Raises:
        AssertionError: if something was found; its text is the report's.
    """
    __tracebackhide__ = True
    report = prove(
        program, worlds, arguments=arguments, steps=steps, seconds=seconds,
        module=module,
    )  # fmt: skip
    if not report:
        raise AssertionError(str(report))
    return report


def _stages(findings: list[Finding]) -> set[str]:
    return {finding.stage for finding in findings}


def _reason(failed: RanksFailed) -> str:
    """Why the first rank failed: the error at the end of its traceback."""
    lines = next(iter(failed.failures.values())).strip().splitlines()
    errors = [n for n, line in enumerate(lines) if _ERROR.match(line)]
    if not errors:
        return lines[0]
    reason, *more = lines[errors[-1] :]
    if not reason.rstrip("=").rstrip().endswith(":"):
        return reason
    # a ruled-off report: its first sentence
    first = next((line for line in more if line.strip("= ")), "")
    return f"{reason.rstrip('= ')} {first}"


@dataclass(frozen=True)
class _Work:
    """A program, and how it is to be run."""

    program: str | Path | Callable[[], object]
    arguments: list[str]
    steps: int
    seconds: float
    module: bool

    def run(self, ranks: int, seed: int | None = None) -> list[RankRecord]:
        """What each rank has noted; with noise, if there is a seed."""
        if callable(self.program):
            program: str | bytes = pickling.dumps(self.program)
        elif self.module:
            program = str(self.program)
        else:
            program = os.path.abspath(self.program)
        with tempfile.TemporaryDirectory() as folder, _silence():
            words = {"{folder}": folder, "{ranks}": str(ranks)}
            arguments = [_filled(argument, words) for argument in self.arguments]
            return run_ranks(
                _record, ranks, program, arguments, folder, self.steps, seed,
                [os.getcwd(), *sys.path], self.module, seconds=self.seconds,
            )  # fmt: skip


def _filled(text: str, words: dict[str, str]) -> str:
    for name, value in words.items():
        text = text.replace(name, value)
    return text


class _Line:
    """Which run it is, on one line of a terminal that is cleared at the end.

    Args:
        runs: how many there will be.
    """

    def __init__(self, runs: int):
        self._runs, self._number = runs, 0
        self._shows = sys.stderr.isatty()

    def __enter__(self) -> "_Line":
        return self

    def __exit__(self, *error: object) -> None:
        self._say("")

    def next(self, ranks: int) -> None:
        self._number += 1
        many = "1 rank" if ranks == 1 else f"{ranks} ranks"
        self._say(f"prove: run {self._number} of {self._runs}, on {many}")

    def _say(self, words: str) -> None:
        if self._shows:
            print(f"\r{words:{_WIDE}}\r{words}", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """What the program prints is not shown."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        yield


def _record(
    program: str | bytes, arguments: list[str], folder: str, steps: int,
    seed: int | None, path: list[str], module: bool,
) -> RankRecord:  # fmt: skip
    """In a rank: run the program and note what it does."""
    sys.path[:] = path if module else path[1:]
    os.chdir(folder)
    with Recorder(steps) as recorder, contextlib.ExitStack() as noise:
        if seed is not None:
            noise.enter_context(Rounding(seed))
        if isinstance(program, bytes):
            pickle.loads(program)()
        else:
            _run_script(program, arguments, module)
    return recorder.record


def _run_script(script: str, arguments: list[str], module: bool) -> None:
    sys.argv = [script, *arguments]
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(script))
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RuntimeError(f"the script has ended with status {end.code}") from None
