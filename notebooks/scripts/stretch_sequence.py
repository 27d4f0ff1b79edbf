"""Train on sequences that are cut into parts: a rank has some tokens of each.

    torchrun --standalone --nproc-per-node=4 stretch_sequence.py

Context parallelism with `context_parallel`. Your model and data go in where it says so;
64 times the number of ranks divides the tokens of a sequence. (Efficient attention,
which float32 takes on GPUs, works in 32 tokens, and a rank has two parts.)
Lesson 21 of the course explains each line.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP

VOCABULARY = 64


# -- your model and data ---------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def attend(self, x):
        q, k, v = (  # (batch, heads, tokens, width of a head)
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        # context_parallel replaces this function, if it is found in its module
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, depth=4, width=128, heads=4, length=64):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens, places):
        """Tokens (batch, tokens); their places in the full sequence, (tokens,)."""
        x = self.token(tokens) + self.place(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sequences(number, length=64, seed=0):
    """Sequences that count in steps of 1 to 8, and the next number at each place."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(VOCABULARY, (number, 1), generator=generator)
    step = torch.randint(1, 9, (number, 1), generator=generator)
    tokens = (start + step * torch.arange(length + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]  # -100, where there is no target


def loss_of(scores, targets):
    """The sum over some tokens of each sequence; main divides by all targets."""
    scores, targets = scores.flatten(0, 1), targets.flatten()
    return functional.cross_entropy(scores, targets, reduction="sum")


# --------------------------------------------------------------------------------------


def compare_with_one(model, tokens, targets, places):
    """How far gradients are from those of all tokens, as a share of their norm."""
    used = [p for p in model.parameters() if p.grad is not None]
    found = torch.cat([p.grad.flatten() for p in used])
    model.zero_grad()
    with model.no_sync():
        loss = loss_of(model(tokens, places), targets) / (targets != -100).sum()
        loss.backward()
    expected = torch.cat([p.grad.flatten() for p in used])
    return ((found - expected).norm() / expected.norm()).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    compare = "compare gradients with one process, do not train: for a short length"
    parser.add_argument("--compare", action="store_true", help=compare)
    options = parser.parse_args()

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cuda", (ranks,))

    torch.manual_seed(0)
    model = DDP(GPT(length=options.length).cuda(), device_ids=[device])  # averages
    model.broadcast_buffers = False  # a cut one has other rows on each rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # other elements are dropped from other tokens; attention's own dropout_p must be 0
    torch.cuda.manual_seed(rank)
    model.train(not options.compare)  # and none to compare
    for step in range(9):
        # all ranks load the same sequences; context_parallel leaves each rank its part
        tokens, targets = (t.cuda() for t in sequences(8, options.length, seed=step))
        length = tokens.shape[1]
        if ranks > 1 and length % (64 * ranks):
            parser.error(f"{64 * ranks} does not divide {length} tokens; pad sequences")
        places = torch.arange(length, device="cuda")
        count = (targets != -100).sum()  # on all ranks
        with context_parallel(
            mesh, buffers=[tokens, targets, places], buffer_seq_dims=[1, 1, 0]
        ):
            scores = model(tokens, places)
            loss = loss_of(scores, targets) * ranks / count  # DDP averages
            loss.backward()  # inside of `with`: attention sends in backward, too
        if options.compare:
            off = 100 * compare_with_one(model, tokens, targets, places)
            if rank == 0:
                print(f"gradients differ from one process by {off:.2f} %")
            return dist.destroy_process_group()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        if rank == 0 and step % 4 == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    rows = [None] * ranks
    dist.all_gather_object(rows, torch.cuda.max_memory_allocated())
    for number, peak in enumerate(rows if rank == 0 else []):
        print(f"rank {number} of {ranks}: peak {peak:,} bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
