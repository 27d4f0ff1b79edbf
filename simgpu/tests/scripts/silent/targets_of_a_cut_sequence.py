"""Context parallel: the last token of a part has its target on the next rank.

NVIDIA/Megatron-LM#7498: targets that are shifted after the sequence was cut.
"""

import torch
from job import WRONG, part, train
from torch import nn
from torch.nn.functional import cross_entropy

ids = torch.randint(20, (2, 16, 3))  # the sequence comes first
model = nn.Sequential(nn.Embedding(20, 8), nn.GELU(), nn.Linear(8, 20)).cuda()


def loss(step):
    mine, shifted = part(ids[step]), part(ids[step].roll(-1, 0))
    targets = mine.roll(-1, 0) if WRONG else shifted
    return cross_entropy(model(mine.cuda()).flatten(0, 1), targets.flatten().cuda())


train(model, loss)
