"""Reductions and all-gathers of `torch.distributed` under NCCL, with exact values."""

import torch
import torch.distributed as dist
from common import block, check, done, join, leave
from torch.distributed import ReduceOp

rank, ranks, device = join()
others = range(ranks)


# -- reductions ------------------------------------------------------------------------

blocks = torch.stack([block(r) for r in others])
for op, expected in (
    (ReduceOp.SUM, blocks.sum(0)),
    (ReduceOp.AVG, blocks.mean(0)),
    (ReduceOp.MIN, blocks.amin(0)),
    (ReduceOp.MAX, blocks.amax(0)),
    (ReduceOp.PRODUCT, blocks.prod(0)),
    (dist._make_nccl_premul_sum(0.5), blocks.sum(0) / 2),
    (dist._make_nccl_premul_sum(torch.tensor(3.0, device=device)), blocks.sum(0) * 3),
):
    x = block(rank)
    dist.all_reduce(x, op)
    check(f"all_reduce {op}", x, expected)
    x = block(rank)
    done(dist.all_reduce(x, op, async_op=True))
    check(f"all_reduce {op}, async", x, expected)
    root = ranks - 1
    x = block(rank)
    dist.reduce(x, root, op)
    if rank == root:
        check(f"reduce {op}", x, expected)
    rows = torch.stack([block(rank) + row for row in others])  # row r goes to rank r
    into = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(into, rows.flatten(), op)
    scattered = torch.stack([block(r) + rank for r in others])
    if op == ReduceOp.SUM:
        check("reduce_scatter_tensor", into, scattered.sum(0))
        dist.reduce_scatter_tensor(into, rows)  # (ranks, 2) into (2,)
        check("reduce_scatter_tensor of a stack", into, scattered.sum(0))
    if op == ReduceOp.AVG:
        check("reduce_scatter_tensor AVG", into, scattered.mean(0))
        dist.reduce_scatter(into, list(rows), op)
        check("reduce_scatter AVG", into, scattered.mean(0))

for dtype in (
    torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.uint8, torch.int8,
):  # fmt: skip
    x = torch.full((3,), rank + 1, dtype=dtype, device=device)
    dist.all_reduce(x)
    check(f"all_reduce {dtype}", x, [ranks * (ranks + 1) // 2] * 3)
    assert x.dtype == dtype

mask = torch.tensor([rank == 0, False, True], device=device)
dist.all_reduce(mask)  # a sum of booleans is "or"
check("all_reduce bool", mask, [True, False, True])
mask = torch.tensor([rank == 0, False, True], device=device)
dist.all_reduce(mask, ReduceOp.MIN)
check("all_reduce bool, MIN", mask, [ranks == 1, False, True])
z = torch.full((2,), complex(rank, 1), device=device)
dist.all_reduce(z)
expected = complex(sum(others), ranks)
check("all_reduce complex", torch.view_as_real(z)[0], [expected.real, expected.imag])

# -- gathering -------------------------------------------------------------------------

for dtype in (
    torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8,
    torch.float8_e4m3fn, torch.float8_e5m2,
):  # fmt: skip
    mine = block(rank, dtype=dtype)
    expected = torch.cat([block(r, dtype=dtype).float() for r in others])
    into = torch.empty(2 * ranks, dtype=dtype, device=device)
    dist.all_gather_into_tensor(into, mine)
    check(f"all_gather_into_tensor {dtype}", into, expected)
    x = mine.clone()
    dist.broadcast(x, src=1)
    check(f"broadcast {dtype}", x, expected[2:4])

into = torch.empty(ranks, 2, device=device)
done(dist.all_gather_into_tensor(into, block(rank), async_op=True))
check("all_gather_into_tensor into a stack", into, blocks)
into = torch.zeros(ranks, 2, device=device)
dist.all_gather_into_tensor(into, into[rank].copy_(block(rank)))  # in place
check("all_gather_into_tensor in place", into, blocks)
parts = [torch.empty(2, device=device) for _ in others]
done(dist.all_gather(parts, block(rank), async_op=True))
check("all_gather", torch.stack(parts), blocks)
parts = [torch.empty(r + 1, device=device) for r in others]  # of different sizes
dist.all_gather(parts, block(rank, rank + 1))
check(
    "all_gather, uneven", torch.cat(parts), torch.cat([block(r, r + 1) for r in others])
)
pieces = [torch.full((r + 1,), rank + 1.0, device=device) for r in others]
into = torch.empty(rank + 1, device=device)
dist.reduce_scatter(into, pieces)
check("reduce_scatter, uneven", into, [ranks * (ranks + 1) / 2] * (rank + 1))

leave(f"collectives: {ranks} ranks")
