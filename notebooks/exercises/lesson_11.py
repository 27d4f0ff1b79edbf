"""The exercises of lesson 11: a thread that loads ahead, workers, random numbers."""

import gc
import queue
import threading
import time
import warnings

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from exercises.counted import MB, counted
from exercises.exercise import NotYet, Wrong, exercise, run, solution
from exercises.results import equal, near

PATIENCE = 5  # seconds


@exercise(
    "11.1",
    hints=(
        "The formula is under *How many workers*, and the default factor is under "
        "*What is in flight*. Does a worker that waits for the network need a core?",
        "The formula counts batches, and one image takes 12 ms: how long does a worker "
        "need for a batch of 64? The number of workers is a whole number, and "
        "`prefetch_factor` is meant for each worker. How many bytes does a picture in "
        "uint8 have?",
    ),
)
def feeding(workers, in_flight, megabytes) -> None:
    """0.012 s an item, 64 items in 0.04 s: 19.2 workers; 40 batches of 9.63 MB."""
    mistakes = {
        19.2: "19.2 is the bound; there are only whole workers",
        19: "19 workers load 1583 items a second, and the GPU takes 1600",
        1: "one worker loads 83 items a second, and the GPU takes 1600",
        4: "items wait for the network: cores do not limit them",
    }
    why = "the time to load a batch of 64, divided by the time of a step"
    counted(workers, 20, mistakes, why, what="workers")
    mistakes = {2: "prefetch_factor counts the batches of each worker"}
    why = "workers times prefetch_factor"
    counted(in_flight, 40, mistakes, why, what="in flight")
    right = 40 * 64 * 3 * 224 * 224 / MB
    mistakes = {
        4 * right: "a uint8 takes one byte, not four",
        right / 64: "that is one item of each batch",
        right / 40: "that is one batch; how many are in flight?",
    }
    why = "batches in flight, times 64 items, times 3 * 224 * 224 bytes"
    counted(megabytes, right, mistakes, why, what="megabytes", near=0.02, unit=MB)


@solution("11.1")
def solution_1():
    """A worker waits 12 ms for each item, and the GPU takes 64 items every 40 ms.

    The formula divides the time to load a batch, 64 times 12 ms, by the time of a step.
    The result is rounded up, because a fraction of a worker does not exist. The four
    cores do not matter, because a worker that waits for the network needs no core.

    By default each worker may have been asked for two batches, so the batches in flight
    are twice the workers. A uint8 is one byte.
    """
    import math

    seconds_to_load = 64 * 0.012
    seconds_of_a_step = 0.040
    workers = math.ceil(seconds_to_load / seconds_of_a_step)
    prefetch_factor = 2
    in_flight = workers * prefetch_factor
    bytes_per_batch = 64 * 3 * 224 * 224
    megabytes = in_flight * bytes_per_batch / 10**6
    return workers, in_flight, megabytes


@exercise(
    "11.2",
    hints=(
        "*The same random numbers twice* shows what happens to a generator that "
        "the data set keeps. When must a generator be made so that no earlier item "
        "has changed its state?",
        "The seed, the epoch and `i` must each change the noise, and no two "
        "combinations may have the same noise. Why is the sum of the three numbers "
        "a bad seed? Look also at the dtype of the numbers that NumPy draws.",
    ),
)
def jitter(dataset) -> None:
    """A class (x, seed) with set_epoch: noise by seed, epoch and item alone."""
    if not isinstance(dataset, type):
        raise Wrong("give the class itself, check.jitter(Jittered)")
    if getattr(dataset, "__getitem__", None) in (None, Dataset.__getitem__):
        raise NotYet("your class has no __getitem__ so far")
    x = torch.zeros(8, 16)
    first = run(_noise, dataset, x, 0, 0)
    if first.shape[:2] != (2, 8):
        raise Wrong(f"an epoch of 8 items became {tuple(first.shape[1:])}")
    if first.shape[2:] != (16,) or first.dtype != torch.float32:
        raise Wrong(
            f"an item should be 16 numbers in float32, not {tuple(first.shape[2:])} in "
            f"{first.dtype}"
        )
    if not first.any():
        raise Wrong("there is no noise")
    if len(first[0].unique(dim=0)) < 8:
        raise Wrong("in one epoch two items have the same noise")
    if torch.equal(first[0], first[1]):
        raise Wrong("without workers: the second epoch has the noise of the first")
    with_workers = run(_noise, dataset, x, 2, 0)
    if len(with_workers[0].unique(dim=0)) < 8:
        raise Wrong("with two workers, two items of an epoch have the same noise")
    if torch.equal(with_workers[0], with_workers[1]):
        raise Wrong("with two workers, the second epoch has the noise of the first")
    if not equal(with_workers, first):
        raise Wrong("with two workers the noise is not that of none")
    if not equal(run(_noise, dataset, x, 0, 0, True), first):
        raise Wrong("the noise of an item depends on which items came before it")
    other = run(_noise, dataset, x, 0, 1)
    if equal(other, first):
        raise Wrong("another seed has the same noise")
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
    if not near(run(_noise, dataset, x, 0, 0), x + first):
        raise Wrong("an item should be x[i] plus the noise, which does not depend on x")


@solution("11.2")
def solution_2():
    """Each item makes its own generator, from the seed, the epoch and `i`.

    A generator that the data set keeps has a state, which depends on the items that
    this process has drawn before. Each worker has a copy of that state. A generator
    that is made in `__getitem__` has no past, so neither the workers nor the order of
    the items can change the noise.

    All three numbers go in as a list. With their sum, item 1 of epoch 0 and item 0 of
    epoch 1 would have the same noise. NumPy draws float64, and `.float()` makes it
    float32.
    """

    class Jittered(Dataset):
        def __init__(self, x, seed):
            self.x = x
            self.seed = seed
            self.epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __len__(self):
            return len(self.x)

        def __getitem__(self, i):
            generator = np.random.default_rng([self.seed, self.epoch, i])
            noise = torch.from_numpy(generator.normal(size=16)).float()
            return self.x[i] + noise

    return Jittered


def _noise(dataset, x, workers: int, seed: int, backwards: bool = False):
    """Two epochs, (2, 8, 16), in the order of the items. Runs the learner's class."""
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


@exercise(
    "11.3",
    hints=(
        "Look at `fill`, the function that runs in the thread. What happens to an "
        "error that is raised there, and what does the loop find in the queue "
        "afterwards?",
        "The error must reach the loop after the batches that were loaded before "
        "it, so it has to go the same way as they do. No batch, not even `None`, "
        "may look like the mark for the end. What can you put into the queue "
        "together with each batch?",
    ),
)
def prefetch_safely(function) -> None:
    """A generator (batches, depth): a thread loads ahead, and errors arrive."""
    wanted = [0, None, 2, 3, 4]
    found, error = _drain(function, iter(wanted), 2)
    if isinstance(error, TypeError) and found is None:
        raise NotYet("your function returns nothing that a loop could use so far")
    if error is _HANGS and found == []:
        raise Wrong(f"nothing arrived within {PATIENCE} seconds")
    if repr(found) == "[0]":
        raise Wrong("a batch may be None: use another mark for the end")
    if error is _HANGS:
        raise Wrong(f"after {len(found)} of 5 batches the loop waits for ever")
    if error is not None:
        raise Wrong(f"your code raised {type(error).__name__}: {error}")
    if repr(found) != repr(wanted):
        raise Wrong(f"of the batches {wanted} these arrived: {found}")
    _check_ahead(function)

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


@solution("11.3")
def solution_3():
    """The queue carries batches, an error or the end, and each entry says which.

    An error in a thread ends only the thread, and the loop waits for ever. Here the
    thread catches the error and puts it into the queue, behind the batches that were
    loaded before it. The loop takes the entries in order, and raises the error when its
    turn comes.

    A batch may be `None`, because what kind of entry it is stands beside the batch and
    not in its place. The queue is bounded as before, so `put` waits while `depth`
    batches lie in it.
    """

    def prefetch(batches, depth):
        box = queue.Queue(depth)

        def fill():
            try:
                for batch in batches:
                    box.put(("batch", batch))
            except Exception as error:
                box.put(("error", error))
            else:
                box.put(("end", None))

        threading.Thread(target=fill, daemon=True).start()
        while True:
            kind, content = box.get()
            if kind == "error":
                raise content
            if kind == "end":
                return
            yield content

    return prefetch


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


def _check_ahead(function) -> None:
    """Another thread loads as many batches ahead as the depth says."""
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
