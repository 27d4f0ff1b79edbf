"""A convolutional network under DDP, with SyncBatchNorm and a running scale."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH = 16


class RunningScale(nn.Module):
    """Divides by a running mean of the size of its inputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("size", torch.ones(()))

    def forward(self, x):
        scaled = x / self.size
        if self.training:
            size = x.detach().abs().mean()
            dist.all_reduce(size, op=dist.ReduceOp.AVG)
            self.size.lerp_(size, 0.1)
        return scaled


local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
images, labels = torch.randn(96, 1, 8, 8) * 3, torch.randint(0, 10, (96,))
model = nn.Sequential(
    RunningScale(), nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
    nn.Linear(288, 10),
).cuda()  # fmt: skip
model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
parallel = DDP(model, device_ids=[local_rank], broadcast_buffers=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for step in range(6):
    batch = torch.arange(BATCH) + step * BATCH
    mine = batch[rank::world_size]
    loss = cross_entropy(parallel(images[mine].cuda()), labels[mine].cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
