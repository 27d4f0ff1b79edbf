"""A Llama of any size, made on "meta": FSDP2, FSDP1, tensor parallelism, LoRA.

    simgpu dry-run --world 8 --card H100 llama.py --model 70B --lora 16

It imports nothing but PyTorch. Blocks are checkpointed. The last line that it prints is
the memory of this process, in GiB.
"""

import argparse
import contextlib
import functools
import os
import resource

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as checkpoints
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

VOCABULARY = 128_256
MODELS = {  # layers, width, heads, those of keys and values, width of the MLP
    "70B": (80, 8192, 64, 8, 28672),
    "405B": (126, 16384, 128, 8, 53248),
}
linear = functools.partial(nn.Linear, bias=False)


class LoRA(nn.Module):
    """A linear layer that stays as it is, and a narrow one beside it."""

    def __init__(self, inner: nn.Linear, rank: int):
        super().__init__()
        self.inner = inner
        self.down = linear(inner.in_features, rank)
        self.up = linear(rank, inner.out_features)

    def forward(self, x):
        return self.inner(x) + self.up(self.down(x))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int):
        super().__init__()
        self.of_head = width // heads
        self.q, self.out = linear(width, width), linear(width, width)
        self.k, self.v = (linear(width, kv_heads * self.of_head) for _ in range(2))

    def forward(self, x, turn):
        rows, length, _ = x.shape
        q, k, v = (
            each(x).view(rows, length, -1, self.of_head).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        q, k = (self.turned(each, *turn) for each in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(out.transpose(1, 2).reshape(rows, length, -1))

    @staticmethod
    def turned(x, cosine, sine):
        """Rotary embedding."""
        a, b = x.chunk(2, -1)
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate, self.up = linear(width, hidden), linear(width, hidden)
        self.down = linear(hidden, width)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, kv_heads)
        self.mlp = MLP(width, hidden)

    def forward(self, x, turn):
        x = x + self.attention(self.norm_1(x), turn)
        return x + self.mlp(self.norm_2(x))


class Llama(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, kv_heads: int, hidden: int):
        super().__init__()
        self.of_head = width // heads
        self.words = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, kv_heads, hidden) for _ in range(layers)
        )
        self.norm, self.output = nn.RMSNorm(width), linear(width, VOCABULARY)

    def forward(self, ids):
        x = self.words(ids)
        places = torch.arange(ids.shape[1], device=ids.device).float()[:, None]
        steps = torch.arange(0, self.of_head, 2, device=ids.device) / self.of_head
        angles = places * 500_000.0**-steps
        turn = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, turn)
        return self.output(self.norm(x))


def split(model: Llama, mesh) -> None:
    """Tensor and sequence parallelism; of the scores of words each rank has a part."""
    whole, parts = Replicate(), Shard(1)
    words = RowwiseParallel(input_layouts=whole, output_layouts=parts)
    output = ColwiseParallel(
        input_layouts=parts, output_layouts=Shard(-1), use_local_output=False
    )
    plan = {"words": words, "norm": SequenceParallel(), "output": output}
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        plan = {
            "norm_1": SequenceParallel(),
            "norm_2": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(parts, None), desired_input_layouts=(whole, None)
            ),
            "mlp": PrepareModuleInput(
                input_layouts=(parts,), desired_input_layouts=(whole,)
            ),
        }
        for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"):
            plan[name] = ColwiseParallel()
        for name in ("attention.out", "mlp.down"):
            plan[name] = RowwiseParallel(output_layouts=parts)
        parallelize_module(block, mesh, plan)


def add_lora(model: Llama, rank: int) -> None:
    model.requires_grad_(False)
    for block in model.blocks:
        for part in (block.attention, block.mlp):
            for name, its in list(part.named_children()):
                setattr(part, name, LoRA(its, rank))


def shard_flat(model: Llama) -> nn.Module:
    """FSDP1: a unit for each block."""
    half = fsdp.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp.FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=half,
        device_id=torch.cuda.current_device(), use_orig_params=True,
        param_init_fn=lambda part: part.to_empty(device="cuda", recurse=False),
    )  # fmt: skip


def shard(model: Llama, mesh) -> Llama:
    """FSDP2."""
    policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for part in (model.words, *model.blocks, model.output, model):
        fsdp.fully_shard(part, mesh=mesh, mp_policy=policy)
    return model.to_empty(device="cuda")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="70B")
    parser.add_argument("--layers", type=int, help="all, unless it is said")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--lora", type=int, default=0, help="its rank; in bfloat16")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--flat", action="store_true", help="FSDP1")
    options = parser.parse_args()

    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    layers, *widths = MODELS[options.model]
    with torch.device("meta"):
        model = Llama(options.layers or layers, *widths)
        if options.lora:
            add_lora(model, options.lora)
            model.bfloat16()
    shape = dist.get_world_size() // options.tp, options.tp
    mesh = dist.init_device_mesh("cuda", shape, mesh_dim_names=("dp", "tp"))
    if options.tp > 1:
        split(model, mesh["tp"])
    checkpoints.apply_activation_checkpointing(
        model, check_fn=lambda part: isinstance(part, Block)
    )
    model = shard_flat(model) if options.flat else shard(model, mesh["dp"])
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    for _ in range(3):
        size = options.batch, options.length + 1
        text = torch.randint(VOCABULARY, size, device="cuda")
        with loss_parallel() if options.tp > 1 else contextlib.nullcontext():
            words = model(text[:, :-1]).flatten(0, 1).float()
            loss = F.cross_entropy(words, text[:, 1:].flatten())
            del words
            loss.backward()
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # on Linux
        print(f"{used:.2f}", flush=True)
        optimizer.step()
        optimizer.zero_grad()


main()
