"""Which kernel `F.scaled_dot_product_attention` takes, as CUDA chooses it.

Models: flash attention for float16 and bfloat16, else memory-efficient attention, else
plain matrix products ("math"), and cuDNN's before them on Hopper and Blackwell or where
a program prefers it, each where its restrictions, the program's switches
(`sdpa_kernel`, `torch.backends.cuda.enable_flash_sdp`) and its order of them allow.
Leaves out: that a length of heads must be a multiple of 4 or 8.

PyTorch's C++ chooses by the device that it sees, which is the CPU.
Source: ATen/native/transformers/cuda/sdp_utils.cpp of torch 2.15. On a card, the first
attention of a process writes cuDNN into the order, over that of an `sdpa_kernel(...,
set_priority=True)` around it; here the default order counts as nobody's, at any time.
"""

import math

import torch
from torch.nn.attention import SDPBackend
from torch.overrides import handle_torch_function, has_torch_function

from simgpu._api import autocast
from simgpu._compat import (
    attention_by_products,
    disabled_torch_function,
    raw_attention,
    sdp_priority_order,
)
from simgpu._dispatch import cudnn_attention
from simgpu._dispatch.placement import gpus_of

_raw_attention = raw_attention
_flash = torch.ops.aten._scaled_dot_product_flash_attention.default
_efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
_FLASH = SDPBackend.FLASH_ATTENTION.value
_EFFICIENT = SDPBackend.EFFICIENT_ATTENTION.value
_MATH = SDPBackend.MATH.value
_CUDNN = SDPBackend.CUDNN_ATTENTION.value
_USUAL = [_FLASH, _EFFICIENT, _MATH]
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_NO_OVERRIDE = disabled_torch_function
_LONGEST_HEAD = 256  # that flash attention takes
_AMPERE = (8, 0)  # compute capability of the first cards with bfloat16


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
    enable_gqa=False,
):  # fmt: skip
    """The function of this name: attention by the kernel that CUDA would choose.

    Args:
        query: (..., S, D).
        key: (..., S', D).
        value: (..., S', D').
        attn_mask: what broadcasts to (..., S, S'): True where a query sees a key, or
            what is added to their product.
        dropout_p: the probability with which a weight is zeroed.
        is_causal: whether no query sees a later key.
        scale: of the products; None is 1 / sqrt(D).
        enable_gqa: whether several heads of queries may share a head of keys.

    Raises:
        RuntimeError: if the program has switched off all that these inputs could take.
    """
    __tracebackhide__ = True
    inputs = (query, key, value, *(() if attn_mask is None else (attn_mask,)))
    gpu = _common_gpu(inputs)
    if gpu is None:
        _compare_devices(query, key, value)
    else:
        query, key, value, *masks = autocast.for_lower_precision(inputs)
    same = gpu is not None and query.dtype == key.dtype == value.dtype
    if not same or query.dtype not in _DTYPES:
        return _raw_attention(  # which refuses what does not fit together
            query, key, value, attn_mask, dropout_p, is_causal,
            scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip
    mask = _added(masks[0], query.dtype) if masks else None
    square = not is_causal or query.shape[-2] == key.shape[-2]
    no_flash = mask is not None or not square or gpu.card.capability < _AMPERE
    backend = _choose(query, key, value, no_flash, enable_gqa, gpu.card.capability)
    if backend == _MATH or _learns(mask):
        with autocast.without():
            return attention_by_products(
                query, key, value, mask, dropout_p, is_causal,
                scale=scale, enable_gqa=enable_gqa,
            )[0]  # fmt: skip
    if backend == _FLASH:
        return _flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if mask is not None:
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    learns = query.requires_grad or key.requires_grad or value.requires_grad
    learns = learns and torch.is_grad_enabled()
    if backend == _CUDNN:
        how = mask, learns, dropout_p, is_causal, False
        return cudnn_attention.attention(query, key, value, *how, scale=scale)[0]
    how = mask, learns, dropout_p, is_causal
    return _efficient(query, key, value, *how, scale=scale)[0]


def _compare_devices(*tensors) -> None:
    """PyTorch's C++ compares them where it knows them: GPU and host, and GPUs."""
    __tracebackhide__ = True
    tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    gpus = gpus_of(tensors)
    if len(tensors) == 3 and any(gpu is not gpus[0] for gpu in gpus):
        devices = [tensor.device for tensor in tensors]
        raise RuntimeError(
            "Expected query, key, and value to have the same device type, but got "
            "query.device: {} key.device: {} and value.device: {} instead.".format(
                *devices
            )
        )


def in_functional(query, key, value, *args, **kwargs):
    """The same in `torch.nn.functional`, which also calls it where our mode is off."""
    __tracebackhide__ = True
    mask = args[0] if args else kwargs.get("attn_mask")
    if _is_subclass(mask) and has_torch_function((mask,)):  # such as CausalBias
        function = torch.nn.functional.scaled_dot_product_attention
        inputs = (query, key, value, mask)
        return handle_torch_function(function, inputs, *inputs[:3], *args, **kwargs)
    if has_torch_function((query, key, value)):  # a mode or a subclass comes first
        return _raw_attention(query, key, value, *args, **kwargs)
    return scaled_dot_product_attention(query, key, value, *args, **kwargs)


def _is_subclass(mask) -> bool:
    """Whether a mask is a tensor whose class answers functions."""
    kind = type(mask)
    if kind is torch.Tensor or mask is None:
        return False
    return kind.__torch_function__ is not _NO_OVERRIDE


def _common_gpu(inputs):
    """The GPU of tensors on which CUDA has kernels; None if they are anything else."""
    if not all(isinstance(tensor, torch.Tensor) for tensor in inputs):
        return None
    gpus = gpus_of(inputs)
    if any(gpu is not gpus[0] for gpu in gpus):
        return None
    for tensor in inputs:
        kind = type(tensor)
        if kind is not torch.Tensor and kind.__torch_function__ is not _NO_OVERRIDE:
            return None
        if tensor.dim() < 2 or tensor.layout is not torch.strided or tensor.is_nested:
            return None
    return gpus[0]


def _added(mask, dtype):
    """A mask as what is added to the products: 0 for True and -inf for False.

    As `convert_boolean_attn_mask` of PyTorch makes it, without a copy from the host.
    """
    if mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask.logical_not(), -math.inf, zero)


def _choose(query, key, value, no_flash: bool, gqa: bool, capability) -> int:
    """The first kernel, in the program's order, that is on and takes these inputs."""
    __tracebackhide__ = True
    switches = torch.backends.cuda
    fused = _are_fused(query, key, value)
    order = sdp_priority_order()
    if order[: len(_USUAL)] == _USUAL and cudnn_attention.is_preferred(capability):
        order = [_CUDNN, *order]
    for backend in order:
        if backend == _FLASH and fused and not no_flash:
            if switches.flash_sdp_enabled() and _flash_takes(query, key, value, gqa):
                return backend
        elif backend == _EFFICIENT and fused and switches.mem_efficient_sdp_enabled():
            if _efficient_takes(query, key, value, capability):
                return backend
        elif backend == _CUDNN and fused and switches.cudnn_sdp_enabled():
            if cudnn_attention.takes(query, key, value, gqa, capability):
                return backend
        elif backend == _MATH and switches.math_sdp_enabled():
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def _are_fused(query, key, value) -> bool:
    """What both kernels ask: (B, H, S, D), none of it empty, D next to each other."""
    for tensor in (query, key, value):
        if tensor.dim() != 4 or not tensor.numel():
            return False
        if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
            return False
    same_batch = query.shape[0] == key.shape[0] == value.shape[0]
    return same_batch and key.shape[2] == value.shape[2]


def _flash_takes(query, key, value, gqa: bool) -> bool:
    if query.dtype not in (torch.float16, torch.bfloat16):
        return False
    if not query.shape[-1] == key.shape[-1] == value.shape[-1] <= _LONGEST_HEAD:
        return False
    heads, groups = query.shape[1], key.shape[1]
    shared = gqa and heads % groups == 0
    return groups == value.shape[1] and (heads == groups or shared)


def _efficient_takes(query, key, value, capability) -> bool:
    if query.dtype == torch.bfloat16 and capability < _AMPERE:
        return False
    return (
        query.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and query.shape[-1] == key.shape[-1]
        and query.shape[1] == key.shape[1] == value.shape[1]
    )


def _learns(mask) -> bool:
    """The CPU's kernel, which computes the values, has no gradient of a mask."""
    return mask is not None and mask.requires_grad and torch.is_grad_enabled()
