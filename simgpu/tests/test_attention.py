"""Attention on a simulated GPU: CUDA's kernels by name, the CPU's values."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import simgpu
from simgpu import _startup as startup
from simgpu._dispatch import kernel_work
from support import programs

FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
CUDNN = "_scaled_dot_product_cudnn_attention"
MATH = "_safe_softmax"  # of the kernels that "math" takes
HALF = {"dtype": torch.bfloat16}


pytestmark = pytest.mark.simulated_gpus(2)


def kernels(run) -> list:
    """The kernels that `run()` launches, as the clock logs them."""
    events = startup.state.current().clock.events
    before = len(events)
    run()
    return [event for event in list(events)[before:] if event.kind == "kernel"]


def attention_kernel(*inputs, **options) -> str:
    run = kernels(lambda: F.scaled_dot_product_attention(*inputs, **options))
    (name,) = {event.name for event in run} & {FLASH, EFFICIENT, CUDNN, MATH}
    return name


def heads(number: int = 4, length: int = 6, dim: int = 8, **options) -> torch.Tensor:
    return torch.randn(2, number, length, dim, device="cuda", **options)


def expected(
    query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False
):
    """Leaves, and attention by its formula, in float32."""
    q, k, v = (x.detach().cpu().float().requires_grad_() for x in (query, key, value))
    repeat = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(repeat, 1) for x in (k, v))
    products = q @ keys.mT * (scale or q.shape[-1] ** -0.5)
    if is_causal:
        attn_mask = torch.ones(products.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        products = products.masked_fill(~attn_mask.cpu(), -torch.inf)
    elif attn_mask is not None:
        products = products + attn_mask.cpu()
    return (q, k, v), products.softmax(-1) @ values


def agree(out, inputs, leaves, right, near: float) -> None:
    """Values, and gradients of a weighted sum of them, are those of the formula."""
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (right * weights.cpu().float()).sum().backward()
    near = {"atol": near, "rtol": near}
    torch.testing.assert_close(out.cpu().float(), right, **near)
    for tensor, leaf in zip(inputs, leaves, strict=True):
        assert tensor.grad.dtype == tensor.dtype and tensor.grad.is_cuda
        torch.testing.assert_close(tensor.grad.cpu().float(), leaf.grad, **near)


@pytest.mark.parametrize("dtype, by_cudnn", [
    (torch.float32, False), (torch.float16, False), (torch.bfloat16, False),
    (torch.bfloat16, True),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("options", [
    {}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": "bool"},
    {"attn_mask": "added"}, {"enable_gqa": True},
], ids=str)  # fmt: skip
def test_values_and_gradients_are_those_of_the_formula(dtype, by_cudnn, options):
    torch.manual_seed(0)
    of_keys = 2 if "enable_gqa" in options else 4
    inputs = [heads(n, dtype=dtype).requires_grad_() for n in (4, of_keys, of_keys)]
    masks = {
        "bool": torch.rand(2, 1, 6, 6, device="cuda") > 0.3,
        "added": torch.randn(6, 6, device="cuda", dtype=dtype),
    }
    masks["bool"][..., 0] = True  # every query sees a key
    options = {**options, "attn_mask": masks.get(options.get("attn_mask"))}
    only = sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
    with only if by_cudnn else contextlib.nullcontext():
        out = F.scaled_dot_product_attention(*inputs, **options)
    assert out.dtype == dtype and out.is_cuda
    near = 1e-5 if dtype == torch.float32 else 4e-2
    agree(out, inputs, *expected(*inputs, **options), near)


@pytest.mark.parametrize("dtype, card, moved", [
    (torch.float32, "A100", 2 * 4 * 64 * 64), (torch.bfloat16, "A100", 2 * 4 * 32),
    (torch.bfloat16, "H100", 2 * 4 * 64 * 64),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("is_causal", [False, True])
def test_dropout_in_attention_drops_weights_and_backward_the_same(
    dtype, card, moved, is_causal
):
    simgpu.stop()
    simgpu.start(1, card)
    torch.cuda.manual_seed(0)
    torch.manual_seed(0)
    q, k = (heads(4, 64, 16, dtype=dtype) for _ in range(2))
    # values are one-hot: the result is the weights that are left
    v = torch.eye(64, device="cuda", dtype=dtype).expand(2, 4, 64, 64)[..., :16]
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    generator = torch.cuda.default_generators[0]
    before = generator.get_offset()
    out = F.scaled_dot_product_attention(*inputs, dropout_p=0.25, is_causal=is_causal)
    assert generator.get_offset() - before == moved
    generator.set_offset(before)
    again = F.scaled_dot_product_attention(q, k, v, dropout_p=0.25, is_causal=is_causal)
    assert torch.equal(out, again)
    other = F.scaled_dot_product_attention(q, k, v, dropout_p=0.25, is_causal=is_causal)
    assert not torch.equal(out, other)
    leaves, right = expected(q, k, v, is_causal=is_causal)
    seen = right > 0
    left = (out.cpu().float() > 0) & seen
    assert left.sum() / seen.sum() == pytest.approx(0.75, abs=0.03)
    near = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {
        "rtol": 2e-2, "atol": 1e-2}  # fmt: skip
    torch.testing.assert_close(out.cpu().float()[left], right[left] / 0.75, **near)
    # the loss sums what is left of each weight; its gradient is that of the formula
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    factors = torch.zeros(right.shape).masked_fill_(left, 1 / 0.75)
    (right * factors * weights.cpu().float()).sum().backward()
    for mine, leaf in zip(inputs[:2], leaves[:2], strict=True):
        near = 2e-3 if dtype == torch.float32 else 5e-2
        torch.testing.assert_close(mine.grad.cpu().float(), leaf.grad,
                                   rtol=5e-2, atol=near)  # fmt: skip


@pytest.mark.parametrize("wide, narrow", [(24, 16), (16, 24)])
@pytest.mark.parametrize("dtype, card", [
    (torch.float32, "A100"), (torch.bfloat16, "A100"), (torch.bfloat16, "H100"),
], ids=str)  # fmt: skip
def test_values_are_wider_or_narrower_than_queries(dtype, card, wide, narrow):
    """As in latent attention (MLA), where queries have positions and values none."""
    simgpu.stop()
    simgpu.start(1, card)
    torch.manual_seed(0)
    inputs = [
        heads(4, 6, n, dtype=dtype).requires_grad_() for n in (wide, wide, narrow)
    ]
    kernel = CUDNN if card == "H100" else EFFICIENT  # flash attention takes none such
    assert attention_kernel(*inputs, is_causal=True) == kernel
    out = F.scaled_dot_product_attention(*inputs, is_causal=True)
    near = 1e-5 if dtype == torch.float32 else 4e-2
    agree(out, inputs, *expected(*inputs, is_causal=True), near)


@pytest.mark.parametrize(("inputs", "options", "kernel"), [
    ({}, {}, EFFICIENT), (HALF, {}, FLASH), (HALF, {"is_causal": True}, FLASH),
    (HALF, {"attn_mask": torch.ones(6, 6)}, EFFICIENT),
    ({"dtype": torch.float64}, {}, MATH), ({}, {"dropout_p": 0.1}, EFFICIENT),
    (HALF, {"dropout_p": 0.1}, FLASH),
    ({**HALF, "dim": 320}, {}, EFFICIENT),
], ids=str)  # fmt: skip
def test_the_kernel_is_the_one_that_cuda_would_choose(inputs, options, kernel):
    if "attn_mask" in options:
        mask = options["attn_mask"].to("cuda", inputs["dtype"])
        options = {**options, "attn_mask": mask}
    assert attention_kernel(*[heads(**inputs)] * 3, **options) == kernel


def test_a_card_without_bfloat16_units_has_no_flash_attention():
    simgpu.stop()
    simgpu.start(1, "T4")
    assert attention_kernel(*[heads(dtype=torch.float16)] * 3) == EFFICIENT
    assert attention_kernel(*[heads(**HALF)] * 3) == MATH


@pytest.mark.parametrize("card", ["A100", "H100", "H200", "B200", "RTX4090"])
def test_cudnns_kernel_is_the_first_on_hopper_and_blackwell(card, monkeypatch):
    simgpu.stop()
    simgpu.start(1, card)
    half, few = heads(**HALF), heads(2, **HALF)
    mask = torch.zeros(6, 6, **HALF, device="cuda")
    first = card in ("H100", "H200", "B200")
    assert attention_kernel(*[half] * 3) == (CUDNN if first else FLASH)
    masked = {"attn_mask": mask, "enable_gqa": True}  # which flash attention never has
    assert attention_kernel(half, few, few, **masked) == (CUDNN if first else MATH)
    assert attention_kernel(*[heads()] * 3) == EFFICIENT
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    with sdpa_kernel(order):
        assert attention_kernel(*[half] * 3) == (CUDNN if first else FLASH)
    with sdpa_kernel(order, set_priority=True):
        assert attention_kernel(*[half] * 3) == FLASH
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert attention_kernel(*[half] * 3) == FLASH


def test_a_program_may_choose_the_kernel():
    half = [heads(**HALF)] * 3
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert attention_kernel(*half) == EFFICIENT
    with sdpa_kernel(SDPBackend.MATH):
        assert attention_kernel(*half) == MATH
    order = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(order, set_priority=True):
        assert attention_kernel(*half) == MATH
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        assert attention_kernel(*half) == EFFICIENT
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


@pytest.mark.parametrize("backend, dtype, shape, where", [
    ("FLASH", torch.float32, (4, 6, 8), ""),
    ("CUDNN", torch.float32, (4, 6, 8), ""),
    ("CUDNN", torch.bfloat16, (4, 6, 136), ""),  # too wide
    ("CUDNN", torch.bfloat16, (4, 6, 12), ""),  # not a multiple of 8
    ("CUDNN", torch.bfloat16, (4, 1, 8), ""),  # one key
    ("CUDNN", torch.bfloat16, (4, 6, 8), "deterministic"),
    ("CUDNN", torch.float16, (4, 6, 8), "V100"),
])  # fmt: skip
def test_a_chosen_kernel_that_cannot_run_is_an_error_as_on_cuda(
    backend, dtype, shape, where
):
    if where == "V100":
        simgpu.stop()
        simgpu.start(1, card="V100")
    x = heads(*shape, dtype=dtype)
    torch.use_deterministic_algorithms(where == "deterministic")
    try:
        with sdpa_kernel(getattr(SDPBackend, f"{backend}_ATTENTION")):
            with pytest.raises(RuntimeError, match="No available kernel"):
                F.scaled_dot_product_attention(x, x, x)
    finally:
        torch.use_deterministic_algorithms(False)


# -- cuDNN's kernel --------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["Flash", "Cudnn"])
def test_a_kernel_keeps_the_output_a_sum_for_each_query_and_a_random_state(kernel):
    inputs = [heads(8, 256, 64, **HALF).requires_grad_() for _ in range(3)]
    before = torch.cuda.memory_allocated()
    with sdpa_kernel(getattr(SDPBackend, f"{kernel.upper()}_ATTENTION")):
        out = F.scaled_dot_product_attention(*inputs)
    rows = 2 * 8 * 256
    kept = torch.cuda.memory_allocated() - before
    assert kept == rows * 64 * 2 + rows * 4 + 2 * 512  # the smallest block has 512
    assert out.grad_fn.name() == f"ScaledDotProduct{kernel}AttentionBackward0"


@pytest.mark.parametrize(
    ("card", "width", "tflops"),
    [("H100", 128, (595, 516)), ("H100", 64, (413, 433)), ("B200", 128, (1240, 1240))],
)
def test_cudnn_is_as_fast_as_was_published(card, width, tflops):
    """16,384 tokens, not causal: FlashAttention-3's figures 5, 6; FlashAttention-4."""

    def both_ways(x):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(x, x, x)
        torch.autograd.grad(out, x, out)

    with torch.device("meta"):
        x = torch.empty(1, 16, 2**14, width, dtype=torch.float16, requires_grad=True)
    simgpu.stop()
    found = simgpu.estimate(both_ways, x, card=card)
    flops = 4 * 16 * 2**28 * width
    for name, products, rate in zip(
        (CUDNN, f"{CUDNN}_backward"), (1, 2.5), tflops, strict=True
    ):
        seconds = found.by_operation[name].seconds
        assert flops * products / seconds / 1e12 == pytest.approx(rate, rel=0.05)


def test_dropout_works_where_only_a_fused_kernel_is_allowed():
    x = heads()
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    assert out.shape == x.shape and out.is_cuda


def test_a_mask_gets_its_gradient():
    mask = torch.zeros(6, 6, device="cuda", requires_grad=True)
    x = heads()
    F.scaled_dot_product_attention(x, x, x, attn_mask=mask).square().sum().backward()
    assert mask.grad.abs().sum() > 0


def test_autocast_casts_before_the_kernel_is_chosen():
    x = heads()
    with torch.autocast("cuda", torch.bfloat16):
        assert attention_kernel(x, x, x) == FLASH
        out = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    assert out.dtype == torch.bfloat16


def test_every_way_to_call_it_takes_the_same_kernel():
    def ran(run) -> bool:
        return EFFICIENT in {event.name for event in kernels(run)}

    x, rows = heads(), torch.randn(2, 5, 8, device="cuda")
    layer = nn.MultiheadAttention(8, 2, batch_first=True).cuda()
    assert ran(lambda: layer(rows, rows, rows, need_weights=False))
    assert ran(lambda: torch._C._nn.scaled_dot_product_attention(x, x, x))
    assert ran(lambda: F.scaled_dot_product_attention(query=x, key=x, value=x))
    function = torch.vmap(F.scaled_dot_product_attention)
    assert ran(lambda: function(x[None], x[None], x[None]))
    with torch.inference_mode():
        assert ran(lambda: F.scaled_dot_product_attention(x, x, x))
    assert F.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"


def test_the_clock_counts_the_flops_and_no_matrix_of_weights():
    x = heads(8, 256, 64, **HALF).requires_grad_()
    (forward,) = kernels(lambda: F.scaled_dot_product_attention(x, x, x))
    products = 2 * 8 * 256 * 256 * 64 * 2  # FLOPs of one of the two matrix products
    assert forward.flops == 2 * products
    assert forward.nbytes < 4.2 * x.nbytes
    out = F.scaled_dot_product_attention(x, x, x)
    run = kernels(lambda: out.backward(torch.ones_like(out)))
    (backward,) = [event for event in run if event.name == f"{FLASH}_backward"]
    assert backward.flops == 5 * products


def test_the_operations_return_what_cuda_returns():
    x = heads(**HALF)
    aten = torch.ops.aten
    out, lse, cum_q, cum_k, max_q, max_k, state, unused, debug = (
        aten._scaled_dot_product_flash_attention(x, x, x)
    )
    assert (cum_q, cum_k, max_q, max_k) == (None, None, 6, 6)
    assert (lse.shape, lse.dtype) == ((2, 4, 6), torch.float32)
    assert lse.is_contiguous() and state.dtype == unused.dtype == torch.uint64
    assert (state.shape, unused.shape, debug.shape) == ((2,), (), (0,))
    out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(
        x, x, x, None, False
    )
    assert lse.shape == (2, 4, 0)
    assert seed.shape == offset.shape == () and seed.dtype == torch.int64
    assert all(tensor.is_cuda for tensor in (out, lse, seed, state, unused, debug))


@pytest.mark.parametrize(("queries", "keys"), [(3, 5), (5, 3)])
def test_the_last_query_of_flash_attention_sees_the_last_key(queries, keys):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 16, device="cuda", dtype=torch.bfloat16)
               for n in (queries, keys, keys))  # fmt: skip
    aten = torch.ops.aten
    out, lse, *rest = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    grads = aten._scaled_dot_product_flash_attention_backward(
        out, q, k, v, out, lse, *rest[:4], 0.0, True, *rest[4:6]
    )
    inputs = [t.cpu().float().requires_grad_() for t in (q, k, v)]
    seen = torch.ones(queries, keys).tril(keys - queries).bool()
    whole, blind = F.scaled_dot_product_attention(*inputs, seen), ~seen.any(1)
    whole = whole.masked_fill(blind[:, None], 0.0)  # flash attention: 0, not nan
    assert lse.isinf()[0, 0].tolist() == blind.tolist()
    torch.testing.assert_close(out.cpu().float(), whole, rtol=0.02, atol=0.02)
    wanted = torch.autograd.grad(whole, inputs, whole.detach())
    for mine, theirs in zip(grads, wanted, strict=True):
        torch.testing.assert_close(mine.cpu().float(), theirs, rtol=0.05, atol=0.05)


def test_inputs_that_do_not_fit_together_are_refused():
    x = heads()
    for key, words in (
        (x.cpu(), "same device"), (x.to("cuda:1"), "same device"),
        (x.half(), "same dtype"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=words):
            F.scaled_dot_product_attention(x, key, x)


def test_attention_on_the_host_is_left_alone():
    x = heads().cpu()
    right = expected(x, x, x)[1]
    torch.testing.assert_close(F.scaled_dot_product_attention(x, x, x), right)
    simgpu.stop()
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


def test_flops_are_asked_for_with_all_heads_where_they_share_keys():
    """PyTorch 2.11 has a formula for as many heads of keys as of queries only."""
    q, k, v = torch.empty(2, 8, 6, 4), torch.empty(2, 2, 6, 4), torch.empty(2, 2, 6, 5)
    found = kernel_work._with_all_heads((q, k, v, 0.0, True))
    assert found == [(2, 8, 6, 4), (2, 8, 6, 4), (2, 8, 6, 5), 0.0, True]
    in_one_batch = torch.empty(6, 8, 4)  # (tokens, heads, width)
    assert kernel_work._with_all_heads((in_one_batch,))[0] is in_one_batch


# -- flex_attention --------------------------------------------------------------------

DOCUMENTS = torch.arange(24) // 10


def flex_case(heads_of_keys: int = 4, dtype=torch.float32) -> list[torch.Tensor]:
    """A query and, with fewer heads perhaps, a key and a value, on the host."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(2, number, 24, 8, generator=generator).to(dtype)
        for number in (4, heads_of_keys, heads_of_keys)
    ]


def by_hand(query, key, value, change=None, seen=None):
    """Its output and the logarithms of its sums, in float64."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    where = [torch.arange(n).view(-1, *[1] * i)
             for n, i in zip(scores.shape, (3, 2, 1, 0), strict=True)]  # fmt: skip
    scores = scores if change is None else change(scores, *where)
    if seen is not None:
        scores = scores.masked_fill(~seen(*where), -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shared_heads", [False, True])
@pytest.mark.parametrize("what", ["plain", "causal", "documents", "bias"])
def test_flex_attention_is_its_formula_forward_and_backward(
    what, shared_heads, compiled
):
    simgpu.stop()
    simgpu.start(2, compile="eager")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    run = torch.compile(flex.flex_attention) if compiled else flex.flex_attention
    bias = torch.randn(4)
    documents, slopes = DOCUMENTS.cuda(1), bias.cuda(1).requires_grad_()
    bias = bias.double().requires_grad_()

    def causal(b, h, q, k):
        return q >= k

    def same(documents):
        return lambda b, h, q, k: (documents[q] == documents[k]) & (q >= k)

    def tilt(slopes):
        return lambda score, b, h, q, k: score + slopes[h] * (q - k)

    change = {"bias": (tilt(slopes), tilt(bias))}.get(what, (None, None))
    seen = {"causal": (causal, causal), "documents": (same(documents), same(DOCUMENTS))}
    mask, seen = seen.get(what, (None, None))
    mask = mask and flex.create_block_mask(mask, None, None, 24, 24, device="cuda:1")
    inputs = flex_case(2 if shared_heads else 4)
    there = [x.cuda(1).requires_grad_() for x in inputs]
    here = [x.double().requires_grad_() for x in inputs]
    out, lse = run(*there, score_mod=change[0], block_mask=mask, return_lse=True,
                   enable_gqa=shared_heads)  # fmt: skip
    expected, log_sums = by_hand(*here, change[1], seen)
    (out.square().sum() + lse.sum()).backward()
    (expected.square().sum() + log_sums.sum()).backward()
    assert out.device == lse.device == torch.device("cuda", 1)
    found = [out, lse, *(x.grad for x in there)]
    wanted = [expected, log_sums, *(x.grad for x in here)]
    if what == "bias":
        found, wanted = [*found, slopes.grad], [*wanted, bias.grad]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-3, atol=1e-4)


def test_flex_attention_in_lower_precision_keeps_the_layout_of_the_query():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    query, key, value = (
        x.cuda().transpose(1, 2).contiguous().transpose(1, 2) for x in flex_case()
    )
    out = flex.flex_attention(query, key, value)
    assert out.stride() == query.stride() == (24 * 4 * 8, 8, 4 * 8, 1)
    with torch.autocast("cuda", torch.bfloat16):
        half = flex.flex_attention(query.requires_grad_(), key, value)
        half.sum().backward()
    assert (half.dtype, query.grad.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(half.float(), out, rtol=0.02, atol=0.02)


def test_a_compiled_flex_attention_runs_but_for_a_kernel_of_gpus():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    inputs = [x.cuda() for x in flex_case()]
    compiled = torch.compile(flex.flex_attention)(*inputs)
    torch.testing.assert_close(compiled, flex.flex_attention(*inputs))
    with pytest.raises(simgpu.NotSimulated, match="BACKEND='FLASH'"):
        flex.flex_attention(*inputs, kernel_options={"BACKEND": "FLASH"})
    on_host = flex_case()
    torch.testing.assert_close(
        flex.flex_attention(*on_host),
        by_hand(*(x.double() for x in on_host))[0].float(),
    )


# -- Triton ----------------------------------------------------------------------------

TRITON = """
import torch, triton
import triton.language as tl

@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n)
    tl.store(out + i, total, mask=i < n)

x = torch.arange(100.0, device="cuda")
out = torch.empty_like(x)
add[(2,)](x, torch.ones_like(x), out, 100, BLOCK=64)
print(out.device, out.sum().item())
"""


def test_kernels_of_triton_run_in_its_interpreter_and_nowhere_else(tmp_path):
    pytest.importorskip("triton")
    path = tmp_path / "kernel.py"
    path.write_text(TRITON)
    words = ("--gpus", 1, path)
    done = programs.simulated(tmp_path, *words, new_python=True, TRITON_INTERPRET="1")
    assert done.stdout == "cuda:0 5050.0\n", done.stderr
    done = programs.simulated(tmp_path, *words, new_python=True)
    assert done.status == 1 and "TRITON_INTERPRET=1 in the environment" in done.stderr


# -- sequences that lie one behind the other -------------------------------------------

PACKED = "_flash_attention_forward"
LENGTHS = (5, 9, 1)


def offsets(lengths, gpu="cuda") -> torch.Tensor:
    ends = torch.tensor((0, *lengths)).cumsum(0)
    return ends.to(gpu, torch.int32)


def packed(lengths, heads=4, dim=16, dtype=torch.bfloat16, **options) -> torch.Tensor:
    tensor = torch.randn(sum(lengths), heads, dim, dtype=dtype, device="cuda")
    return tensor.requires_grad_(**options)


def seen(queries: int, keys: int, left: int, right: int) -> torch.Tensor:
    """Which keys each query sees; the last query stands at the last key."""
    place = torch.arange(queries)[:, None] + keys - queries
    distance = torch.arange(keys) - place
    left, right = (side if side >= 0 else keys + queries for side in (left, right))
    return (distance >= -left) & (distance <= right)


def sequence_by_sequence(query, key, value, lengths, lengths_of_keys, window, scale):
    """Leaves in float32, and (tokens, heads, width) outputs of plain attention."""
    leaves = [t.detach().cpu().float().requires_grad_() for t in (query, key, value)]
    cut = (leaves[0].split(lengths), *(t.split(lengths_of_keys) for t in leaves[1:]))
    parts = []
    for q, k, v in zip(*cut, strict=True):
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[0] // k.shape[0], 0) for t in (k, v))
        scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
        mask = seen(q.shape[1], k.shape[1], *window)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        weights = weights.masked_fill(~mask.any(1)[:, None], 0.0)
        parts.append((weights @ v).transpose(0, 1))
    return leaves, torch.cat(parts)


def attend_packed(query, key, value, lengths, lengths_of_keys, window, scale=None):
    """By the operation, as `torch.nn.attention.varlen` calls it."""
    return torch.ops.aten._flash_attention_forward(
        query, key, value, offsets(lengths), offsets(lengths_of_keys), max(lengths),
        max(lengths_of_keys), 0.0, window == (-1, 0), False, scale=scale,
        window_size_left=window[0], window_size_right=window[1],
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "window", [(-1, -1), (-1, 0), (2, 0), (1, 3), (-1, 1)], ids=str
)
@pytest.mark.parametrize(
    ("lengths_of_keys", "groups", "scale"),
    [(LENGTHS, 4, None), (LENGTHS, 2, 0.3), ((7, 3, 4), 1, None)],
    ids=str,
)
def test_packed_sequences_are_attended_to_one_by_one(
    lengths_of_keys, groups, scale, window, dtype
):
    torch.manual_seed(0)
    inputs = [packed(LENGTHS, dtype=dtype)]
    inputs += [packed(lengths_of_keys, groups, dtype=dtype) for _ in range(2)]
    more = LENGTHS, lengths_of_keys, window, scale
    found = attend_packed(*inputs, *more)[0]
    agree(found, inputs, *sequence_by_sequence(*inputs, *more), 3e-2)


def test_a_query_that_sees_no_key_is_zero_and_its_logsumexp_infinite():
    query, key = packed((4,)), packed((2,))
    out, logsumexp, *_ = attend_packed(query, key, key, (4,), (2,), (-1, 0))
    assert not out[:2].any() and out[2:].all()
    assert logsumexp.isinf().sum(1).tolist() == [2] * 4 and logsumexp.max() > 0


@pytest.mark.parametrize("causal", [False, True])
def test_varlen_attention_forward_and_backward(causal):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    torch.manual_seed(0)
    tensors = [packed(LENGTHS, dtype=torch.float32) for _ in range(3)]
    ends, window = offsets(LENGTHS), (-1, 0) if causal else (-1, -1)
    turn = torch.ones((), device="cuda")  # backward stays on the GPU all the way
    out, logsumexp = varlen.varlen_attn(
        *((tensor * turn).bfloat16() for tensor in tensors), ends, ends, 9, 9,
        return_aux=varlen.AuxRequest(lse=True), window_size=window,
    )  # fmt: skip
    leaves, right = sequence_by_sequence(*tensors, LENGTHS, LENGTHS, window, None)
    agree(out.float(), tensors, leaves, right, 6e-2)
    first = leaves[0][5:14, 0] @ leaves[1][5:14, 0].T / 4
    first = first.masked_fill(~seen(9, 9, *window), -torch.inf).logsumexp(-1)
    torch.testing.assert_close(logsumexp[0, 5:14].cpu(), first, atol=3e-2, rtol=3e-2)


def test_packed_attention_returns_what_cuda_returns():
    query = packed(LENGTHS, requires_grad=False)
    before = torch.cuda.memory_allocated()
    found = attend_packed(query, query, query, LENGTHS, LENGTHS, (-1, 0))
    out, logsumexp, state, unused, debug = found
    assert (out.shape, out.dtype) == (query.shape, query.dtype)
    assert (logsumexp.shape, logsumexp.dtype) == ((4, 15), torch.float32)
    assert state.dtype == unused.dtype == torch.uint64
    assert (state.shape, unused.shape, debug.shape) == ((2,), (), (0,))
    assert all(tensor.is_cuda for tensor in found)
    # 15 x 4 x 16 x 2 bytes, 4 x 15 x 4, 16 and 8, each in whole blocks of 512
    assert torch.cuda.memory_allocated() - before == 2048 + 512 + 512 + 512


def test_each_packed_sequence_costs_its_own_length():
    def run(lengths):
        query = packed(lengths)
        found = kernels(
            lambda: attend_packed(query, query, query, lengths, lengths, (-1, 0))[0]
            .float().sum().backward()
        )  # fmt: skip
        return {event.name: event for event in found if "attention" in event.name}

    for lengths in ((64, 64), (100, 28), (128,)):
        found = run(lengths)
        forward, backward = found[PACKED], found["_flash_attention_backward"]
        products = 2 * 4 * 16 * sum(length**2 for length in lengths)
        assert (forward.flops, backward.flops) == (2 * products, 5 * products)
        # each tensor once: query, key and value, out, offsets, the logsumexp
        whole = 128 * 4 * 16 * 2
        small = 2 * 4 * (len(lengths) + 1) + 4 * 128 * 4 + 16 + 8
        assert forward.nbytes == 4 * whole + small
    heads_first = kernels(lambda: F.scaled_dot_product_attention(
        *[torch.zeros(1, 4, 128, 16, device="cuda", **HALF)] * 3, is_causal=True
    ))  # fmt: skip
    assert heads_first[-1].flops == forward.flops


def test_flash_attention_of_batches_has_tokens_before_heads():
    torch.manual_seed(0)
    inputs = [heads(**HALF).requires_grad_() for _ in range(3)]
    found = torch.ops.aten._flash_attention_forward(
        *(t.transpose(1, 2) for t in inputs), None, None, 6, 6, 0.0, True, False
    )
    assert found[1].shape == (2, 4, 6)
    right = expected(*inputs, is_causal=True)
    agree(found[0].transpose(1, 2), inputs, *right, 4e-2)


@pytest.mark.parametrize("name", ["varlen_attn", "varlen_attn_out"])
def test_varlen_attention_reads_pages_of_keys(name):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if not hasattr(varlen, "varlen_attn_out"):
        pytest.skip("this PyTorch has no pages")
    torch.manual_seed(0)
    query = packed((2, 1), requires_grad=False)
    cache = packed((5 * 256,), requires_grad=False).view(5, 256, 4, 16)
    table = torch.tensor([[3, 1], [0, 4]], device="cuda", dtype=torch.int32)
    used = torch.tensor([300, 7], device="cuda", dtype=torch.int32)
    out = (torch.empty_like(query),) if name == "varlen_attn_out" else ()
    found = getattr(varlen, name)(
        *out, query, cache, cache, offsets((2, 1)), offsets((300, 7)), 2, 512,
        seqused_k=used, block_table=table, window_size=(-1, 0),
    )  # fmt: skip
    if out:
        assert found is out[0]
    keys = torch.cat([cache[3], cache[1, :44], cache[0, :7]])
    right = sequence_by_sequence(query, keys, keys, (2, 1), (300, 7), (-1, 0), None)[1]
    torch.testing.assert_close(found.cpu().float(), right, atol=3e-2, rtol=3e-2)


def test_cudnns_kernel_for_packed_sequences_computes_the_same():
    """PyTorch prefers it on Hopper, since 2.14."""
    torch.manual_seed(0)
    lengths, aten = (200, 30), torch.ops.aten
    tensors = [packed(lengths, requires_grad=False) for _ in range(3)]
    ends = (offsets(lengths),) * 2
    size = 200, 200
    flash = attend_packed(*tensors, lengths, lengths, (-1, 0))
    cudnn = aten._cudnn_attention_forward(*tensors, None, *ends, *size, True, 0.0, True)
    assert torch.equal(flash[0], cudnn[0]) and torch.equal(flash[1], cudnn[1])
    given = tensors[0], *tensors, *cudnn[:2]
    right = aten._flash_attention_backward(*given, *ends, *size, 0.0, True, *flash[2:4])
    names = ("philox_seed", "philox_offset", "attn_bias", "cum_seq_q", "cum_seq_k",
             "max_q", "max_k", "dropout_p", "is_causal")  # fmt: skip
    more = (*cudnn[6:8], tensors[0], *ends, *size, 0.0, True)
    found = aten._cudnn_attention_backward(
        *given, **dict(zip(names, more, strict=True))
    )
    for gradient, same in zip(found, right, strict=True):
        assert torch.equal(gradient, same)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float32}, "only support fp16 and bf16 data type"),
        ({"dim": 12}, "head_size must be a multiple of 8"),
        ({"dim": 264}, "only supports head dimension at most 256"),
        ({"heads": 3}, "must divide number of heads in query"),
        ({"offsets": torch.int64}, "cu_seqlens_q must have dtype int32"),
        ({"host": 1}, "Expected all tensors to be on the same device"),
        ({"host": 2}, "'CPU' backend"),  # all of it: PyTorch's own refusal
        ({"lengths": (5, 11)}, "attention to tokens that are not there"),
        ({"card": "T4"}, "only supports Ampere GPUs or newer"),
    ],
    ids=str,
)
def test_what_flash_attention_refuses_of_packed_sequences(change, message):
    if "card" in change:
        simgpu.stop()
        simgpu.start(1, change["card"])
    tensors = {name: change[name] for name in ("dtype", "dim") if name in change}
    tensors = {"dtype": torch.float16, **tensors}
    query = packed(LENGTHS, **tensors)
    key = packed(LENGTHS, **tensors, heads=change.get("heads", 4))
    host = change.get("host", 0)
    ends = offsets(change.get("lengths", LENGTHS), "cpu" if host else "cuda")
    ends = ends.to(change.get("offsets", torch.int32))
    if host == 2:
        query, key = query.cpu(), key.cpu()
    with pytest.raises((RuntimeError, NotImplementedError), match=message):
        torch.ops.aten._flash_attention_forward(
            query, key, key, ends, ends, 11, 11, 0.0, False, False
        )


def test_an_estimate_takes_packed_sequences_for_as_long_as_they_may_be():
    varlen = pytest.importorskip("torch.nn.attention.varlen")

    def step(query, ends):
        out = varlen.varlen_attn(query, query, query, ends, ends, 64, 64)
        out.float().sum().backward()

    with torch.device("meta"):
        query = torch.empty(100, 4, 16, dtype=torch.bfloat16, requires_grad=True)
        ends = torch.empty(4, dtype=torch.int32)
    found = simgpu.estimate(step, query, ends, card="A100")
    query, ends = packed((64, 36)), offsets((64, 36, 0))
    torch.cuda.reset_peak_memory_stats()
    took = dict.fromkeys(found.by_operation, 0.0)
    for event in kernels(lambda: step(query, ends)):
        took[event.name] += event.end - event.start
    for name, of_kernels in found.by_operation.items():
        assert of_kernels.seconds == pytest.approx(took[name])
    assert found.peak_bytes == torch.cuda.max_memory_allocated()
