"""The budget explorer: does a training step fit into the memory of a card?"""

from helpers import draw
from helpers.explore.bars import bars_against_limit
from helpers.explore.explorer import Explorer, choice, slider
from helpers.explore.sharded_state import STATE_SIZES
from simgpu.device.cards import CARDS, GIB, MIB

PRECISIONS = ("float32", "bfloat16 autocast")
_CHECKPOINTING = ("none", "best segments", "keep down", "every block")
_BUDGETS = {"256 MiB": 256 * MIB} | {
    name: card.total_memory for name, card in CARDS.items()
}


def budget() -> Explorer:
    """Bytes of a training step of transformer-like blocks, against a card's memory.

    Taught in 10-fit-a-bigger-model.
    """
    return Explorer(
        budget_picture,
        blocks=slider("blocks", 12, 1, 96),
        width=choice("width", (64, 128, 256, 512, 1024, 2048, 4096, 8192), 128),
        rows=slider("rows of a batch", 1024, 256, 32768),
        precision=choice("precision", PRECISIONS),
        optimizer=choice("optimizer", tuple(STATE_SIZES), "Adam"),
        checkpointing=choice("checkpointing", _CHECKPOINTING),
        card=choice("card", tuple(_BUDGETS)),
    )


def budget_bytes(
    width: int,
    blocks: int,
    rows: int,
    precision: str,
    optimizer: str,
    checkpointing: str,
) -> dict[str, int]:
    """Bytes of each part at the worst moment of a step: by arithmetic.

    A block is lesson 10's: `norm(x + down(gelu(up(x))))`, four times as wide inside.
    Gradients count in full, as from the second micro-batch on. Autocast keeps what
    `norm` reads and returns in float32, and for `backward()` a bfloat16 copy of each
    weight (not where it computes again: the block in turn makes its own). The best
    segments are those that need the least. Leaves out the first and the last layer,
    attention, and one weight's gradient.
    """
    parameters = blocks * (8 * width + 7) * width
    unit = 4 * rows * width  # a block's input in float32
    mixed = precision != "float32"
    each = (unit * 11 // 2 if mixed else 10 * unit) + 8 * rows  # norm: mean, deviation
    down = unit // 2 if mixed else unit
    segments = [k * unit + -(-blocks // k) * each for k in range(1, blocks + 1)]
    kept = {
        "none": blocks * each + unit,
        "best segments": min(segments),
        "keep down": blocks * unit + (blocks - 1) * down + each,
        "every block": blocks * unit + each,
    }[checkpointing]
    return {
        "weights": parameters * (6 if mixed and checkpointing == "none" else 4),
        "gradients": parameters * 4,
        "optimizer state": parameters * 4 * STATE_SIZES[optimizer],
        "activations": kept + 3 * unit,  # with three gradients of activations
    }


def budget_picture(
    width: int,
    blocks: int,
    rows: int,
    precision: str,
    optimizer: str,
    checkpointing: str,
    card: str,
) -> draw.Picture:
    """The step's parts in one bar above the plain step's, and the line of the card."""
    setting = (width, blocks, rows)
    bars = {
        "this": budget_bytes(*setting, precision, optimizer, checkpointing),
        "plain": budget_bytes(*setting, "float32", "Adam", "none"),
    }
    limit, here = _BUDGETS[card], sum(bars["this"].values())
    title = (
        f"{bars['plain']['gradients'] / 4e6:,.1f} million weights: {_bytes(here)}, "
        f"{'fits' if here <= limit else 'does not fit'} into {card}"
        f"{f' ({_bytes(limit)})' if card in CARDS else ''}"
    )
    return bars_against_limit(title, bars, limit, card, _bytes)


def _bytes(nbytes: int) -> str:
    """A number of bytes as a budget names it: "62.3 MiB", "1.5 GiB"."""
    if nbytes >= GIB:
        return f"{nbytes / GIB:,.1f} GiB"
    return f"{nbytes / MIB:.1f} MiB"
