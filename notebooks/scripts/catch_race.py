"""Train with copies on a second stream: with a race, or with its cure.

    python catch_race.py --cure none

`--cure none` forgets that the training has to wait for the copy; `wait_stream` and
`wait_event` are two cures. The script also trains on a single stream, and compares the
losses. Lesson 06, "Catch races", explains what you see. Your model goes into
`make_model`, and your own copying into `train`.
"""

import argparse

import torch
from torch import nn


def make_model():  # your model goes here
    torch.manual_seed(0)
    layers = nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)
    return nn.Sequential(*layers).cuda()


def make_batches():
    torch.manual_seed(0)
    images = torch.randn(8 * 1024, 64)
    labels = images[:, :10].argmax(1).cuda()
    images = images.pin_memory().split(1024)
    return list(zip(images, labels.split(1024), strict=True))


def train(cure, copier):
    """Returns the loss of each step, with every copy on the stream `copier`."""
    here = torch.cuda.current_stream()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for x, y in 4 * make_batches():  # four epochs
        with torch.cuda.stream(copier):
            x = x.cuda(non_blocking=True)
            arrived = copier.record_event()
        if cure == "wait_stream":
            here.wait_stream(copier)
        if cure == "wait_event":
            here.wait_event(arrived)
        loss = nn.functional.cross_entropy(model(x), y)
        x.record_stream(here)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    cures = ("none", "wait_stream", "wait_event")
    parser.add_argument("--cure", choices=cures, default="none")
    cure = parser.parse_args().cure
    two = train(cure, torch.cuda.Stream())
    one = train(cure, torch.cuda.current_stream())
    print(f"two streams, cure {cure}: loss {two[-1]:.4f}")
    print(f"one stream: loss {one[-1]:.4f}")
    print(f"largest difference of a loss: {(two - one).abs().max():.4f}")
