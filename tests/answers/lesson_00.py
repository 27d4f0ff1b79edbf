"""Answers to the exercises of lesson 00: right ones, and planted wrong ones."""

import torch

from exercises.lesson_00 import IMAGES, MODEL, SCORES


def in_turn(x, n):
    return [piece.to(f"cuda:{i}") for i, piece in enumerate(x.tensor_split(n))]


def all_on_the_first(x, n):
    return [piece.to("cuda") for piece in x.tensor_split(n)]


def too_few(x, n):
    return [piece.to(i) for i, piece in enumerate(x.chunk(n - 1))]


def chunked(x, n):
    return [piece.to(i) for i, piece in enumerate(x.chunk(n))]


def not_moved(x, n):
    return x.tensor_split(n)


def rest_dropped(x, n):
    rows = len(x) // n
    return [x[rows * i : rows * (i + 1)].to(i) for i in range(n)]


def raises(x, n):
    return [x.to(n)]


def tries_all(model, compute, gpus):
    times = [count * model + compute / count for count in range(1, gpus + 1)]
    return times.index(min(times)) + 1


def always_all(model, compute, gpus):
    return gpus


def off_by_one(model, compute, gpus):
    return tries_all(model, compute, gpus) - 1


def only_the_root(model, compute, gpus):
    return (compute / model) ** 0.5 if model else gpus


def root_rounded_down(model, compute, gpus):
    return min(gpus, max(1, int((compute / model) ** 0.5))) if model else gpus


def root_rounded(model, compute, gpus):
    return min(gpus, max(1, round((compute / model) ** 0.5))) if model else gpus


def the_time(model, compute, gpus):
    return min(count * model + compute / count for count in range(1, gpus + 1))


def divides_both(model, compute, gpus):
    times = [(model + compute) / count for count in range(1, gpus + 1)]
    return times.index(min(times)) + 1


RIGHT = {
    "copied_bytes": [IMAGES + 2 * MODEL + SCORES],
    "spread": [in_turn],
    "best_number": [tries_all],
}

WRONG = {
    "copied_bytes": [
        (IMAGES + SCORES, "goes to each GPU"),
        (IMAGES + 2 * MODEL, "come back"),
        (IMAGES + MODEL + SCORES, "its own copy"),
        (IMAGES + 4 * MODEL + SCORES, "there are two"),
        (2 * (IMAGES + MODEL + SCORES), "only its part"),
        ((IMAGES + 2 * MODEL + SCORES) // 4, "a float32 has 4 bytes"),
        (17, "count the images once"),
        ("many", "give a number"),
    ],
    "spread": [
        (all_on_the_first, "not on cuda:1"),
        (too_few, "need 4 pieces"),
        (chunked, "need 4 pieces, not 3"),
        (not_moved, "is on cpu"),
        (rest_dropped, "put together"),
        (raises, "AcceleratorError"),
        (lambda x, n: list(torch.zeros(n)), "is on cpu"),
    ],
    "best_number": [
        (always_all, "8 take 4.58 s, but 5 take 4.20 s"),
        (off_by_one, "4 take 4.35 s, but 5 take 4.20 s"),
        (only_the_root, "not a number from 1 to 8"),
        (root_rounded_down, "2 take 16.00 s, but 3 take 15.67 s"),
        (root_rounded, "2 take 5.05 s, but 3 take 5.03 s"),
        (the_time, "that is the time"),
        (divides_both, "but 5 take"),
        (lambda model, compute, gpus: "5", "give a number"),
        (lambda model, compute, gpus: gpus + 1, "from 1 to 8"),
    ],
}
