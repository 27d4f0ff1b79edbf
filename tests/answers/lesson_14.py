"""Answers to the exercises of lesson 14: right ones, and planted wrong ones."""

import copy
import os
import pickle
import signal
import time

import torch
import torch.multiprocessing as mp


def sends_clones(queue, received):
    tensor = torch.zeros(3)
    for i in range(4):
        tensor.fill_(i)
        queue.put(tensor.clone())
    received.wait()


def makes_new_ones(queue, received):
    for i in range(4):
        queue.put(torch.full((3,), float(i)))
    received.wait(30)


def sends_one_memory(queue, received):
    tensor = torch.zeros(3)
    for i in range(4):
        tensor.fill_(i)
        queue.put(tensor)
    received.wait()


def ends_early(queue, received):
    for i in range(4):
        queue.put(torch.full((3,), float(i)))


def sends_arrays(queue, received):
    for i in range(4):
        queue.put(torch.full((3,), float(i)).numpy())
    received.wait()


def sends_three(queue, received):
    for i in range(3):
        queue.put(torch.full((3,), float(i)))
    received.wait()


def sends_five(queue, received):
    for i in range(5):
        queue.put(torch.full((3,), float(i)))
    received.wait()


def waits_between(queue, received):
    for i in range(4):
        queue.put(torch.full((3,), float(i)))
        received.wait(0.1)
    received.wait()


def one_memory_slowly(queue, received):
    tensor = torch.zeros(3)
    for i in range(4):
        tensor.fill_(i)
        queue.put(tensor)
        received.wait(0.8)
    received.wait()


def sleeps(queue, received):
    makes_new_ones_for(queue)
    time.sleep(2)


def sleeps_on(queue, received):
    makes_new_ones_for(queue)
    time.sleep(60)


def waits_too_short(queue, received):
    makes_new_ones_for(queue)
    received.wait(0.6)  # longer than the slow consumer lets it alone


def makes_new_ones_for(queue):
    for i in range(4):
        queue.put(torch.full((3,), float(i)))


def ends_with_names(queue, received):
    mp.set_sharing_strategy("file_system")
    makes_new_ones_for(queue)


def dies(queue, received):
    os.kill(os.getpid(), signal.SIGKILL)


def never_ends(queue, received):
    sends_clones(queue, received)
    while True:
        received.wait()


def raises(queue, received):
    queue.puts(1)


def right_rows(model, x, y):
    torch.set_num_threads(1)
    with torch.no_grad():
        return int((model(x).argmax(1) == y).sum())


def shared(model, x, y, method="fork"):
    model.share_memory()
    with mp.get_context(method).Pool(4) as pool:
        parts = [(model, x[i::4], y[i::4]) for i in range(4)]
        return sum(pool.starmap(right_rows, parts, chunksize=1)) / len(x)


def inherited(model, x, y):
    def work(i, connection):
        connection.send(right_rows(model, x[i::4], y[i::4]))

    total = 0
    pipes = [mp.get_context("fork").Pipe() for _ in range(4)]
    for i, (_, there) in enumerate(pipes):
        mp.get_context("fork").Process(target=work, args=(i, there)).start()
    for here, _ in pipes:
        total += here.recv()
    return total / len(x)


def spawned(model, x, y):
    return shared(model, x, y, "spawn")


def from_bytes(state, model, x, y):
    model.load_state_dict(pickle.loads(state), assign=True)
    return right_rows(model, x, y)


def sent_by_value(model, x, y):
    state, empty = pickle.dumps(model.state_dict()), copy.copy(model)
    with mp.get_context("fork").Pool(4) as pool:
        parts = [(state, empty, x[i::4], y[i::4]) for i in range(4)]
        return sum(pool.starmap(from_bytes, parts, chunksize=1)) / len(x)


def copied(model, x, y):
    return right_rows(copy.deepcopy(model), x, y)


def copied_in_workers(model, x, y):
    with mp.get_context("fork").Pool(4) as pool:
        parts = [(model, x[i::4], y[i::4]) for i in range(4)]
        return sum(pool.starmap(copied, parts, chunksize=1)) / len(x)


def serial(model, x, y):
    return right_rows(model, x, y) / len(x)


def one_worker(model, x, y):
    with mp.get_context("fork").Pool(1) as pool:
        return pool.apply(right_rows, (model, x, y)) / len(x)


def each_does_all(model, x, y):
    with mp.get_context("fork").Pool(4) as pool:
        parts = [(model, x, y)] * 4
        return sum(pool.starmap(right_rows, parts, chunksize=1)) / 4 / len(x)


def mean_of_means(model, x, y):
    with mp.get_context("fork").Pool(4) as pool:
        parts = list(zip([model] * 4, x.chunk(4), y.chunk(4), strict=True))
        found = pool.starmap(right_rows, parts, chunksize=1)
    return sum(n / len(part[1]) for n, part in zip(found, parts, strict=True)) / 4


def not_divided(model, x, y):
    return shared(model, x, y) * len(x)


def into_private(model, x, y):
    hits = torch.zeros(4)

    def work(i):
        hits[i] = right_rows(model, x[i::4], y[i::4])

    workers = [mp.get_context("fork").Process(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return hits.sum() / len(x)


def from_ended_workers(model, x, y):
    def work(i, queue):
        queue.put(torch.tensor(right_rows(model, x[i::4], y[i::4])))

    queue = mp.get_context("fork").Queue()
    workers = [
        mp.get_context("fork").Process(target=work, args=(i, queue)) for i in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(queue.get() for _ in workers) / len(x)


RIGHT = {
    "who_sees": [
        ("no", "no", "yes", "yes", "no", "no"),
        (False, False, True, True, False, False),
    ],
    "delivers_all": [makes_new_ones, waits_between],
    "parallel_accuracy": [shared, inherited, spawned],
}

WRONG = {
    "who_sees": [
        (
            ("yes", "no", "yes", "yes", "no", "no"),
            "number 1 is not yes: the fork moves",
        ),
        (
            ("no", "yes", "yes", "yes", "no", "no"),
            "number 2 is not yes: an argument of a forked",
        ),
        (
            ("no", "no", "no", "yes", "no", "no"),
            "number 3 is not no: an argument of a spawned",
        ),
        (("no", "no", "yes", "no", "no", "no"), "number 4 is not no: sending shares"),
        (("no", "no", "yes", "yes", "yes", "no"), "number 5 is not yes: the clone"),
        (("no", "no", "yes", "yes", "no", "yes"), "number 6 is not yes: `x + 1`"),
        (("no", "no", "yes", "yes", "no", 1.5), 'answer "yes" or "no"'),
        ((["no"],) * 6, 'number 1: answer "yes" or "no"'),
        ((0, 0, 1, 1, 0, 0), 'number 1: answer "yes" or "no"'),
        (("no", "no"), "6 answers are asked for, not 2"),
    ],
    "delivers_all": [
        (sends_one_memory, "full of 3: `put` sends a handle"),
        (ends_early, "cannot be asked for; with the default sharing"),
        (sends_arrays, "what arrives is a ndarray, not a tensor"),
        (sends_three, "3 tensors arrive"),
        (sends_five, "more than four"),
        (never_ends, "goes on after"),
        (raises, "your code raised AttributeError"),
        (one_memory_slowly, "full of 3: `put` sends a handle"),
        (sleeps, "cannot be asked for; with the default sharing"),
        (sleeps_on, "never asks `received`"),
        (waits_too_short, "it must wait for `received`"),
        (ends_with_names, "ends before its tensors are fetched"),
        (dies, "ended by signal 9"),
        (None, "give a function"),
    ],
    "parallel_accuracy": [
        (sent_by_value, "MB of weights of their own"),
        (copied_in_workers, "MB of weights of their own"),
        (serial, "the notebook's own process computes"),
        (one_worker, "that compute: 1"),
        (each_does_all, "44 rows of 11"),
        (mean_of_means, "add up right rows"),
        (not_divided, "divide by all rows"),
        (into_private, "memory of their own; share what they write"),
        (from_ended_workers, "send a number"),
        (lambda *_: "0.3", "give a number, not '0.3', a str"),
        (lambda *_: [0.3], "give a number, not a list"),
        (None, "give a function"),
    ],
}
