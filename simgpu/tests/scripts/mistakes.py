"""What NCCL refuses, done on purpose by two ranks; each line says what came of it.

It knows nothing of a simulation.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank = int(os.environ["LOCAL_RANK"])
mine = torch.device("cuda", rank)


def tried(what, action):
    """Rank 1 says what happened to it."""
    try:
        result = action()
    except Exception as error:
        result = f"{type(error).__name__}: {str(error).splitlines()[-1]}"
    if rank == 1:
        print(f"{what}: {result}", flush=True)


def summed(tensor):
    dist.all_reduce(tensor)
    return tensor.flatten().tolist()


def wide():
    return torch.ones(4, 4, device=mine)


def two_gpus():
    first, second = nn.Linear(2, 2).to("cuda:0"), nn.Linear(2, 2).to("cuda:1")
    DDP(nn.Sequential(first, second))


def sparse():
    model = DDP(nn.Embedding(4, 2, sparse=True).to(mine), device_ids=[rank])
    model(torch.tensor([0], device=mine)).sum().backward()


dist.init_process_group()  # CPUs and GPUs
tried("no set_device", lambda: summed(torch.ones(1, device="cuda")))
tried("once more", lambda: summed(torch.ones(1, device="cuda")))
tried("on the host", lambda: summed(torch.ones(1)))
dist.destroy_process_group()

dist.init_process_group("nccl")  # under the same name
tried("right", lambda: summed(torch.ones(1, device=mine)))
tried("another GPU later", lambda: summed(torch.ones(1, device=f"cuda:{1 - rank}")))
tried("on the host, NCCL alone", lambda: summed(torch.ones(1)))
tried("every second column", lambda: summed(wide()[:, ::2]))
tried("one number, expanded", lambda: summed(torch.ones(1, device=mine).expand(4)))
tried("transposed", lambda: summed(wide()[:1].T))
tried("sparse gradients", sparse)
tried("a module on two GPUs", two_gpus)
dist.destroy_process_group()

dist.init_process_group("nccl", device_id=mine)
tried("not the bound GPU", lambda: summed(torch.ones(1, device=f"cuda:{1 - rank}")))
model = DDP(module=nn.Linear(2, 2, bias=False).to(mine), device_ids=[rank])
tried("by keyword", lambda: str(model(torch.ones(1, 2, device=mine)).device))
dist.destroy_process_group()
