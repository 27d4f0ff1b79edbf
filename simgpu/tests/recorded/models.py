"""The models whose passes were recorded on real GPUs, in the operations that they run.

Written after the models' papers and public configurations, operation by operation as
Hugging Face's (of early 2024, with `attn_implementation="eager"`) and torchvision's
run: which products, which passes over memory, what is kept for backward. Leaves out
all that costs nothing: loading, initialisation, masks for padding.
"""

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

_LOWEST = torch.finfo(torch.float32).min


class Shape(NamedTuple):
    """The size of a language model."""

    width: int
    heads: int
    layers: int
    positions: int
    vocabulary: int


# Figures of the configurations in sitar-lab/NeuSight, scripts/asplos/data
GPT2_LARGE = Shape(1280, 20, 36, 1024, 50257)
GPT3_XL = Shape(3072, 24, 24, 2048, 50257)
OPT_13 = Shape(2048, 32, 24, 2048, 50272)
BERT_LARGE = Shape(1024, 16, 24, 512, 30522)


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, S, width) as (B, heads, S, width of a head)."""
    return x.view(*x.shape[:2], heads, -1).permute(0, 2, 1, 3)


def join_heads(x: torch.Tensor) -> torch.Tensor:
    """The way back."""
    return x.permute(0, 2, 1, 3).contiguous().flatten(2)


# -- GPT-2 -----------------------------------------------------------------------------


class Transposed(nn.Module):
    """A linear layer whose weight is (inputs, outputs): GPT-2's `Conv1D`."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x):
        flat = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], -1)


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU by tanh, each step a pass of its own."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


class Gpt2Block(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project = Transposed(width, 3 * width)
        self.out = Transposed(width, width)
        self.up, self.down = Transposed(width, 4 * width), Transposed(4 * width, width)
        self.dropout = nn.Dropout(0.1)
        ones = torch.ones(shape.positions, shape.positions, dtype=torch.bool)
        self.register_buffer("seen", ones.tril()[None, None])

    def attend(self, x):
        parts = self.project(x).split(x.shape[-1], dim=2)
        query, key, value = (split_heads(part, self.heads) for part in parts)
        scores = torch.matmul(query, key.transpose(-1, -2))
        scores = scores / torch.full([], math.sqrt(value.shape[-1]), device=x.device)
        length = x.shape[1]
        lowest = torch.full([], _LOWEST, device=x.device)
        scores = torch.where(self.seen[:, :, :length, :length], scores, lowest)
        weights = self.dropout(F.softmax(scores, dim=-1))
        joined = join_heads(torch.matmul(weights, value))
        return self.dropout(self.out(joined)), (key, value)

    def forward(self, x):
        attended, kept = self.attend(self.norm1(x))
        x = attended + x
        return x + self.dropout(self.down(tanh_gelu(self.up(self.norm2(x))))), kept


class Gpt2(nn.Module):
    """Returns the logits, and the keys and values that it keeps for generation."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.positions, shape.width)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Gpt2Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        x = self.dropout(self.tokens(tokens) + self.places(places))
        kept = []
        for block in self.blocks:
            x, pair = block(x)
            kept.append(pair)
        return self.head(self.norm(x)), kept


# -- OPT -------------------------------------------------------------------------------


class OptBlock(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def attend(self, x, mask):
        batch, length, width = x.shape
        query = self.query(x) * (width // self.heads) ** -0.5
        parts = (query, self.key(x), self.value(x))
        parts = [split_heads(part, self.heads).contiguous() for part in parts]
        query, key, value = (part.flatten(0, 1) for part in parts)
        scores = torch.bmm(query, key.transpose(1, 2))
        scores = scores.view(batch, self.heads, length, length) + mask
        scores = torch.max(scores, torch.tensor(_LOWEST, device=x.device))
        weights = F.softmax(scores.flatten(0, 1), dim=-1)
        seen = torch.bmm(weights, value).view(batch, self.heads, length, -1)
        return self.out(seen.transpose(1, 2).reshape(batch, length, width)), parts[1:]

    def forward(self, x, mask):
        attended, kept = self.attend(self.norm1(x), mask)
        x = x + self.dropout(attended)
        flat = x.reshape(-1, x.shape[-1])
        wide = F.relu(self.up(self.norm2(flat)))
        return (flat + self.dropout(self.down(wide))).view(x.shape), kept


class Opt(nn.Module):
    """Returns the logits, and the keys and values that it keeps for generation."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.positions + 2, shape.width)
        self.blocks = nn.ModuleList(OptBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        batch, length = tokens.shape
        present = torch.ones(batch, length, device=tokens.device)
        places = (present.cumsum(1) * present).long() - 1
        mask = torch.full((length, length), _LOWEST, device=tokens.device).triu_(1)
        mask = mask[None, None].expand(batch, 1, length, length)
        x = self.tokens(tokens) + self.places(places + 2)
        kept = []
        for block in self.blocks:
            x, pair = block(x, mask)
            kept.append(pair)
        return self.head(self.norm(x)).contiguous(), kept


# -- BERT ------------------------------------------------------------------------------


class BertBlock(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1 = nn.LayerNorm(width, eps=1e-12)
        self.norm2 = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(0.1)

    def attend(self, x, mask):
        parts = (self.query(x), self.key(x), self.value(x))
        query, key, value = (split_heads(part, self.heads) for part in parts)
        scores = torch.matmul(query, key.transpose(-1, -2))
        scores = scores / math.sqrt(query.shape[-1]) + mask
        weights = self.dropout(F.softmax(scores, dim=-1))
        return join_heads(torch.matmul(weights, value))

    def forward(self, x, mask):
        x = self.norm1(self.dropout(self.out(self.attend(x, mask))) + x)
        return self.norm2(self.dropout(self.down(F.gelu(self.up(x)))) + x)


class Bert(nn.Module):
    """The encoder; `head` makes of its output what the task asks for."""

    def __init__(self, shape: Shape, head: nn.Module):
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.positions, shape.width)
        self.kinds = nn.Embedding(2, shape.width)
        self.norm = nn.LayerNorm(shape.width, eps=1e-12)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(BertBlock(shape) for _ in range(shape.layers))
        self.head = head

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        kinds = torch.zeros_like(tokens)
        present = torch.ones(tokens.shape, device=tokens.device)
        mask = (1.0 - present[:, None, None, :]) * _LOWEST
        x = self.tokens(tokens) + self.kinds(kinds) + self.places(places)
        x = self.dropout(self.norm(x))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


class Pooled(nn.Sequential):
    """What the first token says of the whole text: two numbers."""

    def __init__(self, width: int, *between: nn.Module):
        first, last = nn.Linear(width, width), nn.Linear(width, 2)
        super().__init__(first, nn.Tanh(), *between, last)

    def forward(self, x):
        return super().forward(x[:, 0])


class PreTraining(nn.Module):
    """Words for masked places; whether two sentences follow is computed, too."""

    def __init__(self, shape: Shape):
        super().__init__()
        width = shape.width
        self.change, self.norm = nn.Linear(width, width), nn.LayerNorm(width, eps=1e-12)
        self.words = nn.Linear(width, shape.vocabulary)
        self.follows = Pooled(width)

    def forward(self, x):
        self.follows(x)
        return self.words(self.norm(F.gelu(self.change(x))))


def bert_for_classification(shape: Shape) -> Bert:
    return Bert(shape, Pooled(shape.width, nn.Dropout(0.1)))


def bert_for_pre_training(shape: Shape) -> Bert:
    model = Bert(shape, PreTraining(shape))
    model.head.words.weight = model.tokens.weight
    return model


# -- ResNet-50 -------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """Three convolutions; the one of 3 x 3 has the stride ("v1.5")."""

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *_convolution(inputs, width, 1), nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride), nn.ReLU(inplace=True),
            *_convolution(width, outputs, 1),
        )  # fmt: skip
        self.shortcut = nn.Identity()
        if inputs != outputs or stride > 1:
            self.shortcut = nn.Sequential(*_convolution(inputs, outputs, 1, stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.body(x)
        out += self.shortcut(x)
        return self.relu(out)


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple:
    weights = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return weights, nn.BatchNorm2d(outputs)


def resnet50() -> nn.Sequential:
    layers = [*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for i in range(count):
            stride = 2 if stage and not i else 1
            layers.append(Bottleneck(inputs, width, stride))
            inputs = 4 * width
    pool = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, pool, nn.Flatten(), nn.Linear(inputs, 1000))
