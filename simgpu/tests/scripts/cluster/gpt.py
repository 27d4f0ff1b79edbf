"""A training script as nanoGPT has it: DDP, accumulation, autocast, evaluation.

torchrun --nproc-per-node=4 gpt.py --dtype=float16 --steps=6
"""

import argparse
import copy
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from common import GPT, TOKENS, agree, agree_on, loss_of
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument(
    "--dtype", choices=["float32", "float16", "bfloat16"], default="bfloat16"
)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--length", type=int, default=16)
parser.add_argument("--out", type=Path, default=Path("ckpt.pt"))
args = parser.parse_args()

rank = int(os.environ["RANK"])
device = f"cuda:{os.environ['LOCAL_RANK']}"
torch.cuda.set_device(device)
dist.init_process_group("nccl")
ranks = dist.get_world_size()
autocast = torch.autocast("cuda", getattr(torch, args.dtype), args.dtype != "float32")
near = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}[args.dtype]

text = torch.randint(0, TOKENS, (4096,), generator=torch.Generator().manual_seed(1))


def get_batch(number: int) -> torch.Tensor:
    """Rows of `length + 1` tokens at places that depend on the batch's number."""
    make = torch.Generator().manual_seed(number)
    starts = torch.randint(len(text) - args.length - 1, (args.batch,), generator=make)
    rows = torch.stack([text[i : i + args.length + 1] for i in starts])
    return rows.pin_memory().to(device, non_blocking=True)


def get_lr(step: int) -> float:
    """Two steps to warm up, then half a cosine."""
    if step < 2:
        return 1e-2 * (step + 1) / 2
    return 1e-2 * (1 + math.cos(math.pi * (step - 2) / args.steps)) / 2


@torch.no_grad()
def estimate_loss(model: torch.nn.Module) -> float:
    """The mean over the ranks' own batches."""
    model.eval()
    losses = torch.zeros(3, device=device)
    for i in range(len(losses)):
        with autocast:
            losses[i] = loss_of(model, get_batch(10_000 + i * ranks + rank))
    mean = losses.mean()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    model.train()
    return mean.item()


def optimizer_of(model: torch.nn.Module) -> torch.optim.AdamW:
    """Weight decay for matrices only."""
    decay = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    rest = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest}]
    return torch.optim.AdamW(groups, eps=1e-3, betas=(0.9, 0.95), fused=True)


def train(model: torch.nn.Module, sources: list[int], numbers: int) -> torch.Tensor:
    """Train on the batches of some ranks; `numbers` batches for each step."""
    optimizer = optimizer_of(model)
    scaler = torch.amp.GradScaler("cuda", enabled=args.dtype == "float16")
    losses = []
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step)
        total = torch.zeros((), device=device)
        for i in range(args.accumulate):
            for source in sources:
                last = i + 1 == args.accumulate and source == sources[-1]
                model.require_backward_grad_sync = last
                with autocast:
                    batch = get_batch((step * args.accumulate + i) * ranks + source)
                    loss = loss_of(model, batch) / numbers
                total += loss.detach()
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    return torch.stack(losses)


torch.manual_seed(1337)
start = GPT(length=args.length).to(device)
model = DDP(copy.deepcopy(start), device_ids=[int(os.environ["LOCAL_RANK"])])
losses = train(model, [rank], args.accumulate)
dist.all_reduce(losses, dist.ReduceOp.AVG)
evaluated = estimate_loss(model)
if rank == 0:
    checkpoint = {"model": model.module.state_dict(), "args": vars(args)}
    torch.save(checkpoint, args.out)
dist.barrier()

reference = copy.deepcopy(start)
whole = train(reference, list(range(ranks)), args.accumulate * ranks)
agree("losses", losses, whole, atol=near)
agree_on("the end", model.module, reference, atol=near)
agree("evaluation", evaluated, estimate_loss(reference), atol=near)
saved = torch.load(args.out, map_location=device, weights_only=False)
start.load_state_dict(saved["model"])
agree("evaluation of the checkpoint", estimate_loss(start), evaluated)

dist.barrier()
dist.destroy_process_group()
if rank == 0:
    print(f"ok gpt: {ranks} ranks, {args.dtype}, evaluation {evaluated:.4f}")
