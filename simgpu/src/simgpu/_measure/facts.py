"""What a machine says of itself: the card, versions, memory. Never the date."""

import re
import subprocess
from typing import Any

import torch

from simgpu._device.cards import CARDS, MORE_CARDS

SIMULATED = " (simulated)"  # ends the name of a simulated card
# of `torch.cuda.get_device_properties`, in older versions of PyTorch not all: a
# field of `Card` -> its name there
_PROPERTIES = {
    "total_memory": "total_memory",
    "multi_processors": "multi_processor_count",
    "l2_cache": "L2_cache_size",
    "threads_per_multi_processor": "max_threads_per_multi_processor",
    "shared_memory": "shared_memory_per_multiprocessor",
    "clock": "clock_rate",
    "memory_clock": "memory_clock_rate",
    "memory_bus": "memory_bus_width",
}


def name() -> str:
    """The card's own name."""
    return torch.cuda.get_device_name().removesuffix(SIMULATED)


def known_card() -> str:
    """The card as `simgpu.start` knows it, or else a name made of its own."""
    cards = CARDS | MORE_CARDS
    known = [key for key, card in cards.items() if card.name == name()]
    return known[0] if known else re.sub(r"\W+", "-", name())


def about() -> dict[str, Any]:
    """The card and the software, as a recording states them."""
    simulated = torch.cuda.get_device_name().endswith(SIMULATED)
    return {
        "hardware": name() + (SIMULATED if simulated else ""),
        "simulated": simulated,
        "torch": torch.__version__,
        "cuda": "simulated" if simulated else torch.version.cuda,
        "driver": "simulated" if simulated else _driver(),
    }


def _driver() -> str:
    """The version of the driver, if it can be asked."""
    command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return out.stdout.split("\n")[0].strip() or "unknown"


def properties() -> dict[str, Any]:
    """What the driver says of the card, under the names of `Card`."""
    asked = torch.cuda.get_device_properties(torch.cuda.current_device())
    found = {ours: getattr(asked, its, None) for ours, its in _PROPERTIES.items()}
    found = {key: value for key, value in found.items() if value}
    return {"name": name(), "capability": [asked.major, asked.minor], **found}


def taken() -> int:
    """Bytes of the card that are taken, but not by PyTorch's allocator.

    CUDA's context and the libraries' buffers; and other processes, if there are any.
    """
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def memory() -> dict[str, int]:
    """Bytes that are gone before a program has a tensor; call it first of all."""
    torch.empty(1, device="cuda")
    torch.cuda.synchronize()
    context = taken()
    x = torch.ones(64, 64, device="cuda")
    before = torch.cuda.memory_allocated()
    product = x @ x
    workspace = torch.cuda.memory_allocated() - before
    workspace -= -(-product.nbytes // 512) * 512  # blocks are multiples of this
    return {
        "total": torch.cuda.mem_get_info()[1],
        "context": context,
        "cublas_workspace": workspace,
    }
