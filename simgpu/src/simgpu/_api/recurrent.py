"""`nn.LSTM`, `nn.GRU` and `nn.RNN` by cuDNN: what it refuses.

The CPU computes them step by step; on CUDA all steps are one operation of cuDNN, with
one backward. Models: its refusals, one buffer for all weights, and the warning where
they are not in one. Leaves out: what it keeps for backward, the copy of weights that
are not in one buffer, and its time.

Source: PyTorch's aten/src/ATen/native/cudnn/RNN.cpp, `use_cudnn` in
aten/src/ATen/native/RNN.cpp, and `_cudnn_rnn` in tools/autograd/derivatives.yaml.
"""

import itertools
import warnings

import torch

from simgpu._compat import (
    DispatchKey,
    SetExcludeDispatchKeyGuard,
    is_functorch_tensor,
    is_legacy_batchedtensor,
)
from simgpu._dispatch.placement import gpu_of, storage_of, tensors_in

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MODES = ("RNN_RELU", "RNN_TANH", "LSTM", "GRU")  # in the order of cuDNN's numbers
_NOT_FLAT = (
    "RNN module weights are not part of single contiguous chunk of memory. This means "
    "they need to be compacted at every call, possibly greatly increasing memory "
    "usage. To compact weights again call flatten_parameters()."
)
_DOUBLE_BACKWARD = (
    "the derivative for '_cudnn_rnn_backward' is not implemented. Double backwards is "
    "not supported for CuDNN RNNs due to limitations in the CuDNN API. To run double "
    "backwards, please disable the CuDNN backend temporarily while running the forward "
    "pass of your RNN. For example: \n"
    "with torch.backends.cudnn.flags(enabled=False):\n"
    "    output = model(inputs)"
)


def mode_of_cudnn(mode: str) -> int:
    """The number that cuDNN has for a kind of recurrent layer.

    Raises:
        ValueError: for another kind.
    """
    if mode not in _MODES:
        raise ValueError(f"Unknown mode: {mode}")
    return _MODES.index(mode)


def _run(raw, input, *args, **kwargs):
    """One of torch.lstm, gru, rnn_tanh and rnn_relu.

    Raises:
        RuntimeError: in cuDNN's words, where it takes the call and refuses.
    """
    if kwargs or not _takes(input):
        return raw(input, *args, **kwargs)
    # (hidden, weights, biases?, layers, dropout, training, ...); packed sequences have
    # the sizes of their batches before
    before = args[:1] if isinstance(args[2], (list, tuple)) else ()
    hidden, weights, *rest = args[len(before) :]
    is_training = rest[3]
    _check_hidden(tensors_in((hidden,)))
    if not _are_flat(weights):
        warnings.warn(_NOT_FLAT, stacklevel=2)
    if not torch.is_grad_enabled():
        return raw(input, *args)
    input = _without_double_backward(input)
    weights = [_without_double_backward(weight) for weight in weights]
    if isinstance(hidden, torch.Tensor):
        hidden = _without_double_backward(hidden)
    else:
        hidden = [_without_double_backward(part) for part in hidden]
    results = raw(input, *before, hidden, weights, *rest)
    for result in results:
        if result.grad_fn is not None:
            result.grad_fn.register_prehook(
                _check_training if is_training else _check_evaluation
            )
    return results


def flatten_weight(weights, *shape) -> torch.Tensor:
    """`torch._cudnn_rnn_flatten_weight`: weights become parts of one buffer.

    It is a kernel, so autograd does not see that they change: they may be views, as
    those of replicas are.

    Returns:
        the buffer.
    """
    buffer = weights[0].new_empty(sum(weight.numel() for weight in weights))
    for weight, offset in zip(weights, _offsets(weights), strict=True):
        part = buffer[offset : offset + weight.numel()].view(weight.shape)
        part.copy_(weight)
        with SetExcludeDispatchKeyGuard(DispatchKey.ADInplaceOrView, True):
            weight.set_(part)
    return buffer


def _offsets(weights) -> list[int]:
    """Where cuDNN has each weight: first all matrices, then all biases."""
    order = sorted(range(len(weights)), key=lambda i: weights[i].dim() == 1)
    ends = itertools.accumulate(weights[i].numel() for i in order)
    begins = dict(zip(order, [0, *ends], strict=False))
    return [begins[i] for i in range(len(weights))]


def _are_flat(weights) -> bool:
    """Whether all weights lie in one storage where cuDNN has them.

    Python's `flatten_parameters` takes no bfloat16, and nothing is said of that here.
    """
    if not torch.backends.cudnn.is_acceptable(weights[0]):
        return True
    places = [weight.storage_offset() for weight in weights]
    storages = {storage_of(weight).data_ptr() for weight in weights}
    return len(storages) == 1 and places == _offsets(weights)


def _takes(tensor) -> bool:
    """Whether cuDNN computes an RNN of `tensor`."""
    return (
        isinstance(tensor, torch.Tensor)
        and torch.backends.cudnn.enabled
        and tensor.dtype in _DTYPES
        and not is_functorch_tensor(tensor)
        and gpu_of(tensor) is not None
        and tensor.numel() > 0
    )


def _check_hidden(states: list[torch.Tensor]) -> None:
    for name, state in zip(("hx", "cx"), states, strict=False):
        if not state.is_contiguous():
            raise RuntimeError(f"rnn: {name} is not contiguous")


def _check_training(gradients) -> None:
    for gradient in gradients:
        if gradient is not None and (
            is_functorch_tensor(gradient) or is_legacy_batchedtensor(gradient)
        ):
            raise RuntimeError(
                "Batching rule not implemented for aten::_cudnn_rnn_backward. We could "
                "not generate a fallback."
            )


def _check_evaluation(gradients) -> None:
    _check_training(gradients)
    raise RuntimeError("cudnn RNN backward can only be called in training mode")


def _without_double_backward(tensor):
    """The same tensor, whose gradient has no derivative."""
    if not tensor.requires_grad:
        return tensor
    seen = tensor.view_as(tensor)
    seen.register_hook(_refuse_derivative)
    return seen


def _refuse_derivative(gradient):
    """With `create_graph=True`, the gradient is part of a graph that ends here."""
    return _Refused.apply(gradient) if torch.is_grad_enabled() else None


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradient):
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, _):
        raise NotImplementedError(_DOUBLE_BACKWARD)


def _by_cudnn(name: str):
    raw = getattr(torch, name)

    def run(input, *args, **kwargs):
        return _run(raw, input, *args, **kwargs)

    run.__name__ = name
    return run


functions = {name: _by_cudnn(name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
