"""Judges of the exercises of lesson 07."""

import functools
import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from helpers import digits, gpu_seconds, simgpu
from helpers.check import NotYet, Wrong, call, exercise, number

MIB = 2**20


@exercise("07.1")
def best_segments(segments) -> None:
    """Segments of 40 blocks that keep ten tensors each, an input being one of them.

    Kept at most: k + 10 * ceil(40 / k), lowest at k = sqrt(400) = 20.
    """
    k = number(segments, "segments")
    if k == 20:
        return
    reasons = {
        6: "the square root of 40 is right where a block keeps one tensor; here it "
        "keeps ten, so a long segment costs more than an input",
        7: "the square root of 40 is right where a block keeps one tensor",
        6.3: "the square root of 40 is right where a block keeps one tensor",
        40: "with 40 segments 40 inputs are kept, and 10 tensors of one block: 50. "
        "Fewer segments need less",
        2: "that is the other side: with 2 segments 200 tensors are there at once",
        4: "with 4 segments 100 tensors of one segment are there at once",
    }
    for wrong, reason in reasons.items():
        if abs(k - wrong) < 0.05:
            raise Wrong(reason)
    if not 1 <= k <= 40:
        raise Wrong("there are between 1 and 40 segments")
    if k != int(k):
        raise Wrong("a number of segments is whole")
    kept = int(k) + 10 * math.ceil(40 / k)
    raise Wrong(f"that makes {kept} tensors; look for the lowest point")


# -- a step in unequal parts -----------------------------------------------------------


def _small() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)
    return nn.Sequential(*layers).double().to("cuda")


def _tools(model) -> tuple:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return optimizer, schedule


@exercise("07.2")
def one_step(function) -> None:
    """A function (model, optimizer, schedule, parts): one step of the whole batch."""
    data, sizes = digits(), (100, 7, 60)
    x = data.x[: sum(sizes)].double().to("cuda")
    y = data.y[: sum(sizes)].to("cuda")
    parts = list(zip(x.split(sizes), y.split(sizes), strict=True))
    model, right, rows, waiting, most = _small(), _small(), [], [], [0]

    def forward_ran(net, inputs, out):
        rows.append(len(inputs[0]))
        if out.requires_grad:  # its activations wait for a gradient
            waiting.append(out.shape)
            most[0] = max(most[0], len(waiting))
            out.register_hook(lambda gradient: waiting.clear())

    model.register_forward_hook(forward_ran)
    tools, right_tools = _tools(model), _tools(right)
    before = 0.0
    for step in range(2):
        wanted, reasons = _gradients(right, x, y), _typical(right, parts, before)
        before = wanted
        right_tools[0].zero_grad()
        cross_entropy(right(x), y).backward()
        right_tools[0].step()
        right_tools[1].step()
        seen, steps = [], []

        def note(optimizer, args, kwargs, seen=seen, steps=steps):
            steps.append(1)
            seen[:] = [
                torch.zeros_like(p) if p.grad is None else p.grad.clone()
                for p in model.parameters()
            ]

        handle = register_optimizer_step_post_hook(note)  # a closure has run by then
        try:
            result = function(model, *tools, parts)
        finally:
            handle.remove()
        if result is None and not rows:
            raise NotYet("your function does nothing so far")
        if not rows:
            raise Wrong("the model has not seen any part")
        if max(rows) > max(sizes):
            raise Wrong("one forward pass got more rows than a part has")
        if most[0] > 1:
            raise Wrong(
                f"the activations of {most[0]} parts were there at once: call "
                "backward() before the next part"
            )
        if len(steps) != 1:
            raise Wrong(f"the optimizer has stepped {len(steps)} times, not once")
        _judge_gradient(_flat(seen), wanted, reasons)
        if tools[1].last_epoch != step + 1:
            raise Wrong(
                f"after {step + 1} steps the schedule has counted "
                f"{tools[1].last_epoch}: it counts steps, not parts"
            )
        for a, b in zip(model.parameters(), right.parameters(), strict=True):
            if not torch.allclose(a, b, atol=1e-10):
                raise Wrong(
                    f"the gradients are right, and the weights after step {step + 1} "
                    "are not: is schedule.step() after optimizer.step()?"
                )


def _flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _gradients(model, x, y) -> torch.Tensor:
    """Of the mean loss of these rows, as one vector."""
    loss = cross_entropy(model(x), y)
    return _flat(torch.autograd.grad(loss, [*model.parameters()]))


def _typical(model, parts, before) -> dict[str, torch.Tensor]:
    """What typical mistakes make of the gradient, by their reasons."""
    means = [_gradients(model, x, y) for x, y in parts]
    sizes = [len(x) for x, _ in parts]
    whole = sum(n * g for n, g in zip(sizes, means, strict=True)) / sum(sizes)
    return {
        "parts of 100, 7 and 60 rows must not weigh the same": sum(means),
        "only the last part's gradient is left": means[-1],
        "the second step begins with the first one's gradients": whole + before,
    }


def _judge_gradient(seen, wanted, reasons: dict[str, torch.Tensor]) -> None:
    error = ((seen - wanted).norm() / wanted.norm()).item()
    if error < 1e-9:
        return

    def along(vector) -> bool:
        return (seen @ vector / (seen.norm() * vector.norm())).item() > 1 - 1e-9

    if along(wanted):
        ratio = (seen.norm() / wanted.norm()).item()
        raise Wrong(f"the gradient is {ratio:.4g} times as long as it should be")
    for reason, vector in reasons.items():
        if along(vector):
            raise Wrong(f"the gradient is off by {error:.0%}: {reason}")
    raise Wrong(f"the gradient is off by {error:.0%}")


# -- within 256 MiB --------------------------------------------------------------------

MOST_MIB, MOST_MS = 256, 9.3
LR = 1e-3


class Block(nn.Module):
    """As in the lesson."""

    def __init__(self, d: int):
        super().__init__()
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.norm = nn.LayerNorm(d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(gelu(self.up(x))))


def deep() -> nn.Sequential:
    """The model of the exercise, on the CPU: 80 blocks, BatchNorm, ten scores."""
    torch.manual_seed(0)
    blocks = [Block(64) for _ in range(80)]
    return nn.Sequential(*blocks, nn.BatchNorm1d(64), nn.Linear(64, 10))


@functools.cache
def _reference() -> tuple:
    """Gradients of a plain step with all rows, and the weights after it."""
    model, data = deep(), digits()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    cross_entropy(model(data.x), data.y).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    return gradients, [p.detach().clone() for p in model.parameters()]


@exercise("07.3")
def within_256(frugal) -> None:
    """A function of the model that returns a step: a function of x and y."""
    if simgpu.count() and torch.cuda.get_device_name(0) != "Tesla T4":
        simgpu.stop()  # the milliseconds are those of a T4
        simgpu.start(1, "T4", "512MB")
    data = digits()
    x, y = data.x.to("cuda"), data.y.to("cuda")
    before = torch.cuda.memory_allocated()
    model = deep().to("cuda")
    step = call(frugal, model)
    if not callable(step):
        raise Wrong("frugal(model) should return a function of x and y")
    try:
        _judge_step(model, step, x, y)
        torch.cuda.reset_peak_memory_stats()
        milliseconds = 1e3 * gpu_seconds(step, x, y)
    except torch.OutOfMemoryError:
        raise Wrong("it needs more than the 512 MiB of the card") from None
    peak = (torch.cuda.max_memory_allocated() - before) / MIB
    score = f"{peak:.1f} MiB, {milliseconds:.2f} ms"
    if peak > MOST_MIB:
        raise Wrong(f"{score}: more than {MOST_MIB} MiB")
    limit = MOST_MS if simgpu.count() else _slow_ms(x, y)
    if milliseconds > limit:
        raise Wrong(
            f"{score}: it fits, and {limit:.1f} ms are enough. How many blocks must "
            "be computed again? And how many kernels does Adam launch?"
        )
    print(score)


def _judge_step(model, step, x, y) -> None:
    """What BatchNorm has seen, the gradients and the weights of the first step."""
    seen, rows = {}, []

    def note(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    seen[id(p)] = p.grad.detach().cpu()

    norm = model[80]
    handles = [
        register_optimizer_step_pre_hook(note),
        norm.register_forward_pre_hook(lambda norm, xs: rows.append(len(xs[0]))),
    ]
    try:
        step(x, y)
    finally:
        for handle in handles:
            handle.remove()
    if rows and min(rows) < len(x):
        raise Wrong(
            f"BatchNorm has seen {min(rows)} rows, not all {len(x)} together: parts of "
            "a batch are another model to it"
        )
    counted = int(norm.num_batches_tracked)
    if counted > 1:
        raise Wrong(
            f"BatchNorm has counted one batch {counted} times: it must not be computed "
            "again"
        )
    gradients, weights = _reference()
    own = [seen.get(id(p)) for p in model.parameters()]
    missing = sum(g is None for g in own)
    if missing:
        raise Wrong(f"{missing} of {len(own)} weights had no gradient for an optimizer")
    a, b = (torch.cat([g.flatten() for g in gs]) for gs in (own, gradients))
    error = ((a - b).norm() / b.norm()).item()
    if not error < 1e-4:
        raise Wrong(
            f"the gradients are off by {error:.1%}: do all rows count, and is anything "
            "of lower precision?"
        )
    if counted == 0:
        raise Wrong("BatchNorm has not counted the batch; its running mean is old")
    pairs = zip(model.parameters(), weights, strict=True)
    moved = [(p.detach().cpu() - w).abs().flatten() for p, w in pairs]
    apart = torch.cat(moved).mean().item()
    if math.isnan(apart) or apart > 0.1 * LR:
        raise Wrong(f"the weights after it are not those of Adam with lr={LR}")


def _slow_ms(x, y) -> float:
    """What a step takes on this GPU if every block is computed again, less 7 %."""
    from torch.utils.checkpoint import checkpoint

    model = deep().to("cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, fused=True)

    def step():
        h = x
        for block in model[:80]:
            h = checkpoint(block, h, use_reentrant=False)
        cross_entropy(model[80:](h), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return 0.93 * 1e3 * gpu_seconds(step)
