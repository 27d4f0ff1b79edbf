"""Train a classifier with DDP on four ranks; one of them does not come (lesson 29).

    torchrun --standalone --nproc-per-node=4 stuck_rank.py

Each rank opens its part of the images, as one process at a time may. The files with
".lock" are in the folder from which the job is started.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.file_baton import FileBaton


def read(step, rank):
    """This rank's images of a step, from a part that nobody else may open."""
    baton = FileBaton(f"part-{step}-{rank}.lock")
    if not baton.try_acquire():
        baton.wait()
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(64, 64, generator=generator)[rank::4].cuda()
    baton.release()
    return images, images[:, :10].argmax(1)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", timeout=timedelta(seconds=10))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
    model = DDP(model, device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(100):
        images, labels = read(step, dist.get_rank())
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
