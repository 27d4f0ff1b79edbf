"""Waits for other ranks in collectives of gloo, which are inside PyTorch's C++.

Each member notes its calls on the job's board, and who waits for one looks there first,
until the others have come: so such a wait has a name, and a circle of waits is found if
some of them are NCCL's. Leaves out: jobs without NCCL, what C++ waits for by itself
(DDP's reducer, functional collectives), messages from any source, stores.
"""

import math

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from simgpu._compat import Work, tree_leaves
from simgpu._distributed import messages
from simgpu._distributed.groups import backends_of
from simgpu._frames import called_from

_TO_ALL, _TO_ROOT = ("broadcast_", "scatter_"), ("reduce_", "gather_")
_MONITORED, _SEND, _RECV = "monitored_barrier_", "send", "recv_"
_NAMES = {"allreduce_": "all_reduce", "allgather_": "all_gather",
          "_allgather_base_": "all_gather", "alltoall_": "all_to_all",
          "alltoall_base_": "all_to_all",
          "_reduce_scatter_base_": "reduce_scatter"}  # fmt: skip
_KEPT = 1024  # calls of a group whose notes are still to be read
_MOST_AWAITED = 256
_QUESTION = 60_000  # ms: a monitored barrier of less asks who is there, and goes on


class _Wait:
    """What this rank waits for in a call of gloo.

    Args:
        board: of the job.
        keys: of the others' notes -> their ranks in the job.
        doing: what this rank does, for an error.
    """

    def __init__(self, board, keys: dict[str, int], doing: str):
        self.board, self.keys, self.doing = board, keys, doing

    def until_all_are_there(self, is_over, is_right) -> None:
        """Wait until the others have called it, or gloo has ended without them."""
        __tracebackhide__ = True
        with self.board.for_now():
            self.board.read(self.keys, self.doing, math.inf, is_over)
            if is_over() and not is_right():  # gloo knows of a lost connection alone
                self.board.check_others(self.doing, self.keys)


def run(call, cluster, awaited: dict):
    """Run an operation of c10d that may be gloo's.

    Args:
        call: the operation.
        cluster: the job; None if nobody uses NCCL.
        awaited: id of a `Work` -> it and its `_Wait`.
    """
    __tracebackhide__ = True
    wait = None if cluster is None else _note(call, cluster)
    if wait is None:
        return call.func(*call.args, **call.kwargs)
    if _name_of(call) == _MONITORED:
        with wait.board.in_cpp(wait.doing, wait.keys):
            return call.func(*call.args, **call.kwargs)
    out = call.func(*call.args, **call.kwargs)
    _forget_what_has_ended(awaited)
    for one in tree_leaves(out):
        if isinstance(one, torch.ScriptObject):
            work = Work.unbox(one)
            awaited[id(work)] = (work, wait)
    return out


def before_wait(work, awaited: dict, is_completed, is_success) -> None:
    """The program is about to wait for a `Work` of gloo."""
    __tracebackhide__ = True
    _, wait = awaited.pop(id(work), (None, None))
    if wait is not None:
        wait.until_all_are_there(lambda: is_completed(work), lambda: is_success(work))


def _forget_what_has_ended(awaited: dict) -> None:
    for key, (work, _) in list(awaited.items()):
        if len(awaited) >= _MOST_AWAITED or work.is_completed():
            del awaited[key]


def _name_of(call) -> str:
    return call.func._schema.name.partition("::")[2]


def _note(call, cluster) -> _Wait | None:
    """Note a call for the others; None if it is not gloo's, or waits for nobody."""
    group = messages.group_in(call.args)
    if backends_of(group).get("cpu") != "gloo" or group.size() == 1:
        return None
    try:
        ranks = distributed_c10d.get_process_group_ranks(group)
    except KeyError:  # `torch.distributed` does not know it
        return None
    if cluster.rank != ranks[group.rank()]:  # the job's ranks have other numbers
        return None
    name, named = _name_of(call), {a.name: v for a, v in call.named_arguments()}
    if name == "recv_any_source_":
        return None
    own, others = _sides(name, named, group)
    board, me = cluster.board, group.rank()
    channel = f"gloo calls/{group.group_name}/{own}"
    number = cluster.calls_of_gloo[channel]
    cluster.calls_of_gloo[channel] += 1
    doing = f"rank {cluster.rank}: {_words(name)} over gloo ({called_from()}) on "
    doing += "all ranks" if len(ranks) == cluster.size else f"ranks {_listed(ranks)}"
    with board.for_now():
        board.post(f"{channel}/{number}/{me}", None)
        if number >= _KEPT:
            board.forget(f"{channel}/{number - _KEPT}/{me}")
    if name == _MONITORED and named["timeout"] < _QUESTION:
        return None
    keys = {f"{channel}/{number}/{i}": ranks[i] for i in others if i != me}
    return _Wait(board, keys, doing) if keys else None


def _sides(name: str, named: dict, group: dist.ProcessGroup) -> tuple[str, list[int]]:
    """Which calls are counted together, and for which members this one waits."""
    me, everyone = group.rank(), list(range(group.size()))
    root = named.get("root_rank", 0)
    if name == _SEND:  # waits for its receiver, too
        return f"{me}>{named['dst']} {named['tag']}", [named["dst"]]
    if name == _RECV:
        return f"{named['src']}>{me} {named['tag']}", [named["src"]]
    if name in _TO_ALL:
        return "all", [root]
    if name in _TO_ROOT or name == _MONITORED:
        return "all", everyone if me == root else [root] if name == _MONITORED else []
    return "all", everyone


def _words(name: str) -> str:
    return _NAMES.get(name, name.rstrip("_"))


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
