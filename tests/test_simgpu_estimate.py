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


class Attention(nn.Module):
    """Self-attention of 4 heads; `eager` writes the matrix of weights."""

    def __init__(self, width: int, eager: bool):
        super().__init__()
        self.eager, self.heads = eager, 4
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.project(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        if self.eager:
            scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
            future = torch.ones(length, length, dtype=torch.bool, device=x.device)
            scores = scores.masked_fill(future.triu(1), -torch.inf)
            seen = F.dropout(scores.softmax(-1), 0.1) @ value
        else:
            seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(seen.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, eager: bool):
        super().__init__()
        self.attention = Attention(width, eager)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """Two blocks between an embedding and a head that shares its weight."""

    def __init__(self, eager=False, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.tokens, self.places = nn.Embedding(211, 64), nn.Embedding(32, 64)
        self.blocks = nn.ModuleList(Block(64, eager) for _ in range(2))
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
        nn.MaxPool2d(3, 2, 1), nn.Conv2d(16, 32, 3, 2, 1, bias=False),
        nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, 10),
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
    logits = model(x[:, :-1])
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


def with_optimizer(model, x, make):
    optimizer = make(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        forward_and_backward(model, x)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def with_adam(model, x):
    with_optimizer(model, x, torch.optim.AdamW)


def with_fused_adam(model, x):
    with_optimizer(model, x, lambda p: torch.optim.Adam(p, fused=True))


def with_momentum(model, x):
    with_optimizer(model, x, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))


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


PROGRAMS = {
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
    "gpt with eager attention": (language_step, lambda: GPT(eager=True), tokens),
    "gpt in inference": (in_inference, GPT, tokens),
    "gpt in autocast": (in_autocast, GPT, tokens),
    "gpt with checkpoints": (language_step, lambda: GPT(checkpointed=True), tokens),
    "gpt with AdamW": (with_adam, GPT, tokens),
}


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


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("card", ["A100", "T4"])
def test_a_program_costs_what_it_costs_with_values(name, card):
    program, make_model, make_input = PROGRAMS[name]
    if card == "T4" and name == "gpt in autocast":
        pytest.skip("a T4 has no fused attention in bfloat16")
    kernels, seconds, peak = cost_with_values(program, make_model, make_input, card)
    with torch.device("meta"):
        model, x = make_model(), make_input()
    found = simgpu.estimate(program, model, x, card=card)
    assert {n: k.count for n, k in found.by_operation.items()} == dict(kernels)
    assert found.seconds == pytest.approx(seconds, rel=1e-12)
    assert (found.kernels, found.peak_bytes) == (kernels.total(), peak)
