"""Context parallel, cut zigzag: rank r has chunks r and 2n-1-r, and their positions.

huggingface/diffusers#13696, NVIDIA/Megatron-LM's `get_batch_on_this_cp_rank`.
"""

import torch
from job import RANK, RANKS, WRONG, Gather, average, train
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

LENGTH = 16
CHUNK = LENGTH // (2 * RANKS)
ORDER = torch.cat([torch.arange(CHUNK) + CHUNK * c
                   for r in range(RANKS) for c in (r, 2 * RANKS - 1 - r)])  # fmt: skip
MINE = ORDER.chunk(RANKS)[RANK]


def turned(x, positions):
    """Rotary positions: each pair of features is turned by an angle."""
    angles = positions[:, None] / 10 ** torch.arange(0, 1, 1 / 4)
    turns = torch.polar(torch.ones_like(angles), angles).to(x.device)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x):
        its = torch.arange(len(MINE)) + RANK * len(MINE) if WRONG else MINE
        query, key, value = self.project(x).chunk(3, -1)
        both = torch.stack([turned(key, its), value]).movedim(2, 0)
        key, value = Gather.apply(both.contiguous()).movedim(0, 2)
        mask = (MINE[:, None] >= ORDER).cuda()
        return x + scaled_dot_product_attention(turned(query, its), key, value, mask)


ids = torch.randint(20, (2, 3, LENGTH + 1))
model = nn.Sequential(nn.Embedding(20, 8), Attention(), nn.Linear(8, 20)).cuda()


def loss(step):
    out = model(ids[step][:, MINE].cuda())
    return cross_entropy(out.flatten(0, 1), ids[step][:, MINE + 1].flatten().cuda())


train(model, loss, average)
