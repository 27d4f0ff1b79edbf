"""Answers to the exercises of lesson 25: right ones, and planted wrong ones."""

from exercises.lesson_25 import by_node


def ring_of_machines(parameters, machines, each):
    return 2 * (machines - 1) / machines * 4 * parameters


def all_rings(parameters, machines, each):
    part = 4 * parameters / each
    return round(each * 2 * part * (machines - 1) / machines)


def by_sorted(addresses, gpus):
    every = sorted(addresses)
    return {a: [every.index(a) * gpus + g for g in range(gpus)] for a in addresses}


def by_given(addresses, gpus):
    return by_node(addresses, gpus)


RIGHT = {
    "my_gpu": [
        lambda environ: int(environ["LOCAL_RANK"]),
        lambda environ: int(environ["RANK"]) % int(environ["LOCAL_WORLD_SIZE"]),
    ],
    "ranks_of_nodes": [by_sorted, lambda a, g: by_node(sorted(a), g)],
    "hybrid_bytes": [ring_of_machines, all_rings],
}

WRONG = {
    "my_gpu": [
        (lambda environ: int(environ["RANK"]), "no such GPU"),
        (lambda environ: int(environ["GROUP_RANK"]), "number of the node"),
        (lambda environ: environ["LOCAL_RANK"], "is a word"),
        (lambda environ: 7, "not 7"),
        (lambda environ: environ["GPU"], "KeyError"),
    ],
    "ranks_of_nodes": [
        (by_given, "sorted as words"),
        (lambda a, g: sorted(a), "a dict is wanted"),
        (lambda a, g: {}, "the keys are"),
        (lambda a, g: dict.fromkeys(a, 0), "a list of ranks"),
        (lambda a, g: {x: [0] for x in a}, "has the ranks"),
    ],
    "hybrid_bytes": [
        (lambda p, m, e: ring_of_machines(p, m, e) / e, "one GPU's part"),
        (lambda p, m, e: 4 * p, "2 (n - 1) / n"),
        (lambda p, m, e: 8 * p, "not twice the whole"),
        (lambda p, m, e: 8 * p * (m * e - 1) / (m * e), "one GPU of each"),
        (lambda p, m, e: ring_of_machines(p, m, e) / 2, "4 bytes"),
        (lambda p, m, e: ring_of_machines(p, m, e) + 4 * p, "gathered"),
        (lambda p, m, e: ring_of_machines(p, m, e) * e, "a part of the"),
        (lambda p, m, e: 8 * p * (m - 1) / e, "carries 2 (m - 1) / m of it"),
        (lambda p, m, e: 8 * p * (m - 1), "of one machine"),
        (
            lambda p, m, e: 8 * p * (m * e - 1) / (m * e) / e,
            "part in a ring through all",
        ),
        (lambda p, m, e: 5.5 * p, "how many such rings"),
        (lambda p, m, e: "many", "give a number, not 'many'"),
        (lambda p, m, e: 1 / 0, "ZeroDivisionError"),
    ],
}
