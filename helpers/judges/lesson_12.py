"""Judges of the exercises of lesson 12. They run the learner's code on real ranks."""

import contextlib
import io

from helpers import ranks
from helpers.check import NotYet, Wrong, exercise

HANGS = 2.0  # seconds after which a program of a few messages is stuck
COLLECTIVES = (  # as a process group calls them
    "allgather", "allreduce", "alltoall", "alltoall_base", "broadcast", "gather",
    "reduce", "reduce_scatter", "scatter", "_allgather_base",
)  # fmt: skip


@exercise("12.1")
def sent_round_the_ring(answer) -> None:
    """Bytes that one of 5 ranks sends in a ring all-reduce of a million float32."""
    size, numbers = 5, 1_000_000
    chunk = 4 * numbers // size
    right = 2 * (size - 1) * chunk
    reasons = {
        right // 4: "a float32 number has 4 bytes",
        right // 2: "that is one half of the way; then the complete chunks go round",
        2 * right: "it receives as many, but only what it sends is asked for",
        size * right: "that is all ranks together, or whole tensors instead of chunks",
        2 * size * chunk: "after size - 1 steps every rank has one complete chunk",
        chunk: "that is one step of 2 (N - 1)",
        2 * 3 * chunk: "the ring in the lesson has four ranks, this one has five",
        2 * 3 * numbers: "the ring in the lesson has four ranks, this one has five",
    }
    if answer == right:
        return
    raise Wrong(reasons.get(answer, "2 (N - 1) steps, and in each of them one chunk"))


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
        if len(result) != size:
            raise Wrong(f"rank {rank} returns {len(result)} tensors; there are {size}")
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
    """What the learner's function did in four ranks, or in those that are open.

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
    is_open = ranks.current()
    with contextlib.redirect_stdout(io.StringIO()):  # "4 real ranks: ..."
        crew = is_open or ranks.Ranks(4, backend="gloo")
        try:
            told = crew.run(_watched, function, names, timeout=HANGS)
        except ranks.RankError as error:
            first, *lines = str(error).removesuffix("gone.").splitlines()
            where = next((line.strip() for line in lines if ", line " in line), "")
            how = "it hangs: " if "did not finish" in first else ""
            raise Wrong(f"{how}{first} {where.partition(', in ')[2]}".strip()) from None
        finally:
            if not is_open:
                crew.close()
    if all(result is None for result, _, _ in told):
        raise NotYet("your function returns nothing so far")
    return told


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

    def watch(owner, name, peer_and_bytes):
        original = getattr(owner, name)

        def noting(*args, **kwargs):
            calls.append((name, *peer_and_bytes(args)))
            return original(*args, **kwargs)

        kept.append((owner, name, original))
        setattr(owner, name, noting)

    def message(args):  # (group, [tensor], peer, tag)
        return args[2], args[1][0].nbytes

    for name in ("send", "recv"):
        watch(group, name, message)
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


def _plain(value):
    """Tensors as lists; anything else as the name of its type."""
    if value is None:
        return None
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return type(value).__name__
