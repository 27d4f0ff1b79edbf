"""Answers to the exercises of lesson 02: right ones, and planted wrong ones."""

import torch
from torch import nn

from tests.answers import other


def counted(x):
    return torch.arange(x.shape[1], device=x.device)


class Validation:
    """Keeps a list of each result; subclasses do one thing in another way."""

    graph = False

    def __call__(self, model, images, labels):
        with torch.set_grad_enabled(self.graph):
            right, largest = [], []
            for first in range(0, len(images), 256):
                rows = slice(first, first + 256)
                self.add(right, largest, *self.batch(model, images, labels, rows))
            return self.end(right, largest, len(images))

    def batch(self, model, images, labels, rows):
        return model(images[rows]), labels[rows]

    def add(self, right, largest, scores, y):
        losses = nn.functional.cross_entropy(scores, y, reduction="none")
        right.append((scores.argmax(1) == y).sum())
        largest.append(losses.max())

    def end(self, right, largest, count):
        both = torch.stack([torch.stack(right).sum(), torch.stack(largest).max()])
        hits, worst = both.tolist()
        return hits / count, worst


class AllAtOnce(Validation):
    def __call__(self, model, images, labels):
        with torch.no_grad():
            right, largest = [], []
            self.add(right, largest, model(images), labels)
            return self.end(right, largest, len(images))


class LeavesTheRestOut(Validation):
    def __call__(self, model, images, labels):
        return super().__call__(model, images[:512], labels[:512])


class IndexOnTheCpu(Validation):
    def batch(self, model, images, labels, rows):
        chosen = torch.arange(rows.start, min(rows.stop, len(images)))
        return model(images[chosen]), labels[chosen]


class TwoCopies(Validation):
    def end(self, right, largest, count):
        return sum(right).item() / count, max(torch.stack(largest).tolist())


class ReadsEach(Validation):
    def end(self, right, largest, count):
        return sum(each.item() for each in right) / count, max(largest).item()


class MeanOfMeans(Validation):
    def add(self, right, largest, scores, y):
        super().add(right, largest, scores, y)
        right[-1] = right[-1] / len(y)

    def end(self, right, largest, count):
        return super().end(right, largest, len(right))


class LastLoss(Validation):
    def end(self, right, largest, count):
        return super().end(right, largest[-1:], count)


class CountOnly(Validation):
    def end(self, right, largest, count):
        hits, worst = super().end(right, largest, count)
        return hits * count, worst


class ReturnsTensors(Validation):
    def end(self, right, largest, count):
        return torch.stack(right).sum() / count, torch.stack(largest).max()


class OneNumber(Validation):
    def end(self, right, largest, count):
        return super().end(right, largest, count)[0]


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


class HardCoded(Compared):
    def positions(self, x):
        return torch.arange(x.shape[1], device="cuda:0")


class Moved(Compared):
    def positions(self, x):
        return torch.arange(x.shape[1]).to(x.device)


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
    "positions_like": [
        counted,
        lambda x: torch.ones_like(x[0], dtype=torch.int64).cumsum(0) - 1,
    ],
    "validate_in_one_copy": [Validation()],
    "hide_padding": [Compared, Filled],
}

WRONG = {
    "validate_in_one_copy": [
        (AllAtOnce(), "256 are the most"),
        (LeavesTheRestOut(), "512 of 600"),
        (IndexOnTheCpu(), "a slice needs no index"),
        (TwoCopies(), "stack both"),
        (ReadsEach(), "keep results on the GPU"),
        (other(Validation, graph=True)(), "leaves activations"),
        (MeanOfMeans(), "mean of means"),
        (LastLoss(), "not the largest loss"),
        (CountOnly(), "not the share"),
        (ReturnsTensors(), "numbers of Python"),
        (OneNumber(), "return two numbers"),
    ],
    "positions_like": [
        (lambda x: torch.arange(x.shape[1]), "the positions are on cpu"),
        (
            lambda x: x.new_tensor(range(x.shape[1]), dtype=torch.int64),
            "make them there",
        ),
        (
            lambda x: torch.arange(x.shape[1], device="cuda"),
            "the positions are on cuda:0",
        ),
        (
            lambda x: torch.arange(x.shape[1], device=x.device, dtype=x.dtype),
            "not torch.int64",
        ),
        (lambda x: torch.arange(x.shape[0], device=x.device), "the positions are (2,)"),
        (
            lambda x: torch.arange(x.shape[1], device=x.device)[None],
            "the positions are (1, 300)",
        ),
        (lambda x: torch.arange(1, x.shape[1] + 1, device=x.device), "not 0, 1"),
        (lambda x: x[0].copy_(counted(x)).long() * 0 + counted(x), "into x"),
        (lambda x: 300, "not a tensor"),
    ],
    "hide_padding": [
        (
            other(Compared, positions=lambda self, x: torch.arange(x.shape[1])),
            "on the same device",
        ),
        (HardCoded, "on the same device"),
        (Moved, "bytes; compare positions"),
        (FloatMask, "a mask has changed it"),
        (
            other(Compared, positions=lambda self, x: Compared.positions(self, x) - 1),
            "a wrong element",
        ),
        (InPlace, "changes its input"),
        (FixedLength, "your code raised"),
        (ToTheHost, "the result is on cpu"),
        (nn.Identity, "your code raised"),
    ],
}
