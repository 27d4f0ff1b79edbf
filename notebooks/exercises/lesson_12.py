"""The exercises of lesson 12: what GPU 0 sends, a loss in parts, and fair parts."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel._functions import Scatter

from exercises import ring
from exercises.counted import MB, MIB, counted
from exercises.exercise import NotYet, Wrong, call, exercise, run, solution
from exercises.learning import gradients
from exercises.results import a, near, tensor
from helpers.gpus import count_copies

GPUS = range(4)


@exercise(
    "12.1",
    hints=(
        "Begin with the bytes of all weights. Which of the two messages of "
        "`nn.DataParallel` does GPU 0 send, and which does it receive?",
        "Without NCCL, GPU 0 sends a copy to each other GPU; in NCCL's chain, to one "
        "neighbour. For DDP, the lesson says how many times the gradients a rank sends "
        "in a ring. Which `N` belongs there?",
    ),
)
def sent_by_one_gpu(copies, nccl, ddp) -> None:
    """MB sent by GPU 0: nn.DataParallel by copies, by NCCL, and a rank of DDP."""
    nbytes, gpus = 100, 8
    out, round_ring = (gpus - 1) * nbytes, ring.sent(gpus, nbytes)
    mistakes = {
        2 * out: "GPU 0 sends weights; gradients it receives",
        gpus * nbytes: "GPU 0 need not send the weights to itself",
        2 * gpus * nbytes: "GPU 0 sends nothing to itself; gradients it receives",
        nbytes: "25 million weights have 100 MB; GPU 0 sends them to each other GPU",
        out / 4: "a weight in float32 has 4 bytes",
    }
    why = "GPU 0 sends all weights to each other GPU, and receives all gradients"
    counted(copies, out, mistakes, why, what="by copies", near=1e-3, unit=MB)
    mistakes = {
        2 * nbytes: "GPU 0 sends weights; gradients it receives",
        out: "in a chain, GPU 0 sends to its neighbour only",
        round_ring: "that is an all-reduce in a ring; here weights go down a chain",
        nbytes / 4: "a weight in float32 has 4 bytes",
    }
    why = "in a chain, GPU 0 sends each weight to its neighbour, once"
    counted(nccl, nbytes, mistakes, why, what="by NCCL", near=1e-3, unit=MB)
    why = "in a ring of N ranks each sends 2 (N - 1) / N times the gradients"
    mistakes = ring.mistakes(gpus, nbytes)
    counted(ddp, round_ring, mistakes, why, what="DDP", near=1e-3, unit=MB)


@solution("12.1")
def solution_1():
    """GPU 0 sends weights to all others, or to one neighbour; a rank sends chunks.

    In each step of `nn.DataParallel`, weights leave GPU 0 and gradients come in. By
    copies, all weights go to each of seven GPUs. In NCCL's chain they go to one
    neighbour, which passes them on.

    Under DDP only gradients travel, in a ring. Each rank sends 2 * (N - 1) / N times
    the gradients, which is never more than twice, however many ranks there are.
    """
    gpus = 8
    megabytes = 25_000_000 * 4 / 10**6
    copies = (gpus - 1) * megabytes
    nccl = megabytes
    ddp = 2 * (gpus - 1) / gpus * megabytes
    return copies, nccl, ddp


def _model(words: int = 512) -> nn.Module:
    """The lesson's model with fewer words, always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layers = nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, words)
    return nn.Sequential(*layers).to(0)


@exercise(
    "12.2",
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


@solution("12.2")
def solution_2():
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
        "Write down what GPU 0 and another GPU hold while the loss of their part goes "
        "backward. Which terms grow with the rows of the part, and which stay as they "
        "are?",
        "GPU 0 also holds Adam's state and the whole batch. For how many rows does "
        "its total equal that of another GPU, which has a third of the others? (The "
        "moment at which GPU 0 adds up gradients is lower here.)",
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

    Solved for `first`, that makes 369 rows and 61.8 MiB. The sum of all gradients needs
    7 * weights + batch on GPU 0, which is 60.0 MiB and does not count.
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
