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
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from simgpu._device import measured
from simgpu._device.sizes import GIB, KIB, MIB


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
    domain: int = 8  # cards that NVLink connects, at most


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

# Cards of the same chips in other sizes, and those of desks and clouds. Datasheets and
# whitepapers of NVIDIA: A100 (2021), V100 (2020), GA102 (2021: RTX 3090), Ada (2023:
# RTX 4090), A10G at AWS (2022), L4 (2023), H100 PCIe (2022); of H20, for which NVIDIA
# has no public one, what sellers of HGX H20 print. Tensor cores of a GeForce and of
# A10G add up in float32, as cuBLAS lets them, at half the rate. Float64 of those
# without a figure: a 64th of float32, as the whitepapers say of GA10x and AD10x.
# `total_memory`, in MiB or bytes, clocks, buses, caches: what public reports print, as
# `get_device_properties` of PyTorch (A10G 22587 MB, H100 PCIe 81008 MB, H20 97285 MB),
# Ultralytics' line of it (L4 22563 MiB, with PyTorch 2.11), or `deviceQuery`
# (A100-40GB 42298834944 bytes, bottlerocket's pull request 3873; V100-16GB 16945512448;
# RTX 4090 25250627584 under CUDA 13; RTX 3090 25414860800). Drivers differ by 150 MiB.
# Shares of the peak: the largest of products of up to 10240 in the tables of
# zzc0721/torch-performance-test-data (RTX 4090 and RTX 3090 exceed their datasheets,
# whose clock is below theirs). Assumed: NVLink bridges of RTX 3090 and H100 PCIe, which
# are sold apart, are not there; GeForce cards reach each other as L40S do, and so do
# H20's in its machine as H100's; clocks of A10G and H20's memory, from their bandwidth.
# Blackwell: datasheets of HGX B300, GB200 NVL72 and GB300 NVL72 (2025), whose figures
# are of 8 and 72 cards, with sparsity. What nvidia-smi and out-of-memory messages of
# 2026 print: B300 275040 MiB, 267.69 GiB; GB200 189471 MiB, 184.31 GiB; GB300 284208
# MiB, 276.50 GiB. That is 15/16 of B300's memory, as of B200's, whose bus is so much
# narrower, and all of the others': so is their bus, at B200's clock. GB200 and GB300
# have 152 multiprocessors (flashinfer); B300's, clocks and shares of the peak as B200:
# assumed. A Grace is connected by NVLink-C2C.
_A100, _V100, _H100, _L40S, _B200 = (
    CARDS[name] for name in ("A100", "V100", "H100", "L40S", "B200")
)
_GB200 = replace(
    _B200,
    name="NVIDIA GB200",
    total_memory=int(184.31 * GIB),
    multi_processors=152,
    flops=_rates(80e12, 2500e12, 40e12, 1250e12, 2500e12, 5000e12),
    memory_bandwidth=8184e9,
    pcie_bandwidth=450e9,
    memory_bus=8192,
    domain=72,
)
_GA102 = replace(  # without rates: of RTX 3090 and A10G
    _L40S,
    capability=(8, 6),
    l2_cache=6 * MIB,
    clock=1_695_000,
    memory_clock=9_751_000,
)
MORE_CARDS = {
    "A100-40GB": replace(
        _A100,
        name="NVIDIA A100-SXM4-40GB",
        total_memory=42_298_834_944,
        memory_bandwidth=1555e9,
        memory_clock=1_215_000,
    ),
    "V100-32GB": _V100,
    "V100-16GB": replace(
        _V100, name="Tesla V100-SXM2-16GB", total_memory=16_945_512_448
    ),
    "RTX4090": replace(
        _L40S,
        name="NVIDIA GeForce RTX 4090",
        total_memory=25_250_627_584,
        multi_processors=128,
        flops=_rates(82.6e12, 165.2e12, 1.29e12, 82.6e12, 165.2e12, 330.3e12),
        reached=_reached(0.66, 1.0, 0.84),  # attention in proportion to L40S's
        memory_bandwidth=1008e9,
        l2_cache=72 * MIB,
        clock=2_520_000,
        memory_clock=10_501_000,
    ),
    "RTX3090": replace(
        _GA102,
        name="NVIDIA GeForce RTX 3090",
        total_memory=25_414_860_800,
        multi_processors=82,
        flops=_rates(35.6e12, 71e12, 0.56e12, 35.6e12, 71e12),
        reached=_reached(0.69, 1.06, 0.89),  # attention in proportion to L40S's
        memory_bandwidth=936e9,
    ),
    "A10G": replace(
        _GA102,
        name="NVIDIA A10G",
        total_memory=22_587 * MIB,
        multi_processors=80,
        flops=_rates(35e12, 70e12, 0.55e12, 35e12, 70e12),
        reached=_reached(0.63, 0.8, 0.67),  # as A40 in the same tables; as L40S's
        memory_bandwidth=600e9,
        clock=1_710_000,
        memory_clock=6_251_000,
    ),
    "L4": replace(
        _L40S,  # also the shares that are reached: as L40S
        name="NVIDIA L4",
        total_memory=22_563 * MIB,
        multi_processors=58,
        flops=_rates(30.3e12, 121e12, 0.47e12, 60e12, 121e12, 242.5e12),
        memory_bandwidth=300e9,
        l2_cache=48 * MIB,
        clock=2_040_000,
        memory_clock=6_251_000,
        memory_bus=192,
    ),
    "H100-PCIE": replace(
        _H100,
        name="NVIDIA H100 PCIe",
        total_memory=81_008 * MIB,
        multi_processors=114,
        flops=_rates(51e12, 756.5e12, 51e12, 378e12, 756.5e12, 1513e12),
        reached=_reached(0.72, 0.655, 0.28, 0.49),  # attention in proportion to H100's
        memory_bandwidth=2039e9,
        nvlink_bandwidth=0,
        clock=1_755_000,
        memory_clock=1_593_000,
    ),
    "H20": replace(
        _H100,
        name="NVIDIA H20",
        total_memory=97_285 * MIB,
        multi_processors=78,
        flops=_rates(44e12, 148e12, 1e12, 74e12, 148e12, 296e12),
        reached=_reached(0.73, 0.96, 0.41, 0.72),  # attention in proportion to H100's
        memory_bandwidth=4000e9,
        l2_cache=60 * MIB,
        memory_clock=2_604_000,
        memory_bus=6144,
    ),
    "B300": replace(
        _B200,
        name="NVIDIA B300 SXM6 AC",
        total_memory=int(267.69 * GIB),
        capability=(10, 3),
        flops=_rates(75e12, 2250e12, 1.25e12, 1125e12, 2250e12, 4500e12),
    ),
    "GB200": _GB200,
    "GB300": replace(
        _GB200,
        name="NVIDIA GB300",
        total_memory=int(276.50 * GIB),
        capability=(10, 3),
        flops=_rates(83e12, 2500e12, 1.39e12, 1250e12, 2500e12, 5000e12),
    ),
}
"""The same: found by name like those of `CARDS`."""


def find_card(name: str | os.PathLike[str] | Card) -> Card:
    """The card of that name, in any case; a `Card` of your own is taken as it is.

    Args:
        name: of the tables, or of a file that `simgpu measure` has written: "my.json".

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
    cards = CARDS | MORE_CARDS
    card = cards.get(str(name).upper())
    if card is None:
        raise ValueError(f"unknown card {name!r}; choose one of {', '.join(cards)}")
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
