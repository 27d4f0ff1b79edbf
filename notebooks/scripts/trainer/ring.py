"""Train the model of model.py on the data of data.py, rows cut into parts (a ring).

    torchrun --nproc-per-node=8 ring.py --data=book.txt --context=8192 --cp=4

What differs from long.py: in attention, each rank keeps its tokens' queries, and the
keys and values go around. Any number of ranks may share a row, however few the heads.
"""

import itertools
from contextlib import contextmanager
from functools import partial

import common
import model as its
import torch
import torch.distributed as dist
import values
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method


def with_all_keys(attend, q, k, v, mask):
    """Attention as `context_parallel` knows it: causal, as many keys as queries."""
    if mask is not None:
        raise ValueError("attention in a ring takes no mask, so no documents: long.py")
    k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
    return attend(q, k, v, None)


@contextmanager
def mine_of(batch, mesh):
    """This rank's tokens of a batch, and which they are: early ones and late ones."""
    mine = {name: tensor.clone() for name, tensor in batch.items()}
    places = torch.arange(next(iter(mine.values())).shape[1], device="cuda")
    if mesh.size() == 1:
        yield mine, places
        return
    buffers = [*mine.values(), places]
    dims = [1] * len(mine) + [0]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims):
        yield mine, places


def forward(model, batch, mine, places):
    """The sum of the losses of this rank's tokens."""
    x, seen = model.embed(mine), model.seen(batch, places)
    for block in model.blocks:
        x = block(x, *seen)
    return model.losses(x, mine)


def divided(args):
    """The model with values, a shard of it on each rank."""
    with torch.device("meta"):
        model = its.make(args.size, args.context)
    tied = values.ties(model)
    if args.recompute:
        common.recompute(model)
    for module in model.modules():
        if hasattr(module, "attend"):
            module.attend = partial(with_all_keys, module.attend)
    model.forward = partial(forward, model)
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


def take_step(model, optimizer, parts, mesh, args):
    """One step; returns the mean loss, and the norm of its gradient."""
    count = sum(its.counted(batch) for batch in parts)
    dist.all_reduce(count)  # ranks may have unequal numbers of targets
    count = count / mesh.size()  # the ranks of a row counted all of its targets
    total = 0
    for batch in parts:
        model.set_requires_gradient_sync(batch is parts[-1])
        with mine_of(batch, mesh) as (mine, places):
            loss = model(batch, mine, places) / count
            loss.backward()  # in here, for attention sends in backward, too
        total += loss.detach()
    norm = common.clip(model, args.clip)
    optimizer.step()
    optimizer.zero_grad()
    return total, norm


@torch.no_grad()
def test(model, loaded, mesh, args):
    """The mean loss of what is not learned from."""
    model.eval()
    sums = torch.zeros(2, device="cuda")
    for batch in itertools.chain.from_iterable(loaded.tests()):
        with mine_of(batch, mesh) as (mine, places):
            sums += torch.stack([model(batch, mine, places), its.counted(mine)])
    model.train()
    model.reshard()  # without a backward pass, the root would stay gathered
    dist.all_reduce(sums)
    total, count = sums.tolist()
    return total / count


def train(args):
    device = common.device()
    dist.init_process_group("nccl", device_id=device)
    ranks = dist.get_world_size()
    if ranks % args.cp or args.context % (64 * args.cp):
        raise ValueError(
            f"--cp divides {ranks} ranks; 64 times it divides --context={args.context}"
        )
    set_rotate_method("alltoall")  # a ring; the default is a gather
    sizes = ranks // args.cp, args.cp
    mesh = init_device_mesh("cuda", sizes, mesh_dim_names=("rows", "cp"))
    loaded = common.Data(args, mesh["rows"].get_local_rank(), mesh["rows"].size())
    model = divided(args)
    optimizer = common.optimizer_of(model, args, dist.group.WORLD)
    first = common.load(model, optimizer, args)
    log = common.Log(args, loaded)
    for step, parts in loaded.steps(first):
        common.set_rate(optimizer, step, args)
        loss, norm = take_step(model, optimizer, parts, mesh["cp"], args)
        stop = log.step(step, loss, norm, optimizer)
        if stop or (step + 1) % args.every == 0 or step + 1 == args.steps:
            with log.paused():
                if args.folder:
                    common.save(step + 1, model, optimizer, args)
                if not stop:
                    common.say_test(step, test(model, loaded, mesh["cp"], args))
        if stop:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    train(common.options(cp="ranks that share the tokens of a row"))
