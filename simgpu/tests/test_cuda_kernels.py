"""What a CPU can and CUDA cannot is refused on a simulated GPU, in CUDA's words."""

import functools
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import rnn

import simgpu
from simgpu import _runtime as state
from simgpu._dispatch.declarations import _declarations
from simgpu._dispatch.without_cuda import LACKING

sys.path.insert(0, str(Path(__file__).parent / "tools"))
import cuda_kernels as tool  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*[Qq]uantiz", "ignore:.*TypedStorage")


@pytest.fixture(scope="module", autouse=True)
def all_gpus():
    simgpu.start(2)
    yield
    simgpu.stop()


@pytest.fixture(autouse=True)
def living_gpus():
    yield
    if state.running.failed:
        simgpu.stop()
        simgpu.start(2)


def ones(*shape, dtype=torch.int64, device="cuda"):
    return torch.ones(shape, dtype=dtype, device=device)


# -- the table -------------------------------------------------------------------------


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs CUDA's kernels")
def test_the_table_says_what_pytorch_for_cuda_has():
    assert tool.differences() == []


def test_the_table_says_what_pytorch_declares():
    """Each operation with a kernel for the CPU alone stands in the table."""
    alone = set()
    for name, entry in _declarations().items():
        keys = set(re.findall(r"\w+", " ".join(re.findall(r"\n    ([\w, ]+):", entry))))
        others = "CompositeExplicit", "CompositeImplicit", "CUDA"
        if "CPU" in keys and not any(key.startswith(others) for key in keys):
            alone.add(f"aten::{name}")
    alone = {name for name in alone if not name.startswith(tool.ELSEWHERE)}
    assert len(alone) > 20
    assert alone <= LACKING["CUDA"]


# -- operations without a kernel -------------------------------------------------------

WITHOUT_KERNEL = {
    "aten::histogram.bin_ct": lambda x: torch.histogram(x, 3),
    "aten::_histogramdd_bin_edges": lambda x: torch.histogramdd(x[:, None], 3),
    "aten::to_mkldnn": lambda x: x.to_mkldnn(),
}


@pytest.mark.parametrize("name", WITHOUT_KERNEL)
def test_an_operation_without_a_kernel_is_refused(name):
    call, x = WITHOUT_KERNEL[name], torch.rand(4)
    call(x)
    words = f"Could not run '{name}' with arguments from the 'CUDA' backend. This could"
    with pytest.raises(NotImplementedError, match=re.escape(words)) as caught:
        call(x.cuda())
    assert f"'{name}' is only available for these backends: [CPU" in str(caught.value)


def quantized(x):
    return torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)


def test_quantized_tensors_are_made_and_read_on_a_gpu():
    x = torch.rand(2, 4, device="cuda")
    q = quantized(x)
    assert q.device.type == "cuda" and q.is_quantized
    assert (q.dequantize() - x).abs().max() <= 0.05001
    assert torch.equal(q.int_repr().cpu(), quantized(x.cpu()).int_repr())
    assert torch.equal(q.cpu().dequantize(), q.dequantize().cpu())
    fake = torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255)
    torch.testing.assert_close(fake, q.dequantize())


OF_QUANTIZED = "' with arguments from the 'QuantizedCUDA'"
QUANTIZED = {
    "quantized::linear" + OF_QUANTIZED: (
        lambda x: torch.ao.nn.quantized.Linear(4, 3)(quantized(x))
    ),
    "quantized::linear_dynamic' with arguments from the 'CUDA'": (
        lambda x: torch.ao.nn.quantized.dynamic.Linear(4, 3)(x)
    ),
    "aten::eq.Scalar_out" + OF_QUANTIZED: lambda x: quantized(x) == 1,
    "aten::max" + OF_QUANTIZED: lambda x: quantized(x).max(),
}


@pytest.mark.parametrize("words", QUANTIZED)
def test_quantized_modules_and_kernels_of_the_cpu_are_refused(words):
    call, x = QUANTIZED[words], torch.rand(2, 4)
    call(x)
    with pytest.raises(NotImplementedError, match=f"Could not run '{words} backend"):
        call(x.cuda())


def test_what_neither_has_for_quantized_tensors_names_cuda():
    x = torch.rand(2, 4, device="cuda")
    with pytest.raises(NotImplementedError, match="'aten::add.out'.*'QuantizedCUDA'"):
        quantized(x) + quantized(x)
    with pytest.raises(NotImplementedError, match="_cuda\" not impl.* for 'QUInt4x2'"):
        torch.quantize_per_tensor(x, 1.0, 0, torch.quint4x2)  # parts of a byte


# -- dtypes ----------------------------------------------------------------------------

# the kernel of CUDA -> calls, of a function that makes integers of a shape
BY_DTYPE = {
    "addmm_cuda": [
        lambda i: i(2, 2) @ i(2, 2),
        lambda i: F.linear(i(2, 2), i(2, 2), i(2)),
        lambda i: i(2, 2).addmm_(i(2, 2), i(2, 2)),
    ],
    "baddbmm_cuda": [
        lambda i: i(1, 2, 2) @ i(1, 2, 2),
        lambda i: torch.einsum("bij,bjk", i(1, 2, 2), i(1, 2, 2)),
    ],
    "addmv_impl_cuda": [lambda i: i(2, 2) @ i(2)],
    "dot": [lambda i: i(2) @ i(2)],
    "slow_conv2d_cuda": [
        lambda i: F.conv2d(i(1, 1, 3, 3), i(1, 1, 2, 2)),
        lambda i: F.conv1d(i(1, 1, 3), i(1, 1, 2)),
    ],
    "slow_conv_transpose2d_out_cuda": [
        lambda i: F.conv_transpose2d(i(1, 1, 3, 3), i(1, 1, 2, 2))
    ],
    "max_pool2d_with_indices_out_cuda_frame": [lambda i: F.max_pool2d(i(1, 4, 4), 2)],
    "avg_pool2d_out_cuda_frame": [lambda i: F.avg_pool2d(i(1, 4, 4), 2)],
}


@pytest.mark.parametrize("kernel", BY_DTYPE)
def test_integers_that_cuda_has_no_code_for_are_refused(kernel):
    for call in BY_DTYPE[kernel]:
        call(functools.partial(ones, device="cpu"))
        words = f"\"{kernel}\" not implemented for 'Long'"
        with pytest.raises(NotImplementedError, match=f"^{re.escape(words)}$"):
            call(ones)


def test_other_dtypes_are_refused_by_their_names():
    names = {torch.bool: "Bool", torch.int8: "Char", torch.uint8: "Byte"}
    for dtype, name in names.items():
        with pytest.raises(NotImplementedError, match=f"addmm_cuda.* for '{name}'"):
            ones(2, 2, dtype=dtype) @ ones(2, 2, dtype=dtype)
    half = ones(2, dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="igamma_cuda.*'Half'"):
        torch.igamma(half, half)
    with pytest.raises(NotImplementedError, match="angle_cuda.*'Half'"):
        half.angle()
    assert ones(2).angle().tolist() == [0, 0]
    image = ones(1, 3, 4, 4, dtype=torch.uint8)
    with pytest.raises(NotImplementedError, match="upsample_bilinear2d_out.*'Byte'"):
        F.interpolate(image, scale_factor=2, mode="bilinear")


def test_an_in_place_product_that_is_refused_changes_nothing():
    x = ones(2, 2)
    with pytest.raises(NotImplementedError):
        x.addmm_(x, x)
    assert x.tolist() == [[1, 1], [1, 1]]


def test_pytorchs_own_checks_come_first():
    with pytest.raises(RuntimeError, match="same dtype"):
        ones(2, 2) @ torch.ones(2, 2, device="cuda")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ones(2, 3) @ ones(2, 3)
    with pytest.raises(RuntimeError, match="same device"):
        ones(2, 2) @ ones(2, 2, device="cpu")


def test_what_cuda_computes_of_integers_runs():
    assert (ones(0, 2) @ ones(2, 2)).shape == (0, 2)  # there is nothing to compute
    assert torch.outer(ones(2), ones(3)).sum() == 6
    assert (ones(2, 2) * ones(2, 2)).cumsum(0).tolist() == [[1, 1], [2, 2]]
    image = ones(1, 3, 4, 4, dtype=torch.uint8)
    assert F.interpolate(image, scale_factor=2).shape == (1, 3, 8, 8)
    x = ones(2, 2, dtype=torch.complex64)
    assert torch.equal((x @ x).cpu(), torch.full((2, 2), 2 + 0j))
    flags = ones(3, dtype=torch.bool)
    assert flags.scatter_reduce(0, ones(3) - 1, flags, "sum").all()


@pytest.mark.parametrize("shuffle", [F.pixel_shuffle, F.pixel_unshuffle])
def test_shuffled_pixels_are_laid_out_as_on_cuda(shuffle):
    x = ones(1, 4, 4, 4, dtype=torch.float32).to(memory_format=torch.channels_last)
    assert shuffle(x, 2).is_contiguous()
    last = torch.channels_last
    assert shuffle(x.cpu(), 2).is_contiguous(memory_format=last)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_what_only_cuda_computes_runs():
    found = torch.histc(torch.tensor([1, 2, 2, 5], device="cuda"), 4, 0, 8)
    assert found.dtype is torch.int64 and found.tolist() == [1, 2, 1, 0]
    x = torch.rand(1, 2, 4, 4, 4)
    for half in (torch.float16, torch.bfloat16):
        y = x.to("cuda", half).requires_grad_()
        pooled = F.avg_pool3d(y, 2)
        assert torch.equal(pooled.float(), F.avg_pool3d(y.float(), 2).to(half).float())
        pooled.sum().backward()
        assert torch.equal(y.grad, torch.full_like(y, 0.125))
    z = torch.tensor([1 + 1j], device="cuda").to(torch.complex32)
    assert torch.sin(z).dtype is torch.complex32
    flags = torch.tensor([True, False], device="cuda")
    assert flags.abs().dtype is torch.bool and flags.abs().tolist() == [True, False]
    assert flags.diag().trace().item() == 1
    assert z.angle().dtype is torch.float16 and z.angle().item() == 0.78515625


def test_cublas_wants_no_setting_for_determinism(monkeypatch):
    """PyTorch no longer asks for CUBLAS_WORKSPACE_CONFIG since 2.11 at the latest."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.use_deterministic_algorithms(True)
    try:
        x = torch.ones(2, 2, device="cuda")
        assert (x @ x).sum() == 8
        assert nn.Linear(2, 2, device="cuda")(x).shape == (2, 2)
    finally:
        torch.use_deterministic_algorithms(False)


# -- recurrent modules by cuDNN --------------------------------------------------------

RECURRENT = pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])


@RECURRENT
def test_pytorch_for_the_cpu_moves_them_to_a_gpu(kind, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn.rnn, "_cudnn", None)  # as it is there
    layer = kind(3, 4).cuda()
    assert layer(torch.ones(2, 3, device="cuda"))[0].shape == (2, 4)


TRAINING = "cudnn RNN backward can only be called in training mode"


def recurrent(kind, **options):
    torch.manual_seed(0)
    module = kind(3, 4, batch_first=True, **options)
    x = torch.randn(2, 5, 3)
    return module.cuda(), x.cuda().requires_grad_()


@RECURRENT
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
@pytest.mark.filterwarnings("error:RNN module weights are not part of")
def test_weights_of_an_rnn_are_one_buffer_and_pytorch_says_if_not(kind, options):
    module, x = recurrent(kind, **options)
    words = "RNN module weights are not part of single contiguous chunk of memory"
    assert len({w.untyped_storage().data_ptr() for w in module.parameters()}) == 1
    expected = module(x)[0]
    module.weight_hh_l0.data = module.weight_hh_l0.data.clone()
    with pytest.warns(UserWarning, match=words) as found:
        assert torch.equal(module(x)[0], expected)
    assert found[0].filename == rnn.__file__
    module.flatten_parameters()
    assert torch.equal(module(x)[0], expected)
    kind(3, 4, batch_first=True, device="cuda", **options)(x)


@RECURRENT
@pytest.mark.parametrize("packed", [False, True])
def test_cudnn_has_no_backward_in_evaluation(kind, packed):
    module, x = recurrent(kind)

    def loss():
        if not packed:
            return module(x)[0].sum()
        lengths = torch.tensor([5, 3])
        sequence = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return module(sequence)[0].data.sum()

    loss().backward()
    module.eval()
    with torch.no_grad():
        loss()
    with pytest.raises(RuntimeError, match=TRAINING):
        loss().backward()
    x.grad = None
    with torch.backends.cudnn.flags(enabled=False):
        loss().backward()
    assert x.grad is not None


@RECURRENT
def test_cudnn_has_no_double_backward(kind):
    module, x = recurrent(kind)

    def penalty():
        (gradient,) = torch.autograd.grad(module(x)[0].sum(), x, create_graph=True)
        return (gradient**2).sum()

    loss = penalty()
    with pytest.raises(NotImplementedError, match="Double backwards is not supported"):
        loss.backward()
    with torch.backends.cudnn.flags(enabled=False):
        penalty().backward()
    assert x.grad.abs().sum() > 0


@RECURRENT
def test_gradients_by_cudnn_are_those_of_the_cpu(kind):
    module, x = recurrent(kind, num_layers=2, bidirectional=True)
    other = kind(3, 4, batch_first=True, num_layers=2, bidirectional=True)
    other.load_state_dict(module.state_dict())
    y = x.detach().cpu().requires_grad_()
    module(x)[0].sum().backward()
    other(y)[0].sum().backward()
    torch.testing.assert_close(x.grad.cpu(), y.grad)
    for a, b in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad)


def test_cudnn_wants_contiguous_states_and_no_batches_of_gradients():
    module, x = recurrent(nn.GRU)
    state = torch.zeros(1, 4, 2, device="cuda").transpose(1, 2)
    with pytest.raises(RuntimeError, match="rnn: hx is not contiguous"):
        module(x, state)
    sums, every = module(x)[0].sum((1, 2)), torch.eye(2, device="cuda")
    with pytest.raises(RuntimeError, match="implemented for aten::_cudnn_rnn_backward"):
        torch.autograd.grad(sums, x, every, is_grads_batched=True)


def test_a_recurrent_module_on_the_host_is_none_of_cudnns():
    module = nn.LSTM(3, 4).eval()
    module(torch.randn(5, 2, 3))[0].sum().backward()
    assert module.weight_hh_l0.grad is not None


# -- asserts on the device -------------------------------------------------------------


def table():
    return torch.arange(12.0, device="cuda").view(3, 4)


INDEX = '&& "index out of bounds"` failed'
ASSERTING = {
    "x[i]": INDEX,
    "x[[7]]": INDEX,
    "x.__setitem__(i, 1.0)": "ndex out of bounds",  # by index_fill_ since 2.15
    "x.gather(0, i[None])": INDEX,
    "x.scatter(0, i[None], 1.0)": INDEX,
    "x.scatter_add(0, i[None], x[:1])": INDEX,
    "F.one_hot(i, 4)": INDEX,
    "F.embedding(i, x)": "vectorized gather kernel index out of bounds",
    "F.embedding_bag(i[None], x)": "input_idx < numRows",
    "x.index_select(0, i)": "vectorized gather kernel index out of bounds",
    "x.index_add(0, i, x[:2])": "dstIndex < dstAddDimSize",
    "x.take(i + 9)": "cuda_take_put_kernel() index out of bounds",
    "F.cross_entropy(x[:2], i)": "t >= 0 && t < n_classes",
    "F.nll_loss(x[:2], -i)": "t >= 0 && t < n_classes",
    "F.binary_cross_entropy(x, x)": "input_val >= zero && input_val <= one",
    "torch.multinomial(-x, 1)": "probability tensor contains either `inf`, `nan` or",
    "torch._assert_async(x[0, 0])": "input[0] != 0",
}


@pytest.mark.parametrize("expression", ASSERTING)
def test_a_kernel_asserts_and_the_next_wait_raises(expression, capfd):
    names = {"x": table(), "i": torch.tensor([0, 9], device="cuda")}
    kept = torch.ones(2, device="cuda")
    eval(expression, globals(), names)  # returns
    said = capfd.readouterr().err
    assert ASSERTING[expression] in said
    assert "simgpu: on cuda:0, " in said and "test_cuda_kernels.py:" in said
    with pytest.raises(torch.AcceleratorError, match="device-side assert") as caught:
        torch.cuda.synchronize()
    assert caught.value.error_code == 710
    host = ones(2, device="cpu")
    for use in (kept.sum, kept.cpu, kept.tolist, kept.__repr__, host.cuda):
        with pytest.raises(torch.AcceleratorError, match="device-side assert"):
            use()
    other = torch.ones(2, device="cuda:1")  # its context is alive
    assert (other + other).sum().item() == 4
    assert not capfd.readouterr().err  # it is said once


def test_the_words_are_cudas():
    table()[torch.tensor([5], device="cuda")]
    with pytest.raises(torch.AcceleratorError) as caught:
        table().cpu()
    assert str(caught.value).split("\n") == [
        "CUDA error: device-side assert triggered",
        "Search for `cudaErrorAssert' in https://docs.nvidia.com/cuda/cuda-runtime-api/"
        "group__CUDART__TYPES.html for more information.",
        "CUDA kernel errors might be asynchronously reported at some other API call, "
        "so the stacktrace below might be incorrect.",
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
        "",
    ]


def test_kernels_are_launched_until_the_host_waits():
    x = table().requires_grad_()
    loss = F.cross_entropy(x, torch.tensor([0, 1, 4], device="cuda"))
    loss.backward()
    torch.optim.SGD([x], 0.1, foreach=False).step()
    with pytest.raises(torch.AcceleratorError):
        loss.item()


def test_a_launch_that_waits_raises_at_the_call(monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    x, i = table(), torch.tensor([7], device="cuda")
    with pytest.raises(torch.AcceleratorError) as caught:
        x[i]
    assert "asynchronously" not in str(caught.value)


def test_another_start_has_gpus_that_are_alive():
    table()[torch.tensor([5], device="cuda")]
    simgpu.stop()
    simgpu.start(2)
    assert table().sum().item() == 66


ON_THE_HOST = {
    "x[7]": "index 7 is out of bounds for dimension 0 with size 3",
    "x[torch.tensor(7)]": "index 7 is out of bounds for dimension 0 with size 3",
    "x.gather(5, i[None])": "Dimension out of range",
    "x.select(0, 3)": "out of range",
    "torch.bincount(-i)": "non-negative",
}


@pytest.mark.parametrize("expression", ON_THE_HOST)
def test_what_cuda_checks_on_the_host_is_an_error_of_the_call(expression, capfd):
    names = {"x": table(), "i": torch.tensor([0, 9], device="cuda")}
    with pytest.raises((IndexError, RuntimeError), match=ON_THE_HOST[expression]):
        eval(expression, globals(), names)
    assert names["x"].sum().item() == 66 and not capfd.readouterr().err


def test_indices_that_are_right_assert_nothing(capfd):
    x, i = table(), torch.tensor([2, -1], device="cuda")
    assert x[i].sum() == 76
    target = torch.tensor([0, -100, 3], device="cuda")  # one of them is ignored
    assert F.cross_entropy(x, target).item() > 0
    assert not capfd.readouterr().err
