"""The whole program of a layout, for `simgpu dry-run` and for tests."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from simgpu._plan.compose import Layout
from simgpu._plan.llama import Block, First, Last, angles_of
from simgpu._plan.shapes import Shape


class Decoder(nn.Module):
    """Token numbers and labels (tokens, sequences) to a loss."""

    def __init__(self, of: Shape, group, recompute: str):
        super().__init__()
        self.first = First(of, group)
        self.blocks = nn.ModuleList(
            Block(of, group, recompute) for _ in range(of.layers)
        )
        self.last = Last(of, group)
        if of.tied:
            self.last.head.weight = self.first.weight

    def forward(self, ids, labels, angles):
        x = self.first(ids)
        for block in self.blocks:
            x = block(x, angles)
        return self.last(x, labels)


def train(shape: Shape, of: Layout, tokens: int, compiled: bool = False) -> None:
    """The program of a layout without a pipeline, as each of its ranks runs it.

    Raises:
        ValueError: for a pipeline.
    """
    if of.stages > 1:
        raise ValueError("the whole program has no pipeline")
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    sizes = {"replicas": of.replicas, "shards": of.shards, "tp": of.slices}
    if of.replicas == 1:
        del sizes["replicas"]
    mesh = init_device_mesh("cuda", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    group = mesh["tp"].get_group() if of.slices > 1 else None
    with torch.device("meta"):
        model = Decoder(shape, group, of.recompute)
    names = ("replicas", "shards") if of.replicas > 1 else ("shards",)
    options = {
        "mesh": mesh[names] if len(names) > 1 else mesh["shards"],
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32,
                                          cast_forward_inputs=False),
        "reshard_after_forward": of.zero == 3,
    }  # fmt: skip
    for block in model.blocks:
        if compiled:
            block.compile()
        fully_shard(block, **options)
    fully_shard(model, **options)
    model.to_empty(device="cuda")
    angles = angles_of(shape, tokens).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    while True:
        for _ in range(of.accumulate):
            ids = torch.zeros(tokens, of.micro, dtype=torch.int64, device="cuda")
            (model(ids, ids, angles) / of.accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
