"""The cards that recordings name: those of the simulator, and variants of them."""

from dataclasses import replace

from simgpu.device.cards import CARDS, GIB, Card

_A100 = replace(CARDS["A100"], nvlink_bandwidth=0)
VARIANTS = {
    # NVIDIA's datasheets for the A100 (2020, 2021) and the V100 (2020)
    "A100-80GB-PCIE": replace(_A100, memory_bandwidth=1935e9),
    "A100-40GB-PCIE": replace(
        _A100, memory_bandwidth=1555e9, total_memory=int(39.39 * GIB)
    ),
    "A100-40GB": replace(
        CARDS["A100"], memory_bandwidth=1555e9, total_memory=int(39.39 * GIB)
    ),
    "V100-32GB": CARDS["V100"],
    "V100-PCIE": replace(
        CARDS["V100"],
        nvlink_bandwidth=0,
        flops=CARDS["V100"].flops | {"float32": 14e12, "float16": 112e12},
    ),
}


def card_named(name: str) -> Card:
    """The card that a recording names.

    Raises:
        KeyError: for one that the simulator does not know.
    """
    return (CARDS | VARIANTS)[str(name).upper()]
