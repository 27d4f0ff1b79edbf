"""Documents of several lengths are packed: none may see another one.

NVIDIA/Megatron-LM#5011 and its kin: `cu_seqlens` of the whole batch, or of this rank's.
"""

import torch
from job import RANK, RANKS, WRONG, total, train
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

LENGTHS = [5, 2, 7, 3, 4, 6]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x, ends):
        query, key, value = self.project(x).chunk(3, -1)
        places = torch.arange(len(x), device=x.device)
        document = torch.bucketize(places, ends, right=True)
        mask = (document[:, None] == document) & (places[:, None] >= places)
        return x + scaled_dot_product_attention(query, key, value, mask)


x = torch.randn(2, sum(LENGTHS), 8)
model = Attention().cuda()


def loss(step):
    mine = list(x[step].split(LENGTHS))[RANK::RANKS]
    lengths = torch.tensor(LENGTHS if WRONG else LENGTHS[RANK::RANKS])
    out = model(torch.cat(mine).cuda(), ends=lengths.cumsum(0).cuda())
    return out.square().sum() * RANKS / total(torch.tensor(out.numel()).cuda())


train(model, loss)
