"""Train the model of model.py on the data of data.py, its blocks in stages (1F1B).

    torchrun --nproc-per-node=4 stages.py --data=book.txt --accumulate=8

What differs from one.py: a rank has some of the blocks, and passes what they compute on
to the next. Parts of a batch follow each other through the stages.
"""

from functools import partial

import common
import model as its
import torch
import torch.distributed as dist
import values
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def forward(model, *received, **batch):
    """What a rank computes of a model: losses in the last stage."""
    x = received[0] if received else model.embed(batch)
    seen = model.seen(batch)
    for block in model.blocks:
        if block is not None:
            x = block(x, *seen)
    if model.is_last:
        return torch.stack([model.losses(x, batch)])
    return x.contiguous()  # a message is as it lies in memory


def divided(args, stage, stages):
    """The model with values, some of its blocks on each rank; and its tied names."""
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
    for name in [*its.FIRST * (stage > 0), *its.LAST * (stage + 1 < stages)]:
        values.drop(model, name)
    model.is_last = stage == stages - 1
    model.forward = partial(forward, model)
    values.allocate(model, tied, args)
    if args.compile:
        for i in mine:
            model.blocks[i].compile()
    return model, tied


class Pipeline:
    """The stages of a model and what passes between them.

    Args:
        model: this rank's part.
        tied: names of parameters that the first and the last stage may both have.
        args: options.
    """

    def __init__(self, model, tied, args):
        self.stage, self.stages = dist.get_rank(), dist.get_world_size()
        self.model, self.args, self.count = model, args, 1
        device = torch.device("cuda", torch.cuda.current_device())
        part = PipelineStage(model, self.stage, self.stages, device)
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
        """This rank's share of the mean loss of a batch, and how many it is of."""
        batch = common.joined(parts)
        self.count, losses = its.counted(batch), []
        run = self.schedule.step if backward else self.schedule.eval
        with torch.autocast("cuda", torch.bfloat16, enabled=not self.args.float32):
            micro_batches = torch.zeros(self.args.accumulate)
            run(**batch, target=micro_batches, losses=losses)
        if not self.model.is_last:
            return torch.zeros((), device="cuda"), self.count
        return torch.stack(losses).sum().detach(), self.count

    def add_shared(self):
        """The first and the last stage add up the gradients of what both have."""
        for p in self.shared:
            other = self.stages - 1 - self.stage
            theirs = torch.empty_like(p.grad)
            messages = [
                dist.P2POp(dist.isend, p.grad, other),
                dist.P2POp(dist.irecv, theirs, other),
            ]
            for message in dist.batch_isend_irecv(messages):
                message.wait()
            p.grad += theirs


def take_step(pipeline, optimizer, parts, args):
    """One step; returns the mean loss, and the norm of its gradient."""
    loss, _ = pipeline.pass_through(parts, backward=True)
    pipeline.add_shared()
    copies = pipeline.shared if pipeline.stage else ()
    norm = common.clip(pipeline.model, args.clip, dist.group.WORLD, copies)
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
        sums += torch.stack([loss * count, count * pipeline.model.is_last])
    pipeline.model.train()
    dist.all_reduce(sums)
    total, count = sums.tolist()
    return total / count


def train(args):
    device = common.device()
    dist.init_process_group("nccl", device_id=device)
    loaded = common.Data(args)  # the same rows for all ranks
    if args.accumulate < dist.get_world_size():
        raise ValueError("--accumulate is at least the number of stages")
    if args.batch % args.accumulate:
        raise ValueError(f"--accumulate does not divide --batch={args.batch}")
    model, tied = divided(args, dist.get_rank(), dist.get_world_size())
    pipeline = Pipeline(model, tied, args)
    optimizer = common.optimizer_of(model, args)
    first = common.load(model, optimizer, args)
    log = common.Log(args, loaded)
    for step, parts in loaded.steps(first):
        common.set_rate(optimizer, step, args)
        loss, norm = take_step(pipeline, optimizer, parts, args)
        stop = log.step(step, loss, norm, optimizer)
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
    train(common.options(needs=("FIRST", "LAST")))
