"""FSDP2: a small GPT in shards, against the same GPT in one process.

torchrun --nproc-per-node=4 fsdp2.py --reshard=yes --prefetch --clip=0.5
"""

import argparse
import copy

import torch
import torch.distributed as dist
from common import GPT, adamw, agree, agree_on, batches, full, join, leave, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--reshard", choices=["yes", "no", "2"], default="yes")
parser.add_argument("--prefetch", action="store_true")
parser.add_argument("--clip", type=float, default=0.5, help="largest norm of gradients")
args = parser.parse_args()

rank, ranks, device = join()

torch.manual_seed(0)
reference = GPT(blocks=3).to(device)
model = copy.deepcopy(reference)
mesh = init_device_mesh("cuda", (ranks,))
reshard = {"yes": True, "no": False, "2": 2}[args.reshard]
for block in model.blocks:
    fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
fully_shard(model, mesh=mesh)
assert isinstance(model, FSDPModule)
for parameter in model.parameters():
    assert isinstance(parameter, DTensor) and parameter.placements == (Shard(0),)
    assert parameter.device == device
weight = model.head.weight
assert weight.to_local().shape[0] == weight.shape[0] // ranks

if args.prefetch:  # gather two blocks ahead instead of one
    blocks = list(model.blocks)
    for i in range(len(blocks)):
        blocks[i].set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
        blocks[i].set_modules_to_backward_prefetch(blocks[max(0, i - 2) : i][::-1])

optimizer = adamw(model, foreach=True)
expected = adamw(reference, foreach=True)
for step, batch in enumerate(batches(args.steps, 2 * ranks, device=device)):
    if args.prefetch:
        model.unshard(async_op=True)  # before the forward pass asks for it
    loss = loss_of(model, batch.chunk(ranks)[rank])
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    loss = loss.detach()
    dist.all_reduce(loss, dist.ReduceOp.AVG)

    whole = loss_of(reference, batch)
    whole.backward()
    whole_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), args.clip)
    expected.step()
    agree(f"loss of step {step}", loss, whole)
    agree(f"norm of step {step}", full(norm), whole_norm)
    agree_on(f"step {step}", model, reference)
    optimizer.zero_grad()
    expected.zero_grad()

state = optimizer.state[weight]["exp_avg"]
assert isinstance(state, DTensor) and state.to_local().shape == weight.to_local().shape
agree("exp_avg", state, expected.state[reference.head.weight]["exp_avg"])
with torch.no_grad():  # for evaluation, gather by hand
    model.unshard()
    assert not isinstance(model.head.weight, DTensor)
    agree("unsharded", model.head.weight, reference.head.weight)
    model.reshard()
assert isinstance(model.head.weight, DTensor)

leave(f"fsdp2: {ranks} ranks, reshard {args.reshard}, loss {whole.item():.4f}")
