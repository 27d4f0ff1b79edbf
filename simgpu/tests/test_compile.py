"""`torch.compile`: refused where it is used, or the program runs uncompiled."""

import functools

import pytest
import torch
from torch import nn

import simgpu
from simgpu._api import compiling


@pytest.fixture
def eager(monkeypatch):
    monkeypatch.setattr(compiling, "_told", False)
    simgpu.start(1, compile="eager")
    yield
    simgpu.stop()


@pytest.fixture
def refused():
    simgpu.start(1)
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
    with pytest.raises(simgpu.NotSimulated, match="compile of double .* --no-compile"):
        compiled(2)
    with pytest.raises(simgpu.NotSimulated, match="--no-compile"):
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
    with pytest.raises(ValueError, match="compile='yes'; use one of refuse, eager"):
        simgpu.start(1, compile="yes")
    assert simgpu.count() == 0
