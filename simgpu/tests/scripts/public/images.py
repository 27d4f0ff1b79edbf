"""Trains a small network on images, as a reference script for ImageNet does.

    python -m simgpu --gpus 2 images.py            # nn.DataParallel
    python -m simgpu --gpus 2 images.py --gpu 1    # one GPU, by its number
    python -m simgpu --gpus 2 images.py --spawn    # DDP, a process for each GPU
    torchrun --nproc-per-node=2 -m simgpu images.py --ddp

Each prints the losses of three steps and the accuracy; those of all ways agree, because
the network has no layer that looks at a whole batch.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 16


class Meter:
    """The average of what is measured, over all ranks."""

    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value: float, n: int) -> None:
        self.total += value * n
        self.count += n

    def average(self, device) -> float:
        both = torch.tensor([self.total, self.count], dtype=torch.float64)
        if dist.is_initialized():
            both = both.to(device, torch.float32)
            dist.all_reduce(both)
        return float(both[0] / both[1])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(48, 3, 16, 16, generator=generator)
    return TensorDataset(images, torch.randint(0, 10, (48,), generator=generator))


def worker(gpu: int | None, options: argparse.Namespace) -> None:
    torch.backends.cudnn.benchmark = True
    model, batch, sampler = network(), BATCH, None
    if options.spawn or options.ddp:
        if options.ddp:
            gpu = int(os.environ["LOCAL_RANK"])
            dist.init_process_group("nccl")
        else:
            where = f"file://{options.store}"
            dist.init_process_group("nccl", where, world_size=2, rank=gpu)
        torch.cuda.set_device(gpu)
        model.cuda(gpu)
        batch = BATCH // dist.get_world_size()
        model = DistributedDataParallel(model, device_ids=[gpu])
        sampler = DistributedSampler(data(), shuffle=False)
    elif gpu is not None:
        torch.cuda.set_device(gpu)
        model = model.cuda(gpu)
    else:
        model = nn.DataParallel(model).cuda()
    device = torch.device("cuda") if gpu is None else torch.device("cuda", gpu)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    loader = DataLoader(
        data(), batch_size=batch, num_workers=1, pin_memory=True, sampler=sampler
    )
    losses, right = Meter(), Meter()
    begin = time.time()
    for images, classes in loader:
        images = images.to(device, non_blocking=True)
        classes = classes.to(device, non_blocking=True)
        output = model(images)
        loss = criterion(output, classes)
        losses.update(loss.item(), len(images))
        _, guess = output.topk(5, 1, True, True)
        hits = guess.t().eq(classes.view(1, -1).expand(5, -1))
        right.update(float(hits.reshape(-1).float().sum()) / len(images), len(images))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step()
    assert time.time() > begin
    loss, accuracy = losses.average(device), right.average(device)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save({"model": model.state_dict()}, "checkpoint.pth.tar")
        place = {"cuda:0": f"cuda:{gpu or 0}"}
        saved = torch.load("checkpoint.pth.tar", map_location=place)["model"]
        model.load_state_dict(saved)
        print(f"loss {loss:.4f} top5 {accuracy:.4f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", type=int)
    parser.add_argument("--spawn", action="store_true")
    parser.add_argument("--ddp", action="store_true")
    options = parser.parse_args()
    options.store = os.path.abspath("store")
    if options.spawn:
        mp.spawn(worker, nprocs=torch.cuda.device_count(), args=(options,))
    else:
        worker(options.gpu, options)


if __name__ == "__main__":
    main()
