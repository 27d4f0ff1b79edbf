"""Answers to the exercises of lesson 11: right ones, and wrong ones with the reason."""

import copy
from itertools import accumulate, combinations, pairwise

from torch import nn


def try_all(ms, stages):
    def slowest(cuts):
        return max(sum(ms[a:b]) for a, b in pairwise((0, *cuts, len(ms))))

    cuts = min(combinations(range(1, len(ms)), stages - 1), key=slowest)
    return [b - a for a, b in pairwise((0, *cuts, len(ms)))]


def fill_up_to(ms, stages):
    """The smallest limit under which greedy filling needs no more stages."""
    sums = {sum(ms[a:b]) for b in range(len(ms) + 1) for a in range(b)}
    for limit in sorted(sums):
        counts, room = [], 0
        for i, time in enumerate(ms):
            left = len(ms) - i
            if not counts or time > room + 1e-9 or left <= stages - len(counts):
                counts.append(0)
                room = limit
            counts[-1] += 1
            room -= time
        if len(counts) == stages and room > -1e-9 and max(ms) <= limit:
            return counts


def ends(ms, stages):
    return list(accumulate(try_all(ms, stages)))


def starts(ms, stages):
    return [0, *ends(ms, stages)[:-1]]


def cuts_between(ms, stages):
    return ends(ms, stages)[:-1]


def equal_counts(ms, stages):
    return [len(ms) // stages + (i < len(ms) % stages) for i in range(stages)]


def greedy(ms, stages):
    """Fill each stage until it reaches its share."""
    counts, total = [0], 0
    for i, time in enumerate(ms):
        left = len(ms) - i
        if counts[-1] and stages > len(counts):
            if total >= sum(ms) / stages or left <= stages - len(counts):
                counts.append(0)
                total = 0
        counts[-1] += 1
        total += time
    return counts


class Once(nn.Module):
    def __init__(self, down, middle, up):
        super().__init__()
        self.down = down.to("cuda:0")
        self.middle, self.up = middle.to("cuda:1"), up.to("cuda:1")

    def forward(self, x):
        h = self.down(x).to("cuda:1")
        return self.up(h + self.middle(h))


class OnceFromAnywhere(Once):
    def forward(self, x):
        h = self.down(x.to("cuda:0"))
        h = h.to(self.up.weight.device)
        return self.up(self.middle(h) + h)


class OtherOrder(Once):
    def __init__(self, down, middle, up):
        nn.Module.__init__(self)
        self.up, self.middle = up.to("cuda:1"), middle.to("cuda:1")
        self.down = down.to("cuda:0")


class Copied(Once):
    def __init__(self, down, middle, up):
        super().__init__(*copy.deepcopy((down, middle, up)))


class ATuple(Once):
    def forward(self, x):
        return super().forward(x), x


class ThroughTheCPU(Once):
    def forward(self, x):
        h = self.down(x).cpu().to("cuda:1")
        return self.up(h + self.middle(h))


class Twice(Once):
    def forward(self, x):
        h = self.down(x)
        return self.up(h.to("cuda:1") + self.middle(h.to("cuda:1")))


class Detached(Once):
    def forward(self, x):
        h = self.down(x).detach().to("cuda:1")
        return self.up(h + self.middle(h))


class NoSkip(Once):
    def forward(self, x):
        return self.up(self.middle(self.down(x).to("cuda:1")))


class Mixed(Once):
    def forward(self, x):
        h = self.down(x)
        return self.up(h + self.middle(h.to("cuda:1")))


class SentBack(Once):
    def forward(self, x):
        return super().forward(x).to("cuda:0")


class OnOne(Once):
    def __init__(self, down, middle, up):
        super().__init__(down, middle, up)
        self.to("cuda:1")


class InATuple(Once):
    def __init__(self, down, middle, up):
        super().__init__(down, middle, up)
        del self.middle
        self.hidden = (middle,)

    def forward(self, x):
        h = self.down(x).to("cuda:1")
        return self.up(h + self.hidden[0](h))


RIGHT = {
    "eight_stages": [lambda: (63, 63, 8)],
    "balanced_cut": [lambda: (try_all,), lambda: (fill_up_to,)],
    "skip_on_two": [
        lambda: (Once,),
        lambda: (OnceFromAnywhere,),
        lambda: (OtherOrder,),
    ],
}
WRONG = {
    "eight_stages": [
        (lambda: (70, 70, 8), "below the line"),
        (lambda: (72, 72, 8), "K - 1 micro-batches"),
        (lambda: (64, 64, 8), "a smaller number will do"),
        (lambda: (56, 56, 8), "11.11%: too much"),
        (lambda: (63, 8, 8), "GPipe goes back only when"),
        (lambda: (63, 63, 1), "what the last stage keeps"),
        (lambda: (63, 63, 7), "is a stage too"),
        (lambda: (63, 63, 63), "as stages are left"),
        (lambda: ("63", 63, 8), "'63' is not a number of micro-batches"),
        (lambda: (63, None, 8), "None is not a number"),
        (lambda: (-7, 63, 8), "-7 is not a number"),
        (lambda: (62.5, 63, 8), "62.5 is not a number"),
    ],
    "balanced_cut": [
        (lambda: (equal_counts,), "a large first layer on 2 stages: score 0.75"),
        (lambda: (greedy,), "score"),
        (lambda: (lambda ms, stages: [len(ms)],), "to 1 stages"),
        (lambda: (lambda ms, stages: [1] * stages,), "2 of 4 layers"),
        (lambda: (lambda ms, stages: [len(ms)] + [0] * (stages - 1),), "no layer"),
        (lambda: (lambda ms, stages: len(ms) // stages,), "not a list"),
        (lambda: (lambda ms, stages: [len(ms) / stages] * stages,), "whole numbers"),
        (lambda: (lambda ms, stages: "ab",), "return how many layers"),
        (lambda: (ends,), "not where they end"),
        (lambda: (starts,), "not where they end"),
        (lambda: (cuts_between,), "not where they end"),
    ],
    "skip_on_two": [
        (lambda: (Twice,), "2 tensors cross in forward"),
        (lambda: (Detached,), "the gradient of down.weight"),
        (lambda: (NoSkip,), "did the skip get lost"),
        (lambda: (Mixed,), "Expected all tensors to be on the same device"),
        (lambda: (SentBack,), "not on cuda:1"),
        (lambda: (OnOne,), "`down` is on cuda:1"),
        (lambda: (InATuple,), "keep the parts as attributes"),
        (lambda: (Copied,), "move them with .to, do not copy them"),
        (lambda: (ATuple,), "forward returns tuple, not a tensor"),
        (lambda: (ThroughTheCPU,), "it goes through the CPU"),
        (lambda: (Once(*[nn.Linear(2, 2)] * 3),), "the class itself, Skip"),
    ],
}
