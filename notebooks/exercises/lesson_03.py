"""The exercises of lesson 03: a share of a batch, names of weights, an accuracy.

Two of them run the learner's function in real ranks on the CPU, which end the ranks
that were open before.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from exercises.counted import number
from exercises.exercise import Wrong, call, exercise, must_be_callable, solution
from exercises.in_ranks import in_ranks

TWO, THREE = 2, 3  # ranks
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


class _Nested(nn.Module):
    """A model with a part that is called `module` itself."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.module_list = nn.ModuleList([nn.Linear(2, 1)])


def _wrapped_names(state: dict) -> dict:
    return {f"module.{name}": value for name, value in state.items()}


@exercise(
    "03.2",
    hints=(
        "Look at the names in the error message. What stands in front of each name "
        "that is too much, and how often must it go?",
        "A part of the model may itself be called `module`. `str.removeprefix` takes "
        "away one prefix at the beginning. What does `str.replace` do?",
    ),
)
def bare_names(function) -> None:
    """A function: state_dict of a DDP model -> state_dict for the bare model."""
    must_be_callable(function)
    for model in (nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), _Nested()):
        wanted = model.state_dict()
        for given in (_wrapped_names(wanted), dict(wanted)):
            bare_already = "0.weight" in given
            if given.keys() == wanted.keys() and not bare_already:
                continue  # nobody can tell whose `module.` that is
            names = list(given)
            found = call(function, given)
            if not hasattr(found, "items"):
                raise Wrong(f"return a dictionary, not a {type(found).__name__}")
            if list(given) != names:
                raise Wrong("it changes the dictionary it is given; make a new one")
            if set(found) != set(wanted):
                odd = sorted(set(found) ^ set(wanted))
                why = "only the first `module.` is DDP's" if len(names) == 4 else ""
                raise Wrong(f"the names differ: {odd[0]!r} {why}".strip())
            for name, value in wanted.items():
                if not torch.equal(found[name], value):
                    raise Wrong(f"{name} has other values than before")


@solution("03.2")
def solution_2():
    """DDP keeps your model in its attribute `module`, and names begin with it.

    `removeprefix` takes it away at the beginning only, once. `replace` would also
    change a part of your own model that is called `module`. A name without the prefix
    stays as it is.
    """

    def bare_names(state):
        bare = {}
        for name, value in state.items():
            bare[name.removeprefix("module.")] = value
        return bare

    return bare_names


# -- real ranks ------------------------------------------------------------------------


def _classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def _images() -> TensorDataset:
    """Of ten images the classifier gets three wrong, unequally over the ranks."""
    images = torch.randn(IMAGES, 4, generator=torch.Generator().manual_seed(3))
    labels = _classifier()(images).argmax(1)
    for index in (0, 4, 7):
        labels[index] = (labels[index] + 1) % 3
    return TensorDataset(images, labels)


def _accuracy(function) -> float:
    answer = call(function, DistributedDataParallel(_classifier()), _images())
    return float(number(answer))


@exercise(
    "03.3",
    hints=(
        "Which samples does each rank take, so that all of them are taken once? "
        "`DistributedSampler` repeats some when their number cannot be divided.",
        "Rank `r` of `n` takes samples `r`, `r + n`, `r + 2n` ... Add up over the "
        "ranks how many are right, with a collective that every rank calls, and "
        "divide by the number of all samples at the end.",
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
    results = in_ranks(THREE, _accuracy, function, seconds=HANGS, meanings=meanings)
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


@solution("03.3")
def solution_3():
    """Add up counts over the ranks, not shares.

    Ten samples cannot be divided among three ranks. `DistributedSampler` would take two
    of them twice, and their accuracy would count twice. So rank `r` takes samples `r`,
    `r + 3` and so on. The ranks have different numbers of samples, so a mean of their
    accuracies would be wrong, too.

    Every rank calls `all_reduce`, and afterwards every rank has the sum.
    """

    def accuracy_of_all(model, data):
        rank, size = dist.get_rank(), dist.get_world_size()
        right = torch.zeros(())
        for index in range(rank, len(data), size):
            x, y = data[index]
            with torch.no_grad():
                guess = model.module(x.unsqueeze(0)).argmax(1)
            right += (guess == y).sum()
        dist.all_reduce(right)
        return right.item() / len(data)

    return accuracy_of_all
