"""Every collective of `torch.distributed` that NCCL takes, with exact values."""

import os

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
device = torch.device("cuda", rank)
dist.init_process_group("nccl", device_id=device)
ranks = dist.get_world_size()
others = range(ranks)


def check(what, found, expected):
    """The same values, on this rank's GPU."""
    expected = torch.as_tensor(expected, dtype=found.dtype, device=device)
    assert found.device == device, (what, found.device)
    # float8 has no `equal`: compare what it holds
    assert torch.equal(found.float(), expected.float()), (what, found, expected)


def block(r, size=2, dtype=torch.float32):
    """What rank `r` has: `size` numbers from 10r."""
    return torch.arange(10 * r, 10 * r + size, device=device).to(dtype)


def done(work):
    work.wait()
    torch.cuda.synchronize()
    assert work.is_completed()


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

x = torch.tensor([1.0, 2.0]).to(device)
for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
    try:
        dist.all_reduce(x.long(), op)
    except (RuntimeError, ValueError) as error:
        assert "Cannot use ReduceOp" in str(error), error
    else:
        raise AssertionError(f"NCCL has no {op}")

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

parts = [torch.empty(2, device=device) for _ in others] if rank == 0 else None
dist.gather(block(rank), parts, dst=0)
if rank == 0:
    check("gather", torch.stack(parts), blocks)
x = torch.empty(2, device=device)
done(dist.scatter(x, list(blocks) if rank == 1 else None, src=1, async_op=True))
check("scatter", x, block(rank))

# -- all to all ------------------------------------------------------------------------

sent = torch.tensor([10.0 * rank + r for r in others], device=device)
received = [10.0 * r + rank for r in others]
into = torch.empty(ranks, device=device)
dist.all_to_all_single(into, sent)
check("all_to_all_single", into, received)
parts = [torch.empty(1, device=device) for _ in others]
done(dist.all_to_all(parts, list(sent.split(1)), async_op=True))
check("all_to_all", torch.cat(parts), received)
counts = [r + 1 for r in others]  # rank r receives r + 1 numbers from each
into = torch.empty(ranks * (rank + 1), device=device)
dist.all_to_all_single(
    into,
    torch.cat([torch.full((count,), float(rank), device=device) for count in counts]),
    output_split_sizes=[rank + 1] * ranks,
    input_split_sizes=counts,
)
check("all_to_all_single, uneven", into, [r for r in others for _ in range(rank + 1)])
parts = [torch.empty(rank + 1, 2, device=device) for _ in others]
dist.all_to_all(parts, [torch.full((n, 2), float(rank), device=device) for n in counts])
check("all_to_all, uneven", torch.stack(parts)[:, 0, 0], list(others))

# -- several at once -------------------------------------------------------------------

a, b = block(rank), torch.ones(3, device=device)
with dist._coalescing_manager(async_ops=True) as several:
    dist.all_reduce(a)
    dist.all_reduce(b)
several.wait()
check(
    "coalesced all_reduce", torch.cat([a, b]), [*blocks.sum(0).tolist(), *[ranks] * 3]
)
a, b = torch.empty(ranks, 2, device=device), torch.empty(2 * ranks, device=device)
with dist._coalescing_manager():
    dist.all_gather_into_tensor(a, block(rank))
    dist.all_gather_into_tensor(b, block(rank) + 1)
check("coalesced all_gather_into_tensor", torch.cat([a, b.view(ranks, 2)]),
      torch.cat([blocks, blocks + 1]))  # fmt: skip
a, b = torch.empty(2, device=device), torch.empty(1, device=device)
with dist._coalescing_manager(async_ops=True) as several:
    dist.reduce_scatter_tensor(a, torch.arange(2.0 * ranks, device=device))
    dist.reduce_scatter_tensor(b, torch.arange(1.0 * ranks, device=device))
several.wait()
check("coalesced reduce_scatter_tensor", torch.cat([a, b]),
      [ranks * 2 * rank, ranks * (2 * rank + 1), ranks * rank])  # fmt: skip

dist.barrier(device_ids=[rank])
dist.barrier(async_op=True).wait()
dist.destroy_process_group()
if rank == 0:
    print(f"ok collectives: {ranks} ranks")
