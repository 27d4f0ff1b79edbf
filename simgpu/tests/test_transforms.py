"""PyTorch's transformations of programs on simulated GPUs.

`torch.func`, FakeTensors, `torch.export`, `make_fx`, custom operations, subclasses and
nested tensors: each gives what the CPU gives, on the GPU, or what CUDA would say.
"""

import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils._pytree import tree_leaves

import simgpu
from simgpu._errors import NotSimulated

pytestmark = pytest.mark.simulated_gpus(2)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def rand(*shape) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)))


# -- torch.func ------------------------------------------------------------------------


def per_sample_gradients(device):
    net, x, y = model().to(device), rand(6, 4).to(device), torch.arange(6) % 3
    weights = {name: p.detach() for name, p in net.named_parameters()}

    def loss(weights, x, y):
        return F.cross_entropy(functional_call(net, weights, (x[None],)), y[None])

    return vmap(grad(loss), (None, 0, 0))(weights, x, y.to(device))


def ensemble(device):
    nets = [model().to(device) for _ in range(3)]
    weights, buffers = stack_module_state(nets)
    base = model().to("meta")

    def run(weights, buffers, x):
        return functional_call(base, (weights, buffers), (x,))

    return vmap(run, (0, 0, None))(weights, buffers, rand(5, 4).to(device))


def jacobians(device):
    net, x = model().to(device), rand(2, 4).to(device)
    out, pull = vjp(net, x)
    functional = torch.autograd.functional
    return [
        jacrev(net)(x), jacfwd(net)(x), hessian(lambda x: net(x).sum())(x),
        out, pull(torch.ones_like(out)), jvp(net, (x,), (torch.ones_like(x),)),
        vmap(jacrev(net))(x), functional.jacobian(net, x, vectorize=True),
    ]  # fmt: skip


def with_numbers(device):
    """A number becomes a tensor of C++ before it meets a batch."""
    x = rand(5, 3).to(device)
    one = [lambda a: a * 2, lambda a: 1 - a, lambda a: 2**a, lambda a: a / 3 + 1]
    return [vmap(f)(x) for f in one] + [vmap(vmap(f))(x) for f in one]


def exported_saved_and_loaded(device):
    net, x = model().to(device), rand(5, 4).to(device)
    file = io.BytesIO()
    torch.export.save(torch.export.export(net, (x,)), file)
    file.seek(0)
    return torch.export.load(file).module()(x)


def traced_gradient(device):
    net, x = model().to(device), rand(5, 4).to(device)
    return make_fx(grad(lambda x: net(x).sum()))(x)(x)


def causal_bias(device):
    query, key = rand(1, 2, 5, 8).to(device).requires_grad_(), rand(1, 2, 7, 8)
    key, found = key.to(device), []
    for bias in (causal_lower_right, causal_upper_left):
        out = F.scaled_dot_product_attention(query, key, key, attn_mask=bias(5, 7))
        found += [out, *torch.autograd.grad(out.sum(), query)]
    return found


def nested_tensors(device):
    a, b = rand(2, 4).to(device), rand(3, 4).to(device)
    strided = torch.nested.nested_tensor([a, b])
    jagged = torch.nested.nested_tensor([a, b], layout=torch.jagged)
    moved = torch.nested.nested_tensor([a.cpu(), b.cpu()], layout=torch.jagged)
    moved = moved.to(device)
    assert moved.cpu().device.type == "cpu"
    layer = nn.Linear(4, 2)
    nn.init.constant_(layer.weight, 0.5)
    nn.init.zeros_(layer.bias)
    return [
        strided.to_padded_tensor(0.0), (strided + strided).to_padded_tensor(0.0),
        (jagged * 2).values(), moved.values(), moved.offsets(), strided.unbind(),
        layer.to(device)(jagged).values(),
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", [
    per_sample_gradients, ensemble, jacobians, with_numbers, exported_saved_and_loaded,
    traced_gradient, causal_bias, nested_tensors,
])  # fmt: skip
def test_a_program_gives_on_a_gpu_what_it_gives_on_the_cpu(function):
    """`function(device)` gives on a GPU what it gives on the CPU."""
    expected, found = (
        [t for t in tree_leaves(function(device)) if isinstance(t, torch.Tensor)]
        for device in ("cpu", "cuda:1")
    )
    assert len(expected) == len(found) > 0
    for a, b in zip(expected, found, strict=True):
        assert str(b.device) == "cuda:1"
        torch.testing.assert_close(b.detach().cpu(), a.detach())


# -- FakeTensors -----------------------------------------------------------------------


def test_fake_tensors_have_devices_and_take_no_memory():
    with FakeTensorMode():
        layer = nn.Linear(4, 2, device="cuda")
        x = torch.zeros(3, 4, device="cuda")
        made = [
            layer(x), torch.tensor([1, 2], device="cuda"), x.to("cpu").to("cuda"),
            x.cpu().cuda(), torch.arange(3, device="cuda"), x.to(torch.float64),
            torch.as_tensor([1.0], device="cuda"), x.new_zeros(2),
            nn.TransformerEncoderLayer(8, 2, 16, device="cuda")(
                torch.zeros(2, 3, 8, device="cuda")
            ),
        ]  # fmt: skip
        assert {str(t.device) for t in made} == {"cuda:0"}
        assert x.cpu().device.type == "cpu" and x.to("cuda:1").get_device() == 1
        assert type(torch.ones(2) + 1).__name__ == type(x * 2).__name__ == "FakeTensor"
        with pytest.raises(RuntimeError, match="two (different )?devices"):
            x + torch.zeros(3, 4)
    assert torch.cuda.memory_allocated() == 0


def test_a_tensor_becomes_fake_and_stays_on_its_gpu():
    net, x = model().cuda(), rand(3, 4).cuda()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        y = net(mode.from_tensor(x))
    assert str(y.device) == "cuda:0" and y.shape == (3, 3)


def test_what_would_end_the_process_by_a_fake_tensor_is_refused_before():
    with FakeTensorMode():
        loss = nn.Linear(2, 2, device="cuda")(torch.ones(1, 2, device="cuda")).sum()
        with pytest.raises(NotSimulated, match="FakeTensor"):
            loss.backward()
        with pytest.raises(NotSimulated, match="aten.geqrf"):  # which wants CUDA
            torch.geqrf(torch.zeros(3, 3, device="cuda"))
    traced = aot_function(lambda x: x.sin().sum(), fw_compiler=lambda graph, _: graph)
    with pytest.raises(NotSimulated, match="FakeTensor"):  # a joint trace
        traced(rand(3).cuda().requires_grad_())


def test_no_device_guard_of_ours_stays_behind():
    from simgpu._api import fake_tensors

    guards = fake_tensors._device_guards()
    assert guards[1] == guards[0]
    simgpu.stop()
    own = guards[1]  # none, in a build without CUDA
    assert own != guards[0] and bool(own) == torch.backends.cuda.is_built()


# -- torch.export, make_fx -------------------------------------------------------------


class Devices(nn.Module):
    """Makes and moves tensors in all ways that name a device."""

    def forward(self, x):
        return (
            x.to("cpu"), x.cpu(), x.double(), x.to("cuda:1"), x.half(),
            torch.zeros(2, device=x.device), torch.zeros_like(x), torch.zeros(2),
            x.new_zeros(2), x.new_zeros(2, device="cpu"), x.new_ones(2, device="cuda"),
            torch.ones_like(x, device="cpu"), torch.tensor([1.0], device=x.device),
        )  # fmt: skip


def exported(x):
    return torch.export.export(Devices(), (x,)).module()


def decomposed(x):
    return torch.export.export(Devices(), (x,)).run_decompositions().module()


def traced(x):
    return make_fx(Devices())(x)


def traced_fake(x):
    return make_fx(Devices(), tracing_mode="fake")(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trace", [exported, decomposed, traced, traced_fake])
def test_a_traced_program_has_the_devices_of_the_program(trace):
    x = rand(2, 3).cuda()
    expected = Devices()(x)
    found = trace(x)(x)
    assert [str(t.device) for t in found] == [str(t.device) for t in expected]
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a.cpu(), b.cpu()) and a.dtype is b.dtype


# -- custom operations -----------------------------------------------------------------


@pytest.fixture
def library():
    with torch.library._scoped_library("simgpu_test", "FRAGMENT") as library:
        yield library


def test_a_custom_operation_runs_the_kernel_of_its_device_or_is_refused(library):
    host, gpu = torch.zeros(1), torch.zeros(1).cuda()
    for name, keys in {"both": "CPU CUDA", "gpu": "CUDA", "cpu": "CPU"}.items():
        library.define(f"{name}(Tensor x) -> Tensor")
        for key in keys.split():
            library.impl(name, lambda x, key=key: x + len(key), key)
    ops = torch.ops.simgpu_test
    assert (ops.both(host), ops.both(gpu), ops.gpu(gpu)) == (3, 4, 4)
    assert ops.gpu(gpu).is_cuda
    with pytest.raises(NotImplementedError, match="'CPU' backend"):
        ops.gpu(host)
    with pytest.raises(NotImplementedError, match="'CUDA' backend"):
        ops.cpu(gpu)


def test_an_extension_in_cuda_is_refused_by_name(tmp_path):
    from torch.utils import cpp_extension

    source = tmp_path / "kernel.cu"
    source.write_text("__global__ void kernel() {}\n", encoding="utf-8")
    build = {"build_directory": str(tmp_path)}
    with pytest.raises(NotSimulated, match="'mine'"):
        cpp_extension.load("mine", [str(source)], **build)
    with pytest.raises(NotSimulated, match="'inline'"):
        cpp_extension.load_inline("inline", "", "__global__ void k() {}", **build)


# -- subclasses, attention biases, nested tensors --------------------------------------


def test_a_subclass_of_tensor_is_made_from_data_and_sizes():
    class Named(torch.Tensor):
        pass

    assert type(Named([1.0, 2.0])) is Named and Named(2, 3).shape == (2, 3)
    for moved in (
        Named(torch.ones(2, device=1)),
        torch.ones(2).as_subclass(Named).to(1),
    ):
        assert type(moved) is type(moved + 1) is Named
        assert moved.get_device() == (moved + 1).get_device() == 1
    simgpu.stop()
    assert type(Named([1.0])) is Named and "__new__" not in vars(torch.Tensor)


# -- TorchScript's files ---------------------------------------------------------------


SCRIPT = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@SCRIPT
@pytest.mark.parametrize("grad", [torch.enable_grad, torch.inference_mode])
def test_torchscript_knows_where_a_tensor_is(grad):
    @torch.jit.script
    def scripted(x: torch.Tensor, factor: float = 2.0):
        zeros = torch.zeros(2, device=x.device)
        if x.is_cuda:
            zeros = zeros + x.cpu().to(x)
        moved = [x.to("cpu"), x.to(device="cpu", dtype=torch.float64), x.cuda()]
        return zeros * factor, str(x.device), moved

    x = torch.ones(2, device="cuda:1")
    with grad():
        found, device, moved = scripted(x=x)
        host = scripted(torch.ones(2), 3.0)
    assert (found.tolist(), device) == ([2, 2], str(found.device)) == ([2, 2], "cuda:1")
    assert [str(t.device) for t in moved] == ["cpu", "cpu", "cuda:0"]
    assert (host[0].tolist(), host[1]) == ([0, 0], "cpu")
    assert "simgpu" not in scripted.code


@SCRIPT
def test_torchscript_says_what_failed():
    class Position(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(4, 2)

        def forward(self, x):
            return x + self.embed(torch.arange(x.shape[0], device=x.device))

    x = torch.ones(3, 2, device="cuda:1")
    module = torch.jit.script(Position()).to("cuda:1")
    assert module(x).device == x.device
    with pytest.raises(RuntimeError, match="in the TorchScript interpreter") as caught:
        module(x.to("cuda:0"))
    assert "index is on cuda:0, different from other" in str(caught.value)
    traced = torch.jit.trace(Position().cuda(), x.cuda())
    with pytest.raises(RuntimeError, match="RuntimeError: Expected all tensors to be"):
        traced(x)
    with pytest.raises(RuntimeError, match="RuntimeError: CUDA out of memory. Tried"):
        torch.jit.script(_large)(x)


def _large(x: torch.Tensor):
    return torch.ones(1000000, 1000000, device=x.device)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("to", [None, "cuda:0", "cpu"])
def test_a_script_module_is_loaded_to_its_gpu_or_another(tmp_path, to):
    module = torch.jit.script(model()).to("cuda:1")
    path = str(tmp_path / "module.pt")
    torch.jit.save(module, path, _extra_files={"note.txt": "hello"})
    files = {"note.txt": ""}
    loaded = torch.jit.load(path, map_location=to, _extra_files=files)
    device = torch.device(to or "cuda:1")
    assert {p.device for p in loaded.parameters()} == {device}
    assert files == {"note.txt": b"hello"}
    x = rand(2, 4)
    assert torch.equal(loaded(x.to(device)).cpu(), module(x.to("cuda:1")).cpu())


# -- deterministic algorithms ----------------------------------------------------------


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


UNDETERMINED = {
    "histc": lambda x: torch.histc(x),
    "median": lambda x: x.median(0),
    "cumsum": lambda x: x.cumsum(0),
    "bincount": lambda x: torch.bincount(x[0].long(), x[0]),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x[None], 2).sum().backward(),
}


@pytest.mark.parametrize("name", UNDETERMINED)
def test_cuda_refuses_what_it_cannot_do_deterministically(deterministic, name):
    call = UNDETERMINED[name]
    call(rand(3, 4).requires_grad_())
    x = rand(3, 4).cuda().requires_grad_()
    with pytest.raises(RuntimeError, match=f"{name}.* does not have a deterministic"):
        call(x)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match="does not have a deterministic"):
        call(x)
    torch.use_deterministic_algorithms(False)
    call(x)


def test_what_cuda_has_deterministic_code_for_runs(deterministic):
    x = rand(3, 4).cuda()
    x.median(), x.long().cumsum(0), torch.bincount(x[0].long())
    x.scatter_add(1, torch.zeros_like(x).long(), x)
