"""Tensor parallelism: a small GPT whose layers are split, against one process.

torchrun --nproc-per-node=4 tensor_parallel.py --sequence --loss-parallel
"""

import argparse
import copy
from contextlib import nullcontext

import torch
from common import GPT, adamw, agree, agree_on, batches, full, join, leave, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

parser = argparse.ArgumentParser()
parser.add_argument("--sequence", action="store_true", help="split between layers too")
parser.add_argument("--loss-parallel", action="store_true", help="keep logits split")
args = parser.parse_args()

rank, ranks, device = join()

torch.manual_seed(0)
reference = GPT().to(device)
model = copy.deepcopy(reference)
mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("tp",))

between = Shard(1) if args.sequence else Replicate()  # of activations between layers
plan = {
    "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
    "place": RowwiseParallel(
        input_layouts=Replicate(),
        output_layouts=Shard(0) if args.sequence else Replicate(),
    ),
    "head": ColwiseParallel(
        input_layouts=between,
        output_layouts=Shard(-1) if args.loss_parallel else Replicate(),
        use_local_output=not args.loss_parallel,
    ),
}
for i in range(len(model.blocks)):
    block = {
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=between),
        "feed.up": ColwiseParallel(),
        "feed.down": RowwiseParallel(output_layouts=between),
    }
    if args.sequence:
        gather = PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate()
        )
        block |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
        block |= {"attention": gather, "feed": gather}
    else:  # the same sum, made whole one module further out
        block["feed.down"] = RowwiseParallel(
            output_layouts=Shard(1), use_local_output=False
        )
        block["feed"] = PrepareModuleOutput(
            output_layouts=Shard(1), desired_output_layouts=Replicate()
        )
    plan |= {f"blocks.{i}.{name}": style for name, style in block.items()}
if args.sequence:
    plan["norm"] = SequenceParallel()
parallelize_module(model, mesh, plan)

first = model.blocks[0]
assert first.attention.query.weight.placements == (Shard(0),)
assert first.attention.out.weight.placements == (Shard(1),)
assert first.feed.up.bias.to_local().numel() == first.feed.up.bias.numel() // ranks
assert isinstance(first.norm1.weight, DTensor) == args.sequence

# foreach does not mix plain parameters and DTensors
optimizer, expected = adamw(model, foreach=False), adamw(reference, foreach=False)
for step, batch in enumerate(batches(3, 4, device=device)):
    whole = loss_of(reference, batch)
    whole.backward()
    expected.step()
    with loss_parallel() if args.loss_parallel else nullcontext():
        loss = loss_of(model, batch)
        loss.backward()
    optimizer.step()
    agree(f"loss of step {step}", full(loss), whole)
    agree_on(f"step {step}", model, reference)
    optimizer.zero_grad()
    expected.zero_grad()

kind = f"sequence {args.sequence}, loss_parallel {args.loss_parallel}"
leave(f"tensor_parallel: {ranks} ranks, {kind}, loss {whole.item():.4f}")
