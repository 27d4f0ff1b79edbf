"""Train the model of model.py on the data of data.py, copied to each GPU (DDP).

    torchrun --nproc-per-node=4 ddp.py --data=book.txt

What differs from one.py: ranks, whose gradients DDP averages.
"""

import itertools
from contextlib import nullcontext

import common
import model as its
import torch
import torch.distributed as dist
import values
from torch.nn.parallel import DistributedDataParallel as DDP


def divided(args, device):
    """The model with values, the whole of it on each rank."""
    with torch.device("meta"):
        model = its.make(args.size, args.context)
    tied = values.ties(model)
    if args.recompute:
        common.recompute(model)
    values.allocate(model, tied, args)
    if args.compile:
        for block in model.blocks:
            block.compile()
    return DDP(model, device_ids=[device], gradient_as_bucket_view=True)


def losses(model, batch, args):
    """The sum of a batch's losses."""
    with torch.autocast("cuda", torch.bfloat16, enabled=not args.float32):
        return model(batch)


def take_step(model, optimizer, parts, args):
    """One step; returns the mean loss, and the norm of its gradient."""
    count = sum(its.counted(batch) for batch in parts)
    dist.all_reduce(count)  # ranks may have unequal numbers of targets
    ranks, total = dist.get_world_size(), 0
    for batch in parts:
        last = batch is parts[-1]  # gradients are sent once, after the last part
        with nullcontext() if last else model.no_sync():
            loss = losses(model, batch, args) / count
            (loss * ranks).backward()  # DDP divides by the ranks
        total += loss.detach()
    norm = common.clip(model, args.clip)
    optimizer.step()
    optimizer.zero_grad()
    return total, norm


@torch.no_grad()
def test(model, loaded, args):
    """The mean loss of what is not learned from."""
    model.eval()
    sums = torch.zeros(2, device="cuda")
    for batch in itertools.chain.from_iterable(loaded.tests()):
        sums += torch.stack([losses(model, batch, args), its.counted(batch)])
    model.train()
    dist.all_reduce(sums)
    total, count = sums.tolist()
    return total / count


def train(args):
    device = common.device()
    dist.init_process_group("nccl", device_id=device)
    loaded = common.Data(args, dist.get_rank(), dist.get_world_size())
    model = divided(args, device)
    optimizer = common.optimizer_of(model, args, dist.group.WORLD)
    first = common.load(model, optimizer, args)
    log = common.Log(args, loaded)
    for step, parts in loaded.steps(first):
        common.set_rate(optimizer, step, args)
        loss, norm = take_step(model, optimizer, parts, args)
        stop = log.step(step, loss, norm, optimizer)
        if stop or (step + 1) % args.every == 0 or step + 1 == args.steps:
            with log.paused():
                if args.folder:
                    common.save(step + 1, model, optimizer, args)
                if not stop:
                    common.say_test(step, test(model, loaded, args))
        if stop:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    train(common.options())
