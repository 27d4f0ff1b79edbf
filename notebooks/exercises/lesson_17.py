"""The exercises of lesson 17: a seed, a loop that is wrong twice, unequal shares.

All run the learner's function in real ranks on the CPU, which end the ranks that were
open before.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from exercises.exercise import (
    NotYet,
    Wrong,
    call,
    exercise,
    must_be_callable,
    run,
    solution,
)
from exercises.in_ranks import in_ranks
from exercises.learning import factor, gradients, off, weights
from exercises.results import near

TWO, THREE = 2, 3  # ranks
EPOCHS = 10  # of exercise 1
UNTOUCHED = 987_654_321  # a seed that nobody chooses


# -- a seed ----------------------------------------------------------------------------


def _seeds(function) -> list[list[int]]:
    """This rank's seed in each epoch of four runs: seed 5, 5 again, 40 and 0."""
    found = []
    for seed in (5, 5, 40, 0):
        found.append([])
        for epoch in range(EPOCHS):
            torch.manual_seed(UNTOUCHED)
            run(function, seed, epoch)
            found[-1].append(torch.initial_seed())
    return found


@exercise(
    "17.1",
    hints=(
        "Which number differs from rank to rank, and which function of "
        "`torch.distributed` returns it? What must rank 0 not draw in epoch 1?",
        "Number the pairs of epoch and rank, as seats in rows are numbered: one row "
        "for each epoch. How many seats has a row? The run's seed then says which "
        "hall it is.",
    ),
)
def seed_this_rank(function) -> None:
    """A function: seed, epoch -> nothing; each rank and epoch draws other numbers."""
    must_be_callable(function)
    results = in_ranks(THREE, _seeds, function)
    first, again, other, zero = zip(*results, strict=True)  # each: [rank][epoch]
    if {seed for own in first for seed in own} == {UNTOUCHED}:
        raise NotYet("your function seeds nothing so far")
    if first != again:
        raise Wrong("the same seed gives other numbers the second time")
    for runs in first, other, zero:
        _no_seed_twice(runs)
    if any(a == b for a, b in zip(sum(first, []), sum(other, []), strict=True)):
        raise Wrong("another seed must give other numbers; use the argument `seed`")


def _no_seed_twice(runs: tuple[list[int], ...]) -> None:
    """No two pairs of rank and epoch start from the same seed."""
    taken: dict[int, tuple[int, int]] = {}
    for epoch in range(EPOCHS):
        for rank, own in enumerate(runs):
            before = taken.setdefault(own[epoch], (rank, epoch))
            if before != (rank, epoch):
                raise Wrong(
                    f"rank {rank} in epoch {epoch} has the same seed as rank "
                    f"{before[0]} in epoch {before[1]}, so they draw the same numbers"
                )


@solution("17.1")
def solution_1():
    """Each pair of epoch and rank gets a number of its own.

    `epoch * world_size + rank` numbers the pairs without a gap, so no two are equal.
    With `epoch + rank`, rank 1 of epoch 0 would draw what rank 0 of epoch 1 draws. The
    same happens between runs if the seed is only added; 1,000 leaves room for as many
    epochs. A new start gives the same numbers, if it has as many ranks.
    """
    import torch.distributed as dist

    def seed_this_rank(seed, epoch):
        row = 1000 * seed + epoch
        torch.manual_seed(row * dist.get_world_size() + dist.get_rank())

    return seed_this_rank


# -- a loop that is wrong twice --------------------------------------------------------


class _Samples(Dataset):
    """Random samples that note who asked for them."""

    def __init__(self, count: int):
        generator = torch.Generator().manual_seed(13)
        self.x = torch.randn(count, 8, generator=generator)
        self.y = torch.randint(0, 4, (count,), generator=generator)
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(index)
        return self.x[index], self.y[index]


def _linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 4)


def _train(function, count: int, epochs: int) -> tuple[list[int], torch.Tensor]:
    """The samples that this rank took, in order, and its weights."""
    samples, model = _Samples(count), _linear()
    run(function, DistributedDataParallel(model), samples, epochs)
    return samples.asked, weights(model)


def _reference(asked: list[list[int]], samples: _Samples, scale: float) -> torch.Tensor:
    """The weights of one process that takes the samples of both ranks together."""
    model = _linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for start in range(0, len(asked[0]), 16):
        these = [index for own in asked for index in own[start : start + 16]]
        optimizer.zero_grad()
        (cross_entropy(model(samples.x[these]), samples.y[these]) * scale).backward()
        optimizer.step()
    return weights(model)


@exercise(
    "17.2",
    hints=(
        "One mistake is in the order of the samples, and the other one in the size "
        "of the gradient. What must the sampler be told, and what does DDP do to the "
        "gradients of all ranks in `backward()`?",
        "The number of the epoch changes in every epoch, and the sampler must hear "
        "of it each time. DDP takes the mean over the ranks, not the sum. By how "
        "many is the gradient then divided in all?",
    ),
)
def train_in_step(function) -> None:
    """A loop with `set_epoch` and a loss that is divided by nothing."""
    must_be_callable(function)
    count, epochs = 64, 3
    results = in_ranks(TWO, _train, function, count, epochs)
    asked, (own, others) = zip(*results, strict=True)
    if not asked[0]:
        if near(own, weights(_linear())):
            raise NotYet("your function takes no samples so far")
        raise Wrong("no samples were taken in the rank itself; no `num_workers` here")
    each = count // TWO
    if any(len(taken) != each * epochs for taken in asked):
        raise Wrong(
            f"in {epochs} epochs rank 0 took {len(asked[0])} samples and rank 1 "
            f"{len(asked[1])}; each has half of {count} in an epoch"
        )
    order = [asked[0][i * each : (i + 1) * each] for i in range(epochs)]
    if order[0] == order[1]:
        raise Wrong("epochs 0 and 1 have the same order: who tells the sampler?")
    if order[1] == order[2]:
        raise Wrong("epochs 1 and 2 have the same order; tell the sampler each epoch")
    if set(order[0]) & set(asked[1][:each]):
        raise Wrong("both ranks took the same samples; keep the DistributedSampler")
    if not near(own, others, atol=1e-5):
        raise Wrong("the ranks end with different weights; use the model as it comes")
    for scale, reason in (
        (1 / TWO, "the loss is still divided by the ranks, which DDP does already"),
        (TWO, "the gradients are too large: DDP takes the mean, so leave the loss"),
    ):
        if near(own, _reference(asked, _Samples(count), scale), atol=1e-5):
            raise Wrong(reason)
    if not near(own, _reference(asked, _Samples(count), 1.0), atol=1e-5):
        raise Wrong(
            "the weights are not those of one process with the same samples; keep "
            "SGD with lr=0.5, 16 samples a rank, and one step for each batch"
        )


@solution("17.2")
def solution_2():
    """The sampler must know the epoch, and only DDP divides by the number of ranks.

    A `DistributedSampler` shuffles by its seed plus the number of the epoch. Nobody has
    told it that number, so every epoch had the same order. `set_epoch` at the start of
    each epoch changes that.

    `cross_entropy` takes the mean over the samples of a rank, and DDP takes the mean
    over the ranks. The result is the mean over all samples already. Another division
    by the number of ranks makes each step too small.
    """

    def train_in_step(model, data, epochs):
        sampler = DistributedSampler(data)
        loader = DataLoader(data, batch_size=16, sampler=sampler)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for x, y in loader:
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    return train_in_step


# -- unequal shares --------------------------------------------------------------------

SHARES = (8, 3, 1)  # samples of each rank
OTHER_SHARES = (2, 5, 4)
HANGS = 10  # seconds before ranks that wait for each other are given up


def _losses(model, samples: _Samples, part) -> torch.Tensor:
    return cross_entropy(model(samples.x[part]), samples.y[part], reduction="none")


def _averaged(function) -> list[torch.Tensor]:
    """The gradients after DDP has averaged, from unequal shares, twice."""
    return [_averaged_once(function, shares) for shares in (SHARES, OTHER_SHARES)]


def _averaged_once(function, shares: tuple[int, ...]) -> torch.Tensor:
    rank, samples = dist.get_rank(), _Samples(sum(shares))
    first = sum(shares[:rank])
    model = DistributedDataParallel(_linear())
    losses = _losses(model, samples, slice(first, first + shares[rank]))
    loss = call(function, losses)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise Wrong("return one number, a tensor that `backward()` can start from")
    if not loss.requires_grad:
        raise Wrong("autograd has lost track of the loss: compute it from `losses`")
    run(loss.sum().backward)
    return gradients(model)


@exercise(
    "17.3",
    hints=(
        "With all samples in one process, the loss is the sum of all losses divided "
        "by the number of all samples. DDP adds up what the ranks have, and divides "
        "by the number of ranks. What must a rank give, so that this is the same?",
        "Add up the numbers of samples with `dist.all_reduce`; every rank calls it. "
        "The loss of a rank is the sum of its losses, divided by that total, and "
        "times the number of ranks, because DDP will divide by it.",
    ),
)
def loss_to_average(function) -> None:
    """A function: losses of this rank's samples -> the loss for `backward()`."""
    must_be_callable(function)
    hang = "the collectives do not fit together: every rank must call them"
    ended = ("did not finish", "lost another rank", "killed by SIGABRT")  # gloo's ways
    meanings = dict.fromkeys(ended, hang)
    results = in_ranks(THREE, _averaged, function, seconds=HANGS, meanings=meanings)
    _check_averaged(results[0][0])
    samples, model = _Samples(sum(OTHER_SHARES)), _linear()
    _losses(model, samples, slice(None)).mean().backward()
    if not near(results[0][1], gradients(model), atol=1e-5):
        raise Wrong(f"right for {SHARES} samples, and wrong for {OTHER_SHARES}")


def _check_averaged(found: torch.Tensor) -> None:
    """Of the first shares."""
    model, samples = _linear(), _Samples(sum(SHARES))
    _losses(model, samples, slice(None)).mean().backward()
    wanted = gradients(model)
    if near(found, wanted, atol=1e-5):
        return
    model, first = _linear(), 0
    for share in SHARES:
        part = slice(first, first + share)
        (_losses(model, samples, part).mean() / THREE).backward()
        first += share
    if near(found, gradients(model), atol=1e-5):
        raise Wrong("a mean of means: the one sample of rank 2 counts like eight")
    times = factor(found, wanted, 0.01)
    if times is None:
        difference = off(found, wanted)
        raise Wrong(
            f"the averaged gradient is {difference:.0%} off that of one process"
        )
    why = {
        1 / THREE: "DDP divides by the number of ranks once more",
        sum(SHARES) / THREE: "nobody divides by the number of samples",
    }
    reason = next((why[x] for x in why if abs(times - x) < 0.01), "")
    short = f"the averaged gradient is {times:.2f} times that of one process"
    raise Wrong(f"{short}; {reason}" if reason else short)


@solution("17.3")
def solution_3():
    """Divide by the samples of all ranks, and undo DDP's division by the ranks.

    One process would compute the sum of all losses, divided by the number of all
    samples. DDP adds up the gradients of the ranks and divides by the number of ranks.
    So each rank takes the sum of its own losses, divides by the number of all samples,
    and multiplies by the number of ranks, which DDP takes away again.

    `losses.new_tensor` makes the number on the device of `losses`, where NCCL wants it.
    """
    import torch.distributed as dist

    def loss_to_average(losses):
        count = losses.new_tensor(len(losses))
        dist.all_reduce(count)
        return losses.sum() / count * dist.get_world_size()

    return loss_to_average
