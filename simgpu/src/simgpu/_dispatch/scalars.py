"""CPU tensors without dimensions, which may join an operation on a GPU, as on CUDA."""

import functools

import torch

from simgpu._dispatch.declarations import declaration


@functools.cache
def joins_scalars(func) -> bool:
    """Whether CUDA lets a CPU tensor without dimensions join this operation."""
    return "NoCheck" in declaration(func) or torch.Tag.pointwise in func.tags


def send_gradient_back(runtime, scalar: torch.Tensor) -> None:
    """A CPU scalar that joined an operation on a GPU gets its gradient on the CPU."""
    if scalar.requires_grad and scalar not in runtime.scalars_with_hook:
        runtime.scalars_with_hook.add(scalar)
        scalar.register_hook(lambda gradient: gradient.cpu())
