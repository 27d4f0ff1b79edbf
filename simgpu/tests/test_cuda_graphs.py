"""CUDA graphs: what a capture notes and forbids, what a replay computes and costs.

What PyTorch does was read in torch/cuda/graphs.py and ATen/cuda/CUDAGraph.cpp; what
CUDA forbids and says, in its documentation of stream capture and of cudaError. None of
it was compared with a real GPU.
"""

import copy
import gc
import json
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch import cuda, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import simgpu
from simgpu import NotSimulated
from simgpu._compat import is_torch
from simgpu._dispatch.captured_call import current_capture
from simgpu._dispatch.operation import operation_of
from simgpu._timing import captured

pytestmark = pytest.mark.simulated_gpus(2, "H100")
DEV = "cuda"
FORBIDDEN = "operation not permitted when stream is capturing"
LOST = "operation failed due to a previous error during capture"


def graph_of(program, **how) -> cuda.CUDAGraph:
    """What a program does on a side stream, captured."""
    graph = cuda.CUDAGraph()
    with cuda.graph(graph, **how):
        program()
    return graph


def words_of(error: BaseException) -> list[str]:
    """The first lines of an error and of those that it came after, the last first."""
    found = []
    while error is not None:
        found.append(str(error).splitlines()[0].removeprefix("CUDA error: "))
        error = error.__context__
    return found


def milliseconds(program) -> float:
    first, last = (cuda.Event(enable_timing=True) for _ in range(2))
    cuda.synchronize()
    first.record()
    program()
    last.record()
    last.synchronize()
    return first.elapsed_time(last)


# -- values ----------------------------------------------------------------------------


def test_a_capture_runs_nothing_and_a_replay_reads_what_is_there_then():
    x = torch.ones(4, device=DEV)
    made = {}

    def program():
        made["y"] = x * 3
        x.add_(1)

    graph = graph_of(program)
    assert x.tolist() == [1] * 4  # nothing has been added
    assert made["y"].tolist() == [0] * 4
    graph.replay()
    assert (x.tolist(), made["y"].tolist()) == ([2] * 4, [3] * 4)
    x.fill_(10)
    graph.replay()
    assert (x.tolist(), made["y"].tolist()) == ([11] * 4, [30] * 4)


def test_what_is_made_in_between_needs_no_tensor_of_the_program():
    x = torch.ones(4, device=DEV)
    made = {}
    graph = graph_of(lambda: made.update(y=((x * 3).exp() - 1).view(2, 2).t()))
    graph.replay()
    gc.collect()
    x.fill_(2)
    graph.replay()
    expected = (torch.full((2, 2), 6.0).exp() - 1).tolist()
    assert made["y"].tolist() == expected


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2),
        nn.Linear(32, 5),
    ).to(DEV)  # fmt: skip


def losses(graphed: bool, make_optimizer, autocast: bool) -> tuple[list, list]:
    """Of eight steps of training, and the states of model and generator afterwards."""
    net = model()
    cuda.manual_seed(7)
    optimizer = make_optimizer(net.parameters())
    x = torch.zeros(8, 16, device=DEV)
    y = torch.zeros(8, dtype=torch.long, device=DEV)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, autocast, cache_enabled=False):
            loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    torch.manual_seed(2)
    data = [(torch.randn(8, 16), torch.randint(0, 5, (8,))) for _ in range(8)]
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        for inputs, targets in data[:3]:
            x.copy_(inputs), y.copy_(targets)
            step()
    cuda.current_stream().wait_stream(side)
    made = {}
    if graphed:
        graph = graph_of(lambda: made.update(loss=step()))
    found = []
    for inputs, targets in data:
        x.copy_(inputs), y.copy_(targets)
        if graphed:
            graph.replay()
        else:
            made["loss"] = step()
        found.append(made["loss"].item())
    state = [t.tolist() for t in net.state_dict().values()]
    return found, [*state, cuda.get_rng_state().tolist()]


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, 1e-2, capturable=True),
        lambda p: torch.optim.AdamW(p, 1e-2, capturable=True, fused=True),
    ],
    ids=["sgd", "adamw", "fused"],
)
def test_a_captured_training_step_gives_the_numbers_of_the_usual_one(make, autocast):
    """With dropout, running statistics, and the state of an optimizer."""
    assert losses(True, make, autocast) == losses(False, make, autocast)


def test_an_optimizer_that_is_not_capturable_is_refused_by_pytorch():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(RuntimeError, match="capturable"):
        graph_of(optimizer.step)


@pytest.mark.parametrize("how", ["eval", "train"])
def test_make_graphed_callables_gives_the_losses_of_the_model(how):
    torch.manual_seed(3)
    usual = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).to(DEV)
    graphed = copy.deepcopy(usual)
    sample = torch.randn(4, 8, device=DEV, requires_grad=True)
    graphed = cuda.make_graphed_callables(graphed, (sample,))
    getattr(usual, how)(), getattr(graphed, how)()
    x = torch.randn(4, 8, device=DEV)

    def train(net):
        optimizer, found = torch.optim.SGD(net.parameters(), 0.1), []
        for _ in range(4):
            optimizer.zero_grad()
            loss = net(x.clone().requires_grad_()).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    assert train(usual) == train(graphed)


def test_a_graph_reads_what_another_one_of_its_pool_has_made():
    x = torch.ones(4, device=DEV)
    made, first, second = {}, cuda.CUDAGraph(), cuda.CUDAGraph()
    with cuda.graph(first):
        made["y"] = x * 2
    with cuda.graph(second, pool=first.pool()):
        made["z"] = made["y"] + 1
    del made["y"]
    x.fill_(5)
    first.replay(), second.replay()
    assert made["z"].tolist() == [11] * 4


def test_a_capture_changes_nothing_of_another_graph():
    x, made = torch.ones(4, device=DEV), {}
    first = graph_of(lambda: made.update(h=x * 2))
    first.replay()
    second = graph_of(lambda: made["h"].add_(1))
    assert made["h"].tolist() == [2] * 4
    second.replay()
    assert made["h"].tolist() == [3] * 4


def test_each_replay_draws_new_numbers_as_the_program_would():
    made = {}
    cuda.manual_seed(5)
    graph = graph_of(lambda: made.update(r=torch.rand(4, device=DEV)))
    drawn = []
    for _ in range(2):
        graph.replay()
        drawn.append(made["r"].tolist())
    cuda.manual_seed(5)
    assert drawn == [torch.rand(4, device=DEV).tolist() for _ in range(2)]


@pytest.mark.parametrize("registers", [False, True])
def test_a_generator_of_ones_own_draws_anew(registers):
    generator = torch.Generator(DEV).manual_seed(3)
    made, graph = {}, cuda.CUDAGraph()
    if registers:
        graph.register_generator_state(generator.graphsafe_get_state())
    elif not is_torch((2, 13)):
        with pytest.raises(RuntimeError, match="not in capture mode"):
            graph_of(lambda: torch.rand(4, device=DEV, generator=generator))
        return
    with cuda.graph(graph):
        made["r"] = torch.rand(4, device=DEV, generator=generator)
    drawn = []
    for _ in range(2):
        graph.replay()
        drawn.append(made["r"].tolist())
    generator.manual_seed(3)
    again = [torch.rand(4, device=DEV, generator=generator) for _ in range(2)]
    assert drawn == [r.tolist() for r in again]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda g: g.manual_seed(3), "only if new seed is the same|set_current_seed"),
        (lambda g: g.seed(), "Cannot call CUDAGeneratorImpl::seed"),
        (lambda g: g.get_offset(), "Cannot call CUDAGeneratorImpl::get_offset"),
        (lambda g: g.set_offset(4), "Cannot call CUDAGeneratorImpl::set_offset"),
    ],
    ids=["manual_seed", "seed", "get_offset", "set_offset"],
)
def test_a_capture_does_not_seed(call, words):
    cuda.manual_seed(8)

    def program():
        torch.ones(1, device=DEV)
        call(cuda.default_generators[0])

    with pytest.raises(RuntimeError, match=words):
        graph_of(program)
    assert cuda.initial_seed() == 8


def test_a_pinned_copy_is_part_of_the_graph():
    source = torch.ones(4).pin_memory()
    target = torch.zeros(4).pin_memory()
    x = torch.zeros(4, device=DEV)

    def program():
        x.copy_(source, non_blocking=True)
        x.mul_(2)
        target.copy_(x, non_blocking=True)

    graph = graph_of(program)
    assert target.tolist() == [0] * 4
    source.fill_(4)
    graph.replay()
    cuda.synchronize()
    assert target.tolist() == [8] * 4


def test_a_number_of_the_host_stays_what_it_was():
    x, factor, made = torch.ones(4, device=DEV), torch.tensor(2.0), {}
    graph = graph_of(lambda: made.update(y=x * factor))
    factor.fill_(7)
    graph.replay()
    assert made["y"].tolist() == [2] * 4


def test_inference_mode_during_the_capture_alone():
    linear, x = nn.Linear(4, 4).to(DEV), torch.ones(2, 4, device=DEV)
    made = {}
    with torch.inference_mode():
        graph = graph_of(lambda: made.update(y=linear(x)))
    x.fill_(2)
    graph.replay()
    assert torch.equal(made["y"], linear(x).detach())


def test_out_of_a_graph_grows_an_empty_tensor():
    x, out = torch.arange(4.0, device=DEV), torch.empty(0, device=DEV)
    graph = graph_of(lambda: torch.mul(x, 2, out=out))
    graph.replay()
    assert out.tolist() == [0, 2, 4, 6]


def _backward_of(made: torch.Tensor, *leaves: torch.Tensor) -> tuple:
    return made, *torch.autograd.grad((made * made).sum(), leaves)


def _attend(x: torch.Tensor) -> torch.Tensor:
    x = x.view(1, 2, 3, 4).half()
    mask = torch.eye(3, dtype=torch.bool, device=DEV)
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def _train_by_rprop(x: torch.Tensor) -> torch.Tensor:
    weight = nn.Parameter(x.clone())
    optimizer = torch.optim.Rprop([weight], capturable=True)
    for _ in range(2):
        (weight * weight).sum().backward()
        optimizer.step()
    return weight.detach()


def _packed(x: torch.Tensor) -> torch.Tensor:
    lengths = torch.tensor([4, 2, 1])
    return nn.utils.rnn.pack_padded_sequence(x.view(4, 3, 2), lengths).data


LSTM = nn.LSTM(2, 3)
KINDS = {
    # what C++ makes by itself, also where views of it are changed
    "where": lambda x: _backward_of(torch.where(x > 0, x, 0.5), x),
    "cosine": lambda x: F.cosine_similarity(x, x + 1, 0),
    "vander": lambda x: torch.vander(x[:5]),
    "corrcoef": lambda x: torch.corrcoef(x.view(4, 6)),
    "quantile": lambda x: torch.quantile(x, 0.3),
    "rprop": _train_by_rprop,
    "attention with a mask": _attend,
    # what the CPU computes in another type, or with other results
    "half": lambda x: F.avg_pool3d(x.half().view(1, 1, 4, 3, 2), (2, 1, 1)),
    "histogram": lambda x: torch.histc((x * 3).long().clamp(-5, 5), 5, -5, 5),
    "trace": lambda x: (x.view(4, 6) > 0).trace(),
    "lstm": lambda x: _backward_of(LSTM(x.view(4, 3, 2))[0], x),
    "packed": _packed,
    # in place, in parts, complex
    "index_put": lambda x: x.clone().index_put_((x.argsort()[:3],), x[:3], True),
    "views": lambda x: x.detach().clone().view(4, 6).t()[1:].mul_(2).contiguous(),
    "complex": lambda x: torch.fft.rfft(x).conj().imag.neg(),
    "checkpoint": lambda x: _backward_of(
        checkpoint(lambda v: F.dropout(v.sin(), 0.5), x, use_reentrant=False), x),
    "vmap": lambda x: torch.vmap(torch.func.grad(lambda v: v**3))(x),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_computes_what_the_operations_would(kind):
    if kind == "checkpoint" and not is_torch((2, 13)):
        pytest.skip("it reads the generator's state, which older ones refuse")
    LSTM.to(DEV)
    torch.manual_seed(4)
    inputs = [torch.randn(24) for _ in range(3)]
    x, made = torch.zeros(24, device=DEV, requires_grad=True), {}

    def values(out) -> list:
        out = out if isinstance(out, tuple) else (out,)
        return [t.detach().resolve_neg().cpu().tolist() for t in out]

    with torch.no_grad():
        x.copy_(inputs[0])
    graph = graph_of(lambda: made.update(out=KINDS[kind](x)))
    for seed, given in enumerate(inputs[1:]):
        with torch.no_grad():
            x.copy_(given)
        cuda.manual_seed(seed)
        graph.replay()
        found = values(made["out"])
        cuda.manual_seed(seed)
        assert found == values(KINDS[kind](x))


def test_values_are_judged_at_the_replay():
    table, made = torch.ones(4, 2, device=DEV), {}
    index = torch.full((3,), 99, device=DEV)  # not filled yet, so to speak
    graph = graph_of(lambda: made.update(out=F.embedding(index, table)))
    index.fill_(3)
    graph.replay()
    assert made["out"].tolist() == [[1, 1]] * 3
    index.fill_(99)
    graph.replay()  # a kernel finds it, later
    with pytest.raises(torch.AcceleratorError, match="device-side assert triggered"):
        cuda.synchronize()


# -- what a capture forbids ------------------------------------------------------------


def _on_another_stream_without_coming_back():
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        torch.ones(4, device=DEV)


def _wait_for_an_event(ask):
    event = cuda.Event()
    event.record()
    ask(event)


FORBIDDING = {
    "item": lambda x: x.sum().item(),
    "synchronize": lambda x: cuda.synchronize(),
    "stream": lambda x: cuda.current_stream().synchronize(),
    "another stream": lambda x: cuda.default_stream().synchronize(),
    "query of a stream": lambda x: cuda.current_stream().query(),
    "query of an event": lambda x: _wait_for_an_event(cuda.Event.query),
    "event": lambda x: _wait_for_an_event(cuda.Event.synchronize),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "printing": lambda x: str(x),
    "a pinned copy that waits": lambda x: x.copy_(torch.ones(4).pin_memory()),
}


@pytest.mark.parametrize("name", FORBIDDING)
def test_who_waits_for_the_gpu_loses_the_capture(name):
    x = torch.ones(4, device=DEV)
    graph = cuda.CUDAGraph()
    with pytest.raises(torch.AcceleratorError) as found:
        with cuda.graph(graph):
            FORBIDDING[name](x)
    assert words_of(found.value) == [LOST, FORBIDDEN]
    assert not cuda.is_current_stream_capturing()
    assert x.add(1).tolist() == [2] * 4  # and all goes on


@pytest.mark.parametrize(
    "copy",
    [
        lambda x: x.copy_(torch.ones(4)),
        lambda x: torch.ones(4).to(DEV, non_blocking=True),
        lambda x: torch.tensor([1.0], device=DEV),
        lambda x: x.cpu(),
        lambda x: x[torch.tensor([0, 1])],
    ],
    ids=["copy_", "to", "tensor", "cpu", "index"],
)
def test_a_copy_of_memory_that_is_not_pinned_is_refused(copy):
    x = torch.zeros(4, device=DEV)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a graph that is empty
        with pytest.raises(RuntimeError, match="unless the CPU tensor is pinned"):
            graph_of(lambda: copy(x))
    assert x.tolist() == [0] * 4


def test_after_an_error_every_launch_is_refused_until_the_end():
    x = torch.ones(4, device=DEV)

    def program():
        with pytest.raises(torch.AcceleratorError, match=FORBIDDEN):
            x.sum().item()
        with pytest.raises(torch.AcceleratorError, match=LOST):
            x.add_(1)

    with pytest.raises(torch.AcceleratorError, match=LOST):
        graph_of(program)
    assert x.tolist() == [1] * 4


@pytest.mark.parametrize(
    ("mode", "is_lost"), [("global", True), ("thread_local", True), ("relaxed", False)]
)
def test_other_streams_may_be_waited_for_in_relaxed_mode(mode, is_lost):
    def program():
        with cuda.stream(cuda.default_stream()):
            torch.ones(4, device=DEV).sum().item()

    if is_lost:
        with pytest.raises(torch.AcceleratorError, match=LOST):
            graph_of(program, capture_error_mode=mode)
    else:
        with pytest.warns(UserWarning, match="The CUDA Graph is empty"):
            graph_of(program, capture_error_mode=mode)


@pytest.mark.parametrize(
    ("mode", "is_lost"), [("global", True), ("thread_local", False)]
)
def test_another_thread_may_wait_where_the_mode_is_that_of_a_thread(mode, is_lost):
    x = torch.ones(4, device=DEV)
    found = []

    def wait():
        try:
            found.append(x.sum().item())
        except torch.AcceleratorError as error:
            found.append(words_of(error)[0])

    def program():
        thread = threading.Thread(target=wait)
        thread.start(), thread.join()
        x.add(1)

    if is_lost:
        with pytest.raises(torch.AcceleratorError, match=LOST):
            graph_of(program, capture_error_mode=mode)
    else:
        graph_of(program, capture_error_mode=mode)
    assert found == [FORBIDDEN if is_lost else 4.0]


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_nobody_may_wait_for_the_whole_gpu(mode):
    with pytest.raises(torch.AcceleratorError, match=LOST):
        graph_of(cuda.synchronize, capture_error_mode=mode)


def test_streams_come_into_a_capture_by_events_and_have_to_come_back():
    x, made = torch.ones(4, device=DEV), {}

    def program(back: bool):
        here, side = cuda.current_stream(), cuda.Stream()
        assert (here.is_capturing(), side.is_capturing()) == (True, False)
        side.wait_stream(here)
        assert side.is_capturing()
        with cuda.stream(side):
            made["y"] = x * 2
        if back:
            here.wait_stream(side)
            made["z"] = made["y"] + x

    with pytest.raises(torch.AcceleratorError) as found:
        graph_of(lambda: program(back=False))
    assert words_of(found.value) == ["capturing stream has unjoined work"]
    graph = graph_of(lambda: program(back=True))
    graph.replay()
    assert made["z"].tolist() == [3] * 4


def test_what_was_given_before_cannot_be_waited_for():
    with pytest.raises(torch.AcceleratorError) as found:
        graph_of(lambda: cuda.current_stream().wait_stream(cuda.default_stream()))
    apart = "dependency created on uncaptured work in another stream"
    assert words_of(found.value) == [LOST, apart]


def test_an_event_of_a_capture_tells_nothing_afterwards():
    event = cuda.Event(enable_timing=True)

    def program():
        torch.ones(4, device=DEV)
        event.record()

    graph_of(program)
    words = "operation not permitted on an event last recorded in a capturing stream"
    for ask in (event.query, event.synchronize, lambda: event.elapsed_time(event)):
        with pytest.raises(torch.AcceleratorError, match=words):
            ask()
    event.record()
    event.synchronize()


@pytest.mark.parametrize(
    ("program", "what"),
    [
        (lambda x: x.to("cuda:1"), "a copy between GPUs in a CUDA graph"),
        (lambda x: INDICES[0] * 2, "mul of such a tensor in a CUDA graph"),
        (lambda x: INNER[0].replay(), "replaying a CUDA graph while another is"),
    ],
    ids=["peer", "sparse", "nested"],
)
def test_what_a_graph_cannot_have_is_named(program, what):
    x = torch.ones(2, 2, device=DEV)
    INDICES[:], INNER[:] = [x.to_sparse()], [graph_of(lambda: x + 1)]
    with pytest.raises((NotSimulated, torch.AcceleratorError)) as found:
        graph_of(lambda: program(x))
    assert what in words_of(found.value)[-1]


INDICES: list = []
INNER: list = []


def test_a_collective_in_a_capture_is_named(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "x = torch.ones(4, device='cuda')\n"
        "with torch.cuda.graph(torch.cuda.CUDAGraph()):\n"
        "    dist.all_reduce(x)\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "simgpu", "--gpus", "1", "torchrun",
         "--nproc-per-node", "1", str(program)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "all_reduce in a CUDA graph is not simulated" in run.stderr


def test_memory_that_is_gone_is_named_at_the_replay():
    given = [torch.ones(3, device=DEV)]
    graph = graph_of(lambda: given[0] * 2)
    given.clear()
    with pytest.raises(NotSimulated) as found:
        graph.replay()
    words = "(mul uses a tensor of (3,), torch.float32)"
    assert words in str(found.value) and "keep the tensors" in str(found.value)


# -- the class -------------------------------------------------------------------------


def _captured_twice():
    graph = graph_of(lambda: torch.ones(1, device=DEV))
    with cuda.graph(graph):
        pass


def _ended_elsewhere():
    graph = cuda.CUDAGraph()
    with cuda.stream(cuda.Stream()):
        graph.capture_begin()
        torch.ones(1, device=DEV)
        try:
            with cuda.stream(cuda.Stream()):
                graph.capture_end()
        finally:
            graph.capture_end()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (lambda: cuda.CUDAGraph().capture_begin(), "captured on a non-default stream"),
        (lambda: cuda.CUDAGraph().pool(), "without a preceding successful capture"),
        (_captured_twice, "already owns a captured graph"),
        (_ended_elsewhere, "must end on the same stream it began on"),
        (lambda: graph_of(lambda: None, capture_error_mode="none"),
         "Unknown capture error mode"),
    ],
    ids=["default stream", "pool", "twice", "elsewhere", "mode"],
)  # fmt: skip
def test_wrong_calls_are_refused_in_pytorchs_words(program, words):
    with pytest.raises(RuntimeError, match=words):
        program()


def test_a_graph_can_be_kept_and_instantiated_later():
    x = torch.zeros(2, device=DEV)
    graph = cuda.CUDAGraph(keep_graph=True)
    for number in (5, 1):  # before it is instantiated, another may take its place
        with cuda.graph(graph):
            x.add_(number)
    graph.instantiate()
    graph.replay(), graph.replay()
    assert x.tolist() == [2, 2]
    assert isinstance(graph, cuda.CUDAGraph)
    assert isinstance(graph, torch.cuda.graphs.CUDAGraph)


def test_after_a_reset_it_captures_again():
    x = torch.zeros(2, device=DEV)
    graph = graph_of(lambda: x.add_(1))
    graph.reset()
    with cuda.graph(graph):
        x.add_(5)
    graph.replay()
    assert x.tolist() == [5, 5]


# -- memory ----------------------------------------------------------------------------


def test_what_a_graph_holds_and_gives_back():
    """As `test_graph_memory_stats_and_use_result_after_destroy_graph` of PyTorch."""
    before = cuda.memory_stats()
    x = torch.ones(2**20, device=DEV)  # 4 MiB, in a segment of 20
    graph, made = cuda.CUDAGraph(), {}
    with cuda.graph(graph):
        made["y"] = (x * 2 + 1) * 3  # two are gone again
    after = cuda.memory_stats()
    grown = {k: after[k] - before[k] for k in
             ("reserved_bytes.all.current", "allocated_bytes.all.current",
              "segment.all.current")}  # fmt: skip
    assert grown == {
        "reserved_bytes.all.current": 40 * 2**20,
        "allocated_bytes.all.current": 8 * 2**20,
        "segment.all.current": 2,
    }
    pools = {s["segment_pool_id"] for s in cuda.memory_snapshot()}
    assert pools == {(0, 0), tuple(graph.pool())}
    y = made.pop("y")
    graph.replay()
    graph.reset()
    assert y[0].item() == 9  # it outlives its graph
    del y
    cuda.empty_cache()
    assert cuda.memory_reserved() == 20 * 2**20


def test_memory_of_a_pool_is_not_given_to_others():
    graph = graph_of(lambda: torch.ones(2**20, device=DEV))
    reserved = cuda.memory_reserved()
    outside = torch.ones(2**20, device=DEV)
    assert cuda.memory_reserved() == reserved + 20 * 2**20
    del graph, outside
    cuda.empty_cache()
    assert cuda.memory_reserved() == 0


# -- time ------------------------------------------------------------------------------


def test_a_replay_is_one_launch():
    x = torch.ones(16, device=DEV)

    def program():
        for _ in range(200):
            x.add_(1)

    program()
    usual = milliseconds(program)
    graph = graph_of(program)
    clock = simgpu._runtime.current().clock
    host = clock.host
    graph.replay()
    seconds = captured.LAUNCH + 200 * captured.LAUNCH_OF_NODE
    assert clock.host - host == pytest.approx(seconds)
    events = list(clock.events)[-200:]
    assert len({event.graph for event in events}) == 1
    for before, after in zip(events, events[1:], strict=False):
        assert after.start == pytest.approx(before.end)  # no launch in between
    assert milliseconds(graph.replay) < usual / 5


def test_branches_run_beside_each_other_and_wait_where_they_meet():
    x = torch.ones(16, device=DEV)

    def program():
        here, side = cuda.current_stream(), cuda.Stream()
        x.add(1)
        side.wait_stream(here)
        with cuda.stream(side):
            x.mul(2)
        x.sub(3)
        here.wait_stream(side)
        x.div(4)

    graph = graph_of(program)
    graph.replay()
    found = {e.name: e for e in list(simgpu._runtime.current().clock.events)[-4:]}
    add, mul, sub, div = (found[name] for name in ("add", "mul", "sub", "div"))
    assert mul.start == sub.start == pytest.approx(add.end)
    assert div.start == pytest.approx(max(mul.end, sub.end))


def test_a_profile_has_one_call_for_all_kernels(tmp_path):
    x = torch.ones(16, device=DEV)
    graph = graph_of(lambda: x.add_(1).mul_(2))
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, kinds.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        graph.replay()
        x.add_(1)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    calls = [r["name"] for r in rows if r.get("cat") == "cuda_runtime"]
    kernels = [r for r in rows if r.get("cat") == "kernel"]
    assert sorted(c for c in calls if "aunch" in c) == [
        "cudaGraphLaunch", "cudaLaunchKernel",
    ]  # fmt: skip
    numbers = [r["args"]["correlation"] for r in kernels]
    assert len(kernels) == 3 and len(set(numbers)) == 2


def test_a_dry_run_counts_replays_as_steps(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])\n"
        "net = net.to('cuda')\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "x = torch.zeros(8, 64, device='cuda')\n"
        "def step():\n"
        "    optimizer.zero_grad()\n"
        "    net(x).square().mean().backward()\n"
        "    optimizer.step()\n"
        "side = torch.cuda.Stream()\n"
        "with torch.cuda.stream(side):\n"
        "    step()\n"
        "torch.cuda.current_stream().wait_stream(side)\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph):\n"
        "    step()\n"
        "while True:\n"
        "    graph.replay()\n"
    )
    found = simgpu.dry_run(str(program), world=1, card="H100", steps=4)
    usual = tmp_path / "usual.py"
    usual.write_text(program.read_text().replace("    graph.replay()", "    step()"))
    launched = simgpu.dry_run(str(usual), world=1, card="H100", steps=4)
    flops = [report.mfu * report.step_seconds for report in (found, launched)]
    assert flops[0] == pytest.approx(flops[1]) and flops[0] > 0
    assert found.step_seconds < launched.step_seconds / 2


# -- races -----------------------------------------------------------------------------


def test_halves_of_a_tensor_do_not_race():
    x = torch.ones(8, device=DEV)
    graph = graph_of(lambda: x[:4].mul_(2))
    graph.replay()
    with cuda.stream(cuda.Stream()):
        x[4:].add_(1)
    cuda.synchronize()
    assert x.tolist() == [2] * 4 + [2] * 4


def test_the_sanitizer_knows_what_a_replay_reads_and_writes():
    x, made = torch.ones(2**20, device=DEV), {}
    graph = graph_of(lambda: made.update(y=x * 2))
    side = cuda.Stream()
    x.fill_(3)
    with cuda.stream(side), pytest.raises(simgpu.RaceError):
        graph.replay()  # reads what the default stream writes
    cuda.synchronize()
    graph.replay()
    with cuda.stream(side), pytest.raises(simgpu.RaceError):
        made["y"].add(1)
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        assert made["y"].add(1)[0].item() == 7


def test_a_step_keeps_no_values_of_the_host():
    # which a handler would give it that computed something elsewhere, unseen
    given = torch.ones(3, device=DEV), torch.ones(3)
    add = torch.ops.aten.add.Tensor
    with pytest.raises(
        NotSimulated, match=r"add of \(3,\) on the host in a CUDA graph"
    ):
        with cuda.graph(cuda.CUDAGraph()):
            run = current_capture().steps.run
            run(operation_of(add), add, given, {}, None, lambda *_: torch.ones(3))
