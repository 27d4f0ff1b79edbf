"""Runs a learner's function in real ranks, for the judges of lessons 13 to 15."""

import contextlib
import io

from helpers.check import Wrong

SECONDS = 30  # before the ranks are given up
MOST = 200  # characters of an error


def in_ranks(
    size: int, function, *args, meanings: dict[str, str] | None = None
) -> list:
    """What each rank returns; in ranks of their own, which end those that were open.

    Args:
        size: how many ranks.
        function: to call in each.
        args: for it.
        meanings: part of an error's first line -> what it means to the learner.

    Raises:
        Wrong: for an error in the learner's code, or if the ranks do not finish.
    """
    from helpers.ranks import RankError, Ranks

    with contextlib.redirect_stdout(io.StringIO()):
        ranks = Ranks(size)
    try:
        return ranks.run(function, *args, timeout=SECONDS)
    except RankError as error:
        said = str(error).splitlines()[0]
        for part, meaning in (meanings or {}).items():
            if part in said:
                raise Wrong(meaning) from error
        raise Wrong(f"in {size} ranks: {said[:MOST]}") from error
    finally:
        ranks.close()
