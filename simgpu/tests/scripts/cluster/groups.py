"""Sends and receives, objects, and groups of ranks under NCCL, with exact values."""

import torch
import torch.distributed as dist
from common import check, join, leave

rank, ranks, device = join()
after, before = (rank + 1) % ranks, (rank - 1) % ranks


def mine(size=2, dtype=torch.float32):
    return torch.full((size,), rank, dtype=dtype, device=device)


# -- point to point --------------------------------------------------------------------

if rank == 0:  # one message, all the way round
    dist.send(mine() + 100, dst=after)
    x = torch.empty(2, device=device)
    dist.recv(x, src=before)
    check("a message that went round", x, [100 + ranks - 1] * 2)
else:
    x = torch.empty(2, device=device)
    dist.recv(x, src=before)
    dist.send(x + 1, dst=after)

if rank < 2:  # NCCL has no tags: messages arrive in the order of their sends
    x, y = torch.empty(2, device=device), torch.empty(1, device=device)
    if rank == 0:
        works = [dist.isend(mine() + 5, dst=1), dist.isend(mine(1) + 6, dst=1)]
    else:
        works = [dist.irecv(x, src=0), dist.irecv(y, src=0)]
    for work in works:
        work.wait()
    if rank == 1:
        check("isend and irecv", torch.cat([x, y]), [5, 5, 6])

for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
    x, y = torch.empty(2, 2, dtype=dtype, device=device)
    exchange = [
        dist.P2POp(dist.isend, mine(dtype=dtype), after),
        dist.P2POp(dist.irecv, x, before),
        dist.P2POp(dist.isend, mine(dtype=dtype), before),
        dist.P2POp(dist.irecv, y, after),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    check(f"from before, {dtype}", x, [before] * 2)
    check(f"from after, {dtype}", y, [after] * 2)

x = torch.empty(2, device=device)  # in a batch, a rank may send to itself
exchange = [dist.P2POp(dist.isend, mine() + 1, rank), dist.P2POp(dist.irecv, x, rank)]
for work in dist.batch_isend_irecv(exchange):
    work.wait()
check("from itself", x, [rank + 1] * 2)

# -- objects ---------------------------------------------------------------------------

things = [None] * ranks
dist.all_gather_object(things, {"rank": rank, "long": "x" * 1000 * rank})
assert [len(thing["long"]) for thing in things] == [1000 * r for r in range(ranks)]
things = ["a", {"b": rank}, None] if rank == 1 else [None] * 3
dist.broadcast_object_list(things, src=1)
assert things == ["a", {"b": 1}, None], things
things = [None] * ranks if rank == 0 else None
dist.gather_object(("from", rank), things, dst=0)
assert rank or things == [("from", r) for r in range(ranks)], things
thing = [None]
dist.scatter_object_list(thing, [f"to {r}" for r in range(ranks)] if not rank else None)
assert thing == [f"to {rank}"], thing
if rank == 0:
    dist.send_object_list(["any", {"thing": 1}], dst=1)
elif rank == 1:
    things = [None, None]
    dist.recv_object_list(things, src=0)
    assert things == ["any", {"thing": 1}], things
things = [torch.full((2,), 7.0, device=device)] if rank == 0 else [None]
dist.broadcast_object_list(things)  # a tensor keeps the GPU that it was on
assert things[0].device == torch.device("cuda", 0) and things[0].tolist() == [7, 7]

# -- groups ----------------------------------------------------------------------------

odd = dist.new_group(list(range(1, ranks, 2)))  # every rank makes it
x = mine()
if rank % 2:
    dist.all_reduce(x, group=odd)
    check("all_reduce of the odd ranks", x, [sum(range(1, ranks, 2))] * 2)
    assert dist.get_group_rank(odd, rank) == rank // 2 == dist.get_rank(odd)
    assert dist.get_global_rank(odd, 0) == 1
    x = mine()
    dist.broadcast(x, src=3, group=odd)
    check("broadcast of a global rank", x, [3, 3])
    dist.broadcast(x.copy_(mine()), group=odd, group_src=0)
    check("broadcast of a group's rank", x, [1, 1])
else:
    assert dist.get_rank(odd) == -1 and odd == dist.GroupMember.NON_GROUP_MEMBER

pair, pairs = dist.new_subgroups(2)
assert len(pairs) == ranks // 2 and dist.get_backend(pair) == "nccl"
assert dist.get_process_group_ranks(pair) == [rank // 2 * 2, rank // 2 * 2 + 1]
x = torch.empty(2, device=device)
dist.all_gather_into_tensor(x, mine(1), group=pair)
check("all_gather_into_tensor of a pair", x, dist.get_process_group_ranks(pair))
lists = [list(range(first, ranks, 2)) for first in (0, 1)]
across, _ = dist.new_subgroups_by_enumeration(lists)
x = mine()
dist.all_reduce(x, dist.ReduceOp.MAX, group=across)
check("all_reduce of every second rank", x, [max(lists[rank % 2])] * 2)
half = dist.split_group(
    split_ranks=[list(range(ranks // 2)), list(range(ranks // 2, ranks))]
)
x = mine()
dist.all_reduce(x, group=half)
check("all_reduce of a half", x, [sum(dist.get_process_group_ranks(half))] * 2)
alone = dist.new_group([rank], use_local_synchronization=True)
dist.all_reduce(x.fill_(3), group=alone)
check("all_reduce alone", x, [3, 3])
own = dist.new_group([rank])  # each rank makes another one, under one name
dist.all_reduce(x := mine(), group=own)
dist.all_reduce(x, group=own)
check("all_reduce in a group that only this rank makes", x, [rank] * 2)
dist.barrier(group=pair, device_ids=[rank])
dist.destroy_process_group(pair)

both = dist.new_group(backend="cpu:gloo,cuda:nccl")  # takes tensors of either
for where in ("cpu", device):
    x = torch.ones(2, device=where)
    dist.all_reduce(x, group=both)
    assert x.tolist() == [ranks] * 2 and x.device == torch.device(where)

dist.barrier(device_ids=[rank])
leave(f"groups: {ranks} ranks")
