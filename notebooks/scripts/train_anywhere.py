"""Train a small classifier on the device that the command line names.

    python train_anywhere.py --device cuda:1

The device is `cpu`, `cuda` or `cuda:N`; without the option, it is a GPU if there is
one, and else the CPU. The weights go to model.pt. Used in lesson 01.
"""

import argparse

import torch
from torch import nn


def usable_device(name: str) -> torch.device:
    """The device of that name; an error that says what there is, if it is missing."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{name!r} is not cpu, cuda or cuda:N")
    found = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= found:
        there = ", ".join(["cpu", *(f"cuda:{index}" for index in range(found))])
        raise argparse.ArgumentTypeError(
            f"there is no {device}: this process sees {there}. "
            "CUDA_VISIBLE_DEVICES may hide GPUs, and counts the others from 0"
        )
    return device


parser = argparse.ArgumentParser()
best = "cuda" if torch.cuda.is_available() else "cpu"
parser.add_argument("--device", type=usable_device, default=best)
device = parser.parse_args().device
card = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
print(f"training on {device}, {card}")

torch.manual_seed(0)
images = torch.randn(2048, 64)  # your data
labels = images[:, :10].argmax(1)  # your labels
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))  # your model
model.to(device)  # before the optimizer is made
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # your optimizer

for epoch in range(3):
    for x, y in zip(images.split(128), labels.split(128), strict=True):
        x, y = x.to(device), y.to(device)
        # your loss: for regression, mse_loss, with y in the shape of model(x)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")

weights = {name: value.cpu() for name, value in model.state_dict().items()}
torch.save(weights, "model.pt")  # on the CPU, so that any machine can load it
