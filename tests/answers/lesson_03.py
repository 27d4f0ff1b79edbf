"""Answers to the exercises of lesson 03: right ones, and planted wrong ones."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler


def share(batch):
    return batch // dist.get_world_size()


def whole_batch(batch):
    return batch


def always_four(batch):
    return batch // 4


def a_float(batch):
    return batch / dist.get_world_size()


def too_many(batch):
    return batch // dist.get_world_size() + 1


def cut(state):
    return {
        name[len("module.") :] if name.startswith("module.") else name: value
        for name, value in state.items()
    }


def replaced(state):
    return {name.replace("module.", ""): value for name, value in state.items()}


def stripped(state):
    return {name.lstrip("module."): value for name, value in state.items()}


def cut_always(state):
    return {name[7:]: value for name, value in state.items()}


def unchanged(state):
    return dict(state)


def in_place(state):
    for name in list(state):
        state[name.removeprefix("module.")] = state.pop(name)
    return state


def zeros(state):
    return {name: value * 0 for name, value in cut(state).items()}


def names_only(state):
    return [name.removeprefix("module.") for name in state]


def _count(model, data, indices):
    right = torch.zeros(())
    for index in indices:
        x, y = data[index]
        right += (model.module(x[None]).argmax(1) == y).sum().detach()
    return right


def _mine(data):
    return range(dist.get_rank(), len(data), dist.get_world_size())


def counted_twice(model, data):
    sampler = DistributedSampler(data, shuffle=False)
    right = _count(model, data, sampler)
    dist.all_reduce(right)
    return right.item() / (len(sampler) * dist.get_world_size())


def mean_of_means(model, data):
    share_right = _count(model, data, _mine(data)) / len(_mine(data))
    dist.all_reduce(share_right)
    return share_right.item() / dist.get_world_size()


def own_only(model, data):
    return _count(model, data, _mine(data)).item() / len(_mine(data))


def on_rank_0(model, data):
    right = _count(model, data, _mine(data))
    if dist.get_rank() == 0:
        dist.all_reduce(right)
    return right.item() / len(data)


def a_count(model, data):
    right = _count(model, data, _mine(data))
    dist.all_reduce(right)
    return right.item()


def all_of_it(model, data):
    images, labels = next(iter(DataLoader(data, batch_size=len(data))))
    return (model.module(images).argmax(1) == labels).double().mean().item()


def in_batches(model, data):
    images, labels = data.tensors
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    right = (model.module(images[mine]).argmax(1) == labels[mine]).sum()
    dist.all_reduce(right)
    return right.item() / len(labels)


RIGHT = {
    "batch_of_a_rank": [share],
    "bare_names": [cut],
    "accuracy_of_all": [all_of_it, in_batches],
}

WRONG = {
    "batch_of_a_rank": [
        (whole_batch, "takes all"),
        (always_four, "ask how many ranks"),
        (a_float, "no whole number"),
        (too_many, "it should be 64"),
        (128, "give a function"),
    ],
    "bare_names": [
        (unchanged, "the names differ"),
        (replaced, "only the first"),
        (cut_always, "the names differ"),
        (stripped, "the names differ"),
        (in_place, "make a new one"),
        (zeros, "other values"),
        (names_only, "return a dictionary"),
    ],
    "accuracy_of_all": [
        (counted_twice, "count twice"),
        (mean_of_means, "mean of means"),
        (own_only, "different accuracies"),
        (on_rank_0, "every rank"),
        (a_count, "between 0 and 1"),
    ],
}
