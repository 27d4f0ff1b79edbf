"""Cards as the machines of some recordings had them."""

from dataclasses import replace

from simgpu._device.cards import CARDS, Card, find_card

# SimuMax measured its B200 with the shapes of its runs before it ran them: products
# forward reach 0.39 to 0.65 of the peak, the largest 0.49 to 0.51 (those of
# `gemm_bf16_B200`, another machine, up to 0.85); attention, which is cuDNN's, does 0.84
# of the peak with 64 heads, counted without its mask. Source: MooreThreads/SimuMax @
# 4dcaae513ba7, configs/system/b200_bf16_ceperm.json (Apache-2.0)
_B200 = CARDS["B200"]
_PRODUCTS, _ATTENTION = 0.50, 0.84 / 2
MACHINES: dict[str, Card] = {
    "B200 of SimuMax": replace(
        _B200,
        reached={
            **_B200.reached, "bfloat16": _PRODUCTS,
            "attention": _ATTENTION / _PRODUCTS,
        },
    ),
}  # fmt: skip


def card_of(name: str) -> Card:
    """The card of that name, of a machine here or of the simulator's table.

    Raises:
        ValueError: for a name that is in neither.
    """
    return MACHINES[name] if name in MACHINES else find_card(name)
