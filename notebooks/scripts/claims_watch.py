"""The instruments of 29-test-the-claims: the claims, their table, programs to run.

    table()              # all claims, with the verdicts that the lesson must reach
    tally(judged)        # at the end: every claim was judged, and as the table says

The verdicts in CLAIMS are what the cells of the lesson compute; each cell asserts it.
The programs below the table are those of earlier lessons, shortened.
"""

import contextlib
import copy
import os
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from html import escape
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.benchmark import Timer

from helpers import Messages, digits, draw, gpu_seconds, simgpu

# -- the claims ------------------------------------------------------------------------


class Claim(NamedTuple):
    """What is said, what a run made of it, and what to write instead."""

    words: str
    verdict: str  # "true", "true when ..." or "false"
    line: str  # that is right
    lesson: str  # where more of it is


CLAIMS = {
    1: Claim(
        "`nn.DataParallel(net, gpu_ids=[0, 1, 2])`",
        "false",
        "`nn.DataParallel(net, device_ids=[0, 1, 2])`",
        "12",
    ),
    2: Claim(
        "`torch.Tensor([1., 2.], device=cuda1)`",
        "false",
        "`torch.tensor([1.0, 2.0], device=cuda1)`",
        "02",
    ),
    3: Claim(
        "`torch.get_device(t)` is where the next tensor should go",
        "true when t is on a GPU",
        "`t.device`",
        "02",
    ),
    4: Claim(
        "`torch.tensor(a.shape).to(dev)` makes one like `a`",
        "false",
        "`torch.zeros_like(a)`",
        "02",
    ),
    5: Claim(
        "`torch.randn(2, 4)` is on the device of `ones`",
        "true when ones and the default are the CPU, "
        "or ones and the default are one GPU",
        "`torch.randn(2, 4, device=ones.device)`",
        "02",
    ),
    6: Claim(
        "`CUDA_VISIBLE_DEVICES`, set in the script, chooses the GPUs",
        "true when it comes before the first use of CUDA",
        "`CUDA_VISIBLE_DEVICES=2,3,4 python train.py`",
        "01",
    ),
    7: Claim(
        "PyTorch's `model_parallel` class splits a model",
        "false",
        "a module of your own: `.to` for each part, and for `x` in `forward`",
        "13",
    ),
    8: Claim(
        "mixed precision is `torch.cuda.amp`",
        "false",
        "`torch.autocast('cuda')`, `torch.amp.GradScaler('cuda')`",
        "09",
    ),
    9: Claim(
        "call `scaler.unscale_(optimizer)` before `scaler.step(optimizer)`",
        "true when gradients are clipped",
        "only where something reads or changes gradients before the step",
        "09",
    ),
    10: Claim(
        "DDP averages gradients in `optimizer.step()`",
        "false",
        "in `backward()`; after it every rank has the averages",
        "16",
    ),
    11: Claim(
        "mixed precision halves the memory",
        "true when activations between products fill the GPU",
        "count weights, gradients, the optimizer's state and what norms give first",
        "09",
    ),
    12: Claim(
        "`torch.cuda.empty_cache()` gives you more memory",
        "true when small tensors stay scattered",
        "PyTorch empties it by itself before it gives up",
        "04",
    ),
    13: Claim(
        "mixed precision is 20 to 30 % faster",
        "true when layers are 640 x 640",
        "slower where launches take the time, many times faster where products do",
        "09",
    ),
    14: Claim(
        "a GPU is at least 10 times as fast as a CPU",
        "true when 2048 x 2048 random numbers are made there",
        "say the operation, its size, the CPU's threads, and whether copies count",
        "07",
    ),
    15: Claim(
        "1F1B has a smaller bubble than GPipe",
        "true when the first stage is slower",
        "with equal stages the same, (K - 1) / (M + K - 1); fewer parts kept",
        "13",
    ),
    16: Claim(
        "pin a tensor first, then copy it: that is faster",
        "true when 1 MiB is copied three times",
        "`t.to(dev)`; pin what is copied often, or in a thread that nobody waits for",
        "05",
    ),
    17: Claim(
        "a read on a new stream comes before the write on the old one",
        "true when the old stream is busy",
        "it may, so `side.wait_stream(old_stream)` first",
        "05",
    ),
}


class Table:
    """The claims as a table, which a notebook shows."""

    heads = ("", "claim", "verdict", "what is right", "lesson")
    widths = (3, 34, 26, 31, 6)  # percent

    def rows(self) -> list[tuple[str, ...]]:
        return [(str(number), *claim) for number, claim in CLAIMS.items()]

    def __repr__(self) -> str:
        return "\n".join(
            f"{n:>2} {verdict}; right: {line}" for n, _, verdict, line, _ in self.rows()
        )

    def _repr_html_(self) -> str:
        lines = [_line("th", self.heads, self.widths)]
        lines += [_line("td", row, self.widths) for row in self.rows()]
        return f'<table style="width: 100%">{"".join(lines)}</table>'


def _line(tag: str, cells: tuple[str, ...], widths: tuple[int, ...]) -> str:
    """A row of an HTML table; what is between backticks is code."""
    html = ""
    for words, width in zip(cells, widths, strict=True):
        inside = re.sub("`(.+?)`", r"<code>\1</code>", escape(words, quote=False))
        look = f"text-align: left; vertical-align: top; width: {width}%"
        html += f'<{tag} style="{look}">{inside}</{tag}>'
    return f"<tr>{html}</tr>"


def table() -> Table:
    """All claims, with the verdicts that the cells of the lesson must reach."""
    return Table()


def tally(judged: dict[int, str], compare: bool) -> str:
    """How many claims have which verdict; all must have been judged.

    Args:
        judged: the verdict on each claim.
        compare: with the table; what real GPUs measure may be judged otherwise.

    Raises:
        AssertionError: naming the claims that were not judged, or otherwise.
    """
    missing = sorted(CLAIMS.keys() - judged.keys())
    assert not missing, f"no cell has judged: claims {missing}"
    if compare:
        wrong = [n for n, claim in CLAIMS.items() if judged[n] != claim.verdict]
        assert not wrong, f"not as in the table: claims {wrong}"
    counts = Counter(verdict.split(" when")[0] for verdict in judged.values())
    bare = sum(verdict == "true" for verdict in judged.values())
    when = counts["true"] - bare
    return (
        f"{len(judged)} claims: {bare} true, {when} true when …, "
        f"{counts['false']} false{'; all as in the table' if compare else ''}"
    )


def picture() -> draw.Picture:
    """How cases become a verdict: a box for each case, filled where the claim held."""
    image = draw.Picture(640, 152, "from the cases of a claim to its verdict")
    examples = (
        ("holds in every case", (1, 1, 1), "true"),
        ("holds in some", (0, 1, 0), "true when …"),
        ("holds in none", (0, 0, 0), "false"),
        ("nobody has tried", (), "?"),
    )
    for row, (words, cases, verdict) in enumerate(examples):
        y = 8 + 36 * row
        image.text(8, y + 19, words)
        for i, held in enumerate(cases):
            fill = draw.COLOURS[2] if held else "white"
            image.box(180 + 90 * i, y, 82, 28, fill, dashed=not held)
            image.text(221 + 90 * i, y + 19, "holds" if held else "fails", 13, "middle")
        image.line(456, y + 14, 500, y + 14, arrow=True)
        image.text(512, y + 19, verdict, weight="bold")
    return image


# -- programs to run -------------------------------------------------------------------


def tried(run: Callable):
    """What `run()` returns, or its error as a line of text."""
    try:
        return run()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def classes_named(pattern: str) -> list[str]:
    """Classes in PyTorch's Python files whose whole name fits, in any spelling."""
    find = re.compile(rf"(?im)^\s*class ({pattern})\b")
    folder = Path(torch.__file__).parent
    texts = (file.read_text(encoding="utf-8") for file in folder.rglob("*.py"))
    return [name for text in texts for name in find.findall(text)]


class Split(nn.Sequential):
    """Part i runs on GPU i. Taught in 13-split-the-model."""

    def forward(self, x):
        for i, part in enumerate(self):
            x = part.to(f"cuda:{i}")(x.to(f"cuda:{i}"))
        return x


def gpus_given(when: str) -> int:
    """How many of six simulated GPUs `set_gpus.py` is given, in a process of its own.

    Args:
        when: CUDA_VISIBLE_DEVICES becomes 2,3,4: "early" or "late" in the script, or in
            the "shell".
    """
    command = [sys.executable, "-m", "simgpu", "--gpus", "6"]
    script = Path(__file__).parent / "set_gpus.py"
    environ = os.environ | {"HELPERS_GPUS": "simulated"}
    environ.pop("CUDA_VISIBLE_DEVICES", None)
    if when == "shell":
        environ["CUDA_VISIBLE_DEVICES"] = "2,3,4"
    done = subprocess.run(
        [*command, str(script), when],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return int(done.stdout)


def warned(call: Callable) -> list[str]:
    """The warnings of a call."""
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        call()
    return [f"{record.category.__name__}: {record.message}" for record in records]


class Trained(NamedTuple):
    """What five steps have come to."""

    before: float  # the loss
    after: float
    weight: list[list[float]]


def trained(limit: float | None, unscale: bool) -> Trained:
    """Five steps in float16. Taught in 09-mix-precision.

    Args:
        limit: to which gradients are clipped; None: they are not looked at.
        unscale: call `unscale_` before.
    """
    torch.manual_seed(0)
    model, scaler = nn.Linear(64, 10).to("cuda"), torch.amp.GradScaler("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (part[:256].to("cuda") for part in digits()[:2])

    def loss():
        with torch.autocast("cuda", dtype=torch.float16):
            return cross_entropy(model(x).float(), y)

    before = loss().item()
    for _ in range(5):
        scaler.scale(loss()).backward()
        if unscale:
            scaler.unscale_(optimizer)
        if limit is not None:
            clip_grad_norm_(model.parameters(), limit)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return Trained(before, loss().item(), model.weight.tolist())


# what happens to gradients -> the limit to which they are clipped
LIMITS = {
    "gradients are clipped": 0.5,
    "the limit is never reached": 1e6,
    "nothing looks at them": None,
}


class Pair(NamedTuple):
    """The same five steps twice."""

    with_unscale: Trained
    without: Trained

    def __str__(self) -> str:
        before, after = self.with_unscale[:2]
        later = f"{after:.3f}, without unscale_ {self.without.after:.3f}"
        return f"loss {before:.3f}, five steps later {later}"


def with_and_without(limit: float | None) -> Pair:
    """Five steps with `unscale_`, and five without it."""
    return Pair(trained(limit, unscale=True), trained(limit, unscale=False))


def one_step(wrap: Callable, rows: list[slice]):
    """In a rank: gradients between backward() and step(), and all messages.

    Taught in 16-average-gradients.

    Args:
        wrap: what is called in place of the model; DDP, for example.
        rows: of the digits, for each rank.
    """
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    torch.manual_seed(0)
    model = wrap(nn.Linear(64, 10).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (part[rows[dist.get_rank()]].to(device) for part in digits()[:2])
    with Messages() as messages:
        messages.when = "backward()"
        cross_entropy(model(x), y).backward()
        between = [p.grad.cpu().clone() for p in model.parameters()]
        messages.when = "optimizer.step()"
        optimizer.step()
    return between, messages.log


def _linear() -> nn.Linear:
    return nn.Linear(32, 32, False)


def _norm() -> nn.LayerNorm:
    return nn.LayerNorm(32)


# what a model is like -> its layers, and the rows of a batch
JOBS = {
    "weights fill the GPU": (
        [nn.Linear(1024, 2048, False), nn.ReLU(), nn.Linear(2048, 1024, False)],
        32,
    ),
    "activations between products fill the GPU": (
        [layer() for _ in range(17) for layer in (_linear, nn.ReLU)][:-1],
        2**15,
    ),
    "norms stand between products": (
        [layer() for _ in range(8) for layer in (_linear, _norm, nn.ReLU)],
        2**15,
    ),
}


def _take_step(model, optimizer, x, mixed: bool) -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=mixed):
        loss = model(x).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def left_of_peak(layers: list[nn.Module], rows: int) -> float:
    """Which share of float32's peak a step with Adam needs under autocast.

    Taught in 09-mix-precision.
    """
    peaks = []
    for mixed in (False, True):
        start = torch.cuda.memory_allocated()
        model = nn.Sequential(*copy.deepcopy(layers)).to("cuda")
        x = torch.ones(rows, layers[0].in_features, device="cuda")
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):  # the first step makes Adam's state
            torch.cuda.reset_peak_memory_stats()
            _take_step(model, optimizer, x, mixed)
        peaks.append(torch.cuda.max_memory_allocated() - start)
        del model, x, optimizer
    return peaks[1] / peaks[0]


def speedup(n: int) -> float:
    """How much faster autocast makes a step of three n x n layers with n rows."""
    seconds = []
    for mixed in (False, True):
        layers = [nn.Linear(n, n, False) if i % 2 == 0 else nn.ReLU() for i in range(6)]
        model, x = nn.Sequential(*layers).to("cuda"), torch.ones(n, n, device="cuda")
        optimizer = torch.optim.SGD(model.parameters())
        seconds.append(gpu_seconds(_take_step, model, optimizer, x, mixed))
    return seconds[0] / seconds[1]


def _mib(number: int) -> torch.Tensor:
    return torch.empty(number * 2**18, device="cuda")


def grows(between: Callable) -> None:
    """A tensor of 384 MiB goes, and one of 448 comes. Taught in 04-count-memory."""
    _mib(384)
    between()
    _mib(448)


def changes(stay: slice, between: Callable) -> None:
    """Four long batches, sixteen short ones, of which some stay, and a long one again.

    Args:
        stay: which of the short ones.
        between: is called when the first long ones have gone.
    """
    long = [_mib(112) for _ in range(4)]
    del long
    between()
    short = [_mib(28) for _ in range(16)][stay]
    _mib(112)
    del short


PROGRAMS = {
    "one large tensor follows another": grows,
    "small tensors stay side by side": partial(changes, slice(8)),
    "small tensors stay scattered": partial(changes, slice(1, None, 2)),
}


class Fits(NamedTuple):
    """Whether a program fits on the GPU."""

    as_it_is: bool
    with_empty_cache: bool

    def __str__(self) -> str:
        words = ("does not fit", "fits")
        return f"{words[self[0]]}, with empty_cache() it {words[self[1]]}"


def fits(program: Callable) -> Fits:
    """Whether a program fits: as it is, and with `empty_cache()` in it."""
    found = []
    for between in (lambda: None, torch.cuda.empty_cache):
        torch.cuda.empty_cache()
        found.append(tried(lambda between=between: program(between)) is None)
    return Fits(*found)


def _draw(a: torch.Tensor, _) -> torch.Tensor:
    return torch.randn_like(a)


# what is done -> an operation on two n x n tensors, n, and whether they stay on the GPU
TASKS = {
    "32 x 32 products travel": (torch.mm, 32, False),
    "256 x 256 sums travel": (torch.add, 256, False),
    "2048 x 2048 random numbers are made there": (_draw, 2048, True),
    "1024 x 1024 products stay there": (torch.mm, 1024, True),
}


def faster(task: Callable, n: int, stays: bool) -> float:
    """How many times as fast as one thread of the CPU a GPU is.

    Taught in 07-time-it-right.

    Args:
        task: of two n x n tensors.
        n: rows and columns.
        stays: on the GPU; otherwise copies there and back count.
    """
    a = torch.ones(n, n)
    timer = Timer("task(a, a)", globals={"task": task, "a": a}, num_threads=1)
    simulated = simgpu.count()
    simgpu.stop()  # it would slow the CPU down
    seconds = min(timer.blocked_autorange(min_run_time=0.1).times)
    if simulated:
        simgpu.start(simulated)
    if stays:
        there = a.to("cuda")
        return seconds / gpu_seconds(task, there, there)
    return seconds / gpu_seconds(lambda: task(a.to("cuda"), a.to("cuda")).cpu())


# what is copied -> KiB, and how many times
COPIED = {
    "1 KiB is copied once": (1, 1),
    "64 MiB are copied once": (2**16, 1),
    "1 MiB is copied twice": (2**10, 2),
    "1 MiB is copied three times": (2**10, 3),
}


def _copy(t: torch.Tensor, times: int, pin: bool) -> None:
    if pin:
        t = t.pin_memory()
    for _ in range(times):
        t.to("cuda", non_blocking=pin)


def pinned_first(kib: int, times: int) -> float:
    """How many times as long copies to the GPU take if the tensor is pinned first.

    Taught in 05-overlap-with-streams.
    """
    t = torch.zeros(kib * 2**8)
    return gpu_seconds(_copy, t, times, True) / gpu_seconds(_copy, t, times, False)


@contextlib.contextmanager
def _races_shown() -> Iterator[None]:
    """A simulated read returns what the memory holds, and never raises."""
    simulated = simgpu.count()
    if simulated:
        simgpu.stop()
        simgpu.start(1, races="show")
    try:
        yield
    finally:
        if simulated:
            simgpu.stop()
            simgpu.start(simulated)


@_races_shown()
def total(busy: bool, wait: bool = False) -> float:
    """The sum of a thousand threes, read on another stream than written.

    Taught in 05-overlap-with-streams.

    Args:
        busy: the old stream may still be writing; a real one sleeps before it writes.
        wait: the new stream waits for the old one.
    """
    side, old = torch.cuda.Stream(), torch.cuda.current_stream()
    x = torch.ones(1000, device="cuda")
    torch.cuda.synchronize()  # x holds ones
    if not simgpu.count():
        torch.cuda._sleep(10**8)
    x *= 3
    if not busy:
        torch.cuda.synchronize()
    if wait:
        side.wait_stream(old)
    with torch.cuda.stream(side):
        result = x.sum()
    side.synchronize()
    return result.item()


ORDERS = "GPipe", "1F1B"

# what a pipeline is like -> the seconds of each stage, forward, and its parts
PIPES = {
    "stages are equal": ([1, 1, 1, 1], 8),
    "8 stages are equal": ([1] * 8, 32),
    "the first stage is slower": ([2, 1, 1, 1], 8),
    "the last stage is slower": ([1, 1, 1, 2], 8),
}


class Waits(NamedTuple):
    """What an order of work costs a pipeline."""

    idle: float  # share of the time of all stages: the bubble
    kept: int  # parts whose activations the first stage keeps, at most

    def __str__(self) -> str:
        return f"{self.idle:.3f} idle, {self.kept} kept"


def tasks(order: str, stages: int, parts: int) -> list[list[tuple[str, int]]]:
    """What each stage does, in order. Taught in 13-split-the-model."""
    from helpers.explore import pipeline_order  # here: ranks need not load it

    return [pipeline_order(order, stages, stage, parts) for stage in range(stages)]


def bubble(order: str, seconds: list[float], parts: int) -> Waits:
    """Each stage waits for its neighbours; backward takes twice as long as forward."""
    from helpers import explore

    stages = len(seconds)
    rows = explore.pipeline_times(tasks(order, stages, parts), seconds)
    end = max(row[-1][3] for row in rows)
    idle = 1 - 3 * parts * sum(seconds) / (stages * end)
    return Waits(idle, explore.most_held(rows[0]))


def bubbles(seconds: list[float], parts: int) -> tuple[Waits, Waits]:
    """What GPipe costs, and what 1F1B does."""
    return tuple(bubble(order, seconds, parts) for order in ORDERS)


def steps(order: str, stages: int, parts: int) -> int:
    """Steps until all is done, if forward and backward take one step each."""
    todo = tasks(order, stages, parts)
    done: set[tuple[str, int, int]] = set()
    count = 0
    while any(todo):
        now = []
        for stage, mine in enumerate(todo):
            if mine:
                kind, part = mine[0]
                before = stage - 1 if kind == "F" else stage + 1
                if not 0 <= before < stages or (kind, before, part) in done:
                    now.append((kind, stage, part))
        for _, stage, _ in now:
            todo[stage].pop(0)
        done.update(now)
        count += 1
    return count
