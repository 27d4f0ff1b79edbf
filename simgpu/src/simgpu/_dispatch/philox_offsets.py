"""How far each random kernel of CUDA moves a generator's offset.

Each thread of a kernel draws from a sequence of its own, so the offset grows by what
one thread draws: by 4 for a small tensor, by more only where the card's threads must
draw several times. Sources are PyTorch's: `calc_execution_policy` in
DistributionTemplates.h; Dropout.cu, Distributions.cu, Randperm.cuh,
MultinomialKernel.cu, RreluWithNoise.cu and Distributions.cpp. Leaves out: dropout
inside of cuDNN's RNNs, which has a state of its own.
"""

from collections.abc import Callable, Iterator

import torch

from simgpu._device.cards import Card

_BLOCK = 256  # threads of a block
_CALL = 4  # numbers that one call of cuRAND may use up
_WIDE = 2**28  # a range of integers from which on 64 bits are drawn for each
_INT32 = 2**31 - 1
_GRID_Y = 65535


def increment(call, out: torch.Tensor, card: Card) -> int:
    """By how much the kernels of a call move the offset, a multiple of 4.

    Args:
        call: an operation that draws.
        out: its first result.
        card: of the generator's GPU, whose threads bound the grid.
    """
    if "attention" in call.operation.name:
        return _in_attention(call)
    of = _INCREMENTS.get(call.operation.name, _elementwise)
    return -(-of(call, out, card) // 4) * 4


def _elementwise(call, out: torch.Tensor, card: Card) -> int:
    """A kernel with one number for each element of what it writes."""
    at_once = 2 if out.dtype in (torch.float64, torch.complex128) else 4
    return _drawn(out.numel() * (1 + out.is_complex()), out.dtype, card, at_once)


def _drawn(numel: int, dtype: torch.dtype, card: Card, at_once: int) -> int:
    """`distribution_nullary_kernel`: a thread draws 4 elements at once, or 2 wide ones.

    A tensor of 2 GiB or more is drawn in parts, after it was counted as a whole.
    """
    moved, parts = _one_kernel(numel, at_once, card), list(_parts(numel, dtype))
    if len(parts) > 1:
        moved += sum(_one_kernel(part, at_once, card) for part in parts)
    return moved


def _parts(numel: int, dtype: torch.dtype) -> Iterator[int]:
    """What 32 bits can index, halved until they can."""
    if (numel - 1) * dtype.itemsize < _INT32:
        yield numel
    else:
        yield from _parts(numel // 2, dtype)
        yield from _parts(numel - numel // 2, dtype)


def _one_kernel(numel: int, at_once: int, card: Card) -> int:
    if not numel:
        return 0
    most = card.multi_processors * (card.threads_per_multi_processor // _BLOCK)
    grid = min(most, -(-numel // _BLOCK))
    return ((numel - 1) // (_BLOCK * grid * at_once) + 1) * _CALL


def _integers(call, out: torch.Tensor, card: Card) -> int:
    given = {a.name: value for a, value in call.named_arguments()}
    low = given.get("from", given.get("low")) or 0
    high = given.get("to", given.get("high"))
    if high is None and "from" not in given:  # all that the dtype can count to
        wide = out.dtype in (torch.int64, torch.float64)
    else:
        wide = _end(high, out.dtype) - low >= _WIDE
    return _drawn(out.numel(), out.dtype, card, at_once=2 if wide else 4)


def _end(high: int | None, dtype: torch.dtype) -> int:
    if high is not None:
        return int(high)
    if dtype is torch.bool:
        return 2
    if dtype.is_floating_point:
        return round(2 / torch.finfo(dtype).eps)
    return torch.iinfo(dtype).max + 1


def _bernoulli(call, out: torch.Tensor, card: Card) -> int:
    """By one probability as ever, by a tensor of them 10 for each thread."""
    by_tensor = call.operation.func._overloadname in (
        "default",
        "out",
        "Tensor",
        "Tensor_out",
    )
    if by_tensor:
        return 10 if out.numel() else 0
    return _elementwise(call, out, card)


def _dropout(call, out: torch.Tensor, card: Card) -> int:
    train = call.argument(2, "train")
    if train is False or call.argument(1, "p") == 1:
        return 0
    return _one_kernel(out.numel(), 4, card)


def _in_attention(call) -> int:
    """Dropout in it: flash_api.cpp counts threads, attention.cu elements of scores."""
    given = {argument.name: value for argument, value in call.named_arguments()}
    if not given.get("dropout_p"):
        return 0
    (batch, heads, queries, _), key = given["query"].shape, given["key"]
    flash = "flash" in call.operation.name
    numbers = 32 if flash else queries * key.shape[2]
    return -(-batch * heads * numbers // 4) * 4


def _rrelu(call, out: torch.Tensor, card: Card) -> int:
    return _elementwise(call, out, card) if call.argument(4, "training") else 0


def _randperm(call, out: torch.Tensor, card: Card) -> int:
    """Random keys, then one number for each key that may be there twice."""
    return _drawn(out.numel(), torch.int64, card, at_once=2) + out.numel()


def _multinomial(call, out: torch.Tensor, card: Card) -> int:
    probabilities, samples = call.args[0], call.argument(1, "num_samples")
    if not out.numel():
        return 0
    if samples == 1 or not call.argument(2, "replacement"):
        return _elementwise(call, probabilities, card)
    rows = probabilities.shape[0] if probabilities.dim() > 1 else 1
    return ((rows - 1) // min(rows, _GRID_Y) + 1) * _CALL


def _always(numbers: int) -> Callable[..., int]:
    return lambda call, out, card: numbers


# operation -> numbers that a thread draws; what is not here draws by the element
_INCREMENTS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("random_", "randint", "randint_like"), _integers),
    **dict.fromkeys(("bernoulli", "bernoulli_"), _bernoulli),
    "native_dropout": _dropout,
    **dict.fromkeys(
        ("rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional"), _rrelu
    ),
    "randperm": _randperm, "multinomial": _multinomial, "poisson": _always(20),
    "_standard_gamma": _always(10), "_sample_dirichlet": _always(10),
    "binomial": _always(42),
}  # fmt: skip
