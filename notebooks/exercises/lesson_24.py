"""The exercises of lesson 24: steps done again, when to save, and a file that is whole.

One of them kills processes: a rank of its own forks one child for each moment at which
the learner's function may die, and looks at what the child has left behind.
"""

import inspect
import json
import os
import pathlib
import signal
import sys
import tempfile
from pathlib import Path

from exercises.counted import counted, number
from exercises.exercise import NotYet, Wrong, call, exercise, solution
from exercises.in_ranks import in_ranks


@exercise(
    "24.1",
    hints=(
        "How many checkpoints had been written before the kill? Which one of them is "
        "the newest that can be loaded?",
        "`step // every` checkpoints were written. Take away the damaged ones; the "
        "number cannot go below 0. The rest times `every` is the step to go on with.",
    ),
)
def steps_again(function) -> None:
    """Steps that are done again after a kill."""
    for step, every, damaged in _KILLS:
        where = f"killed before step {step}, saved every {every}, {damaged} damaged"
        right = step - max(0, step // every - damaged) * every
        answer = number(call(function, step, every, damaged, when=f"{where},"), where)
        if answer == right:
            continue
        mistakes = {
            step % every: "the damaged checkpoints cannot be loaded",
            step: "checkpoints that are not damaged can be loaded",
            step - right: "this is the step to go on with, not the steps done again",
            step - (step // every - damaged) * every: "without a checkpoint, the job "
            "begins with step 0, not before it",
        }
        why = "go on with the newest checkpoint that can be loaded"
        why = mistakes.get(answer, why)
        raise Wrong(f"{where}: {right} steps, yours are {answer}; {why}")


_KILLS = ((12, 5, 0), (12, 5, 1), (10, 5, 0), (3, 5, 0), (41, 8, 2), (12, 5, 3))


@solution("24.1")
def solution_1():
    """The job has written `step // every` checkpoints before step `step`.

    The newest were damaged, so `step // every - damaged` can be loaded, or none
    if that is less than 0. Each is `every` steps after the one before, so the newest
    that can be loaded tells the step to go on with. The steps after it are done again.
    """

    def steps_again(step, every, damaged):
        whole = max(0, step // every - damaged)
        return step - whole * every

    return steps_again


# -- 24.2 ------------------------------------------------------------------------------


@exercise(
    "24.2",
    hints=(
        "Look at the formula under *How often to save*, and write down what "
        "its `C` and its `M` are here. How is the time between two failures of the "
        "job related to that of one GPU?",
        "Bring all times to seconds before you take the root, and turn the interval "
        "into steps only afterwards. The loss has two terms, and both are shares of "
        "the progress, not seconds.",
    ),
)
def save_every(steps, percent) -> None:
    """Young's interval, and what it costs."""
    between = 40_000 * 3600 / 512  # seconds between failures of the job
    best = (2 * 45 * between) ** 0.5  # seconds
    mistakes = {
        best: "that many seconds; a step takes 3",
        best / 3 / 2**0.5: "the 2 under the root is missing",
        (2 * 45 * 40_000 * 3600) ** 0.5 / 3: "any of the 512 GPUs stops the job",
        (2 * 45 * 40_000 / 512) ** 0.5 / 3: "hours and seconds under one root",
        (2 * 45 * 40_000 / 512) ** 0.5: "hours and seconds under one root",
        (2 * 45 * between / 3) ** 0.5: "the save is in seconds and the failures in "
        "steps",
        best / 3 / 2: "T is the whole root, not half of it",
    }
    why = (
        "find the seconds between two failures of the job first; then √(2 C M), in "
        "steps"
    )
    counted(steps, best / 3, mistakes, why, what="steps", near=0.02)
    half = 100 * 45 / best  # percent
    mistakes = {
        half: "saving and what is done again cost as much; add both",
        1.5 * half: "a failure costs half an interval on average",
        3 * half: "a failure costs half an interval on average, not a whole",
        2 * half / 100: "in percent, please, with one digit after the point",
        0.02: "in percent, please, with one digit after the point",
        2: "with one digit after the point, please",
    }
    why = "C / T + T / (2 M), with one digit after the point"
    counted(percent, 2 * half, mistakes, why, what="percent", near=0.02)


@solution("24.2")
def solution_2():
    """Any of 512 GPUs stops the job, so the job fails 512 times as often as one GPU.

    With Young's formula the best interval is

        T = √(2 · C · M)

    C is the time of one save, and M is the time between two failures of the job. T is
    in seconds like both of them; divided by the time of a step, it is a number of
    steps.

    For each second of progress the job loses

        C / T + T / (2 · M)

    The first term is for saving. The second is for steps done again, because a failure
    comes half an interval after the last save on average. At the best interval both
    terms are equal.
    """
    seconds_of_a_save = 45
    seconds_of_a_step = 3
    hours_between_failures = 40_000 / 512
    seconds_between_failures = hours_between_failures * 3600

    interval = (2 * seconds_of_a_save * seconds_between_failures) ** 0.5
    steps = round(interval / seconds_of_a_step)

    saving = seconds_of_a_save / interval
    again = interval / (2 * seconds_between_failures)
    percent = round(100 * (saving + again), 1)
    return steps, percent


# -- 24.3 ------------------------------------------------------------------------------

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
            descriptor = file if isinstance(file, int) else file.fileno()
            found = os.fstat(descriptor)
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
    pathlibs = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10 keeps its own
    for names, watch in (
        (("fsync", "fdatasync"), sync),
        (("rename", "replace"), move),
        (("sync",), lambda real: sync_all),
    ):
        for name in names:
            if real := getattr(os, name, None):
                watched = watch(real)
                setattr(os, name, watched)
                if hasattr(pathlibs, name):
                    setattr(pathlibs, name, staticmethod(watched))
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


@exercise(
    "24.3",
    hints=(
        "Look at `write_then_rename` under *A checkpoint is whole, or it is not "
        "there*. Which of its lines protect against a kill, and which against a power "
        "cut?",
        "`os.fsync` brings to the disk what the system has, and Python keeps written "
        "bytes in a buffer of its own before that. Choose the other name so that the "
        "rename stays in one folder, and so that a later call can cope with a half "
        "file of that name.",
    ),
)
def keep(function) -> None:
    """The old content or the new one, whole, whenever it is killed."""
    if not inspect.isfunction(function):
        raise Wrong("give a function that you have written with `def`")
    (wrong,) = in_ranks(1, _try, function, seconds=60)
    if wrong == "NOT YET":
        raise NotYet("your function writes nothing so far")
    if wrong:
        raise Wrong(wrong)


@solution("24.3")
def solution_3():
    """The new content gets a name of its own first, and the old name only at the end.

    Until `os.replace`, the file under `path` is untouched, so a kill leaves the old
    content. `os.replace` is atomic, so after it the whole new content is there. Nobody
    can see a state in between.

    A power cut is another matter. The system may write the new name to the disk before
    the content. Therefore `flush` gives Python's buffer to the system, and `os.fsync`
    waits until the system has written it to the disk, both before the rename.

    The other name is in the same folder, because a rename is atomic only inside one
    file system. The name is always the same and the mode is "wb", so the next call
    overwrites the half file of a call that was killed.
    """

    def keep(path, content):
        half = path.with_name(path.name + ".half")
        with open(half, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(half, path)

    return keep
