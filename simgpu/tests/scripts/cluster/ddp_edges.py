"""What DistributedDataParallel does at its edges, against one process.

Layers that nobody uses, buffers, ranks with fewer batches, an overflow, batch norm.
"""

import copy
import os

import torch
import torch.distributed as dist
from common import agree, agree_on
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
ranks = dist.get_world_size()


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

torch.manual_seed(2)
plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).to(device)
synced = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
model = DDP(synced, device_ids=[rank])
x, y = torch.randn(4 * ranks, 4), torch.randint(0, 2, (4 * ranks,))
x, y = x.to(device), y.to(device)
F.cross_entropy(plain(x), y).backward()
F.cross_entropy(model(x.chunk(ranks)[rank]), y.chunk(ranks)[rank]).backward()
agree_on("SyncBatchNorm", synced, plain)
agree("running mean", synced[1].running_mean, plain[1].running_mean)
agree("running variance", synced[1].running_var, plain[1].running_var)

dist.destroy_process_group()
if rank == 0:
    print(f"ok ddp_edges: {ranks} ranks")
