"""Train the model of model.py on the data of data.py, in shards (FSDP2).

    torchrun --nproc-per-node=4 fsdp.py --data=book.txt

What differs from ddp.py: a rank stores a shard of each parameter, of its gradient and
of the optimizer's state.
"""

import itertools

import common
import model as its
import torch
import torch.distributed as dist
import values
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def divided(args):
    """The model with values, a shard of it on each rank."""
    with torch.device("meta"):
        model = its.make(args.size, args.context)
    tied = values.ties(model)
    if args.recompute:
        common.recompute(model)
    policy = MixedPrecisionPolicy(
        param_dtype=None if args.float32 else torch.bfloat16,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for part in [*model.blocks, model]:
        if args.compile and part is not model:
            part.compile()
        fully_shard(part, mp_policy=policy)
        part.set_gradient_divide_factor(1)  # gradients are added up, not averaged
    values.allocate(model, tied, args)
    return model


def take_step(model, optimizer, parts, args):
    """One step; returns the mean loss, and the norm of its gradient."""
    count = sum(its.counted(batch) for batch in parts)
    dist.all_reduce(count)  # ranks may have unequal numbers of targets
    total = 0
    for batch in parts:
        model.set_requires_gradient_sync(batch is parts[-1])
        loss = model(batch) / count
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
        sums += torch.stack([model(batch), its.counted(batch)])
    model.train()
    model.reshard()  # without a backward pass, the root would stay gathered
    dist.all_reduce(sums)
    total, count = sums.tolist()
    return total / count


def train(args):
    device = common.device()
    dist.init_process_group("nccl", device_id=device)
    loaded = common.Data(args, dist.get_rank(), dist.get_world_size())
    model = divided(args)
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
