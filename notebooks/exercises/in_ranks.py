"""Runs a learner's function in ranks of its own, and tells whose the errors are."""

import contextlib
import io

from exercises.exercise import NotYet, Wrong

SECONDS = 30  # before the ranks are given up
MOST = 200  # characters of an error
_WRONG, _NOT_YET = (f"{kind.__module__}.{kind.__name__}: " for kind in (Wrong, NotYet))
_ENDED = ("did not finish", "the process ", "lost another rank")


def in_ranks(
    size: int,
    function,
    *args,
    seconds: float = SECONDS,
    reuse: bool = False,
    meanings: dict[str, str] | None = None,
    on: str = "cpu",
) -> list:
    """What each rank returns; in ranks of their own, which end those that were open.

    Args:
        size: how many ranks.
        function: of the check, to run in each rank; it calls the learner's by `call`.
        args: for it, the learner's among them.
        seconds: that it may take; what the ranks import for it is not counted.
        reuse: take the ranks that are open, if they are as many and on the CPU.
        meanings: part of an error's first line -> what it means to the learner.
        on: "cpu", or "cuda" for ranks with a GPU each.

    Raises:
        NotYet: if the learner's function returns nothing in a rank.
        Wrong: for an error in the learner's code, or if the ranks do not finish.
        RankError: for an error of the check's own.
    """
    from simgpu import RankError, Ranks, current_ranks

    theirs = current_ranks() if reuse else None
    if theirs is None or (theirs.size, theirs.backend) != (size, "gloo"):
        theirs = None
    with contextlib.redirect_stdout(io.StringIO()):  # "4 real ranks: ..."
        ranks = theirs or Ranks(size, device=on)
    try:
        ranks.run(_arrived, function, args)
        return ranks.run(function, *args, timeout=seconds)
    except TypeError as error:  # "cannot send this to the ranks"
        raise Wrong(str(error)) from error
    except RankError as error:
        if (trouble := _of_the_learner(str(error))) is None:
            raise
        if _NOT_YET in trouble:
            raise NotYet(trouble.partition(_NOT_YET)[2].splitlines()[0]) from error
        for part, meaning in (meanings or {}).items():
            if part in trouble:
                raise Wrong(meaning) from error
        raise Wrong(_in_short(trouble, size)) from error
    finally:
        if ranks is not theirs:
            ranks.close()


def _arrived(function, args) -> None:
    """In a rank: nothing, but now it has imported what the function needs."""


def _of_the_learner(words: str) -> str | None:
    """The first paragraph of a `RankError` that the learner's code is to blame for.

    That is an error that `call` has seen, one with a line of the learner's, and a rank
    that hangs or has died.
    """
    paragraphs: list[str] = []
    for line in words.splitlines():
        if line.startswith("rank"):
            paragraphs.append(line)
        elif paragraphs:
            paragraphs[-1] += f"\n{line}"
    marks = (_WRONG, _NOT_YET, ", line ", *_ENDED)
    return next((p for p in paragraphs if any(mark in p for mark in marks)), None)


def _in_short(trouble: str, size: int) -> str:
    """One line: what happened in which rank, and in which of the learner's lines."""
    first, *lines = trouble.replace(_WRONG, "").splitlines()
    where = next((line for line in lines if ", line " in line), "")
    place = where.partition(", in ")[2]
    short = f"{first[:MOST]} in {place}" if place else first[:MOST]
    hangs = " it hangs" if "did not finish" in first else ""
    return f"in {size} ranks{hangs}: {short}"


def device() -> str:
    """In a rank: where its tensors must be for its process group."""
    import torch.distributed as dist

    return "cuda" if "nccl" in dist.get_backend() else "cpu"
