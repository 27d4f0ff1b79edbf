"""The fixture `simulated_gpus`, in a project of somebody else's."""

import os
import subprocess
import sys

PROJECT = """
import pytest
import torch
import torch.distributed as dist

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


def test_after_them(request):
    of_all = request.config.option.simulated_gpus or 0
    assert (torch.cuda.device_count(), dist.is_initialized()) == (of_all, False)
"""


def run(tmp_path, *options: str) -> str:
    (tmp_path / "test_project.py").write_text(PROJECT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "--color=no", *options],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout + done.stderr


def test_gpus_for_single_tests(tmp_path):
    printed = run(tmp_path)
    assert "4 passed, 1 skipped, 1 error" in printed, printed
    assert "needs two GPUs" in printed
    assert "@pytest.mark.simulated_gpus: start() got an unexpected keyword" in printed


def test_gpus_for_a_whole_run(tmp_path):
    printed = run(tmp_path, "--simulated-gpus", "2")
    assert "5 passed, 1 error" in printed, printed
    assert "PASSED test_project.py::test_asked_before_any_fixture" in printed
