"""Answers to the exercises of lesson 04: right ones, and planted wrong ones."""

import torch
from torch.nn.functional import cross_entropy


def one_or_five(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    return parameters_only(model) + 4 * sum(
        p.numel() * p.element_size() for p in trained
    )


def parameters_only(model):
    return sum(p.nbytes for p in model.parameters())


def so_many_times(count):
    return lambda model: count * parameters_only(model)


@torch.inference_mode()
def stacked(model, batches):
    losses, rows = [], []
    for x, y in batches:
        output = model(x)
        losses.append(cross_entropy(output, y))
        rows.append(output[0].clone())
        del output
    return torch.stack(losses), torch.stack(rows)


def evaluation(of_loss, of_row):
    """Keeps of each batch what these two functions make of its loss and first row."""

    def evaluate(model, batches):
        losses, rows = [], []
        for x, y in batches:
            output = model(x)
            losses.append(of_loss(cross_entropy(output, y)))
            rows.append(of_row(output[0]))
        return losses, rows

    return evaluate


def as_it_is(tensor):
    return tensor


as_given = evaluation(as_it_is, as_it_is)
cloned_with_graph = evaluation(torch.Tensor.detach, lambda row: row.detach().clone())


with_clones = torch.no_grad()(evaluation(torch.clone, torch.clone))


def no_grad_only(model, batches):
    with torch.no_grad():
        return as_given(model, batches)


def afterwards(evaluate, of_loss, of_row):
    """Changes the two lists when they are complete."""

    def change(model, batches):
        losses, rows = evaluate(model, batches)
        return [of_loss(loss) for loss in losses], [of_row(row) for row in rows]

    return change


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


def half_way(fits, most):
    return (fits + most) // 2


def search(error=torch.OutOfMemoryError, middle=half_way, empty=True):
    """Halves what is still possible; `middle` is the next number of samples."""

    def largest_that_fits(train, samples):
        fits, too_many = 0, samples + 1
        while too_many - fits > 1:
            samples = middle(fits, too_many)
            if empty:
                torch.cuda.empty_cache()
            fitted = True
            try:
                train(samples)
            except error:
                fitted = False
            if fitted:
                fits = samples
            else:
                too_many = samples
        return fits

    return largest_that_fits


after_the_block = search()


def from_the_top(train, samples):
    """Tries all samples first, then half of them, then what is between."""
    fits, too_many = 0, samples + 1
    trial = samples
    while too_many - fits > 1:
        try:
            train(trial)
            fits = trial
        except torch.cuda.OutOfMemoryError:
            too_many = trial
        torch.cuda.empty_cache()
        trial = (fits + too_many) // 2
    return fits


def inside_the_block(train, samples, fits=0):
    """Searches between `fits` and `samples`; the next call is in the `except` block."""
    if samples <= fits:
        return fits
    middle = (fits + samples + 1) // 2
    try:
        train(middle)
    except torch.OutOfMemoryError:
        return inside_the_block(train, middle - 1, fits)
    return inside_the_block(train, samples, middle)


def tries(smaller=lambda samples: samples // 2):
    """The first of samples, then fewer and fewer, that fits."""

    def first_that_fits(train, samples):
        while samples:
            try:
                train(samples)
                return samples
            except torch.OutOfMemoryError:
                pass
            samples = smaller(samples)
        return 0

    return first_that_fits


RIGHT = {
    "peak_of_step": [one_or_five],
    "lean_evaluation": [with_clones, stacked],
    "largest_that_fits": [after_the_block, from_the_top],
}

WRONG = {
    "peak_of_step": [
        (parameters_only, "parameters alone"),
        (so_many_times(2), "moments are missing"),
        (so_many_times(3), "two parts are missing"),
        (so_many_times(4), "makes and drops"),
        (lambda model: sum(p.numel() for p in model.parameters()), "4 bytes"),
        (so_many_times(20), "in bytes already"),
        (
            lambda model: (
                5 * sum(value.nbytes for value in model.state_dict().values())
            ),
            "buffers",
        ),
        (so_many_times(5), "frozen"),
        (lambda model: 12345, "12,345 bytes for a model"),
        (17, "give a function"),
    ],
    "lean_evaluation": [
        (as_given, "still has its graph"),
        (afterwards(as_given, torch.detach, torch.detach), "detach() is not enough"),
        (no_grad_only, "keeps a storage of"),
        (afterwards(no_grad_only, as_it_is, torch.clone), "its peak is"),
        (cloned_with_graph, "without gradients"),
        (
            afterwards(no_grad_only, torch.Tensor.cpu, torch.Tensor.cpu),
            "leave it on the GPU",
        ),
        (
            afterwards(no_grad_only, torch.Tensor.item, torch.clone),
            "is a float, not a tensor",
        ),
        (whole_outputs, "row of scores 0 is (2048, 10)"),
        (last_rows, "another value"),
        (kept_elsewhere, "who holds them"),
        (lambda model, batches: [], "two lists"),
        (lambda model, batches: 1.0, "two lists"),
    ],
    "largest_that_fits": [
        (inside_the_block, "the error holds"),
        (search(empty=False), "segments of another size"),
        (search(RuntimeError), "swallows"),
        (
            lambda train, samples: after_the_block(train, samples // 2),
            "of 8 samples, 8 fit",
        ),
        (tries(), "18 fit; it returns 16 and tries 128, 64, 32, 16"),
        (tries(lambda samples: samples - 1), "more than 12 times"),
        (tries(lambda samples: 0), "18 fit"),
        (lambda train, samples: after_the_block(train, samples) or 1, "not even one"),
        (search(middle=lambda fits, most: (fits + most) / 2), "whole number"),
        (17, "give a function"),
    ],
}
