"""Where tensors live: moving, making, indexing, printing and saving them."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from helpers import simgpu

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
    lambda x: x.to("cuda:1"),
    lambda x: x.to(1),
    lambda x: x.to(CUDA1),
    lambda x: x.to(device="cuda:1"),
    lambda x: x.to(device=1),
    lambda x: x.to(torch.ones(1, device=1)),
    lambda x: x.to(other=torch.ones(1, device=1)),
    lambda x: x.to("cuda:1", torch.float64),
    lambda x: x.to(CUDA1, torch.int64, True, True),
    lambda x: x.to(CUDA1, non_blocking=True, copy=True),
    lambda x: x.to(CUDA1, memory_format=torch.contiguous_format),
    lambda x: x.cuda(1),
    lambda x: x.cuda("cuda:1"),
    lambda x: x.cuda(device=CUDA1, non_blocking=True),
    lambda x: x.type_as(torch.ones(1, device=1)),
    lambda x: torch.as_tensor(x, device=1),
    lambda x: torch.asarray(x, device="cuda:1"),
    lambda x: torch.tensor(x, device=1),
    lambda x: torch.empty(4, device=1).copy_(x),
    lambda x: torch.empty(4).to(1).set_(x.to(1)),
    lambda x: torch.from_numpy(x.numpy()).cuda(1),
]


@pytest.mark.parametrize("move", TO_GPU_1)
def test_every_way_to_move(move):
    x = torch.arange(4.0)
    moved = move(x)
    assert where(x, moved) == ["cpu", "cuda:1"]
    assert moved.is_cuda and not moved.is_cpu and moved.get_device() == 1
    assert moved.tolist() == [0, 1, 2, 3]


def test_moving_to_where_it_is_copies_only_on_demand():
    x = torch.arange(4.0, device=1)
    assert x.to(1) is x and x.cuda(1) is x and x.to("cuda:1", torch.float32) is x
    assert x.to(1, copy=True) is not x
    assert x.cpu().cpu().device.type == "cpu"
    assert where(x.cuda(), x.to("cuda"), x.to("cuda:3")) == [
        "cuda:0",
        "cuda:0",
        "cuda:3",
    ]


def test_a_change_of_dtype_stays_and_types_move():
    x = torch.ones(2, device=1)
    here = (x.double(), x.half(), x.to(torch.int), x.type(torch.float64), x > 0)
    assert set(where(*here)) == {"cuda:1"}
    assert where(x.type_as(torch.ones(1)), x.type(torch.LongTensor)) == ["cpu"] * 2
    assert where(torch.ones(1).type("torch.cuda.DoubleTensor")) == ["cuda:0"]
    assert torch.ones(1).type(torch.cuda.LongTensor).dtype is torch.int64


def test_names_of_types():
    x = torch.ones(2, device=1)
    assert x.type() == "torch.cuda.FloatTensor" and x.cpu().type() == (
        "torch.FloatTensor"
    )
    assert isinstance(x, torch.cuda.FloatTensor)
    assert not isinstance(x, (torch.FloatTensor, torch.cuda.LongTensor))
    assert isinstance(x.cpu(), torch.FloatTensor)
    assert not isinstance(x.cpu(), torch.cuda.FloatTensor)
    assert torch.LongTensor([1, 2]).dtype is torch.int64


def test_views_and_in_place_operations_stay():
    x = torch.arange(6.0, device=2).view(2, 3)
    views = (x[0], x.T, x[:, 1:], x.flatten(), x.unsqueeze(0), x.data, x.detach())
    views += tuple(x.unbind()) + x.chunk(3, 1) + (x.expand(2, 2, 3), x.diagonal())
    assert set(where(*views, x.add_(1), x.mul_(2).zero_())) == {"cuda:2"}
    x[0].fill_(7)
    assert x.sum().item() == 21
    assert where(x.untyped_storage(), x.storage()) == ["cuda:2"] * 2


# -- making ----------------------------------------------------------------------------

FACTORIES = [
    lambda d: torch.zeros(2, device=d),
    lambda d: torch.ones((2, 3), device=d, dtype=torch.float64, requires_grad=True),
    lambda d: torch.empty(2, device=d),
    lambda d: torch.full((2,), 3, device=d),
    lambda d: torch.arange(3, device=d),
    lambda d: torch.range(0, 3, device=d),
    lambda d: torch.linspace(0, 1, 3, device=d),
    lambda d: torch.logspace(0, 1, 3, device=d),
    lambda d: torch.eye(3, device=d),
    lambda d: torch.rand(2, device=d),
    lambda d: torch.randn(2, device=d),
    lambda d: torch.randint(3, (2,), device=d),
    lambda d: torch.randperm(3, device=d),
    lambda d: torch.tril_indices(3, 3, device=d),
    lambda d: torch.triu_indices(3, 3, device=d),
    lambda d: torch.empty_strided((2,), (1,), device=d),
    lambda d: torch.empty_permuted((2, 3), (1, 0), device=d),
    lambda d: torch.scalar_tensor(3, device=d),
    lambda d: torch.hann_window(4, device=d),
    lambda d: torch.kaiser_window(4, device=d),
    lambda d: torch.signal.windows.hann(4, device=d),
    lambda d: torch.fft.fftfreq(4, device=d),
    lambda d: torch.tensor([1, 2], device=d),
    lambda d: torch.tensor(1.5, device=d, requires_grad=True),
    lambda d: torch.tensor([torch.tensor(1.0, device=2)], device=d),
    lambda d: torch.as_tensor([1, 2], device=d),
    lambda d: torch.as_tensor(np.ones(2), device=d),
    lambda d: torch.asarray([1, 2], device=d),
    lambda d: torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (2,), device=d),
    lambda d: torch.sparse_csr_tensor([0, 1, 2], [0, 1], [1.0, 2.0], device=d),
    lambda d: torch.ones(2).new_zeros(3, device=d),
    lambda d: torch.ones(2).new_tensor([1], device=d),
    lambda d: torch.zeros_like(torch.ones(2), device=d),
    lambda d: torch.rand_like(torch.ones(2), device=d),
    lambda d: torch.Generator(device=d),
    lambda d: nn.Linear(2, 2, device=d).weight,
    lambda d: nn.Linear(2, 2, device="meta").to_empty(device=d).weight,
]


@pytest.mark.parametrize("make", FACTORIES)
def test_every_factory_takes_every_kind_of_device(make):
    assert where(make(1), make("cuda:1"), make(CUDA1)) == ["cuda:1"] * 3
    assert where(make("cpu")) == ["cpu"]
    with torch.cuda.device(3):
        assert where(make("cuda")) == ["cuda:3"]


LIKE = [
    lambda x: x.new_zeros(2),
    lambda x: x.new_ones(2),
    lambda x: x.new_empty(2),
    lambda x: x.new_full((2,), 1),
    lambda x: x.new_tensor([1]),
    lambda x: x.new([1, 2]),
    lambda x: x.new_empty_strided((2,), (1,)),
    torch.zeros_like,
    torch.rand_like,
    torch.empty_like,
    lambda x: torch.full_like(x, 2),
    lambda x: torch.randint_like(x, 3),
]


@pytest.mark.parametrize("make", LIKE)
def test_families_follow_their_tensor(make):
    assert where(make(torch.ones(3, device=1)), make(torch.ones(3))) == [
        "cuda:1",
        "cpu",
    ]


def test_a_family_may_be_sent_elsewhere():
    x = torch.ones(3, device=1)
    elsewhere = (x.new_zeros(2, device="cpu"), torch.zeros_like(x, device="cpu"))
    assert where(*elsewhere, x.new_tensor([1], device="cpu")) == ["cpu"] * 3
    assert where(torch.zeros_like(x, device="cuda:2")) == ["cuda:2"]


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
        assert where(torch.zeros(1).cuda(), torch.zeros(1, device="cuda")) == (
            ["cuda:1"] * 2
        )
        with torch.cuda.device_of(torch.zeros(1, device=2)):
            assert torch.cuda.current_device() == 2
        with torch.accelerator.device_index(3):
            assert torch.accelerator.current_device_index() == 3
        assert torch.cuda.current_device() == 1
    torch.cuda.set_device("cuda:2")
    assert where(torch.ones(1, device="cuda")) == ["cuda:2"]
    torch.cuda.set_device(-1)  # as on CUDA: nothing happens
    assert torch.cuda.current_device() == 2


# -- modules ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.to(1),
        lambda m: m.to("cuda:1"),
        lambda m: m.to(device=1),
        lambda m: m.to(CUDA1, torch.float64),
        lambda m: m.to(torch.ones(1, device=1)),
        lambda m: m.cuda(1),
    ],
)
@pytest.mark.parametrize("grad", [torch.enable_grad, torch.inference_mode])
def test_modules_move(move, grad):
    with grad():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        weight = model[0].weight
        move(model)
        state = [*model.parameters(), *model.buffers()]
        assert len(state) == 7 and set(where(*state)) == {"cuda:1"}
        assert isinstance(model[0].weight, nn.Parameter) and model[0].weight.is_leaf
        assert (model[0].weight is weight) or torch.is_inference_mode_enabled()
        assert set(where(*model.cpu().parameters())) == {"cpu"}


def test_lazy_modules_move():
    layer = nn.LazyLinear(3).to(1)
    assert where(layer(torch.ones(2, 4, device=1)), layer.weight) == ["cuda:1"] * 2


# -- indexing, and scalars of the host -------------------------------------------------


def test_indices_may_be_on_the_host():
    x = torch.arange(4.0, device=1).view(2, 2)
    host = torch.tensor([0])
    found = (x[host], x[[0, 1]], x[np.array([0])], x[torch.eye(2) > 0], x[host.to(1)])
    assert set(where(*found)) == {"cuda:1"}
    x[host] = torch.tensor(9.0)
    x[torch.tensor([1])] = torch.ones(1, 2, device=1)
    x[0, 0] = 3
    assert x.tolist() == [[3, 9], [1, 1]]
    x[0] = torch.ones(2)  # a whole row may come from the host
    assert x[0].tolist() == [1, 1]
    assert [10, 20, 30][torch.tensor(2, device=1)] == 30


def test_scalars_of_the_host_join():
    x = torch.ones(2, 2, device=1)
    scalar = torch.tensor(2.0)
    joined = (x + scalar, scalar * x, x / scalar, x > scalar, torch.pow(x, scalar))
    joined += (torch.where(x > 0, x, scalar), x.clamp(min=scalar), x * 2, 2 - x)
    joined += (x.masked_fill(x > 0, scalar), torch.maximum(x, scalar))
    joined += (scalar + torch.tensor(1.0, device=1), torch.where(x > 0, 1.0, 0.0))
    assert set(where(*joined)) == {"cuda:1"}
    assert (float(x[0, 0]), int(x[0, 0]), bool(x[0, 0])) == (1.0, 1, True)
    assert f"{x[0, 0]:.1f}" == "1.0" and x.tolist() == [[1, 1], [1, 1]]


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


@pytest.mark.parametrize("current", [0, 1])
def test_printing_names_the_device(current):
    x = torch.tensor([1.0, 2.0], device=0)
    y = x.to(1).requires_grad_()
    with torch.cuda.device(current):
        assert repr(x) == "tensor([1., 2.], device='cuda:0')"
        assert repr(y) == "tensor([1., 2.], device='cuda:1', requires_grad=True)"
        assert repr(y * 2) == (
            "tensor([2., 4.], device='cuda:1', grad_fn=<MulBackward0>)"
        )
        assert repr(y.to(0)) == (
            "tensor([1., 2.], device='cuda:0', grad_fn=<ToCopyBackward0>)"
        )
        assert repr(nn.Parameter(x)) == (
            "Parameter containing:\n"
            "tensor([1., 2.], device='cuda:0', requires_grad=True)"
        )
        assert repr(x[0]) == "tensor(1., device='cuda:0')"
        assert repr(x.int()) == "tensor([1, 2], device='cuda:0', dtype=torch.int32)"
        assert repr(x[:0]) == "tensor([], device='cuda:0')"
        assert repr(x.to_sparse()) == (
            "tensor(indices=tensor([[0, 1]]),\n       values=tensor([1., 2.]),\n"
            "       device='cuda:0', size=(2,), nnz=2, layout=torch.sparse_coo)"
        )
        assert "..." in repr(torch.ones(2000, device=1))
        assert repr(x.cpu()) == "tensor([1., 2.])"


# -- saving ----------------------------------------------------------------------------


def saved(value, **options) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer


def load(buffer, **options):
    buffer.seek(0)
    return torch.load(buffer, **options)


@pytest.mark.parametrize("new", [True, False])
def test_loading_puts_tensors_where_they_were_or_where_told(new):
    x = torch.arange(3.0, device=2)
    buffer = saved([x, x[1:]], _use_new_zipfile_serialization=new)
    back, view = load(buffer)
    back[1] = 9
    assert where(back, view) == ["cuda:2"] * 2 and view[0].item() == 9
    for place, device in (
        ("cpu", "cpu"),
        (torch.device("cuda:1"), "cuda:1"),
        ("cuda", "cuda:0"),
        ({"cuda:2": "cuda:1"}, "cuda:1"),
        ({"cuda:2": "cpu"}, "cpu"),
        (lambda storage, location: storage, "cpu"),
        (lambda storage, location: storage.cuda(3), "cuda:3"),
    ):
        back, view = load(buffer, map_location=place)
        assert where(back, view) == [device] * 2, place
        assert back.tolist() == [0, 1, 2]


def test_loading_host_tensors_onto_a_gpu():
    buffer = saved({"w": torch.ones(2), "s": torch.eye(2).to_sparse()})
    found = load(buffer, map_location="cuda:1")
    assert where(*found.values()) == ["cuda:1"] * 2


def test_state_dicts_copies_and_pickles():
    model = nn.Linear(2, 2).to(1)
    model.load_state_dict(nn.Linear(2, 2).state_dict())
    state = load(saved(model.state_dict()))
    assert set(where(model.weight, *state.values())) == {"cuda:1"}
    x = torch.ones(2, device=2)
    for twin in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert where(twin) == ["cuda:2"] and twin.data_ptr() != x.data_ptr()
    assert where(copy.deepcopy(model).weight) == ["cuda:1"]
    assert where(copy.deepcopy(nn.Parameter(x))) == ["cuda:2"]
    assert where(load(saved(x.to_sparse()))) == ["cuda:2"]


# -- what is not a plain tensor passes -------------------------------------------------


def test_fake_and_meta_tensors_pass():
    with FakeTensorMode():
        a, b = torch.ones(2), torch.ones(2, device="cuda:1")
        assert where(a + a, b * 2, b.cpu()) == ["cpu", "cuda:1", "cpu"]
        assert type(a + a).__name__ == "FakeTensor"
    meta = torch.ones(2, device="meta")
    x = torch.ones(2, device=1)
    assert set(where(meta + meta, x.to("meta"))) == {"meta"}
    assert where(torch.empty_like(x, device="meta")) == ["meta"]
    assert simgpu.timeline().copies == []


def test_flop_counter_on_top():
    with FlopCounterMode(display=False) as counter:
        torch.ones(2, 3, device=1) @ torch.ones(3, 4, device=1)
    assert counter.get_total_flops() == 2 * 2 * 3 * 4


def test_subclasses_keep_their_class():
    class Tagged(torch.Tensor):
        pass

    moved = torch.ones(2).as_subclass(Tagged).to(1)
    assert type(moved) is type(moved + 1) is Tagged
    assert where(moved, moved + 1) == ["cuda:1"] * 2


def test_custom_operations_in_python_see_the_gpu():
    @torch.library.custom_op("simgpu_test::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        assert x.device == torch.device("cuda:1")
        return x + torch.ones(x.shape, device=x.device) * x

    assert double(torch.ones(2, device=1)).tolist() == [2, 2]
    assert where(double(torch.ones(2, device=1))) == ["cuda:1"]
