"""Answers to the exercises of lesson 01: right ones, and planted wrong ones."""

import copy

import torch
from torch import nn

from tests.answers import other


def fastest():
    """The accelerator, or the CPU where there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found or torch.device("cpu")


def sent(batch, device):
    """The dictionary with its tensors on the device."""
    is_tensor = torch.is_tensor
    return {k: v.to(device) if is_tensor(v) else v for k, v in batch.items()}


def in_the_older_way(model, batch):
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    model.to(device)
    return model, sent(batch, device)


def by_counting(model, batch):
    if torch.cuda.device_count():
        return model.cuda(), sent(batch, "cuda")
    return model, batch


def forgets_the_mask(model, batch):
    return model.to(fastest()), {**batch, "x": batch["x"].to(fastest())}


def uses_two_gpus(model, batch):
    if not torch.cuda.is_available():
        return model, batch
    return model.to("cuda:0"), sent(batch, "cuda:1")


def copies_the_model(model, batch):
    return copy.deepcopy(model).to(fastest()), sent(batch, fastest())


def makes_another_batch(model, batch):
    zeros = torch.zeros_like(batch["x"], device=fastest())
    return model.to(fastest()), {**sent(batch, fastest()), "x": zeros}


def drops_the_text(model, batch):
    here = {k: v.to(fastest()) for k, v in batch.items() if torch.is_tensor(v)}
    return model.to(fastest()), here


class Stem(nn.Module):
    """The module of the exercise: what its answers have in common."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.hold(torch.linspace(1, 2, 8))

    def hold(self, scale):
        self.register_buffer("scale", scale, persistent=False)

    def mean(self):
        return self.norm.running_mean

    def places(self, x):
        return torch.arange(len(x), device=x.device)

    def forward(self, x):
        return self.norm(x) * self.scale + self.mean() + self.places(x)[:, None]


class ScaleAsParameter(Stem):
    def hold(self, scale):
        self.scale = nn.Parameter(scale)


class KeptReference(Stem):
    def hold(self, scale):
        super().hold(scale)
        self.kept = self.norm.running_mean

    def mean(self):
        return self.kept


class TwoBuffers(KeptReference):
    def hold(self, scale):
        Stem.hold(self, scale)
        self.register_buffer("kept", self.norm.running_mean, persistent=False)


class OnOneGpu(Stem):
    def places(self, x):
        return torch.arange(len(x), device="cuda:1" if x.is_cuda else "cpu")


class WithoutNorm(Stem):
    def __init__(self):
        nn.Module.__init__(self)
        self.hold(torch.ones(8))


RIGHT = {
    "movable": [
        Stem,
        other(Stem, places=lambda self, x: torch.ones_like(x[:, 0]).cumsum(0) - 1),
    ],
    "place": [
        lambda model, batch: (model.to(fastest()), sent(batch, fastest())),
        in_the_older_way,
        by_counting,
    ],
    "visible_devices": ["3,1", "3, 1"],
}

WRONG = {
    "movable": [
        (ScaleAsParameter, "the state_dict has scale too"),
        (
            other(Stem, places=lambda self, x: torch.arange(len(x)).to(x.device)),
            "each forward copies 48 bytes from cpu",
        ),
        (KeptReference, "on cuda:1 your code raised RuntimeError"),
        (TwoBuffers, "does `mean` still follow"),
        (OnOneGpu, "on cuda:2 your code raised RuntimeError"),
        (WithoutNorm, "lacks norm.bias"),
        (
            other(Stem, forward=lambda self, x: Stem.forward(self, x).cpu()),
            "on cuda:1 the result is on cpu",
        ),
        (lambda: 3, "this makes an int"),
        (Stem(), "TypeError"),
    ],
    "place": [
        (lambda model, batch: (model.cuda(), 3), "came back as an int"),
        (forgets_the_mask, "the batch stays on cpu; keep what .to() returns"),
        (drops_the_text, "keep all its entries"),
        (
            lambda model, batch: (model.to(fastest()), batch.to(fastest())),
            "has no attribute 'to'",
        ),
        (
            lambda model, batch: (model.to("cuda"), sent(batch, "cuda")),
            "without a GPU the model goes to cuda:0: ask whether there is one "
            "(current_accelerator needs check_available=True",
        ),
        (
            lambda model, batch: (model.cpu(), sent(batch, "cpu")),
            "the model stays on cpu",
        ),
        (uses_two_gpus, "the batch on cuda:1"),
        (copies_the_model, "a copy of the model"),
        (lambda model, batch: model.to(fastest()), "return two things"),
        (
            lambda model, batch: (sent(batch, fastest()), model.to(fastest())),
            "the model comes first",
        ),
        (makes_another_batch, "keep its values"),
    ],
    "visible_devices": [
        ("4,2", "from 0"),
        ("1,3", "the order counts"),
        ("3", "cuda:0 is card 3"),
        ("3,1,0,2", "more cards"),
        ("0,1", "cuda:0 is card 0"),
        ("cuda:3,cuda:1", "nothing but the numbers"),
        ("", "nothing but the numbers"),
        ([3, 1], "is text"),
        (3, "is text"),
    ],
}
