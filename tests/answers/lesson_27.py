"""Answers to the exercises of lesson 27: right ones, and planted wrong ones."""

import math

import numpy as np

from exercises.lesson_27 import cheapest, days_of, fewest, tokens


def by_sorting(offers, tokens, days):
    """Another right way: the first of the sorted offers that is in time."""
    order = sorted(range(len(offers)), key=lambda i: offers[i][2] / offers[i][1])
    return np.int64(next(i for i in order if days_of(offers[i], tokens) <= days))


def least(of_an_offer, third=4 / 3):
    """The offer in time of which something is least."""

    def position(offers, tokens, days):
        limit = days * 4 / 3 / third
        there = [i for i, it in enumerate(offers) if days_of(it, tokens) <= limit]
        return min(there, key=lambda i: of_an_offer(*offers[i]))

    return position


def fewest_by_search(gpus, tp, pp, chunks, sequences, share):
    turns = 1
    while (pp - 1) / (turns * chunks) > share:
        turns += 1
    return np.int64(turns * sequences * gpus // tp // pp)


RIGHT = {
    "cheapest_offer": [cheapest, by_sorting, lambda *a: float(cheapest(*a))],
    "fewest_sequences": [fewest, fewest_by_search, lambda *a: float(fewest(*a))],
    "tokens_that_hide": [
        tokens,
        lambda gpus, gigabit, flops: math.ceil(tokens(gpus, gigabit, flops)),
        lambda g, n, f: round(tokens(g, n, f), -1),
    ],
}

WRONG = {
    "cheapest_offer": [
        (lambda o, t, d: cheapest(o, t, 1000), "that of 64 GPUs takes"),
        (
            least(lambda gpus, rate, price: price / rate, third=1),
            "with a third more than planned",
        ),
        (least(lambda gpus, rate, price: price), "what does a token cost"),
        (least(lambda gpus, rate, price: gpus * price), "what does a token cost"),
        (least(lambda gpus, rate, price: gpus), "what does a token cost"),
        (least(lambda gpus, rate, price: -rate), "what does a token cost"),
        (least(lambda gpus, rate, price: -gpus * rate), "what does a token cost"),
        (least(lambda gpus, rate, price: price / gpus), "what does a token cost"),
        (lambda o, t, d: cheapest(o, t, d) + 1, "costs"),
        (lambda o, t, d: o[cheapest(o, t, d)], "not a tuple"),
        (lambda o, t, d: -1, "from 0 on"),
    ],
    "fewest_sequences": [
        (lambda g, t, p, c, s, x: fewest(t * p, t, p, c, s, x), "of its own"),
        (lambda g, t, p, c, s, x: fewest(g, 1, p, c, s, x), "the same sequences"),
        (lambda g, t, p, c, s, x: fewest(g, 1, 1, c, s, x), "(pp - 1)"),
        (lambda g, t, p, c, s, x: fewest(g, t, p, c, 1, x), "several sequences"),
        (lambda g, t, p, c, s, x: fewest(g, t, p, 1, s, x), "parts of a stage"),
        (
            lambda g, t, p, c, s, x: (p - 1) / (x * c) * (g // (t * p)) * s,
            "round up",
        ),
        (
            lambda g, t, p, c, s, x: math.ceil(p / x / c) * (g // (t * p)) * s,
            "not pp",
        ),
        (lambda *a: fewest(*a) + 1, "begin with"),
        (lambda *a: str(fewest(*a)), "not '"),
    ],
    "tokens_that_hide": [
        (lambda g, n, f: tokens(g, n, f) / 8, "8 bits"),
        (lambda g, n, f: tokens(g, n, f) * 8, "a machine has eight"),
        (lambda g, n, f: tokens(g, n, f) * 64, "not once for each GPU"),
        (lambda g, n, f: f / (n * 1e9), "(n - 1) / n of a message"),
        (lambda g, n, f: f * (g - 8) / g / (n * 1e9), "not one of each machine"),
        (lambda g, n, f: tokens(g, n, f) * 4 / 3, "computed again"),
        (lambda g, n, f: tokens(g, n, f) * g, "not of all"),
        (lambda g, n, f: tokens(g, n, f) * 1e9, "10⁹ bits"),
        (lambda g, n, f: 8192, "what cancels"),
        (lambda g, n, f: [1], "not a list"),
    ],
}
