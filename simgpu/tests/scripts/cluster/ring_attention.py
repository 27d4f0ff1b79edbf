"""Ring attention by hand: keys and values travel round with `batch_isend_irecv`.

Each rank has the queries of its part of the sequence. Partial softmaxes are combined
by their largest score and their sum; the backward pass goes round once more.
"""

import torch
import torch.distributed as dist
from common import agree, join, leave
from torch.nn import functional as F

rank, ranks, device = join()


def pass_on(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Send tensors to the next rank and receive those of the rank before."""
    received = [torch.empty_like(tensor) for tensor in tensors]
    operations = []
    for sent, into in zip(tensors, received, strict=True):
        send = dist.P2POp(dist.isend, sent.contiguous(), (rank + 1) % ranks)
        take = dist.P2POp(dist.irecv, into, (rank - 1) % ranks)
        operations += [send, take]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def scores_of(q, k, source: int) -> torch.Tensor:
    """Scaled scores of this rank's queries and rank `source`'s keys, masked."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if source > rank:
        return scores.fill_(float("-inf"))  # later than every query here
    if source == rank:
        later = torch.ones(scores.shape[-2:], device=device, dtype=torch.bool).triu(1)
        return scores.masked_fill(later, float("-inf"))
    return scores


class RingAttention(torch.autograd.Function):
    """Causal attention; inputs and output `(rows, heads, places / ranks, dim)`."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        top = total = out = None
        for step in range(ranks):
            scores = scores_of(q, k, (rank - step) % ranks)
            highest = scores.amax(-1, keepdim=True)
            new = highest if top is None else torch.maximum(top, highest)
            weights = (scores - new).exp()
            shrink = torch.zeros_like(new) if top is None else (top - new).exp()
            part, count = weights @ v, weights.sum(-1, keepdim=True)
            out = part if out is None else out * shrink + part
            total = count if total is None else total * shrink + count
            top = new
            if step + 1 < ranks:
                k, v = pass_on(k, v)
        ctx.out, ctx.log_total = out / total, top + total.log()
        return ctx.out

    @staticmethod
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        inner = (grad * ctx.out).sum(-1, keepdim=True)
        for step in range(ranks):
            weights = (scores_of(q, k, (rank - step) % ranks) - ctx.log_total).exp()
            dscores = weights * (grad @ v.transpose(-1, -2) - inner) * scale
            dq += dscores @ k
            dk += dscores.transpose(-1, -2) @ q
            dv += weights.transpose(-1, -2) @ grad
            k, v, dk, dv = pass_on(k, v, dk, dv)  # gradients travel with their keys
        return dq, dk, dv


torch.manual_seed(0)
whole = torch.randn(4, 2, 3, 8 * ranks, 8, device=device)
q, k, v, weights = whole
for x in (q, k, v):
    x.requires_grad_()
expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
(expected * weights).sum().backward()

mine = [x.detach().chunk(ranks, dim=2)[rank].contiguous() for x in whole]
for x in mine[:3]:
    x.requires_grad_()
out = RingAttention.apply(*mine[:3])
(out * mine[3]).sum().backward()
agree("output", out, expected.chunk(ranks, dim=2)[rank])
for name, part, x in zip("qkv", mine, (q, k, v), strict=False):
    agree(f"gradient of {name}", part.grad, x.grad.chunk(ranks, dim=2)[rank])

dist.barrier(device_ids=[rank])
leave(f"ring_attention: {ranks} ranks, {8 * ranks} places")
