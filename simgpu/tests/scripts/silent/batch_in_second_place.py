"""Images of a video, time first: the batch is the second dimension, and is cut there.

Many trainers of (S, B, H) do so: Megatron-LM, `nn.LSTM`, `nn.Transformer`.
"""

import torch
from job import RANK, RANKS, WRONG, train
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.cells = nn.Conv2d(3, 4, 3, stride=2), nn.LSTM(36, 8)

    def forward(self, batch):
        images = batch["images"]
        features = self.first(images.flatten(0, 1)).flatten(1)
        out, _ = self.cells(features.unflatten(0, images.shape[:2]))
        return out * batch["mask"][..., None]


x = torch.randn(2, 5, 4, 3, 8, 8)  # steps, time, batch, channels, height, width
mask = torch.ones(5, 4, dtype=torch.bool)
mask[3:] = False
model = Model().cuda()


def loss(step):
    mine = slice(4 // RANKS) if WRONG else slice(RANK, None, RANKS)
    batch = {"mask": mask[:, mine].cuda(), "images": x[step][:, mine].cuda()}
    return model(batch).square().mean()


train(model, loss)
