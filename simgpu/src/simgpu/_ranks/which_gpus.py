"""Which GPUs the ranks have: the machine's own, simulated ones, or none.

It decides without importing PyTorch, which the notebook's process may never need.
"""

import os
import sys
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

from simgpu._device import measured
from simgpu._device.cards import find_card
from simgpu._device.sizes import parse_memory, show_bytes
from simgpu._switch import wanted
from simgpu._timing.topology import Topology

DEVICES = ("cuda", "cpu")
_FILES = Path("/dev")  # where Linux has a file for each GPU


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a job: one for each rank, and each rank sees those of its node.

    Attributes:
        simulated: or the machine's own.
        card: what is simulated: "A100", or a file of `simgpu measure`.
        memory: of each, in bytes or as text; None is all it has.
        nodes: on which the ranks lie, equally many on each.
        network: between nodes, as `simgpu._timing.topology.Topology` takes it.
    """

    simulated: bool
    card: str = "A100"
    memory: int | str | None = None
    nodes: int = 1
    network: float | str | None = None

    def __str__(self) -> str:
        if not self.simulated:
            cap = "" if self.memory is None else f", capped at {self.memory} each"
            return f"real GPUs{cap}"
        found = find_card(self.card)
        size = found.total_memory if self.memory is None else parse_memory(self.memory)
        name = found.name if measured.names_file(self.card) else self.card.upper()
        each = f"simulated GPUs ({name}, {show_bytes(size)} each)"
        return each if self.nodes == 1 else f"{each} on {self.nodes} nodes"


def choose(
    size: int, device: str, card: str, memory: int | str | None, nodes: int,
    network: float | str | None,
) -> Gpus | None:  # fmt: skip
    """The GPUs for so many ranks; None for ranks on the CPU.

    They are simulated, unless SIMGPU=off asks for the machine's own.

    Raises:
        ValueError: for a device, card, memory, number of nodes or network that cannot
            be.
        RuntimeError: if SIMGPU=off and the machine has fewer, or one node.
    """
    if device not in DEVICES:
        raise ValueError(f"device={device!r}; use cuda or cpu")
    found = find_card(card)
    simulated = wanted() == "simulated"
    too_much = memory is not None and parse_memory(memory) > found.total_memory
    if too_much and simulated:
        raise ValueError(f"a {card} does not have {memory} of memory")
    if isinstance(nodes, bool) or not isinstance(nodes, Integral) or nodes < 1:
        raise ValueError(f"the number of nodes is a whole number, not {nodes!r}")
    if size % nodes:
        raise ValueError(f"{size} ranks cannot be shared equally by {nodes} nodes")
    Topology(found, size // nodes, nodes, network)
    card, network = measured.absolute(card), measured.absolute(network)
    if device == "cpu":
        return None
    if simulated:
        return Gpus(True, card, memory, nodes, network)
    real = _real_gpus()
    if nodes > 1 or real < size:
        what = f"{real} of {size} GPUs" if nodes == 1 else "not so many nodes"
        raise RuntimeError(
            f"SIMGPU=off, but this machine has {what}; unset SIMGPU, "
            'or take ranks on the CPU: device="cpu"'
        )
    return Gpus(False, memory=memory)


def cap_memory(index: int, memory: int | str | None) -> None:
    """Let this process use no more of a real GPU's memory; None is all it has.

    Raises:
        ValueError: if the GPU has less.
    """
    import torch

    total = torch.cuda.get_device_properties(index).total_memory
    share = 1.0 if memory is None else parse_memory(memory) / total
    if share > 1:
        raise ValueError(f"cuda:{index} does not have {memory} of memory")
    torch.cuda.set_per_process_memory_fraction(share, index)


def _real_gpus() -> int:
    """How many the machine has, found without PyTorch where it has none."""
    if sys.platform == "linux":
        files = _FILES.glob("nvidia[0-9]*")
        if not any(files) and not (_FILES / "dxg").exists():  # Linux in Windows
            return 0
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return 0
    import simgpu

    return simgpu.real_gpus()
