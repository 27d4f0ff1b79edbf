"""Answers to the exercises of lesson 25: right ones, and planted wrong ones."""

import numpy as np

from exercises.lesson_25 import ranks_of, slow


def by_words(log):
    found = set()
    for line in log.splitlines():
        if "via NET/" in line and "GDRDMA" not in line:
            sender, receiver = line.split(" : ")[1].split(" -> ")
            mine = sender if "[send]" in line else receiver
            found.add(int(mine.split("[")[0]))
    return sorted(found)


def by_table(agents, nnodes, key=("endpoint", "id"), gpus=None, by=str):
    found = {}
    for agent in agents:
        mine = [a for a in agents if all(a[word] == agent[word] for word in key)]
        before = [a for a in mine if by(a["address"]) < by(agent["address"])]
        if len(mine) >= nnodes:
            found[agent["address"]] = sum(gpus or a["gpus"] for a in before)
    return found


def in_the_order_of_arrival(agents, nnodes):
    found, rank = {}, 0
    for agent in agents:
        found[agent["address"]] = rank
        rank += agent["gpus"]
    return found


def in_slow_pairs(pairs, least):
    """Not whether it is fast elsewhere."""
    slow_pairs = [set(pair) for pair, speed in pairs.items() if speed < least]
    left = set.intersection(*slow_pairs) if slow_pairs else set()
    return min(left) if left else -1


def by_clearing(pairs, least):
    good = {n for pair, speed in pairs.items() if speed >= least for n in pair}
    bad = [set(pair) - good for pair, speed in pairs.items() if speed < least]
    left = set.intersection(*bad) if bad else set()
    return left.pop() if len(left) == 1 else -1


RIGHT = {
    "first_ranks": [by_table],
    "slow_node": [
        by_clearing,
        lambda pairs, least: np.int64(by_clearing(pairs, least)),
    ],
    "slow_ranks": [by_words],
}

WRONG = {
    "first_ranks": [
        (lambda agents, nnodes: by_table(agents, 1), "a job waits"),
        (lambda agents, nnodes: by_table(agents, nnodes, ["id"]), "two stores"),
        (lambda agents, nnodes: by_table(agents, nnodes, ["endpoint"]), "the same id"),
        (lambda agents, nnodes: by_table(agents, nnodes, gpus=8), "has 8 GPUs"),
        (lambda agents, nnodes: by_table(agents, nnodes, gpus=1), "counts processes"),
        (
            lambda agents, nnodes: by_table(
                agents, nnodes, by=lambda address: int(address.split(".")[3])
            ),
            "as words",
        ),
        (in_the_order_of_arrival, "as words"),
        (lambda agents, nnodes: {"host0": 0}, "not {'host0': 0}"),
        (lambda agents, nnodes: [0, 8], "a dict is wanted, not list"),
        (lambda agents, nnodes: agents["my-job"], "TypeError"),
    ],
    "slow_node": [
        (in_slow_pairs, "3 is fast with 1"),
        (lambda pairs, least: max(min(pairs, key=pairs.get)), "fast with each other"),
        (lambda pairs, least: 3, "it is node 4, not 3"),
        (lambda pairs, least: "node 4", "give a number, not 'node 4'"),
        (lambda pairs, least: pairs[1], "KeyError"),
    ],
    "slow_ranks": [
        (lambda log: ranks_of(log, lambda way: "GDRDMA" not in way), "inside a node"),
        (lambda log: ranks_of(log, lambda way: "NET/" in way), "the fast way"),
        (lambda log: ranks_of(log, lambda way: "GDR" in way), "the fast way"),
        (lambda log: ranks_of(log, lambda way: "Socket" in way), "host's memory"),
        (lambda log: ranks_of(log, slow, lambda s, r, _: s), "behind the arrow"),
        (lambda log: ranks_of(log, slow, lambda s, r, _: r), "before the arrow"),
        (lambda log: [2, 3, 4] if "Socket" in log else [], "is the GPU"),
        (lambda log: by_words(log)[::-1], "each rank once, in order"),
        (lambda log: by_words(log) * 2, "each rank once, in order"),
        (
            lambda log: [c.split("[")[0] for c in log.split(" : ") if "Socket" in c],
            "not words",
        ),
        (lambda log: set(by_words(log)), "a list is wanted"),
        (lambda log: [0], "it is [], not [0]"),
        (lambda log: log.ranks, "AttributeError"),
    ],
}
