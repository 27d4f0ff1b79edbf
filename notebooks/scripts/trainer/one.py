"""Train the model of model.py on the data of data.py, on one GPU.

    python one.py --data=book.txt

Prints a line of JSON a step.
"""

import itertools

import common
import model as its
import torch
import values


def divided(args):
    """The model with values, the whole of it."""
    with torch.device("meta"):
        model = its.make(args.size, args.context)
    tied = values.ties(model)
    if args.recompute:
        common.recompute(model)
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
        loss = losses(model, batch, args) / count
        loss.backward()
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
    total, count = sums.tolist()
    return total / count


def train(args):
    common.device()
    loaded = common.Data(args)
    model = divided(args)
    optimizer = common.optimizer_of(model, args)
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


if __name__ == "__main__":
    train(common.options())
