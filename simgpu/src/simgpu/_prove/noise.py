"""Rounding, made visible: every sum of a program is nudged as far as rounding may.

A result in floating point is right to a relative error of u (half the distance from 1
to the next number), and a sum of n terms to about u * sqrt(n) of the size of its terms
(Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019).
`Rounding` multiplies each element of such a result with 1 + e and adds e' * rms, with
e and e' at random and as large as that. Gradients pass through the factor and are
nudged as well. So two runs that differ only in this noise differ by what another order
of sums could do. This is Monte Carlo arithmetic (Parker, 1997).

Leaves out: errors within views and elementwise functions, which round once.
"""

import contextlib
import math
from collections.abc import Iterator
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from simgpu._compat import checkpoint_wrapper

_SUMS = {
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "mean", "sum",
    "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention", "softmax",
    "log_softmax", "logsumexp", "layer_norm", "rms_norm", "batch_norm", "group_norm",
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "embedding", "__matmul__",
    "binary_cross_entropy_with_logits",
}  # fmt: skip
_FLOAT32 = torch.finfo(torch.float32).eps / 2  # in which sums of bfloat16 are kept


class Rounding(TorchFunctionMode):
    """Nudges the results of sums while it is entered.

    Args:
        seed: of the noise; the program's own random numbers stay what they are.
    """

    def __init__(self, seed: int):
        super().__init__()
        self._undo = contextlib.ExitStack()
        self._random = torch.Generator().manual_seed(seed)

    def __enter__(self) -> "Rounding":
        # what is computed again would be nudged again, so nothing is
        self._undo.enter_context(_without_checkpoints())
        return super().__enter__()

    def __exit__(self, *exc_info) -> None:
        super().__exit__(*exc_info)
        self._undo.close()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") not in _SUMS:
            return out
        if not isinstance(out, torch.Tensor) or not out.is_floating_point():
            return out
        terms = _terms(out, args)
        if isinstance(out, DTensor):  # of one rank, which has all of it
            nudged = self._nudge(out.to_local(), terms)
            return DTensor.from_local(nudged, out.device_mesh, out.placements)
        return self._nudge(out, terms)

    def _nudge(self, out: torch.Tensor, terms: float) -> torch.Tensor:
        size = torch.finfo(out.dtype).eps / 2 + _FLOAT32 * math.sqrt(terms)
        factor, addend = (
            (torch.rand(out.shape, generator=self._random) * 2 - 1).to(out.device)
            for _ in range(2)
        )
        with torch.no_grad():
            rms = out.detach().float().square().mean().sqrt()
            addend = (size * rms * addend).to(out.dtype)
            factor = 1 + size * factor
        # a factor near 1 is lost in bfloat16
        return (out.float() * factor).to(out.dtype) + addend


@contextlib.contextmanager
def _without_checkpoints() -> Iterator[None]:
    """Activation checkpointing keeps everything: the values are the same."""
    options = {"use_reentrant", "preserve_rng_state", "context_fn", "determinism_check",
               "debug", "early_stop"}  # fmt: skip

    def call(function, *args, **kwargs):
        return function(*args, **{k: v for k, v in kwargs.items() if k not in options})

    with (
        mock.patch.object(checkpoint, "checkpoint", call),
        mock.patch.object(checkpoint_wrapper, "torch_utils_checkpoint", call),
    ):
        yield


def _terms(out: torch.Tensor, args: tuple) -> float:
    """How many terms the longest sum has, forward or backward."""
    tensors = [a for a in args if isinstance(a, torch.Tensor) and a.ndim]
    if not tensors:
        return 1.0
    reduced = tensors[0].numel() / max(out.numel(), 1)
    rows = out.numel() / out.shape[-1] if out.ndim else 1  # of a weight's gradient
    return max(float(tensors[0].shape[-1]), reduced, rows, 1.0)
