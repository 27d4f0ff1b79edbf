"""Trains a language model as torchtitan, torchtune or prime-rl do: shapes, not text.

    python -m simgpu dry-run --world 8 decoder.py qwen3-32b --as titan --batch 2

Random weights and tokens. What differs between the trainers in memory or time is here
in as few lines as it takes: what FSDP gathers together, in which precision norms and
rotations run, what is checkpointed, and how much of the logits lives at once.
"""

import argparse
import contextlib
import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._tensor import DTensor, Replicate, Shard
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

# width, layers, heads, key/value heads, feed-forward, words, tied, norms of q and k
MODELS = {
    "llama3.1-8b": (4096, 32, 32, 8, 14336, 128256, False, False),
    "llama3.2-3b": (3072, 28, 24, 8, 8192, 128256, True, False),
    "qwen3-0.6b": (1024, 28, 16, 8, 3072, 151936, True, True),
    "qwen3-4b": (2560, 36, 32, 8, 9728, 151936, True, True),
    "qwen3-32b": (5120, 64, 64, 8, 25600, 151936, False, True),
}
HEAD = 128
parser = argparse.ArgumentParser()
parser.add_argument("model", choices=MODELS)
parser.add_argument("--as", dest="like", choices=["titan", "tune", "prime"])
parser.add_argument("--batch", type=int, default=1)
parser.add_argument("--micro", type=int, default=1, help="batches of a step")
parser.add_argument("--length", type=int, default=4096)
parser.add_argument("--tp", type=int, default=1)
parser.add_argument("--ac", choices=["none", "full", "selective"], default="none")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--loss", choices=["whole", "chunked", "fused"], default="whole")
parser.add_argument("--root", action="store_true", help="tables in FSDP's root unit")
parser.add_argument("--optimizer-in-backward", action="store_true")
parser.add_argument("--offload", action="store_true", help="activations to the host")
parser.add_argument("--lora", type=int, default=0, help="rank")
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()
WIDTH, LAYERS, HEADS, KV, FFN, WORDS, TIED, QK = MODELS[args.model]
TITAN, TUNE, PRIME = (args.like == name for name in ("titan", "tune", "prime"))


class Norm(nn.Module):
    """RMSNorm: PyTorch's own for torchtitan, written out in float32 for the others."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        weight = self.weight
        if isinstance(weight, DTensor) and not isinstance(x, DTensor):
            weight = weight.to_local()
        if TITAN:
            return F.rms_norm(x, weight.shape, weight, 1e-6)
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return y.to(x.dtype) * weight


class LoRA(nn.Module):
    def __init__(self, fan_in, fan_out):
        super().__init__()
        self.base = nn.Linear(fan_in, fan_out, bias=False).requires_grad_(False)
        self.a = nn.Linear(fan_in, args.lora, bias=False)
        self.b = nn.Linear(args.lora, fan_out, bias=False)

    def forward(self, x):
        return self.base(x) + 2 * self.b(self.a(x))


def linear(fan_in, fan_out, adapted=True):
    if args.lora and adapted:
        return LoRA(fan_in, fan_out)
    return nn.Linear(fan_in, fan_out, bias=False)


def rotated(x, turns):
    """`x` [batch, tokens, heads, 128], turned by its positions as each trainer does."""
    if TITAN and not QK:  # Llama: complex numbers
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * torch.complex(turns[0], turns[1]))
        return turned.flatten(-2).to(x.dtype)
    if TUNE:
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        both = (a * turns[0] - b * turns[1], b * turns[0] + a * turns[1])
        return torch.stack(both, -1).flatten(-2).to(x.dtype)
    cos, sin = (torch.cat((t, t), -1).to(x.dtype) for t in turns)
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = linear(WIDTH, HEADS * HEAD)
        self.k = linear(WIDTH, KV * HEAD, adapted=False)
        self.v = linear(WIDTH, KV * HEAD)
        self.out = linear(HEADS * HEAD, WIDTH)
        self.norms = nn.ModuleList([Norm(HEAD), Norm(HEAD)]) if QK else None

    def forward(self, x, turns):
        q, k, v = (
            part(x).unflatten(-1, (-1, HEAD)) for part in (self.q, self.k, self.v)
        )
        if self.norms:
            q, k = self.norms[0](q), self.norms[1](k)
        q, k = rotated(q, turns), rotated(k, turns)
        if not PRIME:  # copies of keys and values, one for each head
            k, v = (t.repeat_interleave(HEADS // KV, 2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=PRIME)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = linear(WIDTH, FFN), linear(WIDTH, FFN)
        self.down = linear(FFN, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = Norm(WIDTH), Norm(WIDTH)
        self.attention, self.mlp = Attention(), FeedForward()

    def forward(self, x, turns):
        x = x + self.attention(self.norm1(x), turns)
        return x + self.mlp(self.norm2(x))


class Fused(torch.autograd.Function):
    """Log-probabilities of tokens, 2,048 words at a time, as prime-rl computes them."""

    @staticmethod
    def forward(ctx, hidden, weight, labels):
        n = hidden.shape[0]
        most = torch.full((n,), float("-inf"), device=hidden.device)
        total, mean, target = (torch.zeros(n, device=hidden.device) for _ in range(3))
        for start in range(0, weight.shape[0], 2048):
            logits = (hidden @ weight[start : start + 2048].t()).float().mul_(1.0)
            new = torch.maximum(most, logits.amax(-1))
            old, each = torch.exp(most - new), torch.exp(logits - new.unsqueeze(-1))
            total = total * old + each.sum(-1)
            mean = mean * old + (each * logits).sum(-1)
            inside = (labels - start).clamp(0, logits.shape[1] - 1)
            here = (labels >= start) & (labels < start + 2048)
            picked = logits.gather(1, inside.unsqueeze(1)).squeeze(1)
            target, most = torch.where(here, picked, target), new
        log_z = most + total.log()
        ctx.save_for_backward(hidden, weight, labels, log_z)
        return target - log_z

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight, labels, log_z = ctx.saved_tensors
        to_hidden, to_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for start in range(0, weight.shape[0], 2048):
            words = weight[start : start + 2048]
            logits = (hidden @ words.t()).float().mul_(1.0)
            shares = torch.exp(logits - log_z.unsqueeze(-1))
            grad = (-gradient).unsqueeze(-1) * shares
            grad.mul_(1.0)
            to_hidden.add_(grad.to(hidden.dtype) @ words)
            to_weight[start : start + 2048].add_(grad.to(weight.dtype).t() @ hidden)
        return to_hidden, to_weight, None


class Head(nn.Linear):
    def forward(self, x, labels=None):
        if args.loss != "fused":
            return super().forward(x)
        return Fused.apply(x.flatten(0, 1), self.weight, labels.flatten())


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm(WIDTH)
        self.head = Head(WIDTH, WORDS, bias=False)
        if TIED:
            self.head.weight = self.words.weight

    def forward(self, ids, turns, labels):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, turns)
        x = self.norm(x)
        if TUNE and args.loss == "chunked":
            return [self.head(part) for part in x.chunk(8, 1)]
        out = self.head(x, labels)
        return out.float() if TUNE or PRIME else out


def selective():
    """What torchtitan keeps of a block: attention, and every other product."""
    seen = {False: 0, True: 0}

    def policy(ctx, op, *_args, **_kwargs):
        if op is torch.ops.aten.mm.default:
            seen[ctx.is_recompute] += 1
            keep = seen[ctx.is_recompute] % 2 == 1
        else:
            keep = op in (
                torch.ops.aten._scaled_dot_product_flash_attention.default,
                torch.ops.aten._scaled_dot_product_cudnn_attention.default,
                torch.ops.aten._scaled_dot_product_efficient_attention.default,
                torch.ops._c10d_functional.reduce_scatter_tensor.default,
            )
        if keep:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def split(model, mesh):
    """Tensor and sequence parallelism of torchtitan."""
    sequence = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    plan = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        plan = {
            "norm1": SequenceParallel(),
            "norm2": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None),
                desired_input_layouts=(Replicate(), None),
            ),
            **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "mlp": PrepareModuleInput(**sequence),
            "mlp.gate": ColwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)


def shard(model, mesh):
    """FSDP2: one unit a block; the tables as the trainer has them."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    unit = functools.partial(fully_shard, mesh=mesh, mp_policy=policy)
    last = len(model.blocks) - 1
    for i, block in enumerate(model.blocks):
        unit(block, reshard_after_forward=PRIME or not args.root or i < last)
    if not (TIED or args.root):
        unit(model.words)
        unit([model.norm, model.head], reshard_after_forward=False)
    unit(model, reshard_after_forward=True)


def losses(out, labels):
    if TITAN:
        return F.cross_entropy(out.flatten(0, 1).float(), labels.flatten())
    return F.cross_entropy(out.flatten(0, 1), labels.flatten())


def chunk_sum(part, labels):
    return F.cross_entropy(part.float(), labels, reduction="sum")


if args.compile and not PRIME:  # prime-rl compiles its blocks alone
    losses, chunk_sum = torch.compile(losses), torch.compile(chunk_sum)


def loss_of(out, labels):
    if args.loss == "fused":
        return -out.mean()
    if args.loss == "chunked":
        parts = out if TUNE else out.flatten(0, 1).chunk(8)
        labels = labels.chunk(8, 1) if TUNE else labels.flatten().chunk(8)
        pairs = zip(parts, labels, strict=True)
        total = sum(chunk_sum(p.flatten(0, -2), t.flatten()) for p, t in pairs)
        return total / (args.batch * args.length)
    return losses(out, labels)


dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
data = dist.get_world_size() // args.tp
mesh = init_device_mesh("cuda", (data, args.tp), mesh_dim_names=("dp", "tp"))
torch.set_default_dtype(torch.bfloat16 if TUNE else torch.float32)
with torch.device("meta"):
    model = Decoder()
torch.set_default_dtype(torch.float32)
if args.lora:
    for module in (model.words, model.head, model.norm):
        module.requires_grad_(False)
    for block in model.blocks:
        for module in (block.norm1, block.norm2, block.attention.k):
            module.requires_grad_(False)
if args.tp > 1:
    split(model, mesh["tp"])
for i, block in enumerate(model.blocks):
    if args.ac != "none":
        how = {"context_fn": selective} if args.ac == "selective" else {}
        block = checkpoint_wrapper(block, preserve_rng_state=False, **how)
        model.blocks[i] = block
    if args.compile:
        block.compile()
if not TUNE:
    shard(model, mesh["dp"])
model.to_empty(device="cuda")
if TIED and TUNE:  # which to_empty has undone; FSDP remembers it
    model.head.weight = model.words.weight
angles = torch.rand(args.length, 1, HEAD // 2, device="cuda")
turns = (angles.cos(), angles.sin())
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True if TITAN else None)
if args.optimizer_in_backward:
    own = {p: torch.optim.AdamW([p], lr=1e-5) for p in trained}

    def update(parameter):
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(update)


def offloaded():
    """What checkpointed blocks keep, their inputs, goes to pinned memory."""

    def pack(x):
        if x.shape != (args.batch, args.length, WIDTH) or x.dtype != torch.bfloat16:
            return x
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        return host.copy_(x, non_blocking=True)

    return saved_tensors_hooks(pack, lambda x: x.to("cuda", non_blocking=True))


def clip():
    """The norm over all meshes, as torchtitan takes it; each mesh in one go."""
    groups: dict = {}
    for p in trained:
        mesh_of = p.grad.device_mesh if isinstance(p.grad, DTensor) else None
        groups.setdefault(mesh_of, []).append(p)
    for group in groups.values():
        torch.nn.utils.clip_grad_norm_(group, 1.0, foreach=True)


for _ in range(args.steps):
    for _ in range(args.micro):
        shape = (args.batch, args.length)
        ids, labels = (torch.randint(WORDS, shape, device="cuda") for _ in range(2))
        where = offloaded() if args.offload else contextlib.nullcontext()
        with where:
            out = model(ids, turns, labels)
        with loss_parallel() if args.tp > 1 else contextlib.nullcontext():
            loss = loss_of(out, labels) / args.micro
            if not PRIME:  # prime-rl keeps what its model gave back
                del out
            loss.backward()
    if not args.optimizer_in_backward:
        if not TUNE:
            clip()
        optimizer.step()
        optimizer.zero_grad()
    else:
        optimizer.step()  # nothing is left to do; a dry run counts steps here
