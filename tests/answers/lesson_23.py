"""Answers to the exercises of lesson 23: right ones, and planted wrong ones."""

from exercises.lesson_23 import fitting, seconds


def by_remainder(rank, copies, shards):
    return [r for r in range(copies * shards) if r % shards == rank % shards]


def its_row(rank, copies, shards):
    first = rank // shards * shards
    return list(range(first, first + shards))


def the_others(rank, copies, shards):
    return [r for r in by_remainder(rank, copies, shards) if r != rank]


def column_first(rank, copies, shards):
    return [r for r in range(copies * shards) if r % copies == rank % copies]


def in_short(nbytes, nodes, gpus):
    n = nodes * gpus
    return 3 * nbytes * (n - 1) / n, 2 * nbytes * (nodes - 1) / nodes


def with_ddp(nbytes, nodes, gpus):
    n = nodes * gpus
    return 2 * nbytes * (n - 1) / n, in_short(nbytes, nodes, gpus)[1]


def of_one_rank(nbytes, nodes, gpus):
    fsdp, hsdp = in_short(nbytes, nodes, gpus)
    return fsdp, hsdp / gpus


def all_join(nbytes, nodes, gpus):
    n = nodes * gpus
    return in_short(nbytes, nodes, gpus)[0], 2 * nbytes * (n - 1) / n


def one_number(nbytes, nodes, gpus):
    return in_short(nbytes, nodes, gpus)[0]


def fastest(parameters, blocks, width, tokens, memory):
    fit = fitting(parameters, memory)
    return min(fit, key=lambda tp: seconds(parameters, blocks, width, tokens, tp))


def without_memory(parameters, blocks, width, tokens, memory):
    return fastest(parameters, blocks, width, tokens, 1e15)


def always_a_node(parameters, blocks, width, tokens, memory):
    return 4


def smallest_that_fits(parameters, blocks, width, tokens, memory):
    return fitting(parameters, memory)[0]


def largest(parameters, blocks, width, tokens, memory):
    return 8


def two_all_reduces(parameters, blocks, width, tokens, memory):
    return fastest(parameters, blocks / 2, width, tokens, memory)


def no_room_to_spare(parameters, blocks, width, tokens, memory):
    return fastest(parameters, blocks, width, tokens, memory - 1)


def all_tokens(parameters, blocks, width, tokens, memory):
    def time(tp):
        return seconds(parameters, blocks, width, tokens * 8 // tp, tp)

    return min(fitting(parameters, memory), key=time)


RIGHT = {
    "same_shard": [by_remainder],
    "network_bytes": [in_short],
    "choose_tp": [fastest],
}

WRONG = {
    "same_shard": [
        (its_row, "is its row"),
        (the_others, "the rank itself"),
        (column_first, "not"),
        (3, "give a function"),
    ],
    "network_bytes": [
        (with_ddp, "DDP's all-reduce"),
        (of_one_rank, "that is one rank"),
        (all_join, "one rank of each node"),
        (one_number, "return two numbers"),
    ],
    "choose_tp": [
        (without_memory, "a rank stores"),
        (always_a_node, "tp = 4"),
        (smallest_that_fits, "s of messages"),
        (largest, "tp = 8 takes"),
        (all_tokens, "s of messages"),
        (two_all_reduces, "s of messages"),
        (no_room_to_spare, "s of messages"),
    ],
}
