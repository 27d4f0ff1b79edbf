"""Answers to the exercises of lesson 18."""

import numpy as np
import torch
from torch.nn.functional import cross_entropy


def right(model, x, y, most):
    letters, total = (y != -100).sum(), 0.0
    for xs, ys in zip(x.split(most), y.split(most), strict=True):
        loss = cross_entropy(model(xs).flatten(0, 1), ys.flatten(), reduction="sum")
        (loss / letters).backward()
        total += (loss / letters).item()
    return total


def weighted(model, x, y, most):
    total = 0
    for i in range(0, len(x), most):
        part = y[i : i + most]
        share = (part != -100).sum() / (y != -100).sum()
        loss = cross_entropy(model(x[i : i + most]).mT, part) * share
        loss.backward()
        total = total + loss.detach()
    return total


def in_parts(divide):
    def backward(model, x, y, most):
        pairs, total = list(zip(x.split(most), y.split(most), strict=True)), 0.0
        for xs, ys in pairs:
            loss = divide(model(xs).mT, ys, y, len(pairs))
            loss.backward()
            total += loss.item()
        return total

    return backward


mean_of_means = in_parts(lambda scores, y, _, parts: cross_entropy(scores, y) / parts)
means = in_parts(lambda scores, y, *_: cross_entropy(scores, y))
all_places = in_parts(
    lambda scores, y, every, _: (
        cross_entropy(scores, y, reduction="sum") / every.numel()
    )
)
sums = in_parts(lambda scores, y, *_: cross_entropy(scores, y, reduction="sum"))
by_rows = in_parts(
    lambda scores, y, every, _: cross_entropy(scores, y) * len(y) / len(every)
)
tenfold = in_parts(lambda scores, y, *_: 10 * cross_entropy(scores, y))


def at_once(model, x, y, most):
    loss = cross_entropy(model(x).mT, y)
    loss.backward()
    return loss.item()


def drops_the_last(model, x, y, most):
    whole = len(x) // most * most
    return right(model, x[:whole], y[:whole], most)


def only_forward(model, x, y, most):
    for xs in x.split(most):
        model(xs)
    return 1.0


def returns_the_last(model, x, y, most):
    right(model, x, y, most)
    return 0.5


def returns_nan(model, x, y, most):
    return right(model, x, y, most) * float("nan")


def row_by_row(model, x, y, most):
    total = 0.0
    for xs, ys in zip(x.split(1), y.split(1), strict=True):
        loss = cross_entropy(model(xs).mT, ys) / len(x)
        loss.backward()
        total += loss.item()
    return total


def steady(step, rows, width):
    found = []
    for row in rows.tolist():
        generator = torch.Generator().manual_seed(step * 1_000_003 + row)
        found.append(torch.rand(width, generator=generator) > 0.1)
    return torch.stack(found)


def of_a_table(step, rows, width):
    generator = torch.Generator().manual_seed(step)
    table = torch.rand(3000, width, generator=generator)
    return (table >= 0.1).float()[rows]


def of_the_moment(step, rows, width):
    return (torch.rand(len(rows), width) > 0.1).float()


def of_the_step(step, rows, width):
    generator = torch.Generator().manual_seed(step)
    return (torch.rand(len(rows), width, generator=generator) > 0.1).float()


def of_the_row(step, rows, width):
    return steady(0, rows, width)


def one_for_all(step, rows, width):
    generator = torch.Generator().manual_seed(step)
    return (torch.rand(width, generator=generator) > 0.1).repeat(len(rows), 1)


def of_the_sum(step, rows, width):
    return steady(0, rows + step, width)


def of_the_product(step, rows, width):
    return steady(0, step * rows, width)


def as_a_list(step, rows, width):
    return steady(step, rows, width).tolist()


def a_half(step, rows, width):
    return of_a_table(step, rows, width) * (steady(step + 1, rows, width))


def with_scale(step, rows, width):
    return steady(step, rows, width) / 0.9


def of_one_row(step, rows, width):
    return steady(step, rows, width)[0]


RIGHT = {
    "moved_to_16": [
        lambda: (4, 930_000_000),
        lambda: (np.int64(4), np.float64(2 * 15 / 16 * 124e6 * 4)),
    ],
    "padded": [lambda: (right,), lambda: (weighted,)],
    "steady_mask": [lambda: (steady,), lambda: (of_a_table,)],
}
WRONG = {
    "moved_to_16": [
        (lambda: (64, 930_000_000), "8192 rows"),
        (lambda: (1, 930_000_000), "8 fit"),
        (lambda: (32, 930_000_000), "rows of each GPU"),
        (lambda: (8, 930_000_000), "how many parts"),
        (lambda: (5, 930_000_000), "512 rows, 16 GPUs"),
        (lambda: (4, 496_000_000), "nearly twice"),
        (lambda: (4, 992_000_000), "15/16"),
        (lambda: (4, 465_000_000), "all-gather follows"),
        (lambda: (4, 3_720_000_000), "once in a step"),
        (lambda: (4, 232_500_000), "4 bytes"),
        (lambda: (4, 7), "ring of 16"),
        (lambda: (4, float("nan")), "nbytes: give a number, not nan"),
        (lambda: (4, 930), "not in millions"),
        (lambda: (16, 930_000_000), "16 are the GPUs"),
        (lambda: ("4", 930_000_000), "accumulate: give a number, not '4'"),
    ],
    "padded": [
        (lambda: (mean_of_means,), "mean of their means"),
        (lambda: (means,), "counts fully"),
        (lambda: (all_places,), "those with -100"),
        (lambda: (sums,), "that is the sum"),
        (lambda: (by_rows,), "not by its rows"),
        (lambda: (tenfold,), "not those of the whole batch"),
        (lambda: (at_once,), "7 rows at once"),
        (lambda: (drops_the_last,), "given 6 rows"),
        (lambda: (only_forward,), "no gradient"),
        (lambda: (returns_the_last,), "you return 0.5"),
        (lambda: (returns_nan,), "you return nan"),
        (lambda: (row_by_row,), "each row's mean"),
    ],
    "steady_mask": [
        (lambda: (of_the_moment,), "asked again"),
        (lambda: (of_the_step,), "of 4 gets another mask"),
        (lambda: (of_the_row,), "step 6 has the mask"),
        (lambda: (one_for_all,), "all rows have the same"),
        (lambda: (of_the_sum,), "a seed of its own"),
        (lambda: (of_the_product,), "a seed of its own"),
        (lambda: (as_a_list,), "not a list"),
        (lambda: (a_half,), "are zeros"),
        (lambda: (with_scale,), "zeros and ones only"),
        (lambda: (of_one_row,), "return (32, 64)"),
    ],
}
