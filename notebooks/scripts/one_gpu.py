"""Train a small classifier on one GPU: `python one_gpu.py`.

Used in lesson 03, which makes it into `four_gpus.py`.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 128  # samples of a step


def main():
    torch.manual_seed(0)
    # your data
    images = torch.randn(2048, 64)
    labels = images[:, :10].argmax(1)
    data = TensorDataset(images, labels)
    loader = DataLoader(data, BATCH, shuffle=True)

    # your model
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # your optimizer

    for epoch in range(3):
        total = torch.zeros((), device="cuda")
        for batch in loader:
            x, y = [part.cuda() for part in batch]  # your batch
            loss = nn.functional.cross_entropy(model(x), y)  # your loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        print(f"epoch {epoch}: loss {total.item() / len(loader):.4f}")

    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":  # not in the workers of a DataLoader
    main()
