"""Trains a small GPT with the loop that public repositories have: one GPU, or DDP.

    python -m simgpu --gpus 1 --no-compile gpt.py float16
    torchrun --nproc-per-node=2 -m simgpu --no-compile gpt.py bfloat16

It accumulates gradients, casts, scales, clips, compiles, and writes a checkpoint. The
losses of one and of two GPUs agree.
"""

import contextlib
import math
import os
import sys

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORDS, LENGTH, WIDTH, HEADS, BATCH, STEPS = 64, 16, 32, 4, 2, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        b, t, _ = x.shape
        parts = self.qkv(self.norm1(x)).split(WIDTH, dim=2)
        q, k, v = (p.view(b, t, HEADS, -1).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.words.weight = self.head.weight

    def forward(self, x, targets):
        places = torch.arange(x.shape[1], dtype=torch.long, device=x.device)
        x = self.words(x) + self.places(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, WORDS), targets.view(-1))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)


def batch(step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Text from a file, the same for each (step, number) whoever asks."""
    text = np.memmap("text.bin", dtype=np.uint16, mode="r")
    generator = torch.Generator().manual_seed(100 * step + number)
    starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator)
    rows = np.stack([text[i : i + LENGTH + 1] for i in starts]).astype(np.int64)
    x = torch.from_numpy(rows[:, :-1].copy())
    y = torch.from_numpy(rows[:, 1:].copy())
    x, y = x.pin_memory(), y.pin_memory()
    return x.to("cuda", non_blocking=True), y.to("cuda", non_blocking=True)


def main() -> None:
    dtype = sys.argv[1]
    ddp = "RANK" in os.environ
    rank, size = 0, 1
    if ddp:
        dist.init_process_group("nccl")
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.cuda.set_device(f"cuda:{os.environ['LOCAL_RANK']}")
    if rank == 0:
        ((np.arange(500) * 7) % WORDS).astype(np.uint16).tofile("text.bin")
    if ddp:
        dist.barrier()
    torch.manual_seed(1337)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    context = torch.amp.autocast("cuda", dtype=getattr(torch, dtype))
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == "float16")
    model = GPT().cuda()
    optimizer = optimizer_of(model)
    model = torch.compile(model)
    if ddp:
        model = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
    micro_steps = 4 // size
    for step in range(STEPS):
        rate = 1e-2 * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        for group in optimizer.param_groups:
            group["lr"] = rate
        total = torch.zeros((), device="cuda")
        for micro in range(micro_steps):
            x, y = batch(step, micro * size + rank)
            if ddp:
                model.require_backward_grad_sync = micro == micro_steps - 1
            with context if dtype != "float32" else contextlib.nullcontext():
                loss = model(x, y) / micro_steps
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if ddp:
            dist.all_reduce(total, dist.ReduceOp.AVG)
        if rank == 0:
            print(f"step {step} loss {total.item():.3f}", flush=True)
    if rank == 0:
        plain = model.module if ddp else model
        torch.save({"model": plain.state_dict(), "rate": rate}, "ckpt.pt")
        torch.load("ckpt.pt", map_location="cuda")
    if ddp:
        dist.destroy_process_group()


main()
