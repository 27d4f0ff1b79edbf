"""The training step whose memory others recorded, for a simulated card to repeat.

A language model in plain operations (RMSNorm, rotary positions, attention by two
products, SwiGLU), its loss and its AdamW, written so that each operation that takes
memory is one of the recorded program: 4 sequences, 10,000 words, 24 layers of 1024,
16 heads, hidden layers of 4096. The recorded program's own code is not used.

Source of the shape: `program` in `recordings/training_memory.json`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

import simgpu
from simgpu._device.blocks import round_up

BATCH, WORDS, WIDTH, HIDDEN, HEADS, LAYERS = 4, 10_000, 1024, 4096, 16, 24
KINDS = (
    "inference float32", "inference, bf16 autocast",
    "training float32", "training, bf16 autocast",
)  # fmt: skip
WARM_UPS = 5  # steps before the recorded one; their words stay on the card


class Product(nn.Module):
    """A product with a matrix, as `torch.einsum` computes it: a batch of one."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, inputs)
        return torch.einsum("bli,oi->blo", x, self.weight)


class Norm(nn.Module):
    """RMSNorm, in float32 whatever comes in."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        numbers = x.float()
        scale = torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + 1e-5)
        numbers = numbers * scale
        return (self.weight * numbers).to(x.dtype)


class Rotation(nn.Module):
    """Rotary positions; neighbouring numbers of a head are a pair."""

    def __init__(self, length: int, width: int):
        super().__init__()
        speeds = 10_000 ** -(torch.arange(0, width, 2) / width)
        angles = torch.arange(length)[:, None] * speeds
        table = torch.stack((angles.cos(), angles.sin()))
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, heads, length, width)
        first, second = x.unflatten(-1, (-1, 2)).movedim(-1, 0).unbind(0)
        cos, sin = self.table[:, : x.shape[-2], :].unbind(0)
        one = cos * first - sin * second
        other = sin * first + cos * second
        return torch.cat((one, other), dim=-1)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, rotation: Rotation):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (
            Product(width, width) for _ in range(4)
        )
        self.rotation = rotation

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (query, key, value)
        )
        query = self.rotation(query)
        key = self.rotation(key)
        place = torch.arange(x.shape[1], device=x.device)
        mask = place[:, None] >= place
        heads = attend(query, key, value, mask)
        heads = heads.transpose(1, 2).flatten(2).contiguous()
        out = self.out(heads)
        return out


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(key.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("bhqk,bhkd->bhqd", weights, value)


def softmax(x: Tensor) -> Tensor:
    moved = x - x.max(-1, keepdim=True)[0]
    powers = moved.exp()
    return powers / powers.sum(-1, keepdim=True)


class Gated(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate, self.out = Product(width, hidden), Product(hidden, width)
        self.up = Product(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(silu(self.gate(x)) * self.up(x))


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Layer(nn.Module):
    def __init__(self, rotation: Rotation):
        super().__init__()
        self.attention = Attention(WIDTH, HEADS, rotation)
        self.gated = Gated(WIDTH, HIDDEN)
        self.norms = nn.ModuleList([Norm(WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(self.norms[0](x))
        between = x + attended
        gated = self.gated(self.norms[1](between))
        out = between + gated
        return out


class Model(nn.Module):
    def __init__(self, tokens: int, layers: int = LAYERS):
        super().__init__()
        self.words = nn.Parameter(torch.zeros(WORDS, WIDTH))
        self.rotation = Rotation(tokens, WIDTH // HEADS)
        self.layers = nn.ModuleList([Layer(self.rotation) for _ in range(layers)])
        self.norm = Norm(WIDTH)
        self.out = Product(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        embedded = self.words[words, :]
        x = embedded
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.out(x)


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy."""
    moved = scores - scores.max(-1, keepdim=True)[0]
    logarithms = moved - moved.exp().sum(-1, keepdim=True).log()
    return torch.gather(-logarithms, -1, targets.unsqueeze(-1)).mean()


class AdamW(torch.optim.Optimizer):
    """A loop over the parameters; the moments are new tensors in each step."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            gradient, state = parameter.grad.data, self.state[parameter]
            before = state.get("first", torch.zeros_like(gradient))
            before_squared = state.get("second", torch.zeros_like(gradient))
            first = 0.9 * before + 0.1 * gradient
            second = 0.999 * before_squared + 0.001 * torch.square(gradient)
            parameter.data -= 1e-3 * first / (torch.sqrt(second) + 1e-8)
            parameter.data -= 1e-3 * 0.01 * parameter.data
            state["first"], state["second"] = first, second


class Figures(NamedTuple):
    """What the recorded step takes, as `training_memory.json` has it."""

    allocations: int
    rise: int  # bytes of blocks above the start, without what they are too large
    peak: int  # bytes of blocks
    reserved: int  # bytes of segments


def predict(kind: str, tokens: int, warm_ups: int = WARM_UPS) -> Figures:
    """What the step would take on a simulated A100, by `simgpu.estimate`.

    Args:
        kind: one of `KINDS`.
        tokens: of each sequence.
        warm_ups: steps before it; what blocks are too large depends on them.

    Raises:
        ValueError: for a kind that was not recorded.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; one of {', '.join(KINDS)}")
    found = []
    with torch.device("meta"):
        model = Model(tokens)

    def program(model: Model) -> None:
        found.append(_measure(model, kind, tokens, warm_ups))

    simgpu.estimate(program, model)
    return found[0]


def _measure(model: Model, kind: str, tokens: int, warm_ups: int) -> Figures:
    """The recorded program: steps to warm up, then one that is watched."""
    trains = kind.startswith("training")
    numbers = {"dtype": torch.bfloat16, "enabled": kind.endswith("autocast")}
    words, word, *targets = (
        torch.randint(WORDS, (steps, BATCH, tokens), device="cuda")
        for steps in (WARM_UPS, 1) * (2 if trains else 1)
    )
    targets, target = targets or (words, word)
    optimizer = AdamW(model.parameters())

    scores = loss = None  # what a step leaves is freed in the middle of the next

    def step(words: Tensor, targets: Tensor) -> None:
        nonlocal scores, loss
        with torch.autocast("cuda", **numbers), torch.inference_mode(not trains):
            scores = model(words)
            if not trains:
                return
            loss = loss_of(scores, targets)
        loss.backward()
        optimizer.step()

    for i in range(warm_ups):
        step(words[i], targets[i])
        optimizer.zero_grad()
    scores = loss = None
    memory = torch.cuda.memory
    torch.cuda.reset_peak_memory_stats()
    memory._record_memory_history(context=None, stacks="python", max_entries=10**6)
    step(word[0], target[0])
    events = memory._snapshot()["device_traces"][0]
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return Figures(*_count(events), *peaks)


def _count(events: list[dict]) -> tuple[int, int]:
    """Allocations, and the most bytes that they took above the start."""
    allocations = taken = most = 0
    for event in events:
        if event["action"] == "alloc":
            allocations += 1
            taken += round_up(event["size"])
            most = max(most, taken)
        elif event["action"] == "free_requested":
            taken -= round_up(event["size"])
    return allocations, most
