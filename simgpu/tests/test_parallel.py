"""nn.DataParallel and torch.cuda.comm on simulated GPUs.

Follows the behaviours that PyTorch's own tests ask of them on real ones.
"""

import collections
import copy
import threading

import pytest
import torch
import torch.cuda.comm as comm
import torch.nn.functional as F
from torch import nn
from torch.cuda import nccl
from torch.nn.parallel import data_parallel, gather, parallel_apply, replicate, scatter
from torch.utils.checkpoint import checkpoint

import simgpu

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


def same_values(found, wanted) -> None:
    """The tensors, or lists of them, are equal in all but the device."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, check_device=False)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5)).to(0)


def equals_one_gpu(model, x, device_ids=ALL) -> torch.Tensor:
    """Outputs and gradients of `model` alone and under DataParallel agree."""
    alone = copy.deepcopy(model)
    ours, theirs = nn.DataParallel(model, device_ids)(x), alone(x)
    torch.testing.assert_close(ours, theirs, check_stride=True)
    ours.sum().backward()
    theirs.sum().backward()
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert mine.grad.device == other.grad.device == mine.device
        torch.testing.assert_close(mine.grad, other.grad)
    return ours


# -- nn.DataParallel -------------------------------------------------------------------


@pytest.mark.parametrize(
    "device_ids, rows",
    [([0], 3), ([0, 2], 1), ([0, 1], 7), (ALL, 2), (ALL, 3), (ALL, 9), (None, 8)],
)
def test_outputs_and_gradients_equal_those_of_one_gpu(device_ids, rows):
    out = equals_one_gpu(mlp(), torch.randn(rows, 6, device=0), device_ids)
    assert out.get_device() == 0


def test_convolutions_keep_their_memory_format():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2)).to(0)
    x = torch.randn(6, 3, 8, 8, device=0)
    equals_one_gpu(model, x.to(memory_format=torch.channels_last))


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

    equals_one_gpu(Odd().to(0), torch.randn(8, 2, device=0))


@pytest.mark.parametrize("device", ["cpu", 0, 2])
@pytest.mark.filterwarnings("ignore:Using -1 to represent CPU")
def test_inputs_and_their_gradients_may_be_anywhere(device):
    model = nn.DataParallel(mlp())
    x = torch.randn(8, 6, device=device, requires_grad=True)
    out = model(x)
    out.square().sum().backward()
    y = x.detach().to(0).requires_grad_()
    wanted = model.module(y)
    wanted.square().sum().backward()
    assert out.get_device() == 0 and x.grad.device == x.device
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(x.grad, y.grad, check_device=False)


def test_other_dimensions_and_output_devices():
    x = torch.randn(3, 8, device=0)
    out = nn.DataParallel(nn.ReLU().to(0), output_device=2, dim=1)(x)
    assert out.get_device() == 2
    same_values(out, x.relu())


def test_training_keeps_weights_equal_to_one_gpu():
    model = mlp()
    alone, parallel = copy.deepcopy(model), nn.DataParallel(model)
    for net in (alone, parallel):
        torch.manual_seed(1)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        for _ in range(3):
            x = torch.randn(10, 6, device=0)
            loss = F.cross_entropy(net(x), torch.arange(10, device=0) % 5)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.testing.assert_close([*model.parameters()], [*alone.parameters()])
    assert list(parallel.state_dict())[0] == "module.0.weight"


def test_nested_inputs_outputs_and_keywords():
    class Nested(nn.Linear):
        def forward(self, inputs, scale=1, *, shift=None):
            x, (y, rest) = inputs["x"], inputs["both"]
            out = super().forward(x) * scale + shift
            pair = Pair(out, [rest["z"]])
            return {"sum": out + y, "pair": pair, "each": (out.sum(),)}

    model = Nested(6, 3).to(0)
    x, y, z, shift = (torch.randn(8, n, device=0) for n in (6, 3, 2, 3))
    inputs = {"x": x, "both": (y, {"z": z})}
    with pytest.warns(UserWarning, match="gather along dimension 0"):  # of scalars
        out = nn.DataParallel(model)(inputs, 3, shift=shift)
    expected = model(inputs, 3, shift=shift)
    assert isinstance(out["pair"], Pair) and out["each"][0].shape == (4,)
    out["each"] = (out["each"][0].sum(),)
    torch.testing.assert_close(out, expected)


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


def test_each_replica_runs_in_its_thread_on_its_device():
    class Seen(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.register_buffer("offset", torch.zeros(1))
            self.seen = []

        def forward(self, x):
            tensors = [x, self.scale, self.offset, torch.empty(1, device="cuda")]
            is_main = threading.current_thread() is threading.main_thread()
            self.seen.append(
                (torch.cuda.current_device(), *indices(tensors), is_main,
                 torch.is_grad_enabled())
            )  # fmt: skip
            self.offset += 1
            self.count = 1
            return x * self.scale + self.offset

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


def test_recurrent_layers():
    model = nn.LSTM(4, 3, batch_first=True).to(0)
    x = torch.randn(8, 5, 4, device=0)
    torch.testing.assert_close(nn.DataParallel(model)(x)[0], model(x)[0])


def test_random_numbers_are_those_of_each_gpu():
    drop, x = nn.DataParallel(nn.Dropout()), torch.ones(400, device=0)
    outputs = []
    for _ in range(2):
        torch.cuda.manual_seed_all(3)
        outputs.append(drop(x))
    assert torch.equal(*outputs)
    assert torch.equal(outputs[0][:100], outputs[0][100:200])  # the same seed on each


def test_autocast_holds_in_the_replicas():
    model, x = mlp(), torch.randn(8, 6, device=0)
    with torch.autocast("cuda", dtype=torch.bfloat16):  # its type is not passed on
        out = nn.DataParallel(model)(x)
    assert out.dtype is torch.float16
    out.float().sum().backward()
    assert model[0].weight.grad.dtype is torch.float32
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


def test_double_backward():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1, bias=False)).to(0)
    results = []
    for net in (model, nn.DataParallel(model)):
        x = torch.linspace(-1, 1, 24, device=0).view(8, 3).requires_grad_()
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        results.append([p.grad for p in model.parameters()])
        model.zero_grad()
    torch.testing.assert_close(*results)


# -- errors ----------------------------------------------------------------------------


class Fails(nn.Module):
    def forward(self, x):
        if x.get_device() == 2:
            raise ValueError("my own trouble")
        return x


class MissesCuda(nn.Module):
    def forward(self, x):
        return x + torch.ones(2, device="cuda:0")


class Greedy(nn.Module):
    def forward(self, x):
        return torch.empty(2**30 if x.get_device() == 3 else 4, device=x.device)


@pytest.mark.parametrize(
    "module, error, words",
    [
        (Fails, ValueError, "replica 2 on device 2(.|\n)*my own trouble"),
        (MissesCuda, RuntimeError, "replica 1 on device 1(.|\n)*same device"),
        (Greedy, torch.cuda.OutOfMemoryError, "replica 3 on device 3"),
    ],
)
def test_an_error_names_the_replica(module, error, words):
    simgpu.stop()
    simgpu.start(4, memory="512MB")
    before = threading.enumerate()  # other tests may have left one of Python's own
    with pytest.raises(error, match=words):
        nn.DataParallel(module())(torch.ones(8, 2, device=0))
    assert threading.enumerate() == before


def test_devices_must_exist_and_the_module_be_on_the_first_one():
    x = torch.ones(8, 6, device=0)
    for model, where in ((mlp().to(1), "cuda:1"), (mlp().cpu(), "cpu")):
        with pytest.raises(RuntimeError, match=f"on device cuda:0 .*found.*{where}"):
            nn.DataParallel(model)(x)
    with pytest.raises(RuntimeError, match="on device cuda:0"):
        data_parallel(mlp().to(1), x, [0, 1])
    with pytest.raises(Exception, match="(?i)invalid device"):
        nn.DataParallel(mlp(), [0, 7])(x)


# -- the parts -------------------------------------------------------------------------


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
        assert indices(parallel_apply(layers, inputs, None, devices)) == [1, 3]
    out = parallel_apply(layers, [(), ()], [{"input": x} for x in inputs], [1, 3])
    torch.testing.assert_close(out[1], layers[1](inputs[1]))


def test_gather_joins_what_scatter_cut():
    x = torch.randn(10, 3, device=0, requires_grad=True)
    parts = scatter(x, ALL)
    for target in (0, 2, "cpu"):
        out = gather(parts, target)
        same_values(out, x)
    (out.sum() * 3).backward()
    assert x.grad.unique().tolist() == [3.0]
    nested = gather([{"k": (p, [p])} for p in parts], 1)
    assert nested["k"][1][0].get_device() == 1 and nested["k"][0].shape == (10, 3)


# -- torch.cuda.comm -------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", 0, 2])
def test_broadcast(device):
    x = torch.randn(5, 3, device=device).t()
    copies = comm.broadcast(x, ALL)
    assert indices(copies) == ALL
    same_values(copies, [x] * 4)
    assert copies[1].is_contiguous()
    if device != "cpu":
        assert copies[device] is x
    out = [torch.zeros(3, 5, device=i) for i in (1, 3)]
    assert [a is b for a, b in zip(comm.broadcast(x, out=out), out, strict=True)]
    same_values(out, [x] * 2)


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
        same_values(mine, tensors)
    version = copies[1][4]._version
    copies[1][0].zero_()
    assert copies[1][4]._version == version  # of the same buffer, where that is large
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


def test_nccl_in_one_process_has_the_values_of_nccl():
    parts = [torch.arange(4.0, device=i) + i for i in ALL]
    total = 4 * torch.arange(4.0) + 6
    whole = torch.cat([part.cpu() for part in parts])
    assert nccl.is_available(parts) and not nccl.is_available([parts[0], parts[0]])
    gathered = [torch.empty(16, device=i) for i in ALL]
    nccl.all_gather(parts, gathered)
    same_values(gathered, [whole] * 4)
    scattered = [torch.empty(1, device=i) for i in ALL]
    nccl.reduce_scatter(parts, scattered)
    same_values(torch.cat([part.cpu() for part in scattered]), total)
    out = torch.empty(4, device=2)
    nccl.reduce(parts, out, root=2)
    same_values(out, total)
    largest = [torch.empty(4, device=i) for i in ALL]
    nccl.all_reduce(parts, largest, op=2)  # ncclMax
    same_values(largest, [torch.arange(4.0) + 3] * 4)
    nccl.all_reduce(parts)
    same_values(parts, [total] * 4)
    parts[3].zero_()
    nccl.broadcast(parts, root=3)
    same_values(parts, [torch.zeros(4)] * 4)


def test_nccl_in_one_process_refuses_what_pytorch_refuses():
    x, y = torch.ones(3, device=0), torch.ones(3, device=1)
    for call, words in [
        (lambda: nccl.broadcast([x, y], root=2), "invalid root"),
        (lambda: nccl.all_reduce([]), "can't be empty"),
        (lambda: nccl.all_reduce([x, x]), "on unique devices"),
        (lambda: nccl.all_reduce([x, y[:2]]), "same number of elements"),
        (lambda: nccl.all_reduce([x, y.double()]), "same Tensor dtype"),
        (lambda: nccl.all_reduce([x, y.cpu()]), "cuda dense Tensors"),
        (lambda: nccl.reduce([x, y], y), "must be on the same device"),
        (lambda: nccl.all_reduce([x, y], [x]), "of the same length"),
    ]:
        with pytest.raises(RuntimeError, match=words):
            call()


@pytest.mark.parametrize("device", ["cpu", 0, 1])
@pytest.mark.parametrize("dim, sizes", [(0, None), (1, [2, 4]), (-1, [5, 1])])
def test_scatter(device, dim, sizes):
    x = torch.randn(5, 6, device=device)
    parts = comm.scatter(x, [0, 1], sizes, dim)
    expected = x.split(sizes, dim) if sizes else x.chunk(2, dim)
    assert indices(parts) == [0, 1]
    same_values(parts, expected)
    out = [torch.empty_like(part, device=i) for i, part in enumerate(expected)]
    same_values(comm.scatter(x, out=out, dim=dim), expected)


@pytest.mark.parametrize("out", [True, False])
def test_scatter_copies_on_the_streams_and_does_not_wait(log, out):
    x = torch.randn(4, 2).pin_memory()
    streams = [torch.cuda.Stream(0), torch.cuda.Stream(1)]
    where = {"devices": [0, 1]}
    if out:
        where = {"out": [torch.empty(2, 2, device=i) for i in range(2)]}
    log.clear()
    comm.scatter(x, **where, streams=streams)
    copies = [(copied.stream, copied.target) for copied in log.copies]
    ids = [stream.stream_id for stream in streams]
    assert copies == [(ids[0], "cuda:0"), (ids[1], "cuda:1")]
    assert log.waits == []


def test_gather():
    parts = [torch.randn(n, 3, device=i) for i, n in ((0, 2), (1, 4), (3, 1))]
    whole = torch.cat([part.cpu() for part in parts])
    for destination, device in [
        (None, "cuda:0"), (0, "cuda:0"), (2, "cuda:2"), (torch.device("cpu"), "cpu")
    ]:  # fmt: skip
        out = comm.gather(parts, destination=destination)
        same_values(out, whole)
        assert str(out.device) == device
    into = torch.empty(7, 3, device=2)
    assert comm.gather(parts, out=into) is into
    same_values(into, whole)


def test_mistakes_are_named_in_pytorchs_words():
    x, host, other = torch.ones(4, 2, device=0), torch.ones(4, 2), torch.cuda.Stream(1)
    for call, arguments, words in [
        (comm.broadcast, dict(devices=ALL, out=[x]), "Exactly one of 'devices' and 'o"),
        (comm.broadcast, dict(out=[x[0]]), "output tensor at index 0 has shape"),
        (comm.broadcast, dict(out=[host]), "output tensor at index 0 has device"),
        (comm.scatter, dict(devices=[]), "at least one device"),
        (comm.scatter, dict(devices=[0, 1], chunk_sizes=[4]), "of same length"),
        (comm.scatter, dict(devices=[0], streams=[other]), "device associated with t"),
        (comm.scatter, dict(out=[]), "at least one output tensor"),
        (comm.scatter, dict(out=[host]), "Expected all output tensors to be CUDA"),
        (comm.scatter, dict(out=[x[:, :1]]), "incorrect shape"),
        (comm.scatter, dict(out=[x[:3]]), "Total size for output tensors"),
        (comm.scatter, dict(devices=[0], out=[x]), "must not be specified"),
        (comm.scatter, dict(out=[x], dim=4), "out of range"),
    ]:
        with pytest.raises((RuntimeError, IndexError), match=words):
            call(x, **arguments)
    for tensors, out, words in [
        ([], None, "at least one tensor"),
        ([x, x[:, :1]], None, "index 1 has invalid shape"),
        ([x, host], None, "index 1 has device 'cpu'"),
        ([x, x[0]], None, "same number of dimensions"),
        ([x, x], x, "out tensor to have shape"),
    ]:
        with pytest.raises(RuntimeError, match=words):
            comm.gather(tensors, out=out)


# -- what it costs ---------------------------------------------------------------------


def sent(log) -> dict[tuple[str, str], int]:
    """(from, to) -> bytes of the copies between GPUs."""
    found: dict[tuple[str, str], int] = collections.Counter()
    for copied in log.copies:
        found[copied.source, copied.target] += copied.nbytes
    return dict(found)


def collectives(log) -> list[tuple[str, str, int]]:
    """(name, GPU, bytes) of NCCL's collectives."""
    found = [event for event in log.events if event.kind == "collective"]
    return [(event.name, event.device, event.nbytes) for event in found]


def test_every_byte_between_devices_is_counted(log):
    """Inputs and outputs in copies; weights by a broadcast, gradients by a reduce."""
    model = mlp()
    weights = sum(p.nbytes for p in model.parameters())
    x = torch.randn(8, 6, device=0)
    parallel = nn.DataParallel(model)
    inputs, outputs = 2 * 6 * 4, 2 * 5 * 4  # bytes of each part
    log.clear()
    out = parallel(x)
    wanted = {("cuda:0", f"cuda:{i}"): inputs for i in (1, 2, 3)}
    wanted |= {(f"cuda:{i}", "cuda:0"): outputs for i in (1, 2, 3)}
    assert sent(log) == wanted
    assert collectives(log) == [("broadcast", f"cuda:{i}", weights) for i in ALL]
    log.clear()
    out.backward(torch.ones_like(out))
    assert sent(log) == {("cuda:0", f"cuda:{i}"): outputs for i in (1, 2, 3)}
    assert collectives(log) == [("reduce", f"cuda:{i}", weights) for i in ALL]


def test_a_collective_of_one_process_starts_when_its_last_gpu_is_ready(log):
    parts = [torch.ones(2**20, device=i) for i in ALL]
    log.clear()
    busy = torch.randn(4096, 4096, device=2)
    busy @ busy
    comm.reduce_add(parts, 0)
    work = max(e.end for e in log.events if e.device == "cuda:2" and e.name == "mm")
    found = [event for event in log.events if event.kind == "collective"]
    cost = simgpu.estimate_collective("reduce", 2**22, 4, simgpu.request().card)
    for event in found:
        assert event.end == pytest.approx(work + cost.seconds)
        assert event.waited_for == (-1 if event.device == "cuda:2" else 2)


def test_a_reduce_takes_no_memory_for_what_comes_from_others():
    parts = [torch.ones(2**20, device=i) for i in ALL]
    torch.cuda.reset_peak_memory_stats(0)
    comm.reduce_add(parts, 0)
    assert torch.cuda.max_memory_allocated(0) == 2 * 2**22  # its own part and the sum


def test_replicas_take_memory_until_backward_is_done():
    model, x = mlp(), torch.randn(8, 6, device=0)
    out = nn.DataParallel(model)(x)
    assert torch.cuda.memory_allocated(1) > 0
    out.sum().backward()
    del out
    torch._C._cuda_clearCublasWorkspaces()
    assert [torch.cuda.memory_allocated(i) for i in (1, 2, 3)] == [0, 0, 0]


def test_replicas_compute_at_the_same_time_in_every_run(log):
    model = nn.Linear(256, 256).to(0)
    x = torch.randn(4, 256, device=0)
    parallel = nn.DataParallel(model)
    runs = []
    for _ in range(3):
        log.clear()
        parallel(x)
        runs.append((log.events, log.table()))
    assert runs[0] == runs[1] == runs[2]
    products = [e for e in log.events if e.name == "addmm"]
    assert len(products) == 4
    assert len({e.launched for e in products}) == 1  # at once, by four threads


def test_copies_into_one_gpu_share_its_link(log):
    parts = [torch.randn(2**18, device=i) for i in ALL]
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


# -- the current GPU in backward -------------------------------------------------------


class OnCurrent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2 + torch.ones(1, device="cuda")

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.full((1,), 2.0, device="cuda")


class Recomputes(nn.Module):
    def forward(self, x):
        return checkpoint(OnCurrent.apply, x, use_reentrant=False)


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
