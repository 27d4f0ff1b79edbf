"""A Llama of any size as a PyTorch module, for lesson 26 and its tests.

Blocks with a root mean square norm, rotary positions, heads that share keys and values,
and a gate (SwiGLU). With `gated=False`, a block is nearer to a GPT's: fused norms, and
no gate. `shard` wraps it with `fully_shard` in bfloat16. Under `torch.device("meta")`
the largest model needs no memory.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint


class Norm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return y.to(x.dtype) * self.weight


def norm_of(sizes) -> nn.Module:
    """A Llama's norm, or the fused one of a GPT."""
    return Norm(sizes.dim) if sizes.gated else nn.LayerNorm(sizes.dim, bias=False)


def rotate(x, cos, sin):
    """Turn pairs of numbers of (batch, tokens, heads, size) by their token's place."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class Block(nn.Module):
    """One block; with `again` it keeps its input only, and computes twice."""

    def __init__(self, sizes, again: bool):
        super().__init__()
        self.again, self.size = again, sizes.dim // sizes.heads
        kv_dim = self.size * sizes.kv_heads
        self.norm1, self.norm2 = norm_of(sizes), norm_of(sizes)
        self.query = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.key = nn.Linear(sizes.dim, kv_dim, bias=False)
        self.value = nn.Linear(sizes.dim, kv_dim, bias=False)
        self.out = nn.Linear(sizes.dim, sizes.dim, bias=False)
        if sizes.gated:
            self.gate = nn.Linear(sizes.dim, sizes.hidden, bias=False)
        else:
            self.gate = None
        self.up = nn.Linear(sizes.dim, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.dim, bias=False)

    def attend(self, x, cos, sin):
        layers = self.query, self.key, self.value
        q, k, v = (layer(x).unflatten(-1, (-1, self.size)) for layer in layers)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # (batch, heads, tokens, size)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def compute(self, x, cos, sin):
        x = x + self.attend(self.norm1(x), cos, sin)
        y = self.norm2(x)
        if self.gate is None:
            return x + self.down(F.gelu(self.up(y)))
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def forward(self, x, cos, sin):
        if self.again:
            return checkpoint(self.compute, x, cos, sin, use_reentrant=False)
        return self.compute(x, cos, sin)


class Llama(nn.Module):
    """Token numbers (batch, tokens) to logits (batch, tokens, vocab).

    Args:
        sizes: a `Model` of `plan_run.py`.
        again: whether blocks compute twice.
    """

    def __init__(self, sizes, again: bool = True):
        super().__init__()
        self.size = sizes.dim // sizes.heads
        self.embedding = nn.Embedding(sizes.vocab, sizes.dim)
        self.blocks = nn.ModuleList(Block(sizes, again) for _ in range(sizes.layers))
        self.norm = norm_of(sizes)
        self.head = nn.Linear(sizes.dim, sizes.vocab, bias=False)
        if sizes.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        place = torch.arange(tokens.shape[1], device=tokens.device)
        pair = torch.arange(0, self.size, 2, device=tokens.device) / self.size
        angle = place[:, None, None] * 10_000.0**-pair  # (tokens, 1, size / 2)
        cos, sin = angle.cos(), angle.sin()
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def shard(model: Llama, **options) -> Llama:
    """Each block by itself, then the rest: bfloat16, gradients added in float32."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # cos and sin stay float32
    )
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, **options)
    return fully_shard(model, mp_policy=policy, **options)


def loss_of(model: Llama, tokens, targets):
    """Cross entropy in float32; the bfloat16 logits are gone when it is computed."""
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def peak_of_a_step(sizes, plan) -> tuple[int, int]:
    """The most bytes on this rank's GPU in a step of FSDP, and the bytes that it sends.

    Workspaces of cuBLAS are subtracted: they are what a GPU has before a step beside
    parameters and AdamW's two numbers. Values do not matter: all weights are 0.

    Args:
        sizes: a `Model` of `plan_run.py`.
        plan: a `Plan` with FSDP over all ranks.
    """
    from simgpu import Messages

    with torch.device("meta"):
        model = Llama(sizes, again=bool(plan.again))
    shard(model).to_empty(device="cuda")
    parameters = list(model.parameters())
    for p in parameters:
        p.to_local().detach().zero_()
    optimizer = torch.optim.AdamW(parameters, fused=True)
    shape = plan.sequences, plan.tokens
    tokens = torch.zeros(shape, dtype=torch.int64, device="cuda")
    for _ in range(2):  # the optimizer makes its states in the first step
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with Messages() as messages:
            for _ in range(plan.microbatches):
                loss_of(model, tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    workspaces = before - 12 * sum(p.numel() for p in parameters) // plan.gpus
    return torch.cuda.max_memory_allocated() - workspaces, messages.sent()


def train(
    sizes, sequences: int, tokens: int, parts: int = 1, sync: bool = True,
    again: bool = True,
) -> None:  # fmt: skip
    """Some steps of FSDP, as a rank of a job that is dry-run.

    Args:
        sizes: a `Model` of `plan_run.py`.
        sequences: of a micro-batch.
        tokens: of a sequence.
        parts: micro-batches of a step.
        sync: whether each of them reduces its gradients, and not only the last.
        again: whether blocks compute twice.
    """
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    with torch.device("meta"):
        model = Llama(sizes, again)
    shard(model).to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.zeros(sequences, tokens, dtype=torch.int64, device="cuda")
    for _ in range(3):
        for part in range(parts):
            model.set_requires_gradient_sync(sync or part + 1 == parts)
            loss_of(model, x, x).backward()
        optimizer.step()
        optimizer.zero_grad()
