"""Answers to the exercises of lesson 02: right ones, and planted wrong ones."""

import torch
from torch import nn


def with_device(x):
    return torch.randn(x.shape, dtype=x.dtype, device=x.device)


def filled(x):
    return x.new_empty(x.shape).normal_()


def on_the_cpu(x):
    return torch.randn(x.shape)


def moved(x):
    return torch.randn(x.shape).to(x)


def on_the_current_gpu(x):
    return torch.randn(x.shape, device="cuda")


def always_float32(x):
    return torch.randn_like(x, dtype=torch.float32)


def too_wide(x):
    return torch.randn_like(x) * 10


def wants_gradient(x):
    return torch.randn_like(x).requires_grad_()


def in_place(x):
    return x.detach().normal_()


def seeded(x):
    torch.cuda.manual_seed_all(0)
    torch.manual_seed(0)
    return torch.randn_like(x)


def as_one_row(x):
    return torch.randn_like(x.reshape(-1))


def stretched_uniform(x):
    return (torch.rand_like(x) - 0.5) * 12**0.5


class Compared(nn.Module):
    """Compares positions with lengths; subclasses do one thing in another way."""

    def positions(self, x):
        return torch.arange(x.shape[1], device=x.device)

    def forward(self, x, lengths):
        return x * (self.positions(x) < lengths[:, None])[..., None]


class Filled(nn.Module):
    def forward(self, x, lengths):
        positions = lengths.new_ones(x.shape[1]).cumsum(0)
        return x.masked_fill((positions > lengths[:, None]).unsqueeze(2), 0)


class Where(nn.Module):
    def forward(self, x, lengths):
        positions = torch.arange(x.shape[1], device=lengths.device)
        hidden = positions[None, :, None] >= lengths[:, None, None]
        return torch.where(hidden, torch.zeros_like(x), x)


class LoopBeside(nn.Module):
    def empty(self, x):
        return x.new_zeros(x.shape[0], x.shape[1], 1)

    def forward(self, x, lengths):
        keep = self.empty(x)
        for row, length in enumerate(lengths):
            keep[row, :length] = 1
        return x * keep.to(x.device)


class AsGiven(LoopBeside):
    def empty(self, x):
        return torch.zeros(x.shape[0], x.shape[1], 1)


class OnTheCpu(Compared):
    def positions(self, x):
        return torch.arange(x.shape[1])


class HardCoded(Compared):
    def positions(self, x):
        return torch.arange(x.shape[1], device="cuda:0")


class Moved(Compared):
    def positions(self, x):
        return torch.arange(x.shape[1]).to(x.device)


class OneTooMany(Compared):
    def positions(self, x):
        return super().positions(x) - 1


class FixedLength(Compared):
    def __init__(self):
        super().__init__()
        self.register_buffer("five", torch.arange(5))

    def positions(self, x):
        return self.five


class FloatMask(Compared):
    def forward(self, x, lengths):
        return x * (self.positions(x) < lengths[:, None]).float()[..., None]


class InPlace(Compared):
    def forward(self, x, lengths):
        x *= (self.positions(x) < lengths[:, None])[..., None]
        return x


class ToTheHost(Compared):
    def forward(self, x, lengths):
        return super().forward(x, lengths).cpu()


RIGHT = {
    "noise_like": [torch.randn_like, with_device, filled],
    "bytes_of_the_loop": [16_100],
    "hide_padding": [Compared, Filled, Where],
}

WRONG = {
    "bytes_of_the_loop": [
        (0, "a step copies 10 indices"),
        (161, "one step"),
        (81, "one step"),
        (8_100, "to be read and to be written"),
        (8_000, "two indexings a step"),
        (16_000, "asks the GPU for its answer"),
        (16_001, "in every step"),
        (16_400, "a boolean comes back"),
        (16_500, "not the minimum"),
        ("many", "give a number"),
    ],
    "noise_like": [
        (stretched_uniform, "beyond 2"),
        (on_the_cpu, "the noise is on cpu"),
        (moved, "make it there"),
        (on_the_current_gpu, "the noise is on cuda:0"),
        (always_float32, "is torch.float32, not torch.float64"),
        (torch.rand_like, "not those of normal numbers"),
        (too_wide, "not those of normal numbers"),
        (torch.zeros_like, "the same numbers"),
        (wants_gradient, "wants a gradient"),
        (in_place, "into x"),
        (seeded, "the same numbers"),
        (as_one_row, "the noise is (2000,)"),
        (lambda x: 0.5, "not a tensor"),
    ],
    "hide_padding": [
        (AsGiven, "bytes; compare positions"),
        (LoopBeside, "bytes; compare positions"),
        (OnTheCpu, "on the same device"),
        (HardCoded, "on the same device"),
        (Moved, "bytes; compare positions"),
        (FloatMask, "a mask has changed it"),
        (OneTooMany, "a wrong element"),
        (InPlace, "changes its input"),
        (FixedLength, "your code raised"),
        (ToTheHost, "the result is on cpu"),
        (nn.Identity, "your code raised"),
    ],
}
