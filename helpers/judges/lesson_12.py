"""Judges of the exercises of lesson 12. They run the learner's code on real ranks."""

import contextlib
import io

from helpers import ranks
from helpers.check import NotYet, Wrong, exercise

HANGS = 5.0  # seconds after which a few messages are stuck, on a busy machine too
COLLECTIVES = (  # as a process group calls them
    "allgather", "allreduce", "alltoall", "alltoall_base", "barrier", "broadcast",
    "gather", "monitored_barrier", "reduce", "reduce_scatter", "scatter",
    "_allgather_base",
)  # fmt: skip


@exercise("12.1")
def sent_round_the_ring(answer) -> None:
    """Bytes that one of 5 ranks sends in a ring all-reduce of a million float32."""
    size, numbers = 5, 1_000_000
    chunk = 4 * numbers // size
    right = 2 * (size - 1) * chunk
    try:
        answer = float("?" if isinstance(answer, str) else answer)
    except (TypeError, ValueError, RuntimeError):
        raise Wrong(f"give one number of bytes, not a {_kind(answer)}") from None
    if answer < 0:
        raise Wrong("a number of bytes is not negative")
    reasons = {
        right // 4: "a float32 number has 4 bytes",
        right // 2: "that is one half of the way; then the complete chunks go round",
        2 * right: "it receives as many, but only what it sends is asked for",
        right / 1e6: "give it in bytes, not in MB",
        size * right: "that is all ranks together, or whole tensors instead of chunks",
        (size - 1) * 4 * numbers: "these are whole tensors; the ring sends chunks",
        4 * numbers: "that is the whole tensor once; the ring sends chunks",
        2 * size * chunk: "after size - 1 steps every rank has one complete chunk",
        chunk: "that is one step of 2 (N - 1)",
        2 * 3 * chunk: "the ring in the lesson has four ranks, this one has five",
        2 * 3 * numbers: "the ring in the lesson has four ranks, this one has five",
    }
    if answer == right:
        return
    hint = (
        "it sends one chunk in each step: how large is it, and how many steps are there"
    )
    raise Wrong(reasons.get(answer, hint))


@exercise("12.2")
def all_gather_in_a_ring(function) -> None:
    """A function x -> [x of rank 0, x of rank 1, ...], made of messages to the right.

    Judged by values and by the messages that each rank sends.
    """
    told = _on_ranks(function)
    size = len(told)
    for rank, (result, calls, numbers) in enumerate(told):
        if numbers != _numbers(rank):
            raise Wrong(f"rank {rank}'s own x has changed; receive into new tensors")
        others = sorted({call for call, _, _ in calls} - {"send", "recv"})
        if others:
            raise Wrong(f"it calls the collective {others[0]}; use isend and recv only")
        if not isinstance(result, list):
            raise Wrong(f"rank {rank} returns a {result}, not a list of tensors")
        if not all(isinstance(item, list) for item in result):
            raise Wrong(
                f"rank {rank} returns {len(result)} single numbers; make it a list of "
                f"{size} tensors"
            )
        if len(result) != size:
            raise Wrong(f"rank {rank} returns a list of {len(result)}; ranks: {size}")
        for item, values in enumerate(result):
            if values == _numbers(item):
                continue
            whose = [r for r in range(size) if values == _numbers(r)]
            what = f"the x of rank {whose[0]}" if whose else f"{values}"
            raise Wrong(f"item {item} of rank {rank} is {what}")
        sent = [(peer, nbytes) for call, peer, nbytes in calls if call == "send"]
        peers = {peer for peer, _ in sent}
        if peers != {(rank + 1) % size}:
            raise Wrong(
                f"rank {rank} sends to {sorted(peers)}; its right neighbour is "
                f"{(rank + 1) % size}"
            )
        if [nbytes for _, nbytes in sent] == [4 * len(numbers) + 4] * (size - 1):
            raise Wrong(
                "each message is one number too long, as those of this lesson's send "
                "are; use dist.isend and dist.recv"
            )
        total, least = sum(nbytes for _, nbytes in sent), (size - 1) * 4 * len(numbers)
        if total != least or len(sent) != size - 1:
            raise Wrong(
                f"rank {rank} sends {total} bytes in {len(sent)} messages; {least} in "
                f"{size - 1} will do: in each step only what has just come"
            )


@exercise("12.3")
def rotate_without_a_deadlock(function) -> None:
    """A function x -> the x of the left neighbour, from blocking send and recv."""
    told = _on_ranks(function, names=("isend", "irecv"))
    size = len(told)
    for rank, (result, calls, numbers) in enumerate(told):
        used = {call for call, _, _ in calls}
        if used & {"isend", "irecv"}:
            raise Wrong(
                "isend and irecv are a cure, but here only the order may change"
            )
        if used - {"send", "recv"}:
            raise Wrong(f"it calls {sorted(used - {'send', 'recv'})[0]}; send and recv")
        if result == _numbers(rank) and numbers == result:
            raise Wrong(
                f"rank {rank} returns its own x; return what came from the left"
            )
        if result == _numbers((rank + 1) % size):
            raise Wrong(f"rank {rank} returns the x of its right neighbour")
        if result != _numbers((rank - 1) % size):
            raise Wrong(
                f"rank {rank} returns {result}, not the x of its left neighbour"
            )
        if len(calls) != 2:
            raise Wrong(f"rank {rank} makes {len(calls)} calls; one send and one recv")


def _numbers(rank: int) -> list[float]:
    """What a rank begins with."""
    return [100.0 * rank + i for i in range(5)]


def _on_ranks(function, names: tuple = ()) -> list:
    """What the learner's function did in four ranks: those that are open, or new ones.

    Args:
        function: the learner's.
        names: functions of `torch.distributed` whose use is noted too.

    Returns:
        For each rank its result as plain numbers, its calls (name, peer, bytes) and
        its x afterwards.

    Raises:
        NotYet: if it returns nothing in any rank.
        Wrong: if it raises or hangs, with the words of `RankError`.
    """
    theirs = ranks.current()
    fits = theirs is not None and (theirs.size, theirs.backend) == (4, "gloo")
    with contextlib.redirect_stdout(io.StringIO()):  # "4 real ranks: ..."
        crew = theirs if fits else ranks.Ranks(4, backend="gloo")
        try:
            crew.run(_loaded, function)  # or the limit is spent on imports
            told = crew.run(_watched, function, names, timeout=HANGS)
        except ranks.RankError as error:
            raise Wrong(_in_short(str(error), function)) from None
        finally:
            if not fits:
                crew.close()
    if all(result is None for result, _, _ in told):
        raise NotYet("your function returns nothing so far")
    return told


def _in_short(words: str, function) -> str:
    """The first trouble that a `RankError` tells of, and where, in one line."""
    first, *lines = words.removesuffix("gone.").splitlines()
    where = next((line.strip() for line in lines if ", line " in line), "")
    place = where.partition(", in ")[2]
    short = f"{first} in {place}" if place else first
    if "did not finish" not in first:
        return short
    called = getattr(getattr(function, "__code__", None), "co_names", ())
    handles = "; did you wait for every handle?" if "isend" in called else ""
    return f"it hangs: {short}{handles}"


def _loaded(function) -> None:
    """In a rank: nothing, but now it has this module and what the function needs."""


def _watched(function, names: tuple) -> tuple:
    """In a rank: call the function and note what it sends, receives and calls.

    The calls are noted where the process group gets them, so that it does not matter
    how they are spelled.
    """
    import torch
    import torch.distributed as dist

    calls: list[tuple[str, int, int]] = []
    group = dist.ProcessGroup
    kept = []

    def watch(owner, name, peer_and_bytes, shown=None):
        original = getattr(owner, name)

        def noting(*args, **kwargs):
            calls.append((shown or name, *peer_and_bytes(args)))
            return original(*args, **kwargs)

        kept.append((owner, name, original))
        setattr(owner, name, noting)

    def message(args):  # (group, [tensor], peer, tag)
        return args[2], args[1][0].nbytes

    for name in ("send", "recv"):
        watch(group, name, message)
    watch(group, "recv_anysource", lambda args: (-1, args[1][0].nbytes), "recv")
    for name in COLLECTIVES:
        watch(group, name, lambda args: (-1, 0))
    for name in names:
        watch(dist, name, lambda args: (-1, 0))
    x = torch.tensor(_numbers(dist.get_rank()))
    try:
        result = _plain(function(x))
    finally:
        for owner, name, original in kept:
            setattr(owner, name, original)
    return result, calls, x.tolist()


def _kind(value) -> str:
    """The name of a value's type."""
    return type(value).__name__


def _plain(value):
    """Tensors as lists; anything else as the name of its type."""
    if value is None:
        return None
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return _kind(value)
