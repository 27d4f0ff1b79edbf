"""Answers to the exercises of lesson 03: right ones, and wrong ones with the reason."""

import torch
from torch.nn.functional import mse_loss


def with_clones(model, batches):
    losses, rows = [], []
    for x, y in batches:
        with torch.no_grad():
            output = model(x)
            losses.append(mse_loss(output, y).clone())
            rows.append(output[0].clone())
    return losses, rows


@torch.inference_mode()
def stacked(model, batches):
    losses, rows = [], []
    for x, y in batches:
        output = model(x)
        losses.append(mse_loss(output, y).clone())
        rows.append(output[0].clone())
        del output
    return torch.stack(losses), torch.stack(rows)


def as_given(model, batches):
    losses, rows = [], []
    for x, y in batches:
        output = model(x)
        losses.append(mse_loss(output, y))
        rows.append(output[0])
    return losses, rows


def detached(model, batches):
    losses, rows = as_given(model, batches)
    return [loss.detach() for loss in losses], [row.detach() for row in rows]


def no_grad_only(model, batches):
    with torch.no_grad():
        return as_given(model, batches)


def only_losses_cloned(model, batches):
    losses, rows = no_grad_only(model, batches)
    return [loss.clone() for loss in losses], rows


def cloned_late(model, batches):
    losses, rows = no_grad_only(model, batches)
    return [loss.clone() for loss in losses], [row.clone() for row in rows]


def cloned_with_graph(model, batches):
    losses, rows = [], []
    for x, y in batches:
        output = model(x)
        losses.append(mse_loss(output, y).detach().clone())
        rows.append(output[0].detach().clone())
    return losses, rows


def on_the_cpu(model, batches):
    losses, rows = no_grad_only(model, batches)
    return [loss.cpu() for loss in losses], [row.cpu() for row in rows]


def numbers(model, batches):
    losses, rows = no_grad_only(model, batches)
    return [loss.item() for loss in losses], [row.clone() for row in rows]


def whole_outputs(model, batches):
    with torch.no_grad():
        losses = [mse_loss(model(x), y).clone() for x, y in batches]
        return losses, [model(x) for x, _ in batches]


def last_rows(model, batches):
    with torch.no_grad():
        losses = [mse_loss(model(x), y).clone() for x, y in batches]
        return losses, [model(x)[-1].clone() for x, _ in batches]


HIDDEN = []


def kept_elsewhere(model, batches):
    with torch.no_grad():
        HIDDEN[:] = [model(x) for x, _ in batches]
    return with_clones(model, batches)


RIGHT = {
    "mib_after_forward": [lambda: (56,), lambda: (56.0005,)],
    "lean_evaluation": [lambda: (with_clones,), lambda: (stacked,)],
    "largest_batch": [lambda: (35_840,), lambda: (36_700,), lambda: (34_816,)],
}
WRONG = {
    "mib_after_forward": [
        (lambda: (40,), "two tensors, unlike with a ReLU"),
        (lambda: (48,), "momentum is one number"),
        (lambda: (32,), "momentum and GELU's input"),
        (lambda: (52,), "count x"),
        (lambda: (64,), "no gradients"),
        (lambda: (60,), "stay as large"),
        (lambda: (56 * 2**20,), "in MiB"),
        (lambda: ("many",), "add up"),
        (lambda: (17,), "add up"),
    ],
    "lean_evaluation": [
        (lambda: (as_given,), "still has its graph"),
        (lambda: (detached,), "detach() is not enough"),
        (lambda: (no_grad_only,), "a loss of 4 bytes keeps a storage of"),
        (lambda: (only_losses_cloned,), "a row of 1,024 bytes keeps a storage of"),
        (lambda: (cloned_late,), "its peak is"),
        (lambda: (cloned_with_graph,), "without gradients"),
        (lambda: (on_the_cpu,), "leave it on the GPU"),
        (lambda: (numbers,), "is a float, not a tensor"),
        (lambda: (whole_outputs,), "row 0 is (512, 256)"),
        (lambda: (last_rows,), "another value"),
        (lambda: (kept_elsewhere,), "who holds them"),
        (lambda: (lambda model, batches: [],), "two lists"),
        (lambda: (lambda model, batches: 1.0,), "two lists"),
    ],
    "largest_batch": [
        (lambda: (32_000,), "8 tensors are never there"),
        (lambda: (42_800,), "one of 7 tensors is missing"),
        (lambda: (51_400,), "come in twos"),
        (lambda: (64_000,), "in backward() there are also"),
        (lambda: (8_400,), "a number is 4 bytes"),
        (lambda: (100_000,), "do not fit"),
        (lambda: (1000,), "room to spare"),
        (lambda: ("all",), "a number of rows"),
    ],
}
