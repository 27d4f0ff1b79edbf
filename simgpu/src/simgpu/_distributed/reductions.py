"""`ReduceOp.PREMUL_SUM`, whose factor PyTorch's C++ keeps to itself."""

import torch.distributed as dist
from torch.distributed import distributed_c10d

from simgpu import _runtime as state

OPTIONS = (
    distributed_c10d.AllreduceOptions, distributed_c10d.AllreduceCoalescedOptions,
    distributed_c10d.ReduceOptions, distributed_c10d.ReduceScatterOptions,
)  # fmt: skip


class PremulSum(dist.ReduceOp):
    """A sum of what each rank has multiplied by its factor before."""

    premultiplier: object
    op = dist.ReduceOp.RedOpType.PREMUL_SUM

    def __eq__(self, other):
        return self is other or other == self.op

    def __hash__(self):
        return id(self)


def make_premul_sum(factor):
    """`_make_nccl_premul_sum`: each rank multiplies by `factor`, then they add."""
    op = PremulSum(dist.ReduceOp.SUM)
    op.premultiplier = factor
    return op


def noting_factor(options) -> property:
    """The property `reduceOp` of a call's options, which notes the factor."""
    raw = vars(options)["reduceOp"]

    def set_op(self, op) -> None:
        state.current().thread.premultiplier = getattr(op, "premultiplier", None)
        raw.__set__(self, op)

    return property(raw.__get__, set_op)
