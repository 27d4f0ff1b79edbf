"""The errors of a machine with CUDA GPUs, and what the simulator refuses by name."""

import functools
import warnings

import numpy as np  # noqa: F401, for the expressions below
import pytest
import torch
import torch.cuda.nccl
import torch.nn.functional as F  # noqa: F401
from torch import nn  # noqa: F401

import simgpu
from simgpu import _runtime as runtime
from simgpu._api import memory
from simgpu._compat import is_torch

pytestmark = pytest.mark.simulated_gpus(4)


@pytest.fixture
def a():
    return torch.ones(2, 2, device=0)


@pytest.fixture
def b():
    return torch.ones(2, 2)


def message(expression: str, kind=RuntimeError, **names) -> str:
    """What an expression raises."""
    with pytest.raises(kind) as caught:
        eval(expression, globals(), names)
    return str(caught.value)


# -- devices do not mix ----------------------------------------------------------------

TWO = (
    "Expected all tensors to be on the same device, but found at least two devices, "
    "cuda:0 and cpu!"
)
KINDS = "Input type (torch.{}) and weight type (torch.{}) should be the same"
INDICES = (
    "indices should be either on cpu or on the same device as the indexed tensor ({})"
)
GENERATOR = "Expected a '{}' device type for generator but found '{}'"
SAME = ". Please ensure that the gradient and the tensor are on the same device"


def got(argument: str, method: str, its="cpu", others="cuda:0") -> str:
    return (
        "Expected all tensors to be on the same device, but got "
        f"{argument} is on {its}, different from other tensors on {others} "
        f"(when checking argument in method wrapper_CUDA_{method})"
    )


# PyTorch's own words, from the sources of 2.11 to 2.13
WORDS = {
    TWO: [
        "a + b", "b * a", "a.add_(b)", "a == b", "a + torch.ones(1)",
        "F.mse_loss(a, b)", "torch.where(b > 0, a, a.to(1))",
        "torch.add(a, a, out=b)", "b[0, 0].add_(a.sum())", "b[0, 0].eq_(a.sum())",
        "b.__setitem__([0], a[:1])", "a.addcdiv(a, b[0, 0])",
        "F.binary_cross_entropy_with_logits(a, b)",
    ],
    TWO.replace("cpu", "cuda:1"): ["a + a.to(1)", "a + torch.ones((), device=1)"],
    got("mat2", "mm"): ["a @ b"],
    got("mat1", "addmm"): ["torch.addmm(a, b, a)"],
    got("mat1", "addmm", "cuda:0", "cpu"): ["F.linear(a, a, b[0])"],
    got("mat2", "bmm"): ["torch.bmm(a[None], b[None])"],
    got("tensors", "cat"): ["torch.cat([a, b])"],
    got("index", "_index_select"): [
        "F.embedding(b.long(), a)", "torch.index_select(a, 0, b[0].long())",
        "torch.index_select(a, 0, torch.tensor(1))",
    ],
    got("index", "gather"): ["torch.gather(a, 0, b.long())"],
    got("target", "nll_loss_forward"): ["F.cross_entropy(a, b[0].long())"],
    KINDS.format("FloatTensor", "cuda.FloatTensor"): [
        "F.conv2d(b[None, None], a[None, None])",
    ],
    KINDS.format("cuda.FloatTensor", "FloatTensor"): [
        "F.conv2d(a[None, None], b[None, None])",
    ],
    "expected self and mask to be on the same device, but got mask on cpu and self on "
    "cuda:0": ["a.masked_fill(b > 0, 1.0)"],
    got("tensors", "cat_out_out", "cuda:0", "cpu"): ["torch.cat([a, a], out=b)"],
    got("self", "mm_out_out", "cuda:0", "cpu"): ["torch.mm(a, a, out=b)"],
    got("vec", "addmv_out_out"): ["torch.mv(a, b[0])"],
    got("weight", "_cudnn_convolution", "cuda:1"): [
        "F.conv2d(a[None, None], a[None, None].to(1))",
    ],
    got("weight", "_cudnn_convolution_transpose", "cuda:1"): [
        "F.conv_transpose2d(a[None, None], a[None, None].to(1))",
    ],
    got("min", "clamp_Tensor"): ["a.clamp(min=b[0, 0])"],
    got("other", "_equal"): ["torch.equal(a, b[0, 0])"],
    got("other", "logaddexp"): ["torch.logaddexp(a, b[0, 0])"],
    got("imag", "out_complex_out"): ["torch.complex(a, b)"],
    "Expected out tensor to have device cuda:0, but got cpu instead": [
        "torch.sum(a, 0, out=b[0])", "torch.cumsum(a, 0, out=b)",
    ],
    "expected device cuda:0 but got device cpu for value tensor": [
        "a.index_put_((a[0].long() * 0,), b[0], accumulate=True)",
    ],
    "masked_fill_: Expected inputs to be on same device": [
        "b.masked_fill_(b > 0, a[0, 0])",
    ],
    "Trying to pass too many CPU scalars to non-CPU kernel!": [
        "torch.lerp(a, b[0, 0], b[0, 1])",
    ],
    "torch.block_diag: input tensors must all be on the same device. Input 0 is on "
    "device cuda:0 and input 1 is on device cpu": ["torch.block_diag(a, b)"],
    "grid_sampler(): expected input and grid to be on same device, but input is on "
    "cuda:0 and grid is on cpu": [
        "F.grid_sample(a[None, None], torch.zeros(1, 1, 1, 2), align_corners=True)",
    ],
    "meshgrid expects all tensors to have the same device": [
        "torch.meshgrid(a[0], b[0], indexing='ij')",
    ],
    "stft input and window must be on the same device but got self on cuda:0 and "
    "window on cpu": ["torch.stft(a.new_ones(32), 8, window=torch.ones(8))"],
    "quantile() q tensor must be on the same device as the input tensor": [
        "torch.quantile(a, b[0, 0] / 2)", "a.nanquantile(b[0, 0] / 2)",
    ],
    "Expected query, key, and value to have the same device type, but got "
    "query.device: cuda:0 key.device: cpu and value.device: cpu instead.": [
        "F.scaled_dot_product_attention(a[None], b[None], b[None])",
    ],
    INDICES.format("cpu"): ["b[a > 0]"],
    INDICES.format("cuda:0"): ["a[torch.tensor([1], device=1)]"],
    "Input and parameter tensors are not at the same device, found input tensor at cpu "
    "and parameter tensor at cuda:0": [
        "nn.LSTM(2, 2).to(0)(b)", "nn.GRU(2, 2).to(0)(b)",
    ],
    "Input and hidden tensors are not at the same device, found input tensor at cuda:0 "
    "and hidden tensor at cpu": [
        f"nn.{kind}(2, 2).to(0)(a, {hidden})"
        for kind, hidden in (
            ("GRU", "b[:1]"), ("RNN", "b[:1]"), ("LSTM", "(b[:1], b[:1])"),
            ("LSTM", "(a[:1], b[:1])"),
        )
    ],
    got("mat2", "mm", "cuda:0", "cpu"): [
        "b @ a", "nn.GRUCell(2, 2).to(0)(a, b)", "nn.LSTMCell(2, 2).to(0)(a, (b, b))",
    ],
    got("cx", "__thnn_fused_lstm_cell"): ["nn.LSTMCell(2, 2).to(0)(a, (a, b))"],
    GENERATOR.format("cuda", "cpu"): [
        "torch.rand(2, device=0, generator=torch.Generator())",
        "a.normal_(generator=torch.Generator())",
    ],
    GENERATOR.format("cpu", "cuda"): [
        'torch.rand(2, generator=torch.Generator("cuda"))',
    ],
    "legacy constructor expects device type: cpu but device type: cuda was passed": [
        'torch.Tensor([1.0], device=torch.device("cuda"))',
    ],
    "attempting to assign a gradient with device type 'cuda' to a tensor with device "
    "type 'cpu'" + SAME: ['setattr(b, "grad", a)'],
    "attempting to assign a gradient located on device with index '1' to a tensor "
    "located on device with index '0'" + SAME: ['setattr(a, "grad", a.to(1))'],
    "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned": [
        "a.pin_memory()",
    ],
    "cannot pin 'CUDABFloat16Type' only dense CPU tensors can be pinned": [
        "a.bfloat16().pin_memory()",
    ],
    "cannot pin 'CUDABoolType' only dense CPU tensors can be pinned": [
        "a.bool().pin_memory()",
    ],
    "linspace only supports 0-dimensional start and end tensors, but got start with 1 "
    "dimension(s) and end with 0 dimension(s).": [
        "torch.linspace(a[0], a[0, 0], 3)",
        "torch.linspace(a[0], a[0, 0], 3, device=1)",
    ],
    "logspace only supports 0-dimensional start and end tensors, but got end with 1 "
    "dimension(s).": ["torch.logspace(0, a[0], 3, device=0)"],
    "narrow(): length must be non-negative.": ["torch.narrow_copy(a, 1, 0, -1)"],
    "tensor_split expected tensor_indices_or_sections to be on cpu, but it's on "
    "cuda:0": ["torch.tensor_split(a, torch.tensor([1], device=0))"],
}  # fmt: skip


@pytest.mark.parametrize(
    "words, call", [(words, call) for words, calls in WORDS.items() for call in calls]
)
def test_errors_in_pytorchs_words(a, b, call, words):
    assert message(call, a=a, b=b) == words


MIXED = [
    "torch.stack([a, b])", "torch.add(a, a, out=b)", "a.index_add_(0, b[0].long(), a)",
    "a.scatter_(0, b.long() * 0, 1.0)", "torch.masked_select(a, b > 0)",
    "torch.where(a > 0, a, b)", "torch.where(b > 0, a, a)",
    'torch.einsum("ij,jk", a, b)', "torch.dot(a[0], b[0])", "torch.linalg.solve(a, b)",
    "torch.cdist(a, b)", "torch.equal(a, b)", "torch.allclose(a, b)",
    "torch.searchsorted(a[0], b[0])", "torch.bucketize(a, b[0])",
    "F.scaled_dot_product_attention(a[None], b[None], b[None])",
    "torch.lerp(a, b, 0.5)", "torch.addcmul(a, b, b)",
    "F.binary_cross_entropy_with_logits(a, b)", "F.kl_div(a, b)", "torch.normal(a, b)",
    "F.grid_sample(a[None, None], torch.zeros(1, 1, 1, 2))", "a.clamp(min=b)",
    "torch.take(a, b.long())", "torch.isin(a, b)", "torch.kron(a, b)",
    "torch.block_diag(a, b)", "torch.outer(a[0], b[0])",
    "F.embedding_bag(b[0].long(), a, b[0].long() * 0)", "F.nll_loss(a, b[0].long())",
    "F.multi_margin_loss(a, b[0].long())", "a.__setitem__(torch.tensor([0]), b[:1])",
    "nn.Linear(2, 2)(a)", "nn.Linear(2, 2).to(0)(b)", "nn.BatchNorm1d(2).to(0)(b)",
    "nn.LayerNorm(2).to(0)(b)", "nn.GRU(2, 2)(a)",
    "nn.MultiheadAttention(2, 1).to(0)(b, b, b)",
    "a.requires_grad_().mul(2).backward(b)", "torch._foreach_add([a], [b])",
    "torch._foreach_add([a, b], [b, a])",
]  # fmt: skip


@pytest.mark.parametrize("call", MIXED)
@pytest.mark.parametrize("grad", [torch.enable_grad, torch.inference_mode])
def test_devices_do_not_mix(a, b, call, grad):
    with grad():
        message(call, a=a, b=b)


@pytest.mark.parametrize("make, first, words", [
    # the optimizer's default on GPUs, foreach, refuses it before any kernel
    (torch.optim.Adam, "cuda:0", "Tensors of the same index must be on the"),
    (torch.optim.RMSprop, "cuda:0", "Tensors of the same index must be on the"),
    (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), "cpu",
     "found at least two devices"),  # by the kernel
])  # fmt: skip
def test_a_state_on_another_device_than_its_weight_is_refused(make, first, words):
    weight = torch.nn.Parameter(torch.ones(2, device=first))
    weight.grad = torch.ones(2, device=first)
    optimizer = make([weight])
    optimizer.step()
    weight.data, weight.grad = weight.data.to(1), torch.ones(2, device=1)
    with pytest.raises(RuntimeError, match=words):
        optimizer.step()


def test_numpy_needs_the_host(a):
    words = (
        "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy "
        "the tensor to host memory first."
    )
    for call in ("a.numpy()", "np.asarray(a)", "np.add(a, 1)"):
        assert message(call, TypeError, a=a) == words
    assert a.numpy(force=True).sum() == 4


def test_a_gradient_of_another_device_is_refused():
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a * 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient.cpu()

    x = torch.ones(2, device=2, requires_grad=True)
    assert message("Bad.apply(x).sum().backward()", Bad=Bad, x=x) == (
        "Function BadBackward returned an invalid gradient at index 0 - expected "
        "device cuda:2 but got cpu"
    )


TYPE = "hook '{}' has changed the type of value (was torch.{} got torch.{})"
TO_HOST = TYPE.format("<lambda>", "cuda.FloatTensor", "FloatTensor")
TO_OTHER = (
    "Function MulBackward0 returned an invalid gradient at index 0 - expected device "
    "cuda:0 but got cuda:1"
)
ROOT = "invalid gradient at index 0 - expected device cuda:0 but got cpu"
# what is done with x (a leaf), h = 2x and m, a module that has made h -> the words
MOVED = {
    "x.register_hook(lambda g: g.cpu())": TO_HOST,
    "h.register_hook(lambda g: g.cpu())": TO_HOST,
    "h.register_hook(lambda g: g.to(1))": TO_OTHER,
    "h.grad_fn.register_prehook(lambda g: (g[0].to(1),))": TO_OTHER,
    "h.grad_fn.register_prehook(lambda g: (g[0].cpu(),))": TO_HOST,
    "h.grad_fn.register_hook(lambda g, _: (g[0].cpu(), None))": TO_HOST,
    "m.register_full_backward_hook(lambda m, g, _: (g[0].cpu(),))": TYPE.format(
        "hook", "cuda.FloatTensor", "FloatTensor"
    ),
    "h.backward(b)": ROOT,
    "torch.autograd.grad(h, x, b)": ROOT,
}


@pytest.mark.parametrize("what", MOVED)
def test_a_gradient_that_a_hook_moves_is_refused_where_the_engine_does(b, what):
    x = torch.ones(2, 2, device=0, requires_grad=True)
    m, h = nn.Identity(), x * 2

    def run():
        eval(what, globals(), {"x": x, "h": h, "m": m, "b": b})
        m(h).sum().backward()

    assert message("run()", run=run) == MOVED[what]


def test_hooks_that_change_a_gradient_where_it_is_are_silent():
    x = torch.ones(2, device=0, requires_grad=True)
    h = x * 2
    x.register_hook(lambda g: g * 3)
    h.register_hook(lambda g: g.cpu().to(0))
    h.grad_fn.register_hook(lambda g, _: (g[0] + 1, None))
    x.register_post_accumulate_grad_hook(lambda x: seen.append(x.grad.tolist()))
    seen = []
    h.sum().backward()
    assert seen == [[9.0, 9.0]]
    leaf = torch.ones(2, device=0, requires_grad=True)
    leaf.register_hook(lambda g: g.to(1))  # a leaf takes what it is given
    (leaf * 2).sum().backward()
    assert leaf.grad.device == torch.device("cuda:1")


def test_backward_may_begin_with_a_scalar_of_the_host():
    x = torch.zeros((), device=0, requires_grad=True)
    x.sigmoid().backward(torch.tensor(4.0))
    assert (x.grad.item(), x.grad.device.type) == (1.0, "cuda")


def test_host_gradients_do_not_join_gpus():
    """What C++ makes in a backward on the host stays on the host."""
    x = torch.ones(4, requires_grad=True)
    x.chunk(2)[0].sum().backward()
    assert message("x.grad + torch.ones(4, device=0)", x=x) == TWO
    assert x.grad.device.type == "cpu"


# -- GPUs that are not there -----------------------------------------------------------


ABSENT = [
    'torch.zeros(1, device="cuda:4")', "torch.zeros(1).cuda(4)", "torch.zeros(1).to(4)",
    "nn.Linear(1, 1).to(4)", "torch.tensor(1, device=4)", "torch.cuda.set_device(4)",
    "torch.cuda.device(4).__enter__()", "torch.cuda.synchronize(4)",
]  # fmt: skip


@pytest.mark.parametrize("call", ABSENT)
def test_ordinals_that_do_not_exist(call):
    words = message(call, torch.AcceleratorError).split("\n")
    assert words[:2] == [
        "CUDA error: invalid device ordinal",
        "GPU device may be out of range, do you have enough GPUs?",
    ]
    assert words[-2:] == [
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.", "",
    ]  # fmt: skip
    late = "CUDA kernel errors might be asynchronously reported"
    assert words[2].startswith(late) == (not is_torch((2, 13)))
    assert ("CUDA_LOG_FILE=stderr" in words[2]) == is_torch((2, 13))


@pytest.mark.parametrize("call, kind, words", [
    ("get_device_properties(4)", AssertionError, "Invalid device id"),
    ("get_device_name(4)", AssertionError, "Invalid device id"),
    ("memory_allocated(4)", RuntimeError, "Invalid device argument 4: did you cal"),
    ("set_device('cpu')", ValueError, "Expected a cuda device, but got: cpu"),
    ("get_rng_state(4)", IndexError, "tuple index out of range"),
    ("get_device_capability(-2)", AssertionError, "Invalid device id"),
    ("can_device_access_peer(0, 4)", AssertionError, "Invalid peer device id"),
    ("set_device('cuda')", ValueError, "specified index or an integer, but got:cu"),
])  # fmt: skip
def test_queries_check_their_index(call, kind, words):
    assert words in message(f"torch.cuda.{call}", kind)


# -- what is not simulated -------------------------------------------------------------

REFUSED = {
    "torch.cuda.cudart().cudaMalloc(4)": "torch.cuda.cudart().cudaMalloc",
    "torch.cuda.caching_allocator_enable(False)": "caching_allocator_enable(False)",
    "torch._C._cuda_tunableop_enable(True)": "_cuda_tunableop_enable",
    "torch.cuda.MemPool(use_on_oom=True)": "torch.cuda.MemPool(use_on_oom=...)",
    "torch.cuda.nccl.init_rank(2, b'', 0)": "torch.cuda.nccl.init_rank",
    "torch.cuda.nccl.all_reduce([torch.ones(1)], comms=[None])": "communicators of",
    "torch.from_dlpack(torch.ones(1, device=0))": "DLPack",
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_is_not_simulated_says_so(call):
    words = message(call, simgpu.NotSimulated)
    assert REFUSED[call] in words and "not simulated" in words


def test_a_warning_points_at_the_programs_line(a):
    """Also one that C++ raises, and each line warns for itself."""
    grid = torch.zeros(1, 1, 1, 2, device=0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        F.grid_sample(a[None, None], grid)
        F.grid_sample(a[None, None], grid)
        torch.ones(1, 1, 1, device=0).T  # noqa: B018
    lines = [warning.lineno for warning in seen]
    assert {warning.filename for warning in seen} == {__file__}
    assert len(seen) == 3 and lines == sorted(set(lines))


@pytest.mark.parametrize(
    "module",
    [torch.cuda, torch.cuda.memory, torch.accelerator, torch.accelerator.memory],
)
def test_every_public_call_is_answered_or_refused(module):
    replaced = {(owner, name) for owner, name, _ in runtime.running.patches._undo}
    kept = {
        "CudaError", "DeferredCudaCallError", "check_error", "cudaStatus", "has_half",
        "has_magma", "is_tf32_supported", "ipc_collect", "device", "device_of",
        "stream", "StreamContext", "current_blas_handle", "current_solver_handle",
        "get_stream_from_external", "get_sync_debug_mode", "set_sync_debug_mode",
        "get_gencode_flags", "list_gpu_processes", "device_memory_used",
        "memory_usage", "utilization", "clock_rate", "power_draw", "temperature",
        "graph", "make_graphed_callables",
        *memory.KEPT,  # PyTorch's own, over what `C_FUNCTIONS` answers
    }  # fmt: skip
    open_ends = {
        name
        for name in module.__all__
        if callable(getattr(module, name))
        and not name.endswith("Storage")  # legacy; they fail loudly in PyTorch's code
        and (module, name) not in replaced
    }
    # legacy tensor types of dtypes that CUDA has no such type for are PyTorch's own
    assert {name for name in open_ends if not name.endswith("Tensor")} <= kept
