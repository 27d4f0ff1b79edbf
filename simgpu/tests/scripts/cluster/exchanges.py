"""Roots, all-to-alls and coalesced collectives under NCCL, with exact values."""

import torch
import torch.distributed as dist
from common import block, check, done, join, leave

rank, ranks, device = join()
others = range(ranks)


blocks = torch.stack([block(r) for r in others])

# -- from or to one rank ---------------------------------------------------------------

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
leave(f"exchanges: {ranks} ranks")
