"""A vision transformer, and images to learn: behind the seam of the trainers."""

from seam import Model, counted, decayed, first_value  # noqa: F401
from torch import nn
from torch.nn.functional import cross_entropy

FIRST, LAST = ("patches", "places"), ("norm", "head")


class ViT(Model):
    def __init__(self, width=32):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.places = nn.Embedding(16, width)
        settings = dict(dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 64, **settings) for _ in range(3)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def embed(self, batch):
        image = batch["image"].to(self.patches.weight.dtype)
        return self.patches(image).flatten(2).mT + self.places.weight

    def losses(self, x, batch):
        scores = self.head(self.norm(x).mean(1)).float()
        return cross_entropy(scores, batch["label"], reduction="sum")


def make(size, context):
    return ViT()
