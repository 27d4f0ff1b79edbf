"""Answers to the exercises of lesson 08: right ones, and planted wrong ones."""


def dense(rows, inner, columns):
    elements = rows * inner + inner * columns + rows * columns
    return rows * inner * columns / 2 / elements


RIGHT = {
    "intensity": [dense],
    "five_bounds": [
        ("compute", "memory", "memory", "launches", "memory"),
        ("Arithmetic", "memory", "memory", "launch", "memory"),
    ],
    "break_even": [121, 116, 126],
}

WRONG = {
    "intensity": [
        (lambda m, k, n: dense(m, k, n) / 2, "are two FLOPs"),
        (lambda m, k, n: dense(m, k, n) * 4, "divide by elements"),
        (lambda m, k, n: dense(m, k, n) * 2, "not 2"),
        (lambda m, k, n: m * k * n / 2 / (m * k + k * n), "is written, too"),
        (lambda m, k, n: k / 2, "are read, too"),
        (lambda m, k, n: 1 / dense(m, k, n), "not bytes for each FLOP"),
        (lambda m, k, n: 7, "count both once more"),
    ],
    "five_bounds": [
        (("memory", "memory", "memory", "launches", "memory"), "number 1"),
        (("arithmetic",) * 5, "number 2"),
        (("arithmetic", "memory", "arithmetic", "memory", "memory"), "mber 3"),
        (("arithmetic", "memory", "memory", "memory", "memory"), "number 4"),
        (("arithmetic", "memory", "memory", "launches", "arithmetic"), "number 5"),
        (("bytes", "memory", "memory", "launches", "memory"), "say launches"),
        (("arithmetic", "memory"), "5 answers are asked for, not 2"),
    ],
    "break_even": [
        (91, "count the copies"),
        (112, "travels back"),
        (99, "fixed 10"),
        (108, "are launched"),
        (139, "travels once"),
        (500, "it is smaller"),
        (10, "it is larger"),
        ("a hundred", "give a number"),
    ],
}
