"""A mixture of experts: tokens travel to their expert's rank and back.

Each rank has one expert and a part of the tokens. How many tokens go where differs
and is known only when the router has chosen.
"""

import copy

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dnn
from common import agree, join, leave
from torch import nn
from torch.nn import functional as F

WIDTH = 16
rank, ranks, device = join()


def by_library(x, received, sent):
    """`torch.distributed.nn`: into a tensor that is there."""
    into = x.new_empty(sum(received), x.shape[1])
    return dnn.all_to_all_single(into, x, received, sent)


def by_functional(x, received, sent):
    return funcol.all_to_all_single_autograd(x, received, sent, dist.group.WORLD)


class Exchange(torch.autograd.Function):
    """By hand: gradients travel the same way back."""

    @staticmethod
    def forward(ctx, x, received, sent):
        ctx.sizes = sent, received
        into = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(into, x.contiguous(), received, sent)
        return into

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, *ctx.sizes), None, None


class Experts(nn.Module):
    """A router and one feed-forward network for each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, ranks, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
            for _ in range(ranks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All experts here."""
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out = out.index_add(
                0, (chosen == i).nonzero()[:, 0], expert(x[chosen == i])
            )
        return out * weight[:, None]

    def forward_split(self, x: torch.Tensor, exchange) -> torch.Tensor:
        """This rank's expert here, the others where they are."""
        weight, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        sent = torch.bincount(chosen, minlength=ranks)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        sent, received = sent.tolist(), received.tolist()
        out = self.experts[rank](exchange(x[order], received, sent))
        back = exchange(out, sent, received)
        return torch.zeros_like(x).index_copy(0, order, back) * weight[:, None]


torch.manual_seed(0)
reference = Experts().to(device)
x, y = torch.randn(2, 12 * ranks, WIDTH, device=device)
with torch.no_grad():  # nobody chooses expert 0, on any rank
    x[:, 0] = 1.0
    reference.router.weight[0] = 0.0
    reference.router.weight[0, 0] = -100.0
assert (reference.router(x).argmax(-1) != 0).all()
whole = F.mse_loss(reference(x), y)
whole.backward()

for exchange in (by_library, by_functional, Exchange.apply):
    model = copy.deepcopy(reference)
    model.zero_grad()
    out = model.forward_split(x.chunk(ranks)[rank], exchange)
    loss = F.mse_loss(out, y.chunk(ranks)[rank])
    (loss / ranks).backward()
    for grad in (model.router.weight.grad, total := loss.detach() / ranks):
        dist.all_reduce(grad)  # an expert's gradients need no sum: it saw every token
    agree("loss", total, whole)
    agree("router", model.router.weight.grad, reference.router.weight.grad)
    pairs = zip(
        model.experts[rank].parameters(),
        reference.experts[rank].parameters(),
        strict=True,
    )
    for mine, expected in pairs:
        agree(f"expert {rank}", mine.grad, expected.grad)

leave(f"experts: {ranks} ranks, loss {whole.item():.4f}")
