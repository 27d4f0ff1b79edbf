"""The model of the sweep's trainer: what runs of it on one rank, block by block."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from layouts.shapes import Layout
from layouts.tensor_parallel import (
    ColumnLinear,
    CrossEntropy,
    Embedding,
    RowLinear,
)

OVERLAPS = True  # a product runs beside the message of its input


class _Rotary(torch.autograd.Function):
    """One kernel for queries, one for keys; keys are turned where they lie."""

    @staticmethod
    def forward(ctx, q, kv):
        ctx.mark_dirty(kv)
        kv[:, :, 0].mul_(1.0)
        return q * 1.0, kv

    @staticmethod
    def backward(ctx, q, kv):
        kv[:, :, 0].mul_(1.0)
        return q * 1.0, kv


class _KeptSum(torch.autograd.Function):
    """A sum, of which the first operand stays until backward.

    The sweep's runs hold two more tensors of the size of a layer's input for each layer
    and micro-batch than its source explains: found in the rows of the 1B model with
    tp 1, whatever pp and dp. Here these are the products before both sums.
    """

    @staticmethod
    def forward(ctx, product, x):
        ctx.save_for_backward(product)
        return product + x

    @staticmethod
    def backward(ctx, grad):
        return grad, grad


class Block(nn.Module):
    """A layer of the decoder."""

    def __init__(self, of: Layout, group):
        super().__init__()
        self.group, width, tp = group, of.hidden, of.tp
        self.add = _KeptSum.apply if of.trainer == "nanotron" else torch.add
        self.heads, self.size = of.heads // tp, of.hidden // of.heads
        self.norms = nn.ParameterList(torch.empty(width) for _ in range(2))
        self.keys = (of.kv_heads or of.heads) // tp
        rows = (self.heads + 2 * self.keys) * self.size
        self.qkv = nn.Parameter(torch.empty(rows, width))
        self.out = nn.Parameter(torch.empty(width, width // tp))
        self.gate_up = nn.Parameter(torch.empty(2 * of.intermediate // tp, width))
        self.down = nn.Parameter(torch.empty(width, of.intermediate // tp))

    def forward(self, x, mask):
        width = x.shape[-1:]
        attended = self._attend(
            functional.rms_norm(x, width, self.norms[0], 1e-5), mask
        )
        x = self.add(attended, x)
        y = functional.rms_norm(x, width, self.norms[1], 1e-5)
        y = ColumnLinear.apply(y, self.gate_up, self.group, OVERLAPS)
        gate, up = torch.split(y, y.shape[-1] // 2, dim=-1)
        y = RowLinear.apply(functional.silu(gate) * up, self.down, self.group, OVERLAPS)
        return self.add(y, x)  # `attended` lives as long, as in the trainer

    def _attend(self, x, mask):
        y = ColumnLinear.apply(x, self.qkv, self.group, OVERLAPS)
        tokens, batch, _ = y.shape
        if self.keys == self.heads:
            qkv = y.view(tokens, batch, 3, self.heads, self.size)
            q, k, v = qkv.permute(2, 1, 0, 3, 4).contiguous()
        else:
            counts = [self.heads, self.keys, self.keys]
            q, k, v = (
                its.transpose(0, 1).contiguous().view(batch, tokens, -1, self.size)
                for its in y.split([count * self.size for count in counts], dim=-1)
            )
        return self._attend_to(q, k, v, mask)  # all these live until it returns

    def _attend_to(self, q, k, v, mask):
        batch, tokens = q.shape[:2]
        kv = torch.cat([k.unsqueeze(0), v.unsqueeze(0)], dim=0)
        kv = kv.permute(1, 2, 0, 3, 4).contiguous()
        q, kv = _Rotary.apply(q, kv)
        k, v = torch.split(kv, 1, dim=2)
        for _ in ("queries", "keys"):  # where each sequence begins
            ends = torch.zeros(batch + 1, dtype=torch.int32, device=q.device)
            counts = mask.sum(-1, dtype=torch.int32)
            torch.cumsum(counts, dim=0, dtype=torch.int32, out=ends[1:])
        q, k, v = (its.view(batch, tokens, -1, self.size).transpose(1, 2)
                   for its in (q, k, v))  # fmt: skip
        shared = self.keys != self.heads
        attend = functional.scaled_dot_product_attention
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # as the trainer calls it
            y = attend(q, k, v, is_causal=True, enable_gqa=shared)
        y = y.transpose(1, 2).contiguous()
        y = y.view(batch, tokens, self.heads * self.size).transpose(0, 1)
        return RowLinear.apply(y, self.out, self.group, OVERLAPS)


class First(nn.Module):
    """What the first stage has before its layers."""

    def __init__(self, of: Layout, group):
        super().__init__()
        self.embedding = Embedding(of.vocab, of.hidden, group)

    def forward(self, ids):
        return self.embedding(ids)


class Last(nn.Module):
    """What the last stage has behind its layers."""

    def __init__(self, of: Layout, group):
        super().__init__()
        self.group = group
        self.norm = nn.Parameter(torch.empty(of.hidden))
        self.head = nn.Parameter(torch.empty(of.vocab // of.tp, of.hidden))

    def forward(self, x, labels, mask):
        x = functional.rms_norm(x, x.shape[-1:], self.norm, 1e-5)
        logits = ColumnLinear.apply(x, self.head, self.group, OVERLAPS).float()
        loss = CrossEntropy.apply(logits, labels.transpose(0, 1).contiguous(),
                                  self.group).transpose(0, 1)  # fmt: skip
        return (loss * mask).sum(dtype=torch.float32) / mask.sum()


def stages(of: Layout) -> list[tuple[int, bool]]:
    """(layers, whether the head is there) of each stage.

    The trainer counts what each block computes, and goes on to the next stage once the
    sum has passed that stage's share.
    """
    layer = 4 * of.hidden**2 + 3 * of.intermediate * of.hidden
    head = of.vocab * of.hidden
    costs = [0, *[layer] * of.layers, 0, head, 0, 0]
    total, done, stage = sum(costs), 0, 0
    counts, at_head = [0] * of.pp, 0
    for number, cost in enumerate(costs):
        done += cost
        if 0 < number <= of.layers:
            counts[stage] += 1
        if cost == head and number > of.layers:
            at_head = stage
        if done >= total * (stage + 1) / of.pp and stage < of.pp - 1:
            stage += 1
    return [(count, stage == at_head) for stage, count in enumerate(counts)]


def train(of: Layout, stage: int = 0, steps: int = 2) -> None:
    """The whole program, as one rank of one stage runs it.

    Its neighbours in the pipeline are left out: what it would take is there.
    """
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    tp = dist.new_group(range(of.tp)) if of.tp > 1 else None
    ranks = range(0, of.dp * of.tp, of.tp)
    dp = dist.new_group(ranks) if of.dp > 1 else None
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda")
    count, has_head = stages(of)[stage]
    first = First(of, tp) if stage == 0 else None
    blocks = nn.ModuleList(Block(of, tp) for _ in range(count))
    last = Last(of, tp) if has_head else None
    model = nn.ModuleList(part for part in (first, blocks, last) if part is not None)
    if first is not None and last is not None and of.tied:
        last.head = first.embedding.weight
    weights = list(model.parameters())
    size = sum(weight.numel() for weight in weights)
    sums = torch.zeros(size, dtype=torch.float32)
    held = [torch.zeros(size)] if of.dp > 1 and not of.zero else []  # DDP's buckets
    parts = sums.split([weight.numel() for weight in weights])
    shares = of.dp if of.zero else 1
    owned = torch.zeros(size // shares, dtype=torch.float32, requires_grad=True)
    optimizer = torch.optim.AdamW([owned], fused=True)
    shape = (of.tokens // of.tp, of.micro, of.hidden)

    def forward():
        ids = torch.zeros(of.micro, of.tokens, dtype=torch.int64)
        mask = torch.ones(of.micro, of.tokens, dtype=torch.bool)
        x = torch.empty(shape).requires_grad_() if first is None else first(ids)
        for block in blocks:
            x = block(x, mask)
        return x if last is None else last(x, ids, mask) / of.accumulate

    def backward(out):
        out.backward(None if out.dim() == 0 else torch.empty_like(out))
        for weight, total in zip(weights, parts, strict=True):
            total.view_as(weight).add_(weight.grad)
            weight.grad = None

    for _ in range(steps):
        waiting = []
        for _ in range(of.accumulate):
            waiting.append(forward())
            if len(waiting) == of.pp - stage:
                backward(waiting.pop(0))
        while waiting:
            backward(waiting.pop(0))
        if dp is not None:
            dist.all_reduce(sums, group=dp, op=dist.ReduceOp.AVG)
        norms = [torch.linalg.vector_norm(part) for part in parts]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        for part in parts:
            part.mul_(torch.clamp(1.0 / (norm + 1e-6), max=1.0))
        owned.grad = sums[: owned.numel()]
        optimizer.step()
        mine = owned.split([weight.numel() // shares for weight in weights])
        for weight, part in zip(weights, mine, strict=True):
            weight.data.view(-1)[: part.numel()].copy_(part.detach())
        if dp is not None and of.zero:
            for weight in weights:
                whole = weight.detach().view(-1)
                part = whole[: len(whole) // of.dp].clone()
                dist.all_gather_into_tensor(whole, part, group=dp)
        sums.zero_()
    held.clear()
