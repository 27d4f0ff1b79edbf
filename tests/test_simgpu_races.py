"""Races between streams: which programs are racy, which are not, and what they read.

Each racy program marks the two lines that PyTorch's sanitizer must name: "# first" and
"# second". Each correct one must run without a word.
"""

import gc
import inspect
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.cuda._sanitizer import Access, CUDASanitizerErrors
from torch.utils.data import DataLoader, TensorDataset

from helpers import simgpu
from helpers.simgpu import placement
from tests.test_simgpu_training import skip_if_not_for_cuda


@pytest.fixture(autouse=True)
def stopped():
    yield
    simgpu.stop()


def lines(function) -> tuple[int, int]:
    """The numbers of the lines marked "# first" and "# second"."""
    source, start = inspect.getsourcelines(function)
    found = {
        mark: start + i
        for i, line in enumerate(source)
        for mark in ("first", "second")
        if line.rstrip().endswith(f"# {mark}")
    }
    return found["first"], found["second"]


def main() -> torch.cuda.Stream:
    return torch.cuda.current_stream()


def side_stream(device=None) -> torch.cuda.Stream:
    """A second stream, which has waited for all there is."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    return side


# -- racy programs ---------------------------------------------------------------------

RACY = []


def racy(function):
    RACY.append(function)
    return function


@racy
def read_after_write():
    side = side_stream()
    with torch.cuda.stream(side):
        y = torch.ones(8, device="cuda")  # first
    return y + 1  # second


@racy
def read_after_write_in_place():
    x = torch.ones(8, device="cuda")
    side = side_stream()
    with torch.cuda.stream(side):
        x.mul_(2)  # first
    return x.sum()  # second


@racy
def side_stream_does_not_wait():
    torch.cuda.Stream()
    x = torch.ones(8, device="cuda")  # first
    with torch.cuda.stream(torch.cuda.Stream()):
        return x + 1  # second


@racy
def written_before_the_first_stream():
    x = torch.ones(8, device="cuda")  # first
    with torch.cuda.stream(torch.cuda.Stream()):
        return x + 1  # second


@racy
def written_in_place_before_the_first_stream():
    x = torch.ones(8, device="cuda")
    x.cpu()
    x.add_(1)  # first
    with torch.cuda.stream(torch.cuda.Stream()):
        return x + 1  # second


@racy
def copied_before_the_first_stream():
    x = torch.ones(8).pin_memory().to("cuda", non_blocking=True)  # first
    with torch.cuda.stream(torch.cuda.Stream()):
        return x + 1  # second


@racy
def write_after_read():
    x = torch.ones(8, device="cuda")
    side = side_stream()
    with torch.cuda.stream(side):
        x * 2  # first
    x.zero_()  # second


@racy
def write_after_two_reads():
    x = torch.ones(8, device="cuda")
    side = side_stream()
    with torch.cuda.stream(side):
        x * 2  # first
    x * 3
    x.zero_()  # second


@racy
def write_after_write():
    x = torch.empty(8, device="cuda")
    side = side_stream()
    with torch.cuda.stream(side):
        x.fill_(1)  # first
    x.fill_(2)  # second


@racy
def waited_too_early():
    side = side_stream()
    with torch.cuda.stream(side):
        y = torch.ones(8, device="cuda")
        main().wait_stream(side)
        y.add_(1)  # first
    return y + 1  # second


@racy
def event_recorded_too_early():
    side = side_stream()
    with torch.cuda.stream(side):
        y = torch.ones(8, device="cuda")
        event = side.record_event()
        y.add_(1)  # first
    event.wait()
    return y + 1  # second


@racy
def event_waited_for_by_another_stream():
    side, third = side_stream(), side_stream()
    with torch.cuda.stream(side):
        y = torch.ones(8, device="cuda")  # first
        side.record_event().wait(third)
    return y + 1  # second


@racy
def other_stream_synchronized():
    side, third = side_stream(), side_stream()
    with torch.cuda.stream(side):
        y = torch.ones(8, device="cuda")  # first
    third.synchronize()
    return y + 1  # second


@racy
def other_gpu_synchronized():
    side = side_stream()
    with torch.cuda.stream(side):
        y = torch.ones(8, device="cuda")  # first
    torch.cuda.synchronize(1)
    return y + 1  # second


@racy
def forgotten_event():
    side = side_stream()
    with torch.cuda.stream(side):
        y = torch.ones(8, device="cuda")  # first
    torch.cuda.Event().wait()
    return y + 1  # second


@racy
def memory_reused_while_it_is_read():
    x = torch.ones(8, device="cuda")
    side = side_stream()
    with torch.cuda.stream(side):
        x * 2  # first
    del x
    return torch.ones(8, device="cuda")  # second


@racy
def memory_reused_while_it_is_written():
    x = torch.ones(8, device="cuda")
    side = side_stream()
    with torch.cuda.stream(side):
        x.mul_(2)  # first
    del x
    return torch.zeros(8, device="cuda")  # second


@racy
def memory_reused_by_a_smaller_tensor():
    x = torch.ones(2048, device="cuda")
    side = side_stream()
    with torch.cuda.stream(side):
        x.mul_(2)  # first
    del x
    return torch.zeros(8, device="cuda")  # second


@racy
def memory_of_the_side_stream_reused():
    side = side_stream()
    with torch.cuda.stream(side):
        x = torch.ones(8, device="cuda")
    main().wait_stream(side)
    x + 1  # first
    del x
    with torch.cuda.stream(side):
        return torch.ones(8, device="cuda")  # second


@racy
def buffer_overwritten_by_a_copy():
    buffer, host = torch.ones(8, device="cuda"), torch.ones(8).pin_memory()
    side = side_stream()
    buffer * 2  # first
    with torch.cuda.stream(side):
        buffer.copy_(host, non_blocking=True)  # second


@racy
def buffer_read_while_a_copy_fills_it():
    buffer, host = torch.ones(8, device="cuda"), torch.ones(8).pin_memory()
    side = side_stream()
    with torch.cuda.stream(side):
        buffer.copy_(host, non_blocking=True)  # first
    return buffer * 2  # second


@racy
def batch_used_before_it_has_arrived():
    side = side_stream()
    with torch.cuda.stream(side):
        x = torch.ones(8).pin_memory().to("cuda", non_blocking=True)  # first
    return x * 2  # second


@racy
def result_copied_before_it_is_there():
    side = side_stream()
    with torch.cuda.stream(side):
        y = torch.ones(8, device="cuda")  # first
    return y.to("cpu", non_blocking=True)  # second


@racy
def item_before_it_is_there():
    side = side_stream()
    with torch.cuda.stream(side):
        y = torch.ones((), device="cuda")  # first
    return y.item()  # second


@racy
def tolist_before_it_is_there():
    side = side_stream()
    with torch.cuda.stream(side):
        y = torch.ones(3, device="cuda")  # first
    return y.tolist()  # second


@racy
def condition_before_it_is_there():
    side = side_stream()
    with torch.cuda.stream(side):
        y = torch.ones(3, device="cuda").sum() > 2  # first
    return 1 if y else 0  # second


@racy
def printed_before_it_is_there():
    side = side_stream()
    with torch.cuda.stream(side):
        y = torch.ones(3, device="cuda")  # first
    return str(y)  # second


@racy
def peer_copy_of_what_is_not_there():
    side = side_stream()
    with torch.cuda.stream(side):
        y = torch.ones(3, device="cuda")  # first
    return y.to(1)  # second


@racy
def peer_copy_into_what_is_being_read():
    target, source = torch.ones(3, device=1), torch.ones(3, device=0)
    side = side_stream(1)
    with torch.cuda.stream(side):
        target * 2  # first
    torch.cuda.set_device(0)
    target.copy_(source)  # second


@racy
def through_a_view():
    x = torch.ones(4, 4, device="cuda")
    side = side_stream()
    with torch.cuda.stream(side):
        x.T[1].add_(1)  # first
    return x[2] + 1  # second


@racy
def slices_that_overlap():
    x = torch.ones(10, device="cuda")
    side = side_stream()
    with torch.cuda.stream(side):
        x[:6].add_(1)  # first
    x[5:].add_(1)  # second


@racy
def column_of_a_tall_matrix():
    x = torch.ones(3000, 4, device="cuda")
    side = side_stream()
    with torch.cuda.stream(side):
        x[:, 2].add_(1)  # first
    return x[900:1000].sum()  # second


@racy
def expanded():
    x = torch.ones(1, device="cuda")
    side = side_stream()
    with torch.cuda.stream(side):
        x.add_(1)  # first
    return x.expand(8).sum()  # second


@racy
def indexed():
    x, where = torch.ones(8, device="cuda"), torch.tensor([1, 2], device="cuda")
    side = side_stream()
    with torch.cuda.stream(side):
        x[where] = 3  # first
    return x + 1  # second


@racy
def second_input():
    x, y = torch.ones(8, device="cuda"), torch.ones(8, device="cuda")
    side = side_stream()
    with torch.cuda.stream(side):
        y.add_(1)  # first
    return torch.add(x, y)  # second


@racy
def out_argument():
    x, out = torch.ones(8, device="cuda"), torch.ones(8, device="cuda")
    side = side_stream()
    with torch.cuda.stream(side):
        out + 1  # first
    torch.add(x, 1, out=out)  # second


@racy
def inputs_in_a_list():
    side = side_stream()
    with torch.cuda.stream(side):
        parts = [torch.ones(8, device="cuda") for _ in range(3)]  # first
    return torch.cat(parts)  # second


@racy
def written_by_foreach():
    xs = [torch.ones(8, device="cuda") for _ in range(3)]
    side = side_stream()
    with torch.cuda.stream(side):
        torch._foreach_add_(xs, 1)  # first
    return xs[2] + 1  # second


@racy
def read_by_foreach():
    xs = [torch.ones(8, device="cuda") for _ in range(3)]
    side = side_stream()
    with torch.cuda.stream(side):
        xs[1].add_(1)  # first
    return torch._foreach_mul(xs, 2)  # second


@racy
def weights_read_while_they_are_stepped():
    layer = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.Adam(layer.parameters(), foreach=True)
    x = torch.ones(2, 4, device="cuda")
    layer(x).sum().backward()
    side = side_stream()
    with torch.cuda.stream(side):
        layer(x)  # first
    optimizer.step()  # second


@racy
def weights_stepped_on_another_stream():
    layer = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)
    x = torch.ones(2, 4, device="cuda")
    layer(x).sum().backward()
    side = side_stream()
    with torch.cuda.stream(side):
        optimizer.step()  # first
    return layer(x)  # second


@racy
def gradients_of_backward_on_another_stream():
    w = torch.ones(8, device="cuda", requires_grad=True)
    loss = (w * 2).sum()
    side = side_stream()
    with torch.cuda.stream(side):
        loss.backward()  # first
    return w.grad + 1  # second


@racy
def forward_on_another_stream():
    layer, x = nn.Linear(4, 4).cuda(), torch.ones(2, 4, device="cuda")
    side = side_stream()
    with torch.cuda.stream(side):
        out = layer(x)  # first
    return out.sum()  # second


@racy
def two_side_streams():
    a, b = side_stream(), side_stream()
    with torch.cuda.stream(a):
        y = torch.ones(8, device="cuda")  # first
    with torch.cuda.stream(b):
        return y + 1  # second


@racy
def any_stream():
    with torch.Stream():
        y = torch.ones(8, device="cuda")  # first
    return y + 1  # second


@racy
def random_numbers():
    side = side_stream()
    with torch.cuda.stream(side):
        y = torch.rand(8, device="cuda")  # first
    return y.normal_()  # second


@racy
def in_another_thread():
    side = side_stream()
    x = torch.ones(8, device="cuda")  # first
    found = []

    def work():
        with torch.cuda.stream(side):
            try:
                x + 1  # second
            except CUDASanitizerErrors as error:
                found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    if found:
        raise found[0]


@pytest.mark.parametrize("program", RACY, ids=lambda f: f.__name__)
def test_racy_programs_name_both_lines(program):
    simgpu.start(2)
    with pytest.raises(CUDASanitizerErrors) as raised:
        program()
    words = str(raised.value)
    first, second = lines(program)
    file = f'File "{__file__}", line'
    assert "CSAN detected a possible data race" in words
    current, previous = words.split("Previous access by stream", 1)
    assert f"{file} {second}, in " in current
    assert f"{file} {first}, in " in previous.split("CSAN detected")[0]
    for line in (first, second):
        text = inspect.getsource(sys.modules[__name__]).splitlines()[line - 1]
        assert text.strip().split("  #")[0] in words
    assert "/torch/" not in words and "/simgpu/" not in words
    assert raised.value.errors[0].current_access.stack_trace[-1].lineno == second


@pytest.mark.parametrize("way", ["raise", "show"])
def test_a_race_is_an_error_once_and_the_gpu_goes_on(way):
    simgpu.start(2, races=way)
    with pytest.raises(CUDASanitizerErrors, match="writing to"):
        write_after_write()
    torch.cuda.synchronize()
    x = torch.ones(8, device="cuda")
    assert (x + 1).tolist() == [2] * 8


# -- correct programs ------------------------------------------------------------------

CORRECT = []


def correct(function):
    CORRECT.append(function)
    return function


def by(order):
    """A program in which `order(side)` stands between the write and the read."""

    def program():
        x = torch.zeros(8, device="cuda")
        side = side_stream()
        with torch.cuda.stream(side):
            x.add_(1)
            y = x * 2
        order(side)
        y.record_stream(main())
        return (x + y).sum().item()

    return program


def timed_event(side):
    event = torch.cuda.Event(enable_timing=True)
    event.record(side)
    while not event.query():
        pass


def on_the_third(side):
    third = torch.cuda.Stream()
    third.wait_stream(side)
    main().wait_stream(third)


ORDERS = {
    "wait_stream": lambda side: main().wait_stream(side),
    "wait_event": lambda side: main().wait_event(side.record_event()),
    "event wait": lambda side: side.record_event().wait(),
    "event wait on": lambda side: side.record_event().wait(main()),
    "event synchronize": lambda side: side.record_event().synchronize(),
    "event query": timed_event,
    "stream synchronize": lambda side: side.synchronize(),
    "synchronize": lambda side: torch.cuda.synchronize(),
    "synchronize 0": lambda side: torch.cuda.synchronize("cuda:0"),
    "accelerator": lambda side: torch.accelerator.synchronize(),
    "through a third": on_the_third,
    "any stream": lambda side: torch.accelerator.current_stream().wait_stream(side),
    "two waits": lambda side: [main().wait_stream(side) for _ in range(2)],
    "after clear": lambda side: (
        simgpu.timeline().clear(),
        torch.cuda.synchronize(),
    ),
    "event over clear": lambda side: (
        (event := side.record_event()),
        simgpu.timeline().clear(),
        event.wait(),
    ),
}
for name, order in ORDERS.items():
    CORRECT.append(by(order))
    CORRECT[-1].__name__ = name


@correct
def nothing_but_the_default_stream():
    torch.cuda.Stream()
    x = torch.ones(8, device="cuda")
    for _ in range(3):
        x = x * 2
        x.add_(1)
    return x.tolist()


@correct
def item_waits():
    side = side_stream()
    with torch.cuda.stream(side):
        y = torch.ones(8, device="cuda")
        y.sum().item()
    return (y + 1).tolist()


@correct
def cpu_waits():
    side = side_stream()
    with torch.cuda.stream(side):
        y = torch.ones(8, device="cuda")
        y.cpu()
    return (y + 1).tolist()


@correct
def nonzero_waits():
    side = side_stream()
    with torch.cuda.stream(side):
        y = torch.ones(8, device="cuda")
        y.nonzero()
    return (y + 1).tolist()


@correct
def pageable_copy_waits():
    side = side_stream()
    with torch.cuda.stream(side):
        y = torch.ones(8).to("cuda", non_blocking=True)
    return (y + 1).tolist()


@correct
def tensor_of_a_list_waits():
    side = side_stream()
    with torch.cuda.stream(side):
        y = torch.tensor([1.0, 2.0], device="cuda")
    return (y + 1).tolist()


@correct
def shapes_are_not_read():
    side = side_stream()
    with torch.cuda.stream(side):
        y = torch.ones(2, 3, device="cuda")
    made = [torch.zeros_like(y), torch.ones_like(y), y.new_full((2,), 1), y.T.shape]
    return [t.tolist() for t in made[:3]], y.view(6).stride(), torch.empty_like(y).shape


@correct
def reads_need_no_order():
    x = torch.ones(8, device="cuda")
    a, b = side_stream(), side_stream()
    found = [x + 1]
    for stream in (a, b):
        with torch.cuda.stream(stream):
            found.append(x * 2)
    torch.cuda.synchronize()
    return [y.tolist() for y in found]


@correct
def memory_recorded():
    side, x = side_stream(), torch.ones(8, device="cuda")
    side.wait_stream(main())
    with torch.cuda.stream(side):
        y = x * 2
    x.record_stream(side)
    del x
    z = torch.zeros(8, device="cuda")
    side.synchronize()
    return y.tolist() + z.tolist()


@correct
def memory_recorded_and_reused_later():
    side = side_stream()
    for _ in range(20):
        x = torch.ones(8, device="cuda")
        side.wait_stream(main())
        with torch.cuda.stream(side):
            x.mul_(2)
        x.record_stream(side)
        del x
    torch.cuda.synchronize()
    return torch.ones(8, device="cuda").tolist()


@correct
def memory_freed_after_waiting():
    x = torch.ones(8, device="cuda")
    side = side_stream()
    with torch.cuda.stream(side):
        x.mul_(2)
    main().wait_stream(side)
    del x
    return torch.zeros(8, device="cuda").tolist()


@correct
def memory_given_back_to_cuda():
    x = torch.ones(2**20, device="cuda")
    side = side_stream()
    with torch.cuda.stream(side):
        x.mul_(2)
    del x
    torch.cuda.empty_cache()
    return torch.zeros(2**20, device="cuda").sum().item()


@correct
def memory_never_written():
    side = side_stream()
    with torch.cuda.stream(side):
        torch.empty(8, device="cuda").fill_(1)
    return torch.empty(8, device="cuda").fill_(2).tolist()


def halves(cut):
    """Two streams that write different parts of one tensor."""

    def program():
        x = torch.zeros(12, 10, device="cuda")
        one, other = cut(x)
        side = side_stream()
        for _ in range(3):
            with torch.cuda.stream(side):
                one.add_(1)
                one.sum()
            other.add_(2)
            other.sum()
        main().wait_stream(side)
        return x.tolist()

    return program


CUTS = {
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
for name, cut in CUTS.items():
    CORRECT.append(halves(cut))
    CORRECT[-1].__name__ = f"disjoint {name}"


@correct
def large_disjoint_columns():
    x = torch.zeros(3000, 4, device="cuda")
    side = side_stream()
    with torch.cuda.stream(side):
        x[:, 0].add_(1)
    x[:, 1].add_(1)
    main().wait_stream(side)
    return x.sum().item()


@correct
def prefetching_loop():
    """The next batch is copied while this one is used."""
    side = torch.cuda.Stream()
    batches = [torch.full((8,), float(i)).pin_memory() for i in range(6)]
    total, following = torch.zeros(8, device="cuda"), None
    for batch in [*batches, None]:
        x = following
        if x is not None:
            main().wait_stream(side)
            x.record_stream(main())
        if batch is not None:
            with torch.cuda.stream(side):
                following = batch.to("cuda", non_blocking=True)
        if x is not None:
            total += x
    return total.tolist()


@correct
def two_buffers_in_turn():
    side = torch.cuda.Stream()
    buffers = [torch.zeros(8, device="cuda") for _ in range(2)]
    free = [torch.cuda.Event() for _ in buffers]
    full = [torch.cuda.Event() for _ in buffers]
    for event in free:
        event.record()
    total = torch.zeros(8, device="cuda")
    for i in range(8):
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


@correct
def data_loader_with_pinned_memory():
    data = TensorDataset(torch.arange(12.0), torch.arange(12))
    side, found = torch.cuda.Stream(), []
    for x, y in DataLoader(data, 4, pin_memory=True):
        with torch.cuda.stream(side):
            x, y = (t.to("cuda", non_blocking=True) for t in (x, y))
        main().wait_stream(side)
        for t in (x, y):
            t.record_stream(main())
        found.append((x * y).sum())
    return torch.stack(found).tolist()


@correct
def results_copied_back():
    side, found = torch.cuda.Stream(), []
    for i in range(4):
        y = torch.full((8,), float(i), device="cuda")
        side.wait_stream(main())
        with torch.cuda.stream(side):
            found.append(y.to("cpu", non_blocking=True))
        y.record_stream(side)
    side.synchronize()
    return [y.tolist() for y in found]


@correct
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


@correct
def peer_copies_before_the_first_stream():
    a = torch.ones(8, device=0)
    b, c = a.to(1), torch.zeros(8, device=1)
    c.copy_(a)
    torch.cuda.Stream(1)
    a.add_(1)
    b.add_(1)
    return (b + c).tolist()


@correct
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


@correct
def event_of_another_gpu():
    side = torch.cuda.Stream(1)
    with torch.cuda.stream(side):
        y = torch.ones(8, device="cuda")
        event = side.record_event()
    event.wait(torch.cuda.current_stream(1))
    return (y + 1).tolist()


@correct
def replicas_in_threads():
    torch.manual_seed(0)
    sides = [torch.cuda.Stream(0), torch.cuda.Stream(1)]
    layers = [nn.Linear(4, 4).to(device) for device in range(2)]
    xs = torch.ones(4, 4, device="cuda").chunk(2)
    for side in sides:
        side.wait_stream(torch.cuda.current_stream(side.device))
    inputs = [x.to(device) for device, x in enumerate(xs)]
    outputs = nn.parallel.parallel_apply(layers, inputs)
    sum(out.sum().to(0) for out in outputs).backward()
    return [layer.weight.grad.tolist() for layer in layers]


@correct
def backward_after_waiting():
    w = torch.ones(8, device="cuda", requires_grad=True)
    side = side_stream()
    with torch.cuda.stream(side):
        loss = (w * 2).sum()
    main().wait_stream(side)
    loss.backward()
    return w.grad.tolist()


@correct
def backward_of_a_side_stream():
    """autograd puts forward, backward and the gradients in order by itself."""
    w = torch.ones(8, device="cuda", requires_grad=True)
    side = side_stream()
    with torch.cuda.stream(side):
        loss = (w * w).sum()
    loss.backward()
    return w.grad.tolist()


@correct
def backward_on_a_side_stream():
    w = torch.ones(8, device="cuda", requires_grad=True)
    loss = (w * w).sum()
    side = side_stream()
    with torch.cuda.stream(side):
        loss.backward()
    main().wait_stream(side)
    return w.grad.tolist()


@correct
def backward_over_two_streams():
    w = torch.ones(8, device="cuda", requires_grad=True)
    a, b = side_stream(), side_stream()
    with torch.cuda.stream(a):
        left = (w * 2).sum()
    with torch.cuda.stream(b):
        right = (w * 3).sum()
    main().wait_stream(a)
    main().wait_stream(b)
    (left + right).backward()
    return w.grad.tolist()


@correct
def backward_after_clear():
    w = torch.ones(8, device="cuda", requires_grad=True)
    side = side_stream()
    with torch.cuda.stream(side):
        loss = (w * 2).sum()
    simgpu.timeline().clear()
    loss.backward()
    return w.grad.tolist()


@correct
def out_arguments():
    side = side_stream()
    x, out = torch.ones(8, device="cuda"), torch.empty(8, device="cuda")
    side.wait_stream(main())
    with torch.cuda.stream(side):
        torch.add(x, 1, out=out)
    main().wait_stream(side)
    torch.mul(out, 2, out=x)
    return x.tolist()


@correct
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


@correct
def printed():
    side = side_stream()
    with torch.cuda.stream(side):
        y = torch.ones(3, device="cuda")
        words = str(y)
    return words


@correct
def threads_with_a_gpu_each():
    errors: list = []

    def work(device):
        try:
            x, side = torch.ones(8, device=device), torch.cuda.Stream(device)
            default = torch.cuda.current_stream(device)
            for _ in range(30):
                side.wait_stream(default)
                with torch.cuda.stream(side):
                    y = x * 2
                default.wait_stream(side)
                (y + 1).cpu()
                torch.cuda.synchronize(device)
                default.record_event().synchronize()
        except BaseException as error:
            errors.append(error)

    torch.cuda.Stream()
    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert errors == []


@pytest.mark.parametrize("program", CORRECT, ids=lambda f: f.__name__)
def test_correct_programs_run_and_give_the_same_values(program):
    values = []
    for way in ("raise", "show"):
        simgpu.start(2, races=way)
        values.append(program())
        simgpu.stop()
    assert values[0] == values[1]


OPTIMIZERS = [
    (kind, how)
    for kind in (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
    )  # fmt: skip
    for how in ({}, {"foreach": True}, {"foreach": False}, {"fused": True})
    if kind is not torch.optim.RMSprop or "fused" not in how
]


@pytest.mark.parametrize(
    "kind, how", OPTIMIZERS, ids=lambda v: getattr(v, "__name__", str(v))
)
def test_optimizers_raise_no_alarm_while_a_side_stream_is_alive(kind, how):
    simgpu.start(1)
    skip_if_not_for_cuda(kind, how)
    simgpu.stop()

    def weights(watched: bool):
        simgpu.start(1)
        torch.manual_seed(0)
        layer = nn.Linear(4, 4).cuda()
        optimizer = kind(layer.parameters(), lr=0.1, **how)
        side = torch.cuda.Stream() if watched else None
        for _ in range(3):
            if side:
                side.wait_stream(main())
            with torch.cuda.stream(side):
                layer(torch.ones(2, 4, device="cuda")).square().sum().backward()
            if side:
                main().wait_stream(side)
            nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found = layer.weight.tolist()
        simgpu.stop()
        return found

    assert weights(watched=True) == weights(watched=False)


def test_training_with_a_side_stream_does_not_grow():
    """What the sanitizer remembers, and so the time that it takes."""
    simgpu.start(1)
    side = torch.cuda.Stream()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    always = torch.ones(2, 4, device="cuda")
    host = torch.ones(2, 4).pin_memory()

    def train(steps: int) -> None:
        for _ in range(steps):
            with torch.cuda.stream(side):
                x = host.to("cuda", non_blocking=True)
            main().wait_stream(side)
            x.record_stream(main())
            model(x + always).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def known() -> int:
        """How much the sanitizer remembers."""
        gc.collect()
        handler, atoms = placement.running.races.handler, placement.running.races._atoms
        accesses = sum(type(thing) is Access for thing in gc.get_objects())
        return accesses + len(handler.syncs.recorded_sync_states) + len(atoms.lows)

    train(20)
    before = known()
    train(180)
    assert known() <= before + 40


def test_memory_written_in_small_pieces_becomes_whole_again():
    """Or every later use of it would cost as much as the pieces did."""
    simgpu.start(1)
    torch.cuda.Stream()
    x = torch.zeros(100, 20, device="cuda")
    for column in x.T:
        column.add_(1)
    for _ in range(2):
        x.add_(1)
    assert len(placement.running.races._atoms.lows) < 100


# -- races="show" ----------------------------------------------------------------------

SHOWN = []


def shown(*wanted):
    """A racy program, and what it reads: the memory as it was before."""

    def register(function):
        SHOWN.append(pytest.param(function, wanted, id=function.__name__))
        return function

    return register


@shown([1.0, 1.0])
def fresh():
    with torch.cuda.stream(side_stream()):
        y = torch.full((2,), 5.0, device="cuda")
    return (y + 1).tolist()


@shown([5.0, 5.0])
def in_place():
    x = torch.full((2,), 4.0, device="cuda")
    with torch.cuda.stream(side_stream()):
        x.mul_(10)
    return (x + 1).tolist()


@shown([4.0, 4.0])
def copied_to_the_host():
    x = torch.full((2,), 4.0, device="cuda")
    with torch.cuda.stream(side_stream()):
        x.mul_(10)
    return x.to("cpu", non_blocking=True).tolist()


@shown(4.0)
def item():
    x = torch.full((2,), 4.0, device="cuda")
    with torch.cuda.stream(side_stream()):
        x.mul_(10)
    return x[0].item()


@shown(False)
def condition():
    x = torch.zeros(2, device="cuda")
    with torch.cuda.stream(side_stream()):
        x.add_(10)
    return bool(x.any())


@shown("tensor([4., 4.], device='cuda:0')")
def printed_too():
    x = torch.full((2,), 4.0, device="cuda")
    with torch.cuda.stream(side_stream()):
        x.mul_(10)
    return str(x)


@shown([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]])
def transposed_view():
    x = torch.arange(6.0, device="cuda").view(2, 3)
    with torch.cuda.stream(side_stream()):
        x.mul_(10)
    return (x.T * 1).tolist()


@shown([1.0, 3.0, 5.0])
def strided_view():
    x = torch.arange(6.0, device="cuda")
    with torch.cuda.stream(side_stream()):
        x.mul_(10)
    return (x[1::2] * 1).tolist()


@shown([[2.0, 2.0], [2.0, 2.0]])
def expanded_view():
    x = torch.full((1,), 2.0, device="cuda")
    with torch.cuda.stream(side_stream()):
        x.mul_(10)
    return (x.expand(2, 2) * 1).tolist()


@shown([0.0, 1.0, 2.0, 3.0])
def one_part_of_it():
    x = torch.arange(4.0, device="cuda")
    with torch.cuda.stream(side_stream()):
        x[2:].mul_(10)
    return (x * 1).tolist()


@shown([1.0, 1.0])
def written_twice():
    x = torch.full((2,), 1.0, device="cuda")
    with torch.cuda.stream(side_stream()):
        x.mul_(10)
        x.add_(5)
    return (x * 1).tolist()


@shown([1.0, 1.0, 1.0, 1.0], [1.0, 1.0])
def written_part_by_part():
    x = torch.full((4,), 1.0, device="cuda")
    with torch.cuda.stream(side_stream()):
        x[:2].mul_(10)
        x[2:].mul_(10)
    return (x * 1).tolist(), (x[:2] * 1).tolist()


@shown([0.0, 0.0])
def fresh_in_several_steps():
    x, side = torch.ones(2, device="cuda"), side_stream()
    side.wait_stream(main())
    with torch.cuda.stream(side):
        y = x * 2
        y += 1
        y.relu_()
    return (y * 1).tolist()


@shown([11.0, 11.0])
def second_of_two_inputs():
    x, y = (torch.full((2,), v, device="cuda") for v in (1.0, 10.0))
    with torch.cuda.stream(side_stream()):
        y.mul_(10)
    return (x + y).tolist()


@shown([11.0, 11.0])
def both_of_two_inputs():
    x, y = (torch.full((2,), v, device="cuda") for v in (1.0, 10.0))
    with torch.cuda.stream(side_stream()):
        x.mul_(10)
        y.mul_(10)
    return (x + y).tolist()


@shown([20.0, 20.0])
def the_same_input_twice():
    x = torch.full((2,), 10.0, device="cuda")
    with torch.cuda.stream(side_stream()):
        x.mul_(10)
    return (x + x).tolist()


@shown([1.0, 0.0, 0.0])
def in_a_list():
    with torch.cuda.stream(side_stream()):
        late = torch.full((2,), 5.0, device="cuda")
    return torch.cat([torch.ones(1, device="cuda"), late]).tolist()


@shown([0.0, 0.0])
def a_batch_on_its_way():
    host = torch.full((2,), 5.0).pin_memory()
    with torch.cuda.stream(side_stream()):
        x = host.to("cuda", non_blocking=True)
    return (x * 2).tolist()


@shown([3.0, 3.0])
def a_buffer_being_filled():
    buffer, host = torch.full((2,), 3.0, device="cuda"), torch.ones(2).pin_memory()
    with torch.cuda.stream(side_stream()):
        buffer.copy_(host, non_blocking=True)
    return (buffer * 1).tolist()


@shown([3.0, 3.0])
def to_another_gpu():
    x = torch.full((2,), 3.0, device="cuda")
    with torch.cuda.stream(side_stream()):
        x.mul_(10)
    return x.to(1).tolist()


@shown([3.0, 3.0])
def into_another_tensor_of_another_gpu():
    x, y = torch.full((2,), 3.0, device="cuda"), torch.ones(2, device=1)
    with torch.cuda.stream(side_stream()):
        x.mul_(10)
    return y.copy_(x).tolist()


@shown([2.0, 2.0])
def whole_numbers():
    x = torch.full((2,), 2, device="cuda")
    with torch.cuda.stream(side_stream()):
        x.mul_(10)
    return (x * 1.0).tolist()


@shown([3.0, 3.0], [30.0, 30.0])
def right_once_it_has_waited():
    x, side = torch.full((2,), 3.0, device="cuda"), side_stream()
    with torch.cuda.stream(side):
        x.mul_(10)
    before = (x * 1).tolist()
    main().wait_stream(side)
    return before, (x * 1).tolist()


@shown([0.0, 0.0])
def gradients():
    w = torch.ones(2, device="cuda", requires_grad=True)
    loss = (w * 5).sum()
    with torch.cuda.stream(side_stream()):
        loss.backward()
    return (w.grad * 1).tolist()


@shown([7.0, 7.0])
def written_by_foreach_shown():
    xs = [torch.full((2,), 7.0, device="cuda") for _ in range(2)]
    with torch.cuda.stream(side_stream()):
        torch._foreach_mul_(xs, 2)
    return (xs[1] * 1).tolist()


@pytest.mark.parametrize("program, wanted", SHOWN)
def test_shown_races_read_what_was_there_before(program, wanted):
    simgpu.start(2, races="show")
    found = program()
    assert (found if isinstance(found, tuple) else (found,)) == wanted


def test_shown_races_leave_the_memory_as_it_is():
    simgpu.start(1, races="show")
    x, side = torch.full((2,), 4.0, device="cuda"), side_stream()
    with torch.cuda.stream(side):
        x.mul_(10)
    (x + 1).add_(5)
    torch.cuda.synchronize()
    assert x.tolist() == [40, 40]


@pytest.mark.parametrize(
    "program",
    [write_after_read, write_after_write, memory_reused_while_it_is_read],
    ids=lambda f: f.__name__,
)
def test_other_races_raise_though_reads_are_shown(program):
    simgpu.start(2, races="show")
    with pytest.raises(CUDASanitizerErrors):
        program()


def test_ways_are_checked():
    with pytest.raises(ValueError, match="raise, show"):
        simgpu.start(1, races="hide")
    assert simgpu.count() == 0
    simgpu.start(1, races="show")
    with pytest.raises(RuntimeError, match="before you start others"):
        simgpu.start(1)


# -- random programs -------------------------------------------------------------------


class Order:
    """What happens before what, kept by clocks of our own, element by element."""

    def __init__(self, streams: int):
        self.known = [{} for _ in range(streams)]  # stream -> stream -> step
        self.host: dict[int, int] = {}
        self.accesses: list[tuple[int, int, set, bool]] = []

    def join(self, one: dict, other: dict) -> None:
        for stream, step in other.items():
            one[stream] = max(one.get(stream, -1), step)

    def touch(self, stream: int, elements: set, writes: bool) -> bool:
        """Whether the access races with one before it."""
        step, known = len(self.accesses), self.known[stream]
        self.join(known, self.host)
        races = any(
            elements & others and (writes or wrote) and then > known.get(who, -1)
            for who, then, others, wrote in self.accesses
        )
        self.accesses.append((stream, step, elements, writes))
        known[stream] = step
        return races


VIEWS = [
    lambda x: x,
    lambda x: x[:5],
    lambda x: x[4:],
    lambda x: x[::2],
    lambda x: x[1::2],
    lambda x: x[3],
    lambda x: x.view(3, 4)[:, 1],
    lambda x: x.view(3, 4).T[2:, 1:],
    lambda x: x[5:6].expand(3),
]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["read", "write", "write", "wait", "record", "event", "done",
                         "item", "see", "all"]),
        st.integers(0, 2), st.integers(0, 2), st.integers(0, len(VIEWS) - 1),
    ),
    max_size=30,
)  # fmt: skip


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(STEPS)
def test_random_programs_race_where_they_should(steps):
    simgpu.stop()
    simgpu.start(1)
    x = torch.zeros(12, device="cuda")
    places = torch.arange(12)
    streams = [torch.cuda.default_stream(), side_stream(), side_stream()]
    torch.cuda.synchronize()
    order, marks = Order(3), [{} for _ in streams]
    events = [torch.cuda.Event() for _ in streams]
    for what, a, b, view in steps:
        elements = set(VIEWS[view](places).flatten().tolist())
        stream, wanted = streams[a], False
        with torch.cuda.stream(stream):
            try:
                if what in ("read", "write"):
                    if what == "write" and len(VIEWS) - 1 == view:
                        continue  # PyTorch writes to nothing that is expanded
                    wanted = order.touch(a, elements, what == "write")
                    part = VIEWS[view](x)
                    part.add_(1) if what == "write" else torch.ones_like(part).copy_(
                        part
                    )
                elif what == "item":
                    wanted = order.touch(a, {3}, False)
                    order.join(order.host, order.known[a])
                    x[3].item()
                elif what == "wait":
                    stream.wait_stream(streams[b])
                    order.join(order.known[a], order.known[b])
                elif what == "record":
                    events[b].record()
                    marks[b] = {**order.known[a]}
                    order.join(marks[b], order.host)
                elif what == "event":
                    events[b].wait()
                    order.join(order.known[a], marks[b])
                elif what == "see":
                    events[b].synchronize()
                    order.join(order.host, marks[b])
                elif what == "done":
                    stream.synchronize()
                    order.join(order.host, order.known[a])
                else:
                    torch.cuda.synchronize()
                    for known in order.known:
                        order.join(order.host, known)
            except CUDASanitizerErrors as error:
                assert wanted, f"false alarm in {steps}: {error}"
                return
        assert not wanted, f"missed race in {steps}"


# -- what a reader of the code found ---------------------------------------------------


def test_two_checks_of_the_same_tensor_are_no_race():
    simgpu.start(1)
    c = torch.ones((), dtype=torch.bool, device=0)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch._assert_async(c)
    torch._assert_async(c)


@pytest.mark.parametrize(
    "read, wanted",
    [
        (lambda x: (x + x.view(4)).tolist(), [0j] * 4),
        (lambda x: (x.conj() + 1j).tolist(), [1j] * 4),
    ],
)
def test_a_racy_read_is_old_in_all_its_arguments(read, wanted):
    simgpu.start(1, races="show")
    x = torch.zeros(4, dtype=torch.complex64, device=0)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        x.fill_(5j)
    assert read(x) == wanted


def test_printing_a_racy_tensor_takes_no_memory():
    simgpu.start(1, memory="64MB", races="show")
    x = torch.zeros(10 * 2**20, device=0)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        x.fill_(5)
    before = torch.cuda.max_memory_allocated()
    assert "[0., 0., 0.," in repr(x) and "device='cuda:0'" in repr(x)
    assert torch.cuda.max_memory_allocated() == before


def test_sparse_tensors_are_watched_by_their_parts():
    simgpu.start(1)
    dense = torch.ones(8, 8, device=0)
    sparse = torch.eye(8, device=0).to_sparse_csr()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    assert (sparse @ dense).sum().item() == 64
    assert "cuda:0" in repr(sparse)
    with torch.cuda.stream(side):
        sparse.values().mul_(2)
    with pytest.raises(CUDASanitizerErrors):
        sparse @ dense
