"""Train the model of model.py on the data of data.py, its experts on several ranks.

    torchrun --nproc-per-node=8 experts.py --data=book.txt --size=tiny-experts --ep=4

What differs from fsdp.py: `--ep` ranks share the experts, and tokens travel to them.
Ranks that have the same experts store shards of these.
"""

import itertools
from functools import partial

import common
import model as its
import torch
import torch.distributed as dist
import values
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor


class Exchange(torch.autograd.Function):
    """The next `sent[i]` rows go to rank i; so do their gradients, back."""

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.sizes, ctx.group = (received, sent), group
        found = rows.new_empty(sum(received), *rows.shape[1:])
        rows = rows.contiguous()
        dist.all_to_all_single(found, rows, received, sent, group=group)
        return found

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, *ctx.sizes, ctx.group), None, None, None


def by_ranks(group, experts, x, counts):
    """Send each token to the rank that has its expert, and what that computes back."""
    ranks = dist.get_world_size(group)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)
    counts, theirs = (c.unflatten(0, (ranks, -1)) for c in (counts, theirs))
    sent, received = (c.sum(1).tolist() for c in (counts, theirs))
    x = Exchange.apply(x, sent, received, group)
    # by rank and then by expert, to by expert
    expert = torch.arange(theirs.shape[1], device=x.device).repeat(ranks)
    order = expert.repeat_interleave(theirs.flatten()).argsort(stable=True)
    y = experts(x[order], theirs.sum(0))
    y = torch.empty_like(y).index_copy(0, order, y)
    return Exchange.apply(y, received, sent, group)


def divide_experts(model, mesh, policy):
    """Let each rank have some experts, and a shard of those."""
    for module in model.modules():
        if hasattr(module, "exchange"):
            module.exchange = partial(by_ranks, mesh["ep"].get_group())
            experts = module.experts
            for name, p in list(experts.named_parameters()):
                if len(p) % mesh["ep"].size():
                    raise ValueError(f"--ep does not divide {len(p)} experts")
                p = distribute_tensor(p, mesh["ep"], [Shard(0)])
                experts.register_parameter(name, nn.Parameter(p))
            fully_shard(
                experts,
                mesh=mesh["copy"],
                mp_policy=policy,
                shard_placement_fn=lambda p: Shard(1),
            )
            experts.set_gradient_divide_factor(1)


def divided(args, mesh):
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
    divide_experts(model, mesh, policy)
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
    ranks = dist.get_world_size()
    if ranks % args.ep:
        raise ValueError(f"--ep does not divide {ranks} ranks")
    sizes = ranks // args.ep, args.ep
    mesh = init_device_mesh("cuda", sizes, mesh_dim_names=("copy", "ep"))
    loaded = common.Data(args, dist.get_rank(), ranks)
    model = divided(args, mesh)
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
    train(common.options(ep="ranks that share the experts"))
