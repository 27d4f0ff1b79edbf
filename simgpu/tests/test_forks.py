"""Processes that a program forks or spawns have its GPUs, by CUDA's rules."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from support.ports import free_port

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork"),
    pytest.mark.simulated_gpus(2),
]


def add_up(rank: int, port: int, results) -> None:
    """What a rank of a program does that forks its ranks, as in a notebook."""
    assert not torch._C._cuda_isInBadFork()
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", f"tcp://localhost:{port}", rank=rank, world_size=2)
    t = torch.full((2,), 10.0**rank, device="cuda")
    dist.all_reduce(t)
    results.put((rank, str(t.device), t.tolist()))
    dist.destroy_process_group()


def fork(function, *args) -> list:
    """What two forked processes put into a queue."""
    results = mp.get_context("fork").SimpleQueue()
    mp.start_processes(function, (*args, results), nprocs=2, start_method="fork")
    return sorted(results.get() for _ in range(2))


def test_forked_ranks_have_the_gpus_while_the_parent_has_not_used_them(monkeypatch):
    assert torch.cuda.device_count() == 2
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    assert torch.cuda.is_available()  # with NVML, as accelerate and Lightning ask
    for _ in range(2):
        found = fork(add_up, free_port())
        assert found == [(i, f"cuda:{i}", [11.0, 11.0]) for i in range(2)]
    assert not torch.cuda.is_initialized()


def say(rank: int, results) -> None:
    said = "nothing"
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        said = str(error)[:46]
    results.put((torch._C._cuda_isInBadFork(), said))


@pytest.mark.parametrize("first", ["is_available", "init"])
def test_after_the_parent_has_used_them_a_fork_cannot(first):
    getattr(torch.cuda, first)()
    words = "Cannot re-initialize CUDA in forked subprocess"
    assert fork(say) == [(True, words)] * 2
    assert not torch._C._cuda_isInBadFork()
    assert torch.ones(1, device="cuda").item() == 1
