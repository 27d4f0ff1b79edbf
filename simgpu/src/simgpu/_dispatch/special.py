"""Operations that are not run in the usual way: indexing, packed sequences, lists.

Factories and copies have files of their own.
"""

import contextlib

import torch

from simgpu._compat import (
    DispatchKey,
    DispatchKeySet,
    SetExcludeDispatchKeyGuard,
    has_kernel,
    is_torch,
)
from simgpu._dispatch.copies import log_copy
from simgpu._dispatch.errors import scalar_type_name
from simgpu._dispatch.low_precision import is_half, widened
from simgpu._dispatch.mode import DispatchMode
from simgpu._dispatch.operation import handles
from simgpu._dispatch.operation_call import Call
from simgpu._dispatch.placement import place_all, tensors_in
from simgpu._dispatch.versions import COUNTS
from simgpu._errors import NotSimulated

_COMPOSITE = DispatchKey.CompositeImplicitAutograd
_OF_ANY_DEVICE = DispatchKey.CompositeExplicitAutogradNonFunctional
_CONJUGATE = DispatchKey.Conjugate
_NEGATIVE = DispatchKey.Negative
_CPU_KERNEL = DispatchKeySet(DispatchKey.CPU)
_CUDA_KERNEL = DispatchKeySet(DispatchKey.CUDA)


@handles("foreach")
def foreach(call: Call):
    """`torch._foreach_*` takes lists; each position may be on its own device."""
    __tracebackhide__ = True
    gpus = set(call.gpus)
    if len(gpus) == 1:
        return call.run_on(gpus.pop())
    if call.operation.name == "_foreach_copy_":  # the one that may cross devices
        non_blocking = bool(call.argument(2, "non_blocking"))
        with DispatchMode(call.runtime):
            for target, source in zip(call.args[0], call.args[1], strict=True):
                target.copy_(source, non_blocking)
        return None
    lists = [value for value in call.args if _is_list_of_tensors(value)]
    length, results = len(lists[0]), []
    for i in range(length):
        args = [[v[i]] if _has_length(v, length) else v for v in call.args]
        part = call.with_tensors(tensors_in(args))
        part.args = args
        out = part.run_on(part.common_gpu())
        results += out if isinstance(out, (list, tuple)) else []
    return results or None


def _is_list_of_tensors(value) -> bool:
    return isinstance(value, (list, tuple)) and bool(tensors_in((value,)))


def _has_length(value, length: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == length


@handles("_pack_padded_sequence")
def pack_padded_sequence(call: Call):
    """Lengths and batch sizes stay on the host, as on CUDA."""
    data, lengths = call.tensors
    gpu, gpu_of_lengths = call.gpus
    if gpu_of_lengths is not None:
        raise RuntimeError(
            "'lengths' argument should be a 1D CPU int64 tensor, but got "
            f"{lengths.dim()}D {gpu_of_lengths.device} {scalar_type_name(lengths)} "
            "tensor"
        )
    if gpu is not None:
        call.is_work_of(gpu)
    packed, batch_sizes = _packed(call)
    if gpu is not None:
        blocks = place_all([packed], gpu)
        if call.is_logged():
            call.tensors = [data]
            call.log(gpu, packed, [packed], blocks)
    return packed, batch_sizes


def _packed(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The data, and the batch sizes, which are the host's also in a CUDA graph."""
    if not call.is_captured:
        return call.func(*call.args, **call.kwargs)
    _, batch_sizes = call.operation.func(*call.args, **call.kwargs)
    found = call.func
    call.func = lambda *args, **kwargs: found(*args, **kwargs)[0]
    return call.func(*call.args, **call.kwargs), batch_sizes


@handles("_linalg_check_errors")
def check_errors(call: Call):
    """The host reads whether a decomposition went well, and so waits."""
    gpu = call.gpus[0]
    if gpu is not None:
        log_copy(gpu, None, 4 * call.tensors[0].numel())
    return call.func(*call.args, **call.kwargs)


@handles("kernel of CUDA only")
def run_without_kernel(call: Call):
    """The CPU has no code for it, unless its tensors are sparse."""
    __tracebackhide__ = True
    gpu = call.common_gpu()
    try:
        return call.run_on(gpu)
    except NotImplementedError as error:
        if gpu is None or isinstance(error, NotSimulated):
            raise
    raise NotSimulated(call.operation.func.name())


def _convolution(x: torch.Tensor):
    """What convolves `x` on the CPU."""
    found = torch.ops.aten.convolution.default
    return widened(found) if is_half(x) else found


@handles("cudnn_convolution")
def cudnn_convolution(call: Call):
    x, weight, padding, stride, dilation, groups = call.args[:6]
    call.func = _convolution(x)
    more = (None, stride, padding, dilation, False, [0], groups)
    call.args, call.kwargs = (x, weight, *more), {}
    return call.run_on(call.common_gpu())


@handles("cudnn_convolution_transpose")
def cudnn_convolution_transpose(call: Call):
    x, weight, padding, output_padding, stride, dilation, groups = call.args[:7]
    call.func = _convolution(x)
    more = (None, stride, padding, dilation, True, output_padding, groups)
    call.args, call.kwargs = (x, weight, *more), {}
    return call.run_on(call.common_gpu())


@handles("record_stream")
def record_stream(call: Call):
    raise NotSimulated("record_stream called from C++")


@handles("copy")
def copy(call: Call):
    """`copy_` as functionalization has it: its result is a new tensor."""
    target, source = call.tensors
    with DispatchMode(call.runtime):
        return target.clone().copy_(source)


@handles("log_sigmoid_forward")
def log_sigmoid(call: Call):
    """CUDA keeps no buffer for backward; `out=` is as on the CPU."""
    __tracebackhide__ = True
    gpu = call.common_gpu()
    if gpu is not None and not call.operation.writes:
        found = call.func
        call.func = lambda x: (found(x)[0], x.new_empty(0))
    return call.run_on(gpu)


@handles("log_sigmoid_backward")
def log_sigmoid_backward(call: Call):
    """The CPU's code reads the buffer, which CUDA's does not have."""
    __tracebackhide__ = True
    gpu = call.common_gpu()
    if gpu is not None and not call.operation.writes:
        found = call.func
        buffer_of = torch.ops.aten.log_sigmoid_forward.default
        call.func = lambda grad, x, _: found(grad, x, buffer_of(x)[1])
    return call.run_on(gpu)


@handles("narrow_copy", "pixel_shuffle", "pixel_unshuffle")
def run_code_of_any_device(call: Call):
    """Only the CPU has a kernel for it, which lays out and checks in another way."""
    __tracebackhide__ = True
    if call.gpus[0] is None or call.tensors[0].is_sparse:
        return call.run_on(call.gpus[0])
    with DispatchMode(call.runtime):
        return call.func._op_dk(_OF_ANY_DEVICE, *call.args, **call.kwargs)


@handles("fsdp::chunk_cat_mixed_dtype")  # since torch 2.15
def chunk_cat(call: Call):
    """FSDP packs gradients: of one dtype, by the kernel that it had before."""
    if len({tensor.dtype for tensor in call.args[0]}) > 1:
        return call.run_on(call.common_gpu())
    with DispatchMode(call.runtime):
        torch.ops.aten._chunk_cat(*call.args, **call.kwargs)


@handles("composite")
def decompose(call: Call):
    """Inference mode sends composite operations whole: see their parts."""
    if any(tensor.is_nested for tensor in call.tensors):  # these have other parts
        return call.run_on(call.common_gpu())
    with _parts(call):
        return call.func._op_dk(_COMPOSITE, *call.args, **call.kwargs)


@handles("python kernel")
def run_python_kernel(call: Call):
    """A custom operation: the simulator must see what its Python code does."""
    on_gpu = any(call.gpus)
    keys = _CUDA_KERNEL if on_gpu else _CPU_KERNEL
    with _parts(call):
        return call.func.redispatch(keys, *call.args, **call.kwargs)


@contextlib.contextmanager
def _parts(call: Call):
    """The simulator sees what an operation is made of.

    A mode may run with these keys off. Then a lazy `conj()` would be lost, and what is
    changed would not count as changed; of an operation that counts by itself, it must
    not count twice. What `torch.library.custom_op` makes does since PyTorch 2.13 (pull
    request 184715).
    """
    keys, name = [_CONJUGATE, _NEGATIVE], call.func.name()
    twice = call.func.namespace != "aten" and is_torch((2, 13))
    if twice or not has_kernel(name, COUNTS):
        keys.append(COUNTS)
    with DispatchMode(call.runtime), contextlib.ExitStack() as stack:
        for key in keys:
            stack.enter_context(SetExcludeDispatchKeyGuard(key, False))
        yield
