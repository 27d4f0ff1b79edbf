"""Train a small classifier on one GPU: `python one_gpu.py`.

Used in lesson 03, which makes it into `four_gpus.py`.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
images = torch.randn(2048, 64)
labels = images[:, :10].argmax(1)
data = TensorDataset(images, labels)
loader = DataLoader(data, batch_size=128, shuffle=True)

model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

for epoch in range(3):
    for x, y in loader:
        x, y = x.cuda(), y.cuda()
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")

torch.save(model.state_dict(), "model.pt")
