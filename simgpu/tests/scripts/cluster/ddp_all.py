"""DistributedDataParallel with its options and PowerSGD, against one process."""

import copy

import torch
import torch.distributed as dist
from common import GPT, adamw, agree_on, batches, join, leave, loss_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

rank, ranks, device = join()
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

leave(f"ddp_all: {ranks} ranks")
