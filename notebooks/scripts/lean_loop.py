"""Train a classifier in a loop without hidden copies.

    python lean_loop.py
    python lean_loop.py --find-waits  # prints the lines of a step that wait, and ends

Each batch travels from pinned memory, and Python does not wait for it. The constants of
the model are buffers. The losses stay on the GPU, and READ_EVERY of them are read in
one copy. Used in lesson 02.
"""

import argparse
import linecache
import math
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, READ_EVERY = 3, 128, 8


class Normalize(nn.Module):
    """(x - mean) / std, with constants that move with the model."""

    def __init__(self, mean: torch.Tensor, std: torch.Tensor):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.mean) / self.std


def send(batch, device: torch.device):
    """The batch on the GPU: a tensor, or a dictionary, list or tuple of batches.

    Texts, numbers and None in it stay as they are.

    Raises:
        TypeError: for anything else, such as an array of NumPy.
    """
    if isinstance(batch, torch.Tensor):
        if device.type == "cuda" and not (batch.is_cuda or batch.is_pinned()):
            why = "a batch is not pinned; write DataLoader(..., pin_memory=True)"
            warnings.warn(why, stacklevel=2)
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: send(part, device) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*[send(part, device) for part in batch])
    if isinstance(batch, list | tuple):
        return [send(part, device) for part in batch]
    if batch is None or isinstance(batch, str | int | float):
        return batch
    kind = type(batch).__name__
    raise TypeError(f"a batch holds a {kind}; let collate_fn return tensors only")


def read(losses: list[torch.Tensor], step: int) -> None:
    """Print the last loss and the mean, and stop if one is not a number."""
    values = torch.stack(losses).tolist()  # the only copy to the CPU
    mean = sum(values) / len(values)
    print(f"step {step}: loss {values[-1]:.4f}, mean of {len(values)}: {mean:.4f}")
    for number, value in enumerate(values, step - len(values) + 1):
        if not math.isfinite(value):
            raise SystemExit(f"step {number}: the loss is {value}")


def find_waits(train_on: Callable, batch) -> None:
    """Print each line of a step in which Python waits for the GPU."""
    train_on(batch)  # a first step sets things up, and may wait for that
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train_on(batch)
    torch.cuda.set_sync_debug_mode("default")
    waits = [wait for wait in found if "synchronizing CUDA" in str(wait.message)]
    for wait in waits:
        line = linecache.getline(wait.filename, wait.lineno).strip()
        print(f"{wait.filename}:{wait.lineno}: {line}")
    print(f"waits in one step: {len(waits)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--find-waits", action="store_true", help="print the lines that wait, and end"
    )
    arguments = parser.parse_args()
    device = torch.device("cuda")
    torch.manual_seed(0)

    # -- your data ------------------------------------------------------------
    images = 128 + 40 * torch.randn(2048, 64)
    data = TensorDataset(images, images[:, :10].argmax(1))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, pin_memory=True)

    # -- your model and its loss ----------------------------------------------
    model = nn.Sequential(
        Normalize(images.mean(0), images.std(0)),
        nn.Linear(64, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def loss_of(batch) -> torch.Tensor:  # of a dictionary: model(**batch).loss
        x, y = batch
        return cross_entropy(model(x), y)

    # ---------------------------------------------------------------------------

    def train_on(batch) -> torch.Tensor:
        loss = loss_of(send(batch, device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if arguments.find_waits:
        find_waits(train_on, next(iter(loader)))
        return
    step, losses = 0, []
    for _ in range(EPOCHS):
        for batch in loader:
            step += 1
            losses.append(train_on(batch))
            if len(losses) == READ_EVERY:
                read(losses, step)
                losses.clear()
    if losses:
        read(losses, step)


if __name__ == "__main__":
    main()
