"""Answers to the exercises of lesson 14: right ones, and planted wrong ones."""

import copy
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.multiprocessing as mp

# -- a producer ------------------------------------------------------------------------


def makes_new_ones(queue, received, count=4):
    for i in range(count):
        queue.put(torch.full((3,), float(i)))


def then_waits(queue, received):
    makes_new_ones(queue, received)
    received.wait(30)  # no limit: longer than it is watched


def waits_between(queue, received):
    for i in range(4):
        queue.put(torch.full((3,), float(i)))
        received.wait(0.1)  # no limit: a pause
    received.wait()


def sends_one_memory(queue, received, pause=0):
    tensor = torch.zeros(3)
    for i in range(4):
        tensor.fill_(i)
        queue.put(tensor)
        if pause:
            received.wait(pause)
    received.wait()


def sends_arrays(queue, received):
    for i in range(4):
        queue.put(torch.full((3,), float(i)).numpy())
    received.wait()


def sends(count):
    def produce(queue, received):
        makes_new_ones(queue, received, count)
        received.wait()

    return produce


def sleeps(seconds):
    def produce(queue, received):
        makes_new_ones(queue, received)
        time.sleep(seconds)

    return produce


def waits_too_short(queue, received):
    makes_new_ones(queue, received)
    received.wait(0.6)  # no limit: longer than the slow consumer lets it alone


def ends_with_names(queue, received):
    mp.set_sharing_strategy("file_system")
    makes_new_ones(queue, received)


def dies(queue, received):
    os.kill(os.getpid(), signal.SIGKILL)


def never_ends(queue, received):
    makes_new_ones(queue, received)
    while True:
        received.wait()


def raises(queue, received):
    queue.puts(1)


# -- an accuracy -----------------------------------------------------------------------

fork = mp.get_context("fork")


def right_rows(model, x, y):
    torch.set_num_threads(1)
    with torch.no_grad():
        return int((model(x).argmax(1) == y).sum())


def in_a_pool(function, parts, method="fork"):
    with ProcessPoolExecutor(2, mp_context=mp.get_context(method)) as pool:
        return list(pool.map(function, *zip(*parts, strict=True)))


def in_four(*same, x, y):
    """What a worker is given besides its part of the rows."""
    return [(*same, x[i::4], y[i::4]) for i in range(4)]


def shared(model, x, y, method="fork"):
    model.share_memory()
    return sum(in_a_pool(right_rows, in_four(model, x=x, y=y), method)) / len(x)


def waits_for_ever(model, x, y):
    with fork.Pool(4) as pool:
        parts = in_four(model, x=x, y=y)
        return sum(pool.starmap(right_rows, parts, chunksize=1)) / len(x)


def inherited(model, x, y):
    def work(i, connection):
        connection.send(right_rows(model, x[i::4], y[i::4]))

    ends = []
    for i in range(4):
        here, there = fork.Pipe()
        fork.Process(target=work, args=(i, there)).start()
        there.close()  # the worker has the only end: after a kill, an EOFError
        ends.append(here)
    return sum(here.recv() for here in ends) / len(x)


def looks_at_no_exit_code(model, x, y):
    hits = torch.zeros(4).share_memory_()

    def work(i):
        hits[i] = right_rows(model, x[i::4], y[i::4])

    run_to_the_end(work)
    return hits.sum() / len(x)


def copied(model, x, y):
    torch.set_num_threads(1)  # the copy, too, would wait for threads of the parent
    return right_rows(copy.deepcopy(model), x, y)


def copied_in_workers(model, x, y):
    return sum(in_a_pool(copied, in_four(model, x=x, y=y))) / len(x)


def one_worker(model, x, y):
    with fork.Pool(1) as pool:
        return pool.apply(right_rows, (model, x, y)) / len(x)


def each_does_all(model, x, y):
    return sum(in_a_pool(right_rows, [(model, x, y)] * 4)) / 4 / len(x)


def mean_of_means(model, x, y):
    parts = list(zip([model] * 4, x.chunk(4), y.chunk(4), strict=True))
    found = in_a_pool(right_rows, parts)
    return sum(n / len(part[1]) for n, part in zip(found, parts, strict=True)) / 4


def run_to_the_end(work, *arguments):
    workers = [fork.Process(target=work, args=(i, *arguments)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def into_private(model, x, y):
    hits = torch.zeros(4)

    def work(i):
        hits[i] = right_rows(model, x[i::4], y[i::4])

    run_to_the_end(work)
    return hits.sum() / len(x)


def from_ended_workers(model, x, y):
    def work(i, queue):
        queue.put(torch.tensor(right_rows(model, x[i::4], y[i::4])))

    queue = fork.Queue()
    run_to_the_end(work, queue)
    return sum(queue.get() for _ in range(4)) / len(x)


# -- which memory ----------------------------------------------------------------------

SEEN = ("no", "no", "yes", "yes", "no", "no")


def but(number: int, answer) -> tuple:
    """The right answers, but for the one of that number."""
    return (*SEEN[: number - 1], answer, *SEEN[number:])


RIGHT = {
    "who_sees": [
        SEEN,
        (False, False, True, True, False, False),
    ],
    "delivers_all": [then_waits, waits_between],
    "parallel_accuracy": [
        shared,
        inherited,
        lambda model, x, y: shared(model, x, y, "spawn"),
    ],
}

WRONG = {
    "who_sees": [
        (but(1, "yes"), "number 1 is not yes: the fork moves"),
        (but(2, "yes"), "number 2 is not yes: an argument of a forked"),
        (but(3, "no"), "number 3 is not no: an argument of a spawned"),
        (but(4, "no"), "number 4 is not no: sending shares"),
        (but(5, "yes"), "number 5 is not yes: the clone"),
        (but(6, "yes"), "number 6 is not yes: `x + 1`"),
        (but(6, 1.5), 'answer "yes" or "no"'),
        ((["no"],) * 6, 'number 1: answer "yes" or "no"'),
        ((0, 0, 1, 1, 0, 0), 'number 1: answer "yes" or "no"'),
        (("no", "no"), "6 answers are asked for, not 2"),
    ],
    "delivers_all": [
        (sends_one_memory, ": `put` sends a handle to one memory"),
        (makes_new_ones, "cannot be asked for; with the default sharing"),
        (sends_arrays, "what arrives is a ndarray, not a tensor"),
        (sends(3), "3 tensors arrive"),
        (sends(5), "more than four"),
        (never_ends, "goes on after"),
        (raises, "your code raised AttributeError"),
        (sleeps(2), "cannot be asked for; with the default sharing"),
        (sleeps(60), "never asks `received`"),
        (waits_too_short, "it must wait for `received`"),
        (ends_with_names, "ends before its tensors are fetched"),
        (dies, "ended by signal 9"),
        (None, "give a function"),
    ],
    "parallel_accuracy": [
        (copied_in_workers, "MB of weights of their own"),
        (
            lambda model, x, y: right_rows(model, x, y) / len(x),
            "the notebook's own process computes",
        ),
        (one_worker, "that compute: 1"),
        (each_does_all, "44 rows of 11"),
        (mean_of_means, "add up right rows"),
        (lambda model, x, y: shared(model, x, y) * len(x), "divide by all rows"),
        (waits_for_ever, "killed, and after 4 s there is no error; a `Pool`"),
        (looks_at_no_exit_code, "one worker was killed, and you return"),
        (into_private, "memory of their own; share what they write"),
        (from_ended_workers, "send a number"),
        (lambda *_: "0.3", "give a number, not '0.3', a str"),
        (lambda *_: [0.3], "give a number, not a list"),
        (None, "give a function"),
    ],
}
