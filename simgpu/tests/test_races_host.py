"""The host against copies for which it has not waited, and copies against each other.

Races between kernels of two streams are in test_races.py and the files beside it.
"""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.cuda._sanitizer import CUDASanitizerErrors

import simgpu
from simgpu import _runtime as runtime
from support.side_streams import main_stream, side_stream

HERE = __file__.replace("\\", "/").rpartition("/")[2]


pytestmark = pytest.mark.usefixtures("stopped")


def on_gpu() -> torch.Tensor:
    return torch.arange(6.0, device="cuda")


def pinned() -> torch.Tensor:
    return torch.full((6,), 7.0).pin_memory()


def early(**kind) -> torch.Tensor:
    """What `on_gpu()` holds, on its way to the host."""
    return on_gpu().to("cpu", non_blocking=True, **kind)  # copied


def into_pinned() -> torch.Tensor:
    host = pinned()
    host.copy_(on_gpu(), non_blocking=True)
    return host


def part_of_pinned() -> torch.Tensor:
    host = pinned()
    host[2:4].copy_(on_gpu()[2:4], non_blocking=True)
    return host


def from_list() -> torch.Tensor:
    host = pinned()
    torch._foreach_copy_([host], [on_gpu()], non_blocking=True)
    return host


def on_side_stream() -> torch.Tensor:
    x = on_gpu()
    with torch.cuda.stream(side_stream()):
        host = x.to("cpu", non_blocking=True)
    main_stream().synchronize()  # another one
    return host


def event_before_copy() -> torch.Tensor:
    x = on_gpu()
    event = main_stream().record_event()
    host = x.to("cpu", non_blocking=True)
    event.synchronize()
    return host


def registered() -> torch.Tensor:
    host = torch.full((6,), 7.0)
    torch.cuda.cudart().cudaHostRegister(host.data_ptr(), 24, 0)
    host.copy_(on_gpu(), non_blocking=True)
    return host


@torch.inference_mode()
def in_inference_mode() -> list:
    return early().reshape(2, 3).tolist()


def saved() -> list:
    file = io.BytesIO()
    torch.save({"x": early()}, file)
    file.seek(0)
    return torch.load(file)["x"].tolist()


def stepped() -> list:
    weight = nn.Parameter(torch.ones(6))
    weight.grad = early()
    torch.optim.SGD([weight], 1.0).step()
    return weight.tolist()


ZEROS, SEVENS = [0.0] * 6, [7.0] * 6
# each reads on the host what has not arrived, and what it finds where races are shown
EARLY_READS = {
    "tolist": (lambda: early().tolist(), ZEROS),
    "item": (lambda: early()[3].item(), 0.0),
    "float": (lambda: float(early()[3]), 0.0),
    "condition": (lambda: bool(early()[3]), False),
    "print": (lambda: repr(early()[3:5]), "tensor([0., 0.])"),
    "numpy": (lambda: early().numpy().tolist(), ZEROS),
    "asarray": (lambda: np.asarray(early()).tolist(), ZEROS),
    "compare": (lambda: (early() > 2).tolist(), [False] * 6),
    "index": (lambda: early()[torch.tensor([4])].tolist(), [0.0]),
    "list": (lambda: torch.cat([torch.ones(1), early()[1:2]]).tolist(), [1.0, 0.0]),
    "clone": (lambda: early().clone().tolist(), ZEROS),
    "deepcopy": (lambda: copy.deepcopy(early()).tolist(), ZEROS),
    "copy": (lambda: torch.ones(6).copy_(early()).tolist(), ZEROS),
    "pickle": (lambda: pickle.loads(pickle.dumps(early())).tolist(), ZEROS),
    "save": (saved, ZEROS),
    "type": (lambda: early().double().tolist(), ZEROS),
    "changed on the GPU": (lambda: early(dtype=torch.float64).tolist(), ZEROS),
    "changed in place": (lambda: early().add_(1).tolist(), [1.0] * 6),
    "scalar for a GPU": (lambda: (on_gpu() * early()[4]).tolist(), ZEROS),
    "optimizer": (stepped, [1.0] * 6),
    "inference mode": (in_inference_mode, [[0.0] * 3] * 2),
    "pinned buffer": (lambda: into_pinned().tolist(), SEVENS),
    "part of a buffer": (lambda: part_of_pinned().tolist(), SEVENS),
    "foreach": (lambda: from_list().tolist(), SEVENS),
    "registered": (lambda: registered().tolist(), SEVENS),
    "side stream": (lambda: on_side_stream().tolist(), ZEROS),
    "event before the copy": (lambda: event_before_copy().tolist(), ZEROS),
}


@pytest.mark.parametrize("read, shown", EARLY_READS.values(), ids=EARLY_READS)
def test_reading_on_the_host_what_has_not_arrived_is_a_race(read, shown, capfd):
    simgpu.start(2)
    with pytest.raises(CUDASanitizerErrors, match="on host memory"):
        read()
    simgpu.stop()
    simgpu.start(2, races="show")
    assert read() == shown
    simgpu.stop()
    simgpu.start(2, races="warn")
    right = read()
    assert capfd.readouterr().err.count("a race: the host and a copy of cuda:0") == 1
    simgpu.stop()
    simgpu.start(2, races="off")
    assert read() == right != shown
    assert capfd.readouterr().err == "" and not runtime.running.unfinished


# each writes on the host to a buffer that a copy to the GPU still reads
REFILLS = {
    "copy": (lambda host: host.copy_(torch.ones(6)), [1.0] * 6),
    "element": (lambda host: host.__setitem__(2, 3), [7.0, 7.0, 3.0, 7.0, 7.0, 7.0]),
    "fill": (lambda host: host.fill_(2), [2.0] * 6),
    "part": (lambda host: host[4:].zero_(), [7.0] * 4 + [0.0] * 2),
    "out": (lambda host: torch.add(torch.ones(6), 1, out=host), [2.0] * 6),
    "foreach": (lambda host: torch._foreach_mul_([host], 2), [14.0] * 6),
}
UPLOADS = {
    "new tensor": lambda host: host.to("cuda", non_blocking=True),
    "buffer": lambda host: on_gpu().copy_(host, non_blocking=True),
    "type changed by the GPU": lambda host: host.to("cuda", torch.float64, True),
    "part": lambda host: host[:].cuda(non_blocking=True).view(2, 3)[:].view(6),
}


@pytest.mark.parametrize("upload", UPLOADS.values(), ids=UPLOADS)
@pytest.mark.parametrize("refill, shown", REFILLS.values(), ids=REFILLS)
def test_refilling_a_buffer_that_is_still_copied_is_a_race(refill, shown, upload):
    def program():
        host = pinned()
        x = upload(host)
        refill(host)
        return x.tolist()

    simgpu.start(1)
    with pytest.raises(simgpu.RaceError, match="host memory"):
        program()
    simgpu.stop()
    simgpu.start(1, races="show")
    assert program() == shown
    simgpu.stop()
    simgpu.start(1, races="off")
    assert program() == SEVENS


def test_a_refilled_buffer_that_was_used_already_cannot_be_shown():
    simgpu.start(1, races="show")
    for use in (lambda x: x.sum(), lambda x: x.add_(1), lambda x: None):
        host = pinned()
        used = use(host.to("cuda", non_blocking=True))
        with pytest.raises(simgpu.RaceError):
            host.fill_(2)
        del used


def test_the_report_names_both_lines():
    simgpu.start(1)
    with pytest.raises(simgpu.RaceError) as raised:
        early().sum()  # read
    words = str(raised.value)
    current, previous = words.split("Previous access by stream 0", 1)
    assert "Access by the host during:\naten::sum(Tensor self" in current
    assert "early().sum()  # read" in current and "# copied" in previous
    assert "reading from argument(s) self" in current
    assert "writing to the output" in previous and "event.synchronize()" in previous
    assert "/torch/" not in words and "/src/simgpu/" not in words


def test_a_warning_names_both_lines_once(capfd):
    simgpu.start(1, races="warn")
    for _ in range(3):
        assert early().sum() == 15  # read
    said = capfd.readouterr().err
    assert said.count("a race") == 1
    assert f"{HERE}:" in said and "# copied" in said and "# read" in said
    assert "writes it on the default stream (_to_copy)" in said
    assert "reads it on the host (sum)" in said and len(said.splitlines()) == 5


# -- copies against each other, through the host's memory ------------------------------


def down_and_up(device, order=lambda side: None):
    host, x = pinned(), on_gpu()
    side = side_stream()
    with torch.cuda.stream(side):
        host.copy_(x, non_blocking=True)
    order(side)
    return host.to(device, non_blocking=True).tolist()


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_a_copy_may_not_overtake_that_of_another_stream(device):
    simgpu.start(2)
    with pytest.raises(simgpu.RaceError, match="Access by stream [01] during"):
        down_and_up(device)
    simgpu.stop()
    simgpu.start(2, races="show")
    assert down_and_up(device) == SEVENS
    simgpu.stop()
    for mode in ("raise", "show"):
        simgpu.start(2, races=mode)
        right = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        streams = torch.cuda.current_stream(device)
        assert down_and_up(device, streams.wait_stream) == right
        assert down_and_up(device, lambda side: side.synchronize()) == right
        simgpu.stop()


# -- what is right ---------------------------------------------------------------------


def poll(query) -> None:
    while not query():
        pass


def wait_through_another_stream() -> None:
    side = torch.cuda.Stream()
    side.wait_stream(main_stream())
    side.synchronize()


WAITS = {
    "synchronize": lambda: torch.cuda.synchronize(),
    "stream": lambda: main_stream().synchronize(),
    "event": lambda: main_stream().record_event().synchronize(),
    "later event": lambda: side_stream().record_event().synchronize(),
    "event query": lambda: poll(main_stream().record_event().query),
    "stream query": lambda: poll(main_stream().query),
    "another stream": wait_through_another_stream,
    "item": lambda: torch.ones(1, device="cuda").item(),
    "copy that waits": lambda: torch.ones(1, device="cuda").cpu(),
    "accelerator": lambda: torch.accelerator.synchronize(),
}


@pytest.mark.parametrize("mode", ["raise", "show"])
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_what_the_host_has_waited_for_it_may_use(wait, mode):
    simgpu.start(2, races=mode)
    arrived, host = early(), pinned()
    x = host.to("cuda", non_blocking=True)
    wait()
    host.zero_()
    assert arrived.tolist() == on_gpu().tolist() and x.tolist() == SEVENS
    torch.cuda.synchronize()
    assert not runtime.running.unfinished


def shapes_and_views_are_no_reads():
    host = early()
    views = [host.view(2, 3).T, host[1:], host.detach(), host.unsqueeze_(0)]
    made = [torch.zeros_like(host).tolist(), host.new_ones(2).tolist()]
    return (
        [view.shape for view in views],
        made,
        host.is_pinned(),
        host.pin_memory() is host,
    )


def other_part_of_a_buffer():
    host = part_of_pinned()
    host[4:] = 1
    return host[:2].tolist() + host[4:].tolist()


def reads_beside_a_copy_that_reads():
    host = pinned()
    x = host.to("cuda", non_blocking=True)
    return host.tolist(), x.tolist()


def down_and_up_in_one_stream():
    return early().to("cuda", non_blocking=True).tolist(), early().cuda().tolist()


def twice_into_one_buffer():
    host = into_pinned()
    host.copy_(on_gpu() + 1, non_blocking=True)
    torch.cuda.synchronize()
    return host.tolist()


def pageable_memory():
    host = torch.zeros(6).copy_(on_gpu(), non_blocking=True)
    x = host.to("cuda", non_blocking=True)
    host.zero_()
    return x.tolist()


def host_memory_in_another_order():
    host = pinned()  # the host brings it in order, once the copy is there
    host.view(2, 3).T.copy_(on_gpu().view(3, 2), non_blocking=True)
    return host.tolist()


def type_changed_by_the_host():
    host = pinned()
    x = host.to("cuda", torch.float64)
    host.zero_()
    return x.tolist()


def permuted():
    host = on_gpu().view(2, 3).T.to("cpu", non_blocking=True)
    torch.cuda.synchronize()
    return host.tolist()


def new_buffers_each_time():
    found = []
    for i in range(4):
        host = pinned().fill_(i)
        found.append(host.to("cuda", non_blocking=True))
        del host  # its memory is used again when the copy is done
    return [x.tolist() for x in found]


def array_of_numpy_made_before():
    host = pinned()
    array = host.numpy()
    host.copy_(on_gpu(), non_blocking=True)
    torch.cuda.synchronize()
    return array.tolist()


def two_buffers_in_turn():
    buffers, free = [pinned(), pinned()], [torch.cuda.Event(), torch.cuda.Event()]
    side, total = torch.cuda.Stream(), torch.zeros(6, device="cuda")
    for i in range(6):
        free[i % 2].synchronize()
        buffers[i % 2].fill_(i)
        with torch.cuda.stream(side):
            x = buffers[i % 2].to("cuda", non_blocking=True)
            free[i % 2].record()
        main_stream().wait_stream(side)
        x.record_stream(main_stream())
        total += x
    return total.tolist()


def activations_kept_on_the_host():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).cuda()
    for _ in range(2):
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            loss = model(torch.ones(2, 4, device="cuda")).square().sum()
        loss.backward()
    return model[0].weight.grad.tolist()


def optimizer_on_the_host():
    weight = torch.ones(4, device="cuda", requires_grad=True)
    on_host = nn.Parameter(torch.ones(4).pin_memory())
    on_host.grad = torch.zeros(4).pin_memory()
    optimizer = torch.optim.SGD([on_host], lr=0.1)
    for _ in range(3):
        weight.square().sum().backward()
        on_host.grad.copy_(weight.grad, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        optimizer.step()
        with torch.no_grad():
            weight.copy_(on_host, non_blocking=True)
        weight.grad = None
    return weight.tolist()


def weights_parked_on_the_host():
    """Down and up again in one stream, with no wait of the host."""
    model = nn.Linear(4, 4).cuda()
    parked = [torch.empty(p.shape, pin_memory=True) for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(2)
        for host, p in zip(parked, model.parameters(), strict=True):
            host.copy_(p, non_blocking=True)
        for host, p in zip(parked, model.parameters(), strict=True):
            p.data = host.to("cuda", non_blocking=True)
    return model.weight.tolist()


RIGHT = [
    shapes_and_views_are_no_reads, other_part_of_a_buffer,
    reads_beside_a_copy_that_reads, down_and_up_in_one_stream, twice_into_one_buffer,
    pageable_memory, host_memory_in_another_order, type_changed_by_the_host, permuted,
    new_buffers_each_time, array_of_numpy_made_before, two_buffers_in_turn,
    activations_kept_on_the_host, optimizer_on_the_host, weights_parked_on_the_host,
]  # fmt: skip


@pytest.mark.parametrize("program", RIGHT, ids=lambda f: f.__name__)
def test_a_program_in_order_does_not_race_with_the_host(program):
    found = []
    for mode in ("raise", "show", "off"):
        simgpu.start(1, races=mode)
        found.append(program())
        simgpu.stop()
    assert found[0] == found[1] == found[2]


# -- what is remembered ----------------------------------------------------------------


def test_copies_without_end_are_not_remembered_for_ever():
    simgpu.start(1)
    host, x = pinned(), on_gpu()
    for _ in range(20):
        host.copy_(x, non_blocking=True)
        pinned().to("cuda", non_blocking=True)
    early()
    (copies,) = [c for c in runtime.running.unfinished.values() if c[0].writes][:1]
    assert len(copies) == 1 and len(runtime.running.unfinished) < 25
    torch.cuda.synchronize()
    assert not runtime.running.unfinished
