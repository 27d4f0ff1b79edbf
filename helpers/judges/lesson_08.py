"""Judges of the exercises of lesson 08."""

import gc
import math
import threading
import time
import warnings

import torch
from torch.utils.data import DataLoader, Dataset

from helpers.check import NotYet, Wrong, exercise, number

PATIENCE = 5  # seconds


@exercise("08.1")
def prefetch_safely(function) -> None:
    """A generator (batches, depth): a thread loads ahead, and errors arrive."""
    wanted = [0, None, 2, 3, 4]
    found, error = _drain(function, iter(wanted), 2)
    if isinstance(error, TypeError) and found is None:
        raise NotYet("your function returns nothing that a loop could use so far")
    if error is _HANGS and found == []:
        raise Wrong("nothing arrived within 5 seconds")
    if found == [0]:
        raise Wrong("a batch may be None: use another mark for the end")
    if error is _HANGS:
        raise Wrong(f"after {len(found)} of 5 batches the loop waits for ever")
    if error is not None:
        raise Wrong(f"your code raised {type(error).__name__}: {error}")
    if found != wanted:
        raise Wrong(f"of the batches {wanted} these arrived: {found}")
    _judge_ahead(function)

    def breaks():
        yield from range(3)
        raise ValueError("a broken file")

    found, error = _drain(function, breaks(), 2)
    if error is _HANGS:
        raise Wrong("loading raised an error, and the loop waits for ever")
    if error is None:
        raise Wrong(
            f"loading raised an error after 3 batches; the loop got {len(found)} and "
            "no error, as if that were all"
        )
    if not isinstance(error, ValueError) or "a broken file" not in str(error):
        raise Wrong(f"instead of the error of loading came {error!r}")
    if found != [0, 1, 2]:
        raise Wrong(
            f"3 batches were loaded before the error, and {len(found)} arrived: the "
            "error should wait for its turn"
        )


_HANGS = TimeoutError("hangs")


def _drain(function, batches, depth: int) -> tuple:
    """All that arrives in a loop, and the error that ends it."""
    found, errors = [], [_HANGS]

    def work():
        try:
            feed = iter(function(batches, depth))
        except TypeError as error:  # None is no iterable
            errors[:] = [error, None]
            return
        try:
            for batch in feed:
                found.append(batch)
        except BaseException as error:
            errors[:] = [error]
        else:
            errors[:] = [None]

    thread = threading.Thread(target=work, daemon=True)
    hook, threading.excepthook = threading.excepthook, lambda args: None
    try:  # a thread of the learner that dies should say nothing here
        thread.start()
        thread.join(PATIENCE)
        time.sleep(0.05)
    finally:
        threading.excepthook = hook
    return (None if len(errors) == 2 else found), errors[0]


def _judge_ahead(function) -> None:
    made = []

    def count():
        for i in range(20):
            made.append(threading.get_ident())
            yield i

    feed = iter(function(count(), 3))
    next(feed)
    for _ in range(100):  # up to two seconds
        time.sleep(0.02)
        if len(made) > 3:
            break
    time.sleep(0.1)
    ahead = len(made) - 1
    for _ in feed:
        pass
    if threading.get_ident() in made:
        raise Wrong(
            "the batches are loaded in the thread of the loop: nothing overlaps"
        )
    if ahead < 3:
        raise Wrong(f"while the loop is busy, {ahead} batches are loaded, not 3")
    if ahead > 4:  # three in the queue, and one in the thread's hand
        raise Wrong(
            f"with depth=3, {ahead} batches were loaded while the loop used the first: "
            "bound the queue, or a slow loop fills the memory"
        )


@exercise("08.2")
def feeding(workers, in_flight, megabytes) -> None:
    """0.012 s an item, 64 items in 0.04 s: 19.2 workers; 40 batches of 9.63 MB."""
    workers, in_flight = number(workers, "workers"), number(in_flight, "in flight")
    megabytes = number(megabytes, "megabytes")
    if workers != 20:
        if math.isclose(workers, 19.2, rel_tol=0.01):
            raise Wrong("19.2 is the bound; there are only whole workers")
        if workers == 19:
            raise Wrong("19 workers load 1583 items a second, and the GPU takes 1600")
        if workers == 1:
            raise Wrong("one worker loads 83 items a second, and the GPU takes 1600")
        if workers == 4:
            raise Wrong("items wait for the network: cores do not limit them")
        raise Wrong("workers: seconds to load an item times items a second")
    if in_flight != 40:
        if in_flight == 2:
            raise Wrong("prefetch_factor counts the batches of each worker")
        raise Wrong("in flight: workers times prefetch_factor")
    right = 40 * 64 * 3 * 224 * 224 / 1e6
    if math.isclose(megabytes, right, rel_tol=0.02):
        return
    if math.isclose(megabytes, right * 1e6 / 2**20, rel_tol=0.01):
        raise Wrong("that is in MiB; a megabyte is a million bytes here")
    if math.isclose(megabytes, 4 * right, rel_tol=0.05):
        raise Wrong("a uint8 takes one byte, not four")
    if math.isclose(megabytes, right / 64, rel_tol=0.05):
        raise Wrong("that is one item of each batch")
    if math.isclose(megabytes, right / 40, rel_tol=0.05):
        raise Wrong("that is one batch; how many are in flight?")
    raise Wrong(
        "megabytes: batches in flight, times 64 items, times 3 * 224 * 224 bytes"
    )


@exercise("08.3")
def jitter(dataset) -> None:
    """A class (x, seed) with set_epoch: noise by seed, epoch and item alone."""
    if not isinstance(dataset, type):
        raise Wrong("give the class itself, check.jitter(Jittered)")
    if getattr(dataset, "__getitem__", None) in (None, Dataset.__getitem__):
        raise NotYet("your class has no __getitem__ so far")
    x = torch.zeros(8, 16)
    first = _noise(dataset, x, 0, 0)
    if first.shape[:2] != (2, 8):
        raise Wrong(f"an epoch of 8 items became {tuple(first.shape[1:])}")
    if not first.any():
        raise Wrong("there is no noise")
    rows = [tuple(row) for row in first[0].tolist()]
    if len({*rows}) < 8:
        raise Wrong("in one epoch two items have the same noise")
    if torch.equal(first[0], first[1]):
        raise Wrong("without workers: the second epoch has the noise of the first")
    with_workers = _noise(dataset, x, 2, 0)
    if len({tuple(row) for row in with_workers[0].tolist()}) < 8:
        raise Wrong("with two workers, two items of an epoch have the same noise")
    if torch.equal(with_workers[0], with_workers[1]):
        raise Wrong("with two workers, the second epoch has the noise of the first")
    if not torch.equal(with_workers, first):
        raise Wrong("with two workers the noise is not that of none")
    if not torch.equal(_noise(dataset, x, 0, 0, backwards=True), first):
        raise Wrong("the noise of an item depends on which items came before it")
    other = _noise(dataset, x, 0, 1)
    if torch.equal(other, first):
        raise Wrong("another seed has the same noise")
    if first.shape[2:] != (16,) or first.dtype != torch.float32:
        raise Wrong(
            f"an item should be 16 numbers in float32, not {tuple(first.shape[2:])} in "
            f"{first.dtype}"
        )
    every = torch.cat([first, other]).flatten(0, 1)  # of two seeds and two epochs
    if len(every.unique(dim=0)) < len(every):
        raise Wrong(
            "an item has the noise of another in another epoch, or with another seed: "
            "do not add the three numbers, give all of them as the seed"
        )
    if min(len(row.unique()) for row in every) < 16:
        raise Wrong("each of an item's 16 numbers needs noise of its own")
    if abs(every.mean()) > 0.2 or not 0.8 < every.std() < 1.2:
        raise Wrong(
            "the noise should be normal, with mean 0 and standard deviation 1; yours "
            f"has {every.mean():.2f} and {every.std():.2f}"
        )
    x = torch.arange(128.0).view(8, 16)
    if not torch.allclose(_noise(dataset, x, 0, 0), x + first):
        raise Wrong("an item should be x[i] plus the noise, which does not depend on x")


def _noise(dataset, x, workers: int, seed: int, backwards: bool = False):
    """Two epochs, (2, 8, 16), in the order of the items."""
    gc.collect()
    made, epochs = dataset(x, seed), []
    order = list(range(len(x)))[:: -1 if backwards else 1]
    for epoch in range(2):
        made.set_epoch(epoch)
        with warnings.catch_warnings():  # of two workers on one core
            warnings.simplefilter("ignore")
            loader = DataLoader(
                made,
                batch_size=2,
                sampler=order,
                num_workers=workers,
                multiprocessing_context="fork" if workers else None,
            )
            rows = torch.cat([torch.as_tensor(batch) for batch in loader])
        epochs.append(rows.flip(0) if backwards else rows)
        del loader
    return torch.stack(epochs)
