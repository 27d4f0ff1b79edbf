"""Races that are shown: a racy read returns what the memory held before."""

import pytest
import torch
import torch.distributed as dist

import simgpu
from support.side_streams import main_stream, side_stream

pytestmark = pytest.mark.simulated_gpus(2, races="show")


def pinned(*values) -> torch.Tensor:
    return torch.tensor(values).pin_memory()


def waited(copy):
    main_stream().synchronize()
    return copy


BEFORE = [0, 1, 2, 3, 4, 5]
# each reads x, which is BEFORE, while a side stream multiplies it by 10; what it finds
READS = {
    "kernel": (lambda x: x + 1, [1, 2, 3, 4, 5, 6]),
    "copy to the host": (lambda x: x.cpu(), BEFORE),
    "copy without waiting": (lambda x: waited(x.to("cpu", non_blocking=True)), BEFORE),
    "item": (lambda x: torch.tensor(x[3].item()), 3),
    "condition": (lambda x: torch.tensor(bool(x[:1].add(x[1:2]) > 1)), False),
    "copy to a GPU": (lambda x: x.to(1), BEFORE),
    "copy into a tensor": (lambda x: torch.ones(6, device=1).copy_(x), BEFORE),
    "transposed": (lambda x: x.view(2, 3).T * 1, [[0, 3], [1, 4], [2, 5]]),
    "strided": (lambda x: x[1::2] * 1, [1, 3, 5]),
    "expanded": (lambda x: x[2:3].expand(2, 2) * 1, [[2, 2], [2, 2]]),
    "twice": (lambda x: x + x, [0, 2, 4, 6, 8, 10]),
    "twice, once as a view": (lambda x: x + x.view(6), [0, 2, 4, 6, 8, 10]),
    "second input": (lambda x: torch.ones(6, device=0) + x, [1, 2, 3, 4, 5, 6]),
    "list": (lambda x: torch.cat([torch.ones(1, device=0), x[:2]]), [1, 0, 1]),
}


@pytest.mark.parametrize("read, wanted", READS.values(), ids=READS)
def test_a_racy_read_finds_what_was_there_before(read, wanted):
    x = torch.arange(6.0, device="cuda")
    with torch.cuda.stream(side_stream()):
        x.mul_(10)
    assert read(x).tolist() == wanted


# each writes to x on a side stream
WRITES = {
    "several times": lambda x: x.mul_(10).add_(5),
    "in part": lambda x: x[2:].mul_(10),
    "part by part": lambda x: (x[:2].mul_(10), x[2:].mul_(10)),
    "foreach": lambda x: torch._foreach_mul_([x], 2),
    "copy": lambda x: x.copy_(pinned(7, 7, 7, 7), non_blocking=True),
    "peer copy": lambda x: x.copy_(torch.ones(4, device=1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_was_there_before_any_kind_of_write_is_found(write, dtype):
    x = torch.arange(4, device="cuda", dtype=dtype)
    with torch.cuda.stream(side_stream()):
        write(x)
    assert (x * 1).tolist() == [0, 1, 2, 3] and (x[:2] * 1).tolist() == [0, 1]


def steps_to_something_new():
    y = torch.ones(2, device="cuda") * 2
    y += 1
    return y.relu_()


def gradient():
    w = torch.ones(2, device="cuda", requires_grad=True)
    (w * 5).sum().backward()
    return w.grad


# each makes a tensor on a side stream
FRESH = {
    "factory": lambda: torch.full((2,), 5.0, device="cuda"),
    "copy": lambda: pinned(5.0, 5.0).to("cuda", non_blocking=True),
    "several steps": steps_to_something_new,
    "gradient": gradient,
}


@pytest.mark.parametrize("make", FRESH.values(), ids=FRESH)
def test_fresh_memory_holds_zeros_before(make):
    with torch.cuda.stream(side_stream()):
        y = make()
    assert (y * 2).tolist() == [0, 0]


@pytest.mark.parametrize(
    "read, wanted",
    [(lambda x: x.conj() + 1j, [-1j, -1j]), (lambda x: x.conj().imag * 1, [-2, -2])],
    ids=["conjugated", "negated"],
)
def test_a_racy_read_of_complex_numbers_keeps_their_view(read, wanted):
    x = torch.full((2,), 2j, device="cuda")
    with torch.cuda.stream(side_stream()):
        x.fill_(5j)
    assert read(x).tolist() == wanted


def test_both_inputs_are_what_was_there_before():
    x, y = (torch.full((2,), value, device="cuda") for value in (1.0, 10.0))
    with torch.cuda.stream(side_stream()):
        x.mul_(10)
        y.mul_(10)
    assert (x + y).tolist() == [11, 11]


def test_a_racy_read_leaves_the_memory_as_it_is():
    x, side = torch.full((2,), 4.0, device="cuda"), side_stream()
    with torch.cuda.stream(side):
        x.mul_(10)
    (x + 1).add_(5)
    main_stream().wait_stream(side)
    assert (x * 1).tolist() == [40, 40]


@pytest.mark.parametrize(
    "wait",
    [lambda side: side.synchronize(), lambda side: main_stream().wait_stream(side)],
    ids=["host", "stream"],
)
def test_before_is_since_somebody_waited(wait):
    x, side = torch.full((2,), 4.0, device="cuda"), side_stream()
    for _ in range(2):
        wait(side)
        with torch.cuda.stream(side):
            x.mul_(10)
    assert (x * 1).tolist() == [40, 40]


def test_a_racy_print_shows_what_was_there_before_and_takes_no_memory():
    x = torch.arange(3.0, device="cuda")
    with torch.cuda.stream(side_stream()):
        x.mul_(10)
    before = torch.cuda.max_memory_allocated()
    assert repr(x) == "tensor([0., 1., 2.], device='cuda:0')"
    assert torch.cuda.max_memory_allocated() == before


def test_modes_are_checked():
    with pytest.raises(RuntimeError, match="before you start others"):
        simgpu.start(2)
    simgpu.stop()
    with pytest.raises(ValueError, match="raise, show"):
        simgpu.start(2, races="hide")
    assert simgpu.count() == 0


@pytest.fixture
def group():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_collective_that_nobody_waits_for_is_not_there_yet(group):
    x, out = torch.ones(2, device="cuda"), torch.full((2,), 9.0, device="cuda")
    work = dist.all_gather([out], x, async_op=True)
    assert (out * 1).tolist() == out.cpu().tolist() == [9, 9]
    work.wait()
    assert (out * 1).tolist() == [1, 1]


def test_a_collective_gives_what_the_memory_held_before_a_racy_write(group):
    x, out = torch.ones(2, device="cuda"), torch.empty(2, device="cuda")
    with torch.cuda.stream(side_stream()):
        x.mul_(10)
    dist.all_gather([out], x)
    assert out.tolist() == [1, 1]
