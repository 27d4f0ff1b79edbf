"""From what a program calls a device to the simulated GPU that it means."""

from numbers import Integral

import torch

from simgpu import _runtime as state
from simgpu._compat import get_device_index
from simgpu._cuda_errors import words_of_cuda
from simgpu._device.gpu import Gpu
from simgpu._dispatch.backward import gpu_of_backward
from simgpu._errors import NotSimulated

HOST = torch.device("cpu")
META = torch.device("meta")  # tensors without values


def find_gpu(device: torch.device | int) -> Gpu | None:
    """The GPU that `device` names (None for the host); "cuda" is the current one.

    Raises:
        torch.AcceleratorError: for an index that does not exist.
        RuntimeError: in a forked child.
        NotSimulated: for any other kind of device.
    """
    runtime = state.current()
    if isinstance(device, Integral):
        device = torch.device("cuda", device)
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        raise NotSimulated(f"the device {str(device)!r}")
    if not runtime.initialized or runtime.forked:
        runtime.initialize()
    index = device.index
    if index is None:  # in backward, each node makes its own GPU the current one
        gpu = gpu_of_backward(runtime.thread.device_chosen_in)
        index = runtime.thread.device if gpu is None else gpu.index
    if index >= len(runtime.gpus):
        words = words_of_cuda("invalid device ordinal", "cudaErrorInvalidDevice")
        raise torch.AcceleratorError(words)
    return runtime.gpus[index]


def kept_on() -> torch.device:
    """Where PyTorch keeps what is on a GPU here: on the host, or nowhere at all."""
    return META if state.current().without_values else HOST


def gpu_named(device=None) -> Gpu:
    """The GPU that a call of `torch.cuda` names; None and -1 are the current one.

    Raises:
        ValueError: if it is not a CUDA device.
    """
    index = get_device_index(device, optional=True)
    return find_gpu(torch.device("cuda") if index < 0 else index)


def current_gpu() -> Gpu:
    """This thread's current GPU."""
    return find_gpu(torch.device("cuda"))
