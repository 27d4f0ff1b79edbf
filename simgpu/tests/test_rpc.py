"""`torch.distributed.rpc` beside simulated GPUs."""

import pytest
import torch
from torch import cuda
from torch.futures import Future

from support import programs

TWO_WORKERS = """
import sys, threading, torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel

GPU = [torch.device("cuda", 0), torch.device("cuda", 1)]


def said(function, *words):
    try:
        function()
    except RuntimeError as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError("no error")


def where(x, *devices):
    assert torch.cuda.current_device() == 0
    results = [torch.ones(2, device=d) + x.sum().to(d) for d in devices]
    return str(x.device), *results


def on_gpu(x):
    return (x.cuda(1) * 2).cpu()


def returns_gpu():
    return torch.ones(2, device=1)


def fetches(rref):
    return [str(x.device) for x in rref.to_here()]


@rpc.functions.async_execution
def add_later(x):
    later = rpc.rpc_async("w0", torch.add, args=(x, 1))
    return later.then(lambda done: done.wait() * 3)


class Layer(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.linear = nn.Linear(2, 2, device=device)
        nn.init.ones_(self.linear.weight)

    def forward(self, x):
        return self.linear(x.to(self.linear.weight.device)).to(x.device)

    def parameter_rrefs(self):
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def weight(self):
        return self.linear.weight.detach().cpu()


def without_map():
    one = torch.ones(2)
    assert rpc.rpc_sync("w1", torch.add, args=(one, 1)).tolist() == [2, 2]
    assert rpc.rpc_sync("w1", on_gpu, args=(one,)).tolist() == [2, 2]
    assert rpc.rpc_sync("w1", add_later, args=(one,)).tolist() == [6, 6]
    words = "only supports CPU tensors by default", "mapping is not available for dest"
    x = torch.ones(2, device=0)
    said(lambda: rpc.rpc_sync("w1", torch.add, args=(x, 1)), *words, "Request", "w1")
    said(lambda: rpc.rpc_async("w1", where, args=(x,)), *words, "Request")
    said(lambda: rpc.rpc_sync("w1", returns_gpu), *words, "Response", "w0")
    said(lambda: rpc.rpc_sync("w1", no_such_thing := divmod, args=(1, 0)), "division")


def with_map():
    x = torch.ones(2, device=0)
    device, a, b, c = rpc.rpc_sync("w1", where, args=(x, "cuda:1", "cuda:0", "cpu"))
    assert device == "cuda:1" and [t.device for t in (a, b)] == GPU and c.is_cpu
    assert a.tolist() == b.tolist() == c.tolist() == [3, 3]
    total = rpc.rpc_async("w1", torch.add, args=(x, 1)).wait()  # C++ would run it
    assert total.device == GPU[0] and total.tolist() == [2, 2]
    rref = rpc.remote("w1", torch.add, args=(x, 2))
    assert rref.to_here().device == GPU[0] and rref.to_here().tolist() == [3, 3]
    assert rref.rpc_sync().sum().item() == 6
    mine = rpc.RRef([x, torch.ones(2, device=1), torch.ones(2)])  # C++ fetches it
    assert rpc.rpc_sync("w1", fetches, args=(mine,)) == ["cuda:1", "cuda:0", "cpu"]
    before = rpc.rpc_async("w1", where, args=(x, "cuda:1"))
    x += 1  # after the call
    assert before.wait()[1].tolist() == [3, 3]


def trains():
    for device in (GPU[1], torch.device("cpu")):
        layer = rpc.remote("w1", Layer, args=(device,))
        optimizer = DistributedOptimizer(
            torch.optim.SGD, layer.rpc_sync().parameter_rrefs(), lr=0.5
        )
        local = nn.Linear(2, 2, device=0)
        nn.init.ones_(local.weight)
        with dist_autograd.context() as context:
            x = local(torch.ones(1, 2, device=0))
            out = layer.rpc_sync().forward(x if device is GPU[1] else x.cpu())
            dist_autograd.backward(context, [out.sum()])
            gradients = dist_autograd.get_gradients(context)
            gradient = gradients[local.weight]
            assert gradient.device == GPU[0] and gradient.tolist() == [[2, 2], [2, 2]]
            assert not (gradient - local.weight).isnan().any()
            optimizer.step(context)
        weight = layer.rpc_sync().weight()
        expected = 1 - 0.5 * (2 + local.bias.detach().cpu())
        assert torch.allclose(weight, expected.expand(2, 2)), (weight, expected)
    remote = RemoteModule("w1/cuda:1", nn.Linear, args=(2, 2))
    assert remote(torch.ones(1, 2, device=0)).device == GPU[0]  # without a map, a tuple


def replicas_agree(rank):
    # collectives of DDP run while C++ walks the graph
    replica = DistributedDataParallel(nn.Linear(3, 1).cuda(rank), device_ids=[rank])
    with dist_autograd.context() as context:
        out = replica(torch.full((1, 3), rank + 1.0, device=rank))
        dist_autograd.backward(context, [out.sum()])
        gradient = dist_autograd.get_gradients(context)[replica.module.weight]
    assert gradient.tolist() == [[1.5] * 3] and gradient.device == GPU[rank]


def work(rank, folder, mapped):
    dist.init_process_group(
        "nccl", f"file://{folder}/group{mapped}", rank=rank, world_size=2
    )
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{folder}/rpc{mapped}", num_worker_threads=4
    )
    if mapped:
        options.set_device_map(f"w{1 - rank}", {0: 1, 1: 0})
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if mapped:
        replicas_agree(rank)
    if rank == 0:
        (with_map(), trains()) if mapped else without_map()
        print(f"{mapped=} is right", flush=True)
    rpc.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    for mapped in (False, True):
        mp.start_processes(work, (sys.argv[1], mapped), nprocs=2, start_method="fork")
"""


def test_calls_tensors_and_gradients_reach_the_gpus_of_the_map(tmp_path):
    script = tmp_path / "calls.py"
    script.write_text(TWO_WORKERS, encoding="utf-8")
    done = programs.simulated(tmp_path, "--gpus", 2, script, tmp_path)
    printed = ["mapped=False is right", "mapped=True is right"]
    assert (done.status, done.stdout.splitlines()) == (0, printed), done.stderr


@pytest.mark.simulated_gpus(2)
def test_who_waits_for_a_future_of_a_gpu_waits_for_the_stream_that_set_it():
    """Without the future, the last read would be a race."""
    side, other = cuda.Stream(0), cuda.Stream(0)
    future = Future(devices=["cuda:0"])
    later = future.then(lambda done: [value + 1 for value in done.value()])
    with cuda.stream(side):
        future.set_result([torch.ones(4, device=0) * 2])
    with cuda.stream(other):
        assert future.wait()[0].tolist() == [2] * 4
        assert later.wait()[0].tolist() == [3] * 4


@pytest.mark.simulated_gpus(2)
def test_a_future_refuses_other_devices_as_pytorch_does():
    with pytest.raises(ValueError, match="Expected devices to have indices, got cpu"):
        Future(devices=["cpu"])
    future = Future(devices=[1])
    later = future.then(lambda done: torch.ones(1, device=1))
    future.set_result(torch.ones(1, device=0))
    words = r"device\(s\) cuda:0 which are not among the expected device\(s\) cuda:1"
    with pytest.raises(ValueError, match=words):
        future.wait()
    assert later.wait().device == torch.device("cuda", 1)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        Future().then(None)
