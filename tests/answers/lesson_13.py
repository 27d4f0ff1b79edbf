"""Answers to the exercises of lesson 13: right ones, and planted wrong ones."""

import copy
from itertools import accumulate, combinations, pairwise

from torch import nn


def by_formula(stages, parts):
    return (stages - 1) / (parts + stages - 1)


def from_the_speed(stages, parts):
    return 1 - parts / (parts + stages - 1)


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
    """Sends the output of `down` on, once; subclasses do one thing in another way."""

    def __init__(self, down, middle, up):
        super().__init__()
        self.down = down.to("cuda:0")
        self.middle, self.up = middle.to("cuda:1"), up.to("cuda:1")

    def sent(self, h):
        return h.to("cuda:1")

    def forward(self, x):
        h = self.sent(self.down(x))
        return self.up(h + self.middle(h))


class OnceFromAnywhere(Once):
    def forward(self, x):
        return super().forward(x.to("cuda:0"))


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
    def sent(self, h):
        return h.cpu().to("cuda:1")


class Twice(Once):
    def forward(self, x):
        h = self.down(x)
        return self.up(h.to("cuda:1") + self.middle(h.to("cuda:1")))


class Detached(Once):
    def sent(self, h):
        return h.detach().to("cuda:1")


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
    "bubble": [by_formula, from_the_speed],
    "balanced_cut": [try_all, fill_up_to],
    "skip_on_two": [OnceFromAnywhere, OtherOrder],
}

WRONG = {
    "bubble": [
        (lambda stages, parts: (stages - 1) / parts, "idle over busy"),
        (lambda stages, parts: stages / (parts + stages), "turns are idle"),
        (lambda stages, parts: (parts - 1) / (parts + stages - 1), "swapped"),
        (lambda stages, parts: parts / (parts + stages - 1), "the busy share"),
        (lambda stages, parts: 0.5, "2 stages and 4 micro-batches"),
        (lambda stages, parts: "1/2", "give a number"),
    ],
    "balanced_cut": [
        (equal_counts, "a large first layer on 2 stages: score 0.75"),
        (greedy, "score"),
        (lambda ms, stages: [len(ms)], "to 1 stages"),
        (lambda ms, stages: [1] * stages, "2 of 4 layers"),
        (lambda ms, stages: [len(ms)] + [0] * (stages - 1), "no layer"),
        (lambda ms, stages: len(ms) // stages, "not a list"),
        (lambda ms, stages: [len(ms) / stages] * stages, "whole numbers"),
        (lambda ms, stages: "ab", "return how many layers"),
        (ends, "not where they end"),
        (starts, "not where they end"),
        (cuts_between, "not where they end"),
    ],
    "skip_on_two": [
        (Twice, "2 tensors cross in forward"),
        (Detached, "the gradient of down.weight"),
        (NoSkip, "did the skip get lost"),
        (Mixed, "Expected all tensors to be on the same device"),
        (SentBack, "not on cuda:1"),
        (OnOne, "`down` is on cuda:1"),
        (InATuple, "keep the parts as attributes"),
        (Copied, "move them with .to, do not copy them"),
        (ATuple, "forward returns a tuple, not a tensor"),
        (ThroughTheCPU, "it goes through the CPU"),
        (nn.Linear(2, 2), "pass the class itself, Skip"),
    ],
}
