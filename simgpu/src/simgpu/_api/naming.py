"""What a program may call a device: "cuda:1", `torch.device("cuda", 1)`, or 1."""

from numbers import Integral

import torch

from simgpu._dispatch.named_devices import find_gpu

_raw_device = torch.device


def as_device(device) -> torch.device | None:
    """A torch.device for anything that names one; None stays None."""
    if device is None or isinstance(device, _raw_device):
        return device
    if isinstance(device, Integral):
        return find_gpu(device).device
    return _raw_device(device)


def new_device(*args, **kwargs):
    """torch.device(1) is the GPU with index 1."""
    first = args[0] if args else kwargs.get("type")
    if isinstance(first, Integral) and not isinstance(first, bool):
        return _raw_device("cuda", first)
    return _raw_device(*args, **kwargs)
