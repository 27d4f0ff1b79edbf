"""Answers to the exercises of lesson 26: right ones, and planted wrong ones."""

import math

import numpy as np
import torch

from exercises.lesson_26 import STATES_ALONE, tokens


def days(tokens, gpus, rate):
    return tokens / gpus / rate / 86400


def tokens_up(gpus, gigabit, flops):
    return math.ceil(tokens(gpus, gigabit, flops))


RIGHT = {
    "training_days": [days],
    "machines_needed": [(np.int64(4), torch.tensor(7)), (float(4), np.float32(7))],
    "tokens_that_hide": [tokens, tokens_up, lambda g, n, f: round(tokens(g, n, f), -1)],
}

WRONG = {
    "training_days": [
        (lambda t, g, r: t / g / r, "in seconds"),
        (lambda t, g, r: t / g / r / 3600, "in hours"),
        (lambda t, g, r: t / r / 86400, "of one GPU"),
        (lambda t, g, r: t / g / g / r / 86400, "once"),
        (lambda t, g, r: t / g / r / 1440, "3600 seconds"),
        (lambda t, g, r: 54, "those of one second"),
        (lambda t, g, r: math.ceil(days(t, g, r)), "do not round"),
    ],
    "machines_needed": [
        ((STATES_ALONE, 7), "the states alone would fit"),
        ((32, 56), "of eight GPUs each"),
        ((5, 7), "fewer are as well"),
        ((4, 4), "three times the activations"),
        ((3.5, 7), "round up"),
        (("4", 7), "give a number, not '"),
        ((True, 7), "not a bool"),
        ((0, 7), "at least one machine"),
        ((4, math.nan), "not nan"),
        ((torch.ones(2), 7), "not a Tensor"),
    ],
    "tokens_that_hide": [
        (lambda g, n, f: tokens(g, n, f) / 8, "8 bits"),
        (lambda g, n, f: tokens(g, n, f) * 8, "the ring once"),
        (lambda g, n, f: tokens(g, n, f) / 64, "of the whole machine"),
        (lambda g, n, f: f / (n * 1e9 / 8), "(n - 1) / n of a message"),
        (lambda g, n, f: f * (g - 8) / g / (n * 1e9 / 8), "not one of each machine"),
        (lambda g, n, f: tokens(g, n, f) * 4 / 3, "computed again"),
        (lambda g, n, f: tokens(g, n, f) * g, "not of all"),
        (lambda g, n, f: tokens(g, n, f) * 1e9, "10⁹ bits"),
        (lambda g, n, f: 8192, "what cancels"),
        (lambda g, n, f: [1], "not a list"),
    ],
}
