"""Train with copies on a second stream: with a race, or with its cure.

    python catch_race.py --cure none

`--cure none` forgets that the training has to wait for the copy; `wait_stream` and
`wait_event` are two cures. `one_way` is the second race: the training waits for the
copy, but the next copies do not wait back. The script also trains on a single stream,
and compares the losses.

A race shows in the losses if one side is late. `--late copy` delays every copy, for the
first race, and `--late step` every step, for the second one. The places marked `# your
model`, `# your data` and so on are yours; a batch may be a tensor, tuples, lists and
dictionaries of tensors, or what has a method `to`. Lesson 06, "Catch races", explains
what you see.
"""

import argparse
from collections.abc import Mapping
from itertools import islice

import torch
from torch import nn

STEPS = 32  # of your data, no more
LATE = 2 * 10**8  # cycles of the GPU's clock, about 0.1 s: more than your step takes


def make_model():  # your model
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def make_optimizer(model):  # your optimizer
    return torch.optim.SGD(model.parameters(), lr=0.5)


def loss_of(model, batch):  # your loss; for Hugging Face: model(**batch).loss
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def make_batches():  # your data: DataLoader(..., pin_memory=True)
    images = torch.randn(8 * 4096, 64)
    labels = images[:, :10].argmax(1).cuda()
    images = images.pin_memory().split(4096)
    return 4 * list(zip(images, labels.split(4096), strict=True))


def to_gpu(batch):
    """A batch on the GPU: a tensor, or tuples, lists and dictionaries of batches.

    Raises:
        ValueError: for a tensor in pageable memory, where nothing would race.
    """
    if torch.is_tensor(batch):
        if batch.device.type == "cpu" and not batch.is_pinned():
            raise ValueError(
                f"a tensor of shape {tuple(batch.shape)} is in pageable memory: use "
                "DataLoader(..., pin_memory=True) or tensor.pin_memory()"
            )
        return batch.cuda(non_blocking=True)
    if isinstance(batch, Mapping):  # dict, and BatchEncoding of Hugging Face
        return {name: to_gpu(part) for name, part in batch.items()}
    if hasattr(batch, "to"):  # a class of your own
        return batch.to("cuda", non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*[to_gpu(part) for part in batch])
    if isinstance(batch, (tuple, list)):
        return [to_gpu(part) for part in batch]
    return batch


def loaded(batches, copier, cure, late):  # your own copying: yields batches on the GPU
    here = torch.cuda.current_stream()

    def load(batch):
        if batch is None:
            return None
        if cure != "one_way":
            copier.wait_stream(here)  # a step before may still read the memory
        with torch.cuda.stream(copier):
            if late == "copy":
                torch.cuda._sleep(LATE)
            return to_gpu(batch), copier.record_event()

    batches = iter(batches)
    upcoming = load(next(batches, None))
    while upcoming is not None:
        batch, arrived = upcoming
        if cure in ("wait_stream", "one_way"):
            here.wait_stream(copier)
        if cure == "wait_event":
            here.wait_event(arrived)
        upcoming = load(next(batches, None))
        yield batch
    copier.wait_stream(here)  # before the last batch is freed


def train(copier, cure, late):
    """Returns the loss of each step, with every copy on the stream `copier`."""
    torch.manual_seed(0)  # the same weights and batches each time
    model, batches = make_model().cuda(), islice(make_batches(), STEPS)
    optimizer = make_optimizer(model)
    losses = []
    for batch in loaded(batches, copier, cure, late):
        if late == "step":
            torch.cuda._sleep(LATE)
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if not losses:
        raise SystemExit("make_batches() gives no batch")
    return torch.stack(losses).cpu()


def main():
    parser = argparse.ArgumentParser()
    cures = ("none", "wait_stream", "wait_event", "one_way")
    parser.add_argument("--cure", choices=cures, default="none")
    parser.add_argument("--late", choices=("copy", "step"), default="copy")
    args = parser.parse_args()
    one = train(torch.cuda.current_stream(), args.cure, args.late)
    if not one.isfinite().all():
        raise SystemExit("one stream gives nan or inf: lower the learning rate")
    again = train(torch.cuda.current_stream(), args.cure, args.late)
    two = train(torch.cuda.Stream(), args.cure, args.late)
    print(f"two streams, cure {args.cure}, late {args.late}: loss {two[-1]:.4f}")
    print(f"one stream: loss {one[-1]:.4f}")
    print(f"largest difference of a loss: {(two - one).abs().max():.4f}")
    noise = (again - one).abs().max()
    print(f"the same between two runs on one stream: {noise:.4f}")
    print("If your step takes longer than 0.1 s, raise LATE: a race may not show.")


if __name__ == "__main__":
    main()
