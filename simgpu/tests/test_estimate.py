"""`simgpu.estimate` says what the same program costs on a GPU with values.

Every program runs twice on a card: with values on a simulated GPU, and without them.
"""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import simgpu
from recorded import models as recorded
from simgpu._device.cards import find_card
from simgpu._timing.collective_cost import choose
from simgpu._timing.topology import Topology


class Block(nn.Module):
    """Self-attention of 4 heads, and a perceptron."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))
        self.project, self.out = nn.Linear(64, 3 * 64), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 4 * 64), nn.Linear(4 * 64, 64)

    def forward(self, x):
        parts = self.project(self.norms[0](x)).unflatten(-1, (3, 4, 16))
        parts = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """Two blocks between an embedding and a head that shares its weight."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.tokens, self.places = nn.Embedding(211, 64), nn.Embedding(32, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 211, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(places)
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1), nn.InstanceNorm2d(16, affine=True), nn.Dropout(0.1),
        nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.GroupNorm(2, 32), nn.ReLU(),
        nn.Upsample(scale_factor=2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


def images() -> torch.Tensor:
    return torch.randn(8, 3, 32, 32)


def tokens() -> torch.Tensor:
    return torch.randint(211, (4, 32))


def rows() -> torch.Tensor:
    return torch.randn(32, 64)


def forward_and_backward(model, x):
    model(x).square().mean().backward()


def language_step(model, x):
    out = model(x[:, :-1])
    logits = out[0] if isinstance(out, tuple) else out
    F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()).backward()


def in_inference(model, x):
    model.eval()
    with torch.inference_mode():
        model(x)


def in_autocast(model, x):
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()


def in_channels_last(model, x):
    model.to(memory_format=torch.channels_last)
    x = x.to(memory_format=torch.channels_last)
    forward_and_backward(model, x)


def with_optimizer(make):
    """Two steps of an optimizer, with gradients that are clipped."""

    def program(model, x):
        optimizer = make(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            forward_and_backward(model, x)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return program


with_adam = with_optimizer(torch.optim.AdamW)
with_fused_adam = with_optimizer(lambda p: torch.optim.Adam(p, fused=True))
with_momentum = with_optimizer(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))


def with_scaler(model, x):
    scaler = torch.amp.GradScaler("cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torch.autocast("cuda", torch.float16):
        loss = model(x).float().square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def with_new_tensors(model, x):
    noise = torch.randn(x.shape, device="cuda")
    mask = torch.tensor([0.0, 1.0] * 32, device=x.device)
    labels = torch.arange(32).cuda()
    x = (x + noise) * mask + x.new_ones(64) + torch.zeros_like(x)
    hot = F.one_hot(labels, 64).to(x.dtype)
    (model(x) * hot).sum().backward()
    assert torch.cuda.memory_allocated() > 0
    assert x.device == torch.device("cuda", 0) and x.is_cuda and not x.is_meta


TINY = recorded.Shape(64, 4, 2, 32, 211)


def small_resnet() -> nn.Module:
    block = recorded.Bottleneck
    return nn.Sequential(block(3, 8, 1), block(32, 8, 1), block(32, 16, 2))


PROGRAMS = {
    "gpt-2": (language_step, lambda: recorded.Gpt2(TINY), tokens),
    "opt": (language_step, lambda: recorded.Opt(TINY), tokens),
    "bert": (language_step, lambda: recorded.bert_for_pre_training(TINY), tokens),
    "resnet": (forward_and_backward, small_resnet, images),
    "resnet in channels_last": (in_channels_last, small_resnet, images),
    "resnet in autocast": (in_autocast, small_resnet, images),
    "mlp": (forward_and_backward, mlp, rows),
    "mlp with AdamW": (with_adam, mlp, rows),
    "mlp with fused Adam": (with_fused_adam, mlp, rows),
    "mlp with momentum": (with_momentum, mlp, rows),
    "mlp with GradScaler": (with_scaler, mlp, rows),
    "mlp with new tensors": (with_new_tensors, mlp, rows),
    "cnn": (forward_and_backward, cnn, images),
    "cnn in inference": (in_inference, cnn, images),
    "cnn in channels_last": (in_channels_last, cnn, images),
    "cnn in autocast": (in_autocast, cnn, images),
    "gpt": (language_step, GPT, tokens),
    "gpt in inference": (in_inference, GPT, tokens),
    "gpt in autocast": (in_autocast, GPT, tokens),
    "gpt with checkpoints": (language_step, lambda: GPT(checkpointed=True), tokens),
    "gpt with AdamW": (with_adam, GPT, tokens),
}


@pytest.fixture(autouse=True)
def nothing_runs_afterwards():
    yield
    running = simgpu.is_running()
    simgpu.stop()
    assert not running


def on_meta(*makes):
    with torch.device("meta"):
        return [make() for make in makes]


def cost_with_values(program, make_model, make_input, card):
    """(operations and their counts, seconds, peak) of a program with values."""
    simgpu.start(1, card, races="off")
    try:
        model, x = make_model().cuda(), make_input().cuda()
        torch.cuda.reset_peak_memory_stats()
        timeline = simgpu.timeline()
        timeline.clear()
        with timeline.recording() as events:
            program(model, x)
        kernels = Counter(event.name for event in events if event.kind == "kernel")
        return kernels, timeline.seconds, torch.cuda.max_memory_allocated()
    finally:
        simgpu.stop()


@pytest.mark.parametrize("name, card", [
    *((name, "A100") for name in PROGRAMS), ("gpt", "T4"), ("cnn in autocast", "H100")
])  # fmt: skip
def test_a_program_costs_what_it_costs_with_values(name, card):
    program, *makes = PROGRAMS[name]
    kernels, seconds, peak = cost_with_values(program, *makes, card)
    found = simgpu.estimate(program, *on_meta(*makes), card=card)
    assert {n: k.count for n, k in found.by_operation.items()} == dict(kernels)
    assert found.seconds == pytest.approx(seconds, rel=1e-12)
    assert (found.kernels, found.peak_bytes) == (kernels.total(), peak)


# -- what it is given ------------------------------------------------------------------


def matmul(x):
    return x @ x


def square(size: int = 1024) -> torch.Tensor:
    return torch.empty(size, size, device="meta")


def test_a_model_counts_whether_it_is_given_or_used_by_name():
    model, x = on_meta(mlp, rows)
    given = simgpu.estimate(lambda model, x: model(x).sum().backward(), model, x)
    named = simgpu.estimate(lambda x: model(x).sum().backward(), x)
    called = simgpu.estimate(model, x)
    assert given == named
    assert simgpu.estimate(model.forward, x) == called
    size = sum(4 * weight.numel() for weight in model.parameters())
    assert size < called.peak_bytes < given.peak_bytes


def test_an_optimizer_brings_its_state_to_the_card():
    model, x = on_meta(mlp, rows)
    optimizer = torch.optim.Adam(model.parameters())

    def step(model, x):
        forward_and_backward(model, x)
        optimizer.step()

    first, second = (simgpu.estimate(step, model, x) for _ in range(2))
    given = simgpu.estimate(lambda _, *rest: step(*rest), optimizer, model, x)
    assert given == second
    assert first.by_operation["zeros_like"].count == 8  # two for each weight
    assert "zeros_like" not in second.by_operation
    assert second.kernels < first.kernels


def test_gradients_are_afterwards_what_they_were():
    model, x = on_meta(mlp, rows)
    without = simgpu.estimate(forward_and_backward, model, x)
    assert all(weight.grad is None for weight in model.parameters())
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    there = simgpu.estimate(forward_and_backward, model, x)
    assert there.by_operation["add_"].count == 4  # to the gradients that were there
    assert "add_" not in without.by_operation


def test_arguments_may_be_in_lists_and_dicts():
    def add(pair, named):
        return pair[0] + named["x"]

    found = simgpu.estimate(add, [square(), 3], {"x": square()})
    assert (found.kernels, found.peak_bytes) == (1, 3 * 4 * 1024**2)


def test_tensors_are_on_meta_again_and_nothing_runs_afterwards():
    x = square()
    simgpu.estimate(matmul, x)
    assert x.device.type == "meta" and (x @ x).device.type == "meta"


def test_70_billion_parameters_take_no_memory():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(32768, 32768) for _ in range(64)))
        x = torch.empty(4096, 32768)
    found = simgpu.estimate(model, x, card="H100", memory="1TB")
    assert found.kernels == 64 and found.peak_bytes > 64 * 4 * 32768**2
    with pytest.raises(torch.OutOfMemoryError, match="79.19 GiB"):
        simgpu.estimate(model, x, card="H100")


def test_what_has_values_is_refused():
    with pytest.raises(ValueError, match=r"shape \(2,\) is on cpu.* \"meta\""):
        simgpu.estimate(matmul, torch.ones(2))
    with pytest.raises(ValueError, match="unknown card"):
        simgpu.estimate(matmul, square(), card="K80")


def test_a_tensor_that_it_was_not_given_is_refused():
    class Holder:
        x = square()

        def run(self):
            return self.x + 1

    with pytest.raises(simgpu.NotSimulated, match="add of a tensor.* Pass it"):
        simgpu.estimate(Holder().run)


READERS = {
    "item()": lambda x: x.sum().item(), "float()": lambda x: float(x[0, 0]),
    "bool()": lambda x: bool((x > 0).all()), "print": lambda x: print(x),
    "an f-string": lambda x: f"{x.sum():.3f}", "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(), "a mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(), "equal": lambda x: torch.equal(x, x),
    "unique": lambda x: torch.unique(x),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_reading_a_value_is_refused_and_named(name):
    with pytest.raises(simgpu.NotSimulated, match="knows the shapes of tensors alone"):
        simgpu.estimate(READERS[name], square(4))


# -- beside GPUs that are simulated ----------------------------------------------------


def test_gpus_that_are_running_are_left_as_they_are():
    model, x = on_meta(GPT, tokens)
    alone = simgpu.estimate(in_autocast, model, x, card="H100")
    simgpu.start(2, "T4", memory="512MB")
    torch.cuda.set_device(1)
    mine = torch.ones(64, device="cuda:1")

    def state():
        timeline, current = simgpu.timeline(), torch.cuda.current_device()
        chance = [one.tolist() for one in torch.cuda.get_rng_state_all()]
        used = torch.cuda.memory_allocated()
        return current, used, chance, len(timeline.events), timeline.seconds

    before = state()
    found = simgpu.estimate(with_new_tensors, *on_meta(mlp, rows))
    assert found.peak_bytes > 0
    assert simgpu.estimate(in_autocast, model, x, card="H100") == alone
    assert state() == before
    assert (mine + 1).sum().item() == 128
    with torch.autocast("cuda", torch.float16):
        product = rows().cuda() @ rows().cuda().T
    assert product.dtype is torch.float16  # autocast goes on
    with pytest.raises(simgpu.NotSimulated, match="not on the estimated card"):
        simgpu.estimate(lambda x: x + mine, rows().to("meta"))
    simgpu.stop()


# -- collectives -----------------------------------------------------------------------


def test_a_collective_costs_what_the_clock_takes_for_it():
    topology = Topology(find_card("H100"), 8, 2, "400 Gbit/s")
    expected = choose("all_reduce", 2**28, range(16), topology)
    found = simgpu.estimate_collective(
        "all_reduce", 2**28, ranks=16, nodes=2, network="400 Gbit/s"
    )
    assert found == expected


def test_a_send_goes_to_another_node_if_there_is_one():
    near = simgpu.estimate_collective("send", 2**24)
    far = simgpu.estimate_collective("send", 2**24, ranks=16, nodes=2)
    assert far.seconds > 2 * near.seconds


@pytest.mark.parametrize("asked, words", [
    ({"name": "all_sum"}, "unknown collective 'all_sum'"),
    ({"ranks": 9, "nodes": 2}, "9 ranks cannot be spread evenly over 2 nodes"),
    ({"card": "K80"}, "unknown card 'K80'"),
    ({"network": "fast"}, "cannot read 'fast'"),
    ({"nbytes": -1}, "-1 bytes"),
    ({"nodes": 0}, "0 nodes"),
])  # fmt: skip
def test_a_collective_that_cannot_be_is_refused(asked, words):
    with pytest.raises(ValueError, match=words):
        simgpu.estimate_collective(**{"name": "all_reduce", "nbytes": 8, **asked})


def test_a_collective_in_a_function_is_refused():
    op = torch.ops._c10d_functional.all_reduce.default
    with pytest.raises(simgpu.NotSimulated, match="estimate_collective"):
        simgpu.estimate(lambda x: op(x, "sum", "0"), square())
