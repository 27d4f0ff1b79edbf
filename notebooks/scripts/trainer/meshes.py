"""Train the model of model.py on the data of data.py, in slices, shards and replicas.

    torchrun --nproc-per-node=8 meshes.py --data=book.txt --tp=2 --replicas=2

What differs from fsdp.py: ranks on a mesh. Those of one replica share its shards, and
those of a slice's neighbours compute the same rows (slices.py).
"""

import itertools

import common
import model as its
import torch
import torch.distributed as dist
import values
from styles import styles_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module


def mesh_of(args):
    """All ranks, by replica, shard and slice; neighbours are slices."""
    ranks = dist.get_world_size()
    if ranks % (args.replicas * args.tp):
        raise ValueError(f"{ranks} ranks are not --replicas times --tp times shards")
    sizes = (args.replicas, ranks // args.replicas // args.tp, args.tp)
    return init_device_mesh("cuda", sizes, mesh_dim_names=("replica", "shard", "tp"))


def divided(args, mesh):
    """The model with values, a shard of some slices on each rank."""
    with torch.device("meta"):
        model = its.make(args.size, args.context)
    tied = values.ties(model)
    if args.recompute:
        common.recompute(model)
    if args.tp > 1:  # slices first, then shards of the slices
        parallelize_module(model, mesh["tp"], styles_of(its.slices(model)))
    policy = MixedPrecisionPolicy(
        param_dtype=None if args.float32 else torch.bfloat16,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for part in [*model.blocks, model]:
        if args.compile and part is not model:
            part.compile()
        fully_shard(part, mesh=mesh["replica", "shard"], mp_policy=policy)
        part.set_gradient_divide_factor(1)  # gradients are added up, not averaged
    values.allocate(model, tied, args)
    return model


def take_step(model, optimizer, parts, group, args):
    """One step; returns the mean loss, and the norm of its gradient."""
    count = sum(its.counted(batch) for batch in parts)
    dist.all_reduce(count, group=group)
    total = 0
    for batch in parts:
        model.set_requires_gradient_sync(batch is parts[-1])
        # each rank has the scores of some tokens of the vocabulary
        with loss_parallel():
            loss = model(batch) / count
            loss.backward()
        total += common.plain(loss.detach())
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
        with loss_parallel():
            loss = common.plain(model(batch))
        sums += torch.stack([loss, its.counted(batch)])
    model.train()
    model.reshard()  # without a backward pass, the root would stay gathered
    dist.all_reduce(sums, group=group)
    total, count = sums.tolist()
    return total / count


def train(args):
    device = common.device()
    dist.init_process_group("nccl", device_id=device)
    mesh = mesh_of(args)
    sizes = mesh.size() // args.tp, args.tp
    rows = init_device_mesh("cuda", sizes, mesh_dim_names=("rows", "tp"))["rows"]
    group = rows.get_group()  # of ranks that have rows of their own
    loaded = common.Data(args, rows.get_local_rank(), rows.size())
    model = divided(args, mesh)
    optimizer = common.optimizer_of(model, args, group)
    first = common.load(model, optimizer, args)
    log = common.Log(args, loaded)
    for step, parts in loaded.steps(first):
        common.set_rate(optimizer, step, args)
        loss, norm = take_step(model, optimizer, parts, group, args)
        stop = log.step(step, loss / args.tp, norm, optimizer)
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
    train(common.options(tp="ranks that share a layer", replicas="of all shards"))
