"""The exercises of lesson 10: what to try first, a step in parts, one in 32 MiB."""

import functools

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.checkpoint import checkpoint

import simgpu
from exercises.counted import MIB, listed, word
from exercises.exercise import NotYet, Wrong, call, exercise, run, solution
from exercises.learning import flat, gradients, must_equal, off, weights
from exercises.results import near
from helpers import digits, gpu_seconds, need_gpus

_WAYS = ("accumulate", "checkpoint", "offload", "loss in parts", "more GPUs")
_ONE_SAMPLE = {"accumulate": "a batch of one sample has no parts"}
_JOBS = (
    (
        "checkpoint",
        {
            "accumulate": "BatchNorm would see parts of the batch: another gradient",
            "offload": "copies cost more than a second forward pass: offload last",
        },
        "activations fill the card, and the batch must stay in one piece",
    ),
    (
        "loss in parts",
        {
            **_ONE_SAMPLE,
            "checkpoint": "layers that are computed again do not lower this peak: it "
            "stands at the logits",
        },
        "the peak is the logits and their gradients, not the layers",
    ),
    (
        "accumulate",
        {
            "checkpoint": "a second forward pass costs a third more time, and parts "
            "that fill the GPU cost next to nothing",
            "offload": "copies cost more than anything else: offload last",
        },
        "half of the samples fit and fill the GPU, and no layer mixes samples",
    ),
    (
        "more GPUs",
        {},
        "weights, gradients and Adam's two moments take 4 x 52 GB before there is any "
        "activation",
    ),
    (
        "checkpoint",
        {**_ONE_SAMPLE, "loss in parts": "with 10 classes the logits are small"},
        "one long sample: the layers' activations fill the card",
    ),
)


def _way(answer) -> str | None:
    by_word = {way.lower(): way for way in _WAYS}
    return by_word.get(word(answer))


@exercise(
    "10.1",
    hints=(
        "Ask of each job what fills the card: the weights, the activations of the "
        "layers, or the logits? The list under *Which one when?* has the order.",
        "Can the batch be cut? Not if a layer mixes samples, nor if there is one "
        "sample. Then look at where the peak stands, and multiply weights by four.",
    ),
)
def try_first(*answers) -> None:
    """The technique to try first, for each of five jobs."""
    expected = [
        (right, lambda said, others=others, why=why: others.get(said, why))
        for right, others, why in _JOBS
    ]
    say = "answer with one of " + ", ".join(f'"{way}"' for way in _WAYS)
    listed(answers, expected, what="answers", read=_way, say=say)


@solution("10.1")
def solution_1():
    """Ask what fills the card, and whether the batch can be cut.

    1 has BatchNorm, whose mean and variance are those of all samples together. So the
    batch stays in one piece, and the activations are computed again.

    2 has its peak between forward and backward, where the logits are. Only a loss in
    parts makes them smaller.

    3 can be cut, and half of the samples still fill the GPU. Accumulation then costs
    next to nothing, and checkpointing up to a third more time.

    4 does not fit without any activation: weights, gradients and the two moments of
    Adam are 4 tensors of 13 billion times 4 bytes, 208 GB.

    5 has one sample, which cannot be cut, and small logits.
    """
    first = [
        "checkpoint",  # 1: BatchNorm must see all samples
        "loss in parts",  # 2: the logits are the peak
        "accumulate",  # 3: half of the batch fills the GPU
        "more GPUs",  # 4: the weights alone are too large
        "checkpoint",  # 5: there is nothing to cut
    ]
    return (*first,)


# -- a step in unequal parts -----------------------------------------------------------


def _small() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)
    return nn.Sequential(*layers).double().to("cuda")


def _tools(model) -> tuple:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return optimizer, schedule


@exercise(
    "10.2",
    hints=(
        "The lesson divides by the number of parts, which is right for equal parts. "
        "By what must the mean loss of a part be multiplied, so that the sum over "
        "the parts is the mean over all samples?",
        "The gradients of all parts add up before the optimizer steps. Which calls "
        "belong inside the loop over the parts, which come once after it, and what "
        "must be gone before the next batch?",
    ),
)
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
        wanted, mistakes = _gradients(right, x, y), _typical(right, parts, before)
        before = wanted
        cross_entropy(right(x), y).backward()
        right_tools[0].step()
        right_tools[0].zero_grad()
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
            result = run(function, model, *tools, parts)
        finally:
            handle.remove()
        if result is None and not rows:
            raise NotYet("your function does nothing so far")
        if not rows:
            raise Wrong("the model has not seen any part")
        if max(rows) > max(sizes):
            raise Wrong("one forward pass got more samples than a part has")
        if most[0] > 1:
            raise Wrong(
                f"the activations of {most[0]} parts were there at once: call "
                "backward() before the next part"
            )
        if len(steps) != 1:
            raise Wrong(f"the optimizer has stepped {len(steps)} times, not once")
        must_equal(flat(seen), wanted, 1e-9, mistakes)
        if tools[1].last_epoch != step + 1:
            raise Wrong(
                f"after {step + 1} steps the schedule has counted "
                f"{tools[1].last_epoch}: it counts steps, not parts"
            )
        if not near(weights(model), weights(right), atol=1e-10):
            raise Wrong(
                f"the gradients are right, and the weights after step {step + 1} "
                "are not: is schedule.step() after optimizer.step()?"
            )


@solution("10.2")
def solution_2():
    """Each part counts as much as it has samples.

    `cross_entropy` returns the mean over the samples of a part. The mean over all
    samples is the sum of these means, each times its share of the samples. With equal
    shares, a part of 7 would weigh as much as a part of 100.

    `backward()` is inside the loop. It adds the gradient of the part to `.grad`, and
    frees the activations of the part before the next one comes.

    The optimizer and the schedule count steps, not parts, so each is called once after
    the loop, the optimizer first. `zero_grad()` drops the gradients, or the next batch
    would add to them.
    """

    def one_step(model, optimizer, schedule, parts):
        all_samples = sum(len(x) for x, y in parts)
        for x, y in parts:
            share = len(x) / all_samples
            loss = share * cross_entropy(model(x), y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

    return one_step


def _gradients(model, x, y) -> torch.Tensor:
    """Of the mean loss of these samples, as one vector."""
    loss = cross_entropy(model(x), y)
    return flat(torch.autograd.grad(loss, [*model.parameters()]))


def _typical(model, parts, before) -> dict[str, torch.Tensor]:
    """What typical mistakes make of the gradient, by their reasons."""
    means = [_gradients(model, x, y) for x, y in parts]
    sizes = [len(x) for x, _ in parts]
    whole = sum(n * g for n, g in zip(sizes, means, strict=True)) / sum(sizes)
    return {
        "parts of 100, 7 and 60 samples must not weigh the same": sum(means),
        "only the last part's gradient is left": means[-1],
        "the second step begins with the first one's gradients": whole + before,
    }


# -- within 32 MiB ---------------------------------------------------------------------

MOST_MIB, MOST_MS = 32, 4.5
SAMPLES, WIDTH, LAYERS = 2048, 128, 40
LR = 1e-3


def deep() -> nn.Sequential:
    """The model of the exercise, on the CPU: 40 layers, BatchNorm, ten scores."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, WIDTH), nn.ReLU()]
    for _ in range(LAYERS - 1):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    model = nn.Sequential(*layers, nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 10))
    for weight in model.parameters():
        if weight.dim() == 2:
            nn.init.kaiming_normal_(weight)
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Random images, whose label is the largest of their first ten numbers."""
    torch.manual_seed(1)
    x = torch.randn(SAMPLES, 64)
    return x, x[:, :10].argmax(1)


@functools.cache
def _reference() -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of a plain step with all samples, and the weights after it."""
    model, (x, y) = deep(), batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    cross_entropy(model(x), y).backward()
    optimizer.step()
    return gradients(model), weights(model)


@exercise(
    "10.3",
    hints=(
        "Each layer keeps 1 MiB, and a step without checkpoints is about 18 MiB too "
        "large. Each layer that is computed again costs time, and they need not all "
        "be. When the first layers are computed again, which activations are free?",
        "BatchNorm has to see all samples together, and only once, so it belongs "
        "neither into parts nor into a checkpoint. Then look at the optimizer: "
        "which of Adam's options takes one kernel for all weights?",
    ),
)
def within_32(frugal) -> None:
    """A function of the model that returns a step: a function of x and y."""
    if simgpu.is_running() and torch.cuda.get_device_name(0) != "Tesla T4":
        simgpu.stop()  # the milliseconds are those of a T4
        simgpu.start(1, "T4", "128MB")
    x, y = (tensor.to("cuda") for tensor in batch())
    before = torch.cuda.memory_allocated()
    model = deep().to("cuda")
    step = call(frugal, model)
    if not callable(step):
        raise Wrong("frugal(model) should return a function of x and y")
    try:
        _check_step(model, step, x, y)
        torch.cuda.reset_peak_memory_stats()
        milliseconds = 1e3 * run(gpu_seconds, step, x, y)
    except Wrong as wrong:
        if isinstance(wrong.__cause__, torch.OutOfMemoryError):
            raise Wrong("it needs more than the 128 MiB of the card") from None
        raise
    peak = (torch.cuda.max_memory_allocated() - before) / MIB
    score = f"{peak:.1f} MiB, {milliseconds:.2f} ms"
    if peak > MOST_MIB:
        raise Wrong(f"{score}: more than {MOST_MIB} MiB")
    limit = MOST_MS if simgpu.is_running() else _slow_ms(x, y)
    if milliseconds > limit:
        raise Wrong(
            f"{score}: it fits, and {limit:.1f} ms are enough. How many layers must "
            "be computed again? And how many kernels does Adam launch?"
        )
    print(score)


@solution("10.3")
def solution_3():
    """Compute again half of the layers, and let the optimizer make up for it.

    Parts of the batch are no way here, because BatchNorm has to see all samples
    together. Checkpointing leaves the batch in one piece.

    Each layer keeps one tensor of 1 MiB. Put the first 20 layers into one segment. The
    forward pass then keeps the activations of the other 20 only. When backward comes to
    the segment, these are free, and the 20 tensors that are computed again take their
    place. So the peak has 20 tensors fewer than the plain step, for half of a forward
    pass. More segments would save more and cost more. BatchNorm is not computed again,
    so it counts the batch once.

    `fused=True` wins some of the time back, because Adam then updates all weights in
    one kernel, without the temporary roots. The weights after the step are those of
    plain Adam.
    """
    need_gpus(1, card="T4", memory="128MB")

    def frugal(model):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
        first_half = model[:40]  # 20 layers, each a Linear and a ReLU
        rest = model[40:]

        def step(x, y):
            h = checkpoint(first_half, x, use_reentrant=False)
            loss = cross_entropy(rest(h), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return frugal


def _check_step(model, step, x, y) -> None:
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
        run(step, x, y)
    finally:
        for handle in handles:
            handle.remove()
    if rows and min(rows) < len(x):
        raise Wrong(
            f"BatchNorm has seen {min(rows)} samples, not all {len(x)} together: "
            "parts of a batch are another model to it"
        )
    batches = int(norm.num_batches_tracked)
    if batches > 1:
        raise Wrong(
            f"BatchNorm has counted one batch {batches} times: it must not be computed "
            "again"
        )
    own = [seen.get(id(p)) for p in model.parameters()]
    missing = sum(g is None for g in own)
    if missing:
        raise Wrong(f"{missing} of {len(own)} weights had no gradient for an optimizer")
    wanted, after = _reference()
    error = off(flat(own), wanted)
    if not error < 1e-4:
        raise Wrong(
            f"the gradients are off by {error:.1%}: do all samples count, and is "
            "anything of lower precision?"
        )
    if batches == 0:
        raise Wrong("BatchNorm has not counted the batch; its running mean is old")
    if not (weights(model) - after).abs().mean() <= 0.1 * LR:
        raise Wrong(f"the weights after it are not those of Adam with lr={LR}")


def _slow_ms(x, y) -> float:
    """What a step takes on this GPU if every layer is computed again, less 5 %."""
    step = trainer(segments_of(LAYERS, 5))(deep().to("cuda"))
    return 0.95 * 1e3 * gpu_seconds(step, x, y)


again = functools.partial(checkpoint, use_reentrant=False)


def segments_of(count, segments):
    """A forward pass that computes the first layers again, in so many segments."""

    def forward(model, h):
        for start in range(0, 2 * count, 2 * count // max(segments, 1) or 1):
            h = again(model[start : start + 2 * count // segments], h)
        return model[2 * count :](h)

    return forward


def trainer(forward, adam=None, parts=1):
    """A function of the model: `forward(model, x)` returns the scores."""

    def frugal(model):
        how = {"lr": 1e-3, **(adam or {"fused": True})}
        optimizer = torch.optim.Adam(model.parameters(), **how)

        def step(x, y):
            for px, py in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (cross_entropy(forward(model, px), py) / parts).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return frugal
