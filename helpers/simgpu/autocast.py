"""`torch.autocast("cuda")` on simulated GPUs: which operations run in which type.

Models: CUDA's lists of operations, its cache of weights that were cast, and that only
tensors on a GPU are cast. PyTorch's dispatcher does the rest: while autocast is
enabled, each of these operations goes to its kernel for AutocastCUDA, which is ours
while GPUs are simulated. Leaves out: that `autocast("cpu")` does not cast tensors of
GPUs (here it does), and `cudnn_*` operations, which no program calls.
`replacements()` is this file's part of the table that `start()` applies.

Source of the lists: ATen/autocast_mode.h of torch 2.13 (a test compares); operations
that another version does not list are left alone there.
Taught in 06-mix-precision.
"""

import functools
import threading
import warnings
import weakref

import torch

from helpers.simgpu.placement import gpu_of

LOWER_PRECISION = (  # in float16 or bfloat16
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc",
    "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input",
    "convolution", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv",
    "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul",
    "linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell",
    "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
)  # fmt: skip
FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p",
    "reciprocal", "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor",
    "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "rms_norm",
    "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim",
    "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss",
    "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss",
    "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss",
    "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm",
    "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d",
    "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d",
    "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
)  # fmt: skip
FLOAT32_RESULT = (  # those with an argument dtype=, unless the program gives it
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum",
    "linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum",
    "sum.dim_IntList",
)  # fmt: skip
FLOAT32_NORMS = ("norm.Scalar", "norm.ScalarOpt_dim")  # as _dtype overloads
WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler",
    "index_put", "tensordot", "scatter_add",
)  # fmt: skip
REFUSED = ("binary_cross_entropy",)
# cuDNN runs these whole, and is given all in the lower precision
RECURRENT = tuple(
    f"{kind}.{how}"
    for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for how in ("input", "data")
)

_KEY = torch._C.DispatchKey.AutocastCUDA
_OFF = torch._C.DispatchKeySet(_KEY)
_raw_set_enabled = torch.set_autocast_enabled
_raw_clear_cache = torch.clear_autocast_cache


def _lower() -> torch.dtype:
    return torch.get_autocast_dtype("cuda")


def _is_eligible(value) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and gpu_of(value) is not None
    )


_cache: dict[int, tuple[weakref.ref, torch.Tensor]] = {}  # weights that were cast


def _cast(value, dtype: torch.dtype):
    """`value`, with the GPU tensors in it as `dtype`; weights are cast only once."""
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype) for item in value]
    if not _is_eligible(value) or value.dtype is dtype:
        return value
    is_weight = value.requires_grad and value.is_leaf and not value._is_view()
    lowers = value.dtype is torch.float32 and dtype is _lower()
    if not (is_weight and lowers and torch.is_autocast_cache_enabled()):
        return value.to(dtype)
    if torch.is_inference_mode_enabled():
        return value.to(dtype)
    known = _cache.get(id(value))
    if known is None or known[0]() is not value:
        with torch.enable_grad():  # who uses it next may need its gradient
            known = _cache[id(value)] = (weakref.ref(value), value.to(dtype))
    return known[1]


def _tensors(values) -> list[torch.Tensor]:
    found = []
    for value in values:
        found += _tensors(value) if isinstance(value, (list, tuple)) else [value]
    return [value for value in found if _is_eligible(value)]


# -- the kernels -----------------------------------------------------------------------


def _in_lower_precision(func, args, kwargs):
    dtype = _lower()
    kwargs = {name: _cast(value, dtype) for name, value in kwargs.items()}
    return func(*_cast(args, dtype), **kwargs)


def _in_float32(func, args, kwargs):
    kwargs = {name: _cast(value, torch.float32) for name, value in kwargs.items()}
    return func(*_cast(args, torch.float32), **kwargs)


def _with_float32_result(func, args, kwargs):
    if not _is_eligible(args[0]):
        return func(*args, **kwargs)
    place = [argument.name for argument in func._schema.arguments].index("dtype")
    if place < len(args):
        args = [*args]
        args[place] = args[place] or torch.float32
    elif kwargs.get("dtype") is None:
        kwargs = {**kwargs, "dtype": torch.float32}
    return func(*args, **kwargs)


def _norm_in_float32(func, args, kwargs):
    if not _is_eligible(args[0]):
        return func(*args, **kwargs)
    if func is torch.ops.aten.norm.Scalar:
        power = args[1] if len(args) > 1 else kwargs.get("p", 2)
        wider = torch.ops.aten.norm.ScalarOpt_dtype
        return wider(args[0], power, dtype=torch.float32)
    wider = torch.ops.aten.norm.ScalarOpt_dim_dtype
    return wider(*args, **kwargs, dtype=torch.float32)


def _in_the_widest(func, args, kwargs):
    types = {tensor.dtype for tensor in _tensors(args)}
    if types - {torch.float32, _lower()}:
        raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    dtype = torch.float32 if torch.float32 in types else _lower()
    kwargs = {name: _cast(value, dtype) for name, value in kwargs.items()}
    return func(*_cast(args, dtype), **kwargs)


def _refuse(func, args, kwargs):
    if not _tensors(args):
        return func(*args, **kwargs)
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to "
        "autocast. Leave the sigmoid out and use binary_cross_entropy_with_logits or "
        "torch.nn.BCEWithLogitsLoss, which are safe."
    )


_KERNELS = {
    _in_lower_precision: (*LOWER_PRECISION, *RECURRENT),
    _in_float32: FLOAT32,
    _with_float32_result: FLOAT32_RESULT,
    _norm_in_float32: FLOAT32_NORMS,
    _in_the_widest: WIDEST,
    _refuse: REFUSED,
}


def _kernel(policy, func):
    @functools.wraps(policy)
    def run(*args, **kwargs):
        __tracebackhide__ = True
        with torch._C._ExcludeDispatchKeyGuard(_OFF):
            return policy(func, args, kwargs)

    return run


class _Library:
    """Our kernels for AutocastCUDA, from the first use until the simulator stops."""

    def __init__(self):
        self.registered = None
        self.lock = threading.Lock()

    def open(self) -> None:
        with self.lock:
            if self.registered is None:
                self.registered = self._register()

    def _register(self) -> torch.library.Library:
        library = torch.library.Library("aten", "IMPL")
        theirs = torch._C._dispatch_get_registrations_for_dispatch_key(_KEY.name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that PyTorch's own are replaced
            for policy, names in _KERNELS.items():
                for name in names:  # not every version of PyTorch lists every one
                    if f"aten::{name}" in theirs or name in RECURRENT:
                        packet, _, overload = name.partition(".")
                        func = getattr(torch.ops.aten, packet)
                        func = getattr(func, overload or "default")
                        library.impl(name, _kernel(policy, func), _KEY.name)
        return library

    def close(self) -> None:
        if self.registered is not None:
            self.registered._destroy()
            self.registered = None
        _cache.clear()


library = _Library()


def set_enabled(*args, **kwargs) -> None:
    """`torch.set_autocast_enabled`, also in its old form without a device."""
    _raw_set_enabled(*args, **kwargs)
    start()


def start() -> None:
    """Our kernels, if this thread has autocast enabled."""
    if torch.is_autocast_enabled("cuda"):
        library.open()
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, True)


def clear_cache() -> None:
    """`torch.clear_autocast_cache`."""
    _cache.clear()
    _raw_clear_cache()


def stop() -> None:
    """PyTorch's own kernels again."""
    library.close()
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, False)


def replacements() -> list[tuple[object, str, object]]:
    """(owner, attribute, new value) for everything in this file."""
    return [
        (torch, "set_autocast_enabled", set_enabled),
        (torch, "clear_autocast_cache", clear_cache),
    ]
