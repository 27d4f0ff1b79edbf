"""Whether all ranks make the same groups in the same order: calls of `new_group`.

PyTorch numbers the groups of a job as each rank makes them, and NCCL's ranks meet under
that number. Models: who meets whom. Two groups under one number, or one group under two
numbers, would hang or connect the wrong ranks; here both calls are named. Leaves out:
groups whose names do not come from counting (`use_local_synchronization=True`), which
need no order. `split_group` waits for all ranks of the parent, those of no part, too.
"""

import torch.distributed as dist

from simgpu._distributed.board import Board

_DIFFERENT = (
    "the ranks do not make the same groups in the same order. Group number {} is\n"
    "  rank {}: of ranks {} ({})\n  rank {}: of ranks {} ({})\n"
    "NCCL would hang, or connect the wrong ranks. Every rank must call new_group() for "
    "every group, also for those that it is not in, in the same order; or pass "
    "use_local_synchronization=True, and let the members alone call it."
)
_OTHER_PARTS = (
    "the ranks do not split a group in the same way:\n"
    "  rank {}: into a part of {} ({})\n  rank {}: into a part of {} ({})\n"
    "NCCL would hang, or connect the wrong ranks. Every rank of the group must call "
    "split_group() with the same parts, also those that are in none."
)


class GroupCall:
    """One call of `new_group` by this rank, which all others can read.

    Args:
        board: of the job.
        number: of the group, as this rank counts them.
        ranks: of the members in the job, in order.
        where: the line of the program.
    """

    def __init__(self, board: Board, number: str, ranks: list[int], where: str):
        self.board, self.number, self.ranks = board, number, [int(r) for r in ranks]
        self.where = where
        board.post(f"made/{number}/{board.rank}", (self.ranks, where))

    def compare(self, is_split: bool, doing: str, limit: float) -> None:
        """Raise unless the others mean the same group by this number.

        Waits until those whom NCCL would wait for have called `new_group`, too.

        Args:
            is_split: whether NCCL splits the group from that of all ranks, which are
                connected already: all take part then, each in a group of its own.
            doing: what this rank does, for an error.
            limit: seconds.

        Raises:
            torch.distributed.DistBackendError: if not, or if one never calls it.
        """
        __tracebackhide__ = True
        if len(self.ranks) == 1 and not is_split:
            return  # it meets nobody
        board = self.board
        if not is_split:
            own = [board.rank, self.ranks, self.where]
            rank, ranks, where = board.first(f"group/{self.number}", own)
            self._check(rank, ranks, where)
        whom = board.present
        if not is_split:
            whom = [rank for rank in self.ranks if rank in board.present]
        keys = {f"made/{self.number}/{rank}": rank for rank in whom}
        found = board.read(keys, f"{doing}: new_group", limit)
        for rank, (ranks, where) in zip(whom, found, strict=True):
            if rank in self.ranks or board.rank in ranks:
                self._check(rank, ranks, where)

    def _check(self, rank: int, ranks: list[int], where: str) -> None:
        __tracebackhide__ = True
        if ranks == self.ranks:
            return
        calls = sorted(
            [(self.board.rank, self.ranks, self.where), (rank, ranks, where)]
        )
        said = [(one, ", ".join(map(str, its)), line) for one, its, line in calls]
        text = _DIFFERENT.format(self.number, *said[0], *said[1])
        self.board.post("verdict", text)
        raise dist.DistBackendError(text)


def compare_split(communicator, name: str, part: list[int] | None, where: str) -> None:
    """One call of `split_group`: for NCCL, a collective of all ranks of the parent.

    Args:
        communicator: of the parent.
        name: of this split, alike on all its ranks.
        part: the members of this rank's part, as numbers in the parent; None: no part.
        where: the line of the program.

    Raises:
        torch.distributed.DistBackendError: if a rank never calls it, or means another
            part by this call.
    """
    __tracebackhide__ = True
    board, ranks = communicator.cluster.board, communicator.ranks
    board.post(f"{name}/{communicator.member}", (part, where))
    keys = {f"{name}/{i}": rank for i, rank in communicator.present.items()}
    doing = f"rank {board.rank}: split_group ({where}) of {communicator.title}"
    found = board.read(keys, doing, communicator.limit)
    for member, (its, line) in zip(communicator.present, found, strict=True):
        if member in (part or ()) and its != part:
            text = _OTHER_PARTS.format(
                board.rank, part, where, ranks[member], its, line
            )
            board.post("verdict", text)
            raise dist.DistBackendError(text)
