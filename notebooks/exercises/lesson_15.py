"""The exercises of lesson 15: calls of real ranks on the CPU, and rings of messages."""

import torch
import torch.distributed as dist

from exercises.exercise import (
    NotYet,
    Wrong,
    call,
    exercise,
    must_be_callable,
    run,
    solution,
)
from exercises.in_ranks import in_ranks

HANGS = 5.0  # seconds after which a few messages are stuck, on a busy machine too
FOUND = (  # on ranks 0 to 3, in three cases
    (False, False, True, False),
    (False, False, False, False),
    (True, True, True, True),
)
COLLECTIVES = (  # as a process group calls them
    "allgather", "allreduce", "alltoall", "alltoall_base", "barrier", "broadcast",
    "gather", "monitored_barrier", "reduce", "reduce_scatter", "scatter",
    "_allgather_base",
)  # fmt: skip


@exercise(
    "15.1",
    hints=(
        "A rank knows only its own `found`. Which collective of the table leaves every "
        "rank with something of all ranks, and can it send a Python bool as it is?",
        "Make a tensor with 1 where a rank has found something, and with 0 elsewhere. "
        "What does the sum of all ranks say? And which ranks must make the call?",
    ),
)
def any_rank(function) -> None:
    """A function found -> whether it is True on at least one rank, on every rank."""
    must_be_callable(function)
    options = {"seconds": HANGS, "reuse": True}
    try:
        told = in_ranks(4, _asked, function, **options)
    except Wrong as wrong:
        if "it hangs" not in str(wrong):
            raise
        why = "rank 2 alone has `found` True; does every rank make every call?"
        raise Wrong(f"{wrong}; {why}") from None
    for case, found in enumerate(FOUND):
        for rank, answers in enumerate(told):
            if answers[case] is not any(found):
                ranks = [r for r, here in enumerate(found) if here]
                true = f"`found` is True on {ranks or 'no rank'}"
                raise Wrong(f"rank {rank} returns {answers[case]}, and {true}")


def _asked(function) -> list:
    """In a rank: what the learner's function says in each case."""
    rank, answers = dist.get_rank(), []
    for found in FOUND:
        answer = call(function, found[rank])
        if isinstance(answer, torch.Tensor) and answer.numel() == 1:
            answer = answer.item()
        if not isinstance(answer, bool):
            kind = type(answer).__name__
            raise Wrong(f"rank {rank} returns a value of type {kind}; return a bool")
        answers.append(answer)
    return answers


@solution("15.1")
def solution_1():
    """Each rank sends a number that the others can add up.

    Rank 2 sends 1, and the other ranks send 0. After the all-reduce every rank has the
    sum, so all ranks know the same, and all leave their loops in the same step. With
    `op=dist.ReduceOp.MAX` the answer is the largest number instead.

    The call does not stand under `if found`. There, only rank 2 would make it, and
    would wait for the others for ever, as in hang 1.
    """

    def any_rank(found):
        count = torch.tensor([float(found)])
        dist.all_reduce(count)
        return count.item() > 0

    return any_rank


@exercise(
    "15.3",
    hints=(
        "The second half of `ring` is an all-gather, because complete chunks go "
        "round. What takes the place of the chunks here, and which one does each "
        "rank have at the beginning?",
        "In each step a rank sends what has just come from the left, and its own "
        "`x` only in the first step. Whose `x` comes in step 0, and whose in step "
        "1? Begin to send before you receive, and wait for every handle.",
    ),
)
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
        _check_sent(rank, size, [c[1:] for c in calls if c[0] == "send"])


@solution("15.3")
def solution_3():
    """In each step every rank passes on what it got in the step before.

    In step 0 rank r sends its own `x`, and receives that of rank r - 1. In step 1 it
    sends the `x` of rank r - 1, and receives that of rank r - 2. After N - 1 steps it
    has all, and has sent N - 1 messages, which is the least that a ring needs.

    `isend` does not wait, so all ranks can begin by sending. The handle is kept until
    the message has gone over. The list has new tensors, so `x` itself does not change.
    """

    def all_gather(x):
        rank, size = dist.get_rank(), dist.get_world_size()
        found = [torch.empty_like(x) for _ in range(size)]
        found[rank].copy_(x)
        for step in range(size - 1):
            outgoing = found[(rank - step) % size]
            incoming = found[(rank - step - 1) % size]
            sending = dist.isend(outgoing, (rank + 1) % size)
            dist.recv(incoming, (rank - 1) % size)
            sending.wait()
        return found

    return all_gather


def _check_sent(rank: int, size: int, sent: list[tuple[int, int]]) -> None:
    """To the right neighbour, as few bytes in as few messages as will do."""
    nbytes = 4 * len(_numbers(rank))
    peers, right = {peer for peer, _ in sent}, (rank + 1) % size
    if peers != {right}:
        raise Wrong(
            f"rank {rank} sends to {sorted(peers)}; its right neighbour is {right}"
        )
    total, least = sum(n for _, n in sent), (size - 1) * nbytes
    if total != least or len(sent) != size - 1:
        raise Wrong(
            f"rank {rank} sends {total} bytes in {len(sent)} messages; {least} in "
            f"{size - 1} will do: in each step only what has just come"
        )


@exercise(
    "15.2",
    hints=(
        "`dist.send` returns when the message has gone over. In which line is each "
        "of the four ranks while the program hangs, and who receives?",
        "If all ranks receive first, they all wait again. Let some ranks send first "
        "and the others receive first, so that each message finds a rank that waits "
        "for it. How can a rank know from its own number to which of the two it "
        "belongs?",
    ),
)
def rotate_without_a_deadlock(function) -> None:
    """A function x -> the x of the left neighbour, from blocking send and recv."""
    told = _on_ranks(function, ("isend", "irecv"))
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


@solution("15.2")
def solution_2():
    """All ranks send first, so nobody receives, and every send waits for ever.

    At least one rank must receive first. Here all odd ranks do. Ranks 0 and 2 send to
    1 and 3, which are already at `recv`. When these messages have gone over, the odd
    ranks send and the even ones receive.

    An odd number of ranks works as well. There the last rank and rank 0 are neighbours
    and both send first, so the last rank waits until rank 0 has sent its own message
    and receives.
    """

    def rotate(x):
        rank, size = dist.get_rank(), dist.get_world_size()
        box = torch.empty_like(x)
        if rank % 2 == 0:
            dist.send(x, (rank + 1) % size)
            dist.recv(box, (rank - 1) % size)
        else:
            dist.recv(box, (rank - 1) % size)
            dist.send(x, (rank + 1) % size)
        return box

    return rotate


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
    """
    must_be_callable(function)
    options = {"seconds": HANGS, "reuse": True}
    try:
        told = in_ranks(4, _watched, function, names, **options)
    except Wrong as wrong:
        called = getattr(getattr(function, "__code__", None), "co_names", ())
        if "it hangs" in str(wrong) and "isend" in called:
            raise Wrong(f"{wrong}; did you wait for every handle?") from None
        raise
    if all(result is None for result, _, _ in told):
        raise NotYet("your function returns nothing so far")
    return told


def _watched(function, names: tuple) -> tuple:
    """In a rank: call the function and note what it sends, receives and calls.

    The calls are noted where the process group gets them, so that it does not matter
    how they are spelled.
    """
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
        result = _plain(run(function, x))
    finally:
        for owner, name, original in kept:
            setattr(owner, name, original)
    return result, calls, x.tolist()


def _plain(value):
    """Tensors as lists; anything else as the name of its type."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return type(value).__name__
