"""nn.DataParallel and torch.cuda.comm on simulated GPUs.

Follows the behaviours that PyTorch's own tests ask of them on real ones.
"""

import collections
import copy
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.cuda.comm as comm
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import data_parallel, gather, parallel_apply, replicate, scatter
from torch.utils.checkpoint import checkpoint

from helpers import simgpu

ALL = [0, 1, 2, 3]
Pair = collections.namedtuple("Pair", "a b")


@pytest.fixture(autouse=True)
def log():
    simgpu.start(4)
    torch.manual_seed(0)
    yield simgpu.timeline()
    simgpu.stop()


def indices(values) -> list[int]:
    return [value.get_device() for value in values]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5)).to(0)


def equal_to_one_gpu(model, *inputs, device_ids=ALL, loss=lambda out: out.sum()):
    """Outputs and gradients of `model` alone and under DataParallel agree."""
    alone = copy.deepcopy(model)
    ours = nn.DataParallel(model, device_ids)(*inputs)
    theirs = alone(*inputs)
    torch.testing.assert_close(ours, theirs)
    loss(ours).backward()
    loss(theirs).backward()
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert mine.grad.device == other.grad.device == mine.device
        torch.testing.assert_close(mine.grad, other.grad)
    return ours


# -- nn.DataParallel -------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 9, 32])
@pytest.mark.parametrize("device_ids", [[0], [0, 1], ALL, [0, 2], None])
def test_it_equals_one_gpu(rows, device_ids):
    out = equal_to_one_gpu(mlp(), torch.randn(rows, 6, device=0), device_ids=device_ids)
    assert out.get_device() == 0


def test_inputs_may_come_from_the_host_and_from_other_gpus():
    model = nn.DataParallel(mlp())
    x = torch.randn(8, 6)
    outputs = [model(x), model(x.to(0)), model(x.to(3))]
    for out in outputs:
        assert out.get_device() == 0 and torch.equal(out, outputs[0])


def test_gradients_of_inputs_arrive_where_the_inputs_are():
    model = nn.DataParallel(mlp())
    for device in ("cpu", 0, 2):
        x = torch.randn(8, 6, device=device, requires_grad=True)
        model(x).square().sum().backward()
        assert x.grad.device == x.device
        y = x.detach().to(0).requires_grad_()
        model.module(y).square().sum().backward()
        torch.testing.assert_close(x.grad.cpu(), y.grad.cpu())


def test_convolutions_pooling_and_strides():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    x = torch.randn(6, 3, 8, 8, device=0).to(memory_format=torch.channels_last)
    equal_to_one_gpu(model.to(0), x)


def test_other_dimensions_and_output_devices():
    x = torch.randn(3, 8, device=0)
    model = nn.ReLU().to(0)
    out = nn.DataParallel(model, output_device=2, dim=1)(x)
    assert out.get_device() == 2 and torch.equal(out.cpu(), x.relu().cpu())


def test_training_keeps_weights_equal_to_one_gpu():
    model = mlp()
    alone, parallel = copy.deepcopy(model), nn.DataParallel(model)
    for net in (alone, parallel):
        torch.manual_seed(1)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        for _ in range(5):
            x = torch.randn(10, 6, device=0)
            loss = F.cross_entropy(net(x), torch.arange(10, device=0) % 5)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
    assert list(parallel.state_dict())[0] == "module.0.weight"


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs, scale=1, *, shift=None):
        x, (y, rest) = inputs["x"], inputs["both"]
        out = self.layer(x) * scale + (0 if shift is None else shift)
        return {"sum": out + y, "pair": Pair(out, [rest["z"]]), "each": (out.sum(),)}


def test_nested_inputs_and_outputs_and_keywords():
    model = Nested().to(0)
    x, y, z = (torch.randn(8, n, device=0) for n in (6, 3, 2))
    shift = torch.randn(8, 3, device=0)
    inputs = {"x": x, "both": (y, {"z": z})}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scalars are gathered to a vector
        out = nn.DataParallel(model)(inputs, 3, shift=shift)
    expected = model(inputs, 3, shift=shift)
    torch.testing.assert_close(out["sum"], expected["sum"])
    assert isinstance(out["pair"], Pair)
    torch.testing.assert_close(out["pair"].a, expected["pair"].a)
    torch.testing.assert_close(out["pair"].b[0], z)
    torch.testing.assert_close(out["each"][0].sum(), expected["each"][0])
    assert out["each"][0].shape == (4,)


def test_scalars_become_a_vector_with_a_warning():
    class Loss(nn.Module):
        def forward(self, x):
            return x.sum()

    with pytest.warns(UserWarning, match="gather along dimension 0"):
        out = nn.DataParallel(Loss().to(0))(torch.ones(8, 2, device=0))
    assert out.tolist() == [4.0] * 4


def test_modules_without_parameters_or_inputs():
    class Nothing(nn.Module):
        def forward(self):
            return torch.ones(2, device="cuda")

    assert nn.DataParallel(Nothing(), [0, 1])().tolist() == [1, 1]
    assert nn.DataParallel(nn.ReLU())(torch.ones(5, device=0)).shape == (5,)


@pytest.mark.parametrize("empty", [(), [], {}])
def test_empty_containers_pass_through(empty):
    class Second(nn.Module):
        def forward(self, x, other):
            assert other == empty
            return x + 1

    assert nn.DataParallel(Second())(torch.ones(4, device=0), empty).tolist() == [2] * 4


def test_no_grad_and_frozen_parameters():
    model = mlp()
    model[0].weight.requires_grad_(False)
    parallel = nn.DataParallel(model)
    x = torch.randn(8, 6, device=0)
    with torch.no_grad():
        assert not parallel(x).requires_grad
    parallel(x).sum().backward()
    assert model[0].weight.grad is None and model[2].weight.grad is not None
    with torch.inference_mode():
        assert parallel(x).is_inference()


class Seen(nn.Module):
    """Says where it runs, and what it finds there."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("offset", torch.zeros(1))
        self.seen = []

    def forward(self, x):
        self.seen.append((
            x.get_device(), torch.cuda.current_device(), self.scale.get_device(),
            self.offset.get_device(), torch.empty(1, device="cuda").get_device(),
            threading.current_thread() is threading.main_thread(),
            torch.is_grad_enabled(),
        ))  # fmt: skip
        self.offset += 1
        self.count = getattr(self, "count", 0) + 1
        return x * self.scale + self.offset


def test_each_replica_runs_in_its_thread_on_its_device():
    model = Seen().to(0)
    out = nn.DataParallel(model)(torch.ones(8, 1, device=0))
    assert sorted(model.seen) == [(i,) * 5 + (False, True) for i in ALL]
    assert not hasattr(model, "count")  # what a replica stores is lost
    assert model.offset.tolist() == [1.0]  # except in place, on the first device
    out.sum().backward()
    assert model.scale.grad.tolist() == [8.0]


def test_batchnorm_keeps_the_statistics_of_the_first_part():
    model = nn.BatchNorm1d(3, momentum=1.0).to(0)
    x = torch.randn(8, 3, device=0)
    nn.DataParallel(model, [0, 1])(x)
    torch.testing.assert_close(model.running_mean, x[:4].mean(0))
    assert model.num_batches_tracked.item() == 1


def test_buffers_that_need_gradients():
    class Buffers(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("shift", torch.ones(2, requires_grad=True))

        def forward(self, x):
            return x * self.shift

    model = Buffers().to(0)
    model.shift = model.shift.detach().requires_grad_()
    nn.DataParallel(model)(torch.ones(8, 2, device=0)).sum().backward()
    assert model.shift.grad.tolist() == [8.0, 8.0]


def test_recurrent_layers_and_dropout_and_random_numbers():
    model = nn.LSTM(4, 3, batch_first=True).to(0)
    x = torch.randn(8, 5, 4, device=0)
    out, _ = nn.DataParallel(model)(x)
    torch.testing.assert_close(out, model(x)[0])
    drop = nn.DataParallel(nn.Dropout())
    torch.cuda.manual_seed_all(3)
    first = drop(torch.ones(400, device=0))
    torch.cuda.manual_seed_all(3)
    assert torch.equal(first, drop(torch.ones(400, device=0)))
    assert torch.equal(first[:100], first[100:200])  # the same seed on each GPU


def test_autocast_holds_in_the_replicas():
    model = mlp()
    with torch.autocast("cuda", dtype=torch.bfloat16):  # its type is not passed on
        out = nn.DataParallel(model)(torch.randn(8, 6, device=0))
    assert out.dtype is torch.float16
    out.float().sum().backward()
    assert model[0].weight.grad.dtype is torch.float32
    x = torch.randn(8, 6, device=0)
    assert nn.DataParallel(model)(x).dtype is torch.float32


def test_an_embedding_with_sparse_gradients():
    dense = nn.Embedding(10, 3).to(0)
    sparse = nn.Embedding(10, 3, sparse=True).to(0)
    sparse.weight.data.copy_(dense.weight.data)
    i = torch.randint(10, (8, 2), device=0)
    for model in (dense, sparse):
        nn.DataParallel(model)(i).square().sum().backward()
    assert sparse.weight.grad.is_sparse and sparse.weight.grad.get_device() == 0
    torch.testing.assert_close(sparse.weight.grad.to_dense(), dense.weight.grad)


def test_parameter_lists_shared_modules_and_complex_weights():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.list = nn.ParameterList([nn.Parameter(torch.ones(2))] * 2)
            self.dict = nn.ModuleDict({"a": nn.Linear(2, 2)})
            self.again = self.dict["a"]
            self.z = nn.Parameter(torch.ones(2, dtype=torch.complex64))
            self.nothing = None
            self.register_parameter("missing", None)

        def forward(self, x):
            x = self.again(self.dict["a"](x * self.list[0] * self.list[1]))
            return torch.view_as_real(x * self.z)

    equal_to_one_gpu(Odd().to(0), torch.randn(8, 2, device=0))


def test_double_backward():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(0)
    results = []
    for net in (model, nn.DataParallel(model)):
        x = torch.linspace(-1, 1, 24, device=0).view(8, 3).requires_grad_()
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        model[2].bias.requires_grad_(False)  # the slope does not depend on it
        slope.square().sum().backward()
        results.append([p.grad for p in model.parameters() if p.requires_grad])
        model.zero_grad()
    for alone, parallel in zip(*results, strict=True):
        torch.testing.assert_close(alone, parallel)


# -- errors ----------------------------------------------------------------------------


class Fails(nn.Module):
    def __init__(self, device: int):
        super().__init__()
        self.device = device

    def forward(self, x):
        if x.get_device() == self.device:
            raise ValueError("my own trouble")
        return x


def test_an_error_names_the_replica():
    before = threading.enumerate()  # other tests may have left one of Python's own
    with pytest.raises(ValueError, match="replica 2 on device 2(.|\n)*my own trouble"):
        nn.DataParallel(Fails(2).to(0))(torch.ones(8, device=0))
    assert threading.enumerate() == before


def test_a_missing_cuda_call_in_forward_names_the_replica():
    class Forgets(nn.Module):
        def forward(self, x):
            return x + torch.ones(2, device="cuda:0")

    with pytest.raises(RuntimeError, match="replica 1 on device 1(.|\n)*same device"):
        nn.DataParallel(Forgets())(torch.ones(8, 2, device=0))


def test_running_out_of_memory_names_the_replica():
    class Greedy(nn.Module):
        def forward(self, x):
            return torch.empty(2**30 if x.get_device() == 3 else 4, device=x.device)

    simgpu.stop()
    simgpu.start(4, memory="512MB")
    with pytest.raises(torch.cuda.OutOfMemoryError, match="replica 3 on device 3"):
        nn.DataParallel(Greedy())(torch.ones(8, 2, device=0))


def test_the_module_must_be_on_the_first_device():
    x = torch.ones(8, 6, device=0)
    for model, where in ((mlp().to(1), "cuda:1"), (mlp().cpu(), "cpu")):
        with pytest.raises(RuntimeError, match=f"on device cuda:0 .*found.*{where}"):
            nn.DataParallel(model)(x)
    with pytest.raises(RuntimeError, match="on device cuda:0"):
        data_parallel(mlp().to(1), x, [0, 1])


def test_a_device_that_does_not_exist():
    with pytest.raises(Exception, match="(?i)invalid device"):
        nn.DataParallel(mlp(), [0, 7])(torch.ones(8, 6, device=0))


def test_replicas_know_that_zero_grad_has_no_effect():
    with pytest.warns(UserWarning, match="zero_grad"):
        replicate(mlp(), [0, 1])[1].zero_grad()


# -- the parts -------------------------------------------------------------------------


def test_data_parallel_as_a_function():
    model, x = mlp(), torch.randn(8, 6, device=0)
    for output_device in (0, 3, "cpu"):
        if output_device == "cpu":
            continue
        out = data_parallel(model, x, [0, 1, 3], output_device)
        assert out.get_device() == output_device
        torch.testing.assert_close(out.to(0), model(x))
    out = data_parallel(model, (x,), module_kwargs={})
    torch.testing.assert_close(out, model(x))


def test_scatter_cuts_tensors_and_copies_references():
    word = object()
    x, h = torch.arange(10.0, device=0), torch.arange(6)
    parts = scatter((x, [h, word], {"k": x}), [0, 1, 2])
    assert [p[0].tolist() for p in parts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert indices(p[0] for p in parts) == indices(p[1][0] for p in parts) == [0, 1, 2]
    assert all(p[1][1] is word and torch.equal(p[2]["k"], p[0]) for p in parts)
    assert parts[0][0].data_ptr() == x.data_ptr()  # no copy where it is already
    pairs = scatter(Pair(x, x), [1, 2])
    assert isinstance(pairs[0], Pair) and pairs[1].b.get_device() == 2
    assert len(scatter(torch.ones(2, device=0), ALL)) == 2  # fewer rows than GPUs


def test_replicas_are_views_of_one_buffer_and_share_with_the_first():
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).to(0)
    before = torch.cuda.memory_allocated(1)
    replicas = replicate(model, [0, 1])
    assert replicas[0][0].weight.data_ptr() == model[0].weight.data_ptr()
    weight, bias = replicas[1][0].weight, replicas[1][0].bias
    assert weight.get_device() == 1 and not weight.is_leaf
    assert weight.untyped_storage()._cdata == bias.untyped_storage()._cdata
    assert replicas[1][1].running_mean.get_device() == 1
    (weight.sum() * 2).backward()
    assert model[0].weight.grad.unique().tolist() == [2.0]
    del replicas, weight, bias
    assert torch.cuda.memory_allocated(1) == before
    detached = replicate(model, [0, 1], detach=True)
    assert not detached[1][0].weight.requires_grad


def test_parallel_apply_takes_inputs_keywords_and_finds_devices():
    layers = [nn.Linear(3, 2).to(i) for i in (1, 3)]
    inputs = [torch.ones(2, 3, device=i) for i in (1, 3)]
    for devices in ([1, 3], [torch.device("cuda:1"), torch.device("cuda:3")]):
        out = parallel_apply(layers, inputs, None, devices)
        assert indices(out) == [1, 3]
    out = parallel_apply(layers, [(), ()], [{"input": x} for x in inputs], [1, 3])
    torch.testing.assert_close(out[1], layers[1](inputs[1]))
    with pytest.raises(TypeError, match="replica 0 on device 1"):
        parallel_apply(layers, ["a", "b"], None, [1, 3])


def test_gather_joins_what_scatter_cut():
    x = torch.randn(10, 3, device=0, requires_grad=True)
    parts = scatter(x, ALL)
    for target in (0, 2, "cpu"):
        out = gather(parts, target)
        assert torch.equal(out.cpu(), x.cpu())
    (out.sum() * 3).backward()
    assert x.grad.unique().tolist() == [3.0]
    nested = gather([{"k": (p, [p])} for p in parts], 1)
    assert nested["k"][1][0].get_device() == 1 and nested["k"][0].shape == (10, 3)
    with pytest.raises(ValueError, match="same number of keys"):
        gather([{"a": parts[0]}, {"a": parts[1], "b": parts[1]}], 0)


# -- torch.cuda.comm -------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", 0, 2])
def test_broadcast(device):
    x = torch.randn(5, 5, device=device)
    copies = comm.broadcast(x, ALL)
    assert indices(copies) == ALL and all(torch.equal(c.cpu(), x.cpu()) for c in copies)
    if device != "cpu":
        assert copies[device] is x
    out = [torch.zeros(5, 5, device=i) for i in (1, 3)]
    assert [a is b for a, b in zip(comm.broadcast(x, out=out), out, strict=True)]
    assert all(torch.equal(o.cpu(), x.cpu()) for o in out)
    with pytest.raises(RuntimeError, match="Exactly one of 'devices' and 'out'"):
        comm.broadcast(x, ALL, out=out)
    with pytest.raises(RuntimeError, match="output tensor at index 0 has shape"):
        comm.broadcast(x, out=[torch.zeros(2, device=0)])
    with pytest.raises(RuntimeError, match="output tensor at index 0 has device"):
        comm.broadcast(x, out=[torch.zeros(5, 5)])


@pytest.mark.parametrize("buffer_size", [8, 100, 10**7])
def test_broadcast_coalesced_keeps_order_types_and_versions(buffer_size):
    tensors = [
        torch.randn(3, 2, device=0), torch.arange(4, device=0),
        torch.randn(0, device=0), torch.randn(5, device=0).double(),
        torch.randn(40, 7, device=0), torch.randn(2, 2, device=0).t(),
        torch.tensor(3, device=0),
    ]  # fmt: skip
    copies = comm.broadcast_coalesced(tensors, [0, 1, 3], buffer_size)
    assert all(a is b for a, b in zip(copies[0], tensors, strict=True))
    for device, mine in zip((1, 3), copies[1:], strict=True):
        assert indices(mine) == [device] * len(tensors)
        assert all(
            torch.equal(a.cpu(), b.cpu()) for a, b in zip(mine, tensors, strict=True)
        )
        assert all(a.dtype == b.dtype for a, b in zip(mine, tensors, strict=True))
    version = copies[1][3]._version
    copies[1][0].zero_()
    assert copies[1][3]._version == version
    with pytest.raises(RuntimeError, match=r"must be on devices\[0\]: 1"):
        comm.broadcast_coalesced(tensors, [1, 0])
    assert comm.broadcast_coalesced([], [0, 1]) == [[], []]


def test_reduce_add():
    parts = [torch.full((3,), float(i), device=i) for i in (0, 1, 2)]
    for destination in (0, 2):
        total = comm.reduce_add(parts, destination)
        assert total.get_device() == destination and total.tolist() == [3.0] * 3
    sums = comm.reduce_add_coalesced([[p, p * 10] for p in parts], 1)
    assert indices(sums) == [1, 1] and sums[1].tolist() == [30.0] * 3
    with pytest.raises(ValueError, match="invalid size"):
        comm.reduce_add([parts[0], torch.ones(4, device=1)], 0)
    with pytest.raises(RuntimeError, match="destination to be on the same GPU"):
        comm.reduce_add(parts, 3)


@pytest.mark.parametrize("device", ["cpu", 0, 1])
@pytest.mark.parametrize("dim, sizes", [(0, None), (1, [2, 4]), (-1, [5, 1])])
def test_scatter(device, dim, sizes):
    x = torch.randn(5, 6, device=device)
    parts = comm.scatter(x, [0, 1], sizes, dim)
    expected = x.split(sizes, dim) if sizes else x.chunk(2, dim)
    assert indices(parts) == [0, 1]
    assert all(
        torch.equal(a.cpu(), b.cpu()) for a, b in zip(parts, expected, strict=True)
    )
    out = [torch.empty_like(part, device=i) for i, part in enumerate(expected)]
    for a, b in zip(comm.scatter(x, out=out, dim=dim), expected, strict=True):
        assert torch.equal(a.cpu(), b.cpu())


def test_scatter_on_streams_and_with_errors():
    x = torch.randn(4, 2, device=0)
    streams = [torch.cuda.Stream(0), torch.cuda.Stream(1)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(0))
    comm.scatter(x, [0, 1], streams=streams)
    copied = simgpu.timeline().copies[-1]
    assert (copied.stream, copied.target) == (streams[1].stream_id, "cuda:1")
    for arguments, words in [
        (dict(devices=[]), "at least one device"),
        (dict(devices=[0, 1], chunk_sizes=[4]), "of same length"),
        (dict(devices=[0, 1], streams=streams[::-1]), "device associated with the str"),
        (dict(out=[]), "at least one output tensor"),
        (dict(out=[torch.empty(4, 2)]), "Expected all output tensors to be CUDA"),
        (dict(out=[torch.empty(4, 3, device=0)]), "incorrect shape"),
        (dict(out=[torch.empty(3, 2, device=0)]), "Total size for output tensors"),
        (dict(devices=[0], out=[x]), "must not be specified"),
    ]:
        with pytest.raises(RuntimeError, match=words):
            comm.scatter(x, **arguments)


def test_gather():
    parts = [torch.randn(n, 3, device=i) for i, n in ((0, 2), (1, 4), (3, 1))]
    whole = torch.cat([part.cpu() for part in parts])
    for destination in (None, 0, 2, torch.device("cpu")):
        out = comm.gather(parts, destination=destination)
        assert torch.equal(out.cpu(), whole)
        assert str(out.device) == str(
            "cuda:0" if destination is None else torch.device(destination)
        )
    into = torch.empty(7, 3, device=2)
    assert comm.gather(parts, out=into) is into and torch.equal(into.cpu(), whole)
    with pytest.raises(RuntimeError, match="at least one tensor"):
        comm.gather([])
    with pytest.raises(RuntimeError, match="index 1 has invalid shape"):
        comm.gather([parts[0], torch.ones(1, 2, device=1)])
    with pytest.raises(RuntimeError, match="index 1 has device 'cpu'"):
        comm.gather([parts[0], torch.ones(1, 3)])
    with pytest.raises(RuntimeError, match="same number of dimensions"):
        comm.gather([parts[0], torch.ones(1, device=1)])
    with pytest.raises(RuntimeError, match="out tensor to have shape"):
        comm.gather(parts, out=torch.empty(6, 3, device=0))


# -- what it costs ---------------------------------------------------------------------


def sent(log) -> dict[tuple[str, str], int]:
    """(from, to) -> bytes of the copies between GPUs."""
    found: dict[tuple[str, str], int] = collections.Counter()
    for copied in log.copies:
        found[copied.source, copied.target] += copied.nbytes
    return dict(found)


def test_every_copy_between_devices_is_counted(log):
    model = mlp()
    weights = sum(p.nbytes for p in model.parameters())
    x = torch.randn(8, 6, device=0)
    parallel = nn.DataParallel(model)
    log.clear()
    out = parallel(x)
    forward = sent(log)
    for i in (1, 2, 3):
        assert forward.pop(("cuda:0", f"cuda:{i}")) == weights + 2 * 6 * 4
        assert forward.pop((f"cuda:{i}", "cuda:0")) == 2 * 5 * 4
    assert forward == {}
    log.clear()
    out.backward(torch.ones_like(out))
    back = sent(log)
    for i in (1, 2, 3):
        assert back.pop(("cuda:0", f"cuda:{i}")) == 2 * 5 * 4
        assert back.pop((f"cuda:{i}", "cuda:0")) == weights
    assert back == {}


def test_replicas_take_memory_until_backward_is_done():
    model, x = mlp(), torch.randn(8, 6, device=0)
    out = nn.DataParallel(model)(x)
    assert torch.cuda.memory_allocated(1) > 0
    out.sum().backward()
    del out
    assert [torch.cuda.memory_allocated(i) for i in (1, 2, 3)] == [0, 0, 0]


def test_replicas_compute_at_the_same_time(log):
    model = nn.Linear(4096, 4096).to(0)
    x = torch.randn(4, 4096, device=0)
    parallel = nn.DataParallel(model)
    runs, pictures = [], set()
    for _ in range(3):
        log.clear()
        parallel(x)
        runs.append(log.events)
        pictures.add(log._repr_svg_())
    assert runs[0] == runs[1] == runs[2] and len(pictures) == 1
    products = [e for e in runs[0] if e.name == "addmm"]
    assert len(products) == 4
    waited = {e.device: e.launched for e in products}
    assert len(set(waited.values())) == 1  # launched at once by four threads


def test_copies_into_one_gpu_share_its_link(log):
    parts = [torch.randn(2**22, device=i) for i in ALL]
    log.clear()
    comm.gather(parts, destination=0)
    copies = sorted(log.copies)
    assert [c.target for c in copies] == ["cuda:0"] * 3
    for first, second in zip(copies, copies[1:], strict=False):
        assert second.start >= first.end
    log.clear()
    parts[0].to(1), parts[2].to(3)  # two pairs do not
    a, b = log.copies
    assert b.start < a.end


# -- threads and time ------------------------------------------------------------------


def test_a_thread_starts_at_its_parents_time_and_join_waits_for_it(log):
    x = torch.ones(4, device=0)
    log.clear()
    x + 1
    begin = log.host
    times = []

    def work(count):
        for _ in range(count):
            x + 1
        times.append((count, log.host))

    threads = [threading.Thread(target=work, args=(n,)) for n in (2, 5)]
    for thread in threads:
        thread.start()
    assert log.host == begin
    for thread in threads:
        thread.join(10)
    assert dict(times)[2] == pytest.approx(begin + 2 * 5e-6)
    assert dict(times)[5] == pytest.approx(begin + 5 * 5e-6) == pytest.approx(log.host)


def test_threads_of_a_pool_do_not_work_in_the_past(log):
    x = torch.ones(4, device=0)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: x + 1).result(10)
        for _ in range(20):
            x + 1
        pool.submit(lambda: x.cpu()).result(10)
    assert log.copies[-1].launched >= 20 * 5e-6


def test_clear_and_stop_do_not_disturb_a_thread_that_runs(log):
    ready, go, done = threading.Event(), threading.Event(), []

    def work():
        torch.ones(4, device=0)
        ready.set()
        go.wait(10)
        done.append(torch.ones(4, device=0 if simgpu.count() else "cpu").tolist())

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(10)
    log.clear()
    simgpu.stop()
    go.set()
    thread.join(10)
    assert done == [[1.0] * 4]


def test_who_asks_a_pool_for_a_result_waits_for_it(log):
    x = torch.ones(2**22, device=0)
    log.clear()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: x.cpu())
        future.result(10)
        assert log.host >= log.copies[-1].end
        failed = pool.submit(lambda: x.cpu().no_such_thing)
        assert isinstance(failed.exception(10), AttributeError)
        assert log.host >= log.copies[-1].end
        with pytest.raises(AttributeError):
            failed.result(10)


def test_what_ended_before_clear_does_not_bring_its_time_back(log):
    x = torch.ones(2**22, device=0)
    thread = threading.Thread(target=x.cpu)
    thread.start()
    end = time.monotonic() + 10
    while thread.is_alive() and time.monotonic() < end:
        time.sleep(0.001)
    log.clear()
    thread.join(10)
    assert log.host == 0


# -- the current GPU in backward -------------------------------------------------------


class OnCurrent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.full((1,), 2.0, device="cuda")


class Recomputes(nn.Module):
    def forward(self, x):
        def work(x):
            return OnCurrent.apply(x) + torch.ones(1, device="cuda")

        return checkpoint(work, x, use_reentrant=False)


def test_backward_works_on_the_gpu_of_each_node():
    seen = []
    x = torch.rand(8, 4, device=0, requires_grad=True)
    out = nn.DataParallel(Recomputes())(x)
    with torch.cuda.device(3):
        y = x.to(2)
        y.register_hook(lambda g: seen.append(torch.cuda.current_device()))
        (out.sum() + y.sum().to(0)).backward()
        assert torch.cuda.current_device() == 3
    assert seen == [2] and x.grad.unique().tolist() == [3.0]


def test_a_device_chosen_in_backward_holds_until_its_end():
    seen = []

    def hook(gradient):
        with torch.cuda.device(1):
            seen.append(torch.cuda.current_device())
        seen.append(torch.cuda.current_device())

    y = torch.ones(2, device=2, requires_grad=True) * 2
    y.register_hook(hook)
    y.sum().backward()
    assert seen == [1, 2] and torch.cuda.current_device() == 0


def test_memory_formats_of_what_is_gathered():
    model = nn.Conv2d(3, 4, 3).to(0).to(memory_format=torch.channels_last)
    x = torch.rand(4, 3, 8, 8, device=0).to(memory_format=torch.channels_last)
    assert nn.DataParallel(model)(x).stride() == model(x).stride()
    assert comm.broadcast(torch.rand(3, 4, device=0).t(), [0, 1])[1].is_contiguous()
    with pytest.raises(IndexError):
        comm.scatter(torch.ones(4, 2), out=[torch.ones(4, 2, device=0)], dim=4)
