"""The exercises of lesson 13: the fastest parts, a skip connection, a balanced cut."""

import copy
import operator
from functools import cache
from itertools import accumulate, pairwise

import torch
from torch import nn

from exercises.counted import number
from exercises.exercise import NotYet, Wrong, call, exercise, run, solution
from exercises.results import equal, tensor
from helpers.gpus import count_copies

SCORE = 0.98  # the slowest stage of the best cut, over that of the answer


MEASURED = {1: 8.0, 2: 4.4, 4: 2.6, 8: 1.9}  # ms of one of so many micro-batches
RUNS = (  # stages, ms
    (2, MEASURED),
    (4, MEASURED),
    (8, MEASURED),
    (1, MEASURED),
    (2, {16: 0.975, 8: 1.31, 4: 2.08, 2: 3.65, 1: 6.8}),
    (4, {4: 5.0, 8: 2.5, 16: 1.25, 32: 0.9}),
)


@exercise(
    "13.1",
    hints=(
        "In the picture with four micro-batches, count boxes: for how many passes of "
        "one micro-batch does a GPU compute, and for how many does it wait?",
        "Each `m` has a bubble, and each micro-batch its milliseconds. Calculate the "
        "time of the whole step from both, for each `m` in `ms`.",
    ),
)
def fastest_parts(function) -> None:
    """A function (stages, ms of a micro-batch by their number) -> the best number."""
    for stages, ms in RUNS:
        about = f"{stages} stages, ms = {ms}"
        steps = {m: (m + stages - 1) * each for m, each in ms.items()}
        found = number(call(function, stages, dict(ms)), about)
        if found not in ms:
            raise Wrong(f"{about}: {found:g} was not measured")
        best = min(steps, key=steps.get)
        if found != best:
            raise Wrong(
                f"{about}: a step in {found} micro-batches takes {steps[found]:g} ms, "
                f"and one in {best} {steps[best]:g} ms"
            )


@solution("13.1")
def solution_1():
    """A GPU computes `m` times and waits for `stages - 1` more, as long as one each.

    The step with the smallest bubble need not be the fastest, because small parts use
    a GPU badly. The full batch needs the least computing, and has the largest bubble.
    Only the sum of both decides.
    """

    def fastest_parts(stages, ms):
        return min(ms, key=lambda m: (m + stages - 1) * ms[m])

    return fastest_parts


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


def sums(numbers: list[float], counts: list[int]) -> list[float]:
    """The sum of each stage, if the stages get so many of the layers."""
    ends = [0, *accumulate(counts)]
    return [sum(numbers[first:end]) for first, end in pairwise(ends)]


def best_slowest(ms: list[float], mib: list[float], room: list[float]) -> float:
    """The time of the slowest stage in the best cut of all; infinite if none fits."""

    @cache
    def best(first: int, gpu: int) -> float:
        if gpu == len(room):
            return 0 if first == len(ms) else float("inf")
        ends = range(first + 1, len(ms) + 1)
        fits = [end for end in ends if sum(mib[first:end]) <= room[gpu]]
        times = [max(sum(ms[first:end]), best(end, gpu + 1)) for end in fits]
        return min(times, default=float("inf"))

    return best(0, 0)


def _are_positions(counts: list[int], layers: int, stages: int) -> bool:
    """Whether it looks like where the stages begin, or end, or both."""
    if len(counts) == stages - 1:
        counts = [*counts, layers]
    if not stages <= len(counts) <= stages + 1:
        return False
    rising = all(a < b for a, b in pairwise(counts)) and counts[-1] <= layers
    return rising and (counts[0] == 0 or 0 < counts[0] and counts[-1] == layers)


MODELS = (  # what it is, ms and MiB of each layer, MiB of each GPU
    ("four equal layers", [2] * 4, [1] * 4, [4, 4]),
    ("a large first layer", [3, 1, 1, 1], [1] * 4, [4, 4]),
    ("a large first layer and a small second GPU", [3, 1, 1, 1], [1] * 4, [4, 2]),
    ("as many layers as GPUs", [1, 5, 2], [1] * 3, [2, 2, 2]),
    ("a large last layer", [1] * 11 + [6], [1] * 12, [9, 9, 9]),
    ("layers that get slower", [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6], [2] * 12,
     [8, 12, 12, 12]),
    ("layers that get faster", [9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1, 1], [4] * 12,
     [24, 24, 8, 24]),
    ("24 uneven layers", [3, 9, 4, 1, 7, 7, 2, 8, 5, 6, 1, 9, 2, 2, 8, 3, 6, 4, 9, 1, 5,
                          5, 7, 2], [2, 3] * 12, [16, 9, 16, 16, 16, 16]),
    ("times that are no whole numbers", [0.7, 2.4, 1.1, 1.9, 0.3, 2.2, 1.6],
     [4, 1, 1, 1, 1, 1, 4], [6, 6, 6]),
)  # fmt: skip


@exercise(
    "13.3",
    hints=(
        "Equal numbers of layers need not take equal times. In which ways can you "
        "choose the layers of the first GPU, which of them fit, and what remains to be "
        "done after each choice?",
        "Filling each GPU up to its share of the time can leave far too much for "
        "the last one. Compare all cuts instead, and leave at least one layer for "
        "each GPU that comes later. How can a function that cuts the rest call "
        "itself, without cutting the same rest many times? It may return an infinite "
        "time for a rest that does not fit.",
    ),
)
def balanced_cut(function) -> None:
    """A function (ms, MiB of each layer, MiB of each GPU) -> layers of each GPU."""
    for what, ms, mib, room in MODELS:
        where = f"{what} on {len(room)} GPUs"
        arguments = list(ms), list(mib), list(room)
        counts = call(function, *arguments, when=f"{where}:")
        try:
            counts = [operator.index(count) for count in counts]
        except TypeError:
            raise Wrong(
                f"it returns {counts!r}, not a list of whole numbers; return how many "
                "layers each GPU gets"
            ) from None
        all_placed = len(counts) == len(room) and sum(counts) == len(ms)
        if not all_placed and _are_positions(counts, len(ms), len(room)):
            raise Wrong("return how many layers each GPU gets, not where they end")
        if len(counts) != len(room):
            raise Wrong(f"{where}: it gives layers to {len(counts)} GPUs")
        if sum(counts) != len(ms):
            raise Wrong(f"{where}: {sum(counts)} of {len(ms)} layers are placed")
        if min(counts) < 1:
            raise Wrong(f"{where}: a GPU has no layer, in {counts}")
        for gpu, (need, has) in enumerate(zip(sums(mib, counts), room, strict=True)):
            if need > has:
                raise Wrong(
                    f"{where}: GPU {gpu} has room for {has} MiB, and its layers in "
                    f"{counts} need {need}"
                )
        yours, best = max(sums(ms, counts)), best_slowest(ms, mib, room)
        if best / yours < SCORE:
            raise Wrong(
                f"{where}: score {best / yours:.2f}; the slowest stage of {counts} "
                f"takes {yours:g} ms, and {best:g} ms can be had"
            )


@solution("13.3")
def solution_3():
    """Once the first GPU has its layers, the rest is the same task with a GPU less.

    `best(first, gpu)` places the layers from `first` on, beginning with this GPU. It
    tries every end that fits, and asks itself for the best cut of the rest. The slowest
    stage of such a cut is the slower of the two, and `min` takes the cut where that is
    fastest. A rest that does not fit takes infinitely long, so no cut with it is taken.
    `cache` remembers each result, because the same rest comes up after many choices.

    Filling each GPU up to an equal share of the time is not enough, since a large
    layer at the end may then share its stage with others.
    """
    from functools import cache

    def cut(ms, mib, room):
        @cache
        def best(first, gpu):  # ms of the slowest stage, layers of each GPU
            if gpu == len(room):
                fits = first == len(ms)
                return (0 if fits else float("inf")), []
            choices = [(float("inf"), [])]
            for end in range(first + 1, len(ms) + 1):
                if sum(mib[first:end]) <= room[gpu]:
                    slowest, counts = best(end, gpu + 1)
                    slowest = max(slowest, sum(ms[first:end]))
                    choices.append((slowest, [end - first, *counts]))
            return min(choices)

        slowest, counts = best(0, 0)
        return counts

    return cut
