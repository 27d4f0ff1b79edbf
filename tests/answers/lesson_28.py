"""Answers to the exercises of lesson 28: right ones, and planted wrong ones."""

import torch
from torch.nn.functional import cross_entropy

from exercises.lesson_28 import (
    all_places,
    at_once,
    becomes,
    by_rows,
    in_parts,
    mean_of_means,
    means,
    row_by_row,
    sums,
)


def changed(**names):
    """The right answer to another plan."""
    return lambda plan: becomes({**plan, **{n: of(plan) for n, of in names.items()}})


def by_hand(plan):
    if plan["batch"] != 512:
        return "Refused"
    groups = plan["gpus"] // plan["tp"]
    if -(-512 // groups) > 8 * plan["accumulate"]:
        return "memory"
    return "other" if plan["lr"] > 3e-4 else "same"


def rounds_down(plan):
    said = becomes(plan)
    fits = 512 // (plan["gpus"] // plan["tp"]) // plan["accumulate"] <= 8
    return "same" if said == "memory" and fits else said


def says_for(said, instead):
    return lambda plan: instead if becomes(plan) == said else becomes(plan)


def per_gpu_batch(plan):
    return "same" if plan["batch"] == 512 * plan["gpus"] else becomes(plan)


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


tenfold = in_parts(lambda scores, y, *_: 10 * cross_entropy(scores, y))


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


def of_the_step(step, rows, width):
    generator = torch.Generator().manual_seed(step)
    return (torch.rand(len(rows), width, generator=generator) > 0.1).float()


def one_for_all(step, rows, width):
    generator = torch.Generator().manual_seed(step)
    return (torch.rand(width, generator=generator) > 0.1).repeat(len(rows), 1)


def of_step(change):
    """The right masks, but of another step and other rows."""
    return lambda step, rows, width: steady(*change(step, rows), width)


def a_half(step, rows, width):
    return of_a_table(step, rows, width) * (steady(step + 1, rows, width))


RIGHT = {
    "moved": [by_hand],
    "padded": [weighted],
    "steady_mask": [of_a_table],
}

WRONG = {
    "moved": [
        (changed(tp=lambda plan: 1), "some GPU has 32 rows in a part"),
        (
            changed(gpus=lambda plan: plan["gpus"] // plan["replicas"]),
            "the largest part of any GPU has 8 rows",
        ),
        (changed(lr=lambda plan: 3e-4), "each step is longer"),
        (changed(accumulate=lambda plan: 64), "some GPU has 32 rows"),
        (per_gpu_batch, "other rows than"),
        (rounds_down, "some GPU has"),
        (
            lambda plan: "refused" if 512 % plan["gpus"] else becomes(plan),
            "shared out in another way",
        ),
        (says_for("refused", "other"), "other rows than"),
        (says_for("same", "fine"), "return one of same, other, memory, refused"),
        (lambda plan: "same", "other rows than"),
        (lambda plan: plan["cards"], "KeyError"),
        (3, "give a function"),
    ],
    "padded": [
        (mean_of_means, "mean of their means"),
        (means, "counts fully"),
        (all_places, "those with -100"),
        (sums, "that is the sum"),
        (by_rows, "not by its rows"),
        (tenfold, "not those of the whole batch"),
        (at_once, "7 rows at once"),
        (drops_the_last, "given 6 rows"),
        (only_forward, "no gradient"),
        (returns_the_last, "you return 0.5"),
        (
            lambda model, x, y, most: right(model, x, y, most) * float("nan"),
            "give a number, not nan",
        ),
        (row_by_row, "each row's mean"),
    ],
    "steady_mask": [
        (
            lambda step, rows, width: (torch.rand(len(rows), width) > 0.1).float(),
            "asked again",
        ),
        (of_the_step, "of 4 gets another mask"),
        (of_step(lambda step, rows: (0, rows)), "step 6 has the mask"),
        (one_for_all, "all rows have the same"),
        (of_step(lambda step, rows: (0, rows + step)), "a seed of its own"),
        (of_step(lambda step, rows: (0, step * rows)), "a seed of its own"),
        (lambda *given: steady(*given).tolist(), "the mask is a list, not a tensor"),
        (a_half, "are zeros"),
        (lambda *given: steady(*given) / 0.9, "zeros and ones only"),
        (lambda *given: steady(*given)[0], "the mask is (64,), not (32, 64)"),
    ],
}
