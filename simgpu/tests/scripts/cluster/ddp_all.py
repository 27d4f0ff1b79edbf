"""DistributedDataParallel with its options and hooks, against one process."""

import copy
import os

import torch
import torch.distributed as dist
from common import GPT, adamw, agree_on, batches, loss_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
ranks = dist.get_world_size()
data = batches(4, 2 * ranks, device=device)
torch.manual_seed(0)
start = GPT().to(device)


def pair(**options):
    """A model in DDP, and the same model in this process alone."""
    model = copy.deepcopy(start)
    if rank:  # what rank 0 has is what counts
        nn.init.zeros_(model.head.weight)
    return DDP(model, device_ids=[rank], **options), copy.deepcopy(start)


for options in (
    {},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"bucket_cap_mb": 0.001, "broadcast_buffers": False},
    {"init_sync": True, "gradient_as_bucket_view": True, "static_graph": True},
):
    model, reference = pair(**options)
    optimizer, expected = adamw(model), adamw(reference)
    for step, batch in enumerate(data):
        for one, rows in ((model, batch.chunk(ranks)[rank]), (reference, batch)):
            one.zero_grad()
            loss_of(one, rows).backward()
        agree_on(f"{options}, step {step}", model.module, reference)
        optimizer.step()
        expected.step()

model, reference = pair()
for i, batch in enumerate(data):  # four batches for one step
    rows = batch.chunk(ranks)[rank]
    if i + 1 < len(data):
        with model.no_sync():
            loss_of(model, rows).backward()
    else:
        loss_of(model, rows).backward()
    loss_of(reference, batch).backward()
agree_on("no_sync", model.module, reference)

hooks = {
    "allreduce": (default_hooks.allreduce_hook, None, 1e-5),
    "float16": (default_hooks.fp16_compress_hook, None, 1e-3),
    "bfloat16": (default_hooks.bf16_compress_hook, None, 1e-2),
}
for name, (hook, state, near) in hooks.items():
    model, reference = pair()
    model.register_comm_hook(state, hook)
    for one, rows in ((model, data[0].chunk(ranks)[rank]), (reference, data[0])):
        loss_of(one, rows).backward()
    agree_on(f"hook {name}", model.module, reference, atol=near)

model, _ = pair()
state = powerSGD_hook.PowerSGDState(None, 4, start_powerSGD_iter=2)
model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
losses = []
for _ in range(8):
    optimizer.zero_grad()
    loss = loss_of(model, data[0].chunk(ranks)[rank])
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] <= losses[0], losses
every = [torch.empty_like(start.head.weight) for _ in range(ranks)]
dist.all_gather(every, model.module.head.weight.detach())
assert all(torch.equal(every[0], other) for other in every), "PowerSGD: ranks differ"

dist.destroy_process_group()
if rank == 0:
    print(f"ok ddp_all: {ranks} ranks")
