"""`torch.compile`: fused kernels and the same values; or uncompiled; or refused."""

import functools
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import simgpu
from simgpu import _runtime as state
from simgpu._api import compiling
from simgpu._dry.run import Job, run


@pytest.fixture
def eager(monkeypatch):
    monkeypatch.setattr(compiling, "_told", False)
    simgpu.start(1, compile="eager")
    yield
    simgpu.stop()


@pytest.fixture
def refused():
    simgpu.start(1, compile="refuse")
    yield
    simgpu.stop()


@pytest.fixture
def fused(monkeypatch):
    monkeypatch.setattr(compiling, "_told", False)
    simgpu.start(2)
    yield
    simgpu.stop()


def double(x):
    return x * 2


def test_every_form_gives_back_what_it_is_given(eager, capfd):
    options = {"mode": "max-autotune", "backend": "inductor", "fullgraph": True}
    net, x = nn.Linear(2, 2).cuda(), torch.ones(1, 2, device="cuda")
    assert torch.compile(net, dynamic=False, **options) is net
    assert torch.compile(double) is torch.compile(**options)(double) is double
    assert torch.compile(options={"triton.cudagraphs": True})(double) is double
    part = functools.partial(double)
    assert torch.compile(part) is part
    wanted = net(x)
    net.compile(**options)
    assert torch.equal(net(x), wanted) and net(x).device.type == "cuda"
    step = torch.compile(torch.optim.SGD(net.parameters(), lr=0.1).step)
    net(x).sum().backward()
    step()
    assert not torch.equal(net(x), wanted)
    said = capfd.readouterr().err
    assert said == "simgpu: torch.compile gives back what it is given: all runs " \
        "uncompiled\n"  # fmt: skip


def test_what_programs_call_beside_it_does_no_harm(eager):
    torch.compiler.cudagraph_mark_step_begin()
    torch.compiler.reset()
    assert not torch.compiler.is_compiling()
    assert torch.compiler.disable(double)(2) == 4
    with torch.compiler.set_stance("force_eager"):
        assert torch.compile(double)(2) == 4
    torch._dynamo.config.recompile_limit = torch._dynamo.config.recompile_limit


def test_only_ranks_0_tell(eager, monkeypatch, capfd):
    monkeypatch.setenv("RANK", "1")
    torch.compile(double)
    assert capfd.readouterr().err == ""


def test_a_function_is_refused_when_it_is_called(refused):
    """Packages decorate functions that nobody calls."""
    compiled = torch.compile(double)
    with pytest.raises(simgpu.NotSimulated, match='compile of double .*="eager"'):
        compiled(2)
    with pytest.raises(simgpu.NotSimulated, match='compile="fuse"'):
        torch.compile(fullgraph=True)(nn.Linear(1, 1))
    simgpu.stop()
    assert compiled(2) == 4


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_what_pytorch_would_not_compile_is_not_refused(refused, how, monkeypatch):
    net = nn.Linear(1, 1)
    if how == "variable":
        monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
        assert torch.compile(net) is net
    else:
        assert torch.compile(net, disable=True) is net


def test_ways_are_checked():
    with pytest.raises(ValueError, match="compile='yes'; use one of fuse, eager, ref"):
        simgpu.start(1, compile="yes")
    assert simgpu.count() == 0


# -- fused, with values ----------------------------------------------------------------


class Block(nn.Module):
    """A norm, attention, a gated MLP and dropout."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.qkv, self.up = nn.Linear(64, 192, bias=False), nn.Linear(64, 512)
        self.down = nn.Linear(256, 64)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 16)).unbind(-3)
        y = F.scaled_dot_product_attention(
            *(part.transpose(1, 2) for part in (q, k, v)), is_causal=True
        )
        x = x + y.transpose(1, 2).flatten(2)
        gate, up = self.up(x).chunk(2, -1)
        return x + F.dropout(self.down(F.silu(gate) * up), 0.1)


def trained(compiles: bool) -> tuple:
    """Losses, parameters and kernels of three steps, and bytes at the peak."""
    torch.manual_seed(0)
    torch.cuda.manual_seed(0)
    net = nn.Sequential(Block(), Block()).cuda()
    x = torch.randn(8, 128, 64).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = torch.compile(net) if compiles else net
    clock = state.running.clock
    torch.cuda.reset_peak_memory_stats()
    losses, events = [], []
    clock.recordings.append(events)
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    clock.recordings.remove(events)
    kernels = [(event.kind, event.name, event.nbytes) for event in events]
    parameters = [p.detach().cpu() for p in net.parameters()]
    return losses, parameters, kernels, torch.cuda.max_memory_allocated()


def test_values_are_those_of_the_operations_and_kernels_are_fewer(fused):
    (losses, weights, kernels, peak), other = trained(True), trained(False)
    assert [loss.item() for loss in losses] == [loss.item() for loss in other[0]]
    for mine, theirs in zip(weights, other[1], strict=True):
        assert torch.equal(mine, theirs)
    mine, theirs = (sum(nbytes for *_, nbytes in its) for its in (kernels, other[2]))
    assert len(kernels) == len(other[2]) - 15
    assert mine < 0.8 * theirs and peak < 0.95 * other[3]
    assert any(name.startswith("fused silu, mul") for _, name, _ in kernels)


def test_a_dry_run_has_the_same_kernels_and_bytes(fused):
    _, _, kernels, peak = trained(True)
    simgpu.stop()
    found = []
    run(Job(1, card="A100", steps=4), lambda: found.append(trained(True)[2:]))
    assert found == [(kernels, peak)]


def test_what_is_fused_is_said_once(fused, capfd):
    assert torch.compile(double)(torch.ones(2, device="cuda")).tolist() == [2, 2]
    net = nn.Linear(2, 2).cuda()
    assert torch.compile(net) is net
    net.compile()
    assert capfd.readouterr().err.count("simgpu: torch.compile: values are comp") == 1


def test_values_may_be_read_in_the_middle(fused):
    seen = []

    @torch.compile
    def function(x):
        y = (x + 1) * 2
        seen.append(y)  # which nobody returns
        if y.sum().item() > 0:  # a graph break
            y = y - 3
        y += x
        return y.relu(), y[:1]

    out, part = function(torch.tensor([1.0, -4.0, 5.0], device="cuda"))
    assert out.tolist() == [2.0, 0.0, 14.0] and part.tolist() == [2.0]
    out, part = function(torch.tensor([-4.0], device="cuda"))
    assert (out.tolist(), part.tolist()) == ([0.0], [-10.0])
    assert [its.tolist() for its in seen] == [[4.0, -6.0, 12.0], [-10.0]]  # in place


def test_other_threads_are_not_compiled_meanwhile(fused):
    clock = state.running.clock

    @torch.compile
    def function(x):
        y = x + 1
        events = []
        clock.recordings.append(events)
        thread = threading.Thread(target=lambda: torch.ones(4, device="cuda") * 2)
        thread.start()
        thread.join()
        clock.recordings.remove(events)
        assert [event.name for event in events] == ["ones", "mul"]
        return y * 2

    assert function(torch.ones(2, device="cuda")).tolist() == [4.0, 4.0]


def test_a_race_on_a_result_of_compiled_code_is_found(fused):
    x = torch.ones(4, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    y = torch.compile(double)(x)
    with torch.cuda.stream(side):
        with pytest.raises(simgpu.RaceError, match="compiled code"):
            y + 1
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert (y + 1).tolist() == [3.0] * 4


def test_a_cuda_graph_runs_compiled_code_as_it_is(fused):
    x = torch.ones(4, device="cuda")
    function = torch.compile(lambda x: (x + 1) * 2)
    function(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(x)
    x.fill_(2)
    graph.replay()
    assert out.tolist() == [6.0] * 4
    assert function(x).tolist() == [6.0] * 4


def test_an_estimate_counts_what_is_not_fused(fused):
    with torch.device("meta"):
        net, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.ReLU()), torch.ones(4, 8)
    compiled = simgpu.estimate(lambda net, x: torch.compile(net)(x), net, x)
    assert compiled.seconds == simgpu.estimate(lambda net, x: net(x), net, x).seconds


@pytest.mark.parametrize("look", [
    lambda y: y.data_ptr(), lambda y: y.untyped_storage().data_ptr(),
    lambda y: y.record_stream(torch.cuda.current_stream()),
    lambda y: y.detach().to_sparse(),
])  # fmt: skip
def test_what_a_program_asks_for_in_the_middle_is_in_memory(fused, look):
    events = []
    state.running.clock.recordings.append(events)

    @torch.compile
    def function(x):
        y = x + 1
        found = look(y)
        assert [event.name for event in events][:1] == ["fused add"]
        if isinstance(found, int):
            assert found == y.data_ptr() > 0x7F00_0000_0000
        return y * 2

    x = torch.ones(2, device="cuda")
    events.clear()
    assert function(x).tolist() == [4.0, 4.0]
