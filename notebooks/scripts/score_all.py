"""Score many samples on all GPUs of a machine, in one process.

    python score_all.py

Each GPU gets a copy of the model once, and the GPUs take the batches in turns. Works
with any number of GPUs, and on the CPU where there is none. The scores go to scores.pt,
in the order of the batches. Put your own into `your_model`, `your_batches` and
`scores_of`. Used in lesson 00.
"""

import copy
from collections import deque
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
)

BATCH = 1024  # samples that a GPU scores at once
TOLERANCE = 0.02  # of the largest score: what a GPU may differ from the CPU


def your_model() -> nn.Module:
    """Your model."""
    return nn.Sequential(  # your model; then load its weights with load_state_dict
        nn.Linear(64, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
    )


def your_batches() -> Iterable:
    """Your batches, in the host's memory: tensors, lists or dictionaries of tensors."""
    samples = torch.randn(20_000, 64)  # your data
    return samples.split(BATCH)  # or a DataLoader without shuffling


def scores_of(model: nn.Module, batch) -> torch.Tensor:
    """Your scores, a row for each sample: `.logits`, the mean of a text, and so on."""
    if isinstance(batch, Mapping):
        return model(**batch)
    is_pair = isinstance(batch, (list, tuple))  # such as samples and labels
    return model(batch[0] if is_pair else batch)


def moved(batch, device: torch.device):
    """The batch on a device; of a dictionary or a list, each tensor in it."""
    if isinstance(batch, Mapping):
        return {name: moved(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*[moved(value, device) for value in batch])
    if isinstance(batch, (list, tuple)):
        return [moved(value, device) for value in batch]
    return batch.to(device) if isinstance(batch, torch.Tensor) else batch


def replicas_on(devices: list[torch.device], model: nn.Module) -> list[nn.Module]:
    """A copy of the model on each device; ends the program where one is too small."""
    tensors = [*model.parameters(), *model.buffers()]
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    for device in devices:
        if device.type == "cuda" and needed > torch.cuda.mem_get_info(device)[0]:
            raise SystemExit(
                f"the model needs {needed / 2**30:.2f} GiB, more than is free on "
                f"{device}; lessons 13 and 18 split a model"
            )
    return [copy.deepcopy(model).to(device) for device in devices]


def changes_order(loader: DataLoader) -> bool:
    """Whether samples may come in another order than that of the data."""
    if isinstance(loader.dataset, IterableDataset):
        return False  # has an order of its own
    batches = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return True  # such as batches of texts of one length
    sampler = loader.sampler if batches is None else batches.sampler
    return not isinstance(sampler, SequentialSampler)


@torch.inference_mode()
def score_all(
    model: nn.Module, batches: Iterable, devices: list[torch.device]
) -> tuple[torch.Tensor, dict[str, int], object]:
    """The scores of all batches in order, how many each device has, the first batch."""
    if isinstance(batches, DataLoader) and changes_order(batches):
        raise SystemExit(
            "the DataLoader changes the order; use shuffle=False, and no batch sampler "
            "of your own"
        )
    replicas = replicas_on(devices, model)
    scores, on_gpus, first, shape = [], deque(), None, None
    taken = dict.fromkeys(map(str, devices), 0)
    for number, batch in enumerate(batches):
        first = batch if first is None else first
        turn = number % len(devices)
        if len(on_gpus) == len(devices):  # the oldest scores are on this GPU
            # before it has new work, because .cpu() waits for all that it has
            scores.append(on_gpus.popleft().cpu())
        if devices[turn].type == "cuda":
            torch.cuda.set_device(turn)  # what `cuda` means without an index
        found = scores_of(replicas[turn], moved(batch, devices[turn]))
        if not isinstance(found, torch.Tensor) or found.dim() == 0:
            what = "number" if torch.is_tensor(found) else type(found).__name__
            must = "must return a tensor with a row for each sample, such as .logits"
            raise SystemExit(f"scores_of returned a {what}; it {must}")
        shape = found.shape[1:] if shape is None else shape
        if found.shape[1:] != shape:
            both = f"{tuple(shape)}, but {tuple(found.shape[1:])} in batch {number}"
            raise SystemExit(f"a row of scores is {both}: pad all to one length")
        taken[str(devices[turn])] += len(found)
        on_gpus.append(found)
    if first is None:
        raise SystemExit("your_batches gives no batch")
    return torch.cat([*scores, *(part.cpu() for part in on_gpus)]), taken, first


def main() -> None:
    torch.manual_seed(0)
    # on the CPU, without dropout, and BatchNorm as trained
    model = your_model().cpu().eval()
    batches = your_batches()
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    devices = devices or [torch.device("cpu")]
    scores, taken, first = score_all(model, batches, devices)
    torch.save(scores, "scores.pt")
    for device in devices:
        is_gpu = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if is_gpu else "no GPU found"
        count = taken[str(device)]
        print(f"{str(device):7} {name}: {count:,} samples, {count / len(scores):.0%}")
    with torch.inference_mode():
        on_cpu = scores_of(model, first).float()
    found = scores[: len(on_cpu)].float()
    difference = (found - on_cpu).abs().nan_to_num(0).max().item()  # inf - inf is nan
    print(f"largest difference from the CPU in the first batch: {difference:.0e}")
    allowed = TOLERANCE * on_cpu.nan_to_num(0, 0, 0).abs().max().item()
    if not torch.allclose(found, on_cpu, rtol=0, atol=allowed):
        why = "is one nan, is the model random, or does it change its batch? Labels"
        raise SystemExit(f"the scores differ: {why} flip where two scores are near")
    print(f"{len(scores):,} samples scored, saved in scores.pt")


if __name__ == "__main__":
    main()
