"""The command: `simgpu dry-run --world 1024 --card H100 train.py --batch 4`.

Exit status: 0 if it fits, 3 if it does not, 1 if the program failed, 2 for a command
line that cannot be.
"""

import argparse
import contextlib
import gc
import json
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

from simgpu import _failures as failures
from simgpu._dry import launchers
from simgpu._request import COMPILE

FITS, FAILED, WRONG, FULL = 0, 1, 2, 3
_WITH_VALUE = {
    "--world", "--node", "--rank", "--card", "--memory", "--network", "--steps",
    "--kinds", "--routing", "--tokens", "--samples", "--json", "--timeline",
    "--memory-snapshot", "--compile", "--host",
}  # fmt: skip
_NEVER = (
    "the program ended after {} of {} steps: a step is a call of Optimizer.step, and "
    "two are needed to time one"
)

_NO_WORLD = "--world N is missing: of how many ranks is the job?"
_BEHIND = (
    "--world stands after {0}, so that it is an argument of {0}; write it before: "
    "simgpu dry-run --world N {0}"
)


def parser() -> argparse.ArgumentParser:
    """Of what stands before the program."""
    made = argparse.ArgumentParser(
        prog="simgpu dry-run",
        usage="%(prog)s --world N [--node N] [--card CARD] [--network BANDWIDTH] "
        "[--rank R] [--memory SIZE] [--kinds KINDS] [--routing HOW] [--steps N] "
        "[--tokens N] [--samples N] [--host KIND] [--compile HOW] [--json FILE] "
        "[--timeline FILE] [--memory-snapshot FILE] "
        "(SCRIPT | -m MODULE | LAUNCHER ...) [ARGUMENT ...]",
        description="Run a training script as one rank of any number, without values: "
        "what memory it needs, and how long a step takes.",
        allow_abbrev=False,
    )
    add = made.add_argument
    add("--world", type=int, metavar="N", help="ranks of the job")
    add("--node", type=int, metavar="N", help="ranks of a node (default: at most 8)")
    add("--rank", type=int, default=0, metavar="R", help="that runs (default 0)")
    add("--card", default="H100",
        help="of every rank (default H100), or a file of simgpu measure")  # fmt: skip
    add("--memory", metavar="SIZE", help='of each card: "40GB"; default: all it has')
    add(
        "--network", metavar="BANDWIDTH", help='of a node: "400 Gbit/s", or such a file'
    )
    add("--steps", type=int, default=3, metavar="N", help="to run (default 3)")
    add("--kinds", metavar="KINDS",
        help='where ranks differ, which of them run: "pp=4" for stages of as many '
        'ranks each, or the ranks themselves, "0,16"; "same": another rank sends what '
        "this one does")  # fmt: skip
    add("--routing", default="even", metavar="HOW",
        help="of tokens to experts: even (default), or refuse")  # fmt: skip
    add("--tokens", type=int, metavar="N",
        help="of a step, of the whole job (default: counted at the embedding)"
    )  # fmt: skip
    add("--samples", type=int, metavar="N",
        help="the same, of samples (default: counted where the model is called)"
    )  # fmt: skip
    add("--host", default="bare", metavar="KIND",
        help="what a launch and a collective cost it: bare (default, 10 us), fast or "
        "slow, as in trainers (36 us), or microseconds of a launch: 20")  # fmt: skip
    add("--compile", default="fuse", choices=COMPILE,
        metavar="HOW", help="what torch.compile does: fuse (default): count a chain of "
        "pointwise operations and reductions as one kernel; eager: give back what it "
        "is given; refuse")  # fmt: skip
    add("--no-compile", dest="compile", action="store_const", const="eager",
        help="--compile eager")  # fmt: skip
    add("--json", type=Path, metavar="FILE",
        help="the report for programs; - is stdout, and the program's own prints go to "
        "stderr")  # fmt: skip
    add("--timeline", type=Path, metavar="FILE", help="a trace, for ui.perfetto.dev")
    add("--memory-snapshot", type=Path, metavar="FILE",
        help="for PyTorch's viewer, pytorch.org/memory_viz")  # fmt: skip
    add("-m", dest="module", action="store_true", help="as in python")
    add("program", help="a script, a module with -m, or torchrun, accelerate launch or "
        "deepspeed with their own words")  # fmt: skip
    return made


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our words, with the program, and the program's own."""
    words, place = list(words), 0
    while place < len(words) and words[place].startswith("-"):
        place += 2 if words[place] in _WITH_VALUE else 1
    return words[: place + 1], words[place + 1 :]


def read(words: Sequence[str]) -> SimpleNamespace:
    """Read the command line.

    Returns:
        The options, and `arguments` of the program.
    """
    ours, theirs = split(words)
    made = parser()
    options = made.parse_args(ours)
    options.arguments = theirs
    launchers.look_behind(options, made)
    if options.world is None:
        behind = any(word.partition("=")[0] == "--world" for word in theirs)
        made.error(_BEHIND.format(options.program) if behind else _NO_WORLD)
    if not options.module and not os.path.isfile(options.program):
        made.error(f"there is no script {options.program}")
    for path in (options.json, options.timeline, options.memory_snapshot):
        if (
            path is not None
            and str(path) != "-"
            and not path.absolute().parent.is_dir()
        ):
            made.error(f"there is no folder {path.absolute().parent}")
    return options


def job_of(options):
    """What is asked for, checked.

    Raises:
        ValueError: for what cannot be.
    """
    from simgpu._dry.run import Job

    return Job(
        options.world, options.node, options.rank, options.card, options.memory,
        options.network, options.steps, options.kinds, options.routing,
        options.compile, options.tokens, options.host, options.samples,
    )  # fmt: skip


def program_of(options) -> Callable[[], None]:
    """The program, as `python` would run it."""

    def be() -> None:
        sys.argv = [options.program, *options.arguments]
        if options.says_local_rank:
            sys.argv.insert(1, f"--local_rank={os.environ['LOCAL_RANK']}")
        os.environ.update(options.environ)
        if options.module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(options.program, run_name="__main__", alter_sys=True)
            return
        path = os.path.abspath(options.program)
        sys.path.insert(0, os.path.dirname(path))
        runpy.run_path(path, run_name="__main__")

    return be


def main(words: Sequence[str]) -> int:
    """Run the program without its values, and say what came of it.

    Args:
        words: after `simgpu dry-run`.

    Returns:
        The exit status.
    """
    options = read(words)
    gc.disable()  # a sixth of the time of these imports is the collector's
    try:
        from simgpu._dry import kinds, report, run
        from simgpu._dry.progress import Progress

        job = job_of(options)
        run.import_for_optimizers()
    except ValueError as error:
        print(f"simgpu dry-run: {error}", file=sys.stderr)
        return WRONG
    finally:
        gc.enable()
    timeline, snapshot = options.timeline, options.memory_snapshot
    keep = report.Kept(
        timeline and timeline.absolute(), snapshot and snapshot.absolute()
    )
    to = options.json and (options.json if str(options.json) == "-" else
                           options.json.absolute())  # fmt: skip
    aside = _aside() if str(to) == "-" else contextlib.nullcontext()
    try:
        with aside:
            found = run.run(job, program_of(options), Progress(), keep)
    except kinds.KindFailed as error:
        print(error, file=sys.stderr)
        return _failed(str(error), to)
    except KeyboardInterrupt:
        print("simgpu dry-run: interrupted", file=sys.stderr)
        return 130
    except SystemExit as error:
        why = f"the program ended with exit status {error.code}"
        print(f"simgpu dry-run: {why}", file=sys.stderr)
        return _failed(why, to)
    except BaseException as error:
        error = error.with_traceback(kinds.own_part(error))
        failures.report(type(error), error, error.__traceback__, sys.excepthook)
        return _failed(f"{type(error).__name__}: {error}", to)
    _write(found, to)
    if found.fits and found.steps < 2:
        print(_NEVER.format(found.steps, job.steps), file=sys.stderr)
        return FAILED
    return FITS if found.fits else FULL


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """What the program and its children print goes to stderr, not to stdout."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _failed(why: str, to: Path | None) -> int:
    """Programs, too, hear why: nobody knows whether it fits."""
    if to is not None:
        _write_json({"fits": None, "error": why}, to)
    return FAILED


def _write(found, to: Path | None) -> None:
    if to is not None:
        _write_json(found.as_dict(), to)
    if str(to) != "-":
        print(found)


def _write_json(values: dict, to: Path) -> None:
    words = json.dumps(values, indent=1, default=str)
    if str(to) == "-":
        print(words)
    else:
        to.write_text(words + "\n", encoding="utf-8")
