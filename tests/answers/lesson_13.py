"""Answers to the exercises of lesson 13: right ones, and planted wrong ones."""

import copy
import math
from itertools import accumulate, combinations, pairwise

from torch import nn

from tests.answers import other


def shortest_step(stages, ms):
    return min(ms, key=lambda m: (m + stages - 1) * ms[m])


def first_cut(score):
    """The cut for which `score` of its stages, as (ms, MiB, room) each, is smallest."""

    def cut(ms, mib, room):
        def of(ends):
            pairs = pairwise((0, *ends, len(ms)))
            zipped = zip(pairs, room, strict=True)
            return score([(sum(ms[a:b]), sum(mib[a:b]), r) for (a, b), r in zipped])

        ends = min(combinations(range(1, len(ms)), len(room) - 1), key=of)
        return [b - a for a, b in pairwise((0, *ends, len(ms)))]

    return cut


def slowest_that_fits(stages):
    fits = all(need <= room for _, need, room in stages)
    return max(ms for ms, _, _ in stages) if fits else math.inf


try_all = first_cut(slowest_that_fits)
without_room = first_cut(lambda stages: max(ms for ms, _, _ in stages))
by_memory = first_cut(lambda stages: max(need / room for _, need, room in stages))


def ends(ms, mib, room):
    return list(accumulate(try_all(ms, mib, room)))


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


class OtherOrder(Once):
    def __init__(self, down, middle, up):
        nn.Module.__init__(self)
        self.up, self.middle = up.to("cuda:1"), middle.to("cuda:1")
        self.down = down.to("cuda:0")


class Copied(Once):
    def __init__(self, down, middle, up):
        super().__init__(*copy.deepcopy((down, middle, up)))


class Twice(Once):
    def forward(self, x):
        h = self.down(x)
        return self.up(h.to("cuda:1") + self.middle(h.to("cuda:1")))


class NoSkip(Once):
    def forward(self, x):
        return self.up(self.middle(self.down(x).to("cuda:1")))


class Mixed(Once):
    def forward(self, x):
        h = self.down(x)
        return self.up(h + self.middle(h.to("cuda:1")))


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
    "fastest_parts": [shortest_step],
    "balanced_cut": [try_all],
    "skip_on_two": [
        other(Once, forward=lambda self, x: Once.forward(self, x.to("cuda:0"))),
        OtherOrder,
    ],
}

WRONG = {
    "fastest_parts": [
        (lambda stages, ms: max(ms), "takes 17.1 ms, and one in 4 13 ms"),
        (lambda stages, ms: min(ms), "a step in 1 micro-batches takes 16 ms"),
        (lambda stages, ms: min(ms, key=lambda m: m * ms[m]), "and one in 4 13 ms"),
        (lambda stages, ms: min(ms, key=ms.get), "takes 17.1 ms"),
        (lambda stages, ms: 4, "8 stages, ms = {1: 8.0"),
        (lambda stages, ms: 3 * stages, "was not measured"),
        (
            lambda stages, ms: min(ms, key=lambda m: (m + stages) * ms[m]),
            "1 stages, ms = {1: 8.0",
        ),
        (lambda stages, ms: min(ms.values()), "was not measured"),
        (lambda stages, ms: "4", "give a number"),
    ],
    "balanced_cut": [
        (without_room, "GPU 1 has room for 2 MiB, and its layers in [1, 3] need 3"),
        (by_memory, "a large first layer on 2 GPUs: score 0.75"),
        (lambda ms, mib, room: [len(ms)], "to 1 GPUs"),
        (lambda ms, mib, room: [1] * len(room), "2 of 4 layers"),
        (lambda ms, mib, room: [len(ms)] + [0] * (len(room) - 1), "no layer"),
        (lambda ms, mib, room: len(ms) // len(room), "not a list"),
        (lambda ms, mib, room: [len(ms) / len(room)] * len(room), "whole numbers"),
        (lambda ms, mib, room: "ab", "return how many layers"),
        (ends, "not where they end"),
    ],
    "skip_on_two": [
        (Twice, "2 tensors cross in forward"),
        (
            other(Once, sent=lambda self, h: h.detach().to("cuda:1")),
            "the gradient of down.weight",
        ),
        (NoSkip, "did the skip get lost"),
        (Mixed, "Expected all tensors to be on the same device"),
        (
            other(Once, forward=lambda self, x: Once.forward(self, x).to("cuda:0")),
            "not on cuda:1",
        ),
        (OnOne, "`down` is on cuda:1"),
        (InATuple, "keep the parts as attributes"),
        (Copied, "move them with .to, do not copy them"),
        (
            other(Once, forward=lambda self, x: (Once.forward(self, x), x)),
            "forward returns a tuple, not a tensor",
        ),
        (
            other(Once, sent=lambda self, h: h.cpu().to("cuda:1")),
            "it goes through the CPU",
        ),
        (nn.Linear(2, 2), "pass the class itself, Skip"),
    ],
}
