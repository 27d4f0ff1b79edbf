"""Answers to the exercises of lesson 11: right ones, and planted wrong ones."""

import queue
import threading
import time
import warnings

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from tests.answers import other

# -- a loader for a job ----------------------------------------------------------------

DATA = TensorDataset(torch.zeros(2048, 64))
MIXED = {"shuffle": False, "sampler": RandomSampler(DATA)}
NO_WORKERS = {"prefetch_factor": None, "persistent_workers": False}


def loader(**changes):
    """The right one but for some arguments. Its workers never start."""
    given = {
        "batch_size": 64, "shuffle": True, "num_workers": 20, "prefetch_factor": 1,
        "persistent_workers": True, "pin_memory": True,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more workers than cores
        return DataLoader(DATA, **given | changes)


# -- a thread that loads ahead ---------------------------------------------------------

END = object()


def ahead(fill):
    """Yields what a thread puts into a queue: `fill(batches, put)`, then `END`."""

    def prefetch(batches, depth):
        box = queue.Queue(depth)

        def work():
            fill(batches, box.put)

        threading.Thread(target=work, daemon=True).start()
        while (batch := box.get()) is not END:
            if isinstance(batch, Exception):
                raise batch
            yield batch

    return prefetch


def all_of_them(batches, put):
    for batch in batches:
        put(batch)
    put(END)


def and_errors(batches, put):
    try:
        all_of_them(batches, put)
    except Exception as error:
        put(error)


def no_errors(batches, put):
    try:
        all_of_them(batches, put)
    except Exception:
        put(END)


with_errors, loses_errors, ends_quietly = map(
    ahead, (and_errors, all_of_them, no_errors)
)


def of_the_lesson(batches, depth):
    box = queue.Queue(depth)

    def fill():
        for batch in batches:
            box.put(batch)
        box.put(None)

    threading.Thread(target=fill, daemon=True).start()
    while (batch := box.get()) is not None:
        yield batch


def unbounded(batches, depth):
    yield from with_errors(batches, 0)


def one_ahead(batches, depth):
    yield from with_errors(batches, 1)


def in_turns(batches, depth):
    yield from batches


def error_overtakes(batches, depth):
    box, errors = queue.Queue(depth), []

    def fill():
        try:
            for batch in batches:
                box.put(batch)
        except Exception as error:
            errors.append(error)
        box.put(END)

    threading.Thread(target=fill, daemon=True).start()
    while True:
        time.sleep(0.1)  # the thread comes first
        if errors:
            raise errors[0]
        if (batch := box.get()) is END:
            return
        yield batch


# -- random numbers of an item ---------------------------------------------------------


class Jittered(Dataset):
    """An answer: where an item's generator starts from, and the noise that it draws."""

    def __init__(self, x, seed):
        self.x, self.seed, self.epoch = x, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.x)

    def starts_from(self, i):
        return [self.seed, self.epoch, i]

    def noise(self, rng):
        return torch.from_numpy(rng.normal(size=16)).float()

    def __getitem__(self, i):
        return self.x[i] + self.noise(np.random.default_rng(self.starts_from(i)))


class ByGenerator(Jittered):
    def __getitem__(self, i):
        number = (self.seed * 1000 + self.epoch) * 1000 + i
        generator = torch.Generator().manual_seed(number)
        return self.x[i] + torch.randn(16, generator=generator)


class OwnGenerator(Jittered):
    def __init__(self, x, seed):
        super().__init__(x, seed)
        self.rng = np.random.default_rng(seed)

    def __getitem__(self, i):
        return self.x[i] + self.noise(self.rng)


class Uniform(Jittered):
    def noise(self, rng):
        return torch.from_numpy(rng.random(size=16)).float()


class NoiseAlone(Jittered):
    def __getitem__(self, i):
        return super().__getitem__(i) - self.x[i]


RIGHT = {
    "prefetch_safely": [with_errors],
    "well_fed": [
        loader(),
        loader(num_workers=26),
        loader(**MIXED),
    ],
    "jitter": [ByGenerator],
}

WRONG = {
    "prefetch_safely": [
        (of_the_lesson, "a batch may be None"),
        (loses_errors, "the loop waits for ever"),
        (ends_quietly, "as if that were all"),
        (unbounded, "bound the queue"),
        (one_ahead, "batches are loaded, not 3"),
        (in_turns, "nothing overlaps"),
        (error_overtakes, "wait for its turn"),
    ],
    "well_fed": [
        (loader(num_workers=19), "19 workers load 1583 items a second"),
        (loader(num_workers=4), "cores do not limit"),
        (loader(num_workers=12), "12 workers load 1000 items a second, not 1600"),
        (loader(num_workers=0, **NO_WORKERS), "each step waits 64 times 12 ms"),
        (loader(prefetch_factor=2), "are 40 batches in flight, 385 MB"),
        (loader(num_workers=27), "27 batches in flight, 260 MB: there is room for 256"),
        (loader(persistent_workers=False), "each of the 90 epochs starts new workers"),
        (loader(pin_memory=False), "a copy from ordinary memory stops the loop"),
        (loader(shuffle=False), "the same order in each epoch"),
        (loader(batch_size=32), "a batch has 64 images, and yours 32"),
        (20, "give the loader itself"),
    ],
    "jitter": [
        (OwnGenerator, "two items of an epoch have the same noise"),
        (
            other(Jittered, starts_from=lambda self, i: [self.seed, i]),
            "has the noise of the first",
        ),
        (
            other(Jittered, starts_from=lambda self, i: [self.seed, self.epoch]),
            "two items have the same noise",
        ),
        (
            other(Jittered, noise=lambda self, rng: torch.randn(16)),
            "the noise is not that of none",
        ),
        (
            other(Jittered, starts_from=lambda self, i: [self.epoch, i]),
            "another seed has the same noise",
        ),
        (other(Jittered, noise=lambda self, rng: 0), "there is no noise"),
        (
            other(Jittered, starts_from=lambda self, i: self.seed + self.epoch + i),
            "do not add",
        ),
        (
            other(Jittered, noise=lambda self, rng: float(rng.normal())),
            "noise of its own",
        ),
        (NoiseAlone, "plus the noise"),
        (other(Jittered, noise=lambda self, rng: rng.normal(size=16)), "torch.float64"),
        (Uniform, "should be normal"),
    ],
}
