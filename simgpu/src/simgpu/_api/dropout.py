"""`F.dropout` in training: CUDA runs it as one kernel that keeps a mask of booleans.

On the CPU it is three passes, and the mask has the type of the input. Leaves out:
dropout in place and of whole channels, which CUDA does not fuse either.
"""

import torch

from simgpu._dispatch.placement import gpu_of

_raw_functional = torch.nn.functional.dropout
_raw_dropout = torch.dropout


def functional(input, p=0.5, training=True, inplace=False):
    """torch.nn.functional.dropout"""
    if inplace or not 0.0 <= p <= 1.0:
        return _raw_functional(input, p, training, inplace)
    return dropout(input, p, training)


def dropout(input, p, train):
    """torch.dropout"""
    fused = train and 0.0 < p < 1.0 and input.numel()
    if not fused or gpu_of(input) is None:
        return _raw_dropout(input, p, train)
    return torch.native_dropout(input, p, train)[0]
