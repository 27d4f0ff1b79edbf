"""A trainer in the shape of many public ones, for several GPUs; see --help.

It knows nothing of a simulation. `test_distributed.py` runs it on simulated
GPUs, and compares what it prints for each way of using them.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, loader, optimizer, gpu, args):
        self.model, self.loader, self.optimizer = model, loader, optimizer
        self.gpu, self.args = gpu, args
        self.scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
        self.epoch = 0
        if args.resume and os.path.exists(args.snapshot):
            self.load()

    def load(self):
        snapshot = torch.load(self.args.snapshot, map_location=f"cuda:{self.gpu}")
        self.bare().load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.epoch = snapshot["epoch"]

    def save(self):
        snapshot = {
            "model": self.bare().state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epoch": self.epoch,
        }
        torch.save(snapshot, self.args.snapshot)

    def bare(self):
        wrapped = isinstance(self.model, DDP)
        return self.model.module if wrapped else self.model

    def step(self, x, y):
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        self.optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16, enabled=self.args.amp):
            loss = nn.functional.cross_entropy(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach() * len(x)

    def train(self):
        while self.epoch < self.args.epochs:
            if isinstance(self.loader.sampler, DistributedSampler):
                self.loader.sampler.set_epoch(self.epoch)
            total = torch.zeros((), device=f"cuda:{self.gpu}")
            for x, y in self.loader:
                total += self.step(x, y)
            if dist.is_initialized():
                dist.all_reduce(total)
            self.epoch += 1
            if not dist.is_initialized() or dist.get_rank() == 0:
                rows = len(self.loader.dataset)
                print(f"epoch {self.epoch}: loss {total.item() / rows:.4f}", flush=True)
                self.save()


def run(rank, world_size, args):
    torch.manual_seed(0)
    torch.cuda.set_device(rank)
    model = nn.Sequential(
        nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5)
    )
    data = TensorDataset(torch.randn(240, 20), torch.randint(0, 5, (240,)))
    sampler = None
    if args.ddp:
        dist.init_process_group("nccl", rank=rank, world_size=world_size)
        sampler = DistributedSampler(data, shuffle=False)
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = model.cuda(rank)
    if args.ddp:
        model = DDP(model, device_ids=[rank], output_device=rank)
    loader = DataLoader(data, 48 // world_size, sampler=sampler, pin_memory=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    Trainer(model, loader, optimizer, rank, args).train()
    if dist.is_initialized():
        dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ddp", action="store_true", help="under torchrun")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--snapshot", default="snapshot.pt")
    args = parser.parse_args()
    if args.ddp:
        run(int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]), args)
    else:
        run(0, 1, args)


if __name__ == "__main__":
    main()
