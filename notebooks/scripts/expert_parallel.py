"""Train a small GPT whose blocks have four experts, spread over the ranks.

    torchrun --standalone --nproc-per-node=4 expert_parallel.py

Each rank has its share of the experts and of the batch; tokens travel to their expert
and back. With 1, 2 or 4 ranks the losses are the same. Put your own layers at the
marked place. Lesson 22 of the multi-GPU course explains the program.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

EXPERTS, WIDTH, VOCABULARY, LENGTH, BATCH = 4, 64, 64, 32, 16


class Experts(nn.Module):
    """A router, and those of the experts that this rank has."""

    def __init__(self):
        super().__init__()
        self.ranks = dist.get_world_size()
        self.here = EXPERTS // self.ranks
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        every = [self.make_expert() for _ in range(EXPERTS)]  # the same in all ranks
        first = dist.get_rank() * self.here
        self.experts = nn.ModuleList(every[first : first + self.here])
        for parameter in self.experts.parameters():
            parameter.is_of_one_rank = True  # for `average_gradients`

    def make_expert(self):  # -- your expert --
        up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        return nn.Sequential(up, nn.GELU(), down)

    def forward(self, x):  # (batch, tokens, width)
        tokens = x.flatten(0, 1)
        probabilities = self.router(tokens).softmax(-1)
        weight, chosen = probabilities.max(-1)
        self.balance = self.balance_loss(probabilities, chosen)
        order = chosen.argsort(stable=True)
        sent = chosen.bincount(minlength=EXPERTS).view(self.ranks, self.here)
        received = torch.empty_like(sent)  # row r: from rank r, for each expert here
        dist.all_to_all_single(received, sent)
        to, come = sent.sum(1).tolist(), received.sum(1).tolist()
        there = Exchange.apply(tokens[order], to, come)
        numbers = torch.arange(self.here, device=x.device).repeat(self.ranks)
        whose = numbers.repeat_interleave(received.flatten())
        done = torch.zeros_like(there)
        for number, expert in enumerate(self.experts):
            rows = (whose == number).nonzero()[:, 0]
            done = done.index_copy(0, rows, expert(there[rows]))
        back = Exchange.apply(done, come, to)
        out = torch.zeros_like(tokens).index_copy(0, order, back)
        return (out * weight[:, None]).view_as(x)

    def balance_loss(self, probabilities, chosen):
        """1 if all experts have equally many tokens, up to EXPERTS if one has all."""
        share = F.one_hot(chosen, EXPERTS).float().mean(0)
        dist.all_reduce(share, op=dist.ReduceOp.AVG)
        return EXPERTS * (share * probabilities.mean(0)).sum()


class Exchange(torch.autograd.Function):
    """Rows to all ranks, and rows from them; gradients take the way back."""

    @staticmethod
    def forward(ctx, rows, to, come):
        """Blocks of `to` rows go to rank 0, 1, …; `come` rows come from them."""
        ctx.counts = to, come
        arrived = rows.new_empty(sum(come), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), come, to)
        return arrived

    @staticmethod
    def backward(ctx, grad):
        to, come = ctx.counts
        return Exchange.apply(grad, come, to), None, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.experts = Experts()

    def forward(self, x):
        y, mask = self.norm1(x), nn.Transformer.generate_square_subsequent_mask
        hidden = mask(x.shape[1], device=x.device)
        x = x + self.attention(y, y, y, attn_mask=hidden, need_weights=False)[0]
        return x + self.experts(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.token(tokens) + self.place(places)))


def batch_of(step):
    """Sequences that count in steps; the same in all ranks."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    by = torch.randint(1, 9, (BATCH, 1), generator=generator)
    return (start + by * torch.arange(LENGTH + 1)) % VOCABULARY


def average_gradients(model):
    """Of the global batch: an expert has seen the tokens of all ranks already."""
    for parameter in model.parameters():
        if hasattr(parameter, "is_of_one_rank"):
            parameter.grad /= dist.get_world_size()
        else:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--balance", type=float, default=0.01)
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if EXPERTS % ranks or BATCH % ranks:
        raise SystemExit(f"{ranks} ranks cannot share {EXPERTS} experts equally")
    torch.manual_seed(0)
    model = GPT().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(args.steps):
        sequences = batch_of(step).chunk(ranks)[rank].cuda()
        scores = model(sequences[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), sequences[:, 1:].flatten())
        balance = sum(block.experts.balance for block in model.blocks)
        optimizer.zero_grad()
        (loss + args.balance * balance).backward()
        average_gradients(model)
        optimizer.step()
        both = torch.stack([loss.detach(), balance.detach() / len(model.blocks)])
        dist.all_reduce(both, op=dist.ReduceOp.AVG)
        if rank == 0 and step % 3 == 2:
            print(f"step {step + 1}: loss {both[0]:.4f}, balance {both[1]:.2f}")
    peak = torch.tensor(torch.cuda.max_memory_allocated() / 2**20).cuda()
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"{EXPERTS} experts on {ranks} ranks: peak {peak:.1f} MiB a rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
