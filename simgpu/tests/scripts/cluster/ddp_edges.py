"""What DistributedDataParallel does at its edges, against one process.

Layers that nobody uses, buffers, ranks with fewer batches, an overflow.
"""

import torch
from common import agree, join, leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank, ranks, device = join()


class Branches(nn.Module):
    """One of two layers answers: which, each rank chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.layers[which](x)


branches = Branches().to(device)
branches.count += rank
model = DDP(branches, device_ids=[rank], find_unused_parameters=True)
model(torch.ones(1, 4, device=device), rank % 2).sum().backward()
half = len(range(0, ranks, 2)) / ranks  # of the ranks took the first layer
agree("unused layers", branches.layers[0].weight.grad, torch.full((2, 4), half))
agree("buffer of rank 0", branches.count, 0.0)
branches.count += rank  # the next forward pass fetches rank 0's again
model(torch.ones(1, 4, device=device), 0)
agree("buffer of rank 0, again", branches.count, 0.0)

model = DDP(nn.Linear(1, 1, bias=False).to(device), device_ids=[rank])
with model.join():  # rank r has r + 1 batches
    for i in range(rank + 1):
        model.zero_grad()
        model(torch.full((1, 1), i + 1.0, device=device)).sum().backward()
# Rank r's last batch is number r + 1, which ranks r and later have.
mean = (rank + 1) * (ranks - rank) / ranks
agree("join", model.module.weight.grad, [[mean]])

torch.manual_seed(1)
model = DDP(nn.Linear(4, 1, bias=False).to(device), device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
for overflow in (False, True, False):
    before = model.module.weight.detach().clone()
    x = torch.full((2, 4), float("inf") if overflow and rank == 1 else 1.0).to(device)
    scaler.scale(model(x).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    moved = before - model.module.weight.detach()
    agree("step of a scaler", moved, torch.full((1, 4), 0.0 if overflow else 0.1))
agree("scale after one overflow", scaler.get_scale(), 512.0)

leave(f"ddp_edges: {ranks} ranks")
