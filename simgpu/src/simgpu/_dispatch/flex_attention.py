"""The fused kernels of a compiled `flex_attention`: what they take, and how long.

Models: one kernel forward, which holds no scores and returns the output and two numbers
for each query; backward a kernel that adds up what each row of the output gave, and one
for all gradients. Blocks that no query of theirs sees are skipped. Leaves out: values,
which `_api/flex_attention.py` writes; the kernel of few queries ("flex decoding"); and
what `kernel_options` choose.

Sources: torch/_inductor/kernel/flex/flex_attention.py of torch 2.15 for the memory. For
the speed, beside FlashAttention 2: on A100 the article "FlexAttention: The Flexibility
of PyTorch with the Performance of FlashAttention" (PyTorch, 2024); on H100 the talk of
the same name at GTC 2025.
"""

import torch

from simgpu._dispatch.kernel_work import COUNTED
from simgpu._dispatch.operation import handles
from simgpu._dispatch.operation_call import Call
from simgpu._timing.kernel_cost import Attention

_FORWARD, _DELTA, _BACKWARD = (
    "flex_attention", "flex_attention_delta", "flex_attention_backward",
)  # fmt: skip
_library = torch.library.Library("simgpu", "DEF")
_library.define(
    f"{_FORWARD}(Tensor query, Tensor key, Tensor value, Tensor[] captured, "
    "float seen) -> (Tensor, Tensor, Tensor)"
)
_library.define(f"{_DELTA}(Tensor out, Tensor gradient) -> Tensor")
_library.define(
    f"{_BACKWARD}(Tensor query, Tensor key, Tensor value, Tensor[] captured, "
    "float seen, Tensor gradient, Tensor logsumexp, Tensor delta, bool[] wanted) "
    "-> Tensor[]"
)
forward = torch.ops.simgpu.flex_attention.default
delta = torch.ops.simgpu.flex_attention_delta.default
backward = torch.ops.simgpu.flex_attention_backward.default
_HOPPER = (9, 0)
# forward and backward, times FlashAttention 2; Blackwell as Hopper: assumed
_SPEED, _SPEED_ON_HOPPER = (0.90, 0.85), (1.25, 1.03)


def _dense(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    """Zeros whose dimensions lie in memory as those of a tensor do, without gaps."""
    order = sorted(range(len(shape)), key=lambda i: -tensor.stride(i))
    made = tensor.new_zeros([shape[i] for i in order])
    return made.permute([order.index(i) for i in range(len(shape))])


def _forward(query, key, value, captured, seen):
    """(B, H, S, D') output; (B, H, S) logarithms of sums, and largest scores."""
    rows = query.shape[:3]
    numbers = [query.new_zeros(rows, dtype=torch.float32) for _ in range(2)]
    return _dense(query, *rows, value.shape[-1]), *numbers


def _delta(out, gradient):
    return out.new_zeros(out.shape[:3], dtype=torch.float32)


def _backward(query, key, value, captured, seen, gradient, logsumexp, delta, wanted):
    """The gradients of query, key, value, and what of the captured is wanted."""
    of_inputs = [_dense(tensor, *tensor.shape) for tensor in (query, key, value)]
    captured = [t for t, its in zip(captured, wanted, strict=True) if its]
    return of_inputs + [tensor.new_zeros(tensor.shape) for tensor in captured]


def _count(call: Call, out) -> tuple[int, Attention]:
    """FLOPs of the blocks that are not skipped; five products in backward, not two."""
    query, key, value, _, seen = call.args[:5]
    is_backward = call.operation.name == _BACKWARD
    batch, heads, queries, width = query.shape
    pairs = batch * heads * queries * key.shape[2] * seen
    widths = 3 * width + 2 * value.shape[-1] if is_backward else width + value.shape[-1]
    on_hopper = call.gpus[0].card.capability >= _HOPPER
    speed = (_SPEED_ON_HOPPER if on_hopper else _SPEED)[is_backward]
    keys = max(1, round(key.shape[2] * seen))
    shape = Attention(batch * heads, queries, keys, width, speed=speed)
    return int(2 * pairs * widths), shape


for _name, _shape in ((_FORWARD, _forward), (_DELTA, _delta), (_BACKWARD, _backward)):

    @handles(_name)
    def _run(call: Call, shape=_shape):
        __tracebackhide__ = True
        call.func = shape
        return call.run_on(call.common_gpu())


COUNTED |= {_FORWARD: _count, _BACKWARD: _count}
