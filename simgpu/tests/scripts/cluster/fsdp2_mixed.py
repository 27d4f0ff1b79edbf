"""FSDP2's other options, each against one process.

A start on the meta device, bfloat16 with float32 sums, offload to the CPU, activation
checkpoints, a mesh of replicas and shards, and several batches for one step.
"""

import copy

import common
import torch
import torch.distributed as dist
from common import GPT, Block, adamw, agree, agree_on, batches, full, loss_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Replicate, Shard

# gloo for what is offloaded: norms of gradients that are on the CPU
rank, ranks, device = common.join("cpu:gloo,cuda:nccl")
data = batches(4, 2 * ranks, device=device)
torch.manual_seed(0)
start = GPT().to(device)


def shard(model: nn.Module, **options) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, **options)
    return fully_shard(model, **options)


def train(what: str, model: nn.Module, near: float = 1e-5) -> None:
    """Steps with clipped gradients; the end is compared with one process."""
    reference = copy.deepcopy(start)
    optimizer, expected = adamw(model), adamw(reference)
    for step, batch in enumerate(data[:2]):
        loss = loss_of(model, batch.chunk(ranks)[rank])
        loss.backward()
        whole = loss_of(reference, batch)
        whole.backward()
        loss = loss.detach()
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        agree(f"{what}: loss of step {step}", loss, whole, atol=near)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        whole_norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        agree(f"{what}: norm {step}", full(norm).cpu(), whole_norm.cpu(), atol=near)
        optimizer.step()
        expected.step()
        agree_on(what, model, reference, atol=near)
        optimizer.zero_grad()
        expected.zero_grad()


# -- no memory for the whole model, on any GPU -----------------------------------------

with torch.device("meta"):
    model = GPT()
shard(model)
assert all(parameter.is_meta for parameter in model.parameters())
model.to_empty(device=device)
model.init_weights()
for name, parameter in model.named_parameters():
    assert parameter.device == device and full(parameter).isfinite().all(), name
weight = full(model.head.weight)
# `nn.Linear` draws evenly from -1 / sqrt(width) to that, each shard other numbers
bound = weight.shape[1] ** -0.5
one, other = weight.chunk(2)
agree("new weights", weight.std(), bound * 3**-0.5, rtol=0.1)
agree("shards differ", (one - other).abs().mean(), bound * 2 / 3, rtol=0.2)
state = start.state_dict() if rank == 0 else {}
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
set_model_state_dict(model, state, options=options)
train("meta", model)

# -- types, places ---------------------------------------------------------------------

half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
model = shard(copy.deepcopy(start), mp_policy=half)
seen = []
model.blocks[0].register_forward_hook(lambda *args: seen.append(args[2].dtype))
train("bfloat16", model, near=2e-2)
assert set(seen) == {torch.bfloat16}, seen
assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
exact = MixedPrecisionPolicy(param_dtype=torch.float64)
train("float64", shard(copy.deepcopy(start), mp_policy=exact))

model = shard(copy.deepcopy(start), offload_policy=CPUOffloadPolicy())
assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
train("offloaded", model)

model = copy.deepcopy(start)
apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
assert isinstance(model.blocks[0], CheckpointWrapper)
inner = copy.deepcopy(start)  # the names of a wrapped model differ: compare by order
shard(model)
loss_of(model, data[0].chunk(ranks)[rank]).backward()
loss_of(inner, data[0]).backward()
for one, other in zip(model.parameters(), inner.parameters(), strict=True):
    agree("activation checkpoints", one.grad, other.grad)

# -- replicas of shards ----------------------------------------------------------------

names = ("replicate", "shard")
mesh = init_device_mesh("cuda", (2, ranks // 2), mesh_dim_names=names)
model = shard(copy.deepcopy(start), mesh=mesh)
assert model.head.weight.placements == (Replicate(), Shard(0))
train("HSDP", model)

# -- several batches, one reduction ----------------------------------------------------

for what, replicas in (("FSDP", None), ("HSDP", mesh)):
    model, reference = shard(copy.deepcopy(start), mesh=replicas), copy.deepcopy(start)
    for i, batch in enumerate(data):
        last = i + 1 == len(data)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last)
        if what == "FSDP":
            model.set_requires_gradient_sync(last)
        else:  # reduce-scatter each time, all-reduce among replicas at the end
            model.set_requires_all_reduce(last)
        loss_of(model, batch.chunk(ranks)[rank]).backward()
        loss_of(reference, batch).backward()
    agree_on(f"{what}: accumulated", model, reference)

dist.barrier(device_ids=[rank])
common.leave(f"fsdp2_mixed: {ranks} ranks")
