"""DDP with its options, hooks and helpers, for several GPUs: all gradients agree.

Each way prints the largest difference of its gradients from those of one model that
has seen every rank's rows. It knows nothing of a simulation.
"""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
device = torch.device("cuda", rank)
dist.init_process_group("nccl", device_id=device)
ranks = dist.get_world_size()

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
x, y = torch.randn(8 * ranks, 8), torch.randint(0, 4, (8 * ranks,))
mine = slice(8 * rank, 8 * rank + 8)
whole = copy.deepcopy(net)
nn.functional.cross_entropy(whole(x), y).backward()


def loss_of(model):
    return nn.functional.cross_entropy(model(x[mine].to(device)), y[mine].to(device))


def wrapped(**options):
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(net))
    return DDP(synced.to(device), device_ids=[rank], **options)


def report(what, model):
    pairs = zip(model.module.parameters(), whole.parameters(), strict=True)
    worst = max((a.grad.cpu() - b.grad).abs().max().item() for a, b in pairs)
    on = {str(a.grad.device) for a in model.parameters()}
    if rank == 0:
        print(f"{what}: {'equal' if worst < 1e-6 else worst} on {', '.join(on)}")


for options in (
    {}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True},
    {"static_graph": True}, {"bucket_cap_mb": 0.001},
):  # fmt: skip
    model = wrapped(**options)
    for _ in range(2):  # the second time in rebuilt buckets
        model.zero_grad()
        loss_of(model).backward()
    report(", ".join(options) or "plain", model)

model = wrapped()
model.register_comm_hook(None, default_hooks.allreduce_hook)
loss_of(model).backward()
report("hook", model)

model = wrapped()
model.register_comm_hook(None, default_hooks.fp16_compress_hook)
loss_of(model).backward()
worst = max(
    (a.grad.cpu() - b.grad).abs().max().item()
    for a, b in zip(model.module.parameters(), whole.parameters(), strict=True)
)
if rank == 0:
    print(f"float16 hook: {'near' if 0 < worst < 1e-3 else worst}")

model = wrapped()
state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
losses = []
for _ in range(6):
    optimizer.zero_grad()
    losses.append(loss_of(model))
    losses[-1].backward()
    optimizer.step()
if rank == 0:
    print(f"PowerSGD, ZeRO: loss {'falls' if losses[-1] < losses[0] else losses}")

model = wrapped()
with model.no_sync():
    (loss_of(model) / 2).backward()
(loss_of(model) / 2).backward()
report("no_sync", model)
dist.destroy_process_group()
