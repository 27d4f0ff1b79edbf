"""Races that are named on stderr, once, or not at all; the program goes on."""

import os
import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.cuda._sanitizer import CUDASanitizerErrors
from torch.nn.parallel import DistributedDataParallel

import simgpu
from support.side_streams import side_stream

pytestmark = pytest.mark.usefixtures("stopped")


def racing(device, kept=None) -> float:
    x = torch.ones(4, device=device)
    (kept if kept is not None else []).append(x)
    with torch.cuda.stream(side_stream(device)):
        x.mul_(3)  # first
    return (x + 1).sum().item()  # second


@pytest.mark.parametrize("mode", ["warn", "off"])
def test_each_two_lines_are_named_once_and_the_values_are_right(mode, capfd):
    simgpu.start(2, races=mode)
    kept = []  # memory that is used again would race as well
    assert [racing(1, kept) for _ in range(3)] == [16.0] * 3
    said = capfd.readouterr().err
    if mode == "off":
        assert said == ""
        return
    first = said.index("writes it on stream 1 (mul_")
    second = said.index("reads it on the default stream (add")
    assert said.count("a race: two streams of cuda:1") == 1 and first < second
    assert "x.mul_(3)  # first" in said and "test_races_warned.py:" in said
    assert len(said.splitlines()) == 5
    x = torch.ones(4, device=0)
    with torch.cuda.stream(side_stream(0)):
        x.mul_(3)
    assert x.tolist() == [3.0] * 4
    assert capfd.readouterr().err.count("a race") == 1  # other lines


def test_a_rank_says_that_it_is_one(monkeypatch, capfd):
    monkeypatch.setenv("RANK", "3")
    simgpu.start(1, races="warn")
    racing(0)
    assert "simgpu: rank 3: a race" in capfd.readouterr().err


def in_a_side_stream() -> None:
    """Every rank builds DDP as Lightning does, and trains on the default stream."""
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    simgpu._startup.state.running.sanitizer.mode = "warn"
    model = nn.Linear(2, 2).cuda()
    with torch.cuda.stream(side_stream()):
        model = DistributedDataParallel(model, device_ids=[rank])
    model(torch.ones(1, 2, device="cuda")).sum().backward()


def test_ranks_name_a_race_once_together(simulated_ranks, capfd):
    simulated_ranks(in_a_side_stream, 2)
    said = capfd.readouterr().err
    assert said.count("a race: two streams of cuda:") == 1, said
    assert "writes it on stream 1 (copy_)" in said


def test_nothing_is_noted_while_races_are_off():
    simgpu.start(1, races="off")
    racing(0)
    sanitizer = simgpu._startup.state.running.sanitizer
    assert sanitizer.handler is None and sanitizer.number == 0


def test_the_error_of_a_race_has_a_name_of_its_own():
    simgpu.start(1)
    with pytest.raises(simgpu.RaceError) as raised:
        racing(0)
    assert isinstance(raised.value, CUDASanitizerErrors)
    line = traceback.format_exception_only(raised.value)[0]
    assert line.startswith("simgpu.RaceError: ")


def test_a_collective_that_nobody_waits_for_comes_first(capfd):
    simgpu.start(1, races="warn")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    x, out = torch.ones(2, device="cuda"), torch.full((2,), 9.0, device="cuda")
    dist.all_gather([out], x, async_op=True)
    assert (out * 1).tolist() == [1, 1]
    work = dist.all_gather([out], x, async_op=True)
    out.fill_(7)  # which is later in the program
    work.wait()
    assert (out * 1).tolist() == [7, 7]
    dist.destroy_process_group()
    assert capfd.readouterr().err.count("goes on with the right values") == 2
