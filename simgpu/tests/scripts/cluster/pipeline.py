"""Pipeline parallelism under each schedule of PyTorch, against one process.

torchrun --nproc-per-node=4 pipeline.py Schedule1F1B ScheduleZBVZeroBubble
"""

import copy
import sys

import torch
import torch.distributed as dist
from common import GPT, Part, agree, agree_on, batches, join, leave, loss_of
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.nn import functional as F

SCHEDULES = {  # how many stages each rank holds
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleLoopedBFS": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
    "ScheduleDualPipeV": 2,
}
IN_A_V = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")  # rank 0: first and last stage
rank, ranks, device = join()
microbatches = 2 * ranks


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def run(name: str, held: int) -> None:
    """Two steps of gradients under one schedule."""
    torch.manual_seed(0)
    stages = held * ranks
    reference = GPT(blocks=stages).to(device)
    model = copy.deepcopy(reference)
    mine = [rank + i * ranks for i in range(held)]
    if name in IN_A_V:
        mine = [rank, stages - 1 - rank]
    parts = [
        PipelineStage(Part(model, i, stages), i, stages, device, group=dist.group.WORLD)
        for i in mine
    ]
    make = getattr(pipelining, name)
    takes = parts if held > 1 else parts[0]
    schedule = make(takes, microbatches, loss_fn=token_loss)
    for step, batch in enumerate(batches(2, 2 * microbatches, device=device)):
        for module in (model, reference):
            module.zero_grad()
        inputs, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        losses = []
        first = [inputs] if 0 in mine else []
        if stages - 1 in mine:
            out = schedule.step(*first, target=targets, losses=losses)
            agree(f"{name}: output", out, reference(inputs))
            loss = torch.stack(losses).mean()
        else:
            schedule.step(*first)
        whole = loss_of(reference, batch)
        whole.backward()
        if stages - 1 in mine:
            agree(f"{name}: loss of step {step}", loss, whole)
        for part in parts:
            assert all(p.grad is not None for p in part.submod.parameters()), name
            whole_part = Part(reference, part.stage_index, stages)
            agree_on(f"{name}: stage {part.stage_index}", part.submod, whole_part)
    if rank == 0:
        print(f"{name}: {stages} stages, loss {whole.item():.4f}")


names = sys.argv[1:] or [name for name in SCHEDULES if hasattr(pipelining, name)]
for name in names:
    run(name, SCHEDULES[name])
dist.barrier(device_ids=[rank])
leave(f"pipeline: {ranks} ranks, {', '.join(names)}")
