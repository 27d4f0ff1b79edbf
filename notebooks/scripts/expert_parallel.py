"""Train a small GPT whose blocks have four experts, spread over the ranks.

    torchrun --standalone --nproc-per-node=4 expert_parallel.py

Each rank has its share of the experts and of the batch; tokens travel to their expert
and back. With 1, 2 or 4 ranks the losses are the same. `--favour 1` makes all routers
prefer expert 0 at the start; `--balance 0` then shows how it goes without a balance
loss. Put your expert, model, loss and batch between the two lines of dashes.
Lesson 22 of the multi-GPU course explains the program.
"""

import argparse
import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

# -- yours: expert, model, loss and batch ----------------------------------------------

EXPERTS, WIDTH, VOCABULARY, LENGTH, BATCH = 4, 64, 64, 32, 16


def make_expert():  # rows of WIDTH numbers -> rows of WIDTH numbers
    up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
    return nn.Sequential(up, nn.GELU(), down)


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


def loss_of(model, batch):  # in bfloat16: with torch.autocast("cuda", torch.bfloat16)
    """The sum over the targets of this rank, and how many there are: -100 is none."""
    scores, targets = model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten()
    total = F.cross_entropy(scores, targets, reduction="sum")
    return total, (targets != -100).sum()


def batch_of(step):
    """The global batch, the same in all ranks: give a DataLoader one seed in all."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    by = torch.randint(1, 9, (BATCH, 1), generator=generator)
    sequences = (start + by * torch.arange(LENGTH + 1)) % VOCABULARY
    return {"tokens": sequences[:, :-1], "targets": sequences[:, 1:]}


# --------------------------------------------------------------------------------------


class Experts(nn.Module):
    """A router, and those of the experts that this rank has."""

    def __init__(self):
        super().__init__()
        self.ranks = dist.get_world_size()
        self.here = EXPERTS // self.ranks
        self.router = nn.Linear(WIDTH, EXPERTS)
        every = [make_expert() for _ in range(EXPERTS)]  # the same in all ranks
        first = dist.get_rank() * self.here
        # a checkpoint takes equal names for copies: an expert has its model's number
        numbers = range(first, first + self.here)
        self.experts = nn.ModuleDict({str(number): every[number] for number in numbers})

    def forward(self, x, real=None):
        """x is (batch, tokens, width). A mask (batch, tokens): True is no padding."""
        real = x.new_ones(x.shape[:2], dtype=torch.bool) if real is None else real
        tokens = x[real]  # only these are routed; the others get zeros
        with torch.autocast("cuda", enabled=False):  # rounding may change the choice
            probabilities = self.router(tokens.float()).softmax(-1)
        weight, chosen = probabilities.max(-1)
        self.balance = self.balance_loss(probabilities, chosen)
        order = chosen.argsort(stable=True)
        sent = F.one_hot(chosen, EXPERTS).sum(0).view(self.ranks, self.here)
        received = torch.empty_like(sent)  # row r: from rank r, for each expert here
        dist.all_to_all_single(received, sent)
        to, come = sent.sum(1).tolist(), received.sum(1).tolist()
        there = Exchange.apply(tokens[order], to, come)
        numbers = torch.arange(self.here, device=x.device).repeat(self.ranks)
        whose = numbers.repeat_interleave(received.flatten(), output_size=sum(come))
        done = torch.zeros_like(there)
        for number, expert in enumerate(self.experts.values()):
            rows = (whose == number).nonzero()[:, 0]
            done = done.index_copy(0, rows, expert(there[rows]).to(done.dtype))
        back = Exchange.apply(done, come, to)
        out = torch.zeros_like(tokens).index_copy(0, order, back)
        out = (out * weight[:, None]).to(x.dtype)
        return torch.zeros_like(x).masked_scatter(real[..., None], out)

    def balance_loss(self, probabilities, chosen):
        """1 if all experts have equally many tokens, up to EXPERTS if one has all."""
        count = F.one_hot(chosen, EXPERTS).sum(0)
        dist.all_reduce(count)  # ranks may have unequal numbers of real tokens
        share = count / count.sum()
        self.largest = share.max()
        mean = probabilities.sum(0) * self.ranks / count.sum()  # averaged over ranks
        return EXPERTS * (share * mean).sum()


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


def share_of(batch, rank, ranks):
    """This rank's sequences: of a tensor, or of a dictionary, list or tuple of them."""
    if isinstance(batch, torch.Tensor):
        if len(batch) % ranks:
            raise SystemExit(
                f"{ranks} ranks cannot share {len(batch)} sequences equally"
            )
        return batch.chunk(ranks)[rank].cuda()
    if isinstance(batch, Mapping):  # a tokenizer's BatchEncoding is one, and no dict
        return {key: share_of(part, rank, ranks) for key, part in batch.items()}
    return [share_of(part, rank, ranks) for part in batch]


def gradients(model):
    """Those that all ranks have, and those of this rank's experts."""
    layers = [layer for layer in model.modules() if isinstance(layer, Experts)]
    own = {p for layer in layers for p in layer.experts.parameters()}
    found = [p for p in model.parameters() if p.grad is not None]  # others are frozen
    shared = [p.grad for p in found if p not in own]
    return shared, [p.grad for p in found if p in own]


def average_gradients(model):
    """Of the global batch: an expert has seen the tokens of all ranks already."""
    shared, own = gradients(model)
    for gradient in shared:  # one message each: DDP has fewer, in buckets
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
    for gradient in own:  # that of an expert without tokens is zero
        gradient /= dist.get_world_size()


def clip_gradients(model, most):
    """Scale all down to a norm of at most this; returns what it was, on all ranks."""
    shared, own = (nn.utils.get_total_norm(some).cuda() for some in gradients(model))
    squares = own**2
    dist.all_reduce(squares)  # of the experts on all ranks
    norm = (squares + shared**2).sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), most, norm)
    return norm


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--balance", type=float, default=0.01)
    parser.add_argument("--favour", type=float, default=0.0)
    parser.add_argument("--clip", type=float, default=float("inf"))
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if EXPERTS % ranks:
        raise SystemExit(f"EXPERTS is a multiple of {ranks} ranks, not {EXPERTS}")
    torch.manual_seed(0)
    model = GPT().cuda()
    layers = [layer for layer in model.modules() if isinstance(layer, Experts)]
    for layer in layers:
        layer.router.bias.data[0] += args.favour
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)  # your optimizer
    torch.manual_seed(rank)  # for dropout: each rank has other tokens
    for step in range(args.steps):
        total, count = loss_of(model, share_of(batch_of(step), rank, ranks))
        dist.all_reduce(count)  # the targets of all ranks
        loss = total * ranks / count  # the mean of the ranks' losses is the global one
        balance = sum(layer.balance for layer in layers)
        (loss + args.balance * balance).backward()
        average_gradients(model)
        norm = clip_gradients(model, args.clip)
        optimizer.step()
        optimizer.zero_grad()
        both = torch.stack([loss.detach(), balance.detach() / len(layers)])
        dist.all_reduce(both, op=dist.ReduceOp.AVG)
        if rank == 0 and step % 3 == 2:
            largest = max(layer.largest.item() for layer in layers)
            words = f"balance {both[1]:.2f}, largest share {largest:.2f}"
            print(f"step {step + 1}: loss {both[0]:.4f}, {words}, norm {norm:.4f}")
    peak = torch.tensor(torch.cuda.max_memory_allocated() / 2**20).cuda()
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"{EXPERTS} experts on {ranks} ranks: peak {peak:.1f} MiB a rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
