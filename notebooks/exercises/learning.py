"""Checks of code that must learn: gradients and weights equal to one process's.

Tensors are compared as one long vector, so that the size of a difference, and whether
it is only a factor, can be said in one number.
"""

from collections.abc import Iterable

import torch

from exercises.exercise import Wrong


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """All of them behind one another, on the CPU."""
    return torch.cat([t.detach().cpu().flatten() for t in tensors])


def weights(model: torch.nn.Module) -> torch.Tensor:
    """All parameters as one vector."""
    return flat(model.parameters())


def gradients(model: torch.nn.Module) -> torch.Tensor:
    """All gradients as one vector.

    Raises:
        Wrong: if a parameter has none.
    """
    for name, p in model.named_parameters():
        if p.grad is None:
            raise Wrong(f"{name} has no gradient: is backward() called for each part?")
    return flat(p.grad for p in model.parameters())


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The length of the difference, over the length of what is wanted."""
    return ((found - wanted).norm() / wanted.norm()).item()


def factor(found: torch.Tensor, wanted: torch.Tensor, near: float) -> float | None:
    """How many times as long it is, if it points in the same direction."""
    times = (found @ wanted / wanted.square().sum()).item()
    if times > 0 and off(found, times * wanted) <= near:
        return times
    return None


def must_equal(
    found: torch.Tensor,
    wanted: torch.Tensor,
    near: float,
    mistakes: dict[str, torch.Tensor],
    what: str = "the gradient",
) -> None:
    """Two vectors must be equal.

    Args:
        found: the learner's.
        wanted: that of one process.
        near: the largest relative difference that counts as equal.
        mistakes: reason -> what the vector becomes by this mistake; a factor is told
            first, so that these need not have the right length.
        what: they are.

    Raises:
        Wrong: saying by how much they differ, and why if that is known.
    """
    error = off(found, wanted)
    if error <= near:
        return
    times = factor(found, wanted, near)
    if times is not None:
        raise Wrong(f"{what} is {times:.4g} times as long as it should be")
    for reason, vector in mistakes.items():
        if factor(found, vector, near) is not None:
            raise Wrong(f"{what} is off by {error:.0%}: {reason}")
    raise Wrong(f"{what} is off by {error:.0%}")
