"""torch.autocast("cuda") on simulated GPUs: CUDA's lists, the cache, the scaler."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import simgpu
from simgpu._api import autocast, autocast_lists
from support.limits import SHORT


@pytest.fixture(autouse=True)
def log():
    simgpu.start(2)
    yield simgpu.timeline()
    simgpu.stop()


# -- CUDA's lists ----------------------------------------------------------------------


def names_in_header(macro: str) -> set[str]:
    """The operations that ATen/autocast_mode.h has in one of its lists."""
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    text = header.read_text(encoding="utf-8")
    body = re.search(rf"#define AT_FORALL_{macro}\(_\)(.*?)\n\n", text, re.DOTALL)[1]
    return {entry.replace(", ", ".") for entry in re.findall(r"_\(([^)]*)\)", body)}


def registered() -> set[str]:
    """What PyTorch has a kernel for, such as "mm"."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    return {name.removeprefix("aten::") for name in names}


def without_named_tensors(names: set[str]) -> set[str]:
    """torch 2.11 still has overloads for tensors with named dimensions."""
    return {name for name in names if not re.search("dimname|names_", name.lower())}


@pytest.mark.parametrize("macro, ours", [
    ("LOWER_PRECISION_FP", autocast_lists.LOWER_PRECISION),
    ("FP32", autocast_lists.FLOAT32),
    ("FP32_SET_OPT_DTYPE", autocast_lists.FLOAT32_RESULT),
    ("PROMOTE", autocast_lists.WIDEST),
])  # fmt: skip
def test_the_lists_are_pytorchs(macro, ours):
    listed = set(ours) & registered()
    assert listed == without_named_tensors(names_in_header(macro))
    if torch.__version__.startswith("2.13"):
        assert listed == set(ours)


def test_nothing_else_is_registered_with_pytorch():
    ours = {name for names in autocast._KERNELS.values() for name in names}
    left = without_named_tensors(registered() - ours)
    assert left <= {"_cudnn_rnn"}  # of PyTorch built for CUDA; called by nobody here


# x, y: float32; h: x @ y
IN_LOWER_PRECISION = [
    "h", "torch.einsum('ij,jk->ik', x, y)", "F.linear(x, y)", "F.gelu(h)", "h + 1",
    "nn.Conv2d(3, 2, 3).cuda()(image)", "torch.dot(h[0], h[1])",
    "F.scaled_dot_product_attention(seq, seq, seq)", "nn.LSTM(4, 3).cuda()(seq)[0]",
    "nn.GRU(4, 3).cuda()(seq)[0]", "nn.LSTMCell(4, 3).cuda()(x)[0]",
    "nn.RNN(4, 3, nonlinearity='relu').cuda()(seq)[0]",
    "nn.MultiheadAttention(4, 2).cuda()(seq, seq, seq)[0]",
    "h.sum(dtype=h.dtype)", "F.softmax(h, 1, dtype=h.dtype)",  # the program says so
]  # fmt: skip
IN_FLOAT32 = [
    "F.softmax(h, 1)", "F.log_softmax(h, 1)", "h.exp()", "h.sum()", "h.cumsum(0)",
    "h.norm()", "h.norm(2, 0)", "F.layer_norm(h, (4,))", "F.mse_loss(h, y)", "h.pow(2)",
    "F.cross_entropy(h, torch.zeros(4, dtype=torch.long, device=0))", "h + x",
    "torch.dot(h[0], x[0])", "nn.BatchNorm1d(4).cuda()(x)", "x.cpu() @ x.cpu()",
]  # fmt: skip


@pytest.mark.skipif(
    not hasattr(torch.linalg, "matrix_sqrth"), reason="since torch 2.14"
)
def test_the_square_root_of_a_matrix_is_in_float32():
    x = torch.eye(3, device=0, dtype=torch.bfloat16)
    with torch.autocast("cuda"):
        assert torch.linalg.matrix_sqrth(x).dtype is torch.float32


@pytest.mark.parametrize("lower", [torch.float16, torch.bfloat16])
def test_which_operation_gives_which_type(lower):
    x, y = torch.rand(4, 4, device=0), torch.rand(4, 4, device=0)
    names = {"x": x, "y": y, "seq": torch.rand(5, 2, 4, device=0)}
    names["image"] = torch.rand(2, 3, 8, 8, device=0)
    with torch.autocast("cuda", dtype=lower):
        names["h"] = x @ y
        for dtype, calls in ((lower, IN_LOWER_PRECISION), (torch.float32, IN_FLOAT32)):
            for call in calls:
                assert eval(call, globals(), names).dtype is dtype, call
        assert (x.double() @ y.double()).dtype is torch.float64
        assert not torch.is_autocast_enabled("cpu")
        with torch.autocast("cuda", enabled=False):
            assert (x @ y).dtype is torch.float32
        x, y = x.to(1), y.to(1)
        product = x @ y
    assert (x @ y).dtype is torch.float32
    assert product.device == x.device
    assert torch.equal(product, x.to(lower) @ y.to(lower))


def test_types_that_cannot_be_promoted_and_keywords():
    x = torch.ones(4, device=0)
    with torch.autocast("cuda"):
        with pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
            torch.dot(x.bfloat16(), x.bfloat16())
        assert torch.ops.aten.norm.Scalar(x.half()).item() == 2
        torch.set_autocast_enabled(device_type="cuda", enabled=False)
        assert x.view(2, 2).mm(x.view(2, 2)).dtype is torch.float32


def test_unsafe_loss_is_refused():
    p = torch.rand(4, device=0)
    with torch.autocast("cuda"):
        with pytest.raises(RuntimeError, match="unsafe to autocast.*_with_logits"):
            F.binary_cross_entropy(p, p)
        assert F.binary_cross_entropy(p.cpu(), p.cpu()).item() > 0
    assert F.binary_cross_entropy(p, p).item() > 0


@pytest.mark.parametrize("card, dtype, faster", [
    ("A100", torch.bfloat16, True), ("T4", torch.float16, True),
    ("T4", torch.bfloat16, False),  # it has no units for it
])  # fmt: skip
def test_products_in_half_are_as_fast_as_the_card_says(card, dtype, faster):
    simgpu.stop()
    simgpu.start(1, card)
    x = torch.ones(1024, 1024, device=0)
    with torch.autocast("cuda", dtype=dtype):
        x @ x
    x @ x
    fast, slow = (e.end - e.start for e in simgpu.timeline().events if e.flops)
    assert fast < slow / 5 if faster else fast == pytest.approx(slow, rel=0.02)


# -- the cache -------------------------------------------------------------------------


def casts(log) -> int:
    return sum(event.name == "_to_copy" for event in log.events)


def test_weights_are_cast_once_a_region(log):
    layer, x = nn.Linear(8, 8).cuda(), torch.rand(4, 8, device=0)
    log.clear()
    with torch.autocast("cuda"):
        layer(x), layer(x)
        assert casts(log) == 2 + 2  # weight and bias; x twice
    with torch.autocast("cuda"):
        layer(x)
    assert casts(log) == 4 + 3
    with torch.autocast("cuda", cache_enabled=False):
        layer(x), layer(x)
    assert casts(log) == 7 + 6


def test_the_cache_gives_its_memory_back():
    layer, x = nn.Linear(512, 512).cuda(), torch.rand(4, 512, device=0)
    layer(x)  # cuBLAS has its workspace
    before = torch.cuda.memory_allocated(0)
    with torch.autocast("cuda"), torch.no_grad():
        layer(x)
        assert torch.cuda.memory_allocated(0) >= before + 512 * 512 * 2
    assert torch.cuda.memory_allocated(0) == before


def test_a_changed_weight_is_not_taken_for_the_old_one():
    x = torch.eye(4, device=0)
    with torch.autocast("cuda"):
        for value in (1.0, 2.0, 3.0):  # the same address each time
            w = torch.full((4, 4), value, device=0, requires_grad=True)
            assert (x @ w)[0, 0].item() == value
            del w


# What the cache keeps must not depend on how it was first asked for: as on the CPU,
# where PyTorch's own code does the same.


def first_without_gradients(net, x):
    with torch.no_grad():
        net(x)
    return net(x)


def first_in_inference_mode(net, x):
    with torch.inference_mode():
        net(x.clone())
    return net(x)


def checkpointed(net, x):
    return checkpoint(net, x, use_reentrant=True)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient @ w.t(), x.t() @ gradient


def through_a_function(net, x):
    w = net[0].weight
    return Product.apply(x, w) + x @ w


@pytest.mark.parametrize("work", [
    first_without_gradients, first_in_inference_mode, checkpointed, through_a_function
])  # fmt: skip
def test_gradients_are_those_of_autocast_on_the_cpu(work):
    found = []
    for kind, device in (("cpu", "cpu"), ("cuda", "cuda:1")):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
        x = torch.linspace(0, 1, 16).view(4, 4).to(device).requires_grad_()
        with torch.autocast(kind, dtype=torch.bfloat16):
            work(net, x).sum().backward()
        found.append([parameter.grad for parameter in net.parameters()])
    for theirs, mine in zip(*found, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine.cpu(), theirs, rtol=0.02, atol=0)


def test_training_with_the_scaler_skips_a_step_that_overflows():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(1)
    x, y = torch.rand(32, 8, device=1), torch.rand(32, 1, device=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**30)
    losses, scales = [], []
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert scales[0] == 2.0**29 and losses[1] == losses[0]  # the first was skipped
    assert scales[-1] == scales[-2] and losses[-1] < losses[0] / 2


# -- regions, threads, stop() ----------------------------------------------------------


def test_each_thread_has_its_own_region():
    simgpu.stop()  # no thread has entered a region of these
    simgpu.start(2)
    x, together = torch.rand(4, 4, device=0), threading.Barrier(4)

    def work(_):
        before = (x @ x).dtype
        together.wait(SHORT)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return before, (x @ x).dtype

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(4)))
    assert found == [(torch.float32, torch.bfloat16)] * 4
    assert (x @ x).dtype is torch.float32
    with torch.autocast("cuda"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: (x @ x).dtype).result() is torch.float32
        assert (x @ x).dtype is torch.float16


def test_stop_gives_pytorchs_kernels_back():
    with torch.autocast("cuda"):
        torch.ones(2, 2, device=0) @ torch.ones(2, 2, device=0)
        simgpu.stop()
        x = torch.ones(2, 2)
        assert (x @ x).dtype is torch.float32
        assert F.binary_cross_entropy(x, x).item() == 0
        simgpu.start(1)  # the region holds for the next
        assert (x.cuda() @ x.cuda()).dtype is torch.float16
        simgpu.stop()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
    simgpu.start(2)
    with torch.autocast("cuda"):
        assert (x.cuda() @ x.cuda()).dtype is torch.float16
