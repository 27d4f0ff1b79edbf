"""Train with DDP, and check while training that the ranks are in step.

    torchrun --standalone --nproc-per-node=4 check_ranks.py

Before each epoch, the ranks compare the samples that they are about to take; every
few steps, each parameter and buffer. Rank 0 saves after each epoch, and the next start
goes on from there. `--spoil 2` changes a weight of rank 2, to see what is said then.
Used in lesson 17.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FILE = "checkpoint.pt"


def say(words):
    if dist.get_rank() == 0:
        print(words, flush=True)


def check_samples(sampler):
    """Say which samples are taken twice, and how many by nobody."""
    taken = [None] * dist.get_world_size()
    dist.all_gather_object(taken, list(sampler))
    found = f"{len(taken[0])} samples a rank"
    for rank, own in enumerate(taken):
        if len(own) != len(taken[0]):
            found += f"; rank {rank} HAS {len(own)}"
        for other in range(rank):
            if shared := set(own) & set(taken[other]):
                found += f"; ranks {other} and {rank} SHARE {len(shared)}"
    unused = len(sampler.dataset) - len(set().union(*taken))
    say(f"epoch {sampler.epoch}: {found}; {unused} left out")


def check_tensors(model, step):
    """Say which rank has a parameter or buffer that most ranks have otherwise.

    Of two ranks that differ, neither has the majority: both are named.
    """
    sums = []
    for value in model.state_dict().values():
        places = torch.linspace(1, 2, value.numel(), device="cuda", dtype=torch.double)
        sums.append(places @ value.double().flatten())
    own = torch.stack(sums).view(torch.int64)  # compare bits: nan equals nan
    all_sums = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(all_sums, own)
    table = torch.stack(all_sums).cpu()  # a row for each rank
    wrong = table != table.mode(dim=0).values
    if len(table) == 2:
        wrong = (table[:1] != table[1:]).expand(2, -1)
    for rank, row in enumerate(wrong):
        names = [name for name, odd in zip(model.state_dict(), row, strict=True) if odd]
        if names:
            say(f"step {step}: rank {rank} IS OUT OF STEP in {', '.join(names)}")
    if not wrong.any():
        say(f"step {step}: {len(own)} tensors are equal on {len(table)} ranks")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--spoil", type=int, default=-1, metavar="RANK")
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if args.spoil >= world_size:
        parser.error(f"there is no rank {args.spoil} among {world_size}")

    # Your data and your model go here.
    torch.manual_seed(0)
    images = torch.randn(1026, 64)
    data = TensorDataset(images, images[:, :10].argmax(1))
    layers = nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 10)
    model = nn.Sequential(*layers)
    batch = 128 // world_size  # 128 in all

    sampler = DistributedSampler(data, drop_last=True)  # equally many on each rank
    loader = DataLoader(data, batch, sampler=sampler, drop_last=True)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = 0
    if os.path.exists(FILE):
        saved = torch.load(FILE, map_location=f"cuda:{local_rank}")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
        say(f"{FILE}: go on with epoch {first}")
    model = DDP(model, device_ids=[local_rank])

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        check_samples(sampler)
        torch.manual_seed(1000 * epoch + rank)  # dropout differs from rank to rank
        for step, (x, y) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == args.spoil and step == 5:
                next(model.parameters()).data.view(-1)[0] += 1e-6
            if step % 4 == 3:
                check_tensors(model.module, step)
        dist.all_reduce(loss.detach(), dist.ReduceOp.AVG)
        say(f"epoch {epoch}: loss {loss.item():.4f}")
        if rank == 0:
            state = {"model": model.module.state_dict(), "epoch": epoch}
            state["optimizer"] = optimizer.state_dict()
            torch.save(state, FILE + ".new")
            os.replace(FILE + ".new", FILE)  # never half a file
        dist.barrier(device_ids=[local_rank])  # nobody goes on before it is written
    peaks = [None] * world_size
    dist.all_gather_object(peaks, torch.cuda.max_memory_allocated())
    say(f"peak memory of ranks, MiB: {[round(peak / 2**20, 1) for peak in peaks]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
