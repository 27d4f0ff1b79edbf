"""What the host does in a dry run: an optimizer's work, pinned memory, launches."""

import os
import shutil
import subprocess

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    fully_shard,
)

from simgpu import _runtime as state
from simgpu._dry.run import Job, run
from simgpu._timing import cost
from support.limits import SHORT

WIDE = 2048
COUNT = WIDE * WIDE  # parameters, 16 MiB
LOOP, FUSED = 84, 28  # bytes of AdamW for each float32 parameter


def by_hand(**how):
    """The optimizer's copies are on the host, as in ZeRO-Offload."""
    model = nn.Linear(WIDE, WIDE, bias=False).cuda()
    copy = model.weight.detach().cpu().requires_grad_()
    optimizer = torch.optim.AdamW([copy], **how)
    for _ in range(3):
        model(torch.ones(4, WIDE, device="cuda")).sum().backward()
        copy.grad = model.weight.grad.cpu()
        optimizer.step()
        model.weight.data.copy_(copy)
        model.weight.grad = None


def fsdp2(**how):
    dist.init_process_group("nccl")
    with torch.device("meta"):
        model = nn.Linear(WIDE, WIDE, bias=False)
    fully_shard(model, offload_policy=CPUOffloadPolicy())
    model.to_empty(device="cpu")
    train(model, **how)


def fsdp1(**how):
    dist.init_process_group("nccl")
    model = nn.Linear(WIDE, WIDE, bias=False)
    model = FullyShardedDataParallel(model, cpu_offload=CPUOffload(True), device_id=0)
    train(model, **how)


def train(model, **how):
    optimizer = torch.optim.AdamW(model.parameters(), **how)
    for _ in range(3):
        model(torch.ones(4, WIDE, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("program, ranks", [(by_hand, 1), (fsdp2, 2), (fsdp1, 2)])
@pytest.mark.parametrize("fused, each", [(False, LOOP), (True, FUSED)])
def test_an_optimizer_on_the_host_takes_the_time_of_its_memory(
    program, ranks, fused, each
):
    found = run(Job(ranks), lambda: program(fused=fused))
    expected = each * COUNT / ranks / cost.HOST_COMPUTE
    assert found.host_computes_seconds == pytest.approx(expected, rel=0.01)
    assert found.binds == "the host" and found.host_seconds > expected * 0.9
    assert "the host computes" in str(found)


def test_an_optimizer_on_the_card_takes_none_of_the_host():
    found = run(Job(), lambda: train(nn.Linear(WIDE, WIDE, bias=False).cuda()))
    assert found.host_computes_seconds == 0.0
    assert "the host computes" not in str(found)


def test_copies_to_an_optimizer_on_the_host_take_the_time_of_the_link():
    found = run(Job(), lambda: by_hand(fused=True))
    seconds = found.step_seconds - found.host_computes_seconds
    both_ways = 2 * 4 * COUNT / cost.HOST_COPY  # pageable memory
    assert both_ways < seconds < both_ways * 1.2


@pytest.mark.parametrize("by_loader", [False, True])
def test_a_loader_takes_no_time_of_the_host(by_loader):
    rows = torch.utils.data.TensorDataset(torch.ones(1024, 512))

    def program():
        loader = torch.utils.data.DataLoader(rows, 1024)
        model = nn.Linear(512, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            for (x,) in loader:
                x = x if by_loader else x + 1
                model(x.cuda()).sum().backward()
            optimizer.step()

    found = run(Job(), program)
    by_the_program = 2 * 1024 * 512 * 4 / cost.HOST_COMPUTE
    expected = 0.0 if by_loader else by_the_program
    assert found.host_computes_seconds == pytest.approx(expected)


def test_initial_weights_are_drawn_in_no_time():
    """Before the first step, as a job has it once; a step has other work."""
    ends = []

    def program():
        model = nn.Linear(WIDE, WIDE)
        ends.append(state.current().clock.host)
        train(model.cuda())

    run(Job(), program)
    assert ends == [0.0]


# -- launches --------------------------------------------------------------------------


def small(collectives: bool):
    def program():
        dist.init_process_group("nccl")
        model = nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            for _ in range(20):
                model(torch.ones(1, 8, device="cuda")).sum().backward()
            if collectives:
                dist.all_reduce(model.weight.grad)
            optimizer.step()

    return program


def test_a_host_between():
    seconds = [
        run(Job(8, host=host), small(False)).step_seconds
        for host in ("bare", 20, "20us", "fast", "slow")
    ]
    bare, twenty, again, fast, slow = seconds
    assert bare < twenty == again < fast
    assert (fast - bare) / (twenty - bare) == pytest.approx(26 / 10, rel=0.05)
    assert fast == slow  # which differ in collectives alone


def test_a_slow_host_is_slow_with_collectives():
    fast, slow = (
        run(Job(8, host=host), small(True)).step_seconds for host in ("fast", "slow")
    )
    assert slow - fast == pytest.approx(177e-6, rel=0.01)


@pytest.mark.parametrize("host", ["0", "-3", "slowest", "nan", "2e6"])
def test_a_host_that_cannot_be(host):
    with pytest.raises(ValueError, match="microseconds of a launch"):
        Job(host=host)


# -- beside ----------------------------------------------------------------------------


@pytest.mark.skipif(os.name != "posix", reason="a shell script")
def test_nvidia_smi_lists_the_cards_of_the_node():
    said = []

    def program():
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=SHORT
        )
        said.extend(done.stdout.splitlines())

    before = shutil.which("nvidia-smi")
    run(Job(16, card="A100"), program)
    assert len(said) == 8 and all("A100" in line for line in said)
    assert shutil.which("nvidia-smi") == before


def large_product():
    weight = nn.Parameter(torch.randn(8192, 8192, device="cuda").bfloat16())
    optimizer = torch.optim.SGD([weight])
    for _ in range(3):
        (weight @ weight).sum().backward()
        optimizer.step()


def test_computing_at_a_low_mfu_is_asked_about():
    def program():
        x = torch.randn(2**28, device="cuda", requires_grad=True)
        weight = nn.Parameter(torch.randn(512, 512, device="cuda"))
        optimizer = torch.optim.SGD([weight])
        for _ in range(3):
            ((weight @ weight).sum() + (x.sin() * 2).sum()).backward()
            optimizer.step()

    found = run(Job(), program)
    assert found.binds == "computing" and found.mfu < 0.05
    longest = next(iter(found.seconds_by_kernel.items()))
    assert longest[0] == "mul" and 0 < longest[1] < found.compute_seconds
    after = str(found).partition("can that be?")[2].splitlines()
    assert after[1].split()[0] == "mul"
    usual = run(Job(), large_product)
    assert usual.mfu > 0.05 and "can that be?" not in str(usual)
