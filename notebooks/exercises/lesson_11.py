"""The exercises of lesson 11: a loader for a job, random numbers, a loading thread."""

import gc
import threading
import time
import warnings

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, SequentialSampler, TensorDataset

from exercises.counted import MB
from exercises.exercise import NotYet, Wrong, exercise, run, solution
from exercises.results import equal, near

PATIENCE = 5  # seconds


_BATCH = 64 * 3 * 224 * 224 / MB
_ROOM = 256  # MB of /dev/shm
_WORKERS = {
    0: "without workers, each step waits 64 times 12 ms",
    1: "one worker loads 83 items a second, and the GPU takes 1600",
    4: "items wait for the network: cores do not limit them",
    19: "19 workers load 1583 items a second, and the GPU takes 1600",
}


@exercise(
    "11.1",
    hints=(
        "The formula is under *How many workers*, and *What is in flight* says how "
        "many batches lie in shared memory. Does a worker that waits for the network "
        "need a core?",
        "A worker needs 64 times 12 ms for a batch. A batch has 64 times 3 * 224 * 224 "
        "bytes: how many of them have room? Workers times `prefetch_factor` must not "
        "be more. Then: who starts workers again, and what lets a copy run beside "
        "the loop?",
    ),
)
def well_fed(loader) -> None:
    """A loader: at least 19.2 workers, at most 26 batches of 9.63 MB in flight."""
    if not isinstance(loader, DataLoader):
        raise Wrong("give the loader itself, a DataLoader")
    if loader.batch_size != 64:
        raise Wrong(f"a batch has 64 images, and yours {loader.batch_size}")
    if isinstance(loader.sampler, SequentialSampler):
        raise Wrong("the images come in the same order in each epoch")
    workers = loader.num_workers
    if workers < 20:
        few = f"{workers} workers load {workers / 0.012:.0f} items a second, not 1600"
        raise Wrong(_WORKERS.get(workers, few))
    if workers * loader.prefetch_factor * _BATCH > _ROOM:
        count = workers * loader.prefetch_factor
        raise Wrong(
            f"{workers} workers times prefetch_factor {loader.prefetch_factor} are "
            f"{count} batches in flight, {count * _BATCH:.0f} MB: there is room for "
            f"{_ROOM}"
        )
    if not loader.persistent_workers:
        raise Wrong("each of the 90 epochs starts new workers, which takes seconds")
    if not loader.pin_memory:
        raise Wrong("a copy from ordinary memory stops the loop: pin the batches")


@solution("11.1", data=lambda: TensorDataset(torch.zeros(2048, 64)))
def solution_1(data):
    """A worker waits 12 ms for each item, and the GPU takes 64 items every 40 ms.

    The time to load a batch, 64 times 12 ms, divided by the time of a step is 19.2. So
    20 workers are needed. The four cores do not matter, because a worker that waits for
    the network needs no core.

    A batch has 64 times 150,528 bytes, 9.63 MB, and 26 of them fit into 256 MB. By
    default 20 workers would have 40 batches in flight, 385 MB. With `prefetch_factor=1`
    there are 20. A worker then gets its next batch when the loop takes its last one,
    which is every 20 steps or 800 ms, and it needs 768. 25 workers have 241 MB in
    flight and 1,000 ms, which leaves time for slow items.
    """
    loader = DataLoader(
        data,
        batch_size=64,
        shuffle=True,
        num_workers=20,
        prefetch_factor=1,
        persistent_workers=True,
        pin_memory=True,
    )
    return loader


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
        import queue
        import threading

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
