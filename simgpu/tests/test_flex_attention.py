"""A compiled `flex_attention`: fused kernels, with values and in a dry run."""

import contextlib
import functools
import io
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import simgpu
from simgpu import _runtime as state

flex = pytest.importorskip("torch.nn.attention.flex_attention")
HALF = torch.bfloat16
BATCH, HEADS, TOKENS, WIDTH = 2, 4, 512, 64
ONE = BATCH * HEADS * TOKENS * WIDTH * 2  # bytes of a query, or of an output
ROWS = BATCH * HEADS * TOKENS * 4  # of a number for each query, in float32


@pytest.fixture(autouse=True)
def no_gpus_are_left() -> Iterator[None]:
    yield
    simgpu.stop()


@pytest.fixture
def a100() -> None:
    simgpu.start(1, card="A100", compile="eager", overhead=False)


def inputs(tokens: int = TOKENS, heads: int = HEADS) -> list[torch.Tensor]:
    shape = BATCH, HEADS, tokens, WIDTH
    made = [torch.randn(shape, device="cuda", dtype=HALF) for _ in range(3)]
    return [made[0], *(x[:, :heads].contiguous() for x in made[1:])]


def causal(b, h, q, k):
    return q >= k


class Attention(nn.Module):
    def forward(self, *tensors, **how):
        return flex.flex_attention(*tensors, **how)


def in_a_function(*tensors, **how):
    return flex.flex_attention(*tensors, **how)


WAYS: dict[str, Callable[[], Callable]] = {
    "function": lambda: torch.compile(flex.flex_attention),
    "partial": lambda: torch.compile(functools.partial(flex.flex_attention)),
    "around": lambda: torch.compile(in_a_function),
    "module": lambda: torch.compile(Attention()),
    "in place": lambda: (net := Attention(), net.compile())[0],
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_compiled_holds_no_scores(a100, way):
    run = WAYS[way]()
    tensors = [x.requires_grad_() for x in inputs()]
    run = functools.partial(run, block_mask=flex.create_block_mask(
        causal, None, None, TOKENS, TOKENS, device="cuda"
    ))  # fmt: skip
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = run(*tensors)
    assert torch.cuda.memory_allocated() - before == ONE + ROWS
    # and, while the kernel runs, the largest score of each row
    assert torch.cuda.max_memory_allocated() - before == ONE + 2 * ROWS
    gradient = torch.ones_like(out)
    torch.cuda.reset_peak_memory_stats()
    out.backward(gradient)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak == ONE + ROWS + ONE + ROWS + 3 * ONE  # and delta, three gradients
    names = [event.name for event in simgpu.timeline().events]
    assert names[-2:] == ["flex_attention_delta", "flex_attention_backward"]


def test_what_is_not_compiled_holds_them_and_is_told_so(a100, monkeypatch):
    torch.compile(flex.flex_attention), torch.compile(Attention())
    monkeypatch.setattr(flex, "_WARNINGS_SHOWN", set())
    tensors = inputs()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with pytest.warns(UserWarning, match="without torch.compile"):
        flex.flex_attention(*tensors)
    scores = BATCH * HEADS * TOKENS * TOKENS * 4
    assert torch.cuda.max_memory_allocated() - before > 2 * scores
    monkeypatch.setattr(flex, "_WARNINGS_SHOWN", set())
    with pytest.warns(UserWarning, match="without torch.compile"):
        Attention()(*tensors)


@pytest.mark.parametrize("way", WAYS)
def test_nobody_is_told_to_compile_what_is_compiled(a100, way, monkeypatch, recwarn):
    monkeypatch.setattr(flex, "_WARNINGS_SHOWN", set())
    WAYS[way]()(*inputs(16))
    assert not [w for w in recwarn if "torch.compile" in str(w.message)]


def kernel_of(run: Callable) -> "tuple[float, int]":
    """Seconds and FLOPs of the last kernel of what is run."""
    run()
    kernel = state.running.dry.events[-1]
    return kernel.end - kernel.start, kernel.flops


def timed(program: Callable, card: str = "A100"):
    """What a program returns that runs without values."""
    found = []
    simgpu.dry_run(
        lambda: found.append(program()), world=1, node=1, card=card, compile="eager"
    )
    return found[0]


@pytest.mark.parametrize(("card", "share"), [("A100", 0.90), ("H100", 1.25)])
def test_it_is_as_fast_beside_flash_attention_as_was_published(card, share):
    def both():
        tensors = inputs(8192)
        run = torch.compile(flex.flex_attention)
        attention = torch.nn.attention
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            flash = kernel_of(lambda: F.scaled_dot_product_attention(*tensors))
        return flash, kernel_of(lambda: run(*tensors))

    (flash, flops), (seconds, its_flops) = timed(both, card)
    assert its_flops == flops
    assert flash / seconds == pytest.approx(share, rel=0.02)


def test_blocks_that_a_mask_leaves_out_take_no_time():
    def all_and_a_quarter():
        run, tokens = torch.compile(flex.flex_attention), 8192
        tensors = [x.requires_grad_() for x in inputs(tokens)]
        document = (torch.arange(tokens) // 2048).cuda()

        def same(b, h, q, k):
            return document[q] == document[k]

        def both_ways(mask):
            forward = kernel_of(lambda: run(*tensors, block_mask=mask))
            out = run(*tensors, block_mask=mask)
            backward = kernel_of(lambda: torch.autograd.grad(out, tensors, out))
            return forward, backward

        some = flex.create_block_mask(same, None, None, tokens, tokens, device="cuda")
        return both_ways(None), both_ways(some)

    (whole, whole_back), (quarter, quarter_back) = timed(all_and_a_quarter)
    assert quarter[1] * 4 == whole[1] == whole_back[1] // 5 * 2
    assert quarter_back[1] * 4 == whole_back[1]
    assert quarter[0] < 0.31 * whole[0] and quarter_back[0] < 0.31 * whole_back[0]


def test_a_bias_that_learns_has_its_gradient(a100):
    """Values and gradients are those of PyTorch's formula, with shared heads."""
    tensors = [x.float().requires_grad_() for x in inputs(32, heads=2)]
    slopes = torch.randn(HEADS, device="cuda", requires_grad=True)
    mask = flex.create_block_mask(causal, None, None, 32, 32, device="cuda")

    def tilt(score, b, h, q, k):
        return score + slopes[h] * (q - k)

    found = []
    for run in (flex.flex_attention, torch.compile(flex.flex_attention)):
        out = run(*tensors, score_mod=tilt, block_mask=mask, enable_gqa=True)
        gradients = torch.autograd.grad(out.square().sum(), (*tensors, slopes))
        found.append([out, *gradients])
    for one, other in zip(*found, strict=True):
        assert one.device == other.device == torch.device("cuda", 0)
        torch.testing.assert_close(one.cpu(), other.cpu())


# -- dry runs --------------------------------------------------------------------------


def steps(tokens: int, compiled: bool = True, made: Callable | None = None):
    """Three steps of a layer of attention to documents."""
    run = torch.compile(flex.flex_attention) if compiled else flex.flex_attention
    layer = nn.Linear(WIDTH, 3 * WIDTH, bias=False, device="cuda", dtype=HALF)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    document = (torch.arange(tokens) // (tokens // 4)).cuda()

    def same(b, h, q, k):
        return (document[q] == document[k]) & (q >= k)

    make = made or flex.create_block_mask
    mask = make(same, None, None, tokens, tokens, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        x = torch.randn(BATCH, HEADS, tokens, WIDTH, device="cuda", dtype=HALF)
        out = run(*layer(x).chunk(3, -1), block_mask=mask)
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated()


def flex_kernels(events) -> list[tuple]:
    return [(e.name, e.nbytes, e.flops, pytest.approx(e.end - e.start))
            for e in events if "flex" in e.name]  # fmt: skip


def dry(function: Callable, **how):
    """The report of a dry run, what the function returned, and its kernels."""
    found = []

    def program():
        found.append(function())
        found.append(flex_kernels(state.running.dry.events))

    how = {"card": "A100", "compile": "eager", "steps": 100} | how
    return simgpu.dry_run(program, world=1, node=1, **how), *found


def test_a_dry_run_has_the_kernels_and_bytes_of_the_run_with_values():
    simgpu.start(1, card="A100", compile="eager")
    peak = steps(512)
    kernels = flex_kernels(simgpu.timeline().events)
    simgpu.stop()
    report, found, ours = dry(lambda: steps(512))
    assert (found, ours) == (peak, kernels) and len(ours) == 9
    assert report.flex_attention == ["compiled"]


@pytest.mark.parametrize("how", ["eager", "fuse"])
def test_a_long_sequence_fits_compiled_and_its_blocks_are_known(how, monkeypatch):
    """The mask has no values here: 4 GiB; each document sees half of a quarter."""
    monkeypatch.setattr(flex, "_WARNINGS_SHOWN", set())
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        report, _, kernels = dry(lambda: steps(2**16), compile=how)
    assert report.fits and "flex_attention is compiled" in str(report)
    assert "torch.compile()" not in said.getvalue()
    blocks, all_of_it = 2**16 // 128, 4 * BATCH * HEADS * 2**32 * WIDTH
    of_one = blocks // 4 * (blocks // 4 + 1) / 2  # of a document
    assert kernels[0][2] == pytest.approx(all_of_it * 4 * of_one / blocks**2, rel=0.02)


def test_a_long_sequence_does_not_fit_uncompiled_and_the_report_says_why():
    report = simgpu.dry_run(
        lambda: steps(2**16, compiled=False), world=1, node=1, card="A100"
    )
    assert not report.fits
    assert report.flex_attention == ["uncompiled"]
    assert "it holds all scores" in str(report)


def test_a_compiled_mask_is_never_whole():
    made = []

    def compiled():
        make = torch.compile(flex.create_block_mask)
        before = torch.cuda.memory_allocated()
        mask = make(causal, None, None, 4096, 4096, device="cuda")
        made.append((mask.kv_num_blocks + mask.full_kv_num_blocks).sum().item())
        return torch.cuda.max_memory_allocated() - before

    _, peak, _ = dry(compiled, compile="fuse")
    assert made == [32 * 33 // 2] and peak < 4096 * 4096


def test_compiled_code_that_indexes_has_its_values():
    def index():
        run = torch.compile(lambda x, at: x[at] + 1)
        return run(torch.arange(8).cuda(), torch.tensor([5, 2]).cuda()).tolist()

    assert dry(index, compile="fuse")[1] == [6, 3]
