"""Where tensors live: moving, making, indexing, printing and saving them."""

import copy
import io
import pickle
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import simgpu
from simgpu import Messages
from simgpu._dispatch import operation

CUDA1 = torch.device("cuda:1")


@pytest.fixture(autouse=True)
def gpus():
    simgpu.start(4)
    yield
    torch.set_default_device(None)
    simgpu.stop()


def where(*values) -> list[str]:
    return [str(value.device) for value in values]


# -- moving ----------------------------------------------------------------------------

TO_GPU_1 = [
    'x.to("cuda:1")', "x.to(1)", "x.to(CUDA1)", 'x.to(device="cuda:1")',
    "x.to(device=1)", "x.to(torch.ones(1, device=1))",
    "x.to(other=torch.ones(1, device=1))", 'x.to("cuda:1", torch.float64)',
    "x.to(CUDA1, torch.int64, True, True)", "x.to(CUDA1, non_blocking=True, copy=True)",
    "x.to(CUDA1, memory_format=torch.contiguous_format)", "x.cuda(1)",
    'x.cuda("cuda:1")', "x.cuda(device=CUDA1, non_blocking=True)",
    "x.type_as(torch.ones(1, device=1))", "torch.as_tensor(x, device=1)",
    'torch.asarray(x, device="cuda:1")', "torch.tensor(x, device=1)",
    "torch.empty(4, device=1).copy_(x)", "torch.empty(4).to(1).set_(x.to(1))",
    "torch.from_numpy(x.numpy()).cuda(1)",
]  # fmt: skip


@pytest.mark.parametrize("move", TO_GPU_1)
def test_every_way_to_move(move):
    x = torch.arange(4.0)
    moved = eval(move, globals(), {"x": x})
    assert where(x, moved) == ["cpu", "cuda:1"]
    assert moved.is_cuda and not moved.is_cpu and moved.get_device() == 1
    assert moved.tolist() == [0, 1, 2, 3]


def test_moving_to_where_it_is_copies_only_on_demand():
    x = torch.arange(4.0, device=1)
    assert x.to(1) is x and x.cuda(1) is x and x.to("cuda:1", torch.float32) is x
    assert x.to(1, copy=True) is not x
    moved = (x.cpu().cpu(), x.cuda(), x.to("cuda"), x.to("cuda:3"))
    assert where(*moved) == ["cpu", "cuda:0", "cuda:0", "cuda:3"]


def test_names_of_types():
    x, host = torch.ones(2, device=1), torch.ones(2)
    assert (x.type(), host.type()) == ("torch.cuda.FloatTensor", "torch.FloatTensor")
    kinds = torch.FloatTensor, torch.cuda.FloatTensor, torch.cuda.LongTensor
    assert [isinstance(x, kind) for kind in kinds] == [False, True, False]
    assert [isinstance(host, kind) for kind in kinds] == [True, False, False]
    assert where(x.type_as(host), x.type(torch.LongTensor)) == ["cpu"] * 2
    assert where(host.type("torch.cuda.DoubleTensor")) == ["cuda:0"]
    assert host.type(torch.cuda.LongTensor).dtype is torch.int64
    assert torch.LongTensor([1, 2]).dtype is torch.int64


def test_views_share_the_storage_of_their_gpu():
    x = torch.arange(6.0, device=2).view(2, 3)
    x[0].fill_(7)
    assert x.sum().item() == 33
    assert where(x.untyped_storage(), x.storage(), x.data) == ["cuda:2"] * 3


# -- scalars of another device ---------------------------------------------------------

# what runs, with a scalar s on `cuda:0`, h on the host, and f on the device in question
TAKES_SCALARS = {
    "cpu": [
        "put(f(3), slice(1, None), s)", "put(f(3), ..., s)", "put(f(2, 3), 0, s)",
        "put(f(3), [0, 2], s)", "put(f(2), torch.tensor([True, False]), s)",
        "f(3).fill_(s)", "f(3).index_fill_(0, torch.tensor([1]), s)",
        "torch.fill(f(2), s)", "nn.init.constant_(f(2), s)",
        "torch.full((2,), s)", "torch.arange(s)", "torch.linspace(s, h, 3)",
        "f(3).index_put([torch.tensor([0])], s)",
    ],
    "cuda:1": [
        "put(f(3), slice(None), s)", "put(f(2), f(2) == 0, s)", "put(f(3), [1], s)",
        "f(3).fill_(s)", "f(3).masked_fill(f(3) == 0, s)", "put(f(3), f(3) == 0, h)",
        "put(f(2, 3), (slice(None), f(3) == 0), h[None])", "put(f(3), 0, h)",
        "f(3).masked_fill_(f(3) == 0, h)", "torch.where(f(3) == 0, f(3), s)",
        "torch.where(h > 0, f(3), h)", "f(3).bernoulli_(torch.ones(3))",
        "torch.addcmul(f(3), f(3), h)", "torch.lerp(f(3), f(3) + 1, h)",
        "torch.select_scatter(f(2, 3), torch.ones(3), 0, 1)",
        "f(3).index_put_([f(1).long()], s, accumulate=True)", "f(3) + h", "h ** f(3)",
        "torch.linspace(s, h, 3, device=1)",
    ],
}  # fmt: skip


def put(target, index, value):
    target[index] = value
    return target


@pytest.mark.parametrize(
    "device, call", [(d, call) for d, calls in TAKES_SCALARS.items() for call in calls]
)
def test_scalars_of_another_device_are_brought(device, call):
    def run(device, s):
        def f(*size):
            return torch.zeros(size, device=device)

        names = {"f": f, "s": s, "h": torch.tensor(2.0), "put": put}
        if device == "cpu":  # what is expected: there a device is not named
            return eval(call.replace(", device=1", ""), globals(), names)
        return eval(call, globals(), names)

    expected = run("cpu", torch.tensor(5.0))
    found = run(device, torch.tensor(5.0, device=0))
    assert where(found) == [device] and found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "call",
    [
        "(torch.zeros(3, device=0) * 1).fill_(s)", "put(torch.zeros(3) * 1, ..., s)",
        "put(torch.zeros(3, device=0) * 1, [0, 1, 2], s)",
        "put(torch.zeros(3, device=0) * 1, torch.ones(3, device=0) > 0, s)",
        "torch.where(torch.ones(3, device=0) > 2, torch.ones(3, device=0), s)",
        "torch.ones(3, device=0).masked_fill(torch.ones(3, device=0) > 0, s)",
    ],
)  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_the_gradient_of_such_a_scalar_finds_the_way_back(device, call):
    s = torch.tensor(2.0, device=device, requires_grad=True)
    eval(call, globals(), {"s": s, "put": put}).sum().backward()
    assert (s.grad.item(), *where(s.grad)) == (3.0, device)


# -- making ----------------------------------------------------------------------------

OF_A_NUMBER = [
    "zeros", "empty", "rand", "randn", "randperm", "arange", "eye", "scalar_tensor",
    "hann_window", "kaiser_window", "signal.windows.hann", "fft.fftfreq",
]  # fmt: skip
FACTORIES = [f"torch.{name}(3, device=d)" for name in OF_A_NUMBER] + [
    "torch.ones((2, 3), device=d, dtype=torch.float64, requires_grad=True)",
    "torch.full((2,), 3, device=d)", "torch.range(0, 3, device=d)",
    "torch.linspace(0, 1, 3, device=d)", "torch.logspace(0, 1, 3, device=d)",
    "torch.randint(3, (2,), device=d)", "torch.tril_indices(3, 3, device=d)",
    "torch.triu_indices(3, 3, device=d)", "torch.empty_strided((2,), (1,), device=d)",
    "torch.empty_permuted((2, 3), (1, 0), device=d)", "torch.tensor([1, 2], device=d)",
    "torch.tensor(1.5, device=d, requires_grad=True)",
    "torch.tensor([torch.tensor(1.0, device=2)], device=d)",
    "torch.as_tensor([1, 2], device=d)", "torch.as_tensor(np.ones(2), device=d)",
    "torch.asarray([1, 2], device=d)",
    "torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (2,), device=d)",
    "torch.sparse_csr_tensor([0, 1, 2], [0, 1], [1.0, 2.0], device=d)",
    "torch.ones(2).new_zeros(3, device=d)", "torch.ones(2).new_tensor([1], device=d)",
    "torch.zeros_like(torch.ones(2), device=d)",
    "torch.rand_like(torch.ones(2), device=d)", "torch.Generator(device=d)",
    "nn.Linear(2, 2, device=d).weight",
    'nn.Linear(2, 2, device="meta").to_empty(device=d).weight',
]  # fmt: skip


@pytest.mark.parametrize("make", FACTORIES)
def test_every_factory_takes_every_kind_of_device(make):
    def on(device):
        return eval(make, globals(), {"d": device})

    assert where(on(1), on("cuda:1"), on(CUDA1)) == ["cuda:1"] * 3
    assert where(on("cpu")) == ["cpu"]
    with torch.cuda.device(3):
        assert where(on("cuda")) == ["cuda:3"]


LIKE = [
    "x.new_zeros(2, **kw)", "x.new_ones(2, **kw)", "x.new_empty(2, **kw)",
    "x.new_full((2,), 1, **kw)", "x.new_tensor([1], **kw)",
    "x.new_empty_strided((2,), (1,), **kw)", "torch.full_like(x, 2, **kw)",
    "torch.randint_like(x, 3, **kw)", "torch.zeros_like(x, **kw)",
    "torch.rand_like(x, **kw)", "torch.empty_like(x, **kw)",
]  # fmt: skip


@pytest.mark.parametrize("make", LIKE)
def test_families_follow_their_tensor_or_are_sent_elsewhere(make):
    for its, other in ((CUDA1, torch.device("cpu")), (torch.device("cpu"), CUDA1)):
        names = {"x": torch.ones(3, device=its)}
        assert eval(make, globals(), names | {"kw": {}}).device == its
        assert eval(make, globals(), names | {"kw": {"device": other}}).device == other


def test_numpy_memory_stays_on_the_host():
    array = np.arange(3.0)
    tensor = torch.from_numpy(array)
    gpu = torch.as_tensor(array, device=1)
    tensor[0], gpu[1] = 5, 7
    assert array.tolist() == [5, 1, 2] and where(tensor) == ["cpu"]
    assert torch.frombuffer(bytearray(8), dtype=torch.int32).device.type == "cpu"


# -- the current and the default device ------------------------------------------------


def made() -> list[str]:
    return where(
        torch.zeros(2), torch.tensor([1]), torch.as_tensor([1]), torch.asarray([1])
    ) + where(torch.rand(1), torch.randperm(3), nn.Linear(2, 2).weight)


def test_a_device_is_a_context():
    with torch.device("cuda:2"):
        assert set(made()) == {"cuda:2"}
        assert torch.zeros(2, device="cpu").device.type == "cpu"
        with torch.device(3):
            assert set(made()) == {"cuda:3"}
        assert torch.get_default_device() == torch.device("cuda:2")
    assert set(made()) == {"cpu"}


@pytest.mark.parametrize("device", ["cuda:1", 1, CUDA1])
def test_the_default_device(device):
    torch.set_default_device(device)
    assert set(made()) == {"cuda:1"} and torch.get_default_device() == CUDA1
    torch.set_default_device(None)
    assert set(made()) == {"cpu"}


def test_the_current_gpu():
    with torch.cuda.device(1):
        made_there = (torch.zeros(1).cuda(), torch.zeros(1, device="cuda"))
        assert where(*made_there) == ["cuda:1"] * 2
        with torch.cuda.device_of(torch.zeros(1, device=2)):
            assert torch.cuda.current_device() == 2
        with torch.accelerator.device_index(3):
            assert torch.accelerator.current_device_index() == 3
            with torch.accelerator.device_index(None):
                assert torch.cuda.current_device() == 3
        assert torch.cuda.current_device() == 1
    torch.cuda.set_device("cuda:2")
    assert where(torch.ones(1, device="cuda")) == ["cuda:2"]
    torch.cuda.set_device(-1)  # as on CUDA: nothing happens
    assert torch.cuda.current_device() == 2


# -- modules ---------------------------------------------------------------------------

MOVE_MODULE = [
    "m.to(1)", 'm.to("cuda:1")', "m.to(device=1)", "m.to(CUDA1, torch.float64)",
    "m.to(torch.ones(1, device=1))", "m.cuda(1)",
]  # fmt: skip


@pytest.mark.parametrize("move", MOVE_MODULE)
@pytest.mark.parametrize("grad", [torch.enable_grad, torch.inference_mode])
def test_modules_move(move, grad):
    with grad():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        weight = model[0].weight
        eval(move, globals(), {"m": model})
        state = [*model.parameters(), *model.buffers()]
        assert len(state) == 7 and set(where(*state)) == {"cuda:1"}
        assert isinstance(model[0].weight, nn.Parameter) and model[0].weight.is_leaf
        assert (model[0].weight is weight) or torch.is_inference_mode_enabled()
        assert set(where(*model.cpu().parameters())) == {"cpu"}


def test_lazy_modules_move():
    layer = nn.LazyLinear(3).to(1)
    assert where(layer(torch.ones(2, 4, device=1)), layer.weight) == ["cuda:1"] * 2


# -- items, copies, out= ---------------------------------------------------------------


def test_items_are_set_from_the_host_and_read_there():
    x = torch.arange(4.0, device=1).view(2, 2)
    x[torch.tensor([0])] = torch.tensor(9.0)
    x[torch.tensor([1])] = torch.ones(1, 2, device=1)
    x[0, 0] = 3
    assert x.tolist() == [[3, 9], [1, 1]]
    x[0] = torch.ones(2)  # a whole row may come from the host
    assert x[0].tolist() == [1, 1]
    assert (float(x[0, 0]), int(x[0, 0]), bool(x[0, 0])) == (1.0, 1, True)
    assert f"{x[0, 0]:.1f}" == "1.0"
    assert [10, 20, 30][torch.tensor(2, device=1)] == 30


def test_copies_across_devices():
    x, y = torch.arange(3.0, device=1), torch.zeros(3)
    assert where(y.copy_(x), x.copy_(y + 1)) == ["cpu", "cuda:1"]
    assert y.tolist() == [0, 1, 2] and x.tolist() == [1, 2, 3]
    y.data = x
    assert where(y) == ["cuda:1"]


def test_out_arguments():
    a, out = torch.ones(2, 2, device=1), torch.empty(2, 2, device=1)
    assert torch.mm(a, a, out=out) is out and out.sum().item() == 8
    assert where(torch.zeros(2, 2, out=out, device=1)) == ["cuda:1"]
    with pytest.raises(RuntimeError, match="does not match device of out"):
        torch.zeros(2, 2, out=out, device="cpu")


# -- printing --------------------------------------------------------------------------

PRINTED = {
    "x": "tensor([1., 2.], device='cuda:0')",
    "y": "tensor([1., 2.], device='cuda:1', requires_grad=True)",
    "y * 2": "tensor([2., 4.], device='cuda:1', grad_fn=<MulBackward0>)",
    "y.to(0)": "tensor([1., 2.], device='cuda:0', grad_fn=<ToCopyBackward0>)",
    "nn.Parameter(x)": "Parameter containing:\n"
    "tensor([1., 2.], device='cuda:0', requires_grad=True)",
    "x[0]": "tensor(1., device='cuda:0')",
    "x.int()": "tensor([1, 2], device='cuda:0', dtype=torch.int32)",
    "x[:0]": "tensor([], device='cuda:0')",
    "x.to_sparse()": "tensor(indices=tensor([[0, 1]]),\n"
    "       values=tensor([1., 2.]),\n"
    "       device='cuda:0', size=(2,), nnz=2, layout=torch.sparse_coo)",
    "x.cpu()": "tensor([1., 2.])",
}


@pytest.mark.parametrize("current", [0, 1])
def test_printing_names_the_device(current):
    x = torch.tensor([1.0, 2.0], device=0)
    names = {"x": x, "y": x.to(1).requires_grad_(), "nn": nn}
    with torch.cuda.device(current):
        for expression, text in PRINTED.items():
            assert repr(eval(expression, names)) == text
        assert "..." in repr(torch.ones(2000, device=1))


# -- saving ----------------------------------------------------------------------------


def saved_and_loaded(value, place=None, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    buffer.seek(0)
    return torch.load(buffer, map_location=place)


@pytest.mark.parametrize("new", [True, False])
def test_loading_puts_tensors_where_they_were_or_where_told(new):
    x = torch.arange(3.0, device=2)
    for place, device in (
        (None, "cuda:2"), ("cpu", "cpu"), (torch.device("cuda:1"), "cuda:1"),
        ("cuda", "cuda:0"), ({"cuda:2": "cuda:1"}, "cuda:1"),
        ({"cuda:2": "cpu"}, "cpu"), (lambda storage, location: storage, "cpu"),
        (lambda storage, location: storage.cuda(3), "cuda:3"),
    ):  # fmt: skip
        options = {"_use_new_zipfile_serialization": new}
        back, view = saved_and_loaded([x, x[1:]], place, **options)
        back[1] = 9
        assert where(back, view) == [device] * 2, place
        assert back.tolist() == [0, 9, 2] and view[0].item() == 9


def test_host_and_sparse_tensors_are_loaded_onto_a_gpu():
    host = {"w": torch.ones(2), "s": torch.eye(2).to_sparse()}
    assert where(*saved_and_loaded(host, "cuda:1").values()) == ["cuda:1"] * 2
    assert where(saved_and_loaded(torch.ones(2, device=2).to_sparse())) == ["cuda:2"]


def test_state_dicts_copies_and_pickles():
    model = nn.Linear(2, 2).to(1)
    model.load_state_dict(nn.Linear(2, 2).state_dict())
    state = saved_and_loaded(model.state_dict())
    assert set(where(model.weight, *state.values())) == {"cuda:1"}
    x = torch.ones(2, device=2)
    for twin in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert where(twin) == ["cuda:2"] and twin.data_ptr() != x.data_ptr()
    assert where(copy.deepcopy(model).weight) == ["cuda:1"]
    assert where(copy.deepcopy(nn.Parameter(x))) == ["cuda:2"]


# -- what is not a plain tensor passes -------------------------------------------------


def test_meta_tensors_pass():
    meta = torch.ones(2, device="meta")
    x = torch.ones(2, device=1)
    assert set(where(meta + meta, x.to("meta"))) == {"meta"}
    assert where(torch.empty_like(x, device="meta")) == ["meta"]
    module = nn.Linear(2, 2, device="meta").to(torch.bfloat16)
    assert where(module.weight) == ["meta"] and module.weight.dtype == torch.bfloat16
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        meta.to("cuda")
    assert simgpu.timeline().copies == []


def test_flop_counter_on_top():
    with FlopCounterMode(display=False) as counter:
        torch.ones(2, 3, device=1) @ torch.ones(3, 4, device=1)
    assert counter.get_total_flops() == 2 * 2 * 3 * 4


def test_zeros_of_backward_are_on_the_gpu_under_a_mode_of_the_program():
    used, _ = (torch.ones(4, device="cuda:1", requires_grad=True) * 2).chunk(2)
    with Messages():  # the part that nobody used has zeros for a gradient
        used.sum().backward()


def test_custom_operations_in_python_see_the_gpu():
    @torch.library.custom_op("simgpu_test::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        assert x.device == torch.device("cuda:1")
        return x + torch.ones(x.shape, device=x.device) * x

    assert double(torch.ones(2, device=1)).tolist() == [2, 2]
    assert where(double(torch.ones(2, device=1))) == ["cuda:1"]


def test_pytorchs_own_python_code_for_real_cards_is_left_alone(monkeypatch):
    """A program's own kernel runs. PyTorch 2.13 for CUDA brings one of `bmm`."""
    overload = torch.ops.aten.baddbmm.default
    monkeypatch.setitem(operation.known_operations, overload, None)
    library = torch.library.Library("aten", "IMPL")
    a = torch.ones(1, 2, 2, device=1)
    try:
        library.impl("baddbmm", lambda c, a, b: c * 7, "CUDA", allow_override=True)
        assert torch.baddbmm(a, a, a).sum() == 28
        operation.known_operations[overload] = None
        native = types.SimpleNamespace(_graphs={("baddbmm", "CUDA"): []})
        monkeypatch.setitem(sys.modules, "torch._native.registry", native)
        assert torch.baddbmm(a, a, a).sum() == 12
    finally:
        library._destroy()
