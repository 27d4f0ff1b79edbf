"""Train a small classifier on the device that the command line names.

    python train_anywhere.py --device cuda:1

The device is `cpu`, `cuda` or `cuda:N`, or the name of another accelerator of this
machine, such as `mps`. Without the option, it is an accelerator if there is one, and
else the CPU. The weights go to model.pt. Used in lesson 01.
"""

import argparse
from collections.abc import Mapping

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def usable_device(name: str) -> torch.device:
    """The device of that name; an error that says what there is, if it is missing."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = accelerator.type if accelerator else "cuda"
    found = torch.accelerator.device_count() if accelerator else 0
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", kind):
        raise argparse.ArgumentTypeError(f"{name!r} is not cpu, {kind} or {kind}:N")
    if device.type == kind and (device.index or 0) >= found:
        there = ", ".join(["cpu", *(f"{kind}:{index}" for index in range(found))])
        raise argparse.ArgumentTypeError(
            f"there is no {device}: this process sees {there}. "
            "CUDA_VISIBLE_DEVICES may hide GPUs, and counts the others from 0"
        )
    return device


def moved(batch, device: torch.device):
    """The batch on the device; of a dictionary or a list, each tensor in it."""
    if isinstance(batch, Mapping):
        return {name: moved(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*[moved(value, device) for value in batch])
    if isinstance(batch, (list, tuple)):
        return [moved(value, device) for value in batch]
    return batch.to(device) if isinstance(batch, torch.Tensor) else batch


def main() -> None:
    parser = argparse.ArgumentParser()
    best = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    parser.add_argument("--device", type=usable_device, default=str(best))
    device = parser.parse_args().device
    if device.type != "cpu" and device.index is not None:  # for .cuda() and the like
        torch.accelerator.set_device_index(device.index)
    names = {"cpu": "the CPU"}
    if device.type == "cuda":
        names["cuda"] = torch.cuda.get_device_name(device)
    print(f"training on {device}, {names.get(device.type, 'an accelerator')}")

    torch.manual_seed(0)

    # -- your data ------------------------------------------------------------
    images = torch.randn(2048, 64)
    labels = images[:, :10].argmax(1)
    batches = DataLoader(TensorDataset(images, labels), batch_size=128)

    # -- your model and its loss ----------------------------------------------
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    model.to(device)  # before the optimizer is made
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def loss_of(batch) -> torch.Tensor:  # of a dictionary: model(**batch).loss
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)

    # ---------------------------------------------------------------------------

    for epoch in range(3):
        losses = []  # on the device: to read one of them makes Python wait
        for batch in batches:
            loss = loss_of(moved(batch, device))
            if not isinstance(loss, torch.Tensor):
                kind = type(loss).__name__
                raise SystemExit(
                    f"loss_of returned a {kind}; return a tensor, such as out.loss"
                )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean().item()
        print(f"epoch {epoch}: mean loss {mean:.4f}")

    torch.save(model.cpu().state_dict(), "model.pt")  # any machine can load it


if __name__ == "__main__":  # not in the workers of a DataLoader
    main()
