"""The errors of a machine with CUDA GPUs, and what the simulator refuses by name."""

import numpy as np
import pytest
import torch
import torch.cuda.nccl
import torch.nn.functional as F
from torch import nn

from helpers import simgpu

TWO = (
    "Expected all tensors to be on the same device, but found at least two devices, "
    "cuda:0 and cpu!"
)


@pytest.fixture(autouse=True)
def gpus():
    simgpu.start(4)
    yield
    simgpu.stop()


@pytest.fixture
def a():
    return torch.ones(2, 2, device=0)


@pytest.fixture
def b():
    return torch.ones(2, 2)


def message(call, kind=RuntimeError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def got(argument: str, method: str, its="cpu", others="cuda:0") -> str:
    return (
        "Expected all tensors to be on the same device, but got "
        f"{argument} is on {its}, different from other tensors on {others} "
        f"(when checking argument in method wrapper_CUDA_{method})"
    )


# PyTorch's own words, from the sources of 2.11 to 2.13
WORDS = [
    (lambda a, b: a + b, TWO),
    (lambda a, b: b * a, TWO),
    (lambda a, b: a.add_(b), TWO),
    (lambda a, b: a == b, TWO),
    (lambda a, b: F.mse_loss(a, b), TWO),
    (lambda a, b: a + a.to(1), TWO.replace("cpu", "cuda:1")),
    (lambda a, b: a @ b, got("mat2", "mm")),
    (lambda a, b: b @ a, got("mat2", "mm", "cuda:0", "cpu")),
    (lambda a, b: torch.addmm(a, b, a), got("mat1", "addmm")),
    (lambda a, b: F.linear(a, a, b[0]), got("mat1", "addmm", "cuda:0", "cpu")),
    (lambda a, b: torch.bmm(a[None], b[None]), got("mat2", "bmm")),
    (lambda a, b: torch.cat([a, b]), got("tensors", "cat")),
    (lambda a, b: F.embedding(b.long(), a), got("index", "_index_select")),
    (
        lambda a, b: torch.index_select(a, 0, b[0].long()),
        got("index", "_index_select"),
    ),
    (lambda a, b: torch.gather(a, 0, b.long()), got("index", "gather")),
    (
        lambda a, b: F.cross_entropy(a, b[0].long()),
        got("target", "nll_loss_forward"),
    ),
    (
        lambda a, b: F.conv2d(b[None, None], a[None, None]),
        "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) "
        "should be the same",
    ),
    (
        lambda a, b: F.conv2d(a[None, None], b[None, None]),
        "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) "
        "should be the same",
    ),
    (
        lambda a, b: a.masked_fill(b > 0, 1.0),
        "expected self and mask to be on the same device, but got mask on cpu and "
        "self on cuda:0",
    ),
    (
        lambda a, b: b[a > 0],
        "indices should be either on cpu or on the same device as the indexed tensor "
        "(cpu)",
    ),
    (
        lambda a, b: nn.LSTM(2, 2).to(0)(b),
        "Input and parameter tensors are not at the same device, found input tensor "
        "at cpu and parameter tensor at cuda:0",
    ),
    (
        lambda a, b: torch.rand(2, device=0, generator=torch.Generator()),
        "Expected a 'cuda' device type for generator but found 'cpu'",
    ),
    (
        lambda a, b: a.normal_(generator=torch.Generator()),
        "Expected a 'cuda' device type for generator but found 'cpu'",
    ),
    (
        lambda a, b: torch.rand(2, generator=torch.Generator("cuda")),
        "Expected a 'cpu' device type for generator but found 'cuda'",
    ),
    (
        lambda a, b: torch.Tensor([1.0], device=torch.device("cuda")),
        "legacy constructor expects device type: cpu but device type: cuda was passed",
    ),
    (
        lambda a, b: setattr(b, "grad", a),
        "attempting to assign a gradient with device type 'cuda' to a tensor with "
        "device type 'cpu'. Please ensure that the gradient and the tensor are on the "
        "same device",
    ),
    (
        lambda a, b: setattr(a, "grad", a.to(1)),
        "attempting to assign a gradient located on device with index '1' to a tensor "
        "located on device with index '0'. Please ensure that the gradient and the "
        "tensor are on the same device",
    ),
    (
        lambda a, b: a.pin_memory(),
        "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned",
    ),
    (
        lambda a, b: torch.tensor_split(a, torch.tensor([1], device=0)),
        "tensor_split expected tensor_indices_or_sections to be on cpu, but it's on "
        "cuda:0",
    ),
]


@pytest.mark.parametrize("call, words", WORDS)
def test_errors_in_pytorchs_words(a, b, call, words):
    assert message(lambda: call(a, b)) == words


MIXED = [
    lambda a, b: torch.stack([a, b]),
    lambda a, b: torch.add(a, a, out=b),
    lambda a, b: a.index_add_(0, b[0].long(), a),
    lambda a, b: a.scatter_(0, b.long() * 0, 1.0),
    lambda a, b: torch.masked_select(a, b > 0),
    lambda a, b: torch.where(a > 0, a, b),
    lambda a, b: torch.where(b > 0, a, a),
    lambda a, b: torch.einsum("ij,jk", a, b),
    lambda a, b: torch.dot(a[0], b[0]),
    lambda a, b: torch.linalg.solve(a, b),
    lambda a, b: torch.cdist(a, b),
    lambda a, b: torch.equal(a, b),
    lambda a, b: torch.allclose(a, b),
    lambda a, b: torch.searchsorted(a[0], b[0]),
    lambda a, b: torch.bucketize(a, b[0]),
    lambda a, b: F.scaled_dot_product_attention(a[None], b[None], b[None]),
    lambda a, b: torch.lerp(a, b, 0.5),
    lambda a, b: torch.addcmul(a, b, b),
    lambda a, b: F.binary_cross_entropy_with_logits(a, b),
    lambda a, b: F.kl_div(a, b),
    lambda a, b: torch.normal(a, b),
    lambda a, b: F.grid_sample(a[None, None], torch.zeros(1, 1, 1, 2)),
    lambda a, b: a.clamp(min=b),
    lambda a, b: torch.take(a, b.long()),
    lambda a, b: torch.isin(a, b),
    lambda a, b: torch.kron(a, b),
    lambda a, b: torch.block_diag(a, b),
    lambda a, b: torch.outer(a[0], b[0]),
    lambda a, b: F.embedding_bag(b[0].long(), a, b[0].long() * 0),
    lambda a, b: F.nll_loss(a, b[0].long()),
    lambda a, b: F.multi_margin_loss(a, b[0].long()),
    lambda a, b: a.__setitem__(torch.tensor([0]), b[:1]),
    lambda a, b: nn.Linear(2, 2)(a),
    lambda a, b: nn.Linear(2, 2).to(0)(b),
    lambda a, b: nn.BatchNorm1d(2).to(0)(b),
    lambda a, b: nn.LayerNorm(2).to(0)(b),
    lambda a, b: nn.GRU(2, 2)(a),
    lambda a, b: nn.MultiheadAttention(2, 1).to(0)(b, b, b),
    lambda a, b: a.requires_grad_().mul(2).backward(b),
    lambda a, b: torch._foreach_add([a], [b]),
]


@pytest.mark.parametrize("call", MIXED)
def test_devices_do_not_mix(a, b, call):
    message(lambda: call(a, b))


@pytest.mark.parametrize("call", MIXED[:30])
def test_devices_do_not_mix_in_inference_mode(a, b, call):
    with torch.inference_mode():
        message(lambda: call(a, b))


def test_numpy_needs_the_host(a):
    words = (
        "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy "
        "the tensor to host memory first."
    )
    for call in (a.numpy, lambda: np.asarray(a), lambda: np.add(a, 1)):
        assert message(call, TypeError) == words
    assert a.numpy(force=True).sum() == 4


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.zeros(1, device="cuda:4"),
        lambda: torch.zeros(1).cuda(4),
        lambda: torch.zeros(1).to(4),
        lambda: nn.Linear(1, 1).to(4),
        lambda: torch.tensor(1, device=4),
        lambda: torch.cuda.set_device(4),
        lambda: torch.cuda.device(4).__enter__(),
        lambda: torch.cuda.synchronize(4),
    ],
)
def test_ordinals_that_do_not_exist(call):
    words = message(call, torch.AcceleratorError)
    assert words.startswith("CUDA error: invalid device ordinal\n")


def test_queries_check_their_index():
    for query in (torch.cuda.get_device_properties, torch.cuda.get_device_name):
        assert message(lambda q=query: q(4), AssertionError) == "Invalid device id"
    assert message(lambda: torch.cuda.memory_allocated(4)) == (
        "Invalid device argument 4: did you call init?"
    )
    assert "Expected a cuda device, but got: cpu" in message(
        lambda: torch.cuda.set_device("cpu"), ValueError
    )
    assert "with a specified index or an integer, but got:cuda" in message(
        lambda: torch.cuda.set_device("cuda"), ValueError
    )


def test_a_gradient_of_another_device_is_refused():
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a * 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient.cpu()

    x = torch.ones(2, device=2, requires_grad=True)
    assert message(lambda: Bad.apply(x).sum().backward()) == (
        "Function BadBackward returned an invalid gradient at index 0 - expected "
        "device cuda:2 but got cpu"
    )


def test_host_gradients_do_not_join_gpus():
    """What C++ makes in a backward on the host stays on the host."""
    x = torch.ones(4, requires_grad=True)
    x.chunk(2)[0].sum().backward()
    assert message(lambda: x.grad + torch.ones(4, device=0)) == TWO
    assert x.grad.device.type == "cpu"


REFUSED = {
    "torch.cuda.CUDAGraph": lambda: torch.cuda.CUDAGraph(),
    "torch.cuda.graph": lambda: torch.cuda.graph(None),
    "torch.cuda.utilization": lambda: torch.cuda.utilization(),
    "torch.cuda.cudart": lambda: torch.cuda.cudart(),
    "torch.compile": lambda: torch.compile(nn.Linear(1, 1)),
    "torch.cuda.nccl.all_reduce": lambda: torch.cuda.nccl.all_reduce([]),
    "DLPack": lambda: torch.from_dlpack(torch.ones(1, device=0)),
    "sharing": lambda: torch.ones(1, device=0).untyped_storage()._share_cuda_(),
    "torch.cuda.FloatTensor": lambda: torch.cuda.FloatTensor(2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_simulated_says_so(name):
    words = message(REFUSED[name], simgpu.NotSimulated)
    assert name in words and "not simulated" in words


def test_nothing_of_torch_cuda_falls_through():
    """Every public call is answered, kept on purpose, or refused by name."""
    from helpers.simgpu import cuda_api

    for name in torch.cuda.__all__:
        value = getattr(torch.cuda, name, None)
        if not callable(value) or name in cuda_api._KEPT:
            continue
        if name.endswith("Storage"):  # legacy; they fail loudly in PyTorch's own code
            continue
        ours = value.__module__.startswith("helpers.simgpu")
        assert ours or name.endswith("Tensor"), name
