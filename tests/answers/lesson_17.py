"""Answers to the exercises of lesson 17: right ones, and planted wrong ones."""

import random

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from exercises.lesson_17 import THREE


def seeds(with_what):
    """Seeds the rank with `with_what(seed, epoch, rank, ranks)`."""

    def seed_this_rank(seed, epoch):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(with_what(seed, epoch, rank, ranks))

    return seed_this_rank


def by_chance(seed, epoch):
    torch.manual_seed(random.SystemRandom().randrange(2**40))


def drawn(seed, epoch):
    choose = random.Random(f"{seed} {epoch} {dist.get_rank()}")
    torch.manual_seed(choose.randrange(2**60))


def loop(model, samples, epochs, sampler, told=True, scale=1.0, lr=0.5, workers=0):
    loader = DataLoader(samples, batch_size=16, sampler=sampler, num_workers=workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for epoch in range(epochs):
        if told:
            sampler.set_epoch(epoch)
        for x, y in loader:
            loss = cross_entropy(model(x), y) * scale
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def trained(seed=0, ddp=True, **options):
    """A sampler of all ranks, and the loop with these options."""

    def train_in_step(model, data, epochs):
        sampler = DistributedSampler(data, seed=seed)
        loop(model if ddp else model.module, data, epochs, sampler, **options)

    return train_in_step


def told_once(model, data, epochs):
    sampler = DistributedSampler(data)
    loop(model, data, 1, sampler)
    sampler.set_epoch(1)
    loop(model, data, epochs - 1, sampler, told=False)


def everyone_all(model, data, epochs):
    loop(model, data, epochs, DistributedSampler(data, num_replicas=1, rank=0))


def weighted(losses):
    total = torch.tensor(float(len(losses)))
    dist.all_reduce(total)
    return (losses * dist.get_world_size() / total).sum()


def from_the_mean(losses):
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, len(losses))
    return losses.mean() * len(losses) * len(counts) / sum(counts)


def on_rank_0(losses):
    total = torch.tensor(float(len(losses)))
    if dist.get_rank() == 0:
        dist.all_reduce(total)
    return losses.sum() / total


RIGHT = {
    "seed_this_rank": [
        seeds(lambda seed, epoch, rank, ranks: seed + 1000 * epoch + rank),
        seeds(lambda seed, epoch, rank, ranks: seed + epoch * ranks + rank),
        drawn,
    ],
    "train_in_step": [trained(), trained(seed=7)],
    "loss_to_average": [weighted, from_the_mean],
}

WRONG = {
    "seed_this_rank": [
        (seeds(lambda seed, epoch, rank, ranks: seed + epoch), "rank 1 in epoch 0"),
        (seeds(lambda seed, epoch, rank, ranks: seed * ranks + rank), "in epoch 1 has"),
        (seeds(lambda seed, epoch, rank, ranks: 10 * rank + epoch), "the argument"),
        (seeds(lambda seed, epoch, rank, ranks: seed + epoch + rank), "the same seed"),
        (
            seeds(lambda seed, epoch, rank, ranks: seed * (9 * epoch + rank)),
            "same seed",
        ),
        (by_chance, "the second time"),
        (5, "give a function"),
    ],
    "train_in_step": [
        (trained(told=False, scale=1 / 2), "same order"),
        (told_once, "each epoch"),
        (trained(scale=1 / 2), "DDP does already"),
        (trained(scale=2), "too large"),
        (trained(ddp=False), "different weights"),
        (everyone_all, "half of 64"),
        (trained(lr=0.1), "lr=0.5"),
        (trained(workers=1), "in the rank itself"),
    ],
    "loss_to_average": [
        (lambda losses: losses.mean(), "mean of means"),
        (lambda losses: weighted(losses) / dist.get_world_size(), "once more"),
        (lambda losses: losses.sum() / 12 * THREE, "right for (8, 3, 1)"),
        (lambda losses: losses.sum(), "by the number of samples"),
        (on_rank_0, "every rank"),
        (lambda losses: weighted(losses).item(), "return one number"),
        (lambda losses: weighted(losses).detach(), "lost track"),
    ],
}
