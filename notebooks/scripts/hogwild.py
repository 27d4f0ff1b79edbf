"""Two processes train one classifier on one GPU, in turn or without waiting.

    python hogwild.py in-turn
    python hogwild.py free

Both processes have the same weights, in the same memory of the GPU. In turn, they do
what one process does. Used in lesson 14.
"""

import contextlib
import sys

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import cross_entropy


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()


def make_data():
    torch.manual_seed(1)
    images = torch.randn(1024, 64)
    return images.cuda(), images[:, :10].argmax(1).cuda()


def batches(rank, workers):
    """The batches of one worker: numbers rank, rank + workers, and so on."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):  # epochs
        order = torch.randperm(1024, generator=generator)
        yield from order.split(128)[rank::workers]


@contextlib.contextmanager
def my_turn(turns, rank):
    """Wait until it is this worker's turn, and then give the turn to the next one."""
    if turns:
        assert turns[rank].acquire(timeout=60), "my turn never comes"
    yield
    if turns:
        turns[(rank + 1) % len(turns)].release()


def train(model, rank, workers, turns=None):
    images, labels = make_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in batches(rank, workers):
        with my_turn(turns, rank):
            loss = cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()  # the weights are written


def judge(model):
    """Loss, and share of the images that are right."""
    images, labels = make_data()
    with torch.no_grad():
        scores = model(images)
    right = (scores.argmax(1) == labels).float().mean()
    loss = cross_entropy(scores, labels)
    return f"loss {loss.item():.4f}, right {right.item():.1%}"


if __name__ == "__main__":
    if sys.argv[1:] not in (["in-turn"], ["free"]):
        sys.exit("say in-turn or free: python hogwild.py in-turn")
    alone, shared = make_model(), make_model()
    train(alone, rank=0, workers=1)

    context = mp.get_context("spawn")
    turns = [context.Semaphore(1), context.Semaphore(0)]
    turns = turns if sys.argv[1] == "in-turn" else None
    worker = context.Process(target=train, args=(shared, 1, 2, turns), daemon=True)
    worker.start()
    train(shared, 0, 2, turns)
    worker.join(60)
    assert worker.exitcode == 0, "the worker has failed"
    pairs = zip(alone.parameters(), shared.parameters(), strict=True)
    far = max((a - b).abs().max().item() for a, b in pairs)
    print("one process:  ", judge(alone))
    print("two processes:", judge(shared))
    print(f"all weights equal within 0.00001: {far < 1e-5}")
