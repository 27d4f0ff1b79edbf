"""The whole program of a layout, for `simgpu dry-run` and for tests."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
)

from simgpu._plan.layout import Layout, blocks_of
from simgpu._plan.llama import Block, First, Last, Routed, angles_of
from simgpu._plan.shapes import Shape


class Stage(nn.Module):
    """Some of the blocks, in the first stage with the embedding, in the last the head.

    The first one takes token numbers (sequences, tokens). Whole, it makes a loss, if it
    has labels, too; a stage makes scores, or what the next one is given (tokens /
    slices, sequences, width).
    """

    def __init__(self, of: Shape, tokens: int, group, spread, context, recompute: str,
                 layers: range, is_last: bool):  # fmt: skip
        super().__init__()
        is_first = layers.start == 0
        self.first = First(of, group) if is_first else None
        self.blocks = nn.ModuleList(
            Block(of, group, recompute, spread, context, is_dense=i < of.dense)
            for i in layers
        )
        self.last = Last(of, group) if is_last else None
        if of.tied and is_first and is_last:
            self.last.head.weight = self.first.weight
        self.register_buffer("angles", torch.empty(0), persistent=False)
        self.of, self.tokens, self.context = of, tokens, context

    def to_card(self) -> None:
        self.to_empty(device="cuda")
        self.angles = angles_of(self.of, self.tokens, self.context).cuda()

    def forward(self, x, labels=None):
        if self.first is not None:
            x = self.first(x.t())
        for block in self.blocks:
            x = block(x, self.angles)
        if self.last is None:
            return x
        if labels is not None:
            return self.last(x, labels.t())
        return self.last.scores(x)


def train(shape: Shape, of: Layout, tokens: int, compiled: bool = False) -> None:
    """The program of a layout, as each of its ranks runs it, until it is stopped."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = init_device_mesh(
        "cuda", (of.stages, of.replicas, of.shards, of.slices),
        mesh_dim_names=("pp", "replicas", "shards", "tp"),
    )  # fmt: skip
    group = mesh["tp"].get_group() if of.slices > 1 else None
    shards = mesh["replicas", "shards"] if of.replicas > 1 else mesh["shards"]
    spread, experts = group, shards
    if of.apart(shape):
        rest = of.shards * of.slices // of.spread
        both = init_device_mesh(
            "cuda", (of.stages, of.replicas, rest, of.spread),
            mesh_dim_names=("pp", "replicas", "shards", "ep"),
        )  # fmt: skip
        spread = both["ep"].get_group() if of.spread > 1 else None
        experts = both["replicas", "shards"] if of.replicas > 1 else both["shards"]
    tokens //= of.context  # those of a sequence that a rank has
    context = _context(of)
    counts = blocks_of(shape.layers, of.stages * of.chunks)
    rank = mesh.get_local_rank("pp")
    mine = range(rank, len(counts), of.stages)
    options = {
        "mesh": shards,
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32,
                                          cast_forward_inputs=False),
        "reshard_after_forward": of.zero == 3,
    }  # fmt: skip
    stages = []
    for number in mine:
        with torch.device("meta"):
            before = sum(counts[:number])
            layers = range(before, before + counts[number])
            stage = Stage(shape, tokens, group, spread, context, of.recompute,
                          layers, number == len(counts) - 1)  # fmt: skip
        for block in stage.blocks:
            if compiled:
                block.compile()
            if isinstance(block.mlp, Routed):
                fully_shard(block.mlp.experts, **options | {"mesh": experts})
            fully_shard(block, **options)
        fully_shard(stage, **options)
        stage.to_card()
        stages.append(stage)
    alike: dict[object, list[nn.Parameter]] = {}  # of one mesh
    for weight in (weight for stage in stages for weight in stage.parameters()):
        alike.setdefault(weight.device_mesh, []).append(weight)
    groups = [{"params": weights} for weights in alike.values()]
    optimizer = torch.optim.AdamW(groups, fused=True)
    passes = _one(stages[0], of) if of.stages == 1 else _pipeline(
        shape, of, tokens, dict(zip(mine, stages, strict=True)), mesh)  # fmt: skip
    while True:
        ids = torch.zeros(of.micro * of.accumulate, tokens, dtype=torch.int64,
                          device="cuda")  # fmt: skip
        passes(ids)
        for weights in alike.values():
            nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _context(of: Layout):
    """The group whose ranks have parts of the sequences that this rank has."""
    if of.context == 1:
        return None
    sizes = of.stages * of.replicas, of.shards // of.context, of.context, of.slices
    ranks = torch.arange(of.gpus).view(sizes).transpose(2, 3).reshape(-1, of.context)
    return dist.new_subgroups_by_enumeration(ranks.tolist())[0]


def _one(model: Stage, of: Layout):
    def passes(ids):
        for i, part in enumerate(ids.split(of.micro), 1):
            if of.zero == 1:
                is_last = i == of.accumulate
                model.set_requires_gradient_sync(is_last)
                model.set_reshard_after_backward(is_last)
            (model(part, part) / of.accumulate).backward()

    return passes


def _pipeline(shape: Shape, of: Layout, tokens: int, stages: dict, mesh):
    """The schedule of this rank's stages, which PyTorch runs."""
    count = of.stages * of.chunks
    made = []
    for number, stage in stages.items():
        size = tokens // of.slices, of.micro, shape.hidden
        half = {"device": "meta", "dtype": torch.bfloat16, "requires_grad": True}
        given = out = torch.empty(size, **half)
        if number == 0:
            given = torch.empty(of.micro, tokens, device="meta", dtype=torch.int64)
        if number == count - 1:
            size = tokens, of.micro, shape.vocab // of.slices
            out = torch.empty(size, **half)
        device = torch.device("cuda", torch.cuda.current_device())
        made.append(PipelineStage(stage, number, count, device, (given,), (out,),
                                  group=mesh["pp"].get_group()))  # fmt: skip
    last = stages.get(count - 1)
    kind, its = Schedule1F1B, made[0]
    if of.chunks > 1:
        kind, its = ScheduleInterleaved1F1B, made

    def loss(scores, ids):
        return last.last.loss(scores, ids.t())

    schedule = kind(its, of.accumulate, scale_grads=False, loss_fn=loss)

    def passes(ids):
        given = (ids,) if 0 in stages else ()
        more = {"target": ids} if last is not None else {}
        schedule.step(*given, **more, return_outputs=False)

    return passes
