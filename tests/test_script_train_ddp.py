"""`train_ddp.py`: lesson 16's script, run unmodified."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from tests import take_home

pytestmark = pytest.mark.slow

NUMBERS = 64 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10  # parameters


def losses(printed: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss (\d\.\d{4})", printed)]


def sent(printed: str) -> tuple[int, int]:
    messages = re.search(r"in a step: (\d+) messages", printed)
    nbytes = re.search(r"([\d,]+) bytes of gradients", printed)
    return int(messages[1]), int(nbytes[1].replace(",", ""))


def torchrun(folder: Path, ranks: int, options: str = "") -> str:
    words = f"torchrun --standalone --nproc-per-node={ranks} train_ddp.py {options}"
    return take_home.run_command(f"python -m simgpu --gpus 4 {words}", folder)


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The same losses of plain PyTorch on the CPU, with the full batch at once."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for step in range(12):
        images = torch.randn(512, 64, generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(images), images[:, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found[3::4]


def test_four_ranks_with_accumulation_and_bfloat16_learn_what_one_learns(
    alone, tmp_path
):
    """The lesson's own command. bfloat16 keeps 8 bits of each gradient."""
    printed = take_home.run("16", tmp_path)
    assert losses(printed) == pytest.approx(alone, abs=2e-3)
    assert len(losses(printed)) == 3
    messages, nbytes = sent(printed)
    assert (messages, nbytes) == (2, 2 * NUMBERS)
    assert len(re.findall(r"rank \d: peak memory \d+\.\d MiB", printed)) == 4


def test_two_ranks_learn_what_one_learns(alone, tmp_path):
    """Up to rounding, of sums in another order."""
    printed = torchrun(tmp_path, 2, "--accumulate 2")
    assert losses(printed) == pytest.approx(alone, abs=2e-4)
    assert sent(printed) == (2, 4 * NUMBERS)


def test_the_loss_falls(alone):
    assert alone == sorted(alone, reverse=True)
