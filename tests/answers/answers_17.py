"""Answers to the exercises of lesson 17."""

import math

import numpy as np
import torch


def ring_of_machines(parameters, machines, each):
    return 2 * (machines - 1) / machines * 4 * parameters


def all_rings(parameters, machines, each):
    part = 4 * parameters / each
    return round(each * 2 * part * (machines - 1) / machines)


def tokens(gpus, gigabit, flops):
    return flops * (gpus - 1) / gpus / (gigabit * 1e9 / 8)


def tokens_up(gpus, gigabit, flops):
    return math.ceil(tokens(gpus, gigabit, flops))


def tokens_of_the_lesson(gpus, gigabit, flops):
    return tokens(gpus, gigabit, flops) * (8192 * 1.06 / 1.10) / tokens(64, 400, 4e14)


RIGHT = {
    "fewest_machines": [
        lambda: (4, 6),
        lambda: (np.int64(4), torch.tensor(6)),
        lambda: (4.0, np.float32(6)),
    ],
    "hybrid_bytes": [lambda: (ring_of_machines,), lambda: (all_rings,)],
    "tokens_to_hide": [
        lambda: (tokens,),
        lambda: (tokens_up,),
        lambda: (lambda g, n, f: round(tokens(g, n, f), -1),),
        lambda: (tokens_of_the_lesson,),
    ],
}
WRONG = {
    "fewest_machines": [
        (lambda: (3, 6), "whole for a moment"),
        (lambda: (32, 48), "of eight GPUs each"),
        (lambda: (2, 6), "85.6 GB"),
        (lambda: (5, 6), "fewer are as well"),
        (lambda: (4, 4), "three times the activations"),
        (lambda: (4, 5), "61.2 GB"),
        (lambda: (3.5, 6), "round up"),
        (lambda: ("4", 6), "give a number, not '4'"),
        (lambda: (True, 6), "not a bool"),
        (lambda: (0, 6), "at least one machine"),
        (lambda: (4, -1), "at least one machine"),
        (lambda: (math.inf, 6), "not inf"),
        (lambda: (4, math.nan), "not nan"),
        (lambda: (torch.ones(2), 6), "not a Tensor"),
    ],
    "hybrid_bytes": [
        (lambda: (lambda p, m, e: ring_of_machines(p, m, e) / e,), "one GPU's part"),
        (lambda: (lambda p, m, e: 4 * p,), "2 (n - 1) / n"),
        (lambda: (lambda p, m, e: 8 * p,), "not twice the whole"),
        (lambda: (lambda p, m, e: 8 * p * (m * e - 1) / (m * e),), "one GPU of each"),
        (lambda: (lambda p, m, e: ring_of_machines(p, m, e) / 2,), "4 bytes"),
        (lambda: (lambda p, m, e: ring_of_machines(p, m, e) + 4 * p,), "gathered"),
        (lambda: (lambda p, m, e: ring_of_machines(p, m, e) * e,), "a part of the"),
        (lambda: (lambda p, m, e: 8 * p * (m - 1) / e,), "carries 2 (m - 1) / m of it"),
        (lambda: (lambda p, m, e: 8 * p * (m - 1),), "of one machine"),
        (
            lambda: (lambda p, m, e: 8 * p * (m * e - 1) / (m * e) / e,),
            "part in a ring through all",
        ),
        (lambda: (lambda p, m, e: 5.5 * p,), "how many such rings"),
        (lambda: (lambda p, m, e: "many",), "give a number, not 'many'"),
        (lambda: (lambda p, m, e: 1 / 0,), "ZeroDivisionError"),
    ],
    "tokens_to_hide": [
        (lambda: (lambda g, n, f: tokens(g, n, f) / 8,), "8 bits"),
        (lambda: (lambda g, n, f: tokens(g, n, f) * 8,), "the ring once"),
        (lambda: (lambda g, n, f: tokens(g, n, f) / 64,), "of the whole machine"),
        (lambda: (lambda g, n, f: f / (n * 1e9 / 8),), "(n - 1) / n of a message"),
        (
            lambda: (lambda g, n, f: f * (g - 8) / g / (n * 1e9 / 8),),
            "not one of each machine",
        ),
        (lambda: (lambda g, n, f: tokens(g, n, f) * 4 / 3,), "computed again"),
        (lambda: (lambda g, n, f: tokens(g, n, f) * g,), "not of all"),
        (lambda: (lambda g, n, f: tokens(g, n, f) * 1e9,), "10⁹ bits"),
        (lambda: (lambda g, n, f: 8192,), "what cancels"),
        (lambda: (lambda g, n, f: [1],), "not a list"),
    ],
}
