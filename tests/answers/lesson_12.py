"""Answers to the exercises of lesson 12: right ones, and planted wrong ones."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from exercises.lesson_12 import Base, Undivided
from tests.answers import other


def scored_by(loss, returned=lambda loss, scores, total: loss[None]):
    """A class whose loss is `loss(scores, y, total)`, and what is returned of it."""

    class Answer(Base):
        def forward(self, x, y, total):
            scores = self.model(x)
            return returned(loss(scores, y, total), scores, total)

    return Answer


def summed(scores, y, total):
    return cross_entropy(scores, y, reduction="sum") / total


def mean(scores, y, total):
    return cross_entropy(scores, y)


def as_it_is(loss, scores, total):
    return loss


class InABuffer(nn.Module):
    """Sturdy; subclasses do one thing in another way."""

    def __init__(self, linear, factor):
        super().__init__()
        self.linear = linear
        self.register_buffer("factor", factor)

    def scores(self, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.linear(x * self.factor)

    def seen(self, x):
        return torch.full((1,), len(x), device=x.device)

    def forward(self, x):
        return self.scores(x), self.seen(x)


class MadeInForward(InABuffer):
    def __init__(self, linear, factor):
        nn.Module.__init__(self)
        self.linear, self.numbers = linear, factor.tolist()

    def scores(self, x):
        self.factor = x.new_tensor(self.numbers)
        return super().scores(x)


class AParameter(InABuffer):
    def __init__(self, linear, factor):
        nn.Module.__init__(self)
        self.linear, self.factor = linear, nn.Parameter(factor)


class AnAttribute(InABuffer):
    def __init__(self, linear, factor):
        nn.Module.__init__(self)
        self.linear, self.factor = linear, factor


class NoDtype(InABuffer):
    def scores(self, x):
        with torch.autocast("cuda"):
            return self.linear(x * self.factor)


class AskingItsWeights(InABuffer):
    def scores(self, x):
        return super().scores(x.to(next(self.parameters()).device))


class Remembers(InABuffer):
    count = 0

    def seen(self, x):
        self.count += len(x)
        return torch.full((1,), self.count, device=x.device)


class Halves(InABuffer):
    def scores(self, x):
        return super().scores(x)[: len(x) // 2 + 1]


class WithoutFactor(InABuffer):
    def scores(self, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.linear(x)


RIGHT = {
    "fair_loss": [
        scored_by(summed),
        scored_by(lambda scores, y, total: cross_entropy(scores, y) * len(y) / total),
        scored_by(
            lambda scores, y, total: cross_entropy(scores, y, reduction="none") / total,
            as_it_is,
        ),
    ],
    "sturdy": [
        InABuffer,
        MadeInForward,
        other(InABuffer, seen=lambda self, x: x.new_ones(len(x))),
    ],
    "sizes_of_parts": [
        [362, 562, 562, 562],
        ((369, 560, 560, 559),),
        [355, 565, 564, 564],
        [373, 559, 558, 558],
    ],
}

WRONG = {
    "fair_loss": [
        (scored_by(mean), "divided by the rows of the whole batch"),
        (
            scored_by(lambda scores, y, total: cross_entropy(scores, y) / 4),
            "must weigh less",
        ),
        (Undivided, "not divided"),
        (scored_by(mean, lambda loss, scores, total: scores), "come back"),
        (
            scored_by(mean, lambda loss, *_: loss.item()),
            "forward returns a float, not a tensor",
        ),
        (scored_by(summed, lambda loss, *_: loss[None].detach()), "no gradient"),
        (scored_by(summed, as_it_is), "a scalar"),
        (nn.Identity, "your code raised"),
    ],
    "sturdy": [
        (AParameter, "an optimizer would train others"),
        (AnAttribute, "Expected all tensors to be on the same device"),
        (
            other(InABuffer, scores=lambda self, x: self.linear(x * self.factor)),
            "the scores are float32",
        ),
        (NoDtype, "the scores are float16"),
        (AskingItsWeights, "StopIteration"),
        (
            other(InABuffer, seen=lambda self, x: len(x)),
            "`seen` is an int, not a tensor",
        ),
        (
            other(InABuffer, seen=lambda self, x: InABuffer.seen(self, x)[0]),
            "is a scalar",
        ),
        (other(InABuffer, seen=lambda self, x: torch.tensor([len(x)])), "on the CPU"),
        (Remembers, "images went in"),
        (Halves, "images come back"),
        (other(InABuffer, forward=lambda self, x: self.scores(x)), "two things"),
        (WithoutFactor, "not those of one GPU"),
        (
            other(InABuffer, scores=lambda self, x: InABuffer.scores(self, x).detach()),
            "your code raised",
        ),
        (nn.Linear(2, 2), "pass the class itself, Sturdy"),
    ],
    "sizes_of_parts": [
        ([512] * 4, "equal parts"),
        ([2, 682, 682, 682], "too few rows"),
        ([600, 482, 483, 483], "too many rows"),
        ([300, 583, 583, 582], "too few rows"),
        ([320, 576, 576, 576], "too few rows"),
        ([341, 569, 569, 569], "too few rows"),
        ([386, 554, 554, 554], "too many rows"),
        ([369, 570, 560, 549], "share alike"),
        ([363, 885, 400, 400], "share alike"),
        ([256] * 4, "not 2048"),
        ([2048, 0, 0, 0], "at least 1"),
        ("363", "a list of four"),
    ],
}
