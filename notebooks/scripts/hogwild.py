"""Two processes train one classifier on one GPU, in turn and without waiting.

    python hogwild.py

Both processes have the same weights, in the same memory of the GPU. In turn, they do
what one process does. Used in lesson 14.
"""

import torch
import torch.multiprocessing as mp
from torch import nn


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


def train(model, rank, workers, turns=None):
    images, labels = make_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in batches(rank, workers):
        if turns:
            assert turns[rank].acquire(timeout=60), "my turn never comes"
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()  # the weights are written
        if turns:
            turns[(rank + 1) % workers].release()


def work(rank, workers, in_turn, turns, free):
    train(in_turn, rank, workers, turns)
    train(free, rank, workers)


def judge(model):
    """Loss, and share of the images that are right."""
    images, labels = make_data()
    with torch.no_grad():
        scores = model(images)
    loss = nn.functional.cross_entropy(scores, labels)
    return loss.item(), (scores.argmax(1) == labels).float().mean().item()


if __name__ == "__main__":
    alone, in_turn, free = make_model(), make_model(), make_model()
    train(alone, rank=0, workers=1)
    print("one process: loss {:.4f}, right {:.1%}".format(*judge(alone)))

    context = mp.get_context("spawn")
    turns = [context.Semaphore(1), context.Semaphore(0)]
    shared = 2, in_turn, turns, free
    worker = context.Process(target=work, args=(1, *shared), daemon=True)
    worker.start()
    work(0, *shared)
    worker.join(60)
    assert worker.exitcode == 0, "the worker has failed"
    print("two in turn: loss {:.4f}, right {:.1%}".format(*judge(in_turn)))
    pairs = zip(alone.parameters(), in_turn.parameters(), strict=True)
    far = max((a - b).abs().max().item() for a, b in pairs)
    print(f"  all weights as in one process, within 1e-05: {far < 1e-5}")
    loss, right = judge(free)
    print(f"two, free: loss below 2: {loss < 2}, right more than 50%: {right > 0.5}")
