"""The exercises of lesson 03: a share of a batch, a training, an accuracy.

All run the learner's function in real ranks on the CPU, which end the ranks that were
open before.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from exercises.counted import number
from exercises.exercise import Wrong, call, exercise, must_be_callable, solution
from exercises.in_ranks import in_ranks
from exercises.results import a

TWO, THREE = 2, 3  # ranks
SAMPLES, STEP, EPOCHS = 48, 24, 3  # of the training
IMAGES = 10  # that three ranks cannot share equally
HANGS = 10  # seconds before ranks that wait for each other are given up


def _share(function, batch: int):
    return call(function, batch)


@exercise(
    "03.1",
    hints=(
        "`four_gpus.py` has this in the line that makes its `DataLoader`. What does "
        "that line divide, and by what?",
        "`dist.get_world_size()` is the number of ranks. A batch size is a whole "
        "number, so which of Python's two divisions do you need?",
    ),
)
def batch_of_a_rank(function) -> None:
    """A function: samples of all ranks -> samples of this rank."""
    must_be_callable(function)
    for size, batch in ((TWO, 128), (THREE, 96)):
        for found in in_ranks(size, _share, function, batch):
            number(found)
            about = f"of {batch} samples, each of {size} ranks"
            if found == batch:
                raise Wrong(f"{about} takes all; that is a batch of {size * batch}")
            if found == batch // 4:
                raise Wrong(f"{about} takes {found}: ask how many ranks there are")
            if found != batch // size:
                raise Wrong(f"{about} takes {found}; it should be {batch // size}")
            if not isinstance(found, int):
                raise Wrong(f"{found!r} is no whole number, and DataLoader refuses it")


@solution("03.1")
def solution_1():
    """The ranks share the batch equally, so divide it by how many they are.

    `dist.get_world_size()` asks the process group. `//` gives a whole number, and
    `DataLoader` accepts nothing else.
    """

    def batch_of_a_rank(batch):
        return batch // dist.get_world_size()

    return batch_of_a_rank


# -- a training ------------------------------------------------------------------------


def _classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


class _Noted(Dataset):
    """Samples and their labels; notes which sample is taken."""

    def __init__(self):
        self.images = torch.randn(
            SAMPLES, 4, generator=torch.Generator().manual_seed(2)
        )
        self.taken = []

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index: int):
        self.taken.append(int(index))
        return self.images[index], self.images[index, :3].argmax()


class _Found(NamedTuple):
    """What a rank has found, and what its training has used."""

    loss: float
    weights: dict[str, torch.Tensor]
    taken: list[int]
    sizes: list[int]


def _trained(function) -> _Found:
    model, data, sizes = _classifier(), _Noted(), []
    model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    answer = call(function, model, data)
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise Wrong("return the loss and the weights")
    loss, state = answer
    if not hasattr(state, "items"):
        raise Wrong(f"the weights are {a(type(state).__name__)}, not a dictionary")
    weights = {name: weight.detach().clone() for name, weight in state.items()}
    return _Found(float(number(loss, "the loss")), weights, data.taken, sizes)


def _alone() -> tuple[float, dict[str, torch.Tensor]]:
    """The training in one process, in the order of `DistributedSampler`."""
    model, data = _classifier(), _Noted()
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    loader = DataLoader(data, STEP, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        losses = []
        for x, y in loader:
            losses.append(nn.functional.cross_entropy(model(x), y))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses).mean().item(), model.state_dict()


def _differ(one: dict, other: dict) -> bool:
    return any(not torch.allclose(one[n], other[n], atol=1e-5) for n in other)


@exercise(
    "03.2",
    hints=(
        "Go through the twelve steps of the list. Four of them belong to the start "
        "and the end of a process. Which of the others does the function need, and "
        "which of its lines run before the loop over the epochs?",
        "`all_reduce` adds up, so divide the sum by the number of ranks. The "
        "optimizer, the loop and the result need different names of the model: which "
        "of them is the DDP model, and which one has the names of the bare model?",
    ),
)
def train_in_ranks(function) -> None:
    """A function (bare model, data) -> (mean loss of the last epoch, weights)."""
    must_be_callable(function)
    hang = "the ranks wait for each other: a collective must be called by every rank"
    meanings = {"did not finish": hang, "lost another rank": hang}
    found = in_ranks(THREE, _trained, function, seconds=HANGS, meanings=meanings)
    loss, weights = _alone()
    first, share = found[0], SAMPLES // THREE
    if any(name.startswith("module.") for name in first.weights):
        raise Wrong("the names begin with `module.`; return those of the bare model")
    if any(rank.weights.keys() != weights.keys() for rank in found):
        raise Wrong(f"the weights are {[*first.weights]}, not {[*weights]}")
    if len(first.taken) == EPOCHS * SAMPLES:
        raise Wrong("every rank trains on all samples: who divides them?")
    if any(len(rank.taken) != EPOCHS * share for rank in found):
        raise Wrong(f"a rank takes {len(first.taken)} samples in {EPOCHS} epochs")
    if first.taken[:share] == first.taken[share : 2 * share]:
        raise Wrong("all epochs have the same order")
    if set(first.sizes) != {STEP // THREE}:
        what = f"a step of all ranks has {THREE * max(first.sizes)} samples"
        raise Wrong(f"{what}, not {STEP}")
    if any(_differ(rank.weights, first.weights) for rank in found):
        raise Wrong("the ranks have different weights: who averages the gradients?")
    if _differ(first.weights, weights):
        raise Wrong("the weights are not those of one process with the same samples")
    if any(abs(rank.loss - first.loss) > 1e-6 for rank in found):
        raise Wrong("the ranks return different losses; average them")
    if abs(first.loss - THREE * loss) < 1e-4:
        raise Wrong("the loss is the sum of all ranks; divide by how many they are")
    if abs(first.loss - loss) > 1e-4:
        raise Wrong(f"{first.loss:.4f} is not the mean loss of the last epoch")


@solution("03.2")
def solution_2():
    """Six of the twelve steps: the others start and end the process, or print.

    The loop calls the DDP model, or no gradient is averaged. The sampler divides the
    samples, and the batch of a rank is a part of the step. Every rank adds its losses
    to those of the others, so all return the same number. `model` is still the bare
    model, and DDP trains its weights.
    """

    def train(model, data):
        size = dist.get_world_size()
        ddp = DDP(model)
        sampler = DistributedSampler(data)
        loader = DataLoader(data, 24 // size, sampler=sampler)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            total = torch.zeros(())
            for x, y in loader:
                loss = nn.functional.cross_entropy(ddp(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                total += loss.detach()
        dist.all_reduce(total)
        return total.item() / size / len(loader), model.state_dict()

    return train


# -- a validation ----------------------------------------------------------------------


def _images() -> TensorDataset:
    """Of ten images the classifier gets three wrong, unequally over the ranks."""
    images = torch.randn(IMAGES, 4, generator=torch.Generator().manual_seed(3))
    labels = _classifier()(images).argmax(1)
    for index in (0, 4, 7):
        labels[index] = (labels[index] + 1) % 3
    return TensorDataset(images, labels)


class _Judged(NamedTuple):
    """What a rank has found, and how the model was used."""

    accuracy: float
    training: bool  # while it was called
    afterwards: bool


def _accuracy(function) -> _Judged:
    model, modes = DDP(_classifier()), []
    model.module.register_forward_pre_hook(lambda it, _: modes.append(it.training))
    answer = call(function, model, _images())
    return _Judged(float(number(answer)), any(modes), model.module.training)


@exercise(
    "03.3",
    hints=(
        "Which samples does each rank take, so that all of them are taken once? "
        "`DistributedSampler` repeats some when their number cannot be divided.",
        "Rank `r` of `n` takes samples `r`, `r + n`, `r + 2n` ... Add up over the "
        "ranks how many are right, with a collective that every rank calls, and "
        "divide by the number of all samples at the end. What must a model with "
        "dropout be told before, and what after?",
    ),
)
def accuracy_of_all(function) -> None:
    """A function (DDP model, data) -> the accuracy over all ranks, on every rank."""
    must_be_callable(function)
    images, labels = _images().tensors
    hits = (_classifier()(images).argmax(1) == labels).double()
    right = hits.mean().item()
    hang = "the ranks wait for each other: a collective must be called by every rank"
    meanings = {"did not finish": hang, "lost another rank": hang}
    judged = in_ranks(THREE, _accuracy, function, seconds=HANGS, meanings=meanings)
    results = [rank.accuracy for rank in judged]
    if any(not 0 <= found <= 1 for found in results):
        raise Wrong(f"{results[0]:g} is no share between 0 and 1")
    if max(results) - min(results) > 1e-6:
        raise Wrong("the ranks return different accuracies; every rank needs the sum")
    padded = sum(hits[index % IMAGES].item() for index in range(12)) / 12
    own = sum(hits[rank::THREE].mean().item() for rank in range(THREE)) / THREE
    found = results[0]
    if abs(found - padded) < 1e-6:
        raise Wrong("two samples count twice: DistributedSampler fills up with them")
    if abs(found - own) < 1e-6:
        raise Wrong("a mean of means: the ranks do not have equally many samples")
    if abs(found - right) > 1e-6:
        raise Wrong(f"{found:.3f} is not the accuracy over all {IMAGES} samples")
    if any(rank.training for rank in judged):
        raise Wrong("the model is in training mode: with dropout, its guesses differ")
    if not all(rank.afterwards for rank in judged):
        raise Wrong("the training that goes on would be one without dropout")


@solution("03.3")
def solution_3():
    """Add up counts over the ranks, not shares.

    Ten samples cannot be divided among three ranks. `DistributedSampler` would take two
    of them twice, and their accuracy would count twice. So rank `r` takes samples `r`,
    `r + 3` and so on. The ranks have different numbers of samples, so a mean of their
    accuracies would be wrong, too.

    Every rank calls `all_reduce`, and afterwards every rank has the sum. `eval()`
    switches dropout off and lets BatchNorm take the averages of the training.
    """

    def accuracy_of_all(model, data):
        rank, size = dist.get_rank(), dist.get_world_size()
        right = torch.zeros(())
        model.eval()
        for index in range(rank, len(data), size):
            x, y = data[index]
            with torch.no_grad():
                guess = model.module(x.unsqueeze(0)).argmax(1)
            right += (guess == y).sum()
        model.train()
        dist.all_reduce(right)
        return right.item() / len(data)

    return accuracy_of_all
