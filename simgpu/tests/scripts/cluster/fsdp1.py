"""FullyShardedDataParallel, the first FSDP: its strategies, against one process."""

import copy
import functools

import torch
import torch.distributed as dist
from common import GPT, Block, adamw, agree, batches, join, leave, loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import (
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

rank, ranks, device = join()
mesh = init_device_mesh("cuda", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
blocks = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
large = functools.partial(size_based_auto_wrap_policy, min_num_params=2000)
half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
data = batches(3, 2 * ranks, device=device)
torch.manual_seed(0)
start = GPT().to(device)


def whole_state(model: FSDP, **options) -> dict:
    kind = StateDictType.FULL_STATE_DICT
    with FSDP.state_dict_type(model, kind, FullStateDictConfig(**options)):
        return model.state_dict()


def train(what: str, near: float = 1e-5, **options) -> None:
    reference, model = copy.deepcopy(start), copy.deepcopy(start)
    if rank:  # sync_module_states sends rank 0's to the others
        nn.init.zeros_(model.head.weight)
    model = FSDP(model, device_id=device, sync_module_states=True, **options)
    optimizer, expected = adamw(model), adamw(reference)
    for step, batch in enumerate(data):
        loss = loss_of(model, batch.chunk(ranks)[rank])
        loss.backward()
        norm = model.clip_grad_norm_(0.5)
        whole = loss_of(reference, batch)
        whole.backward()
        whole_norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        loss = loss.detach()
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        agree(f"{what}: loss of step {step}", loss, whole, atol=near)
        agree(f"{what}: norm of step {step}", norm.cpu(), whole_norm.cpu(), atol=near)
        for by in (optimizer, expected):
            by.step()
            by.zero_grad()
    state = whole_state(model)
    for name, parameter in reference.named_parameters():
        agree(f"{what}: {name}", state[name].cpu(), parameter.cpu(), atol=near)


train("FULL_SHARD", auto_wrap_policy=blocks)
train("parameters as they were", auto_wrap_policy=blocks, use_orig_params=True)
train("wrapped by size", auto_wrap_policy=large, forward_prefetch=True)
train("SHARD_GRAD_OP", auto_wrap_policy=blocks,
      sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)  # fmt: skip
train("HYBRID_SHARD", auto_wrap_policy=blocks, device_mesh=mesh,
      sharding_strategy=ShardingStrategy.HYBRID_SHARD)  # fmt: skip
train("_HYBRID_SHARD_ZERO2", auto_wrap_policy=blocks, device_mesh=mesh,
      sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2)  # fmt: skip
train("bfloat16", near=2e-2, auto_wrap_policy=blocks, mixed_precision=half)
train("CPU offload", auto_wrap_policy=blocks, cpu_offload=CPUOffload(True))

model = FSDP(copy.deepcopy(start), device_id=device, auto_wrap_policy=blocks)
with FSDP.summon_full_params(model):
    agree("summoned", model.module.head.weight, start.head.weight)
state = whole_state(model, offload_to_cpu=True, rank0_only=True)
assert (len(state) > 0) == (rank == 0)
assert all(value.device.type == "cpu" for value in state.values())
with model.no_sync():  # two batches for one step
    loss_of(model, data[0].chunk(ranks)[rank]).backward()
loss_of(model, data[1].chunk(ranks)[rank]).backward()
for batch in data[:2]:
    loss_of(start, batch).backward()
norm = model.clip_grad_norm_(1e9)
agree("no_sync", norm, nn.utils.clip_grad_norm_(start.parameters(), 1e9))

leave(f"fsdp1: {ranks} ranks")
