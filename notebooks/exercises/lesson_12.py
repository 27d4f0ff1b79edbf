"""The exercises of lesson 12: a loss in parts, a sturdy module, and fair parts."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel._functions import Scatter

from exercises.counted import MIB
from exercises.exercise import NotYet, Wrong, call, exercise, run, solution
from exercises.learning import gradients
from exercises.results import a, near, tensor
from helpers.gpus import count_copies

GPUS = range(4)


def _model(words: int = 512) -> nn.Module:
    """The lesson's model with fewer words, always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layers = nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, words)
    return nn.Sequential(*layers).to(0)


@exercise(
    "12.1",
    hints=(
        "Write the loss of the whole batch as one fraction. By which number does "
        "`cross_entropy` divide in each part, and by which number should it divide?",
        "The check adds the parts up, and a part with fewer rows must weigh less. "
        "Which `reduction` of `cross_entropy` divides by nothing? Remember also "
        "what `gather` warns about.",
    ),
)
def fair_loss(module_class) -> None:
    """A module (x, y, total) -> parts of a loss whose sum is the mean loss."""
    generator = torch.Generator().manual_seed(2)
    model = _model()
    for rows in (12, 10, 9, 1, 256):
        x = torch.randn(rows, 256, generator=generator).to(0)
        y = torch.randint(512, (rows,), generator=generator).to(0)
        expected = cross_entropy(model(x), y)
        expected.backward()
        wanted = gradients(model)
        model.zero_grad()
        module = call(module_class, model)
        if not isinstance(module, nn.Module):
            raise Wrong(
                f"give a class of modules; this makes {a(type(module).__name__)}"
            )
        part = call(module, x, y, rows, when=f"on one GPU, with {rows} rows")
        if not tensor(part, "forward returns").requires_grad:
            raise Wrong("the loss has no gradient")
        if not part.dim():
            raise Wrong(
                "forward returns a scalar, which gather warns about; [None] makes a "
                "vector of it"
            )
        parallel = nn.DataParallel(module, [*GPUS])
        with count_copies() as copies:
            parts = call(parallel, x, y, rows, when=f"with {rows} rows")
        back = max((c.nbytes for c in copies if c.target == "cuda:0"), default=0)
        if back > 4 * 64:
            raise Wrong(
                f"with {rows} rows {back:,} bytes come back from one GPU; the loss of "
                "a part is one number"
            )
        loss = parts.sum()
        _check_ratio((loss / expected).item(), rows, min(4, len(x.chunk(4))))
        run(loss.backward)
        if not near(gradients(model), wanted, atol=1e-5):
            raise Wrong(f"with {rows} rows the loss is right, its gradient is not")
        model.zero_grad()


@solution("12.1")
def solution_1():
    """Each part adds up its losses and divides by the rows of the whole batch.

    By default `cross_entropy` divides by the rows of the part. A mean of such means is
    right only if all parts are equally large. With `reduction="sum"` nothing is divided
    yet, and a division by `total` makes of each sum the part's share of the mean. The
    shares of all parts add up to the mean over the batch, whatever the sizes.

    `total` is a Python number, since a tensor of one element would be cut as well.
    `[None]` makes a vector of one element, because `gather` warns about scalars.
    """

    class FairLoss(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x, y, total):
            losses = cross_entropy(self.model(x), y, reduction="sum")
            return losses[None] / total

    return FairLoss


def _check_ratio(ratio: float, rows: int, used: int) -> None:
    """The loss of so many rows on `used` GPUs, over the right one, must be 1."""
    if abs(ratio - 1) <= 1e-4:
        return
    if abs(ratio - used) < 1e-3 and rows in (12, 256):
        raise Wrong(
            "the check adds up the parts, so each must be divided by the rows of the "
            "whole batch"
        )
    if abs(ratio - rows) < 1e-2:
        raise Wrong("the sum is not divided by `total`")
    why = f"with {rows} rows the loss is {ratio:.3f} times the right one"
    if rows not in (12, 256):
        why += ": a part with fewer rows must weigh less"
    raise Wrong(why)


@exercise(
    "12.2",
    hints=(
        "Go through `forward` line by line: what has a replica lost, what is cut that "
        "all samples share, and what does a thread not know?",
        "A replica has the buffers of your model, but its parameters only as "
        "attributes. What must come back to `cuda:0` is returned, as a tensor with one "
        "element. Which line of `forward` needs the dtype?",
    ),
)
def sturdy(module_class) -> None:
    """A module (x) -> scores in bfloat16 and counted rows, also in replicas."""
    generator = torch.Generator().manual_seed(3)
    linear = _linear()
    factor = torch.rand(64, generator=generator).to(0)
    if not isinstance(module_class, type):
        raise Wrong("pass the class itself, Sturdy")
    module = call(module_class, linear, factor)
    if not isinstance(module, nn.Module):
        raise Wrong("it is no nn.Module")
    if not vars(module).get("_modules"):
        raise NotYet("your module has no parts so far")
    theirs = [id(weight) for weight in module.parameters()]
    if theirs != [id(weight) for weight in linear.parameters()]:
        raise Wrong(
            "its parameters are not those of `linear`: an optimizer would train others"
        )
    for rows in (12, 10, 3, 256):
        x = torch.randn(rows, 64, generator=generator).to(0)
        scores, seen = _pair(call(module, x, when="on one GPU"))
        parallel = nn.DataParallel(module, [*GPUS])
        when = "with nn.DataParallel"
        scores, seen = _pair(call(parallel, x, when=when))
        if len(scores) != rows:
            raise Wrong(f"{len(scores)} of {rows} images come back")
        if scores.dtype != torch.bfloat16:
            raise Wrong(
                f"the scores are {str(scores.dtype)[6:]}; the check has no autocast "
                "around the call, and the threads would not learn its dtype"
            )
        if not near(scores.float(), linear(x * factor), atol=0.05):
            raise Wrong("the scores are not those of one GPU")
        if int(seen.sum()) != rows:
            raise Wrong(f"{rows} images went in, and `seen` adds up to {seen.sum()}")
    run(scores.float().sum().backward)
    if linear.weight.grad is None:
        raise Wrong("the weights get no gradient")


def _linear() -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return nn.Linear(64, 10).to(0)


def _pair(result) -> tuple[torch.Tensor, torch.Tensor]:
    """The two tensors that forward returns, which gather can join."""
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise Wrong("forward must return two things: the scores, and how many it saw")
    scores, seen = result
    tensor(scores, "the scores are")
    if not tensor(seen, "`seen` is").is_cuda:
        raise Wrong("`seen` is on the CPU; gather joins tensors of GPUs")
    if not seen.dim():
        raise Wrong("`seen` is a scalar, which gather warns about; give it one element")
    return scores, seen


@solution("12.2")
def solution_2():
    """What all samples share is a buffer, and what must come back is returned.

    `factor` as an argument would be cut. As a buffer, every replica has all of it, and
    no optimizer trains it. A count in an attribute is thrown away with the replica, so
    `forward` returns the rows of its part, and the parts add up to all rows.

    A replica has no `parameters()`, so the device is that of `x`. Autocast inside of
    `forward` knows its dtype in every thread.
    """

    class Sturdy(nn.Module):
        def __init__(self, linear, factor):
            super().__init__()
            self.linear = linear
            self.register_buffer("factor", factor)

        def forward(self, x):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                scores = self.linear(x * self.factor)
            return scores, torch.tensor([len(x)], device=x.device)

    return Sturdy


class _Sized(nn.DataParallel):
    """nn.DataParallel whose parts have the given sizes."""

    def __init__(self, module, sizes):
        super().__init__(module, [*GPUS])
        self.sizes = sizes

    def scatter(self, inputs, kwargs, device_ids):
        parts = [Scatter.apply(device_ids, self.sizes, 0, x) for x in inputs]
        return tuple(zip(*parts, strict=True)), tuple({} for _ in device_ids)


def _warm_up() -> None:
    """A thread takes memory for cuBLAS at its first product on a GPU, and keeps it."""
    layer = nn.DataParallel(nn.Linear(1, 1).to(0), GPUS)
    layer(torch.ones(4, 1, device=0)).sum().backward()


def _peaks(sizes, words: int = 8192) -> list[int]:
    """The most bytes that tensors asked for on each GPU in the second step.

    The allocator rounds up by what it happens to have: allocated bytes would depend
    on what ran before, and hardly on the sizes.
    """
    _warm_up()
    asked = "requested_bytes.all."
    before = [torch.cuda.memory_stats(gpu)[asked + "current"] for gpu in GPUS]
    rows = sum(sizes)
    model = _model(words)
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.ones(rows, 256, device=0), torch.arange(rows, device=0)
    parallel = _Sized(Undivided(model), sizes)
    for few in (4, rows):  # the first step makes Adam's state
        parallel.sizes = [1] * 4 if few == 4 else sizes
        for gpu in GPUS:
            torch.cuda.reset_peak_memory_stats(gpu)
        (parallel(x[:few], y[:few]).sum() / few).backward()
        optimizer.step()
        optimizer.zero_grad()
    peaks = [torch.cuda.memory_stats(gpu)[asked + "peak"] for gpu in GPUS]
    return [peak - less for peak, less in zip(peaks, before, strict=True)]


@exercise(
    "12.3",
    hints=(
        "Try equal parts, and then 400 samples for GPU 0. By how many MiB did the peak "
        "of GPU 0 fall for each sample that it lost, and by how many did the others "
        "rise?",
        "Both peaks are straight lines over the samples of GPU 0: one rises, the other "
        "falls, because the others share what GPU 0 does not take. Where do they meet?",
    ),
)
def sizes_of_parts(sizes) -> None:
    """Rows of each of four GPUs, so that the fullest holds least."""
    if not isinstance(sizes, (list, tuple)) or len(sizes) != 4:
        raise Wrong("give a list of four numbers")
    if any(size is ... for size in sizes):
        raise NotYet("replace the ... with your answer")
    if any(not isinstance(size, int) or size < 1 for size in sizes):
        raise Wrong("each size is a whole number of rows, at least 1")
    if sum(sizes) != 2048:
        raise Wrong(f"these are {sum(sizes)} rows, not 2048")
    peaks = _peaks([*sizes])
    fullest = max(GPUS, key=lambda gpu: peaks[gpu])
    best = 61.88 * MIB  # of 369 rows for GPU 0; 355 give 62.4, 341 give 62.7
    if peaks[fullest] > 1.01 * best:
        said = ", ".join(f"{peak / MIB:.1f}" for peak in peaks)
        if len({*sizes}) == 1:
            why = "equal parts: GPU 0 holds Adam's state as well, so give it fewer rows"
        elif fullest == 0:
            why = "GPU 0 is the fullest, so it has too many rows"
        elif max(sizes[1:]) - min(sizes[1:]) > 3:
            why = f"GPU {fullest} is the fullest; GPUs 1 to 3 should share alike"
        else:
            why = f"GPU {fullest} is the fullest, so GPU 0 has too few rows"
        raise Wrong(f"at most {said} MiB: {why}")


@solution("12.3")
def solution_3():
    """The fullest GPU is as empty as possible when all four are equally full.

    In the backward pass of its loss, each GPU holds the weights, and for each row of
    its part the hidden output and three times the scores. GPUs 1 to 3 also hold the
    inputs and targets of their rows. GPU 0 holds Adam's state and the whole batch.

    With `first` rows on GPU 0 and a third of the others on each other GPU, the two
    totals are equal if

        on_first + first * row_first = on_other + (rows - first) / 3 * row_other

    Solved for `first`, that makes 369 rows and 61.8 MiB. Two tries of the check give
    the same four numbers. While GPU 0 adds gradients up, it holds 6 * weights + batch,
    which is 51.7 MiB and does not count.
    """
    rows = 2048
    weights = 4 * (256 * 256 + 256 + 256 * 8192 + 8192)
    input_and_target = 4 * 256 + 8
    hidden = 4 * 256
    scores = 4 * 8192
    batch = rows * input_and_target
    on_first = 3 * weights + batch
    row_first = hidden + 3 * scores
    on_other = weights
    row_other = input_and_target + hidden + 3 * scores
    first = (on_other + rows / 3 * row_other - on_first) / (row_first + row_other / 3)
    first = round(first)
    second = (rows - first) // 3
    third = (rows - first - second) // 2
    fourth = rows - first - second - third
    sizes = [first, second, third, fourth]
    return sizes


class Base(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model


class Undivided(Base):
    def forward(self, x, y, total=None):
        return cross_entropy(self.model(x), y, reduction="sum")[None]
