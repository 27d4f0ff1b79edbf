"""Answers to the exercises of lesson 04: right ones, and planted wrong ones."""

import torch
from torch.nn.functional import cross_entropy


def five_times(model):
    return sum(5 * p.numel() * p.element_size() for p in model.parameters())


def parameters_only(model):
    return sum(p.nbytes for p in model.parameters())


def without_moments(model):
    return 2 * parameters_only(model)


def one_moment(model):
    return 3 * parameters_only(model)


def without_roots(model):
    return 4 * parameters_only(model)


def numbers_of(model):
    return sum(p.numel() for p in model.parameters())


def twice_bytes(model):
    return 20 * parameters_only(model)


def with_buffers(model):
    return 5 * sum(value.nbytes for value in model.state_dict().values())


def with_clones(model, batches):
    losses, rows = [], []
    for x, y in batches:
        with torch.no_grad():
            output = model(x)
            losses.append(cross_entropy(output, y).clone())
            rows.append(output[0].clone())
    return losses, rows


@torch.inference_mode()
def stacked(model, batches):
    losses, rows = [], []
    for x, y in batches:
        output = model(x)
        losses.append(cross_entropy(output, y))
        rows.append(output[0].clone())
        del output
    return torch.stack(losses), torch.stack(rows)


def as_given(model, batches):
    losses, rows = [], []
    for x, y in batches:
        output = model(x)
        losses.append(cross_entropy(output, y))
        rows.append(output[0])
    return losses, rows


def detached(model, batches):
    losses, rows = as_given(model, batches)
    return [loss.detach() for loss in losses], [row.detach() for row in rows]


def no_grad_only(model, batches):
    with torch.no_grad():
        return as_given(model, batches)


def cloned_late(model, batches):
    losses, rows = no_grad_only(model, batches)
    return losses, [row.clone() for row in rows]


def cloned_with_graph(model, batches):
    losses, rows = [], []
    for x, y in batches:
        output = model(x)
        losses.append(cross_entropy(output, y).detach())
        rows.append(output[0].detach().clone())
    return losses, rows


def on_the_cpu(model, batches):
    losses, rows = no_grad_only(model, batches)
    return [loss.cpu() for loss in losses], [row.cpu() for row in rows]


def numbers(model, batches):
    losses, rows = no_grad_only(model, batches)
    return [loss.item() for loss in losses], [row.clone() for row in rows]


def whole_outputs(model, batches):
    losses, _ = with_clones(model, batches)
    with torch.no_grad():
        return losses, [model(x) for x, _ in batches]


def last_rows(model, batches):
    losses, _ = with_clones(model, batches)
    with torch.no_grad():
        return losses, [model(x)[-1].clone() for x, _ in batches]


HIDDEN = []


def kept_elsewhere(model, batches):
    with torch.no_grad():
        HIDDEN[:] = [model(x) for x, _ in batches]
    return with_clones(model, batches)


def after_the_block(train, samples):
    while samples:
        fits = True
        try:
            train(samples)
        except torch.cuda.OutOfMemoryError:
            fits = False
        if fits:
            return samples
        samples //= 2
    return 0


def inside_the_block(train, samples):
    try:
        train(samples)
    except torch.OutOfMemoryError:
        return inside_the_block(train, samples // 2) if samples > 1 else 0
    return samples


def any_runtime_error(train, samples):
    while samples:
        try:
            train(samples)
            return samples
        except RuntimeError:
            pass
        samples //= 2
    return 0


def one_less(train, samples):
    return after_the_block(train, samples // 2)


def never_halves(train, samples):
    try:
        train(samples)
        return samples
    except torch.OutOfMemoryError:
        return 0


def never_zero(train, samples):
    return after_the_block(train, samples) or 1


def with_a_half(train, samples):
    while samples:
        try:
            train(samples)
            return samples
        except torch.OutOfMemoryError:
            pass
        samples = samples / 2


RIGHT = {
    "peak_of_step": [five_times],
    "lean_evaluation": [with_clones, stacked],
    "first_that_fits": [after_the_block],
}

WRONG = {
    "peak_of_step": [
        (parameters_only, "parameters alone"),
        (without_moments, "moments are missing"),
        (one_moment, "two parts are missing"),
        (without_roots, "makes and drops"),
        (numbers_of, "4 bytes"),
        (twice_bytes, "in bytes already"),
        (with_buffers, "buffers"),
        (lambda model: 12345, "12,345 bytes for a model"),
        (17, "give a function"),
    ],
    "lean_evaluation": [
        (as_given, "still has its graph"),
        (detached, "detach() is not enough"),
        (no_grad_only, "keeps a storage of"),
        (cloned_late, "its peak is"),
        (cloned_with_graph, "without gradients"),
        (on_the_cpu, "leave it on the GPU"),
        (numbers, "is a float, not a tensor"),
        (whole_outputs, "row of scores 0 is (2048, 10)"),
        (last_rows, "another value"),
        (kept_elsewhere, "who holds them"),
        (lambda model, batches: [], "two lists"),
        (lambda model, batches: 1.0, "two lists"),
    ],
    "first_that_fits": [
        (inside_the_block, "the error holds"),
        (any_runtime_error, "swallows"),
        (one_less, "try all of them first"),
        (never_halves, "16 fit"),
        (never_zero, "not even one"),
        (with_a_half, "whole number"),
        (17, "give a function"),
    ],
}
