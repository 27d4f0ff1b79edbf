"""Answers to the exercises of lesson 10: right ones, and wrong ones with the reason."""

from torch import nn
from torch.nn.functional import cross_entropy


class Base(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model


class Summed(Base):
    def forward(self, x, y, total):
        return cross_entropy(self.model(x), y, reduction="sum")[None] / total


class Weighted(Base):
    def forward(self, x, y, total):
        return (cross_entropy(self.model(x), y) * len(x) / total).reshape(1)


class Each(Base):
    def forward(self, x, y, total):
        return cross_entropy(self.model(x), y, reduction="none") / total


class Mean(Base):
    def forward(self, x, y, total):
        return cross_entropy(self.model(x), y)[None]


class Quarter(Base):
    def forward(self, x, y, total):
        return cross_entropy(self.model(x), y)[None] / 4


class Undivided(Base):
    def forward(self, x, y, total):
        return cross_entropy(self.model(x), y, reduction="sum")[None]


class Scores(Base):
    def forward(self, x, y, total):
        return self.model(x)


class Number(Base):
    def forward(self, x, y, total):
        return cross_entropy(self.model(x), y).item()


class Scalar(Base):
    def forward(self, x, y, total):
        return cross_entropy(self.model(x), y, reduction="sum") / total


class Detached(Base):
    def forward(self, x, y, total):
        loss = cross_entropy(self.model(x), y, reduction="sum")[None] / total
        return loss.detach()


class Unwritten(Base):
    def forward(self, x, y, total): ...


RIGHT = {
    "sent_by_one_gpu": [lambda: (700, 175), lambda: (700.0, 175.0)],
    "fair_loss": [lambda: (Summed,), lambda: (Weighted,), lambda: (Each,)],
    "sizes_of_parts": [
        lambda: ([362, 562, 562, 562],),
        lambda: ((369, 560, 560, 559),),
        lambda: ([355, 565, 564, 564],),
        lambda: ([373, 559, 558, 558],),
    ],
}
WRONG = {
    "sent_by_one_gpu": [
        (lambda: (1400, 175), "gradients it receives"),
        (lambda: (800, 175), "to itself"),
        (lambda: (175, 175), "4 bytes"),
        (lambda: (5, 175), "receives all gradients"),
        (lambda: (700, 700), "to one neighbour"),
        (lambda: (700, 87.5), "twice"),
        (lambda: (700, 100), "hands over"),
        (lambda: (700, 1400), "all ranks send together"),
        (lambda: (700, 200), "receive last"),
        (lambda: (700, 1), "in a ring of N ranks"),
        (lambda: (175, 700), "right numbers in the wrong order"),
        (lambda: (700e6, 175e6), "give MB, not bytes"),
        (lambda: (700, 175_000_000), "give MB, not bytes"),
        (lambda: (667.6, 166.9), "millions of bytes"),
        (lambda: (None, None), "give two numbers"),
        (lambda: ("700", "175"), "give two numbers"),
        (lambda: ([700], [175]), "give two numbers"),
        (lambda: ({}, 175), "give two numbers"),
    ],
    "fair_loss": [
        (lambda: (Mean,), "divided by the rows of the whole batch"),
        (lambda: (Quarter,), "must weigh less"),
        (lambda: (Undivided,), "not divided"),
        (lambda: (Scores,), "come back"),
        (lambda: (Number,), "return a tensor"),
        (lambda: (Detached,), "no gradient"),
        (lambda: (Scalar,), "a scalar"),
        (lambda: (nn.Identity,), "your code raised"),
    ],
    "sizes_of_parts": [
        (lambda: ([512] * 4,), "equal parts"),
        (lambda: ([2, 682, 682, 682],), "too few rows"),
        (lambda: ([600, 482, 483, 483],), "too many rows"),
        (lambda: ([300, 583, 583, 582],), "too few rows"),
        (lambda: ([320, 576, 576, 576],), "too few rows"),
        (lambda: ([341, 569, 569, 569],), "too few rows"),
        (lambda: ([386, 554, 554, 554],), "too many rows"),
        (lambda: ([369, 570, 560, 549],), "share alike"),
        (lambda: ([363, 885, 400, 400],), "share alike"),
        (lambda: ([256] * 4,), "not 2048"),
        (lambda: ([2048, 0, 0, 0],), "at least 1"),
        (lambda: ("363",), "a list of four"),
    ],
}
