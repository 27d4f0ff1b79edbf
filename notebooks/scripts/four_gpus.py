"""Train a small classifier on all GPUs of a machine, one process for each.

    torchrun --standalone --nproc-per-node=4 four_gpus.py

The ranks share the global batch of 128, so 1, 2 or 4 of them take the same steps and
reach the same weights, up to rounding. Samples that they cannot share are left out.
Adam would enlarge the rounding where the true gradient is zero, as of the bias of
attention's keys. Used in lesson 03.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 128  # samples of a step


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))

    torch.manual_seed(0)
    # your data
    images = torch.randn(2048, 64)
    labels = images[:, :10].argmax(1)
    data = TensorDataset(images, labels)
    if BATCH % dist.get_world_size():
        raise SystemExit(f"ranks cannot share {BATCH} samples equally; change BATCH")
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, BATCH // dist.get_world_size(), sampler=sampler)

    # your model
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
    model = DDP(model, device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # your optimizer

    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device="cuda")
        for batch in loader:
            x, y = [part.cuda() for part in batch]  # your batch
            loss = nn.functional.cross_entropy(model(x), y)  # your loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        dist.all_reduce(total, dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total.item() / len(loader):.4f}")

    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":  # not in the workers of a DataLoader
    main()
