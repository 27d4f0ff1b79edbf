"""Ring attention: keys go round, and those of later parts must not be seen.

huggingface/diffusers#13696, NVIDIA/Megatron-LM#1464 are of its kind.
"""

import torch
import torch.distributed as dist
from job import RANK, RANKS, WRONG, pair, part, train
from torch import nn
from torch.nn.functional import cross_entropy


def sent(x, by):
    """What the rank before has sent; `by` is -1 on the way back."""
    x, received = x.contiguous(), torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, (RANK + by) % RANKS)
    receive = dist.P2POp(dist.irecv, received, (RANK - by) % RANKS)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return received


Next = pair("Next", lambda x: sent(x, 1), lambda gradient: sent(gradient, -1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x):
        query, *both = self.project(x).chunk(3, -1)
        both, places = torch.stack(both), torch.arange(x.shape[1], device=x.device)
        size, total = 0, 0
        for passed in range(RANKS):
            if passed:
                both = Next.apply(both)
            scores = query @ both[0].mT
            after = (RANK - passed) % RANKS - RANK  # whose keys these are
            if not WRONG or after == 0:
                seen = places[:, None] >= places + after * len(places)
                scores = scores.masked_fill(~seen, float("-inf"))
            weights = scores.exp()
            size, total = size + weights.sum(-1, True), total + weights @ both[1]
        return x + total / size


ids = torch.randint(20, (2, 3, 17))
model = nn.Sequential(nn.Embedding(20, 8), Attention(), nn.Linear(8, 20)).cuda()


def loss(step):
    out = model(part(ids[step, :, :-1], 1).cuda())
    targets = part(ids[step, :, 1:], 1).flatten().cuda()
    return cross_entropy(out.flatten(0, 1), targets)


train(model, loss)
