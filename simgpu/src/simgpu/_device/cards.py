"""The graphics cards that can be simulated, from their makers' datasheets.

Models: memory size, peak arithmetic rates, memory and link bandwidth, and what
`torch.cuda.get_device_properties` reports. Leaves out: clocks that change with load,
cache sizes in the cost of an operation, and any card not in the table.

Rates of matrix products (float64 through tensor cores where a card has them). T4 and
V100 have no bfloat16 units, and their datasheets no rate for it: they compute in
float32. Sources: NVIDIA's datasheets for T4 (2019), V100 SXM2 (2020), A100 80GB SXM
(2021), H100 SXM (2023), H200 SXM (2024), L40S (2023) and HGX B200 (2025). Rates are
dense (no sparsity). `total_memory` is what PyTorch's out-of-memory messages in public
reports name as the total capacity, to 0.01 GiB; it varies a little with the driver.
B200's memory: a bus of 7680 bits at 3996 MHz (torchao, pull request 4002), which is the
datasheet's 7.7 TB/s.

`ADD-A-CARD.md` beside the README says how a card is added.
"""

import os
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from simgpu._device import measured

KIB, MIB, GIB = 1024, 1024**2, 1024**3


class Host(NamedTuple):
    """What the machine around a card takes, where that was measured."""

    launch: float  # seconds of the host for a launch
    start: float  # seconds until the kernel starts on an idle GPU
    copy: float  # seconds before the first byte of a copy moves
    copy_bandwidth: float  # bytes/s that the host copies in its own memory


@dataclass(frozen=True)
class Card:
    """One model of graphics card. Rates in 1/s, bandwidths in bytes/s."""

    name: str  # what get_device_name() says on a real one
    total_memory: int  # bytes
    capability: tuple[int, int]  # compute capability (major, minor)
    multi_processors: int
    flops: dict[str, float]  # dtype name -> floating-point operations a second
    reached: dict[str, float]  # the share of these that large products reach
    memory_bandwidth: float  # of the card's own memory
    pcie_bandwidth: float  # host to card, one direction
    nvlink_bandwidth: float  # card to card, one direction; 0 where there is none
    l2_cache: int  # bytes
    threads_per_multi_processor: int
    shared_memory: int  # bytes of a multiprocessor
    clock: int  # kHz, at most
    memory_clock: int  # kHz
    memory_bus: int  # bits
    host: Host | None = None  # None: the constants of `_timing/cost.py`


# Shares of the peak that the largest matrix products reach. Fitted to recorded products
# (tests/recordings: gemm_bf16, gemm_fp16, gemm_fp32) unless "as".
# Of fused attention, the largest: FlashAttention 2, which PyTorch has, and version 3.
_FLASH_2_AMPERE = 0.70  # its authors, 2023: "50-73% of the theoretical maximum"
# Its authors, 2024: "35% utilization" on H100; pytorch issue 142132 measured 0.33 with
# 4608 tokens, which is 0.37 without what `kernel_cost` adds for blocks
_FLASH_2_HOPPER = 0.37
# As many FLOPs a clock and multiprocessor as on Hopper, whose instructions it uses:
# assumed. Those of tensor cores grew by 2
_FLASH_2_BLACKWELL = 0.18
_FLASH_3 = 0.65  # on Hopper; fitted to tests/recordings: attention_bf16


def _reached(
    float32: float, half: float, flash_2: float, flash_3: float = 0.0
) -> dict[str, float]:
    """Shares of the peak; those of attention in float32 are in proportion: assumed."""
    return {
        "float64": float32,  # as float32
        "float32": float32,
        "tf32": half,  # as half precision
        "float16": half,
        "bfloat16": half,
        "float8": half,  # as half precision
        "attention": flash_2 / half,  # of what products of the type reach
        "flash 3": flash_3 or flash_2,  # of the peak; as version 2 before Hopper
    }


def _rates(
    float32: float, float16: float, float64: float, tf32: float, bfloat16: float,
    float8: float = 0.0,
) -> dict[str, float]:  # fmt: skip
    rates = {"float8": float8} if float8 else {}
    return rates | {
        "float64": float64,
        "float32": float32,
        "tf32": tf32,
        "float16": float16,
        "bfloat16": bfloat16,
    }


CARDS = {
    "T4": Card(
        name="Tesla T4",
        total_memory=int(14.74 * GIB),
        capability=(7, 5),
        multi_processors=40,
        flops=_rates(8.1e12, 65e12, 0.25e12, 8.1e12, 8.1e12),
        reached=_reached(0.49, 0.49, 0.39),
        memory_bandwidth=320e9,
        pcie_bandwidth=16e9,
        nvlink_bandwidth=0,
        l2_cache=4 * MIB,
        threads_per_multi_processor=1024,
        shared_memory=64 * KIB,
        clock=1_590_000,
        memory_clock=5_001_000,
        memory_bus=256,
    ),
    "V100": Card(
        name="Tesla V100-SXM2-32GB",
        total_memory=int(31.74 * GIB),
        capability=(7, 0),
        multi_processors=80,
        flops=_rates(15.7e12, 125e12, 7.8e12, 15.7e12, 15.7e12),
        reached=_reached(0.9, 0.7, 0.56),
        memory_bandwidth=900e9,
        pcie_bandwidth=16e9,
        nvlink_bandwidth=150e9,
        l2_cache=6 * MIB,
        threads_per_multi_processor=2048,
        shared_memory=96 * KIB,
        clock=1_530_000,
        memory_clock=877_000,
        memory_bus=4096,
    ),
    "A100": Card(
        name="NVIDIA A100-SXM4-80GB",
        total_memory=int(79.25 * GIB),
        capability=(8, 0),
        multi_processors=108,
        flops=_rates(19.5e12, 312e12, 19.5e12, 156e12, 312e12),
        reached=_reached(0.89, 0.765, _FLASH_2_AMPERE),
        memory_bandwidth=2039e9,
        pcie_bandwidth=32e9,
        nvlink_bandwidth=300e9,
        l2_cache=40 * MIB,
        threads_per_multi_processor=2048,
        shared_memory=164 * KIB,
        clock=1_410_000,
        memory_clock=1_593_000,
        memory_bus=5120,
    ),
    "H100": Card(
        name="NVIDIA H100 80GB HBM3",
        total_memory=int(79.19 * GIB),
        capability=(9, 0),
        multi_processors=132,
        flops=_rates(67e12, 989.4e12, 67e12, 494.7e12, 989.4e12, 1978.9e12),
        reached=_reached(0.72, 0.87, _FLASH_2_HOPPER, _FLASH_3),
        memory_bandwidth=3350e9,
        pcie_bandwidth=64e9,
        nvlink_bandwidth=450e9,
        l2_cache=50 * MIB,
        threads_per_multi_processor=2048,
        shared_memory=228 * KIB,
        clock=1_980_000,
        memory_clock=2_619_000,
        memory_bus=5120,
    ),
    "H200": Card(
        name="NVIDIA H200",
        total_memory=int(139.81 * GIB),
        capability=(9, 0),
        multi_processors=132,
        flops=_rates(67e12, 989.4e12, 67e12, 494.7e12, 989.4e12, 1978.9e12),
        reached=_reached(0.72, 0.88, _FLASH_2_HOPPER, _FLASH_3),
        memory_bandwidth=4800e9,
        pcie_bandwidth=64e9,
        nvlink_bandwidth=450e9,
        l2_cache=60 * MIB,
        threads_per_multi_processor=2048,
        shared_memory=228 * KIB,
        clock=1_980_000,
        memory_clock=3_201_000,
        memory_bus=6144,
    ),
    "B200": Card(
        name="NVIDIA B200",
        total_memory=int(178.35 * GIB),
        capability=(10, 0),
        multi_processors=148,
        flops=_rates(75e12, 2250e12, 37e12, 1100e12, 2250e12, 4500e12),
        # products in float32 as on H100; FlashAttention 3 is of Hopper
        reached=_reached(0.72, 0.85, _FLASH_2_BLACKWELL),
        memory_bandwidth=7672e9,
        pcie_bandwidth=64e9,
        nvlink_bandwidth=900e9,
        l2_cache=int(126.5 * MIB),
        threads_per_multi_processor=2048,
        shared_memory=228 * KIB,
        clock=1_965_000,
        memory_clock=3_996_000,
        memory_bus=7680,
    ),
    "L40S": Card(
        name="NVIDIA L40S",
        total_memory=int(44.52 * GIB),
        capability=(8, 9),
        multi_processors=142,
        flops=_rates(91.6e12, 362.05e12, 1.43e12, 183e12, 362.05e12, 733e12),
        reached=_reached(0.72, 0.655, 0.55),  # float32 as on H100
        memory_bandwidth=864e9,
        pcie_bandwidth=32e9,
        nvlink_bandwidth=0,
        l2_cache=96 * MIB,
        threads_per_multi_processor=1536,
        shared_memory=100 * KIB,
        clock=2_520_000,
        memory_clock=9_001_000,
        memory_bus=384,
    ),
}
"""Short name -> the card. A file of `simgpu measure` is one more: see `find_card`."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


def find_card(name: str | os.PathLike[str] | Card) -> Card:
    """The card of that name, in any case; a `Card` of your own is taken as it is.

    Args:
        name: of the table, or of a file that `simgpu measure` has written: "my.json".

    Raises:
        ValueError: for a name that is not in the table; the message lists them. For a
            file that is not there, or has no card.
    """
    if isinstance(name, Card):
        return name
    if measured.names_file(name):
        try:
            return card_from(measured.constants(name, "card"))
        except (TypeError, KeyError) as error:
            raise measured.damaged(name, "card", error) from None
    card = CARDS.get(str(name).upper())
    if card is None:
        raise ValueError(f"unknown card {name!r}; choose one of {', '.join(CARDS)}")
    return card


def card_from(constants: dict[str, Any]) -> Card:
    """The card that JSON has: the fields of `Card`.

    Raises:
        TypeError: for fields that a card does not have, or that are missing.
        KeyError: for missing ones.
    """
    host = constants["host"]
    return Card(**constants | {
        "capability": tuple(constants["capability"]),
        "host": None if host is None else Host(**host),
    })  # fmt: skip


def parse_memory(size: int | str) -> int:
    """Bytes in `size`: a number of bytes, or text such as "512MB" or "1.5 GiB".

    As everywhere in PyTorch, MB and MiB both mean 1024 * 1024 bytes.

    Raises:
        ValueError: for what is not a size, and for less than 1 MiB.
    """
    if not isinstance(size, (int, str)):
        raise ValueError(f'cannot read {size!r} as memory; write "512MB" or "16GB"')
    if isinstance(size, str):
        match = _SIZE.fullmatch(size.strip())
        if not match:
            raise ValueError(f'cannot read {size!r} as memory; write "512MB" or "16GB"')
        unit = 1024 ** " KMGT".index(match[2].upper() or " ")
        size = int(float(match[1]) * unit)
    if size < MIB:
        raise ValueError(f"{size} bytes is too little memory for a GPU (at least 1 MB)")
    return size


def show_bytes(size: int) -> str:
    """`size` as PyTorch's allocator writes it: "512.00 MiB", but "1024.00 MiB"."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size > unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"
