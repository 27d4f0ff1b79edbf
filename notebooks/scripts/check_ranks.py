"""Train with DDP, and check while training that the ranks are in step.

    torchrun --standalone --nproc-per-node=4 check_ranks.py

Before each epoch, the ranks compare the samples that they are about to take; every few
steps and after each epoch, each parameter and buffer. If one that is saved differs, all
ranks stop, nothing is saved, and the job ends with 1. Rank 0 saves after each epoch,
and the next start goes on from there: delete checkpoint.pt before you train another
model. `--spoil 2` changes a weight of rank 2, to see what is said then. Put your model,
data, loss and optimizer between the two lines of dashes. Used in lesson 17.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FILE = "checkpoint.pt"
PART = 2**22  # numbers of a checksum that are in float64 at a time

# -- yours: batch size, data, model, optimizer and loss --------------------------------
BATCH = 128  # samples of all ranks
DDP_OPTIONS = {}  # such as {"find_unused_parameters": True}


def make():
    images = torch.randn(1026, 64)
    data = TensorDataset(images, images[:, :10].argmax(1))
    layers = nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 10)
    model = nn.Sequential(*layers)
    return data, model, torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model, batch):
    """The mean over the samples of this rank: each rank has equally many."""
    x, y = batch
    return nn.functional.cross_entropy(model(x.cuda()), y.cuda())


# --------------------------------------------------------------------------------------


def say(words):
    if dist.get_rank() == 0:
        print(words, flush=True)


def check_samples(sampler, count):
    """Say who takes `count` samples that another takes, and how many nobody takes."""
    taken = [None] * dist.get_world_size()
    dist.all_gather_object(taken, list(sampler)[:count])
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

    Returns:
        Whether all that is saved is equal, the same on every rank.
    """
    weights = {n: p.detach() for n, p in model.named_parameters()}
    tensors = weights | dict(model.named_buffers())  # also those that are not saved
    saved = weights.keys() | model.state_dict().keys()
    sums = []
    for value in tensors.values():
        value = torch.view_as_real(value) if value.is_complex() else value
        whole = torch.zeros((), device="cuda", dtype=torch.double)
        for start in range(0, value.numel(), PART):  # not all in float64 at once
            part = value.flatten()[start : start + PART].double()
            places = torch.arange(len(part), device="cuda", dtype=torch.double)
            whole += (1 + (start + places) / value.numel()) @ part
        sums.append(whole)
    own = torch.stack(sums).view(torch.int64)  # compare bits: nan equals nan
    all_sums = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(all_sums, own)
    table = torch.stack(all_sums).cpu()  # a row for each rank
    wrong = table != table.mode(dim=0).values
    split = 2 * wrong.sum(dim=0) >= len(table)  # no value has a majority
    rows = {f"rank {r} IS OUT OF STEP": row for r, row in enumerate(wrong & ~split)}
    rows["RANKS DIFFER, and no value has a majority,"] = split
    for words, row in rows.items():
        names = [name for name, odd in zip(tensors, row, strict=True) if odd]
        if names:
            say(f"step {step}: {words} in {', '.join(names)}")
    if not wrong.any():
        say(f"step {step}: {len(own)} tensors are equal on {len(table)} ranks")
    odd = [name for name, some in zip(tensors, wrong.any(dim=0), strict=True) if some]
    return saved.isdisjoint(odd)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--every", type=int, default=4, help="steps between checks")
    parser.add_argument("--spoil", type=int, default=-1, metavar="RANK")
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if args.spoil >= world_size:
        parser.error(f"there is no rank {args.spoil} among {world_size}")

    torch.manual_seed(0)
    data, model, optimizer = make()
    sampler = DistributedSampler(data, drop_last=True)  # equally many on each rank
    loader = DataLoader(data, BATCH // world_size, sampler=sampler, drop_last=True)
    if BATCH % world_size or not len(loader):
        parser.error(f"{world_size} ranks cannot share {BATCH} of {len(data)} samples")
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda()
    first = 0
    found = torch.zeros((), device=device)
    if rank == 0:  # decides for all: another rank may see the file later
        found += os.path.exists(FILE)
    dist.broadcast(found, 0)
    if found:
        saved = torch.load(FILE, map_location="cpu")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
        say(f"{FILE}: go on with epoch {first}")
    model = DDP(model, device_ids=[device], **DDP_OPTIONS)

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        check_samples(sampler, len(loader) * loader.batch_size)
        torch.manual_seed(1000 * epoch + rank)  # dropout differs from rank to rank
        in_step = True
        for step, batch in enumerate(loader, epoch * len(loader) + 1):
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            last = step == (epoch + 1) * len(loader)
            if rank == args.spoil and last:
                next(model.parameters()).data.view(-1)[0] += 1e-6
            if last or step % args.every == 0:
                in_step = check_tensors(model.module, step)
            if not in_step:
                break  # on all ranks
        dist.all_reduce(loss.detach(), dist.ReduceOp.AVG)
        say(f"epoch {epoch}: last loss {loss.item():.4f}")
        if not in_step:
            say(f"epoch {epoch} is not saved: ranks differ in what would be saved")
            dist.destroy_process_group()
            raise SystemExit(1)
        if rank == 0:
            state = {"model": model.module.state_dict(), "epoch": epoch}
            state["optimizer"] = optimizer.state_dict()
            torch.save(state, FILE + ".new")
            os.replace(FILE + ".new", FILE)  # never half a file
        dist.barrier(device_ids=[device.index])  # nobody goes on before it is written
    peaks = [None] * world_size
    dist.all_gather_object(peaks, torch.cuda.max_memory_allocated())
    say(f"peak memory of ranks, MiB: {[round(peak / 2**20, 1) for peak in peaks]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
