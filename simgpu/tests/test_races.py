"""Programs whose streams race: each raises an error that names both lines.

Programs without a race are in test_races_absent.py, random ones in
test_races_random.py; what a racy read returns where races are shown is in
test_races_shown.py.
"""

import inspect
import linecache
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.cuda._sanitizer import CUDASanitizerErrors

import simgpu
from support.limits import SHORT
from support.side_streams import main_stream, side_stream

pytestmark = pytest.mark.simulated_gpus(2)

both_modes = pytest.mark.parametrize("mode", ["raise", "show"])


def start(mode: str) -> None:
    simgpu.stop()
    simgpu.start(2, races=mode)


def names_lines(raised, first: int, second: int) -> None:
    """The report shows the two lines of this file, and none of PyTorch's or ours."""
    words = str(raised.value)
    file = f'File "{__file__}", line'
    assert "CSAN detected a possible data race" in words
    current, previous = words.split("Previous access by stream", 1)
    assert f"{file} {second}, in " in current
    assert f"{file} {first}, in " in previous.split("CSAN detected")[0]
    for line in (first, second):
        text = linecache.getline(__file__, line)
        assert text.strip().split("  #")[0] in words
    assert "/torch/" not in words and "/src/simgpu/" not in words
    assert raised.value.errors[0].current_access.stack_trace[-1].lineno == second


# -- what a side stream does, and the default stream at the same time ------------------


def fresh(x):
    return torch.ones(1, device="cuda")


def read(x):
    x * 2


def write(x):
    x.mul_(2)


def host():
    return torch.ones(4, 4).pin_memory()


# name: what a side stream does with x, a 4 x 4 tensor; and what the default stream does
# with x, and with y, which the side stream has returned
PAIRS = {
    "read after write": (write, lambda x, y: x.sum()),
    "write after read": (read, lambda x, y: x.zero_()),
    "write after two reads": (read, lambda x, y: x.copy_(x * 3)),
    "write after write": (write, lambda x, y: x.fill_(2)),
    # ways to read
    "first input": (fresh, lambda x, y: y + 1),
    "second input": (fresh, lambda x, y: torch.add(x, y)),
    "list": (fresh, lambda x, y: torch.cat([x[0], y])),
    "item": (fresh, lambda x, y: y.item()),
    "tolist": (fresh, lambda x, y: y.tolist()),
    "condition": (fresh, lambda x, y: 1 if y else 0),
    "print": (fresh, lambda x, y: str(y)),
    "copy to the host": (fresh, lambda x, y: y.to("cpu", non_blocking=True)),
    "copy to a GPU": (fresh, lambda x, y: y.to(1)),
    # ways to write
    "random": (lambda x: torch.rand(8, device="cuda"), lambda x, y: y.normal_()),
    "batch": (lambda x: host().to("cuda", non_blocking=True), lambda x, y: y * 2),
    "buffer": (lambda x: x.copy_(host(), non_blocking=True), lambda x, y: x * 2),
    "buffer in use": (read, lambda x, y: x.copy_(host(), non_blocking=True)),
    "index": (
        lambda x: x.__setitem__(torch.tensor([1, 2], device="cuda"), 3),
        lambda x, y: x + 1,
    ),
    "out=": (read, lambda x, y: torch.add(torch.ones_like(x), 1, out=x)),
    "foreach": (lambda x: torch._foreach_add_([*x], 1), lambda x, y: x[2] + 1),
    "in foreach": (lambda x: x[1].add_(1), lambda x, y: torch._foreach_mul([*x], 2)),
    "layer": (lambda x: nn.Linear(4, 4).cuda()(x), lambda x, y: y.sum()),
    # views of the same memory
    "column, row": (lambda x: x.T[1].add_(1), lambda x, y: x[2] + 1),
    "slices": (lambda x: x.view(16)[:6].add_(1), lambda x, y: x.view(16)[5:].add_(1)),
    "part of what is read": (read, lambda x, y: x[1:].zero_()),
    "all of what is read in part": (lambda x: x[1:] * 2, lambda x, y: x.zero_()),
    "expanded": (lambda x: x[:1].add_(1), lambda x, y: x[:1].expand(8, 4).sum()),
}


def race(first, second) -> None:
    x = torch.ones(4, 4, device="cuda")
    with torch.cuda.stream(side_stream()):
        y = first(x)
    second(x, y)


def line_of(function) -> int:
    """The number of a function's only statement's line."""
    return max(line for _, _, line in function.__code__.co_lines() if line)


@pytest.mark.parametrize("first, second", PAIRS.values(), ids=PAIRS)
def test_a_race_of_two_accesses_names_both_lines(first, second):
    with pytest.raises(CUDASanitizerErrors) as raised:
        race(first, second)
    names_lines(raised, line_of(first), line_of(second))


# -- what puts nothing in order --------------------------------------------------------

NO_ORDER = {
    "nothing": lambda side, third: None,
    "an event waited for by another stream": (
        lambda side, third: side.record_event().wait(third)
    ),
    "another stream synchronized": lambda side, third: third.synchronize(),
    "another GPU synchronized": lambda side, third: torch.cuda.synchronize(1),
    "an event without a record": lambda side, third: torch.cuda.Event().wait(),
}


@pytest.mark.parametrize("reader", [main_stream, side_stream])
@pytest.mark.parametrize("order", NO_ORDER.values(), ids=NO_ORDER)
def test_what_puts_nothing_in_order_leaves_the_race(order, reader):
    side, third, reader = side_stream(), side_stream(), reader()
    with torch.cuda.stream(side):
        y = torch.ones(8, device="cuda")
    order(side, third)
    with torch.cuda.stream(reader), pytest.raises(CUDASanitizerErrors):
        y + 1


# -- memory that is used again ---------------------------------------------------------


@pytest.mark.parametrize("elements", [8, 2048])
@pytest.mark.parametrize("first", [read, write])
@both_modes
def test_reused_memory_races_with_its_former_use(mode, first, elements):
    start(mode)
    x = torch.ones(elements, device="cuda")
    with torch.cuda.stream(side_stream()):
        first(x)
    del x
    with pytest.raises(CUDASanitizerErrors) as raised:
        torch.zeros(8, device="cuda")  # second
    _, second = marked(test_reused_memory_races_with_its_former_use)
    names_lines(raised, line_of(first), second)


# -- before there is a second stream ---------------------------------------------------


def seen():
    """A tensor for which the host has waited."""
    x = torch.ones(8, device="cuda")
    x.cpu()
    return x


WRITERS = {
    "first kernel": lambda: torch.ones(8, device="cuda"),
    "in place": lambda: seen().add_(1),
    "foreach": lambda: torch._foreach_add_([seen()], 1)[0],
    "copy": lambda: torch.ones(8).pin_memory().to("cuda", non_blocking=True),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_writes_before_the_first_stream_race(write):
    y = write()
    with pytest.raises(CUDASanitizerErrors) as raised:
        with torch.cuda.stream(torch.cuda.Stream()):
            y + 1  # second
    _, second = marked(test_writes_before_the_first_stream_race)
    names_lines(raised, line_of(write), second)


# -- longer programs: each marks the two lines that race -------------------------------


def marked(function) -> tuple[int | None, int]:
    """The numbers of the lines marked "# first" and "# second"."""
    source, start = inspect.getsourcelines(function)
    found = {line.split("  # ")[-1].strip(): start + i for i, line in enumerate(source)}
    return found.get("first"), found["second"]


def new_stream_does_not_wait():
    torch.cuda.Stream()
    x = torch.ones(8, device="cuda")  # first
    with torch.cuda.stream(torch.cuda.Stream()):
        return x + 1  # second


def waited_too_early():
    side = side_stream()
    with torch.cuda.stream(side):
        y = torch.ones(8, device="cuda")
    main_stream().wait_stream(side)
    with torch.cuda.stream(side):
        y.add_(1)  # first
    return y + 1  # second


def event_recorded_too_early():
    side = side_stream()
    with torch.cuda.stream(side):
        y = torch.ones(8, device="cuda")
        event = side.record_event()
        y.add_(1)  # first
    event.wait()
    return y + 1  # second


def memory_of_the_side_stream_reused():
    side = side_stream()
    with torch.cuda.stream(side):
        x = torch.ones(8, device="cuda")
    main_stream().wait_stream(side)
    x + 1  # first
    del x
    with torch.cuda.stream(side):
        return torch.ones(8, device="cuda")  # second


def peer_copy_into_what_is_read():
    target, source = torch.ones(3, device=1), torch.ones(3, device=0)
    with torch.cuda.stream(side_stream(1)):
        target * 2  # first
    target.copy_(source)  # second


def column_of_a_tall_matrix():
    x = torch.ones(1100, 4, device="cuda")
    with torch.cuda.stream(side_stream()):
        x[:, 2].add_(1)  # first
    return x[900:1000].sum()  # second


def layer_and_gradients():
    layer, x = nn.Linear(4, 4).cuda(), torch.ones(2, 4, device="cuda")
    layer(x).sum().backward()
    return layer, x


def weights_stepped_while_they_are_read():
    layer, x = layer_and_gradients()
    optimizer = torch.optim.Adam(layer.parameters(), foreach=True)
    with torch.cuda.stream(side_stream()):
        layer(x)  # first
    optimizer.step()  # second


def weights_read_while_they_are_stepped():
    layer, x = layer_and_gradients()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)
    with torch.cuda.stream(side_stream()):
        optimizer.step()  # first
    return layer(x)  # second


def gradients_of_backward_on_another_stream():
    w = torch.ones(8, device="cuda", requires_grad=True)
    with torch.cuda.stream(side_stream()):
        (w * 2).sum().backward()  # first
    return w.grad + 1  # second


def gradient_of_another_stream():
    y = torch.ones(8, device="cuda", requires_grad=True) * 2
    with torch.cuda.stream(side_stream()):
        gradient = torch.full((8,), 2.0, device="cuda")  # first
    y.backward(gradient)  # second


def activation_changed_before_backward():
    y = torch.ones(8, device="cuda", requires_grad=True).exp()
    with torch.cuda.stream(side_stream()):
        y.data.mul_(2)  # first
    y.backward(torch.ones(8, device="cuda"))  # second


def weight_changed_before_backward():
    x = torch.ones(8, device="cuda", requires_grad=True)
    w, side = torch.ones(8, device="cuda"), torch.cuda.Stream()
    loss = (x * w).sum()
    side.wait_stream(main_stream())
    with torch.cuda.stream(side):
        w.data.mul_(2)  # first
    loss.backward()  # second


def gradient_read_while_another_is_added():
    w = torch.ones(8, device="cuda", requires_grad=True)
    w.sum().backward()
    with torch.cuda.stream(side_stream()):
        w.grad * 2  # first
    (w * 2).sum().backward()  # second


def stream_of_any_device():
    with torch.Stream():
        y = torch.ones(8, device="cuda")  # first
    return y + 1  # second


def in_another_thread():
    side = side_stream()
    x = torch.ones(8, device="cuda")  # first

    def work():
        with torch.cuda.stream(side):
            return x + 1  # second

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result(SHORT)


@pytest.mark.parametrize(
    "program",
    [
        new_stream_does_not_wait, waited_too_early, event_recorded_too_early,
        memory_of_the_side_stream_reused, peer_copy_into_what_is_read,
        column_of_a_tall_matrix, weights_stepped_while_they_are_read,
        weights_read_while_they_are_stepped, gradients_of_backward_on_another_stream,
        gradient_of_another_stream, activation_changed_before_backward,
        weight_changed_before_backward, gradient_read_while_another_is_added,
        stream_of_any_device, in_another_thread,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_a_race_in_a_longer_program_names_both_lines(program):
    with pytest.raises(CUDASanitizerErrors) as raised:
        program()
    names_lines(raised, *marked(program))


# -- after a race ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["write after read", "write after write"])
@both_modes
def test_a_race_is_an_error_once_and_the_gpu_goes_on(mode, name):
    start(mode)
    with pytest.raises(CUDASanitizerErrors, match="writing to"):
        race(*PAIRS[name])
    torch.cuda.synchronize()
    x = torch.ones(8, device="cuda")
    assert (x + 1).tolist() == [2] * 8


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_tensors_race_by_their_parts():
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
