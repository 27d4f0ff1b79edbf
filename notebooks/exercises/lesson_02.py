"""The exercises of lesson 02: copies that nobody wrote, and tensors made in place."""

import copy

import torch
from torch import nn

from exercises.counted import is_near, number
from exercises.exercise import Wrong, call, exercise, solution
from exercises.results import a, equal, sequence, tensor
from helpers.gpus import count_copies


@exercise(
    "02.1",
    hints=(
        "`torch.arange` counts. Which of its arguments would a program on one GPU "
        "leave out?",
        "The numbers are int64, whatever the dtype of `x`. So only one thing comes "
        "from `x`, besides how many they are.",
    ),
)
def positions_like(function) -> None:
    """A function x -> 0, 1, ... for its columns, beside x."""
    for device, dtype in (
        ("cuda:1", torch.float32),
        ("cuda:3", torch.bfloat16),
        ("cpu", torch.int32),
    ):
        x = torch.ones(2, 300, dtype=dtype, device=device)
        beside = f"beside an x of {dtype} on {device}"
        with count_copies() as copies:
            positions = call(function, x, when=beside)
        if tensor(positions, "it returns").device != x.device:
            raise Wrong(f"{beside} the positions are on {positions.device}")
        if copies:
            raise Wrong(f"{beside} it copies {copies.nbytes:,} bytes; make them there")
        tensor(positions, "the positions are", x.shape[1:])
        if positions.dtype != torch.int64:
            raise Wrong(f"{beside} they are {positions.dtype}, not torch.int64")
        if positions.cpu().tolist() != list(range(300)):
            raise Wrong(f"{beside} they are not 0, 1, ... 299")
        if not bool((x == 1).all()):
            raise Wrong("it writes its numbers into x")


@solution("02.1")
def solution_1():
    """Count on the device of `x`.

    Without `device`, the numbers are made on the CPU, and an index or a sum with `x`
    copies them or fails. `x.new_tensor(range(n))` has the dtype of `x` and copies a
    list of Python's. A sum of ones in bfloat16 does not even count beyond 256.
    """

    def positions_like(x):
        return torch.arange(x.shape[1], device=x.device)

    return positions_like


SIZES = (256, 256, 88)  # samples of each batch of a validation


class _Watched(nn.Module):
    """A classifier that notes the size of each batch and the memory in use before."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
        self.sizes, self.in_use = [], []

    def forward(self, x):
        self.sizes.append(len(x))
        self.in_use.append(torch.cuda.memory_allocated(x.device))
        return self.layers(x)


@exercise(
    "02.2",
    hints=(
        "Four things in each batch make Python wait. Two of them send an index. Does "
        "a slice such as `images[first : first + 256]` need an index?",
        "Keep the count and the largest loss as tensors on the GPU. At the end, stack "
        "them and read both with one `tolist()`. What does the largest loss keep in "
        "memory if it has a graph?",
    ),
)
def validate_in_one_copy(function) -> None:
    """A function (model, images, labels) -> (share that is right, largest loss)."""
    images = torch.randn(sum(SIZES), 64, generator=torch.Generator().manual_seed(1))
    labels = images[:, :10].argmax(1)
    with torch.no_grad():
        scores = _Watched().layers(images)
    losses = nn.functional.cross_entropy(scores, labels, reduction="none")
    hits = (scores.argmax(1) == labels).double()
    for device in ("cuda:1", "cuda:0"):
        model = _Watched().to(device)
        there = images.to(device), labels.to(device)
        with count_copies() as copies:
            answer = call(function, model, *there, when=f"on {device}")
        found = sequence(answer, "return two numbers")
        if len(found) != 2:
            raise Wrong(f"return two numbers, not {len(found)}")
        if any(isinstance(each, torch.Tensor) for each in found):
            raise Wrong("it returns a tensor; return numbers of Python")
        share, largest = map(number, found)
        if max(model.sizes, default=0) > SIZES[0]:
            raise Wrong(f"a batch has {max(model.sizes)} samples; 256 are the most")
        if sum(model.sizes) != sum(SIZES):
            raise Wrong(f"the model sees {sum(model.sizes)} of {sum(SIZES)} samples")
        means = sum(part.mean().item() for part in hits.split(SIZES)) / len(SIZES)
        if is_near(share, means, 1e-6):
            raise Wrong("a mean of means: the last batch has fewer samples")
        if not is_near(share, hits.mean().item(), 1e-6):
            raise Wrong(f"{share:.4f} is not the share of samples that are right")
        if not is_near(largest, losses.max().item(), 1e-4):
            raise Wrong(f"{largest:.4f} is not the largest loss of all samples")
        sent = [one for one in copies if one.target != "cpu"]
        if sent:
            raise Wrong(f"{len(sent)} copies go to the GPU; a slice needs no index")
        if len(copies) == 2:
            raise Wrong("it copies twice at the end; stack both numbers first")
        if len(copies) != 1:
            raise Wrong(f"it copies {len(copies)} times; keep results on the GPU")
        if model.in_use[-1] - model.in_use[1] > 2**16:
            raise Wrong("each batch leaves activations in memory: torch.no_grad()")


@solution("02.2")
def solution_2():
    """Results stay on the GPU until the last batch, and arrive in one copy.

    A slice is a view, so it needs no index. Both results are tensors on the GPU: `+=`
    counts there, and `torch.maximum` compares there. `torch.stack` makes one tensor of
    them, and `tolist()` copies it once.

    The function as it was read each loss, and freed its graph. A loss that stays keeps
    the activations of its batch, so the loop needs `torch.no_grad()`.
    """

    @torch.no_grad()
    def validate(model, images, labels):
        right = images.new_zeros(())
        worst = images.new_zeros(())
        for first in range(0, len(images), 256):
            y = labels[first : first + 256]
            scores = model(images[first : first + 256])
            losses = nn.functional.cross_entropy(scores, y, reduction="none")
            right += (scores.argmax(1) == y).sum()
            worst = torch.maximum(worst, losses.max())
        right, worst = torch.stack([right, worst]).tolist()
        return right / len(images), worst

    return validate


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
