"""Train the model of model.py on the data of data.py, each layer in slices (TP).

    torchrun --nproc-per-node=4 slices.py --data=book.txt

What differs from one.py: all ranks compute the same rows together. Between the sliced
layers, each rank has some of the tokens.
"""

import itertools

import common
import model as its
import torch
import torch.distributed as dist
import values
from styles import styles_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module


def divided(args, mesh):
    """The model with values, a slice of its layers on each rank."""
    with torch.device("meta"):
        model = its.make(args.size, args.context)
    tied = values.ties(model)
    if args.recompute:
        common.recompute(model)
    parallelize_module(model, mesh, styles_of(its.slices(model)))
    values.allocate(model, tied, args)
    if args.compile:
        for block in model.blocks:
            block.compile()
    return model


def losses(model, batch, args):
    """The sum of a batch's losses."""
    with torch.autocast("cuda", torch.bfloat16, enabled=not args.float32):
        return model(batch)


def take_step(model, optimizer, parts, args):
    """One step; returns the mean loss, and the norm of its gradient."""
    count = sum(its.counted(batch) for batch in parts)
    total = 0
    for batch in parts:
        with (
            loss_parallel()
        ):  # each rank has the scores of some tokens of the vocabulary
            loss = losses(model, batch, args) / count
            loss.backward()
        total += common.plain(loss.detach())
    common.add_up(model)
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
        with loss_parallel():
            loss = common.plain(losses(model, batch, args))
        sums += torch.stack([loss, its.counted(batch)])
    model.train()
    total, count = sums.tolist()
    return total / count


def train(args):
    device = common.device()
    dist.init_process_group("nccl", device_id=device)
    ranks = dist.get_world_size()
    loaded = common.Data(args)  # the same rows for all ranks
    model = divided(args, init_device_mesh("cuda", (ranks,), mesh_dim_names=("tp",)))
    optimizer = common.optimizer_of(model, args)
    first = common.load(model, optimizer, args)
    log = common.Log(args, loaded)
    for step, parts in loaded.steps(first):
        common.set_rate(optimizer, step, args)
        loss, norm = take_step(model, optimizer, parts, args)
        stop = log.step(step, loss / ranks, norm, optimizer)
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
    train(common.options(needs=("slices",)))
