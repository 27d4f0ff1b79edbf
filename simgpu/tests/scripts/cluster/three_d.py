"""Pipeline, FSDP2 and tensor parallelism together, on a mesh of 2 x 2 x 2 GPUs."""

import copy

import common
import torch
import torch.distributed as dist
from common import GPT, Part, adamw, agree, agree_on, batches, loss_of, split_plan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F

rank, ranks, device = common.join()
shape = (ranks // 4, 2, 2)
mesh = init_device_mesh("cuda", shape, mesh_dim_names=("pp", "dp", "tp"))
stages, stage = mesh["pp"].size(), mesh["pp"].get_local_rank()
parts, part = mesh["dp"].size(), mesh["dp"].get_local_rank()

torch.manual_seed(0)
reference = GPT(blocks=stages).to(device)
model = Part(copy.deepcopy(reference), stage, stages)
parallelize_module(model, mesh["tp"], split_plan(model, loss_parallel=False))
for block in model.blocks.values():
    fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


microbatches = 4
pipe = PipelineStage(model, stage, stages, device, group=mesh["pp"].get_group())
schedule = Schedule1F1B(pipe, microbatches, loss_fn=token_loss)
optimizer, expected = adamw(model), adamw(reference)
for step, batch in enumerate(batches(3, 2 * microbatches * parts, device=device)):
    mine = batch.chunk(parts)[part]
    losses = []
    inputs = [mine[:, :-1].contiguous()] if stage == 0 else []
    if stage == stages - 1:
        schedule.step(*inputs, target=mine[:, 1:], losses=losses)
    else:
        schedule.step(*inputs)
    optimizer.step()
    whole = loss_of(reference, batch)
    whole.backward()
    expected.step()

    if losses:
        loss = torch.stack(losses).mean().detach()
        dist.all_reduce(loss, dist.ReduceOp.AVG, group=mesh["dp"].get_group())
        agree(f"loss of step {step}", loss, whole)
    agree_on(f"step {step}, stage {stage}", model, Part(reference, stage, stages))
    optimizer.zero_grad()
    expected.zero_grad()

dist.barrier(device_ids=[rank])
common.leave(f"three_d: mesh {shape}, loss {whole.item():.4f}")
