"""Train a classifier in a loop without hidden copies.

    python lean_loop.py

The data go to the GPU once. Each step makes its indices there, the constants of the
model are buffers, and the losses of an epoch are read in one copy. Used in
lesson 02.
"""

import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy

EPOCHS, BATCH = 3, 128


class Normalize(nn.Module):
    """(x - mean) / std, with constants that move with the model."""

    def __init__(self, mean: torch.Tensor, std: torch.Tensor):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.mean) / self.std


def main() -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)

    # -- your data and your model --------------------------------------------
    images = (128 + 40 * torch.randn(2048, 64)).to(device)
    labels = images[:, :10].argmax(1)
    with device:  # layers make their weights on the GPU
        model = nn.Sequential(
            Normalize(images.mean(0), images.std(0)),
            nn.Linear(64, 512),
            nn.ReLU(),
            nn.Linear(512, 10),
        )

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss_of = cross_entropy  # for regression: torch.nn.functional.mse_loss
    # --------------------------------------------------------------------------

    for epoch in range(EPOCHS):
        losses = []
        order = torch.randperm(len(images), device=device)
        for rows in order.split(BATCH):
            loss = loss_of(model(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        read = torch.stack(losses).tolist()  # the only copy of the epoch
        print(f"epoch {epoch}: loss {read[0]:.4f} first, {read[-1]:.4f} last")
        if not all(map(math.isfinite, read)):
            raise SystemExit(f"epoch {epoch}: a loss is not a number")


if __name__ == "__main__":
    main()
