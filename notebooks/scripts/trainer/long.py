"""Train the model of model.py on the data of data.py, rows cut into parts (Ulysses).

    torchrun --nproc-per-node=8 long.py --data=book.txt --context=8192 --cp=4

What differs from fsdp.py: `--cp` ranks share the tokens of a row. Only attention reads
other tokens: in it, each of these ranks has all tokens of some heads.
"""

import itertools
from functools import partial

import common
import model as its
import torch
import torch.distributed as dist
import values
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Exchange(torch.autograd.Function):
    """Part i of the first dimension goes to rank i; so do its gradients, back."""

    @staticmethod
    def forward(ctx, parts, group):
        ctx.group, parts = group, parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, ctx.group), None


def by_heads(attend, group, q, k, v, mask):
    """Attention of all tokens, each rank computing some of the heads."""
    ranks = dist.get_world_size(group)
    if k.shape[1] % ranks:  # a head of keys for each head of queries
        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
    heads = []
    for y in (q, k, v):  # (rows, heads, some tokens, size)
        y = Exchange.apply(y.unflatten(1, (ranks, -1)).movedim(1, 0), group)
        heads.append(y.movedim(0, 2).flatten(2, 3))  # (rows, some heads, tokens, size)
    y = attend(*heads, mask).unflatten(2, (ranks, -1)).movedim(2, 0)
    return Exchange.apply(y, group).movedim(0, 1).flatten(1, 2)


def mine_of(batch, group):
    """This rank's tokens of a batch, and which they are."""
    return its.cut(batch, dist.get_rank(group), dist.get_world_size(group))


def forward(model, group, batch):
    """The sum of the losses of this rank's tokens."""
    mine, part = mine_of(batch, group)
    x, seen = model.embed(mine), model.seen(batch, part)
    for block in model.blocks:
        x = block(x, *seen)
    return model.losses(x, mine)


def divided(args, group):
    """The model with values, a shard of it on each rank."""
    with torch.device("meta"):
        model = its.make(args.size, args.context)
    tied = values.ties(model)
    if args.recompute:
        common.recompute(model)
    for module in model.modules():
        if hasattr(module, "attend"):
            module.attend = partial(by_heads, module.attend, group)
    model.forward = partial(forward, model, group)
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


def take_step(model, optimizer, parts, group, args):
    """One step; returns the mean loss, and the norm of its gradient."""
    count = sum(its.counted(mine_of(batch, group)[0]) for batch in parts)
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
def test(model, loaded, group, args):
    """The mean loss of what is not learned from."""
    model.eval()
    sums = torch.zeros(2, device="cuda")
    for batch in itertools.chain.from_iterable(loaded.tests()):
        count = its.counted(mine_of(batch, group)[0])
        sums += torch.stack([model(batch), count])
    model.train()
    model.reshard()  # without a backward pass, the root would stay gathered
    dist.all_reduce(sums)
    total, count = sums.tolist()
    return total / count


def train(args):
    device = common.device()
    dist.init_process_group("nccl", device_id=device)
    ranks = dist.get_world_size()
    if ranks % args.cp or args.context % args.cp:
        raise ValueError(f"--cp divides {ranks} ranks and --context={args.context}")
    sizes = ranks // args.cp, args.cp
    mesh = init_device_mesh("cuda", sizes, mesh_dim_names=("rows", "cp"))
    loaded = common.Data(args, mesh["rows"].get_local_rank(), mesh["rows"].size())
    group = mesh["cp"].get_group()
    model = divided(args, group)
    optimizer = common.optimizer_of(model, args, dist.group.WORLD)
    first = common.load(model, optimizer, args)
    log = common.Log(args, loaded)
    for step, parts in loaded.steps(first):
        common.set_rate(optimizer, step, args)
        loss, norm = take_step(model, optimizer, parts, group, args)
        stop = log.step(step, loss, norm, optimizer)
        if stop or (step + 1) % args.every == 0 or step + 1 == args.steps:
            with log.paused():
                if args.folder:
                    common.save(step + 1, model, optimizer, args)
                if not stop:
                    common.say_test(step, test(model, loaded, group, args))
        if stop:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    train(common.options(needs=("cut",), cp="ranks that share the tokens of a row"))
