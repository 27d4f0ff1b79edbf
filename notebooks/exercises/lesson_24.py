"""The exercises of lesson 24: steps done again, when to save, and no rename.

The last one kills nothing real: its store raises an error that no `except Exception`
catches, before each of the calls at which the learner's function may die.
"""

from exercises.counted import counted, number
from exercises.exercise import NotYet, Wrong, call, exercise, run, solution


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


class _Killed(BaseException):
    """Stands for the end of the process that called the store."""


class _Store:
    """Whole objects by name, as in an object store: nothing can be renamed.

    Args:
        calls: calls until the process is killed; -1: it lives.
    """

    def __init__(self, calls: int = -1):
        self.calls, self.objects = calls, {}

    def _call(self) -> None:
        if self.calls == 0:
            raise _Killed  # each later call, too: who is dead does nothing more
        self.calls -= 1

    def put(self, name: str, content: bytes) -> None:
        self._call()
        if not isinstance(name, str) or not isinstance(content, bytes):
            raise TypeError("put(name, content) takes a str and bytes")
        self.objects[name] = content

    def get(self, name: str) -> bytes:
        self._call()
        return self.objects[name]

    def delete(self, name: str) -> None:
        self._call()
        del self.objects[name]

    def names(self) -> list[str]:
        self._call()
        return sorted(self.objects)


def _parts(step: int, ranks: int, start: int = 0) -> dict[str, bytes]:
    """What `ranks` ranks have at a step, after this start of the job."""
    return {f"rank {r}": f"{step} {start} {r}".encode() for r in range(ranks)}


def _found(find, store: _Store, allowed: list[tuple], when: str) -> int:
    """The step that the learner's function finds; `allowed` are whole checkpoints."""
    found = call(find, store, when=when)
    if not isinstance(found, tuple) or len(found) != 2:
        raise Wrong(f"{when} find gives {found!r}, not a step and its parts")
    step, parts = found
    for right_step, right in allowed:
        if step == right_step:
            if parts == right:
                return step
            raise Wrong(f"{when} find gives step {step} with {parts}, not {right}")
    steps = " or ".join(str(right_step) for right_step, _ in allowed)
    raise Wrong(f"{when} find gives step {step!r}, not {steps}")


@exercise(
    "24.3",
    hints=(
        "A kill can come between any two calls. Which call makes the new checkpoint "
        "valid for `find`? Everything that it needs must be there before, and the old "
        "checkpoint until then.",
        "Let one small object, written last, say which step is complete, and which "
        "parts it has: `json.dumps([step, [*parts]]).encode()`. Parts that a killed "
        "process has left may have the names that are written now: keep those.",
    ),
)
def checkpoint_without_rename(save, find) -> None:
    """A whole checkpoint can be found, whenever the process that saves is killed."""
    store = _Store()
    _found(find, store, [(0, {})], "in an empty store,")
    ten, after = (10, _parts(10, 4)), (15, _parts(15, 4))
    for step, parts in (5, _parts(5, 4)), ten, after:
        run(save, store, step, dict(parts), when=f"saving step {step},")
        if not store.objects:
            raise NotYet("your function writes nothing so far")
        _found(find, store, [(step, parts)], f"after a save of step {step},")
        _must_hold(store, parts, f"after a save of step {step},")
    for killed in range(1000):
        store, when = _Store(), f"killed before call {killed + 1} of a save of step 15,"
        run(save, store, *ten)
        store.calls = killed
        try:
            run(save, store, after[0], dict(after[1]), when=when)
            ended = True
        except _Killed:
            ended = False
        if ended and store.calls > 0:  # it made fewer calls
            return
        store.calls = -1
        step = _found(find, store, [ten, after], when)
        again = step + 5, _parts(step + 5, 2, start=1)  # two nodes have been lost
        when = f"{when} and started again with 2 ranks:"
        run(save, store, *again, when=when)
        _found(find, store, [again], f"{when} after a save of step {again[0]},")
        _must_hold(store, again[1], f"{when} after a save of step {again[0]},")


def _must_hold(store: _Store, parts: dict[str, bytes], when: str) -> None:
    """Each part is an object, and no part of another checkpoint is left."""
    if missing := {*parts.values()} - {*store.objects.values()}:
        why = "each part is an object of its own: on a cluster, its own rank writes it"
        raise Wrong(f"{when} no object is {min(missing)!r}; {why}")
    others = [_parts(step, 4) for step in (5, 10, 15)]
    old = {part for other in others for part in other.values()} - {*parts.values()}
    for name, content in store.objects.items():
        if content in old:
            raise Wrong(f"{when} the old part {name!r} is still there")


@solution("24.3")
def solution_3():
    """One small object says which checkpoint counts, and it is replaced by one call.

    Until this call, `find` sees the old checkpoint, whose parts are still there. After
    it, `find` sees the new one, whose parts are all there already. Only then may the
    old parts go. So one call decides, as the rename does in a file system.

    The object lists the parts, too. A killed process may have left parts of the same
    step, of more ranks, and these must not be taken for parts of the new checkpoint.
    For the same reason, `save` deletes what is not in the list, and not what was there
    before it began: it may just have written a part anew.
    """
    import json

    def save_parts(store, step, parts):
        for part, content in parts.items():
            store.put(f"{step}/{part}", content)
        store.put("complete", json.dumps([step, [*parts]]).encode())
        needed = ["complete"] + [f"{step}/{part}" for part in parts]
        for name in store.names():
            if name not in needed:
                store.delete(name)

    def find(store):
        if "complete" not in store.names():
            return 0, {}
        step, parts = json.loads(store.get("complete"))
        return step, {part: store.get(f"{step}/{part}") for part in parts}

    return save_parts, find
