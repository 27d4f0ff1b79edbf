"""Answers to the exercises of lesson 02: right ones, and wrong ones with the reason."""

import torch
from torch import nn


def with_device(x):
    dtype = x.dtype if x.is_floating_point() else torch.float32
    return torch.randn(x.shape, dtype=dtype, device=x.device)


def with_like(x):
    dtype = x.dtype if x.dtype.is_floating_point else torch.float32
    return torch.randn_like(x, dtype=dtype)


def filled(x):
    noise = x.new_empty(x.shape) if x.is_floating_point() else x.float()
    return noise.normal_()


def on_the_cpu(x):
    return torch.randn(x.shape)


def moved(x):
    return torch.randn(x.shape).to(x.device)


def on_the_current_gpu(x):
    return torch.randn(x.shape, device="cuda")


def always_float32(x):
    return torch.randn_like(x, dtype=torch.float32)


def its_dtype_whatever(x):
    return x.new_zeros(x.shape).float().normal_().to(x.dtype)


def uniform(x):
    dtype = x.dtype if x.is_floating_point() else torch.float32
    return torch.rand_like(x, dtype=dtype)


def too_wide(x):
    return with_device(x) * 10


def wants_gradient(x):
    return with_device(x).requires_grad_()


def in_place(x):
    if x.is_floating_point():
        return x.detach().normal_()
    return with_device(x)


def seeded(x):
    torch.cuda.manual_seed_all(0)
    torch.manual_seed(0)
    return with_device(x)


def flat(x):
    return with_device(x.reshape(-1))


class Compared(nn.Module):
    def forward(self, x, lengths):
        positions = torch.arange(x.shape[1], device=x.device)
        return x * (positions < lengths[:, None])[..., None]


class Filled(nn.Module):
    def forward(self, x, lengths):
        positions = lengths.new_ones(x.shape[1]).cumsum(0)
        return x.masked_fill((positions > lengths[:, None]).unsqueeze(2), 0)


class Where(nn.Module):
    def forward(self, x, lengths):
        positions = torch.arange(x.shape[1], device=lengths.device)
        hidden = positions[None, :, None] >= lengths[:, None, None]
        return torch.where(hidden, torch.zeros_like(x), x)


class AsGiven(nn.Module):
    def forward(self, x, lengths):
        keep = torch.zeros(x.shape[0], x.shape[1], 1)
        for row, length in enumerate(lengths):
            keep[row, :length] = 1
        return x * keep.to("cuda:0")


class LoopBeside(nn.Module):
    def forward(self, x, lengths):
        keep = x.new_zeros(x.shape[0], x.shape[1], 1)
        for row, length in enumerate(lengths):
            keep[row, :length] = 1
        return x * keep


class OnTheCpu(nn.Module):
    def forward(self, x, lengths):
        return x * (torch.arange(x.shape[1]) < lengths[:, None])[..., None]


class HardCoded(nn.Module):
    def forward(self, x, lengths):
        positions = torch.arange(x.shape[1], device="cuda:0")
        return x * (positions < lengths[:, None])[..., None]


class Moved(nn.Module):
    def forward(self, x, lengths):
        positions = torch.arange(x.shape[1]).to(x.device)
        return x * (positions < lengths[:, None])[..., None]


class FloatMask(nn.Module):
    def forward(self, x, lengths):
        positions = torch.arange(x.shape[1], device=x.device)
        return x * (positions < lengths[:, None]).float()[..., None]


class OneTooMany(nn.Module):
    def forward(self, x, lengths):
        positions = torch.arange(x.shape[1], device=x.device)
        return x * (positions <= lengths[:, None])[..., None]


class InPlace(nn.Module):
    def forward(self, x, lengths):
        positions = torch.arange(x.shape[1], device=x.device)
        x *= (positions < lengths[:, None])[..., None]
        return x


class FixedLength(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("positions", torch.arange(5))

    def forward(self, x, lengths):
        return x * (self.positions < lengths[:, None])[..., None]


class ToTheHost(nn.Module):
    def forward(self, x, lengths):
        return Compared()(x, lengths).cpu()


def stretched_uniform(x):
    dtype = x.dtype if x.is_floating_point() else torch.float32
    return (torch.rand(x.shape, dtype=dtype, device=x.device) - 0.5) * 12**0.5


RIGHT = {
    "bytes_of_the_loop": [lambda: (16_100,)],
    "noise_like": [lambda: (with_device,), lambda: (with_like,), lambda: (filled,)],
    "hide_padding": [lambda: (Compared,), lambda: (Filled,), lambda: (Where,)],
}
WRONG = {
    "bytes_of_the_loop": [
        (lambda: (0,), "a step copies 10 indices"),
        (lambda: (161,), "one step"),
        (lambda: (81,), "one step"),
        (lambda: (8_100,), "to be read and to be written"),
        (lambda: (8_000,), "two indexings a step"),
        (lambda: (16_000,), "asks the GPU for its answer"),
        (lambda: (16_001,), "in every step"),
        (lambda: (16_400,), "a boolean comes back"),
        (lambda: (16_500,), "not the minimum"),
        (lambda: ("many",), "a step copies 10 indices"),
    ],
    "noise_like": [
        (lambda: (stretched_uniform,), "beyond 2"),
        (lambda: (lambda x: torch.randn_like(x),), "torch.int64 on cuda:2 your code"),
        (lambda: (on_the_cpu,), "the noise is on cpu"),
        (lambda: (moved,), "make it there"),
        (lambda: (on_the_current_gpu,), "the noise is on cuda:0"),
        (lambda: (always_float32,), "is torch.float32, not torch.float64"),
        (lambda: (its_dtype_whatever,), "is torch.int64, not torch.float32"),
        (lambda: (uniform,), "not those of normal numbers"),
        (lambda: (too_wide,), "not those of normal numbers"),
        (lambda: (torch.zeros_like,), "the same numbers"),
        (lambda: (wants_gradient,), "wants a gradient"),
        (lambda: (in_place,), "into x"),
        (lambda: (seeded,), "the same numbers"),
        (lambda: (flat,), "the noise is (2000,)"),
        (lambda: (torch.randn_like,), "your code raised"),
        (lambda: (lambda x: 0.5,), "not a tensor"),
    ],
    "hide_padding": [
        (lambda: (AsGiven,), "bytes; compare positions"),
        (lambda: (LoopBeside,), "bytes; compare positions"),
        (lambda: (OnTheCpu,), "on the same device"),
        (lambda: (HardCoded,), "on the same device"),
        (lambda: (Moved,), "bytes; compare positions"),
        (lambda: (FloatMask,), "a mask has changed it"),
        (lambda: (OneTooMany,), "a wrong element"),
        (lambda: (InPlace,), "changes its input"),
        (lambda: (FixedLength,), "your code raised"),
        (lambda: (ToTheHost,), "the result is on cpu"),
        (lambda: (nn.Identity,), "your code raised"),
    ],
}
