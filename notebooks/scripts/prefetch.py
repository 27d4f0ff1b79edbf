"""Train on one GPU, and copy each batch while the one before computes.

    python prefetch.py

Trains twice, without and with `Prefetcher`, and prints the losses and the times; both
read pinned memory. Your model goes into `make_model`, your loss into `loss_of`, your
batches into `make_batches`. The times include that of a `DataLoader`. Lesson 05,
"Overlap with streams", says what each line is for.
"""

import torch
from torch import nn


class Prefetcher:
    """Yields the batches of a loader on the GPU while the next one is on its way.

    A batch is a tuple or list of pinned tensors. Use it on the current stream only.
    """

    def __init__(self, loader):
        self.loader = loader
        self.copier = torch.cuda.Stream()

    def __iter__(self):
        here = torch.cuda.current_stream()
        batches = iter(self.loader)
        upcoming = self.load(batches)
        while upcoming is not None:
            here.wait_stream(self.copier)  # this batch has arrived
            batch = upcoming
            upcoming = self.load(batches)
            yield batch

    def load(self, batches):
        batch = next(batches, None)
        if batch is None:
            return None
        self.copier.wait_stream(torch.cuda.current_stream())  # for the step before
        with torch.cuda.stream(self.copier):
            return [part.cuda(non_blocking=True) for part in batch]


def make_model():  # your model goes here
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))


def loss_of(model, batch):  # your loss goes here
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def make_batches():  # your data go here: return DataLoader(..., pin_memory=True)
    images = torch.randn(8 * 8192, 64)
    labels = images[:, :10].argmax(1)
    images, labels = images.pin_memory(), labels.pin_memory()
    return list(zip(images.split(8192), labels.split(8192), strict=True))


def train(batches, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for batch in batches:  # a batch that is on the GPU is not copied again
        batch = [part.cuda(non_blocking=True) for part in batch]
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def timed(batches):
    torch.manual_seed(0)
    model = make_model().cuda()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    losses = train(batches, model)
    end.record()
    end.synchronize()
    return losses.cpu(), start.elapsed_time(end)


if __name__ == "__main__":
    torch.manual_seed(0)
    batches = make_batches()
    timed([next(iter(batches))])  # the first use of a GPU takes longer
    for name, loader in (("without", batches), ("with", Prefetcher(batches))):
        losses, milliseconds = timed(loader)
        print(f"{name} prefetching: {milliseconds:.2f} ms, losses:")
        print(" ".join(f"{loss:.4f}" for loss in losses))
