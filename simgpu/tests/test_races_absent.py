"""Programs without a race: none may raise, whether races raise or are shown."""

import functools
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import simgpu
from simgpu import _runtime as runtime
from support.limits import SHORT
from support.side_streams import main_stream, side_stream

pytestmark = pytest.mark.usefixtures("stopped")


def same_values_in_both_modes(program, *args) -> None:
    values = []
    for mode in ("raise", "show"):
        simgpu.start(2, races=mode)
        values.append(program(*args))
        simgpu.stop()
    assert values[0] == values[1]


# -- what puts work in order -----------------------------------------------------------


def poll(side):
    event = side.record_event()
    while not event.query():
        pass


def wait_through_a_third(side):
    third = torch.cuda.Stream()
    third.wait_stream(side)
    main_stream().wait_stream(third)


def clear_and_synchronize(side):
    simgpu.timeline().clear()
    torch.cuda.synchronize()


def clear_and_wait_for_event(side):
    event = side.record_event()
    simgpu.timeline().clear()
    event.wait()


ORDERS = {
    "wait_stream": lambda side: main_stream().wait_stream(side),
    "wait_event": lambda side: main_stream().wait_event(side.record_event()),
    "event wait": lambda side: side.record_event().wait(),
    "event wait on": lambda side: side.record_event().wait(main_stream()),
    "event synchronize": lambda side: side.record_event().synchronize(),
    "event query": poll,
    "stream synchronize": lambda side: side.synchronize(),
    "synchronize": lambda side: torch.cuda.synchronize(),
    "synchronize 0": lambda side: torch.cuda.synchronize("cuda:0"),
    "accelerator": lambda side: torch.accelerator.synchronize(),
    "through a third": wait_through_a_third,
    "any stream": lambda side: torch.accelerator.current_stream().wait_stream(side),
    "synchronize after clear": clear_and_synchronize,
    "event over clear": clear_and_wait_for_event,
}


def write_and_read(order):
    x, side = torch.zeros(8, device="cuda"), side_stream()
    with torch.cuda.stream(side):
        x.add_(1)
        y = x * 2
    order(side)
    y.record_stream(main_stream())
    return (x + y).sum().item()


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_what_puts_work_in_order_ends_the_race(order):
    same_values_in_both_modes(write_and_read, order)


# the host waits for each of these, and so for all that its stream was given before
HOST_WAITS = {
    "item": lambda y: y.sum().item(),
    "cpu": lambda y: y.cpu(),
    "nonzero": lambda y: y.nonzero(),
    "print": lambda y: len(str(y)),
    "copy of pageable memory": lambda y: torch.ones(8).to("cuda", non_blocking=True),
    "tensor of a list": lambda y: torch.tensor([1.0, 2.0], device="cuda"),
}


def make_and_read(wait):
    with torch.cuda.stream(side_stream()):
        y = torch.ones(8, device="cuda")
        found = wait(y)
    return (y + 1).tolist(), torch.as_tensor(found).add(1).tolist()


@pytest.mark.parametrize("wait", HOST_WAITS.values(), ids=HOST_WAITS)
def test_what_the_host_waits_for_ends_the_race(wait):
    same_values_in_both_modes(make_and_read, wait)


# -- parts of one tensor ---------------------------------------------------------------

PARTS = {
    "rows": lambda x: (x[:6], x[6:]),
    "every other row": lambda x: (x[::2], x[1::2]),
    "chunks": lambda x: x.chunk(2),
    "column chunks": lambda x: x.chunk(2, dim=1),
    "columns": lambda x: (x[:, 3], x[:, 4]),
    "strided columns": lambda x: (x[:, ::2], x[:, 1::2]),
    "transposed": lambda x: (x.T[:3], x.T[5:]),
    "blocks": lambda x: (x[:6, :5], x[6:, :5]),
    "diagonal and corner": lambda x: (x.diagonal(), x[1:, 0]),
    "elements": lambda x: (x[3, 4], x[3, 5]),
    "unbound": lambda x: (x.unbind(1)[0], x.unbind(1)[9]),
    "nothing": lambda x: (x[:0], x),
    "as_strided": lambda x: (
        x.as_strided((5, 3), (20, 1)),
        x.as_strided((5, 3), (20, 1), 10),
    ),
}


def write_parts(cut, rows, columns):
    x = torch.zeros(rows, columns, device="cuda")
    one, other = cut(x)
    side = side_stream()
    for _ in range(2):
        with torch.cuda.stream(side):
            one.add_(1)
            one.sum()
        other.add_(2)
        other.sum()
    main_stream().wait_stream(side)
    return x.tolist()


@pytest.mark.parametrize("cut", PARTS.values(), ids=PARTS)
def test_parts_that_do_not_overlap_do_not_race(cut):
    same_values_in_both_modes(write_parts, cut, 12, 10)


def test_columns_longer_than_what_is_watched_do_not_race():
    same_values_in_both_modes(write_parts, lambda x: (x[:, 0], x[:, 1]), 1500, 3)


# -- backward, which autograd puts in order with forward -------------------------------


def weight() -> torch.Tensor:
    return torch.ones(8, device="cuda", requires_grad=True)


def gradients_used_where_forward_was():
    w, side = weight(), side_stream()
    with torch.cuda.stream(side):
        loss = (w.exp() * w).sum()
    loss.backward()  # on `side`
    with torch.cuda.stream(side):
        return (w.grad * 2).tolist()


def gradients_used_where_forward_and_not_backward_was():
    w, side = weight(), side_stream()
    loss = (w.exp() * w).sum()
    with torch.cuda.stream(side):
        loss.backward()  # on the default stream
        aside = (w.grad * 2).tolist()
    return (w.grad * 2).tolist(), aside


def own_gradient_of_the_stream_that_calls():
    w, side = weight(), side_stream()
    y = w.exp() * w
    with torch.cuda.stream(side):
        y.backward(torch.full((8,), 2.0, device="cuda"))
    return (w.grad * 2).tolist()


def gradients_that_are_returned():
    w, side = weight(), side_stream()
    with torch.cuda.stream(side):
        y = (w**3).sum()
    (first,) = torch.autograd.grad(y, w, create_graph=True)
    (first * 1).sum().backward()
    return first.tolist(), w.grad.tolist()


def inputs_that_arrive_during_backward():
    w, copier, total = weight(), torch.cuda.Stream(), 0.0
    for i in range(3):
        main_stream().wait_stream(copier)
        loss = (w * i).sum()
        with torch.cuda.stream(copier):
            torch.full((8,), float(i)).pin_memory().to("cuda", non_blocking=True)
        loss.backward()
        total += loss.item()
    return total, w.grad.tolist()


def checkpoints_on_a_side_stream(use_reentrant):
    torch.manual_seed(0)
    model, side = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).cuda(), torch.cuda.Stream()
    x = torch.ones(2, 4, device="cuda", requires_grad=True)
    side.wait_stream(main_stream())
    with torch.cuda.stream(side):
        y = checkpoint(model, x, use_reentrant=use_reentrant)
        loss = y.square().sum()
    loss.backward()
    return (model[0].weight.grad * 2).tolist(), (x.grad * 2).tolist()


def streams_of_two_gpus():
    w, one, other = weight(), side_stream(0), torch.cuda.Stream(1)
    with torch.cuda.stream(one):
        y = w * 2
        with torch.cuda.stream(other):
            loss = (y.to("cuda:1") * 3).sum()
    loss.backward()
    return (w.grad * 2).tolist()


BACKWARDS = [
    gradients_used_where_forward_was,
    gradients_used_where_forward_and_not_backward_was,
    own_gradient_of_the_stream_that_calls, gradients_that_are_returned,
    inputs_that_arrive_during_backward, streams_of_two_gpus,
    functools.partial(checkpoints_on_a_side_stream, False),
    functools.partial(checkpoints_on_a_side_stream, True),
]  # fmt: skip


@pytest.mark.parametrize("program", BACKWARDS, ids=lambda p: getattr(p, "__name__", ""))
def test_backward_is_in_order_with_forward_and_its_caller(program):
    same_values_in_both_modes(program)


@pytest.mark.parametrize(
    "forward_aside, clear, backward_aside",
    [(True, False, False), (True, True, False), (False, False, True)],
)
def test_backward_does_not_race_with_forward(forward_aside, clear, backward_aside):
    def program():
        w, main = torch.ones(8, device="cuda", requires_grad=True), main_stream()
        side = side_stream()
        with torch.cuda.stream(side if forward_aside else None):
            loss = (w.exp() * w).sum()  # backward reads what exp() has made
        if clear:
            simgpu.timeline().clear()
        with torch.cuda.stream(side if backward_aside else None):
            loss.backward()
        main.wait_stream(side)
        return w.grad.tolist()

    same_values_in_both_modes(program)


# -- longer programs -------------------------------------------------------------------


def shapes_are_not_read():
    with torch.cuda.stream(side_stream()):
        y = torch.ones(2, 3, device="cuda")
    made = [torch.zeros_like(y), torch.ones_like(y), y.new_full((2,), 1)]
    return [t.tolist() for t in made], y.view(6).stride(), torch.empty_like(y).shape


def reads_need_no_order():
    x = torch.ones(8, device="cuda")
    found = [x + 1]
    for stream in (side_stream(), side_stream()):
        with torch.cuda.stream(stream):
            found.append(x * 2)
    torch.cuda.synchronize()
    return [y.tolist() for y in found]


def two_checks_of_a_condition():
    condition = torch.ones((), dtype=torch.bool, device=0)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch._assert_async(condition)
    torch._assert_async(condition)


def memory_recorded_and_reused_later():
    side = side_stream()
    for _ in range(5):
        x = torch.ones(8, device="cuda")
        side.wait_stream(main_stream())
        with torch.cuda.stream(side):
            x.mul_(2)
        x.record_stream(side)
        del x
    torch.cuda.synchronize()
    return torch.ones(8, device="cuda").tolist()


def memory_freed_after_waiting():
    x, side = torch.ones(8, device="cuda"), side_stream()
    with torch.cuda.stream(side):
        x.mul_(2)
    main_stream().wait_stream(side)
    del x
    return torch.zeros(8, device="cuda").tolist()


def memory_given_back_to_cuda():
    x = torch.ones(2**20, device="cuda")
    with torch.cuda.stream(side_stream()):
        x.mul_(2)
    del x
    torch.cuda.empty_cache()
    return torch.zeros(2**20, device="cuda").sum().item()


def memory_never_written():
    with torch.cuda.stream(side_stream()):
        torch.empty(8, device="cuda").fill_(1)
    return torch.empty(8, device="cuda").fill_(2).tolist()


def two_buffers_in_turn():
    side = torch.cuda.Stream()
    buffers = [torch.zeros(8, device="cuda") for _ in range(2)]
    free = [main_stream().record_event() for _ in buffers]
    full = [torch.cuda.Event() for _ in buffers]
    total = torch.zeros(8, device="cuda")
    for i in range(6):
        buffer, here = buffers[i % 2], i % 2
        with torch.cuda.stream(side):
            free[here].wait()
            host = torch.full((8,), float(i)).pin_memory()
            buffer.copy_(host, non_blocking=True)
            full[here].record()
        full[here].wait()
        total += buffer
        free[here].record()
    return total.tolist()


def data_loader_with_pinned_memory():
    data = TensorDataset(torch.arange(12.0), torch.arange(12))
    side, found = torch.cuda.Stream(), []
    for x, y in DataLoader(data, 4, pin_memory=True):
        with torch.cuda.stream(side):
            x, y = (t.to("cuda", non_blocking=True) for t in (x, y))
        main_stream().wait_stream(side)
        for t in (x, y):
            t.record_stream(main_stream())
        found.append((x * y).sum())
    return torch.stack(found).tolist()


def two_gpus():
    a = torch.ones(8, device=0)
    torch.cuda.Stream()
    for _ in range(3):
        b = a.to(1, non_blocking=True)
        b += 1
        a = b.to(0)
    c = torch.zeros(8, device=1)
    c.copy_(a)
    a.add_(1)
    return (b + c + a.to(1)).tolist()


def peer_copies_before_the_first_stream():
    a = torch.ones(8, device=0)
    b, c = a.to(1), torch.zeros(8, device=1)
    c.copy_(a)
    torch.cuda.Stream(1)
    a.add_(1)
    b.add_(1)
    return (b + c).tolist()


def peer_copies_on_side_streams():
    one, other = torch.cuda.Stream(0), torch.cuda.Stream(1)
    with torch.cuda.stream(one):
        x = torch.ones(8, device=0)
        with torch.cuda.stream(other):
            y = x.to(1)
            y.add_(1)
            z = y.to(0)
        x.add_(1)
        return (x + z).tolist()


def event_of_another_gpu():
    side = torch.cuda.Stream(1)
    with torch.cuda.stream(side):
        y = torch.ones(8, device="cuda")
        event = side.record_event()
    event.wait(torch.cuda.current_stream(1))
    return (y + 1).tolist()


def replicas_in_threads():
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4).to(device) for device in range(2)]
    xs = torch.ones(4, 4, device="cuda").chunk(2)
    for device in range(2):
        side_stream(device)
    inputs = [x.to(device) for device, x in enumerate(xs)]
    outputs = nn.parallel.parallel_apply(layers, inputs)
    sum(out.sum().to(0) for out in outputs).backward()
    return [layer.weight.grad.tolist() for layer in layers]


def backward_over_two_streams():
    w = torch.ones(8, device="cuda", requires_grad=True)
    losses = []
    for side in (side_stream(), side_stream()):
        with torch.cuda.stream(side):
            losses.append(w.exp().sum())
        main_stream().wait_stream(side)
    sum(losses).backward()
    return w.grad.tolist()


def layers_with_state():
    torch.manual_seed(0)
    torch.cuda.Stream()
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(), nn.Linear(18, 4), nn.LayerNorm(4),
    ).cuda()  # fmt: skip
    for _ in range(2):
        model(torch.ones(2, 1, 8, 8, device="cuda")).sum().backward()
    return model[1].running_mean.tolist()


def threads_with_a_gpu_each():
    def work(device):
        x, side = torch.ones(8, device=device), torch.cuda.Stream(device)
        default = torch.cuda.current_stream(device)
        for _ in range(20):
            side.wait_stream(default)
            with torch.cuda.stream(side):
                y = x * 2
            default.wait_stream(side)
            (y + 1).cpu()
            torch.cuda.synchronize(device)
            default.record_event().synchronize()

    torch.cuda.Stream()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(work, device) for device in range(2)]:
                future.result(SHORT)
    finally:
        sys.setswitchinterval(interval)


PROGRAMS = [
    shapes_are_not_read, reads_need_no_order, two_checks_of_a_condition,
    memory_recorded_and_reused_later, memory_freed_after_waiting,
    memory_given_back_to_cuda, memory_never_written, two_buffers_in_turn,
    data_loader_with_pinned_memory, two_gpus,
    peer_copies_before_the_first_stream, peer_copies_on_side_streams,
    event_of_another_gpu, replicas_in_threads, backward_over_two_streams,
    layers_with_state, threads_with_a_gpu_each,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_a_program_in_order_does_not_race(program):
    same_values_in_both_modes(program)


# -- optimizers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, options",
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"foreach": False}),
        (torch.optim.SGD, {"fused": True}),
        (torch.optim.Adam, {}),
        (torch.optim.Adam, {"foreach": False}),
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.RMSprop, {"foreach": True}),
        (torch.optim.RMSprop, {"foreach": False}),
        (torch.optim.Adagrad, {"foreach": True}),
        (torch.optim.Adagrad, {"foreach": False}),
    ],
)
def test_optimizers_do_not_race_with_backward_on_a_side_stream(kind, options):
    simgpu.start(1)

    def train(on_side_stream: bool):
        torch.manual_seed(0)
        layer, main = nn.Linear(4, 4).cuda(), main_stream()
        optimizer = kind(layer.parameters(), lr=0.1, **options)
        side = torch.cuda.Stream() if on_side_stream else main
        for _ in range(2):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                layer(torch.ones(2, 4, device="cuda")).square().sum().backward()
            main.wait_stream(side)
            nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return layer.weight.tolist()

    assert train(on_side_stream=False) == train(on_side_stream=True)


# -- what the sanitizer remembers, on which its time depends ---------------------------


def remembered() -> int:
    """How much: pieces of memory, accesses and events."""
    sanitizer = runtime.running.sanitizer
    pieces = sanitizer.handler.tensors_accessed.accesses
    events = sanitizer.handler.syncs.recorded_sync_states
    reads = sum(len(piece.reads) for piece in pieces.values())
    return len(pieces) + len(sanitizer._intervals.lows) + reads + len(events)


def test_training_with_a_side_stream_remembers_no_more_each_step():
    simgpu.start(1)
    side = torch.cuda.Stream()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)).cuda()
    always, host = torch.ones(2, 4, device="cuda"), torch.ones(2, 4).pin_memory()

    def train(steps: int) -> None:
        for _ in range(steps):
            with torch.cuda.stream(side):
                x = host.to("cuda", non_blocking=True)
            main_stream().wait_stream(side)
            x.record_stream(main_stream())
            model(x + always).sum().backward()
            main_stream().record_event()
            model.zero_grad()

    train(10)
    before = remembered()
    train(30)
    assert remembered() <= before + 15


def test_memory_written_in_small_pieces_becomes_whole_again():
    """Or every later use of it would cost as much as the pieces did."""
    simgpu.start(1)
    torch.cuda.Stream()
    x = torch.zeros(100, 20, device="cuda")
    for column in x.T:
        column.add_(1)
    assert remembered() > 2000
    x.add_(1)
    assert remembered() < 100
