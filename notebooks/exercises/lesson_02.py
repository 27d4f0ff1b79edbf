"""The exercises of lesson 02: copies that nobody wrote, and tensors made in place."""

import copy

import torch
from torch import nn

from exercises.counted import counted
from exercises.exercise import Wrong, call, exercise, solution
from exercises.results import a, equal, tensor
from helpers.gpus import count_copies


@exercise(
    "02.1",
    hints=(
        "One family of functions takes the shape, the dtype and the device from `x`. "
        "How do their names end?",
        "The table under *Where a new tensor goes* has the function that draws normal "
        "random numbers in this way. What does it need besides `x`?",
    ),
)
def noise_like(function) -> None:
    """A function x -> normal random numbers beside x."""
    for device, dtype in (
        ("cuda:1", torch.float32),
        ("cuda:3", torch.float64),
        ("cpu", torch.float16),
    ):
        x = torch.ones(40, 50, dtype=dtype, device=device, requires_grad=True)
        beside = f"beside an x of {dtype} on {device}"
        with count_copies() as copies:
            noise = call(function, x, when=beside)
        if tensor(noise, "it returns").device != x.device:
            raise Wrong(f"{beside} the noise is on {noise.device}")
        tensor(noise, "the noise is", x.shape)
        if noise.dtype != dtype:
            raise Wrong(f"{beside} the noise is {noise.dtype}, not {dtype}")
        if copies:
            raise Wrong(f"{beside} it copies {copies.nbytes:,} bytes; make it there")
        if noise.requires_grad:
            raise Wrong("the noise wants a gradient; new random numbers have none")
        if not bool((x == 1).all()):
            raise Wrong("it writes its numbers into x")
        numbers = noise.cpu().double()
        again = tensor(call(function, x, when=beside), "asked again, it returns")
        if equal(numbers, again.detach().double()):
            raise Wrong("two calls give the same numbers")
        if abs(numbers.mean()) > 0.2 or abs(numbers.std() - 1) > 0.2:
            raise Wrong(
                f"mean {numbers.mean():.1f} and deviation {numbers.std():.1f} are not "
                "those of normal numbers, 0 and 1"
            )
        if numbers.abs().max() < 2:  # of 2000 normal numbers, 90 are beyond
            raise Wrong("no number is beyond 2, so they are not normal ones")


@solution("02.1")
def solution_1():
    """A `_like` function takes its shape, dtype and device from `x`.

    `torch.randn_like(x)` draws its numbers on the device of `x`, so nothing has to be
    copied. Like every new tensor, they want no gradient.
    """

    def noise_like(x):
        return torch.randn_like(x)

    return noise_like


@exercise(
    "02.2",
    hints=(
        "The table under *Six copies in a step* says what an index and an `assert` "
        "copy; `if` copies as `assert` does. Which lines of this loop are of these two "
        "kinds, and how often does each of them run?",
        "`seen[rows] += 1` is short for `seen[rows] = seen[rows] + 1`. How often is "
        "`rows` used as an index there, how many bytes has one element of `rows`, "
        "and what exactly does Python's `if` need from the GPU?",
    ),
)
def bytes_of_the_loop(answer) -> None:
    """Bytes that 100 steps of `seen[rows] += 1` and one `if` copy."""
    steps, rows, index = 100, 10, 8
    right = 2 * rows * index + 1
    reasons = {
        rows * index + 1: "`rows` travels to be read and to be written, in int64",
        rows * index: "two indexings a step, and an `if` that needs an answer",
        2 * rows * index: "Python's `if` asks the GPU for its answer",
        2 * rows * index + 4: "the comparison is made on the GPU; a boolean comes back",
        2 * rows * index + 1 + 4: "only the answer comes back, not the minimum",
    }
    mistakes = {steps * nbytes: reason for nbytes, reason in reasons.items()}
    for nbytes in (*reasons, right):
        mistakes[nbytes] = "that is one step; the loop makes 100"
    mistakes[2 * rows * index * steps + 1] = (
        "the `if` is asked in every step, not only when it is true"
    )
    why = "a step copies 10 indices for each indexing, and what `if` needs"
    counted(answer, steps * right, mistakes, why)


@solution("02.2")
def solution_2():
    """An index on the CPU travels each time it is used.

    `seen[rows] += 1` first reads the elements at `rows` and then writes them. Both need
    `rows` on the GPU, so its 10 indices are copied twice. `torch.arange` makes int64,
    which has 8 bytes.

    `seen.min() > 0` is computed on the GPU. Python's `if` must know the answer, so one
    boolean comes back in every step, whether it is true or not. The minimum itself
    stays on the GPU.
    """
    steps = 100
    indices = 1000 // 100
    bytes_per_index = 8  # int64
    to_read = indices * bytes_per_index
    to_write = indices * bytes_per_index
    boolean_for_if = 1
    answer = steps * (to_read + to_write + boolean_for_if)
    return answer


@exercise(
    "02.3",
    hints=(
        "`NormalizeBeside` makes its constants beside its input. How can one "
        "comparison of positions with lengths make the full mask here, without a loop "
        "over the sequences?",
        "A position belongs to the sequence if it is smaller than the length, since "
        "positions count from 0. Which shapes must positions and lengths have, so "
        "that the mask fits `(batch, n, features)`, and which dtype must the mask "
        "have, so that `x` keeps its own?",
    ),
)
def hide_padding(module_class) -> None:
    """A module (x, lengths) -> x with zeros from each sequence's length on."""
    module = call(module_class)
    if not isinstance(module, nn.Module):
        raise Wrong(f"give a class of modules; this makes {a(type(module).__name__)}")
    for device, dtype, shape, lengths in (
        ("cuda:0", torch.float32, (3, 5, 2), (5, 0, 2)),
        ("cuda:2", torch.float64, (2, 7, 3), (1, 6)),
        ("cuda:3", torch.float16, (4, 3, 1), (3, 2, 1, 0)),
        ("cpu", torch.float32, (2, 4, 2), (3, 4)),
    ):
        values = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
        expected = values.clone()
        for row, length in enumerate(lengths):
            expected[row, length:] = 0
        x = values.to(device, dtype)
        beside = torch.tensor(lengths, device=device)
        replica = copy.deepcopy(module).to(device)
        with count_copies() as copies:
            result = call(replica, x, beside)
        about = f"with x on {device} as {dtype}"
        if tensor(result, f"{about} the result is").device != x.device:
            raise Wrong(f"{about} the result is on {result.device}")
        if result.dtype != dtype:
            raise Wrong(f"{about} the result is {result.dtype}: a mask has changed it")
        tensor(result, "the result is", x.shape)
        if not equal(x, values.to(dtype)):
            raise Wrong("it changes its input; make a new tensor")
        if not equal(result, expected.to(dtype)):
            raise Wrong(f"{about} a wrong element is hidden; lengths {lengths}")
        if copies:
            raise Wrong(
                f"{about} it copies {copies.nbytes} bytes; compare positions made "
                "beside x with all lengths at once"
            )


@solution("02.3")
def solution_3():
    """One comparison makes the mask for all sequences, where `x` is.

    A loop over `lengths` reads each length on the CPU, and that is a copy for each
    sequence. Broadcasting compares all positions with all lengths on the GPU instead:
    `(n,)` with `(batch, 1)` gives `(batch, n)`. One more dimension, and the mask fits
    all features.

    `positions` are made with `device=x.device`, so nothing travels. The mask is
    boolean, and a boolean never changes the dtype of a product, as a float32 mask would
    for a float16 `x`. The product is a new tensor, so the input stays as it is.
    """

    class HidePadding(nn.Module):
        def forward(self, x, lengths):  # (batch, n, features), (batch,)
            positions = torch.arange(x.shape[1], device=x.device)
            keep = positions < lengths.unsqueeze(1)
            return x * keep.unsqueeze(2)

    return HidePadding
