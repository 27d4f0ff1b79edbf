"""Functions that read on the host what may be on a GPU, as CUDA's own do."""

import functools

import torch

from simgpu._compat import is_functorch_tensor, raw_group_tensors
from simgpu._dispatch.placement import gpu_of

_raw_one_hot = torch.nn.functional.one_hot
_raw_ctc_loss = torch.ctc_loss
_raw_tensor_split = torch.Tensor.tensor_split


def ctc_loss(log_probs, targets, input_lengths, target_lengths, *args, **kwargs):
    """torch.ctc_loss: the lengths may be anywhere, CUDA reads them on the host."""
    lengths = [
        value.tolist() if isinstance(value, torch.Tensor) else value
        for value in (input_lengths, target_lengths)
    ]
    return _raw_ctc_loss(log_probs, targets, *lengths, *args, **kwargs)


def one_hot(tensor, num_classes=-1):
    """F.one_hot: with a number of classes, CUDA reads nothing back to check it."""
    known = num_classes > 0 and tensor.dtype is torch.int64 and tensor.numel()
    batched = is_functorch_tensor(tensor)
    if batched or not known or gpu_of(tensor) is None:
        return _raw_one_hot(tensor, num_classes)
    zeros = tensor.new_zeros((*tensor.shape, num_classes))
    return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)


def tensor_split(self, indices_or_sections=None, dim=0, **kwargs):
    if indices_or_sections is None:  # by one of its other names
        (indices_or_sections,) = kwargs.values()
    if isinstance(indices_or_sections, torch.Tensor) and indices_or_sections.is_cuda:
        raise RuntimeError(
            "tensor_split expected tensor_indices_or_sections to be on cpu, but it's "
            f"on {indices_or_sections.device}"
        )
    return _raw_tensor_split(self, indices_or_sections, dim)


def group_by_device_and_dtype(lists, with_indices=False):
    """Optimizers make one group for each device and dtype.

    Raises:
        RuntimeError: if a parameter and its state are on different GPUs, or have dtypes
            that do not go together. A float32 state on the CPU passes.
    """
    groups: dict = {}
    for i, first in enumerate(lists[0]):
        key = (first.device, first.dtype)
        if key not in groups:
            groups[key] = ([[] for _ in lists], [])
        columns, indices = groups[key]
        for column, tensors in zip(columns, lists, strict=True):
            if tensors:
                _check_same_index(first, tensors[i])
                column.append(tensors[i])
        if with_indices:
            indices.append(i)
    return groups


def _check_same_index(first: torch.Tensor, other: torch.Tensor | None) -> None:
    """What may be beside a parameter, PyTorch decides, of stand-ins without data."""
    if other is None:
        return
    if other.device == first.device:
        places = ("meta", "meta")
    elif other.device.type == "cpu":
        places = ("meta", "cpu")
    else:
        places = ("cpu", "meta")
    _group_stand_ins(places, first.dtype, other.dtype)


@functools.cache  # of those that pass
def _group_stand_ins(places, *dtypes) -> None:
    pairs = zip(places, dtypes, strict=True)
    lists = [[torch.empty(0, device=place, dtype=dtype)] for place, dtype in pairs]
    raw_group_tensors(lists, False)
