"""What the programs of this folder learn: digits, a small network, and one epoch."""

import torch
from torch import nn

SAMPLES, FEATURES, CLASSES, LEARNING_RATE = 64, 16, 4, 0.1


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Samples (64, 16) and their classes (64,), on the host; always the same."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(SAMPLES, FEATURES, generator=generator)
    return samples, samples[:, :CLASSES].argmax(dim=1)


def network() -> nn.Module:
    """A network with the same weights on every rank and in every program."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES)
    )  # fmt: skip


def trained_alone(batch: int) -> nn.Module:
    """The network after one epoch in this process alone, on the host.

    Args:
        batch: samples in a step, those of all ranks together, in the order in which
            `DistributedSampler(shuffle=False)` gives them out.
    """
    samples, classes = data()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for start in range(0, SAMPLES, batch):
        here = slice(start, start + batch)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(samples[here]), classes[here]).backward()
        optimizer.step()
    return model


def compare(weights: dict[str, torch.Tensor], batch: int, tolerance=1e-5) -> None:
    """Print "ok" if these weights are those of one process; end with 1 if not."""
    alone = trained_alone(batch).state_dict()
    assert weights.keys() == alone.keys(), (weights.keys(), alone.keys())
    for name, weight in alone.items():
        found = weights[name].detach().cpu().float()
        torch.testing.assert_close(found, weight, rtol=tolerance, atol=tolerance)
    print("ok", flush=True)
