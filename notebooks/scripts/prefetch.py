"""Train on one GPU, and copy each batch while the one before computes.

    python prefetch.py

Trains twice on some batches, without and with `Prefetcher`, and prints the losses and
the times; both read pinned memory. The places marked `# your model`, `# your loss`,
`# your data` and `# your optimizer` are yours. A batch is a tensor, or tuples, lists
and dictionaries of tensors. The clock starts when the workers of a `DataLoader` run.
Lesson 05, "Overlap with streams", says what each line is for.
"""

from collections.abc import Mapping
from itertools import islice

import torch
from torch import nn

BATCHES = 50  # to train on; a time needs no whole epoch


def to_gpu(batch):
    """A batch on the GPU: a tensor, or tuples, lists and dictionaries of batches.

    A batch of your own class needs `to`. The rest, such as a file name, stays as it is.

    Raises:
        ValueError: for a tensor in pageable memory, from which nothing is promised to
            overlap.
    """
    if torch.is_tensor(batch) and not (batch.is_cuda or batch.is_pinned()):
        raise ValueError(
            f"a tensor of shape {tuple(batch.shape)} is in pageable memory: use "
            "DataLoader(..., pin_memory=True) or tensor.pin_memory()"
        )
    if isinstance(batch, Mapping):  # dict, and BatchEncoding of Hugging Face
        return {name: to_gpu(part) for name, part in batch.items()}
    if hasattr(batch, "to"):  # a tensor, or a class of your own
        return batch.to("cuda", non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*[to_gpu(part) for part in batch])
    if isinstance(batch, (tuple, list)):
        return [to_gpu(part) for part in batch]
    return batch


class Prefetcher:
    """Yields the batches of a loader on the GPU while the next one is on its way.

    Make it after `torch.cuda.set_device`, since its stream belongs to one GPU, and use
    it on the current stream only. At most three batches are on the GPU: the one
    that the caller still holds, the one that is yielded, and the next.
    """

    def __init__(self, loader):
        self.loader = loader
        self.copier = torch.cuda.Stream()

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        here = torch.cuda.current_stream()
        batches = iter(self.loader)
        upcoming = self.load(batches)
        while upcoming is not None:
            here.wait_stream(self.copier)  # this batch has arrived
            batch = upcoming
            upcoming = self.load(batches)
            yield batch
        self.copier.wait_stream(here)  # before the last batch is freed

    def load(self, batches):
        batch = next(batches, None)
        if batch is None:
            return None
        self.copier.wait_stream(torch.cuda.current_stream())  # for the step before
        with torch.cuda.stream(self.copier):
            return to_gpu(batch)


def make_model():  # your model
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))


def loss_of(model, batch):  # your loss; for Hugging Face: model(**batch).loss
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def make_batches():  # your data: DataLoader(..., num_workers=4, pin_memory=True)
    images = torch.randn(9 * 8192, 64)
    labels = images[:, :10].argmax(1)
    images, labels = images.pin_memory(), labels.pin_memory()
    return list(zip(images.split(8192), labels.split(8192), strict=True))


def train(batches, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # your optimizer
    losses = []
    for batch in batches:  # a batch that is on the GPU is not copied again
        loss = loss_of(model, to_gpu(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def timed(function, *values):
    """What the function returns, and the milliseconds that it takes."""
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    result = function(*values)
    end.record()
    end.synchronize()
    return result, start.elapsed_time(end)


def new_model():
    torch.manual_seed(0)
    return make_model().cuda()


def gained(without, with_it, copy, step):
    """What to think of the times."""
    if with_it < 0.95 * without:
        return f"{1 - with_it / without:.0%} of the time saved"
    if copy < 0.05 * step:
        return "little is gained: a copy is short beside a step"
    return "little is gained: the GPU waits for Python or the loader, see lesson 08"


if __name__ == "__main__":
    torch.manual_seed(0)
    batches = make_batches()
    first = list(islice(batches, 3))
    if iter(batches) is batches or len(first) < 2:
        raise SystemExit("make_batches: return a list or a DataLoader, of 2 batches")
    prefetcher = Prefetcher(first)
    for loader in (first, prefetcher):  # first uses of a GPU and a stream are slow
        train(loader, new_model())
    on_gpu, copy = timed(to_gpu, first[:1])
    _, step = timed(train, on_gpu, new_model())
    print(f"a copy takes {copy:.2f} ms, a step {step:.2f} ms")
    times, found = [], []
    for name in ("without", "with"):
        model = new_model()  # sets the seed, too: both have the same order
        source = prefetcher.loader = islice(batches, BATCHES + 1)
        next(source)  # starts the workers; this batch is not trained on
        loader = prefetcher if name == "with" else source
        losses, milliseconds = timed(train, loader, model)
        times.append(milliseconds)
        found.append(losses)
        print(f"{name} prefetching: {milliseconds:.2f} ms, losses:")
        print(" ".join(f"{loss:.4f}" for loss in losses.tolist()))
    if not torch.allclose(*found, rtol=0.05, atol=0.01, equal_nan=True):
        print("THE LOSSES DIFFER: a race (lesson 06), or random data or weights")
    print(gained(*times, copy, step))
