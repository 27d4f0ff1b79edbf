"""What is counted: copies, kernels and simulated time."""

import numpy as np
import pytest
import torch
from torch import nn

from helpers import simgpu


@pytest.fixture(autouse=True)
def log():
    simgpu.start(4)
    yield simgpu.timeline()
    simgpu.stop()


X = torch.arange(4.0)
UP, DOWN = ("cpu", "cuda:1"), ("cuda:1", "cpu")
COPIES = [
    (lambda y: X.to(1), [(*UP, 16)]),
    (lambda y: X.cuda(1), [(*UP, 16)]),
    (lambda y: y.to(2), [("cuda:1", "cuda:2", 16)]),
    (lambda y: y.cpu(), [(*DOWN, 16)]),
    (lambda y: y.to(1), []),
    (lambda y: y[0].item(), [(*DOWN, 4)]),
    (lambda y: float(y[0]), [(*DOWN, 4)]),
    (lambda y: bool(y[0] > 0), [(*DOWN, 1)]),
    (lambda y: y.tolist(), [(*DOWN, 16)]),
    (lambda y: torch.equal(y, y), [(*DOWN, 1)]),
    (lambda y: torch.tensor([1.0, 2.0], device=1), [(*UP, 8)]),
    (lambda y: torch.as_tensor([1.0], device=1), [(*UP, 4)]),
    (lambda y: torch.from_numpy(np.ones(2)).cuda(1), [(*UP, 16)]),
    (lambda y: torch.zeros(4, device=1), []),
    (lambda y: y.copy_(X), [(*UP, 16)]),
    (lambda y: torch.empty(4).copy_(y), [(*DOWN, 16)]),
    (lambda y: y[torch.tensor([0, 2])], [(*UP, 16)]),
    (lambda y: y[1:], []),
    (lambda y: y + torch.tensor(2.0), []),
    (lambda y: nn.Linear(2, 3).to(1), [(*UP, 24), (*UP, 12)]),
    (lambda y: repr(y) + str(y[:0]) + f"{y}", []),
    (lambda y: print(y), []),
]


@pytest.mark.parametrize("call, expected", COPIES)
def test_copies_are_counted(log, call, expected):
    y = X.to(1)
    log.clear()
    call(y)
    assert [(e.source, e.target, e.nbytes) for e in log.copies] == expected
    assert all(e.kind == "copy" and e.end > e.start for e in log.copies)


def test_kernels_are_counted_once(log):
    y = torch.ones(8, 8, device=1)
    log.clear()
    view = (y + y).T[1:]
    (view @ y).relu_()
    repr(view)
    assert [(e.name, e.device) for e in log.events] == [
        ("add", "cuda:1"),
        ("mm", "cuda:1"),
        ("relu_", "cuda:1"),
    ]
    add, mm, _ = log.events
    assert add.nbytes == 3 * 8 * 8 * 4 and add.flops == 0
    assert mm.flops == 2 * 7 * 8 * 8
    log.clear()
    assert log.events == [] and log.seconds == 0


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_inference_mode_counts_the_same(log, grad):
    layer, x = nn.Linear(4, 4).to(1), torch.ones(2, 4, device=1)
    log.clear()
    with grad():
        layer(x).relu()
    assert [(e.name, e.flops) for e in log.events] == [("addmm", 64), ("relu", 0)]


def test_the_host_and_the_cpu_leave_no_trace(log):
    a = torch.ones(8, 8)
    a @ a + 1
    torch.ones(8, 8, device="meta").sum()
    assert log.events == []


def test_waiting_for_a_value_takes_until_the_gpu_is_done(log):
    big = torch.ones(512, 512, device=1)
    log.clear()
    for _ in range(50):
        out = big @ big
    busy = log.busy()["cuda:1"]
    out[0, 0].item()
    copy = log.copies[-1]
    assert copy.start >= busy and log.seconds == copy.end


def test_times_are_the_same_every_time(log):
    def work():
        log.clear()
        layer = nn.Linear(32, 32).to(1)
        layer(torch.ones(8, 32, device=1)).sum().backward()
        return [(e.name, e.start, e.end) for e in log.events]

    assert work() == work()
