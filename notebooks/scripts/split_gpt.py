"""Train a tiny GPT split over the ranks: in stages, in slices, or by tokens.

    torchrun --standalone --nproc-per-node=4 split_gpt.py --way pipeline

Each way and each number of ranks reaches the loss of one process. Used in
20-pipeline-the-layers, which also takes from here what every way needs: the model, a
batch, `measure`, and a picture.
"""

import argparse
import os
import sys
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

BLOCKS, WIDTH, HEADS, VOCABULARY, TOKENS, BATCH = 8, 64, 4, 64, 32, 8

# -- the model and its text ------------------------------------------------------------


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(TOKENS, WIDTH)
        self.first = 0  # the place of the first token

    def forward(self, x):  # (batch, tokens)
        here = self.first + torch.arange(x.shape[1], device=x.device)
        return self.token(x) + self.place(here)


def attend(q, k, v):  # (batch, heads, tokens, width of a head)
    return scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        for name in "qkvo":
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.attend = attend

    def forward(self, x):  # (batch, tokens, width)
        h = self.norm1(x)
        q, k, v = (
            part(h).unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        x = x + self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


def make_model() -> nn.Sequential:
    """Ten modules: Embed, eight blocks, and the head."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False))
    return nn.Sequential(Embed(), *(Block() for _ in range(BLOCKS)), head)


def text(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences that count in steps of 1 to 7; y is the next token of each in x."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 8, (BATCH, 1), generator=generator)
    tokens = (start + stride * torch.arange(TOKENS + 1)) % VOCABULARY
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()  # (batch, tokens)


def loss_of(scores, y):
    return cross_entropy(scores.flatten(0, 1), y.flatten())


def device() -> str:
    """Where this rank computes."""
    return "cuda" if dist.is_initialized() and "nccl" in dist.get_backend() else "cpu"


def batch(step: int = 0) -> list[torch.Tensor]:
    return [part.to(device()) for part in text(step)]


# -- stages ----------------------------------------------------------------------------


def cut(model: nn.Sequential, stages: int) -> list[nn.Sequential]:
    """As many blocks in each stage; Embed goes with the first, the head with the last.

    The parameters keep their names.
    """
    each = BLOCKS // stages
    edges = [0, *range(1 + each, BLOCKS + 1, each), BLOCKS + 2]
    return [model[a:b] for a, b in zip(edges, edges[1:], strict=False)]


class Nap(nn.Module):
    """A stage that takes time and no core: it sleeps, twice as long backward."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds  # for each row
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return _Sleep.apply(x + self.weight, self.seconds * len(x))


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient.contiguous(), None


# -- slices ----------------------------------------------------------------------------


def slice_blocks(model: nn.Sequential, mesh) -> None:
    """Cut each block in slices, with four all-reduces in a step.

    The norms give DTensors, so that autograd adds the gradients of q, k and v before
    it sends their sum.
    """
    whole = {"output_layouts": Replicate(), "desired_output_layouts": Replicate()}
    once = PrepareModuleOutput(**whole, use_local_output=False)
    for block in model[1:-1]:
        plan = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        plan |= {name: RowwiseParallel() for name in ("o", "down")}
        plan |= {"norm1": once, "norm2": once}
        parallelize_module(block, mesh, plan)


# -- tokens ----------------------------------------------------------------------------


def pass_on(x, hop):
    """Give x to the rank `hop` further round the ring; get another in its place."""
    rank, size, box = dist.get_rank(), dist.get_world_size(), torch.empty_like(x)
    give = dist.P2POp(dist.isend, x.contiguous(), (rank + hop) % size)
    take = dist.P2POp(dist.irecv, box, (rank - hop) % size)
    for work in dist.batch_isend_irecv([give, take]) if size > 1 else []:
        work.wait()
    return box


class Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return pass_on(x, 1)

    @staticmethod
    def backward(ctx, gradient):
        return pass_on(gradient, -1)


def ring_attend(q, k, v):  # this rank's tokens: (batch, heads, tokens, width of a head)
    rank, size, tokens = dist.get_rank(), dist.get_world_size(), q.shape[2]
    here = torch.arange(tokens, device=q.device)
    both, top, low, most = torch.stack([k, v]), 0, 0, q.new_tensor(-torch.inf)
    for hop in range(size):
        whose = (rank - hop) % size  # whose keys and values are here
        later = whose * tokens + here > (rank * tokens + here)[:, None]
        scores = (q @ both[0].mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
        new = torch.maximum(most, scores.amax(-1, keepdim=True))
        weight, shrink, most = (scores - new).exp(), (most - new).exp(), new
        top = top * shrink + weight @ both[1]
        low = low * shrink + weight.sum(-1, keepdim=True)
        if hop < size - 1:
            both = Shift.apply(both)
    return top / low


def split_tokens(model: nn.Sequential) -> None:
    model[0].first = dist.get_rank() * (TOKENS // dist.get_world_size())
    for block in model[1:-1]:
        block.attend = ring_attend


# -- steps -----------------------------------------------------------------------------


def backward(model: nn.Module, x, y) -> float:
    loss = loss_of(model(x), y)
    loss.backward()
    return loss.item()


def backward_on_share(model: nn.Module, x, y, dim: int, group=None) -> float:
    """Take a part of the batch, rows (dim 0) or tokens (1), and average gradients."""
    part, parts = dist.get_rank(group), dist.get_world_size(group)
    loss = backward(model, *(t.chunk(parts, dim)[part] for t in (x, y)))
    average(model, group)
    return loss


def average(model: nn.Module, group=None) -> None:
    """Average the gradients, or the parts that this rank has, in one message."""
    gradients = [p.grad for p in model.parameters()]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    flat = torch.cat([g.flatten() for g in local])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for g, part in zip(local, flat.split([g.numel() for g in local]), strict=True):
        g.copy_(part.view_as(g))


class Result(NamedTuple):
    """What one rank has done in a step."""

    gradients: dict[str, torch.Tensor]  # whole ones, of the parameters that it has
    messages: dict[str, tuple[int, int]]  # kind -> how many, and bytes
    sent: int  # bytes, if the ranks form a ring
    weights: int  # bytes that it keeps
    kept: int  # bytes of activations that backward() was given
    said: object  # what the step returned


def measure(way, *options) -> Result:
    """Split the model, take a step, and count.

    Args:
        way: makes (modules that this rank has, function that takes a step) of a model.
        options: for it.
    """
    from helpers import Messages

    parts, step = way(make_model().to(device()), *options)
    kept = {}  # of each storage

    def note(x):
        own = (x.to_local() if isinstance(x, DTensor) else x).untyped_storage()
        kept[own.data_ptr()] = own.nbytes()
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda x: x)
    with Messages() as messages, hooks:
        said = step()
    mine = {name: p for part in parts for name, p in part.named_parameters()}
    local = [p.to_local() if isinstance(p, DTensor) else p for p in mine.values()]
    return Result(
        {name: whole_gradient(p).cpu() for name, p in mine.items()},
        messages.by_name(),
        messages.sent(),
        sum(p.nbytes for p in local),
        sum(kept.values()) - sum(kept.get(p.data_ptr(), 0) for p in local),
        said,
    )


def report(results: list[Result], whole: dict[str, torch.Tensor]) -> None:
    """Hold the gradients of all ranks against those of one process; print messages."""
    from helpers import check

    found = [pair for result in results for pair in result.gradients.items()]
    bad = {n for n, g in found if not torch.allclose(g, whole[n], rtol=0, atol=1e-6)}
    if {name for name, _ in found} != set(whole):
        raise AssertionError("some parameters are in no rank")
    if bad:
        print(f"WRONG: {len(bad)} of {len(whole)} gradients")
    else:
        check.same([g for _, g in found], [whole[n] for n, _ in found], 1e-6)
    for kind, (count, nbytes) in results[1].messages.items():
        print(f"    rank 1: {count:2} {kind}, {nbytes:,} bytes")


def picture():
    """Which rank has which part of weights and batch, in the four ways."""
    from helpers import draw

    ways = {
        "rows": ("", "across"), "slices": ("down", ""),
        "stages": ("across", ""), "tokens": ("", "down"),
    }  # fmt: skip
    title = (
        "Rows and tokens cut the batch, slices and stages the weights, among 4 ranks"
    )
    drawing = draw.Picture(700, 130, title)
    for i, (way, cuts) in enumerate(ways.items()):
        drawing.text(10 + 175 * i, 20, way, 15, weight="bold")
        for j, cut in enumerate(cuts):
            x = 10 + 175 * i + 78 * j
            drawing.text(x, 116, ("weights", "batch")[j], 13)
            if not cut:
                drawing.box(x, 32, 64, 64)
            for rank in range(4 if cut else 0):
                dx, dy = (0, 16 * rank) if cut == "across" else (16 * rank, 0)
                wide, tall = (64, 16) if cut == "across" else (16, 64)
                drawing.box(x + dx, 32 + dy, wide, tall, draw.COLOURS[rank])
    return drawing


def whole_gradient(p: nn.Parameter) -> torch.Tensor:
    """The gradient of a parameter of which this rank may have a part."""
    if isinstance(p.grad, DTensor):
        return p.grad.full_tensor()
    if not hasattr(p, "cut"):  # the dimension, if it was cut by hand
        return p.grad
    parts = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, p.grad.contiguous())
    return torch.cat(parts, p.cut)


# -- the script ------------------------------------------------------------------------


def train(way="pipeline", schedule="1f1b", steps=12, rate=1.0, micro_batches=4):
    """The loss of each step, the same in all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, losses = make_model().to(device()), []
    if way == "pipeline":
        model = cut(model, size)[rank]
        stage = PipelineStage(model, rank, size, torch.device(device()))
        kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
        run = kind(stage, micro_batches, loss_fn=loss_of)
    elif way == "slices":
        slice_blocks(model, init_device_mesh(device(), (size,)))
    else:
        split_tokens(model)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        if way == "pipeline":
            each = []  # the loss of each micro-batch; only the last stage knows
            target = {"target": y, "losses": each} if rank == size - 1 else {}
            run.step(*([x] if rank == 0 else []), **target)
            loss = torch.stack(each).sum().item() / micro_batches if each else 0.0
        elif way == "slices":
            loss = backward(model, x, y) / size
        else:
            loss = backward_on_share(model, x, y, dim=1) / size
        optimizer.step()
        total = torch.tensor(loss, device=device())
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a GPT split over the ranks.")
    parser.add_argument(
        "--way", default="pipeline", choices=("pipeline", "slices", "tokens")
    )
    parser.add_argument("--schedule", default="1f1b", choices=("gpipe", "1f1b"))
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args(arguments)
    size = int(os.environ["WORLD_SIZE"])
    if HEADS % size:
        parser.error(f"{HEADS} heads and {BLOCKS} blocks cannot be split in {size}")

    gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpus else "gloo")
    losses = train(args.way, args.schedule, args.steps)
    if dist.get_rank() == 0:
        print(f"{size} ranks: loss {losses[0]:.4f}, after {args.steps} steps", end=" ")
        print(f"{losses[-1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # A thread of gloo may still hold a tensor while Python shuts down, which aborts
    # the process ("terminate called without an active exception"). So leave at once.
    sys.stdout.flush()
    os._exit(0)
