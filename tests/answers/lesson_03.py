"""Answers to the exercises of lesson 03: right ones, and planted wrong ones."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from tests.answers import other


def share(batch):
    return batch // dist.get_world_size()


class Training:
    """Trains in ranks; subclasses do one thing in another way."""

    def __call__(self, model, data):
        self.trained = self.wrap(model)
        self.sampler = self.sample(data)
        loader = self.load(data)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for epoch in range(3):
            self.begin(epoch)
            losses = []
            for x, y in loader:
                losses.append(nn.functional.cross_entropy(self.trained(x), y))
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
        return self.mean(torch.stack(losses).mean().detach()), self.state(model)

    def wrap(self, model):
        return DistributedDataParallel(model)

    def sample(self, data):
        return DistributedSampler(data, drop_last=True)

    def load(self, data):
        return DataLoader(data, self.batch(), sampler=self.sampler)

    def batch(self):
        return 24 // dist.get_world_size()

    def begin(self, epoch):
        self.sampler.set_epoch(epoch)

    def mean(self, loss):
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    def state(self, model):
        return self.trained.module.state_dict()


class Alone(Training):
    def wrap(self, model):
        return model

    def state(self, model):
        return model.state_dict()


class AllSamples(Training):
    def load(self, data):
        return DataLoader(data, self.batch(), shuffle=True)


class TooFew(Training):
    def load(self, data):
        return DataLoader(data, 4, sampler=list(self.sampler)[:8])


class SumOfLosses(Training):
    def mean(self, loss):
        return super().mean(loss) * dist.get_world_size()


class OnRank0(Training):
    def mean(self, loss):
        return super().mean(loss) if dist.get_rank() == 0 else loss.item()


class LossOnly(Training):
    def __call__(self, model, data):
        return super().__call__(model, data)[0]


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


def in_training_mode(model, data):
    images, labels = next(iter(DataLoader(data, batch_size=len(data))))
    return (model.module(images).argmax(1) == labels).double().mean().item()


def left_in_eval_mode(model, data):
    model.eval()
    return in_training_mode(model, data)


def all_of_it(model, data):
    share = left_in_eval_mode(model, data)
    model.train()
    return share


RIGHT = {
    "batch_of_a_rank": [share],
    "train_in_ranks": [Training()],
    "accuracy_of_all": [all_of_it],
}

WRONG = {
    "batch_of_a_rank": [
        (lambda batch: batch, "takes all"),
        (lambda batch: batch // 4, "ask how many ranks"),
        (lambda batch: batch / dist.get_world_size(), "no whole number"),
        (lambda batch: batch // dist.get_world_size() + 1, "it should be 64"),
        (128, "give a function"),
    ],
    "train_in_ranks": [
        (Alone(), "who averages the gradients"),
        (
            other(Training, state=lambda self, model: self.trained.state_dict())(),
            "begin with `module.`",
        ),
        (
            other(Training, state=lambda self, model: {"weight": model.weight})(),
            "['weight', 'bias']",
        ),
        (
            other(Training, state=lambda self, model: list(model.parameters()))(),
            "a list, not a dictionary",
        ),
        (AllSamples(), "who divides them"),
        (TooFew(), "takes 24 samples in 3 epochs"),
        (other(Training, begin=lambda self, epoch: None)(), "the same order"),
        (other(Training, batch=lambda self: 16)(), "has 48 samples, not 24"),
        (
            other(
                Training, sample=lambda self, data: DistributedSampler(data, seed=1)
            )(),
            "not those of one process",
        ),
        (other(Training, mean=lambda self, loss: loss.item())(), "different losses"),
        (SumOfLosses(), "the sum of all ranks"),
        (
            other(Training, mean=lambda self, loss: Training.mean(self, loss) * 2)(),
            "not the mean loss",
        ),
        (OnRank0(), "every rank"),
        (LossOnly(), "return the loss and the weights"),
    ],
    "accuracy_of_all": [
        (counted_twice, "count twice"),
        (mean_of_means, "mean of means"),
        (own_only, "different accuracies"),
        (on_rank_0, "every rank"),
        (a_count, "between 0 and 1"),
        (in_training_mode, "in training mode"),
        (left_in_eval_mode, "without dropout"),
    ],
}
