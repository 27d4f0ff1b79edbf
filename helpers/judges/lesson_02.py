"""Judges of the exercises of lesson 02."""

import copy

import torch

from helpers.check import Wrong, call, exercise
from helpers.gpus import count_copies


@exercise("02.1")
def bytes_of_the_loop(answer) -> None:
    """Bytes that 100 steps of `seen[rows] += 1` and one `if` copy."""
    steps, rows, index = 100, 10, 8
    reasons = {
        rows * index + 1: "`rows` travels to be read and to be written, in int64",
        rows * index: "two indexings a step, and an `if` that needs an answer",
        2 * rows * index: "Python's `if` asks the GPU for its answer",
        2 * rows * index + 4: "the comparison is made on the GPU; a boolean comes back",
        2 * rows * index + 1 + 4: "only the answer comes back, not the minimum",
    }
    if answer in reasons or answer == 2 * rows * index + 1:
        raise Wrong("that is one step; the loop makes 100")
    for bytes_a_step, reason in reasons.items():
        if answer == steps * bytes_a_step:
            raise Wrong(reason)
    if answer == 2 * rows * index * steps + 1:
        raise Wrong("the `if` is asked in every step, not only when it is true")
    if answer != steps * (2 * rows * index + 1):
        raise Wrong("a step copies 10 indices for each indexing, and what `if` needs")


@exercise("02.2")
def noise_like(function) -> None:
    """A function x -> normal random numbers beside x."""
    for device, dtype in (
        ("cuda:1", torch.float32),
        ("cuda:3", torch.float64),
        ("cpu", torch.float16),
        ("cuda:2", torch.int64),
        ("cuda:0", torch.bool),
    ):
        x = torch.ones(40, 50, dtype=dtype, device=device)
        if dtype.is_floating_point:
            x.requires_grad_(True)
        beside = f"beside an x of {dtype} on {device}"
        with count_copies() as copies:
            noise = call(function, x, when=beside)
        wanted = dtype if dtype.is_floating_point else torch.float32
        if not isinstance(noise, torch.Tensor):
            raise Wrong(f"it returns a {type(noise).__name__}, not a tensor")
        if noise.device != x.device:
            raise Wrong(f"{beside} the noise is on {noise.device}")
        if noise.shape != x.shape:
            raise Wrong(f"the noise is {tuple(noise.shape)}, x is {tuple(x.shape)}")
        if noise.dtype != wanted:
            raise Wrong(f"{beside} the noise is {noise.dtype}, not {wanted}")
        if copies:
            raise Wrong(f"{beside} it copies {copies.nbytes:,} bytes; make it there")
        if noise.requires_grad:
            raise Wrong("the noise wants a gradient; new random numbers have none")
        if not bool((x == 1).all()):
            raise Wrong("it writes its numbers into x")
        numbers = noise.cpu().double()
        if torch.equal(numbers, function(x).detach().cpu().double()):
            raise Wrong("two calls give the same numbers")
        if abs(numbers.mean()) > 0.2 or abs(numbers.std() - 1) > 0.2:
            raise Wrong(
                f"mean {numbers.mean():.1f} and deviation {numbers.std():.1f} are not "
                "those of normal numbers, 0 and 1"
            )
        if numbers.abs().max() < 2:  # of 2000 normal numbers, 90 are beyond
            raise Wrong("no number is beyond 2, so they are not normal ones")


@exercise("02.3")
def hide_padding(module_class) -> None:
    """A module (x, lengths) -> x with zeros from each sequence's length on."""
    module = module_class()
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
        if not isinstance(result, torch.Tensor) or result.device != x.device:
            where = getattr(result, "device", type(result).__name__)
            raise Wrong(f"{about} the result is on {where}")
        if result.dtype != dtype:
            raise Wrong(f"{about} the result is {result.dtype}: a mask has changed it")
        if result.shape != x.shape:
            raise Wrong(f"the result is {tuple(result.shape)}, x is {tuple(x.shape)}")
        if not torch.equal(x.cpu(), values.to(dtype)):
            raise Wrong("it changes its input; make a new tensor")
        if not torch.equal(result.cpu(), expected.to(dtype)):
            raise Wrong(f"{about} a wrong element is hidden; lengths {lengths}")
        if copies:
            raise Wrong(
                f"{about} it copies {copies.nbytes} bytes; compare positions made "
                "beside x with all lengths at once"
            )
