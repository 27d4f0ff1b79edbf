"""The exercises of lesson 04: a peak, what is kept, what fits."""

import gc

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from exercises.counted import MIB, name_mistake, number
from exercises.exercise import Wrong, call, exercise, must_be_callable, solution
from exercises.results import near, sequence, tensor


@exercise(
    "04.1",
    hints=(
        "`p.nbytes` is the memory of one parameter, and `model.parameters()` yields "
        "all of them. How do you add them up in one line?",
        "A gradient is as large as its parameter. How many numbers does Adam keep for "
        "each parameter, what does `step()` make and drop, and which of these has a "
        "parameter that nobody trains?",
    ),
)
def peak_of_step(function) -> None:
    """A function: model -> bytes that it adds to the peak of Adam's `step()`."""
    small = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    normed = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 10))
    tuned = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    tuned[0].requires_grad_(False)
    for model in (small, normed, tuned):
        found = number(call(function, model), "bytes")
        bytes_of_all = sum(p.nbytes for p in model.parameters())
        trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        buffers = sum(b.nbytes for b in model.buffers())
        mistakes = {
            bytes_of_all: "these are the parameters alone",
            2 * bytes_of_all: "Adam's moments are missing",
            3 * bytes_of_all: "two parts are missing: Adam keeps two averages for each "
            "parameter, each parameter has a gradient, and `step()` takes roots",
            4 * bytes_of_all: "the tensors that `step()` makes and drops are missing",
            bytes_of_all / 4: "these are numbers, and a float32 number is 4 bytes",
            bytes_of_all * 20: "`nbytes` is in bytes already",
        }
        if found == bytes_of_all + 4 * trained:
            continue
        if model is tuned and found in (5 * bytes_of_all, 5 * trained):
            raise Wrong(
                "a frozen parameter has its own bytes, and neither a gradient nor "
                "moments nor a root"
            )
        name_mistake(found, mistakes, 0.001)
        if buffers and found > 5 * bytes_of_all:
            raise Wrong("BatchNorm's buffers have no gradients and no moments")
        raise Wrong(f"{found:,.0f} bytes for a model of {bytes_of_all:,} bytes")


@solution("04.1")
def solution_1():
    """Five tensors of the same size for each parameter that is trained, else one.

    They are the parameter, its gradient, Adam's two moments, and a square root. A
    frozen parameter gets no gradient, and Adam keeps nothing of it.
    """

    def peak_of_step(model):
        return sum((5 if p.requires_grad else 1) * p.nbytes for p in model.parameters())

    return peak_of_step


# -- what a function keeps -------------------------------------------------------------

ROWS, WIDTH, BATCHES = 2048, 64, 12


@exercise(
    "04.2",
    hints=(
        "Two things are kept that nobody asked for: the graph of each batch, and the "
        "memory of each full output. Which call gives up which of them?",
        "`torch.no_grad()` does without the graph. A row is a view of the full output. "
        "Which call makes a tensor with memory of its own, and when must it come?",
    ),
)
def lean_evaluation(function) -> None:
    """A function (model, batches) -> (losses, scores), which keeps nothing else."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)).cuda()
    images = torch.rand(BATCHES, ROWS, 64, generator=generator)
    batches = [(x.cuda(), x[:, :10].argmax(1).cuda()) for x in images]
    wanted = [[], []]
    with torch.no_grad():
        for x, y in batches:
            wanted[0].append(cross_entropy(model(x), y).cpu())
            wanted[1].append(model(x)[0].cpu())
    gc.collect()
    model(batches[0][0]).sum().backward()  # takes what libraries take at first use
    model.zero_grad()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = call(function, model, batches)
    gc.collect()
    held = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    why = "it should return two lists, a loss and ten scores for each batch"
    results = [sequence(part, why) for part in sequence(results, why)]
    if [len(part) for part in results] != [BATCHES, BATCHES]:
        raise Wrong(why)
    kinds = ("loss", "row of scores")
    for what, part, right in zip(kinds, results, wanted, strict=True):
        _check_values(what, part, right)
    for what, part in zip(kinds, results, strict=True):
        nbytes = part[0].untyped_storage().nbytes()
        if nbytes > 4096 and part[0].data_ptr() != part[1].data_ptr():
            raise Wrong(
                f"a {what} of {part[0].nbytes:,} bytes keeps a storage of "
                f"{nbytes:,}; detach() is not enough"
            )
    if held > BATCHES * 1024 + 4096:
        raise Wrong(f"{held:,} bytes live when it has returned; who holds them?")
    most = 1.3 * MIB  # a hidden layer's input and output, and an old output
    if peak > most:
        raise Wrong(
            f"its peak is {peak / MIB:.1f} MiB, and {most / MIB:.1f} would do: run the "
            "model without gradients, and keep no batch until the next"
        )


@solution("04.2")
def solution_2():
    """Without gradients there is no graph, and a clone has memory of its own.

    `clone()` must come inside the loop. The full output is then freed as soon as the
    name `output` gets the next batch's.
    """

    def evaluate(model, batches):
        losses, scores = [], []
        with torch.no_grad():
            for x, y in batches:
                output = model(x)
                losses.append(cross_entropy(output, y))
                scores.append(output[0].clone())
        return losses, scores

    return evaluate


def _check_values(what: str, part: list, wanted: list[torch.Tensor]) -> None:
    """They are on the GPU, without a graph, and what they were before."""
    for i, (found, right) in enumerate(zip(part, wanted, strict=True)):
        if tensor(found, f"{what} {i} is").device.type != "cuda":
            raise Wrong(f"{what} {i} is on {found.device}; leave it on the GPU")
        if found.requires_grad:
            raise Wrong(f"{what} {i} still has its graph, and the graph its batch")
        tensor(found, f"{what} {i} is", right.shape)
        if not near(found, right, rtol=1e-3, atol=1e-4):
            raise Wrong(f"{what} {i} has another value than before")


# -- what fits -------------------------------------------------------------------------

ROOM = 74 * MIB  # of which a sample takes 4
CALLS = 12


class _Trainer:
    """A stand-in for training: four tensors of 1 MiB a sample, one after the other."""

    def __init__(self, bug_at: int = 0):
        self.tried: list[int] = []
        self.fitted: list[int] = []
        self.bug_at = bug_at
        self.held: dict[int, int] = {}  # samples -> bytes that others had then
        self.before = torch.cuda.memory_allocated()

    def __call__(self, samples):
        if not isinstance(samples, int) or samples < 1:
            raise Wrong(f"it calls train({samples!r}); give a whole number of samples")
        self.tried.append(samples)
        if len(self.tried) > CALLS:
            raise Wrong(
                f"it calls train more than {CALLS} times: "
                f"{', '.join(map(str, self.tried[:4]))} and so on; each call should "
                "leave half of what is still possible"
            )
        self.held[samples] = torch.cuda.memory_allocated() - self.before
        if samples == self.bug_at:
            raise RuntimeError("a bug in train, not a lack of memory")
        tensors = []
        for _ in range(4):
            tensors.append(torch.empty(samples * MIB, dtype=torch.uint8, device="cuda"))
        self.fitted.append(samples)


@exercise(
    "04.3",
    hints=(
        "Keep two numbers: the most samples that have fitted so far, and the fewest "
        "that have not. Which number between them do you try next, and when are you "
        "done?",
        "Catch `torch.OutOfMemoryError` and nothing else. What is alive as long as you "
        "are inside the `except` block? And which segments has a failed call left when "
        "the next one begins?",
    ),
)
def largest_that_fits(function) -> None:
    """A function (train, samples) -> the most samples, up to so many, that fit.

    It runs with little room on the GPU, which it gives back at the end.
    """
    must_be_callable(function)
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    limit = torch.cuda.get_per_process_memory_fraction()
    room = torch.cuda.memory_reserved() + ROOM
    torch.cuda.set_per_process_memory_fraction(min(room / total, 1.0))
    try:
        _check_fits(function)
    finally:
        torch.cuda.set_per_process_memory_fraction(limit)
        gc.collect()
        torch.cuda.empty_cache()


def _most() -> int:
    """How many samples fit: 18, unless there is room in what is reserved already."""
    for samples in range(24, 0, -1):
        torch.cuda.empty_cache()
        try:
            _Trainer()(samples)
        except torch.OutOfMemoryError:
            continue
        return samples
    raise RuntimeError("not even one sample fits")


def _check_fits(function) -> None:
    most = _most()
    for samples in (128, 8, 48):
        torch.cuda.empty_cache()
        train, fits = _Trainer(), min(most, samples)
        found = number(call(function, train, samples), "samples")
        if found == fits:
            continue
        tried = ", ".join(map(str, train.tried)) or "nothing"
        for n in train.tried:
            if n <= fits and n not in train.fitted:
                why = (
                    "Inside the `except` block the error holds what failed attempts "
                    "took"
                    if train.held[n] > 0
                    else "The calls before have left segments of another size; give "
                    "them back before each call"
                )
                raise Wrong(f"{n} samples fit, but not when it tries {tried}. {why}")
        raise Wrong(
            f"of {samples} samples, {fits} fit; it returns {found:g} and tries {tried}"
        )
    never = _Trainer()
    blocker = torch.empty(ROOM - 2 * MIB, dtype=torch.uint8, device="cuda")
    found = number(call(function, never, 4), "samples")
    del blocker
    if found != 0:
        raise Wrong(f"not even one sample fits, and it returns {found:g}")
    _check_other_errors(function)


def _check_other_errors(function) -> None:
    """What is no lack of memory must reach the caller."""
    asked = _Trainer()
    function(asked, 128)
    try:
        function(_Trainer(bug_at=asked.tried[0]), 128)
    except RuntimeError as error:
        if "a bug in train" in str(error):
            return
        raise
    raise Wrong("it swallows an error that is no lack of memory")


@solution("04.3")
def solution_3():
    """Halve what is still possible, and leave the `except` block before the next try.

    `fits` is known to fit, `too_many` is known not to. Half way between the two, one
    call says which of them moves. 128 samples take eight calls at most.

    Inside the block the error is alive. Its traceback has the frame of `train`, and the
    frame has the tensors. After the block they are gone, but their segments stay. A
    call with 20 samples leaves segments of 20 MiB. A tensor of 18 MiB is then cut from
    each, so none of them can be given back when the last tensor finds no room.
    `empty_cache()` helps while all of them are free.

    `torch.OutOfMemoryError` is a kind of `RuntimeError`, so an `except RuntimeError`
    would hide other errors.

    On a real card, train with some percent less: other batches are longer, and pieces
    of the segments stay unused.
    """

    def largest_that_fits(train, samples):
        fits, too_many = 0, samples + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            torch.cuda.empty_cache()
            try:
                train(middle)
                fits = middle
            except torch.OutOfMemoryError:
                too_many = middle
        return fits

    return largest_that_fits
