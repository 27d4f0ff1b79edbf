"""Train the model of model.py on the data of data.py, divided in all ways at once.

    torchrun --nproc-per-node=16 whole.py --data=book.txt --stages=2 --tp=2 --replicas=2

Stages (stages.py) of slices, shards and replicas (meshes.py).
"""

from functools import partial

import common
import model as its
import torch
import torch.distributed as dist
import values
from styles import styles_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module


def forward(model, *received, **batch):
    """What a rank computes of a model: losses in the last stage."""
    x = received[0] if received else model.embed(batch)
    seen = model.seen(batch)
    for block in model.blocks:
        if block is not None:
            x = block(x, *seen)
    if model.is_last:
        return torch.stack([common.plain(model.losses(x, batch))])
    return x.contiguous()  # a message is as it lies in memory


def mesh_of(args):
    """All ranks, by stage, replica, shard and slice; neighbours are slices."""
    ranks, others = dist.get_world_size(), args.stages * args.replicas * args.tp
    if ranks % others:
        raise ValueError(
            f"{ranks} ranks are not {others} (stages, replicas, slices) x n"
        )
    sizes = (args.stages, args.replicas, ranks // others, args.tp)
    names = ("stage", "replica", "shard", "tp")
    return init_device_mesh("cuda", sizes, mesh_dim_names=names)


def divided(args, mesh):
    """The model with values, this rank's part of it; and its tied names."""
    stage, stages = mesh["stage"].get_local_rank(), args.stages
    with torch.device("meta"):
        model = its.make(args.size, args.context)
    tied = values.ties(model)
    if args.recompute:
        common.recompute(model)
    count = len(model.blocks)
    if count < stages:
        raise ValueError(f"{count} blocks are too few for {stages} stages")
    mine = range(count * stage // stages, count * (stage + 1) // stages)
    for i in set(range(count)) - set(mine):
        model.blocks[i] = None  # the others keep their names
    gone = [*its.FIRST * (stage > 0), *its.LAST * (stage + 1 < stages)]
    for name in gone:
        values.drop(model, name)
    model.is_last = stage == stages - 1
    model.forward = partial(forward, model)
    if args.tp > 1:  # slices first, then shards of the slices
        words = its.slices(model).items()
        mine_of = {name: word for name, word in words if name not in gone}
        parallelize_module(model, mesh["tp"], styles_of(mine_of))
    policy = MixedPrecisionPolicy(
        param_dtype=None if args.float32 else torch.bfloat16,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    shards = mesh["replica", "shard"]
    for part in [*(model.blocks[i] for i in mine), model]:
        if args.compile and part is not model:
            part.compile()
        # every part of a batch would gather again what a stage gives up after forward
        again = stages == 1 and part is not model
        fully_shard(part, mesh=shards, mp_policy=policy, reshard_after_forward=again)
        part.set_gradient_divide_factor(1)  # gradients are added up, not averaged
    values.allocate(model, tied, args)
    return model, tied


class Pipeline:
    """The stages of a model and what passes between them.

    Args:
        model: this rank's part.
        tied: names of parameters that the first and the last stage may both have.
        mesh: of all ranks.
        group: of the ranks that have rows of their own.
        args: options.
    """

    def __init__(self, model, tied, mesh, group, args):
        self.column, self.group = mesh["stage"].get_group(), group
        self.stage, self.stages = mesh["stage"].get_local_rank(), args.stages
        self.model, self.args, self.count = model, args, 1
        device = torch.device("cuda", torch.cuda.current_device())
        part = PipelineStage(model, self.stage, self.stages, device, group=self.column)
        # each loss is divided once, by all targets of a step
        self.schedule = Schedule1F1B(
            part,
            args.accumulate,
            loss_fn=lambda losses, _: losses.sum() / self.count,
            scale_grads=False,
        )
        mine = dict(model.named_parameters())
        both = [[name for name in names if name in mine] for names in tied]
        self.shared = [mine[names[0]] for names in both if names and self.stages > 1]

    def pass_through(self, parts, backward):
        """This rank's share of the mean loss of a step, and how many it is of."""
        batch = common.joined(parts)
        self.count, losses = its.counted(batch), []
        dist.all_reduce(self.count, group=self.group)
        run = self.schedule.step if backward else self.schedule.eval
        with loss_parallel():
            micro_batches = torch.zeros(self.args.accumulate)
            run(**batch, target=micro_batches, losses=losses)
        if not self.model.is_last:
            return torch.zeros((), device="cuda"), self.count
        return torch.stack(losses).sum().detach(), self.count

    def add_shared(self):
        """The first and the last stage add up the gradients of what both have."""
        for p in self.shared:
            other = self.stages - 1 - self.stage
            other = dist.get_global_rank(self.column, other)
            grad = p.grad.to_local()
            theirs = torch.empty_like(grad)
            messages = [
                dist.P2POp(dist.isend, grad, other, self.column),
                dist.P2POp(dist.irecv, theirs, other, self.column),
            ]
            for message in dist.batch_isend_irecv(messages):
                message.wait()
            grad += theirs


def take_step(pipeline, optimizer, parts, args):
    """One step; returns the mean loss, and the norm of its gradient."""
    loss, _ = pipeline.pass_through(parts, backward=True)
    pipeline.add_shared()
    copies = pipeline.shared if pipeline.stage else ()
    norm = common.clip(pipeline.model, args.clip, pipeline.column, copies)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


@torch.no_grad()
def test(pipeline, loaded, args):
    """The mean loss of what is not learned from."""
    pipeline.model.eval()
    sums = torch.zeros(2, device="cuda")
    for parts in loaded.tests():
        loss, count = pipeline.pass_through(parts, backward=False)
        share = count * pipeline.model.is_last / loaded.ranks
        sums += torch.stack([loss * count, share])
    pipeline.model.train()
    pipeline.model.reshard()  # without a backward pass, the root would stay gathered
    dist.all_reduce(sums)
    total, count = sums.tolist()
    return total / count


def train(args):
    device = common.device()
    dist.init_process_group("nccl", device_id=device)
    mesh = mesh_of(args)
    ranks = mesh["replica"].size() * mesh["shard"].size()
    sizes = args.stages, ranks, args.tp
    rows = init_device_mesh("cuda", sizes, mesh_dim_names=("stage", "rows", "tp"))[
        "rows"
    ]
    loaded = common.Data(args, rows.get_local_rank(), ranks)
    if args.accumulate < args.stages:
        raise ValueError("--accumulate is at least the number of stages")
    if args.batch % (ranks * args.accumulate):
        raise ValueError(
            f"{ranks} ranks x --accumulate do not divide --batch={args.batch}"
        )
    model, tied = divided(args, mesh)
    pipeline = Pipeline(model, tied, mesh, rows.get_group(), args)
    optimizer = common.optimizer_of(model, args, rows.get_group())
    first = common.load(model, optimizer, args)
    log = common.Log(args, loaded)
    for step, parts in loaded.steps(first):
        common.set_rate(optimizer, step, args)
        loss, norm = take_step(pipeline, optimizer, parts, args)
        stop = log.step(step, loss / args.tp, norm, optimizer)
        if stop or (step + 1) % args.every == 0 or step + 1 == args.steps:
            with log.paused():
                if args.folder:
                    common.save(step + 1, model, optimizer, args)
                if not stop:
                    common.say_test(step, test(pipeline, loaded, args))
        if stop:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    train(
        common.options(
            needs=("FIRST", "LAST"),
            stages="of the blocks",
            tp="ranks that share a layer",
            replicas="of all shards",
        )
    )
