"""How a model is spread over the ranks of a job."""

from typing import NamedTuple

from simgpu._plan.parts import Key
from simgpu._plan.shapes import Shape


class Layout(NamedTuple):
    """How a model is spread, and what a rank computes at a time."""

    replicas: int  # of the shards' group
    shards: int  # ranks that share parameters, gradients and states (FSDP2)
    slices: int  # tensor parallelism, with sequence parallelism
    stages: int  # ranks of a pipeline
    chunks: int  # stages of each of them
    micro: int  # sequences of a micro-batch
    accumulate: int  # micro-batches of a step
    # 3: whole parameters are freed between forward and backward; 2: they are kept, and
    # gradients sent with each micro-batch; 1: these are added up whole, and sent once
    zero: int
    recompute: str  # "none", "selective", "full"
    spread: int = 1  # ranks, of slices and shards, over which experts are spread
    context: int = 1  # of the shards: ranks that have parts of each sequence

    @property
    def gpus(self) -> int:
        return self.replicas * self.shards * self.slices * self.stages

    def apart(self, shape: Shape) -> bool:
        """Whether experts lie on the ranks in another way than all else."""
        return shape.experts > 0 and self.spread != self.slices

    def groups(self, shape: Shape) -> int:
        """Those of a rank that send messages, each of which has NCCL's buffers."""
        sizes = list(self[:4])
        if self.apart(shape):
            rest = self.shards * self.slices // self.spread
            sizes += self.replicas, rest, self.spread  # of a mesh of their own
        parts = [size for size in sizes if 1 < size < self.gpus]
        whole = self.gpus > 1 and self.gpus in sizes  # PyTorch has one of all ranks
        return len(parts) + whole + (self.context > 1)

    def key(self, tokens: int) -> Key:
        return Key(self.micro, tokens, self.slices, self.recompute, self.spread,
                   self.context)  # fmt: skip


def blocks_of(layers: int, stages: int) -> list[int]:
    """Blocks of each stage; the embedding counts as one, and so does the head."""
    if stages == 1:
        return [layers]
    each, more = divmod(layers + 2, stages)
    made = [each + (i < more) for i in range(stages)]
    made[0] -= 1
    made[-1] -= 1
    return made
