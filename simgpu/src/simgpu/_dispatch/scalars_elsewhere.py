"""Operations that take a value from another device: `fill_`, `where`, `x[i] = y`, ...

CUDA's code reads it on the host (`item()`), or copies it to where it is needed. Which
of the two, decides whether the host waits. Sources: see `scalars.py`.
"""

import torch

from simgpu._compat import has_kernel
from simgpu._device.gpu import Gpu
from simgpu._dispatch import factories, in_place
from simgpu._dispatch.copies import log_copy, read_back
from simgpu._dispatch.cpp_tensors import is_of_this_call
from simgpu._dispatch.mode import DispatchMode
from simgpu._dispatch.named_devices import HOST
from simgpu._dispatch.operation import OF_ANY_DEVICE, handles
from simgpu._dispatch.operation_call import Call
from simgpu._dispatch.placement import gpu_of, gpus_of, tensors_in
from simgpu._dispatch.scalars import send_gradient_back
from simgpu._dispatch.special import decompose

aten = torch.ops.aten
_WITH_NUMBER = {
    "fill_": aten.fill_.Scalar,
    "index_fill_": aten.index_fill_.int_Scalar,
    "masked_fill_": aten.masked_fill_.Scalar,
}
_WHERE = {aten.where.self, aten.where.self_out}
_PUTS = {"index_put", "index_put_", "_index_put_impl_"}
_ON_HOST_OR_SAME = (
    "indices should be either on cpu or on the same device as the indexed tensor ({})"
)


def _are_apart(call: Call) -> bool:
    """Whether its tensors are on several devices, also where C++ made one of them."""
    gpus = call.gpus
    if all(gpu is gpus[0] for gpu in gpus):
        return False
    call.adopt(next(gpu for gpu in gpus if gpu is not None))
    return any(gpu is not gpus[0] for gpu in gpus)


def _moved(call: Call, tensor: torch.Tensor, gpu: Gpu | None) -> torch.Tensor:
    """A copy of `tensor` on another device; its gradient finds the way back."""
    __tracebackhide__ = True
    send_gradient_back(call.runtime, tensor)
    call.runtime.thread.asked_for_copy = True
    with DispatchMode(call.runtime):
        return aten._to_copy(tensor, device=gpu.device if gpu else HOST)


def _replace(call: Call, position: int, tensor: torch.Tensor) -> None:
    """Give a call another tensor as one of its arguments."""
    call.args = (*call.args[:position], tensor, *call.args[position + 1 :])
    call.tensors = tensors_in((*call.args, *call.kwargs.values()))
    call.gpus = gpus_of(call.tensors)


@handles("of any device")
def run_parts_if_apart(call: Call):
    """PyTorch has one code for all devices: its parts say what fits together."""
    __tracebackhide__ = True
    if len(call.gpus) < 2 or not _are_apart(call):
        return call.run_on(call.gpus[0] if call.gpus else None)
    name = call.func.name()
    key = next(key for key in OF_ANY_DEVICE if has_kernel(name, key))
    with DispatchMode(call.runtime):
        return call.func._op_dk(key, *call.args, **call.kwargs)


@handles("block_diag")
def block_diag(call: Call):
    """Its parts are copies, which cross devices; so it compares them first."""
    __tracebackhide__ = True
    for i, gpu in enumerate(call.gpus):
        if gpu is not call.gpus[0]:
            first, other = (g.device if g else HOST for g in (call.gpus[0], gpu))
            raise RuntimeError(
                "torch.block_diag: input tensors must all be on the same device. Input "
                f"0 is on device {first} and input {i} is on device {other}"
            )
    return call.run_on(call.common_gpu())


@handles("allclose")
def allclose(call: Call):
    __tracebackhide__ = True
    if len(call.gpus) > 1 and _are_apart(call):
        return run_parts_if_apart(call)
    return read_back(call)


@handles("linspace", "logspace")
def space(call: Call):
    """The host reads both ends where they are tensors."""
    __tracebackhide__ = True
    if not call.tensors:
        return factories.create(call)
    ends = list(call.args[:2])
    if not any(isinstance(end, torch.Tensor) for end in ends):
        return call.run_on(call.common_gpu())  # into what `out=` names
    if any(isinstance(end, torch.Tensor) and end.dim() for end in ends):
        return call.func(*call.args, **call.kwargs)  # which C++ refuses
    with DispatchMode(call.runtime):
        for i, end in enumerate(ends):
            if isinstance(end, torch.Tensor):
                ends[i] = end.item()
        packet = getattr(aten, call.operation.name)
        return packet(*ends, *call.args[2:], **call.kwargs)


@handles("masked_fill")
def masked_fill(call: Call):
    __tracebackhide__ = True
    if _are_apart(call):
        return run_parts_if_apart(call)
    return in_place.run(call, call.gpus[0])


@handles("fill_", "index_fill_", "masked_fill_")
def fill_(call: Call):
    """The value may be anywhere: the host reads it where it is not beside the rest."""
    __tracebackhide__ = True
    value = call.args[-1]
    if not isinstance(value, torch.Tensor) or not _are_apart(call):
        return call.run_on(call.common_gpu())
    if value.dim():
        return call.func(*call.args)  # which C++ refuses
    if call.operation.name == "masked_fill_" and call.gpus[0] is None:
        raise RuntimeError("masked_fill_: Expected inputs to be on same device")
    send_gradient_back(call.runtime, value)
    with DispatchMode(call.runtime):
        _WITH_NUMBER[call.operation.name](*call.args[:-1], value.item())
    return call.args[0]


@handles("where")
def where(call: Call):
    """Whatever has no dimensions is brought to the first GPU among the three."""
    __tracebackhide__ = True
    out = call.kwargs.get("out")
    if call.operation.func not in _WHERE:  # with numbers, as inference mode sends them
        return decompose(call)
    if len(call.tensors) < 3 or not _are_apart(call):
        return call.run_on(call.common_gpu())
    gpu = next(filter(None, call.gpus)) if out is None else gpu_of(out)
    for position, tensor in enumerate(call.args):
        if gpu is not None and gpu_of(tensor) is not gpu and tensor.dim() == 0:
            _replace(call, position, _moved(call, tensor, gpu))
    return call.run_on(call.common_gpu())


@handles("bernoulli_")
def bernoulli_(call: Call):
    """Probabilities are brought to where the result is."""
    __tracebackhide__ = True
    if len(call.tensors) > 1 and call.gpus[0] is not None and _are_apart(call):
        _replace(call, 1, _moved(call, call.args[1], call.gpus[0]))
    return call.run_on(call.common_gpu())


@handles("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
def index(call: Call):
    """`x[i, j]`: indices may be on the host, and a value of one element anywhere."""
    __tracebackhide__ = True
    gpu = call.gpus[0]
    indices = [tensor for tensor in call.args[1] if tensor is not None]
    for tensor in indices:
        its = gpu_of(tensor)
        if its is not None and its is not gpu:
            device = gpu.device if gpu else "cpu"
            raise RuntimeError(_ON_HOST_OR_SAME.format(device))
    if call.operation.name in _PUTS and gpu_of(call.args[2]) is not gpu:
        if _is_filled(call, gpu, indices):
            return call.args[0]
    if gpu is not None:
        for tensor in indices:
            if gpu_of(tensor) is None and not is_of_this_call(call.runtime, tensor):
                log_copy(None, gpu, tensor.numel() * tensor.element_size())
    call.with_tensors(_without(indices, call.tensors)).common_gpu()
    is_mask = [tensor.dtype in (torch.bool, torch.uint8) for tensor in indices]
    if gpu is not None and any(is_mask):  # the host must know how many it selects
        call.read_values()
        log_copy(gpu, None, 8)
    if call.operation.name == "index_put":
        return in_place.run(call, gpu)
    return call.run_on(gpu)


def _is_filled(call: Call, gpu: Gpu | None, indices: list) -> bool:
    """Bring the value of `x[i] = value`; one of the host fills where a mask says so.

    Returns:
        Whether that is done, and with it the call.

    Raises:
        RuntimeError: for a value of several elements that is added, in PyTorch's words.
    """
    __tracebackhide__ = True
    target, value = call.args[0], call.args[2]
    if is_of_this_call(call.runtime, value):
        return False
    accumulate = call.argument(3, "accumulate")
    on_host = gpu_of(value) is None and value.numel() == 1
    masks = len(indices) == 1 and indices[0].dtype in (torch.bool, torch.uint8)
    if on_host and masks and not accumulate and gpu_of(indices[0]) is gpu:
        if call.operation.name != "index_put":
            (mask,) = indices
            behind = target.dim() - len(call.args[1]) + 1 - mask.dim()
            with DispatchMode(call.runtime):
                mask = mask.bool()[(..., *[None] * behind)]
                send_gradient_back(call.runtime, value)
                target.masked_fill_(mask, value.item())
            return True
    if value.dim() == 0:
        _replace(call, 2, _moved(call, value, gpu))
    elif accumulate and gpu is not None:
        raise RuntimeError(
            f"expected device {gpu.device} but got device {value.device} for value "
            "tensor"
        )
    return False


def _without(some: list, tensors: list) -> list:
    return [t for t in tensors if not any(t is tensor for tensor in some)]
