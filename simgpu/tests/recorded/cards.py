"""The cards that recordings name: those of the simulator, variants, and older ones."""

from dataclasses import replace

from simgpu._device.cards import CARDS, MIB, MORE_CARDS, Card, card_from

_A100, _H100, _V100 = CARDS["A100"], CARDS["H100"], CARDS["V100"]


def _datasheet(
    name: str,
    like: Card,
    multi_processors: int,
    float32: float,
    float16: float,
    gbytes: float,
    capability: tuple[int, int],
    cache: int,
) -> Card:
    """A card without NVLink; the shares of its peaks that are reached are assumed."""
    rates = {"float32": float32, "tf32": float32, "float16": float16}
    return replace(
        like, name=name, multi_processors=multi_processors, capability=capability,
        flops=like.flops | rates, memory_bandwidth=gbytes * 1e9, nvlink_bandwidth=0,
        l2_cache=cache,
    )  # fmt: skip


_RTX_PRO_6000 = _datasheet(
    "NVIDIA RTX PRO 6000 Blackwell",
    _A100,
    188,
    120e12,
    504e12,
    1597,
    (12, 0),
    128 * MIB,
)

# NVIDIA's datasheets: V100 and A100 (PCIe), P4, P100 (PCIe, 16 GB), A40,
# RTX PRO 6000 Blackwell (Server Edition)
VARIANTS = {
    "A100-80GB-PCIE": replace(_A100, memory_bandwidth=1935e9, nvlink_bandwidth=0),
    "A100-40GB-PCIE": replace(MORE_CARDS["A100-40GB"], nvlink_bandwidth=0),
    "V100-PCIE": replace(
        _V100,
        nvlink_bandwidth=0,
        flops=_V100.flops | {"float32": 14e12, "float16": 112e12},
    ),
    "P4": _datasheet("Tesla P4", CARDS["T4"], 20, 5.5e12, 5.5e12, 192, (6, 1), 2 * MIB),
    "P100": _datasheet("Tesla P100", _V100, 56, 9.3e12, 18.7e12, 732, (6, 0), 4 * MIB),
    "A40": _datasheet("NVIDIA A40", _A100, 84, 37.4e12, 149.7e12, 696, (8, 6), 6 * MIB),
    "RTX PRO 6000": replace(_RTX_PRO_6000, pcie_bandwidth=64e9),
}


def add_measured(file: dict) -> None:
    """From now on the card of a file of `simgpu measure` is known, as it was fitted.

    A card that is in a table stays as it is there.
    """
    name = file["card_name"].upper()
    if "card" in file and name not in CARDS | MORE_CARDS | VARIANTS:
        VARIANTS[name] = card_from(file["card"])


def card_named(name: str) -> Card:
    """The card that a recording names.

    Raises:
        KeyError: for one that is in no table.
    """
    return (VARIANTS | MORE_CARDS | CARDS)[str(name).upper()]
