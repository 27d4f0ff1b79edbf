"""Judges of the exercises of lesson 16.

One of them kills processes: a rank of its own forks one child for each moment at which
the learner's function may die, and looks at what the child has left behind.
"""

import contextlib
import inspect
import io
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from helpers.check import NotYet, Wrong, call, exercise, name_mistake, number

# -- 16.1 ------------------------------------------------------------------------------


def _log(*starts: tuple[int, int, int]) -> list[dict]:
    """A diary. A start has ranks, its first step, and the one before which it ended.

    Each step has 7 rows of its own, and a rank takes every n-th, as in the lesson.
    """
    log = [{"event": "add node", "node": 0}]
    for ranks, first, end in starts:
        all_ = [{"rank": rank, "ranks": ranks} for rank in range(ranks)]
        log += [{"event": "begin", **who} for who in all_]
        log += [{"event": "loaded", **who, "step": first} for who in all_]
        for step in range(first, end):
            rows = list(range(7 * step, 7 * step + 7))
            for who in all_:
                mine = rows[who["rank"] :: ranks]
                log.append({"event": "step", **who, "step": step, "rows": mine})
    return [*log, {"event": "done", "rank": 0, "ranks": starts[-1][0]}]


class _Count(NamedTuple):
    right: int  # rows in vain
    every: int
    entries: int  # in vain
    departed: int  # rows in vain of ranks that did not come again
    repeated: int  # rows of steps that were done again


def _counted(log: list[dict]) -> _Count:
    done, alive, lost, departed = [], [], [], []
    for entry in log:
        if entry["event"] == "loaded":
            lost += (now := [e for e in alive if e["step"] >= entry["step"]])
            departed += [e for e in now if e["rank"] >= entry["ranks"]]
            alive = [e for e in alive if e["step"] < entry["step"]]
        elif entry["event"] == "step":
            done.append(entry)
            alive.append(entry)
    different = {(e["step"], row) for e in done for row in e["rows"]}
    every = _rows(done)
    return _Count(
        _rows(lost), every, len(lost), _rows(departed), every - len(different)
    )


def _rows(entries: list[dict]) -> int:
    return sum(len(e["rows"]) for e in entries)


_DIARIES = (
    ("two ranks end before step 7 and go on from 5", _log((2, 0, 7), (2, 5, 9))),
    ("nothing happens", _log((2, 0, 8))),
    ("it ends just after a checkpoint", _log((2, 0, 5), (2, 5, 9))),
    ("it ends twice, and loses step 6 both times",
     _log((2, 0, 7), (2, 5, 8), (2, 5, 9))),
    ("the second checkpoint is spoilt, and it goes back from step 10 to 0",
     _log((2, 0, 7), (2, 5, 10), (2, 0, 12))),
    ("it goes back from step 9 to 5, and ends for good after step 6",
     _log((2, 0, 9), (2, 5, 7))),
    ("it has one rank, then three, then two", _log((1, 0, 7), (3, 5, 9), (2, 5, 12))),
)  # fmt: skip


@exercise("16.1")
def vain(function) -> None:
    """Rows that were computed in vain, by the diary."""
    for words, log in _DIARIES:
        copy = json.loads(json.dumps(log))
        answer = call(function, copy, when=f"where {words},")
        answer = number(answer, f"where {words}")
        found = _counted(log)
        if answer == found.right:
            continue
        ranks = max(e["ranks"] for e in log if e["event"] == "begin")
        mistakes = {
            "it counts the rows that are worth something": found.every - found.right,
            "it counts all rows": found.every,
            "it counts entries: add up their rows": found.entries,
            "each rank notes that it has loaded, but a row is lost only once":
                found.right * ranks,
            "the rows of a rank that is not there any more are lost as well":
                found.right - found.departed,
            "a row of a lost step is in vain, also if nobody has done it again":
                found.repeated,
        }  # fmt: skip
        why = "a step has 7 rows; rank 0 takes the first, rank 1 the next, and so on"
        why = next((w for w, value in mistakes.items() if answer == value), why)
        raise Wrong(f"where {words}: {found.right} rows, yours are {answer}; {why}")


# -- 16.2 ------------------------------------------------------------------------------

OLD, NEW = b"old!" * 15_000, b"and new" * 13_000
SMALL = b"small"  # less than what Python keeps before it writes
BYTES = (0, 1, 4096, 50_000, len(NEW) - 1)
MOST = 300  # lines that are tried


def _child(what) -> int:
    """Run `what` in a child; its exit status, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            what()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _traced(function, path: Path, at: int = -1, content: bytes = NEW) -> int:
    """Call the function and count its lines; the process dies before line `at`."""
    home, lines = function.__code__.co_filename, 0

    def step(frame, event, _):
        nonlocal lines
        if frame.f_code.co_filename != home:
            return None
        if event in ("line", "return"):
            if lines == at:
                os.kill(os.getpid(), signal.SIGKILL)
            lines += 1
        return step

    sys.settrace(step)
    try:
        function(path, content)
    finally:
        sys.settrace(None)
    return lines


def _limited(function, path: Path, most: int) -> None:
    """Call the function in a process that the system kills at a byte of a file."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    function(path, NEW)


def _watched(function, path: Path, report: Path, content: bytes = NEW) -> None:
    """Call the function; note its lines, and each rename with what was synced then."""
    notes: dict = {"lines": 0, "renames": [], "error": None}
    synced: dict[int, int] = {}  # inode -> bytes

    def sync(real):
        def watched(file):
            number = file if isinstance(file, int) else file.fileno()
            found = os.fstat(number)
            synced[found.st_ino] = found.st_size
            return real(file)

        return watched

    def sync_all():
        for file in path.parent.iterdir():
            synced[file.stat().st_ino] = file.stat().st_size

    def move(real):
        def watched(source, target, **options):
            found = os.stat(source)
            known = synced.get(found.st_ino)
            if Path(source).resolve().parent != Path(target).resolve().parent:
                notes["renames"].append("elsewhere")
            elif known is None:
                notes["renames"].append("no")
            else:
                whole = known >= found.st_size
                notes["renames"].append("synced" if whole else "early")
            return real(source, target, **options)

        return watched

    # in the module `os`, and by the names that the function's own module may have
    namespace = function.__globals__
    for names, watch in (
        (("fsync", "fdatasync"), sync),
        (("rename", "replace"), move),
        (("sync",), lambda real: sync_all),
    ):
        for name in names:
            if real := getattr(os, name, None):
                watched = watch(real)
                setattr(os, name, watched)
                for own in [n for n, value in namespace.items() if value is real]:
                    namespace[own] = watched
    try:
        notes["lines"] = _traced(function, path, content=content)
    except Exception as error:
        notes["error"] = f"{type(error).__name__}: {error}"
    report.write_text(json.dumps(notes))


def _try(function) -> str | None:
    """What is wrong with the function, or None; runs in a rank."""
    with tempfile.TemporaryDirectory() as folder:
        return _try_in(Path(folder), function)


def _try_in(folder: Path, function) -> str | None:
    home, report = folder / "home", folder / "report"
    path = home / "checkpoint.pt"
    temporary = folder / "temporary"  # what dies cannot remove its files
    temporary.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)

    def afresh() -> None:
        home.mkdir(exist_ok=True)
        for other in home.iterdir():
            other.unlink()
        path.write_bytes(OLD)

    def what_is_there() -> str | None:
        if not path.exists():
            return "there is no file of that name"
        content = path.read_bytes()
        if content in (OLD, NEW):
            return None
        return f"the file has {len(content):,} bytes, neither the old nor the new"

    afresh()
    _child(lambda: _watched(function, path, report))
    notes = json.loads(report.read_text())
    if notes["error"]:
        return f"your code raised {notes['error']}"
    if path.exists() and path.read_bytes() == OLD:
        return "NOT YET"
    if not path.exists() or path.read_bytes() != NEW:
        return "without any kill, the file does not have the new content afterwards"
    left = sorted(p.name for p in home.iterdir() if p != path)
    if left:
        return f"when all went well, {left[0]!r} is left over"
    afresh()
    _child(lambda: _watched(function, path, report, SMALL))
    small = json.loads(report.read_text())
    if small["error"] or not path.exists() or path.read_bytes() != SMALL:
        why = small["error"] or "the file does not have it afterwards"
        return f"with a content of {len(SMALL)} bytes: {why}"
    moments = [
        (f"killed at line {n + 1} of those it runs",
         lambda n=n: _traced(function, path, n))
        for n in range(min(notes["lines"], MOST))
    ] + [
        (f"killed at byte {n:,}", lambda n=n: _limited(function, path, n))
        for n in BYTES
    ]  # fmt: skip
    for words, what in moments:
        afresh()
        status = _child(what)
        if wrong := what_is_there():
            if status >= 0:
                words = words.replace("killed at", "when the disk took only up to")
            return f"{words}: {wrong}"
        _child(lambda: _watched(function, path, report))
        error = json.loads(report.read_text())["error"]
        if error or path.read_bytes() != NEW:
            return f"{words}: the next call fails ({error or 'nothing written'})"
    if not notes["renames"] or not small["renames"]:
        return "no file was renamed: os.replace is what makes it appear at once"
    verdicts = notes["renames"][-1], small["renames"][-1]
    return next(
        (why for verdict, why in _VERDICTS.items() if verdict in verdicts), None
    )


_VERDICTS = {
    "elsewhere": "the new file was written in another folder; that may be another "
    "file system, where a move copies. Write it beside the old one",
    "no": "no kill spoils it, but a power cut may: the new name can reach the disk "
    "before the content; os.fsync comes before the rename",
    "early": "os.fsync came before all bytes had left Python: flush() first",
}


@exercise("16.2")
def keep(function) -> None:
    """The old content or the new one, whole, whenever it is killed."""
    from helpers.ranks import RankError, Ranks

    if not inspect.isfunction(function):
        raise Wrong("give a function that you have written with `def`")
    with contextlib.redirect_stdout(io.StringIO()):
        ranks = Ranks(1, backend="gloo")
        try:
            (wrong,) = ranks.run(_try, function, timeout=60)
        except RankError as error:
            raise Wrong(str(error).splitlines()[0]) from error
        finally:
            ranks.close()
    if wrong == "NOT YET":
        raise NotYet("your function writes nothing so far")
    if wrong:
        raise Wrong(wrong)


# -- 16.3 ------------------------------------------------------------------------------

_MEAN = 40_000 * 3600 / 512  # seconds between failures of the job
_BEST = (2 * 45 * _MEAN) ** 0.5  # seconds
_STEPS = {
    _BEST: "that many seconds; a step takes 3",
    _BEST / 3 / 2**0.5: "the 2 under the root is missing",
    (2 * 45 * 40_000 * 3600) ** 0.5 / 3: "any of the 512 GPUs stops the job",
    (2 * 45 * 40_000 / 512) ** 0.5 / 3: "hours and seconds under one root",
    (2 * 45 * 40_000 / 512) ** 0.5: "hours and seconds under one root",
    (2 * 45 * _MEAN / 3) ** 0.5: "the save is in seconds and the failures in steps",
    _BEST / 3 / 2: "T is the whole root, not half of it",
}
_PERCENT = {
    100 * 45 / _BEST: "saving and what is done again cost as much; add both",
    1.5 * 100 * 45 / _BEST: "a failure costs half an interval on average",
    3 * 100 * 45 / _BEST: "a failure costs half an interval on average, not a whole",
    2 * 45 / _BEST: "in percent, please, with one digit after the point",
    0.02: "in percent, please, with one digit after the point",
    2: "with one digit after the point, please",
}


@exercise("16.3")
def save_every(steps, percent) -> None:
    """Young's interval, and what it costs."""
    for name, answer, right, mistakes in (
        ("steps", steps, _BEST / 3, _STEPS),
        ("percent", percent, 200 * 45 / _BEST, _PERCENT),
    ):
        answer = number(answer, name)
        if abs(answer / right - 1) < 0.02:
            continue
        name_mistake(answer, mistakes, 0.02, f"{name}:")
        raise Wrong(
            "steps: find the seconds between two failures of the job first; then "
            "√(2 C M), in steps"
            if name == "steps"
            else "percent: C / T + T / (2 M), with one digit after the point"
        )
