"""Judges of the exercises of lesson 11."""

import copy
import operator
from functools import cache
from itertools import pairwise

import torch
from torch import nn

from helpers.check import NotYet, Wrong, call, exercise
from helpers.gpus import count_copies

SCORE = 0.98  # the slowest stage of the best cut, over that of the answer


def _is_count(value) -> bool:
    try:
        return int(value) == value and value >= 0
    except (TypeError, ValueError, OverflowError):
        return False


@exercise("11.1")
def eight_stages(micro_batches, gpipe, one_f_one_b) -> None:
    """How many micro-batches keep the bubble of 8 stages at 10 %, and what is kept."""
    for value in (micro_batches, gpipe, one_f_one_b):
        if not _is_count(value):
            raise Wrong(f"{value!r} is not a number of micro-batches")
    stages = 8
    least = 9 * (stages - 1)
    if micro_batches == 70:
        raise Wrong(
            "that is 7 / M <= 0.1; the formula has K - 1 below the line as well"
        )
    if micro_batches == 72:
        raise Wrong("that is 9 K; it is K - 1 micro-batches that nobody can fill")
    if micro_batches != least:
        bubble = (stages - 1) / (micro_batches + stages - 1)
        why = "a smaller number will do" if micro_batches > least else "too much"
        raise Wrong(f"with {micro_batches} the bubble is {bubble:.2%}: {why}")
    if gpipe != least:
        raise Wrong("GPipe goes back only when all micro-batches have gone forward")
    if one_f_one_b == 1:
        raise Wrong("one is what the last stage keeps under 1F1B")
    if one_f_one_b == stages - 1:
        raise Wrong("count the one that comes back: the first stage is a stage too")
    if one_f_one_b != stages:
        raise Wrong("under 1F1B a stage goes ahead with as many as stages are left")


def slowest(ms: list[float], counts: list[int]) -> float:
    """The time of the slowest stage, if each stage gets so many of the layers."""
    first, times = 0, []
    for count in counts:
        times.append(sum(ms[first : first + count]))
        first += count
    return max(times)


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


@exercise("11.2")
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
        given_out = len(counts) == stages and sum(counts) == len(ms)
        if not given_out and _are_positions(counts, len(ms), stages):
            raise Wrong("return how many layers each stage gets, not where they end")
        if len(counts) != stages:
            raise Wrong(f"{where}: it gives layers to {len(counts)} stages")
        if sum(counts) != len(ms):
            raise Wrong(f"{where}: {sum(counts)} of {len(ms)} layers are given out")
        if min(counts) < 1:
            raise Wrong(f"{where}: a stage has no layer, in {counts}")
        yours, best = slowest(ms, counts), best_slowest(ms, stages)
        if best / yours < SCORE:
            raise Wrong(
                f"{where}: score {best / yours:.2f}; the slowest stage of {counts} "
                f"takes {yours:g} ms, and {best:g} ms can be had"
            )


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


@exercise("11.3")
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
        raise Wrong("hand over the class itself, Skip")
    split = module(*parts)
    if not isinstance(split, nn.Module):
        raise Wrong("it is no nn.Module")
    if not vars(split).get("_modules"):
        raise NotYet("your module has no parts so far")
    names = ("down", "middle", "up")
    theirs = {id(p) for p in split.parameters()}
    if len(theirs) >= 6 and theirs.isdisjoint(
        id(p) for part in parts for p in part.parameters()
    ):
        raise Wrong(
            "the check follows the parts it gave you: move them with .to, do not copy "
            "them"
        )
    for part, name, wanted in zip(parts, names, (0, 1, 1), strict=True):
        if part.weight.get_device() != wanted:
            raise Wrong(f"`{name}` is on {part.weight.device}, not on cuda:{wanted}")
    if len(list(split.parameters())) != 6:
        raise Wrong(
            "an optimizer would not find its weights: keep the parts as attributes"
        )
    with count_copies() as forward:
        out = call(split, x)
    if not isinstance(out, torch.Tensor):
        raise Wrong(f"forward returns {type(out).__name__}, not a tensor")
    if out.get_device() != 1:
        raise Wrong(f"the result is on {out.device}, not on cuda:1")
    wanted = serial(x)
    if out.shape != wanted.shape or not torch.equal(out.cpu(), wanted.cpu()):
        raise Wrong("the result is not that of one GPU; did the skip get lost?")
    if not out.requires_grad:
        raise Wrong("the result has no graph, so nothing could be trained")
    with count_copies() as backward:
        out.square().sum().backward()
    wanted.square().sum().backward()
    for name, part in zip(names, parts, strict=True):
        for (kind, p), q in zip(
            part.named_parameters(),
            getattr(serial, name).parameters(),
            strict=True,
        ):
            if p.grad is None or not torch.equal(p.grad.cpu(), q.grad.cpu()):
                raise Wrong(
                    f"the gradient of {name}.{kind} is not that of one GPU; was it cut "
                    "off?"
                )
    for when, copies in (("forward", forward), ("backward", backward)):
        if any("cpu" in (c.source, c.target) for c in copies):
            raise Wrong(f"in {when} it goes through the CPU")
        if len(copies) != 1:
            raise Wrong(
                f"{len(copies)} tensors cross in {when}; send `h` once, and use it "
                "twice where it arrives"
            )
