"""Judges of the exercises of lesson 10."""

import math
from numbers import Real

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel._functions import Scatter

from helpers.check import NotYet, Wrong, call, exercise
from helpers.gpus import count_copies

GPUS = range(4)


@exercise("10.1")
def sent_by_one_gpu(data_parallel, ddp) -> None:
    """MB sent by GPU 0 under nn.DataParallel, and by each rank under DDP."""
    weights, gpus = 100, 8
    out, ring = (gpus - 1) * weights, 2 * (gpus - 1) * weights / gpus
    answer = data_parallel, ddp
    if any(not isinstance(n, Real) or isinstance(n, bool) for n in answer):
        raise Wrong("give two numbers")
    if answer == (ring, out):
        raise Wrong("these are the right numbers in the wrong order")
    units = (1, "give MB, not bytes"), (2**20, "MB are millions of bytes, not MiB")
    for unit, why in units:
        for given, right in zip(answer, (out, ring), strict=True):
            if math.isclose(given * unit, right * 1e6, rel_tol=1e-3):
                raise Wrong(why)
    reasons = {
        2 * out: "with nn.DataParallel GPU 0 sends weights; gradients it receives",
        gpus * weights: "GPU 0 need not send the weights to itself",
        2 * gpus * weights: "GPU 0 sends nothing to itself; gradients it receives",
        weights: "25 million weights have 100 MB; GPU 0 sends them to each other GPU",
        25 * (gpus - 1): "a weight in float32 has 4 bytes",
    }
    if data_parallel != out:
        why = "GPU 0 sends all weights to each other GPU, and receives all gradients"
        raise Wrong(reasons.get(data_parallel, why))
    reasons = {
        ring / 2: "a ring goes round twice: once to add, once to spread the sums",
        2 * weights: "a rank does not send the chunk that it is to receive last",
        weights: "that is what a rank hands over; in the ring it sends 2 (N - 1) / N "
        "times as much",
        2 * out: "that is what all ranks send together; each sends an eighth",
        out: "each rank sends parts of its gradient to one neighbour",
        ring / 4: "a gradient in float32 has 4 bytes",
    }
    if ddp != ring:
        why = "in a ring of N ranks each sends 2 (N - 1) / N times the gradients"
        raise Wrong(reasons.get(ddp, why))


def _model(words: int = 512) -> nn.Module:
    """The lesson's model with fewer words, always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layers = nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, words)
    return nn.Sequential(*layers).to(0)


def _gradients(model) -> list[torch.Tensor]:
    found = [None if p.grad is None else p.grad.cpu() for p in model.parameters()]
    model.zero_grad()
    return found


@exercise("10.2")
def fair_loss(module_class) -> None:
    """A module (x, y, total) -> parts of a loss whose sum is the mean loss."""
    generator = torch.Generator().manual_seed(2)
    model = _model()
    for rows in (12, 10, 9, 1, 256):
        x = torch.randn(rows, 256, generator=generator).to(0)
        y = torch.randint(512, (rows,), generator=generator).to(0)
        expected = cross_entropy(model(x), y)
        expected.backward()
        wanted = _gradients(model)
        module = module_class(model)
        part = call(module, x, y, rows, when=f"on one GPU, with {rows} rows")
        if not isinstance(part, torch.Tensor):
            raise Wrong(f"forward returns a {type(part).__name__}; return a tensor")
        if not part.requires_grad:
            raise Wrong("the loss has no gradient")
        if not part.dim():
            raise Wrong("forward returns a scalar, which gather warns about; [None] "
                        "makes a vector of it")  # fmt: skip
        parallel = nn.DataParallel(module, [*GPUS])
        with count_copies() as copies:
            parts = call(parallel, x, y, rows, when=f"with {rows} rows")
        back = max((c.nbytes for c in copies if c.target == "cuda:0"), default=0)
        if back > 4 * 64:
            raise Wrong(f"with {rows} rows {back:,} bytes come back from one GPU; the "
                        "loss of a part is one number")  # fmt: skip
        loss = parts.sum()
        ratio = (loss / expected).item()
        used = min(4, len(x.chunk(4)))
        if abs(ratio - 1) > 1e-4:
            if abs(ratio - used) < 1e-3 and rows in (12, 256):
                raise Wrong("the check adds up the parts, so each must be divided by "
                            "the rows of the whole batch")  # fmt: skip
            if abs(ratio - rows) < 1e-2:
                raise Wrong("the sum is not divided by `total`")
            if rows in (12, 256):
                raise Wrong(f"with {rows} rows the loss is {ratio:.3f} times the right "
                            "one")  # fmt: skip
            raise Wrong(f"with {rows} rows the loss is {ratio:.3f} times the right "
                        "one: a part with fewer rows must weigh less")  # fmt: skip
        loss.backward()
        for mine, right in zip(_gradients(model), wanted, strict=True):
            if mine is None or not torch.allclose(mine, right, atol=1e-5):
                raise Wrong(f"with {rows} rows the loss is right, its gradient is not")


class _Sized(nn.DataParallel):
    """nn.DataParallel whose parts have the given sizes."""

    def __init__(self, module, sizes):
        super().__init__(module, [*GPUS])
        self.sizes = sizes

    def scatter(self, inputs, kwargs, device_ids):
        parts = [Scatter.apply(device_ids, self.sizes, 0, x) for x in inputs]
        return tuple(zip(*parts, strict=True)), tuple({} for _ in device_ids)


class _Inside(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        return cross_entropy(self.model(x), y, reduction="sum")[None]


def _peaks(sizes, words: int = 8192) -> list[int]:
    """The most bytes that tensors asked for on each GPU in the second step.

    The allocator rounds up by what it happens to have: allocated bytes would depend
    on what ran before, and hardly on the sizes.
    """
    asked = "requested_bytes.all."
    before = [torch.cuda.memory_stats(gpu)[asked + "current"] for gpu in GPUS]
    rows = sum(sizes)
    model = _model(words)
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.ones(rows, 256, device=0), torch.arange(rows, device=0)
    parallel = _Sized(_Inside(model), sizes)
    for few in (4, rows):  # the first step makes Adam's state
        parallel.sizes = [1] * 4 if few == 4 else sizes
        for gpu in GPUS:
            torch.cuda.reset_peak_memory_stats(gpu)
        (parallel(x[:few], y[:few]).sum() / few).backward()
        optimizer.step()
        optimizer.zero_grad()
    peaks = [torch.cuda.memory_stats(gpu)[asked + "peak"] for gpu in GPUS]
    return [peak - less for peak, less in zip(peaks, before, strict=True)]


@exercise("10.3")
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
    best = 61.88 * 2**20  # of 369 rows for GPU 0; 355 give 62.4, 341 give 62.7
    if peaks[fullest] > 1.01 * best:
        said = ", ".join(f"{peak / 2**20:.1f}" for peak in peaks)
        if len({*sizes}) == 1:
            why = "equal parts: GPU 0 holds Adam's state as well, so give it fewer rows"
        elif fullest == 0:
            why = "GPU 0 is the fullest, so it has too many rows"
        elif max(sizes[1:]) - min(sizes[1:]) > 3:
            why = f"GPU {fullest} is the fullest; GPUs 1 to 3 should share alike"
        else:
            why = f"GPU {fullest} is the fullest, so GPU 0 has too few rows"
        raise Wrong(f"at most {said} MiB: {why}")
