"""The exercises of lesson 30: a repaired loss, a suspect, a test of tests."""

import contextlib

import torch

from exercises.counted import number, word
from exercises.exercise import Wrong, call, exercise, solution

# -- 30.1 ------------------------------------------------------------------------------

_SHARES = ([3, 3, 3, 3], [5, 2, 1], [1, 6])  # samples of each rank
_KINDS = "mean", "sum", "shared"


def _loss(kind: str, losses: torch.Tensor, everybody: int) -> torch.Tensor:
    """What a rank, or one GPU, makes of the losses of its samples."""
    return losses.mean() if kind == "mean" else losses.sum() / everybody


def ratio(function, kind: str, counts: list[int]) -> float:
    """DDP's gradient as a share of one GPU's, and how far it points elsewhere.

    Args:
        function: the learner's.
        kind: of loss.
        counts: samples of each rank.
    """
    generator = torch.Generator().manual_seed(30)
    x = torch.randn(sum(counts), 4, generator=generator)
    everybody = 1 if kind == "sum" else len(x)

    def gradient(scale, rows):
        weight = torch.ones(4, requires_grad=True)
        (_loss(kind, (rows @ weight).square(), everybody) * scale).backward()
        return weight.grad

    right = gradient(1, x)
    total = torch.zeros(4)
    for rank, rows in enumerate(x.split(counts)):
        where = f"kind {kind!r}, rank {rank} of samples {counts}"
        scale = number(call(function, kind, rank, list(counts), when=where), where)
        total += gradient(float(scale), rows)
    found = total / len(counts)  # DDP averages
    share = (found @ right / (right @ right)).item()
    apart = ((found - share * right).norm() / right.norm()).item()
    return share if apart < 1e-4 else float("nan")


@exercise(
    "30.1",
    hints=(
        "What does DDP do with the gradients of the ranks? Start with that number. For "
        "which of the three kinds is it all?",
        "With a mean, a sample of a rank with few samples weighs more than others. "
        "What would turn the rank's mean into its part of the mean of all samples?",
    ),
)
def repaired(factor) -> None:
    """A factor for each rank's loss, with which DDP has the gradient of one GPU."""
    for counts in _SHARES:
        for kind in _KINDS:
            found = ratio(factor, kind, counts)
            if abs(found - 1) <= 1e-4:
                continue
            where = f"kind {kind!r}, samples {counts}: the gradient"
            ranks = len(counts)
            if found != found:
                why = "points elsewhere: some ranks' samples weigh more than others"
            elif abs(found * ranks - 1) <= 1e-4:
                why = "is too small: DDP divides by the ranks, and nothing undoes that"
            else:
                why = f"is {found:.4g} times that of one GPU"
            raise Wrong(f"{where} {why}")


@solution("30.1")
def solution_1():
    """DDP divides the sum of the ranks' gradients by their number.

    A sum, whether divided by all samples or not, needs no more than the factor that
    undoes this: the sums of the ranks add up to that of one GPU, however many samples
    each of them has.

    A mean has divided by the rank's own samples. The rank's share of all samples turns
    it into a part of the mean of all, and the number of ranks undoes DDP's division.
    With equal shares, both cancel, so the mean needs nothing.
    """

    def factor(kind, rank, counts):
        ranks = len(counts)
        if kind == "mean":
            return ranks * counts[rank] / sum(counts)
        return ranks

    return factor


# -- 30.2 ------------------------------------------------------------------------------

_WELL = {
    "bfloat16": [245, 247, 244, 246],
    "datasheet": 312,
    "pairs": 195,
    "nvlink": 300,
    "nodes": 11.6,
    "promised": 100,
    "step": 1.2,
}
_MACHINES = (  # what is unlike a good machine, what to look into, and why
    ({}, "nothing", "all is as in the lesson, and dry runs are too fast by 1.1 to 1.4"),
    (
        {"bfloat16": [246, 171, 245, 247], "step": 1.7},
        "one GPU",
        "rank 1 is 31 % slower than the fastest, and all ranks wait for it",
    ),
    (
        {"bfloat16": [112, 111, 113, 112], "step": 2.5},
        "all GPUs",
        "they are alike, and reach 36 % of the datasheet",
    ),
    (
        {"nodes": 1.1, "step": 4.1},
        "network",
        "1.1 GB/s are 9 Gbit/s; the slow step is what follows from that",
    ),
    (
        {"pairs": 6, "step": 3.3},
        "links",
        "the cards have NVLink, and 6 GB/s are what a host moves",
    ),
    (
        {"bfloat16": [195, 194, 196, 195], "datasheet": 362, "pairs": 6, "nvlink": 0},
        "nothing",
        "without NVLink, a pair shares what the host moves; the matmuls reach 54 %",
    ),
    ({"step": 2.4}, "plan", "the machine is as it should be, the expectation is not"),
    ({"step": 1.37}, "nothing", "dry runs are usually too fast, by 1.1 to 1.4"),
    ({"bfloat16": [246, 235, 240, 245]}, "nothing", "GPUs of a kind vary by some %"),
    (
        {"bfloat16": [733, 741, 738, 735], "datasheet": 989, "nodes": 46, "nvlink": 450,
         "pairs": 330, "promised": 400, "step": 1.15},
        "nothing",
        "these are eights of what they were promised: 46 GB/s are 368 Gbit/s",
    ),
)  # fmt: skip
_CAUSES = "one GPU", "all GPUs", "links", "network", "plan", "nothing"


def machines() -> list[dict]:
    """Reports, as the learner's function gets them."""
    return [_WELL | changed for changed, *_ in _MACHINES]


@exercise(
    "30.2",
    hints=(
        "Compare each number with what the lesson compares it with: GPUs with the "
        "fastest, the fastest with the datasheet, messages with what was promised. "
        "Mind the units.",
        "A slow GPU or a slow network makes the step slow, too. So look at the step "
        "last. By which factor is a dry run usually too fast?",
    ),
)
def suspected(suspect) -> None:
    """A function: a machine's figures -> what to look into first."""
    for machine, (changed, right, why) in zip(machines(), _MACHINES, strict=True):
        told = ", ".join(f"{name} {value}" for name, value in changed.items())
        where = f"a machine with {told}" if told else "the machine of the exercise"
        given = {**machine, "bfloat16": list(machine["bfloat16"])}
        said = word(call(suspect, given, when=f"{where}:"))
        if said not in map(str.lower, _CAUSES):
            raise Wrong(f"{where}: return one of {', '.join(_CAUSES)}, not {said!r}")
        if said != right.lower():
            raise Wrong(f"{where}: not {said!r}: {why}")


@solution("30.2")
def solution_2():
    """Causes come before what follows from them, so the step comes last.

    Without NVLink, nothing is to be compared with it. The network is promised in
    Gbit/s and measured in GB/s, an eighth. A step may take 1.4 times the dry run. The
    limits are those of the lesson; other numbers near them do as well.
    """

    def suspect(machine):
        speeds = machine["bfloat16"]
        if min(speeds) < 0.9 * max(speeds):
            return "one GPU"
        if max(speeds) < 0.4 * machine["datasheet"]:
            return "all GPUs"
        if machine["pairs"] < 0.4 * machine["nvlink"]:
            return "links"
        if 8 * machine["nodes"] < 0.4 * machine["promised"]:
            return "network"
        return "plan" if machine["step"] > 2 else "nothing"

    return suspect


# -- 30.3 ------------------------------------------------------------------------------


def _mean(grads):
    mean = torch.stack([g.clone() for g in grads]).mean(0)
    return [mean.clone() for _ in grads]


def _in_place(grads):
    mean = torch.stack(grads).mean(0)
    for g in grads:
        g.copy_(mean)
    return grads


def _shared(grads):
    total = grads[-1].clone()
    for g in reversed(grads[:-1]):
        total = total + g
    return [total / len(grads)] * len(grads)


_RIGHT = (
    (_mean, "that is right"),
    (_in_place, "that is right and works in place: keep copies of what you give it"),
    (_shared, "that is right but for the last digit, since it adds in another order"),
)


def _sum_in_place(grads):
    total = sum(grads)
    for g in grads:
        g.copy_(total)
    return grads


def _of_rank_0_in_place(grads):
    for g in grads[1:]:
        g.copy_(grads[0])
    return grads


def _in_ranks(what):
    """Every rank gets `what(grads)`."""
    return lambda grads: [what(torch.stack(grads)).clone() for _ in grads]


def _only_rank_0(grads):
    return [_mean(grads)[0], *(g.clone() for g in grads[1:])]


def _all_but_the_last(grads):
    return [*_mean(grads)[:-1], grads[-1].clone()]


_LIARS = (
    (lambda grads: [g.clone() for g in grads], "averages nothing"),
    (_in_ranks(lambda g: g.sum(0)), "adds up and does not divide"),
    (_sum_in_place, "adds up in place: compare with copies that you made before"),
    (_of_rank_0_in_place, "gives all ranks, in place, the gradient of rank 0"),
    (_in_ranks(lambda g: g[0]), "gives all ranks the gradient of rank 0"),
    (_in_ranks(lambda g: g[:2].mean(0)), "leaves out all ranks but two"),
    (_in_ranks(lambda g: g.sum(0) / 2), "divides by 2, however many ranks there are"),
    (_in_ranks(lambda g: g.sum(0) / 4), "divides by 4, however many ranks there are"),
    (_in_ranks(lambda g: g.abs().mean(0)), "loses the signs"),
    (_in_ranks(lambda g: g.mean(0).round()), "rounds to whole numbers"),
    (_in_ranks(lambda g: g.median(0).values), "takes the median, not the mean"),
    (
        _in_ranks(lambda g: torch.full_like(g[0], g.mean())),
        "gives every place the same number",
    ),
    (_only_rank_0, "averages for rank 0 alone"),
    (_all_but_the_last, "forgets the last rank"),
    (lambda grads: _mean(grads)[:1], "returns one gradient, not one for each rank"),
)


def _yes_or_no(said) -> bool:
    """Python's, NumPy's or PyTorch's."""
    with contextlib.suppress(AttributeError, ValueError, RuntimeError):
        said = said.item()
    if not isinstance(said, bool):
        kind = type(said).__name__
        an = "an" if kind[0] in "aeiou" else "a"
        raise Wrong(f"return True or False, not {an} {kind}")
    return said


def _ask(test, average, what: str) -> bool:
    return _yes_or_no(call(test, average, when=f"given a function that {what},"))


@exercise(
    "30.3",
    hints=(
        "Write a list of the mistakes that you would make in such a function "
        "yourself, such as forgetting to divide. For each of them, with which "
        "gradients and how many ranks would the wrong result equal the right one by "
        "chance?",
        "A function may change the tensors that you give it, so think about when you "
        "compute the mean to compare with. Rounding may differ in the last digit, but "
        "the number of results, every rank's result, signs, fractions and the number "
        "of ranks all matter.",
    ),
)
def finds_the_liars(test) -> None:
    """A test of averaging that passes the right functions and no other."""
    calls = 0

    def noted(grads):
        nonlocal calls
        calls += 1
        return _mean(grads)

    _yes_or_no(call(test, noted))
    if not calls:
        raise Wrong("your test never calls the function")
    for average, why in _RIGHT:
        if not _ask(test, average, "is right"):
            raise Wrong(f"your test refuses a function; {why}")
    passed = [what for average, what in _LIARS if _ask(test, average, what)]
    if len(passed) == len(_LIARS):
        raise Wrong("your test passes every function, right or wrong")
    if passed:
        found = len(_LIARS) - len(passed)
        raise Wrong(
            f"you find {found} of {len(_LIARS)}; your test passes a function that "
            f"{passed[0]}"
        )


@solution("30.3")
def solution_3():
    """A test finds a mistake only with inputs for which the mistake changes the result.

    Random numbers from `torch.randn` have signs and fractions, and differ from rank to
    rank and from place to place. With them a median is not a mean, and neither is the
    gradient of rank 0.

    The number of ranks matters as well. With two of them, a function that divides by 2
    in any case would pass. With three and then five, no fixed divisor is right.

    The mean is computed first, and the function gets clones, because it may work in
    place. `allclose` allows for another order of adding up. The result must have one
    gradient for each rank, and each is compared, the last one too.
    """

    def test(average):
        for ranks in (3, 5):
            grads = [torch.randn(4, 3) for _ in range(ranks)]
            wanted = torch.stack(grads).mean(0)
            found = average([grad.clone() for grad in grads])
            if len(found) != ranks:
                return False
            for one in found:
                if not torch.allclose(one, wanted, atol=1e-6):
                    return False
        return True

    return test
