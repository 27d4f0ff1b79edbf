"""Answers to the exercises of lesson 23: right ones, and planted wrong ones."""

from itertools import permutations
from math import prod

from exercises.lesson_23 import fitting, leaving, place_of, seconds


def reader(*axes):
    """Readers along these axes, numbered from the first to the last."""

    def reads(sizes, rank):
        readers, which, place = 1, 0, place_of(sizes, rank)
        for name in sizes:
            if name in axes:
                readers, which = (
                    readers * sizes[name],
                    which * sizes[name] + place[name],
                )
        return readers, which

    return reads


def too_many(sizes, rank):
    return prod(sizes.values()), reader("dp", "replicate", "shard")(sizes, rank)[1]


def rows_first(sizes, rank):
    """As if neighbours were on the first axis."""
    return reader("dp", "replicate", "shard")(dict(reversed(sizes.items())), rank)


def last_rank(sizes, rank):
    readers, which = reader("dp", "replicate", "shard")(sizes, rank)
    return readers, which + 1


def by_all_orders(sizes, sent, gpus):
    def total(order):
        return sum(sent[name] for name in leaving(order, sizes, gpus))

    return list(min(permutations(sizes), key=total))


def fewest_axes_outside(sizes, sent, gpus):
    return min(permutations(sizes), key=lambda order: len(leaving(order, sizes, gpus)))


def tp_inside(sizes, sent, gpus):
    rest = {name: sizes[name] for name in sizes if name != "tp"}
    return *by_all_orders(rest, sent, gpus // sizes["tp"] or 1), "tp"


def fastest(parameters, blocks, width, tokens, memory):
    fit = fitting(parameters, memory)
    return min(fit, key=lambda tp: seconds(parameters, blocks, width, tokens, tp))


def without_memory(parameters, blocks, width, tokens, memory):
    return fastest(parameters, blocks, width, tokens, 1e15)


def smallest_that_fits(parameters, blocks, width, tokens, memory):
    return fitting(parameters, memory)[0]


def two_all_reduces(parameters, blocks, width, tokens, memory):
    return fastest(parameters, blocks / 2, width, tokens, memory)


def all_weights(parameters, blocks, width, tokens, memory):
    def time(tp):
        rest = seconds(0, blocks, width, tokens, tp)
        return rest + seconds(parameters * tp, 0, width, tokens, tp)

    return min(fitting(parameters, memory), key=time)


def network_for_all(parameters, blocks, width, tokens, memory):
    return fastest(parameters, blocks * 200 / 3, width, tokens, memory)


def no_room_to_spare(parameters, blocks, width, tokens, memory):
    return fastest(parameters, blocks, width, tokens, memory - 1)


def all_tokens(parameters, blocks, width, tokens, memory):
    def time(tp):
        return seconds(parameters, blocks, width, tokens * 8 // tp, tp)

    return min(fitting(parameters, memory), key=time)


RIGHT = {
    "reads": [reader("dp", "replicate", "shard")],
    "place_axes": [by_all_orders],
    "choose_tp": [fastest],
}

WRONG = {
    "reads": [
        (lambda sizes, rank: (prod(sizes.values()), rank), "differ along tp only"),
        (reader("dp"), "get the same samples"),
        (reader("dp", "replicate"), "get the same samples"),
        (reader("dp", "replicate", "shard", "pp"), "differ along pp only"),
        (reader("dp", "replicate", "shard", "cp"), "differ along cp only"),
        (reader("tp"), "differ along tp only"),
        (rows_first, "differ along tp only"),
        (lambda sizes, rank: (1, 0), "get the same samples"),
        (too_many, "a step takes 2 of 8 parts of the batch"),
        (last_rank, "there is no rank 2"),
        (lambda sizes, rank: rank, "return two numbers"),
        (3, "give a function"),
    ],
    "place_axes": [
        (
            lambda sizes, sent, gpus: by_all_orders(sizes, sent, gpus)[::-1],
            "neighbours are on the last axis",
        ),
        (lambda sizes, sent, gpus: tuple(sorted(sizes, key=sent.get)), "11 of"),
        (fewest_axes_outside, "is possible"),
        (tp_inside, "is possible"),
        (lambda sizes, sent, gpus: list(sizes), "is possible"),
        (lambda sizes, sent, gpus: list(sizes)[1:], "each name once"),
        (
            lambda sizes, sent, gpus: by_all_orders(sizes, sent, gpus)[-1],
            "return a tuple of names",
        ),
    ],
    "choose_tp": [
        (without_memory, "a rank stores"),
        (lambda parameters, blocks, width, tokens, memory: 4, "tp = 4"),
        (smallest_that_fits, "s of messages"),
        (lambda parameters, blocks, width, tokens, memory: 8, "tp = 8 takes"),
        (all_tokens, "s of messages"),
        (two_all_reduces, "s of messages"),
        (all_weights, "s of messages"),
        (network_for_all, "s of messages"),
        (no_room_to_spare, "s of messages"),
    ],
}
