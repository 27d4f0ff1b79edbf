"""The shards explorer: bytes on each GPU under DDP and the stages of ZeRO."""

from helpers import draw
from helpers.explore.bars import bars_against_limit
from helpers.explore.explorer import Explorer, choice, slider

# numbers that an optimizer keeps for each parameter
STATE_SIZES = {"SGD": 0, "SGD with momentum": 1, "Adam": 2}
CARD_BYTES = 80 * 10**9
_STAGES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def shards() -> Explorer:
    """Bytes of weights, gradients and optimizer state on each GPU.

    Taught in 18-shard-everything.
    """
    return Explorer(
        shards_picture,
        billions=slider("billion parameters", 7, 1, 70),
        ranks=slider("ranks", 8, 1, 64),
        stage=choice("what is sharded", _STAGES),
        precision=choice("precision", ("float32", "bfloat16 mixed")),
        optimizer=choice("optimizer", tuple(STATE_SIZES), "Adam"),
    )


def shards_bytes(
    parameters: int, ranks: int, stage: str, precision: str, optimizer: str
) -> dict[str, int]:
    """Bytes that each rank holds between two steps: by arithmetic.

    "bfloat16 mixed" has weights and gradients in bfloat16, and a float32 copy of the
    weights that counts as optimizer state (Rajbhandari and others, ZeRO, 2019).
    Leaves out activations, buffers, and the weights that are gathered for a while.
    """
    mixed = precision != "float32"
    each = 2 if mixed else 4
    sizes = {
        "weights": each * parameters,
        "gradients": each * parameters,
        "optimizer state": 4 * parameters * (STATE_SIZES[optimizer] + mixed),
    }
    sharded = _STAGES.index(stage)
    for level, part in ((3, "weights"), (2, "gradients"), (1, "optimizer state")):
        if sharded >= level:
            sizes[part] = -(-sizes[part] // ranks)  # the last rank may hold less
    return sizes


def shards_picture(
    billions: int, ranks: int, stage: str, precision: str, optimizer: str
) -> draw.Picture:
    """One GPU's bytes beside those of DDP, and the line of an 80 GB card."""
    setting = (billions * 10**9, ranks)
    bars = {
        kind: shards_bytes(*setting, kind, precision, optimizer)
        for kind in dict.fromkeys(("DDP", stage))
    }
    here = sum(bars[stage].values())
    title = (
        f"{billions} billion parameters on {ranks} GPUs, {stage}: {here / 1e9:.1f} GB "
        f"each, {'fits' if here <= CARD_BYTES else 'does not fit'} into 80 GB"
    )
    return bars_against_limit(
        title, bars, CARD_BYTES, "80 GB", lambda n: f"{n / 1e9:.1f} GB"
    )
