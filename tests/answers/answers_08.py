"""Answers to the exercises of lesson 08: right ones, and typical mistakes."""

import queue
import threading
import time

import numpy as np
import torch
from torch.utils.data import Dataset

# -- a thread that loads ahead ---------------------------------------------------------

END = object()


def with_errors(batches, depth):
    box = queue.Queue(depth)

    def fill():
        try:
            for batch in batches:
                box.put((batch, None))
            box.put((END, None))
        except Exception as error:
            box.put((END, error))

    threading.Thread(target=fill, daemon=True).start()
    while True:
        batch, error = box.get()
        if error is not None:
            raise error
        if batch is END:
            return
        yield batch


def of_the_lesson(batches, depth):
    box = queue.Queue(depth)

    def fill():
        for batch in batches:
            box.put(batch)
        box.put(None)

    threading.Thread(target=fill, daemon=True).start()
    while (batch := box.get()) is not None:
        yield batch


def loses_errors(batches, depth):
    box = queue.Queue(depth)

    def fill():
        for batch in batches:
            box.put(batch)
        box.put(END)

    threading.Thread(target=fill, daemon=True).start()
    while (batch := box.get()) is not END:
        yield batch


def ends_quietly(batches, depth):
    box = queue.Queue(depth)

    def fill():
        try:
            for batch in batches:
                box.put(batch)
        except Exception:
            pass
        finally:
            box.put(END)

    threading.Thread(target=fill, daemon=True).start()
    while (batch := box.get()) is not END:
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
    def __init__(self, x, seed):
        self.x, self.seed, self.epoch = x, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        rng = np.random.default_rng([self.seed, self.epoch, i])
        return self.x[i] + torch.from_numpy(rng.normal(size=16)).float()


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
        return self.x[i] + torch.from_numpy(self.rng.normal(size=16)).float()


class NoEpoch(Jittered):
    def __getitem__(self, i):
        rng = np.random.default_rng([self.seed, i])
        return self.x[i] + torch.from_numpy(rng.normal(size=16)).float()


class NoItem(Jittered):
    def __getitem__(self, i):
        rng = np.random.default_rng([self.seed, self.epoch])
        return self.x[i] + torch.from_numpy(rng.normal(size=16)).float()


class FromTorch(Jittered):
    def __getitem__(self, i):
        return self.x[i] + torch.randn(16)


class NoSeed(Jittered):
    def __getitem__(self, i):
        rng = np.random.default_rng([self.epoch, i])
        return self.x[i] + torch.from_numpy(rng.normal(size=16)).float()


class AddsThem(Jittered):
    def __getitem__(self, i):
        rng = np.random.default_rng(self.seed + self.epoch + i)
        return self.x[i] + torch.from_numpy(rng.normal(size=16)).float()


class OneNumber(Jittered):
    def __getitem__(self, i):
        rng = np.random.default_rng([self.seed, self.epoch, i])
        return self.x[i] + float(rng.normal())


class NoiseAlone(Jittered):
    def __getitem__(self, i):
        rng = np.random.default_rng([self.seed, self.epoch, i])
        return torch.from_numpy(rng.normal(size=16)).float()


class InFloat64(Jittered):
    def __getitem__(self, i):
        rng = np.random.default_rng([self.seed, self.epoch, i])
        return self.x[i] + rng.normal(size=16)


class Uniform(Jittered):
    def __getitem__(self, i):
        rng = np.random.default_rng([self.seed, self.epoch, i])
        return self.x[i] + torch.from_numpy(rng.random(size=16)).float()


class NoNoise(Jittered):
    def __getitem__(self, i):
        return self.x[i]


RIGHT = {
    "prefetch_safely": [lambda: (with_errors,)],
    "feeding": [
        lambda: (20, 40, 385.4),
        lambda: (np.int64(20), torch.tensor(40), np.float64(385)),
    ],
    "jitter": [lambda: (Jittered,), lambda: (ByGenerator,)],
}
WRONG = {
    "prefetch_safely": [
        (lambda: (of_the_lesson,), "a batch may be None"),
        (lambda: (loses_errors,), "the loop waits for ever"),
        (lambda: (ends_quietly,), "as if that were all"),
        (lambda: (unbounded,), "bound the queue"),
        (lambda: (one_ahead,), "batches are loaded, not 3"),
        (lambda: (in_turns,), "nothing overlaps"),
        (lambda: (error_overtakes,), "wait for its turn"),
    ],
    "feeding": [
        (lambda: (19, 40, 385.4), "1583 items a second"),
        (lambda: (4, 40, 385.4), "cores do not limit"),
        (lambda: (20, 2, 19.3), "of each worker"),
        (lambda: (20, 40, 1541.4), "one byte, not four"),
        (lambda: (20, 40, 9.6), "how many are in flight"),
        (lambda: (20, 40, 367.5), "in MiB"),
        (lambda: ("20", 40, 385), "workers: give a number, not '20'"),
        (lambda: (None, 40, 385), "workers: give a number, not a NoneType"),
    ],
    "jitter": [
        (lambda: (OwnGenerator,), "two items of an epoch have the same noise"),
        (lambda: (NoEpoch,), "has the noise of the first"),
        (lambda: (NoItem,), "two items have the same noise"),
        (lambda: (FromTorch,), "the noise is not that of none"),
        (lambda: (NoSeed,), "another seed has the same noise"),
        (lambda: (NoNoise,), "there is no noise"),
        (lambda: (AddsThem,), "do not add"),
        (lambda: (OneNumber,), "noise of its own"),
        (lambda: (NoiseAlone,), "plus the noise"),
        (lambda: (InFloat64,), "torch.float64"),
        (lambda: (Uniform,), "should be normal"),
    ],
}
