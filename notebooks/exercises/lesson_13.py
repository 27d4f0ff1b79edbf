"""The exercises of lesson 13: a bubble, a skip connection, and a balanced cut."""

import copy
import operator
from functools import cache
from itertools import accumulate, pairwise

import torch
from torch import nn

from exercises.counted import counted, number
from exercises.exercise import NotYet, Wrong, call, exercise, run, solution
from exercises.results import equal, tensor
from helpers.gpus import count_copies

SCORE = 0.98  # the slowest stage of the best cut, over that of the answer


@exercise(
    "13.1",
    hints=(
        "The lesson has the formula, and says which share it is: of the total time, or "
        "of the time in which a GPU works?",
        "`stages - 1` stands above the line and below it. Which number of "
        "micro-batches makes the bubble one half, if there are two stages?",
    ),
)
def bubble(function) -> None:
    """A function (stages, micro-batches) -> the idle share of the total time."""
    for stages, parts in ((2, 1), (2, 4), (4, 8), (8, 8), (1, 3)):
        found = number(call(function, stages, parts))
        mistakes = {
            (stages - 1) / parts: "that is idle over busy time; divide by the total",
            stages / (parts + stages): "only `stages - 1` turns are idle",
            (parts - 1) / (parts + stages - 1): "stages and micro-batches are swapped",
            1 - (stages - 1) / (parts + stages - 1): "that is the busy share",
        }
        right = (stages - 1) / (parts + stages - 1)
        about = f"{stages} stages and {parts} micro-batches"
        counted(found, right, mistakes, f"it should be {right:.3f}", what=about)


@solution("13.1")
def solution_1():
    """A stage works for `parts` turns and is idle for `stages - 1` of them.

    A turn is the time of one micro-batch in one stage, forward and backward together.
    The step takes both kinds of turns, so both stand below the line.
    """

    def bubble(stages, parts):
        return (stages - 1) / (parts + stages - 1)

    return bubble


class _Skip(nn.Module):
    """What the exercise starts from."""

    def __init__(self, down, middle, up):
        super().__init__()
        self.down, self.middle, self.up = down, middle, up

    def forward(self, x):
        h = self.down(x)
        return self.up(h + self.middle(h))


def _whole(rows: int, columns: int, generator) -> torch.Tensor:
    return torch.randint(-2, 3, (rows, columns), generator=generator).float()


@exercise(
    "13.2",
    hints=(
        "`h` is used twice, by `middle` and by the sum. On which GPU is each of the "
        "two uses?",
        "Each `.to` that has to move a tensor is a copy, and autograd makes a copy "
        "back for each of them. In which line of `forward` must the only copy be, "
        "so that both uses of `h` have it? Use autograd's own way, without "
        "`detach()`.",
    ),
)
def skip_on_two(module) -> None:
    """A module with a skip connection, its parts on two GPUs."""
    generator = torch.Generator().manual_seed(11)
    parts = [nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)]
    with torch.no_grad():
        for part in parts:
            part.weight.copy_(_whole(*part.weight.shape, generator))
            part.bias.copy_(_whole(1, len(part.bias), generator)[0])
    x = _whole(5, 6, generator).to("cuda:0")
    serial = _Skip(*copy.deepcopy(parts)).to("cuda:0")
    if not isinstance(module, type):
        raise Wrong("pass the class itself, Skip")
    split = call(module, *parts)
    if not isinstance(split, nn.Module):
        raise Wrong("it is no nn.Module")
    if not vars(split).get("_modules"):
        raise NotYet("your module has no parts so far")
    _check_parts(split, parts)
    with count_copies() as forward:
        out = call(split, x)
    if tensor(out, "forward returns").get_device() != 1:
        raise Wrong(f"the result is on {out.device}, not on cuda:1")
    wanted = serial(x)
    if not equal(out, wanted):
        raise Wrong("the result is not that of one GPU; did the skip get lost?")
    if not out.requires_grad:
        raise Wrong("the result has no graph, so nothing could be trained")
    with count_copies() as backward:
        run(out.square().sum().backward)
    wanted.square().sum().backward()
    own = _Skip(*parts)
    pairs = zip(own.named_parameters(), serial.parameters(), strict=True)
    for (name, p), q in pairs:
        if p.grad is None or not equal(p.grad, q.grad):
            raise Wrong(
                f"the gradient of {name} is not that of one GPU; was it cut off?"
            )
    for when, copies in (("forward", forward), ("backward", backward)):
        if any("cpu" in (c.source, c.target) for c in copies):
            raise Wrong(f"in {when} it goes through the CPU")
        if len(copies) != 1:
            raise Wrong(
                f"{len(copies)} tensors cross in {when}; send `h` once, and use it "
                "twice where it arrives"
            )


@solution("13.2")
def solution_2():
    """Both uses of `h` are on `cuda:1`, so `h` crosses once, before both of them.

    If `middle` and the sum each send `h` for themselves, the same numbers cross twice.
    Autograd would then send two gradients back and add them up on `cuda:0`. With one
    copy, autograd adds the two gradients up on `cuda:1`, where they are made, and sends
    the sum back through the copy.

    The parts are moved with `.to` and kept as attributes, so that an optimizer finds
    their weights.
    """

    class Skip(nn.Module):
        def __init__(self, down, middle, up):
            super().__init__()
            self.down = down.to("cuda:0")
            self.middle = middle.to("cuda:1")
            self.up = up.to("cuda:1")

        def forward(self, x):
            h = self.down(x)
            h = h.to("cuda:1")
            return self.up(h + self.middle(h))

    return Skip


def _check_parts(split: nn.Module, parts: list[nn.Module]) -> None:
    """The module has the parts that it was given, where they belong."""
    theirs = {id(p) for p in split.parameters()}
    ours = {id(p) for part in parts for p in part.parameters()}
    if len(theirs) >= 6 and theirs.isdisjoint(ours):
        raise Wrong(
            "the check follows the parts it gave you: move them with .to, do not copy "
            "them"
        )
    for part, name, gpu in zip(parts, ("down", "middle", "up"), (0, 1, 1), strict=True):
        if part.weight.get_device() != gpu:
            raise Wrong(f"`{name}` is on {part.weight.device}, not on cuda:{gpu}")
    if len(theirs) != 6:
        raise Wrong(
            "an optimizer would not find its weights: keep the parts as attributes"
        )


def slowest(ms: list[float], counts: list[int]) -> float:
    """The time of the slowest stage, if each stage gets so many of the layers."""
    ends = [0, *accumulate(counts)]
    return max(sum(ms[first:end]) for first, end in pairwise(ends))


def best_slowest(ms: list[float], stages: int) -> float:
    """The same for the best cut of all."""

    @cache
    def best(first: int, stages: int) -> float:
        if stages == 1:
            return sum(ms[first:])
        ends = range(first + 1, len(ms) - stages + 2)
        return min(max(sum(ms[first:end]), best(end, stages - 1)) for end in ends)

    return best(0, stages)


def _are_positions(counts: list[int], layers: int, stages: int) -> bool:
    """Whether it looks like where the stages begin, or end, or both."""
    if len(counts) == stages - 1:
        counts = [*counts, layers]
    if not stages <= len(counts) <= stages + 1:
        return False
    rising = all(a < b for a, b in pairwise(counts)) and counts[-1] <= layers
    return rising and (counts[0] == 0 or 0 < counts[0] and counts[-1] == layers)


MODELS = (  # what it is, ms of each layer, stages
    ("four equal layers", [2] * 4, 2),
    ("a large first layer", [3, 1, 1, 1], 2),
    ("as many layers as stages", [1, 5, 2], 3),
    ("a large last layer", [1] * 11 + [6], 3),
    ("layers that get slower", [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6], 4),
    ("layers that get faster", [9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1, 1], 4),
    ("24 uneven layers", [3, 9, 4, 1, 7, 7, 2, 8, 5, 6, 1, 9, 2, 2, 8, 3, 6, 4, 9, 1, 5,
                          5, 7, 2], 6),
    ("times that are no whole numbers", [0.7, 2.4, 1.1, 1.9, 0.3, 2.2, 1.6], 3),
)  # fmt: skip


@exercise(
    "13.3",
    hints=(
        "Equal numbers of layers need not take equal times. In which ways can you "
        "choose the layers of the first stage, and what remains to be done after "
        "each choice?",
        "Filling each stage up to its share of the time can leave far too much for "
        "the last stage. Compare all cuts instead, and leave at least one layer for "
        "each stage that comes later. How can a function that cuts the rest call "
        "itself, without cutting the same rest many times?",
    ),
)
def balanced_cut(function) -> None:
    """A function (ms of each layer, stages) -> how many layers each stage gets."""
    for what, ms, stages in MODELS:
        where = f"{what} on {stages} stages"
        counts = call(function, list(ms), stages, when=f"{where}:")
        try:
            counts = [operator.index(count) for count in counts]
        except TypeError:
            raise Wrong(
                f"it returns {counts!r}, not a list of whole numbers; return how many "
                "layers each stage gets"
            ) from None
        all_placed = len(counts) == stages and sum(counts) == len(ms)
        if not all_placed and _are_positions(counts, len(ms), stages):
            raise Wrong("return how many layers each stage gets, not where they end")
        if len(counts) != stages:
            raise Wrong(f"{where}: it gives layers to {len(counts)} stages")
        if sum(counts) != len(ms):
            raise Wrong(f"{where}: {sum(counts)} of {len(ms)} layers are placed")
        if min(counts) < 1:
            raise Wrong(f"{where}: a stage has no layer, in {counts}")
        yours, best = slowest(ms, counts), best_slowest(ms, stages)
        if best / yours < SCORE:
            raise Wrong(
                f"{where}: score {best / yours:.2f}; the slowest stage of {counts} "
                f"takes {yours:g} ms, and {best:g} ms can be had"
            )


@solution("13.3")
def solution_3():
    """Once the first stage has its layers, the rest is the same task with a stage less.

    `best(first, left)` cuts the layers from `first` on into `left` stages. It tries
    every end of its first stage, and asks itself for the best cut of the rest. The
    slowest stage of such a cut is the slower of the two, and `min` takes the cut where
    that is fastest. `cache` remembers each result, because the same rest comes up after
    many choices.

    Filling each stage up to an equal share of the time is not enough, since a large
    layer at the end may then share its stage with others.
    """
    from functools import cache

    def cut(ms, stages):
        @cache
        def best(first, left):  # ms of the slowest stage, layers of each stage
            if left == 1:
                return sum(ms[first:]), [len(ms) - first]
            choices = []
            for end in range(first + 1, len(ms) - left + 2):
                own = sum(ms[first:end])
                slowest, counts = best(end, left - 1)
                choices.append((max(own, slowest), [end - first, *counts]))
            return min(choices)

        slowest, counts = best(0, stages)
        return counts

    return cut
