"""Checks of what the learner's function returns, whatever that may be."""

from collections.abc import Sequence

import torch

from exercises.exercise import Wrong


def tensor(result, what: str, shape: Sequence[int] | None = None) -> torch.Tensor:
    """The learner's result, which must be a tensor, of this shape if one is given.

    Args:
        result: the learner's.
        what: the beginning of the reason: "piece 0 is", "it returns".
        shape: that it must have.

    Raises:
        Wrong: for anything else.
    """
    if not isinstance(result, torch.Tensor):
        raise Wrong(f"{what} {a(type(result).__name__)}, not a tensor")
    if shape is not None and tuple(result.shape) != tuple(shape):
        raise Wrong(f"{what} {tuple(result.shape)}, not {tuple(shape)}")
    return result


def sequence(result, what: str) -> list:
    """The items of the learner's result.

    Raises:
        Wrong: beginning with `what`, if it has none.
    """
    try:
        return list(result)
    except Exception:
        raise Wrong(f"{what}, not {a(type(result).__name__)}") from None


def equal(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether shape, dtype and all values are the same; devices may differ."""
    alike = found.shape == wanted.shape and found.dtype == wanted.dtype
    return alike and torch.equal(found.cpu(), wanted.cpu())


def near(found: torch.Tensor, wanted: torch.Tensor, **tolerance: float) -> bool:
    """The same for values that may differ by a `tolerance` of `torch.allclose`."""
    alike = found.shape == wanted.shape and found.dtype == wanted.dtype
    return alike and torch.allclose(found.cpu(), wanted.cpu(), **tolerance)


def a(name: str) -> str:
    """ "a list", "an int"."""
    return f"a{'n' if name[:1].lower() in tuple('aeiou') else ''} {name}"
