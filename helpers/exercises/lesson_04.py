"""The exercises of lesson 04: bytes that live, bytes that are kept, and what fits."""

import gc

import torch
from torch import nn
from torch.nn.functional import mse_loss

from helpers.exercises.counted import MIB, counted, is_near, name_mistake, number
from helpers.exercises.exercise import Wrong, call, exercise, solution
from helpers.exercises.results import near, sequence, tensor


@exercise(
    "04.1",
    hints=(
        "Write a list of the tensors that live at this moment, and the MiB of each. "
        "What has the first step left behind, and what has the graph of the second "
        "one saved for `backward()`?",
        "The GELU keeps its input, and the layer behind it keeps the GELU's output: "
        "two tensors of the hidden size, where a ReLU would need one. And SGD with "
        "momentum has a number for each weight.",
    ),
)
def mib_after_forward(answer) -> None:
    """MiB of two weights, momentum, x, what GELU and its follower keep, the output."""
    weights, inputs, hidden, output = 8, 4, 16, 4
    right = 2 * weights + inputs + 2 * hidden + output
    mistakes = {
        right - hidden: "GELU keeps its input and the next layer keeps GELU's output: "
        "two tensors, unlike with a ReLU",
        right - weights: "from the first step on, momentum is one number a weight",
        right - hidden - weights: "momentum and GELU's input are missing",
        right - inputs: "count x, and the output that `square` keeps",
        right + weights: "after zero_grad() there are no gradients, and momentum is "
        "one number a weight, where Adam has two",
        right + output: "neither the squares nor a loss from `mean` stay as large as "
        "the output",
    }
    why = "add up, in MiB: weights, momentum, x, GELU's input and output, the output"
    counted(answer, right, mistakes, why, near=0.0018, unit=MIB)


@solution("04.1")
def solution_1():
    """Only the tensors that live at this moment count.

    The first step has left the weights and their momentum; `zero_grad()` has dropped
    the gradients. The graph of the second step keeps what `backward()` will need:
    `x` for the first layer, the GELU's input for the GELU, the GELU's output for the
    second layer, and the output for `square`. `mean` keeps nothing, and the loss is one
    number.
    """
    rows, width, hidden = 2048, 512, 2048
    weights = 2 * width * hidden * 4
    momentum = weights
    x = rows * width * 4
    gelu_input = rows * hidden * 4
    gelu_output = gelu_input
    output = rows * width * 4
    nbytes = weights + momentum + x + gelu_input + gelu_output + output
    answer = nbytes / 2**20
    return answer


@exercise(
    "04.2",
    hints=(
        "Three things are kept that nobody asked for: the graph of each batch, the "
        "storage of each output, and the storage of each loss. Which call gives up "
        "which of them?",
        "`torch.no_grad()` does without the graph. A row is a view of the whole "
        "output, and `mse_loss` makes its result as large as the output: `detach()` "
        "keeps both storages. Which call makes a storage of its own, and when must it "
        "come?",
    ),
)
def lean_evaluation(function) -> None:
    """A function (model, batches) -> (losses, first rows), which keeps nothing else."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).cuda()
    data = torch.rand(4, 2, 512, 256, generator=generator).cuda()
    batches = [(x, y) for x, y in data]
    wanted = [[], []]
    with torch.no_grad():
        for x, y in batches:
            wanted[0].append(mse_loss(model(x), y).cpu())
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
    why = "it should return two lists, a loss and a row for each batch"
    results = [sequence(part, why) for part in sequence(results, why)]
    if [len(part) for part in results] != [4, 4]:
        raise Wrong(why)
    for what, part, right in zip(("loss", "row"), results, wanted, strict=True):
        _check_values(what, part, right)
    for what, part in zip(("loss", "row"), results, strict=True):
        nbytes = part[0].untyped_storage().nbytes()
        if nbytes > 4096 and part[0].data_ptr() != part[1].data_ptr():
            raise Wrong(
                f"a {what} of {part[0].nbytes:,} bytes keeps a storage of "
                f"{nbytes:,}; detach() is not enough"
            )
    if held > 8 * 1024 + 4096:
        raise Wrong(f"{held:,} bytes live when it has returned; who holds them?")
    most = 5.5 * MIB  # a hidden layer's input and output, an output, a loss and an old
    if peak > most:
        raise Wrong(
            f"its peak is {peak / MIB:.1f} MiB, and {most / MIB:.1f} would do: run the "
            "model without gradients, and keep no batch until the next"
        )


@solution("04.2")
def solution_2():
    """Without gradients there is no graph, and a clone has a storage of its own.

    `clone()` must come inside the loop. Then the output and the large storage of the
    loss are dropped in each step, when their names get the next batch's.
    """

    def evaluate(model, batches):
        losses, rows = [], []
        with torch.no_grad():
            for x, y in batches:
                output = model(x)
                losses.append(mse_loss(output, y).clone())
                rows.append(output[0].clone())
        return losses, rows

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


@exercise(
    "04.3",
    hints=(
        "The table under *Cost* lists who holds memory and when. Part of it grows with "
        "the rows, the rest does not. Which line of a step is the highest moment with "
        "Adam, and what is there then?",
        "At the last ReLU of `backward()`, count the tensors of 2048 bytes a row: what "
        "you hold, what the ReLUs have returned, the loss, and two gradients. Then set "
        "aside the weights, Adam's state and the last layer's gradient.",
    ),
)
def largest_batch(rows) -> None:
    """Rows of a three-layer model that trains with Adam on 512 MiB.

    Tried: 35,840 fit, and 35,841 do not, because segments are rounded to 2 MiB.
    """
    rows, fits = number(rows, "rows"), 35_840
    if is_near(rows, fits, 0.04):
        return

    def guess(parts: int, memory: float = 512 * MIB) -> float:
        """Rows, if so many tensors as large as x are there at once."""
        return (memory - 10 * MIB) / (parts * 2048)

    mistakes = {
        guess(8): "8 tensors are never there at once: nobody names the output, so it "
        "is free before the worst moment; or one gradient is counted twice",
        guess(6): "one of 7 tensors is missing: x, y, two activations, the loss, and "
        "two gradients of activations",
        guess(5): "the gradients of activations come in twos: one comes in, one goes "
        "out",
        guess(4): "in backward() there are also two gradients of activations, and "
        "mse_loss's result",
        guess(7, 512 * MIB / 4): "a number is 4 bytes",
        guess(7, 512 * MIB * 4): "a number is 4 bytes",
    }
    name_mistake(rows, mistakes, 0.03)
    if rows > fits:
        raise Wrong(f"{rows:,} rows do not fit: what is there at the last ReLU?")
    raise Wrong(f"{rows:,} rows fit with room to spare")


@solution("04.3")
def solution_3():
    """The highest moment is in `backward()`, at the last ReLU.

    Seven tensors as large as `x` are there: `x`, `y`, what the two ReLUs have returned,
    the loss of `mse_loss`, and two gradients of activations, of which one comes in and
    one goes out. The output is not: no variable holds it. Weights, Adam's two numbers
    for each and the gradient of the last layer take 10 MiB, whatever the rows.

    That makes 36,700 rows. Trying it out shows 35,840: a tensor of more than 10 MiB has
    a segment of its own, which is rounded up to 2 MiB.
    """
    layer = (512 * 512 + 512) * 4
    fixed = 3 * layer + 2 * 3 * layer + layer
    each_row = 7 * 512 * 4
    rows = (512 * 2**20 - fixed) // each_row
    return rows


# -- answers ---------------------------------------------------------------------------


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
    "mib_after_forward": [56, 56.0005],
    "lean_evaluation": [with_clones, stacked],
    "largest_batch": [35_840, 36_700, 34_816],
}
WRONG = {
    "mib_after_forward": [
        (40, "two tensors, unlike with a ReLU"),
        (48, "momentum is one number"),
        (32, "momentum and GELU's input"),
        (52, "count x"),
        (64, "no gradients"),
        (60, "stay as large"),
        (56 * 2**20, "give MiB"),
        ("many", "give a number"),
        (17, "add up"),
    ],
    "lean_evaluation": [
        (as_given, "still has its graph"),
        (detached, "detach() is not enough"),
        (no_grad_only, "a loss of 4 bytes keeps a storage of"),
        (only_losses_cloned, "a row of 1,024 bytes keeps a storage of"),
        (cloned_late, "its peak is"),
        (cloned_with_graph, "without gradients"),
        (on_the_cpu, "leave it on the GPU"),
        (numbers, "is a float, not a tensor"),
        (whole_outputs, "row 0 is (512, 256)"),
        (last_rows, "another value"),
        (kept_elsewhere, "who holds them"),
        (lambda model, batches: [], "two lists"),
        (lambda model, batches: 1.0, "two lists"),
    ],
    "largest_batch": [
        (32_000, "8 tensors are never there"),
        (42_800, "one of 7 tensors is missing"),
        (51_400, "come in twos"),
        (64_000, "in backward() there are also"),
        (8_400, "a number is 4 bytes"),
        (100_000, "do not fit"),
        (1000, "room to spare"),
        ("all", "give a number"),
    ],
}
