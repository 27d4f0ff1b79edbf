"""Compiled code: which kernels compiled code has, what they read, what is kept."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import simgpu
from simgpu import _runtime as state
from simgpu._dry import command
from simgpu._dry.run import Job, run
from support import compiled_models
from support.limits import JOB

SUPPORT = Path(__file__).parent / "support"
HALF = torch.bfloat16
ROWS, WIDTH = 2048, 1024
ONE = ROWS * WIDTH * 2  # bytes of an activation


def x(*shape, of=HALF, wants_grad=True):
    shape = shape or (ROWS, WIDTH)
    return torch.empty(*shape, dtype=of, device="cuda", requires_grad=wants_grad)


def linear(inner=WIDTH, outer=WIDTH):
    return nn.Linear(inner, outer, bias=False, device="cuda", dtype=HALF)


class Seen:
    """What `part` did: the fused kernels' bytes, all names, and bytes at the peak."""

    def __init__(self, events, before: int):
        self.fused = [e.nbytes for e in events if e.name.startswith("fused")]
        self.names = [e.name for e in events]
        self.flops = sum(e.flops for e in events)
        self.left = torch.cuda.memory_allocated() - before
        self.peak = torch.cuda.max_memory_allocated() - before


def seen(part) -> Seen:
    events = state.running.dry.events
    torch.cuda.reset_peak_memory_stats()
    first, before = len(events), torch.cuda.memory_allocated()
    part()
    return Seen(events[first:], before)


def in_dry_run(program, how: str = "fuse", world: int = 1):
    """What a program returns that runs in a dry run."""
    found = []

    def begun():
        one = x(8, 8, wants_grad=False)
        one @ one  # cuBLAS takes its workspace
        found.append(program())

    run(Job(world, compile=how), begun)
    return found[0]


def forward(function, *shapes, how: str = "fuse") -> Seen:
    """A call of a compiled function without gradients."""

    def program():
        inputs = [x(*shape) for shape in shapes]
        with torch.no_grad():
            return seen(lambda: torch.compile(function)(*inputs))

    return in_dry_run(program, how)


# -- by hand ---------------------------------------------------------------------------


def test_a_product_needs_what_one_kernel_makes():
    def gated(a, b, weight):
        return (F.silu(a) * b) @ weight

    shapes = (ROWS, WIDTH), (ROWS, WIDTH), (WIDTH, 8)
    found = forward(gated, *shapes)
    assert found.fused == [3 * ONE]
    assert found.names == ["fused silu, mul", "mm"]
    assert found.peak == ONE + ROWS * 8 * 2
    eager = forward(gated, *shapes, how="eager")
    assert eager.names == ["silu", "mul", "mm"] and eager.flops == found.flops
    assert eager.peak == 2 * ONE


def added_ten_times(a, b):
    for _ in range(10):
        a = a + b
    return a


def read_between(a):
    double = a * 2
    return double + 1 if double.sum().item() > 0 else double


BIG = (ROWS, WIDTH)
FUSED = {  # a function, the shapes of its inputs, the bytes of its fused kernels
    "ten additions": (added_ten_times, [BIG] * 2, [3 * ONE]),
    "a sum of many, which reads all": (lambda *all: sum(all), [BIG] * 11, [12 * ONE]),
    "a norm after a residual": (
        lambda a, b, weight: F.rms_norm(a + b, (WIDTH,)) @ weight,
        [BIG, BIG, (WIDTH, 8)], [3 * ONE + ROWS * 4],  # and a number for each row
    ),
    "different sizes": (
        lambda a, b: (a * 2, b * 2), [BIG, (ROWS, 2 * WIDTH)], [2 * ONE, 4 * ONE],
    ),
    "in place": (lambda a, b: (a * 2).add_(b), [BIG] * 2, [3 * ONE]),
    "a value is read, and written before": (
        read_between, [BIG], [ONE + 2, 0, 2 * ONE],
    ),
    "a product stands between two parts of one kernel": (
        lambda a, b, weight: ((a * b) @ weight, a - b),
        [BIG, BIG, (WIDTH, 8)], [3 * ONE, ONE],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_kernel_reads_and_writes_what_it_must(name):
    function, shapes, expected = FUSED[name]
    found = forward(function, *shapes)
    assert found.fused == expected
    if name == "ten additions":
        assert found.peak == ONE and found.left == 0
    elif "is read" in name:
        assert "cuda:0 to cpu" in found.names
    elif "between" in name:
        assert found.names == ["fused mul", "mm", "fused mul, sub (more)"]


def test_what_comes_of_many_and_is_used_again_is_written_once():
    def used_twice(a, b, c, d, e, weight):
        total = a + b + c + d + e
        return (total * 2) @ weight + total

    shapes = [(ROWS, WIDTH)] * 5 + [(WIDTH, WIDTH)]
    found = forward(used_twice, *shapes)
    # the sum and its double; then the sum beside the product
    assert sum(found.fused) == (5 + 2) * ONE + 3 * ONE
    # four are read again
    found = forward(lambda a, b, c, d, w: used_twice(a, b, c, d, 1, w), *shapes[1:])
    assert found.fused == [5 * ONE, 6 * ONE]


def test_logits_in_float32_are_never_made():
    words = 8000

    def loss(logits, target):
        return F.cross_entropy(logits.float(), target)

    def program(how=None):
        logits, target = x(ROWS, words), torch.zeros(ROWS, dtype=int, device="cuda")
        compiled = torch.compile(loss)
        return seen(lambda: compiled(logits, target).backward()), logits.nbytes

    found, nbytes = in_dry_run(program)
    assert found.peak < 1.03 * nbytes  # the gradient alone
    assert 3 * nbytes < sum(found.fused) < 3.01 * nbytes  # read, read again, written
    eager, _ = in_dry_run(program, "eager")
    assert eager.peak > 5 * nbytes


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = linear(outer=4 * WIDTH), linear(4 * WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


WAYS = {
    "torch.compile(module)": lambda mlp: torch.compile(mlp),
    "module.compile()": lambda mlp: mlp.compile() or mlp,
    "torch.compile(function)": lambda mlp: torch.compile(lambda x: mlp(x)),
    "decorator": lambda mlp: torch.compile(dynamic=False)(mlp.forward),
    "within another": lambda mlp: torch.compile(nn.Sequential(torch.compile(mlp))),
    "around a checkpoint": lambda mlp: torch.compile(
        lambda x: checkpoint(mlp, x, use_reentrant=False)
    ),
    "in a checkpoint": lambda mlp: functools.partial(
        checkpoint, torch.compile(mlp), use_reentrant=False
    ),
}


def of_mlp(way: str, how: str = "fuse") -> tuple[Seen, Seen]:
    def program():
        mlp = Mlp()
        run, given = WAYS[way](mlp), x()
        out = []
        first = seen(lambda: out.append(run(given)))
        gradient = x(wants_grad=False)
        return first, seen(lambda: out.pop().backward(gradient))

    return in_dry_run(program, how)


@pytest.mark.parametrize("way", WAYS)
def test_backward_of_a_gelu_is_one_kernel(way):
    first, second = of_mlp(way)
    assert first.fused == [8 * ONE]
    again = [8 * ONE] if "checkpoint" in way else []
    # it reads the gradient and what the first layer made
    assert second.fused == [*again, 12 * ONE]
    eager = of_mlp(way, "eager")
    assert eager[0].flops == first.flops and eager[1].flops == second.flops
    assert eager[1].left == second.left
    # the product's input and the result; a checkpoint keeps the result alone
    kept = ONE if again else 9 * ONE
    assert first.left == eager[0].left == kept


def test_dropout_draws_once_and_keeps_its_mask():
    def program():
        a, b = x(), x()
        out = []
        compiled = torch.compile(lambda a, b: a + F.dropout(b * 2, 0.1))
        first = seen(lambda: out.append(compiled(a, b)))
        return first, seen(lambda: out.pop().backward(x(wants_grad=False)))

    first, second = in_dry_run(program)
    assert first.fused == [3 * ONE + ONE // 2]
    assert first.left == ONE + ONE // 2
    assert sum(second.fused) == 3 * ONE + ONE // 2  # for both a gradient


# -- what compiled code is not made of -------------------------------------------------


def test_a_message_sends_what_has_been_written():
    def program():
        dist.init_process_group("nccl")

        def summed(a):
            double = a * 2
            dist.all_reduce(double)
            return double + 1

        a = x(wants_grad=False)
        return seen(lambda: torch.compile(summed)(a))

    found = in_dry_run(program, world=8)
    assert found.fused == [2 * ONE, 2 * ONE]
    assert found.names[1].startswith("all_reduce")


def test_what_is_kept_outlives_its_sources_until_backward():
    """`exp` keeps its result, which is computed again from what was given."""

    def program():
        a = x()
        out = []
        compiled = torch.compile(lambda a: (a + 1).exp().sum())
        first = seen(lambda: out.append(compiled(a * 1)))
        return first, seen(lambda: out.pop().backward())

    first, second = in_dry_run(program)
    assert first.left == ONE + 512  # what was given, and the sum
    assert second.fused == [2 * ONE + 2]


def test_what_is_not_compiled_is_as_before():
    def program():
        mlp, given = Mlp(), x()
        return seen(lambda: mlp(given).sum().backward())

    fused, eager = in_dry_run(program), in_dry_run(program, "eager")
    assert vars(fused) == vars(eager)


def two_steps():
    weight = x()
    optimizer = torch.optim.SGD([weight])
    for _ in range(2):
        torch.compile(lambda a: (a + 1).mean())(weight).backward()
        optimizer.step()


def test_a_report_says_how_it_was_counted():
    report = simgpu.dry_run(two_steps, world=1, compile="fuse")
    assert report.compiled == "fuse" and "counted as one kernel" in str(report)
    for words, how in (([], "fuse"), (["--no-compile"], "eager")):
        options = command.read(["--world", "1", *words, __file__])
        assert command.job_of(options).compile == how
    with pytest.raises(ValueError, match="use one of"):
        Job(compile="yes")


# -- beside Inductor -------------------------------------------------------------------


def ours(name: str) -> dict:
    def program():
        with torch.device("cuda"):
            module, inputs = compiled_models.CASES[name]()
        compiled, out = torch.compile(module), []
        first = seen(lambda: out.append(compiled(*inputs)))
        left = first.left - max(out[0].nbytes, 512)
        gradient = torch.empty_like(out[0])
        second = seen(lambda: out.pop().backward(gradient))
        return first, second, left

    first, second, left = in_dry_run(program)
    named = {"forward": first, "backward": second}
    return {"kept": left} | {
        name: {"kernels": sum("(more)" not in n for n in its.names if "fused" in n),
               "bytes": sum(its.fused)}
        for name, its in named.items()
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.slow
def test_kernels_and_bytes_are_nearly_those_of_inductor():
    """Its scheduler fuses the same models as for CUDA, on this machine."""
    done = subprocess.run(
        [sys.executable, SUPPORT / "inductor.py"],
        capture_output=True, text=True, timeout=JOB, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    theirs = {name: its for line in lines for name, its in line.items()}
    # it counts the logits, of which it picks one a row, as read once more
    theirs["loss"]["forward"]["bytes"] //= 2
    assert theirs.keys() == compiled_models.CASES.keys()
    for name, its in theirs.items():
        mine = ours(name)
        assert mine["kept"] == pytest.approx(its["kept"], rel=0.01, abs=2**16), name
        for way in ("forward", "backward"):
            wanted = its[way]
            assert mine[way]["bytes"] == pytest.approx(wanted["bytes"], rel=0.03), name
            assert abs(mine[way]["kernels"] - wanted["kernels"]) <= 1, name
