"""Values that a simulated GPU would hold, and this machine cannot."""

import re

import torch

from simgpu._device.sizes import show_bytes
from simgpu._dispatch.named_devices import find_gpu
from simgpu._dispatch.operation_call import Call

CANNOT_ALLOCATE = "DefaultCPUAllocator: can't allocate memory"
_ASKED = re.compile(r"you tried to allocate (\d+) bytes")


def raise_host_is_full(call: Call, kwargs: dict, error: RuntimeError) -> None:
    """Say why a call on a GPU has failed for want of the host's memory.

    If the card is full, that is said, as a real one would.

    Args:
        call: that has failed.
        kwargs: as the program gave them.
        error: of the CPU's allocator.

    Raises:
        torch.OutOfMemoryError: if the card has not the room either.
        RuntimeError: if it has; in a call on the host nothing is raised.
    """
    __tracebackhide__ = True
    gpu = next((gpu for gpu in call.gpus if gpu is not None), None)
    device = kwargs.get("device")
    if isinstance(device, torch.device) and device.type == "cuda":
        gpu = find_gpu(device)
    asked = _ASKED.search(str(error))
    if gpu is None or asked is None or (device is not None and device.type != "cuda"):
        return
    nbytes = int(asked[1])
    gpu.memory.check_room(nbytes, call.runtime.stream_of(gpu))
    raise RuntimeError(
        f"this machine does not have the memory for {show_bytes(nbytes)} of values "
        f"that {gpu.name} has room for; simulate less memory, with --memory or "
        "memory=, or ask simgpu.estimate, which needs no values "
        f"({CANNOT_ALLOCATE}: you tried to allocate {nbytes} bytes.)"
    ) from None
