"""Bytes on simulated GPUs: counted, capped, and given back."""

import gc
import threading

import pytest
import torch
from torch import nn

from helpers import simgpu
from helpers.simgpu.cards import MIB


@pytest.fixture(autouse=True)
def gpus():
    simgpu.start(2, memory="64MB")
    yield
    simgpu.stop()


def live(device: int = 1) -> int:
    gc.collect()
    return torch.cuda.memory_allocated(device)


def test_blocks_are_multiples_of_512_bytes_and_shared_by_views():
    x = torch.zeros(100, device=1)
    views = [x[10:], x.view(10, 10).T, x.detach(), x.data, x.add_(1)]
    assert live() == 512 and live(0) == 0
    del x
    assert live() == 512  # a view keeps it
    views.clear()
    assert live() == 0 and torch.cuda.max_memory_allocated(1) == 512


def test_resizing_and_moving():
    x = torch.zeros(128, device=1)
    x.resize_(1024)
    assert live() == 4096
    x.untyped_storage().resize_(0)
    torch.zeros(1, device=1)
    y = x.new_ones(128).to(0)
    assert live(0) == 512
    del x, y
    assert live() == live(0) == 0


FULL = [
    lambda x: torch.zeros(32 * MIB, device=1),
    lambda x: x.repeat(4, 1),
    lambda x: torch.cat([x] * 4),
    lambda x: torch.zeros(12 * MIB).to(1) + x.view(-1)[0],
    lambda x: [x + i for i in range(5)],
    lambda x: torch.sort(x),
    lambda x: (x.requires_grad_() * 2).exp().sum().backward(),
]


@pytest.mark.parametrize("fill", FULL)
def test_a_full_gpu_raises_and_leaks_nothing(fill):
    x = torch.ones(1024, 6144, device=1)  # 24 of the 64 MiB
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fill(x)
    assert "CUDA out of memory. Tried to allocate" in str(caught.value)
    assert "GPU 1 has a total capacity of 64.00 MiB" in str(caught.value)
    del caught
    x.requires_grad_(False).grad = None
    assert live() == 24 * MIB
    x.mul_(2)  # and the GPU goes on
    del x
    assert live() == 0


def test_training_gives_everything_back():
    def step():
        layer = nn.Linear(64, 64).to(1)
        optimizer = torch.optim.Adam(layer.parameters())
        layer(torch.ones(8, 64, device=1)).relu().sum().backward()
        optimizer.step()
        assert live() >= 4 * 64 * 64 * 4  # weights, gradients, two moments

    step()
    assert live() == 0
    assert torch.cuda.max_memory_allocated(1) < MIB
    torch.cuda.reset_peak_memory_stats(1)
    assert torch.cuda.max_memory_allocated(1) == 0


def test_sparse_tensors_are_counted_by_their_parts():
    x = torch.eye(128, device=1).to_sparse()
    assert live() == 128 * 2 * 8 + 128 * 4
    del x
    assert live() == 0


def in_threads(work, count: int = 8) -> list:
    results: list = [None] * count

    def run(i):
        results[i] = work(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_threads_count_together():
    def work(i):
        for _ in range(50):
            x = torch.ones(1000, device=i % 2)
            x = (x * 2).sum()
        return x.item()

    assert in_threads(work) == [2000.0] * 8
    assert live() == live(0) == 0


def test_threads_do_not_disturb_each_others_random_numbers():
    torch.manual_seed(0)
    wanted = [torch.rand(200, 10, device=i).cpu() for i in range(2)]
    host = torch.rand(3)
    torch.manual_seed(0)
    found = in_threads(
        lambda i: torch.stack([torch.rand(10, device=i) for _ in range(200)]).cpu(), 2
    )
    for a, b in zip(wanted, found, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(torch.rand(3), host)
