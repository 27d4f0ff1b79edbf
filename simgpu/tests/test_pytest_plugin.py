"""Fixtures for simulated GPUs and ranks, in a project of somebody else's."""

import pytest
import torch.distributed as dist

import simgpu
import simgpu._ranks.run_ranks  # noqa: F401

pytest_plugins = ["pytester"]
PROJECT = """
import os
import sys
import pytest
import torch
import torch.distributed as dist

known = set(sys.modules)
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@two
def test_asked_before_any_fixture():
    assert torch.ones(1, device="cuda:1").is_cuda


@pytest.mark.simulated_gpus(3, card="T4")
def test_the_mark_alone():
    assert torch.cuda.device_count() == 3


@pytest.mark.simulated_gpus(gpus=2)
def test_a_wrong_mark():
    pass


class TestGroups:
    @pytest.mark.parametrize("again", [0, 1])
    def test_a_group_ends_with_its_test(self, simulated_gpus, again):
        assert simulated_gpus.count() == 4
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


def rank_of_sum():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    total = torch.tensor(dist.get_rank(), device="cuda")
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def test_ranks(simulated_ranks):
    assert simulated_ranks(rank_of_sum, 3) == [(0, 3), (1, 3), (2, 3)]


def test_after_them(request):
    of_all = request.config.option.simulated_gpus or 0
    assert (torch.cuda.device_count(), dist.is_initialized()) == (of_all, False)


def test_what_pytester_forgets_is_not_pytorch():
    new = set(sys.modules) - known
    assert not [name for name in new if name.startswith(("torch", "simgpu"))]
"""


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Imports what the project needs, before `pytester` is there.

    Whatever is imported later, `pytester` forgets; PyTorch cannot be imported twice.
    """
    simgpu.start(1)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    simgpu.stop()


def run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    """Runs pytest on the project, in this process."""
    pytester.makepyfile(test_project=PROJECT)
    return pytester.runpytest_inprocess("-rA", *options)


def test_gpus_for_single_tests(pytester):
    done = run(pytester)
    done.assert_outcomes(passed=6, skipped=1, errors=1)
    printed = done.stdout.str()
    assert "needs two GPUs" in printed
    assert "@pytest.mark.simulated_gpus: start() got an unexpected keyword" in printed


def test_gpus_for_a_whole_run(pytester):
    done = run(pytester, "--simulated-gpus", "2")
    done.assert_outcomes(passed=7, errors=1)
    asked = "PASSED test_project.py::test_asked_before_any_fixture"
    assert asked in done.stdout.str()
