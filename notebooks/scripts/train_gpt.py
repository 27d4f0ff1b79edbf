"""Train a GPT on a text file: on one GPU, on a mesh of them, and through crashes.

    torchrun --standalone --nproc-per-node=4 train_gpt.py --text=book.txt --parallel=ddp
    torchrun … --max-restarts=3 train_gpt.py … --parallel=fsdp --tp=2 --folder=saved

A step takes the same `--batch` rows for any number of ranks, and each way reads the
checkpoints of the others. Rank 0 prints a line of JSON a step. Put your model, its plan
and its first values between the two lines of dashes. Used in lesson 27.
"""

import argparse
import json
import math
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel as DDP

# -- your model, its plan and its first values -----------------------------------------

BYTES = 256  # a token is a byte of the text


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # head by head
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.head_width = width // heads

    def forward(self, x):  # (rows, tokens, width)
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_width))
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(3))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width, layers, context, heads=4):
        super().__init__()
        self.token = nn.Embedding(BYTES, width)
        self.place = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, BYTES, bias=False)

    def forward(self, tokens):  # (rows, tokens) -> (rows, tokens, BYTES)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.place(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


by_columns, by_rows = parallel.ColwiseParallel, parallel.RowwiseParallel
PLAN = {  # tensor parallel; between slices, each rank has some of the tokens
    "token": by_rows(input_layouts=Replicate(), output_layouts=Shard(1)),
    "place": by_rows(input_layouts=Replicate(), output_layouts=Shard(0)),
    "blocks.*.norm?": parallel.SequenceParallel(),
    "blocks.*.qkv": by_columns(input_layouts=Shard(1)),
    "blocks.*.out": by_rows(output_layouts=Shard(1)),
    "blocks.*.up": by_columns(input_layouts=Shard(1)),
    "blocks.*.down": by_rows(output_layouts=Shard(1)),
    "norm": parallel.SequenceParallel(),
    "head": by_columns(input_layouts=Shard(1), output_layouts=Replicate()),
}


def first_values(model):
    """The full first values of each parameter, in host memory."""
    torch.manual_seed(0)
    return {
        name: torch.ones(p.shape) if p.ndim == 1 else 0.02 * torch.randn(p.shape)
        for name, p in model.named_parameters()
    }


# --------------------------------------------------------------------------------------


def parallelize(model, mesh, args):
    """What the training calls: from a model without memory to this rank's part."""
    values = first_values(model) if dist.get_rank() == 0 else {}
    if args.tp > 1:  # slices first, then shards of the slices
        parallel.parallelize_module(model, mesh["tp"], PLAN)
    if args.recompute:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper.checkpoint_wrapper(block)
    if args.parallel == "fsdp":
        dtype = torch.bfloat16 if args.bf16 else None
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
        fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    model.to_empty(device="cuda")  # allocates this rank's part only
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(model, values, options=options)
    if args.parallel == "ddp":
        local_rank = int(os.environ["LOCAL_RANK"])
        return DDP(model, device_ids=[local_rank], gradient_as_bucket_view=True)
    return model


# -- data and steps --------------------------------------------------------------------


def rows_of_step(step, batch, rows):
    """Which of so many rows a step takes. Depends on the number of the step only."""
    epoch, place = divmod(step, rows // batch)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(epoch))
    return order[place * batch : (place + 1) * batch]


def inputs_and_targets(tokens, rows, context):
    """Two tensors of (rows, context); a target is the next byte."""
    places = rows[:, None] * context + torch.arange(context)
    return tokens[places].cuda(), tokens[places + 1].cuda()


def learning_rate(step, args):
    """Up in a line, then down by a cosine to a tenth."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * done))


def sum_of_losses(model, x, y, args):
    """Summed over tokens: the mean of the means of unequal parts is not the mean."""
    autocast = args.bf16 and args.parallel == "ddp"  # FSDP casts by its policy
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        scores = model(x)
    return cross_entropy(scores.flatten(0, 1).float(), y.flatten(), reduction="sum")


def take_step(model, optimizer, tokens, rows, group, args):
    """One step; returns the mean loss of the global batch, and its gradient norm."""
    ranks, ddp, total = dist.get_world_size(group), isinstance(model, DDP), 0
    parts = rows[dist.get_rank(group) :: ranks].tensor_split(args.accumulate)
    for i, part in enumerate(parts):
        last = i == args.accumulate - 1  # gradients are sent once, after the last part
        if not ddp:
            model.set_requires_gradient_sync(last)
        with nullcontext() if last or not ddp else model.no_sync():
            x, y = inputs_and_targets(tokens, part, args.context)
            loss = sum_of_losses(model, x, y, args) / (args.batch * args.context)
            (loss * ranks).backward()  # DDP and FSDP divide by the ranks
        total += loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()  # of all shards
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total, group=group)
    return total.item(), norm.item()


@torch.no_grad()
def bits_per_byte(model, tokens, group, args):
    """Of a text that is not trained on. All ranks must call it, and equally often."""
    size, total = 4 * args.batch, 0  # rows at a time: there is no backward pass
    batches = (len(tokens) - 1) // args.context // size
    for rows in torch.arange(batches * size).split(size):
        mine = rows[dist.get_rank(group) :: dist.get_world_size(group)]
        x, y = inputs_and_targets(tokens, mine, args.context)
        total += sum_of_losses(model, x, y, args)
    if isinstance(model, FSDPModule):
        model.reshard()  # without a backward pass, the root would stay gathered
    dist.all_reduce(total, group=group)
    return total.item() / (batches * size * args.context) / math.log(2)


# -- checkpoints, and the program ------------------------------------------------------


def save(folder, step, model, optimizer):
    """Each rank writes its shards. `latest` names a checkpoint only if it is whole."""
    weights, state = states.get_state_dict(model, optimizer)
    name = f"step-{step:06}"
    everything = {"model": weights, "optimizer": state, "step": step}
    dcp.save(everything, checkpoint_id=folder / name)
    if dist.get_rank() == 0:
        half = folder / "latest.half"
        half.write_text(name)
        half.replace(folder / "latest")  # at once, or not at all
        for old in sorted(folder.glob("step-*"))[:-2]:
            shutil.rmtree(old)


def load(folder, model, optimizer):
    """The step to go on from; each rank reads its shards, whoever wrote them."""
    if not (folder / "latest").exists():
        return 0
    weights, state = states.get_state_dict(model, optimizer)
    found = {"model": weights, "optimizer": state, "step": 0}
    dcp.load(found, checkpoint_id=folder / (folder / "latest").read_text())
    states.set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=state
    )
    return found["step"]


def train(args):
    """Train from the newest checkpoint on; yields a record of each step."""
    ranks = dist.get_world_size()
    sizes = (ranks // args.tp, args.tp)
    mesh = init_device_mesh("cuda", sizes, mesh_dim_names=("dp", "tp"))
    group = mesh["dp"].get_group()  # ranks of a TP group take the same rows
    text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8)
    tokens, held_out = text.long().tensor_split([len(text) * 95 // 100])
    with torch.device("meta"):
        model = GPT(args.width, args.layers, args.context)
    weights = [*model.blocks.parameters(), *model.head.parameters()]
    flops = 6 * sum(p.numel() for p in weights)  # of a token, forward and backward
    flops += 12 * args.layers * args.width * args.context  # of attention
    model = parallelize(model, mesh, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    first = load(args.folder, model, optimizer) if args.folder else 0
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for step in range(first, args.steps):
        begin.record()
        rate = learning_rate(step, args)
        for settings in optimizer.param_groups:
            settings["lr"] = rate
        rows = rows_of_step(step, args.batch, (len(tokens) - 1) // args.context)
        loss, norm = take_step(model, optimizer, tokens, rows, group, args)
        end.record()
        end.synchronize()
        speed = 1000 * args.batch * args.context / begin.elapsed_time(end)
        line = {"step": step, "loss": round(loss, 6), "norm": round(norm, 6)}
        line |= {"lr": round(rate, 8), "tokens_per_s": round(speed)}
        line["peak_MiB"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
        if args.peak:
            line["mfu"] = round(speed * flops / (1e12 * args.peak * ranks), 4)
        if (step + 1) % args.every == 0 or step + 1 == args.steps:
            line["test"] = round(bits_per_byte(model, held_out, group, args), 4)
            if args.folder:
                save(args.folder, step + 1, model, optimizer)
        yield line


def options(arguments=None):
    parser = argparse.ArgumentParser(description="Train a GPT on a text.")
    add, size = parser.add_argument, os.environ.get("WORLD_SIZE", "1")
    add("--text", type=Path, required=True, help="file to learn from")
    add("--parallel", default="ddp", choices=("ddp", "fsdp"))
    add("--tp", type=int, default=1, help="ranks that share a layer; needs fsdp")
    add("--bf16", action="store_true", help="compute in bfloat16")
    add("--recompute", action="store_true", help="activations, in the backward pass")
    add("--accumulate", type=int, default=1, help="parts of a rank's rows")
    add("--steps", type=int, default=30)
    add("--batch", type=int, default=16, help="rows of a step, of all ranks together")
    add("--context", type=int, default=64, help="bytes of a row")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--warmup", type=int, default=5, help="steps until it is reached")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--width", type=int, default=64)
    add("--layers", type=int, default=2)
    add("--folder", type=Path, help="of checkpoints; goes on from the newest")
    add("--every", type=int, default=10, help="steps between tests and checkpoints")
    add("--peak", type=float, help="TFLOP/s of one GPU, for the MFU")
    args = parser.parse_args(arguments)
    if args.tp > 1 and args.parallel == "ddp":
        parser.error("--tp needs --parallel=fsdp")
    if int(size) % args.tp or args.batch * args.tp < int(size) * args.accumulate:
        parser.error(f"{size} ranks cannot divide the layers or the rows in this way")
    return args


@record  # torchrun shows the exception of the first rank that fails
def main():
    args = options()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    for line in train(args):
        if dist.get_rank() == 0:
            print(json.dumps(line), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
