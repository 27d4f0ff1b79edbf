"""The plan explorer: does a training run fit, how fast is it, and what is faster?

Used in lesson 27.
"""

from helpers import draw
from helpers.explore.explorer import Explorer, choice, slider
from scripts.plan_run import (
    CARDS,
    GIB,
    MODELS,
    USABLE,
    Plan,
    choices,
    not_known,
    peak_bytes,
    rate,
    step_seconds,
)

SEQUENCES = 1024  # of a step, of 4096 tokens each
_AGAIN = {"all blocks": 1.0, "half of the blocks": 0.5, "no block": 0.0}
_SHOWN = 5  # other plans that are listed


def plan() -> Explorer:
    """A model on some GPUs, split in a way that you choose.

    Taught in 27-choose-a-layout.
    """
    return Explorer(
        plan_picture,
        sequences=slider("sequences at once", 1, 1, 4),
        model=choice("model", tuple(MODELS), "70B"),
        gpus=choice("GPUs (H100)", (8, 64, 512, 1024), 64),
        network=choice("Gbit/s of each GPU", (400, 100, 50, 12, 0)),
        shard=choice("GPUs that share states", ("all", 8, 1)),
        tp=choice("tensor parallel (tp)", (1, 2, 4, 8), 4),
        pp=choice("pipeline stages (pp)", (1, 2, 4, 8, 16), 8),
        cp=choice("context parallel (cp)", (1, 2, 4, 8)),
        twice=choice("computed twice", tuple(_AGAIN), "no block"),
    )


def plan_of(
    gpus: int, network: float, shard, tp: int, pp: int, cp: int, sequences: int,
    twice: str,
) -> Plan:  # fmt: skip
    """The plan that the controls ask for, with `SEQUENCES` in each step.

    Raises:
        ValueError: if the degrees do not divide the GPUs, or the sequences.
    """
    data = gpus // (tp * pp)
    shards = data if shard == "all" else shard
    if not data or gpus % (tp * pp) or data % cp or (shards % cp):
        raise ValueError(f"tp {tp} x pp {pp} x cp {cp} does not divide {gpus} GPUs")
    if shards > data:
        raise ValueError(f"not {shard}, but {data} of {gpus} GPUs have the same part")
    turns, rest = divmod(SEQUENCES * cp, data * sequences)
    if rest or not turns:
        raise ValueError(f"{SEQUENCES} sequences cannot be divided in this way")
    return Plan(
        gpus, shards, tp=tp, pp=pp, cp=cp, sequences=sequences, microbatches=turns,
        again=_AGAIN[twice], network=network,
    )  # fmt: skip


def plan_picture(model: str, **controls) -> draw.Picture:
    """The bytes of a GPU beside its memory, the seconds of a step, and other plans."""
    sizes = MODELS[model]
    others = _others(model, controls["gpus"], controls["network"])
    try:
        wanted = plan_of(**controls)
    except ValueError as error:
        return _draw(f"{model}: {error}", "", {}, {}, 0, others)
    memory, room = peak_bytes(sizes, wanted), CARDS[wanted.card][3]
    total = sum(memory.values())
    fits = total <= USABLE * room
    words = (
        f"{model} on {wanted.gpus} {wanted.card}: {total / GIB:.1f} GiB each, "
        f"{'fits' if fits else 'does not fit'} ({USABLE * room / GIB:.0f} GiB may be "
        "used)"
    )
    if missing := not_known(sizes, wanted):
        pace, seconds = f"seconds of a step: not known: {'; '.join(missing)}", {}
    else:
        seconds = step_seconds(sizes, wanted)
        tokens, mfu = rate(sizes, wanted)
        pace = (
            f"{'' if fits else 'if it did: '}{sum(seconds.values()):.1f} s a step, "
            f"{tokens:,.0f} tokens/s of each GPU, MFU {mfu:.0%} (predicted)"
        )
    return _draw(words, pace, memory, seconds, room, others)


def _others(model: str, gpus: int, network: float) -> list[str]:
    """The fastest plans that fit, one for each set of degrees."""
    if gpus > 8 and not network:
        return ["nothing is known of the time without the network"]
    found: dict[tuple, str] = {}
    for (tokens, _), one in choices(MODELS[model], gpus, SEQUENCES, network=network):
        total = sum(peak_bytes(MODELS[model], one).values()) / GIB
        words = f"shard {one.shard}, tp {one.tp}, pp {one.pp}"
        batch = f"{one.microbatches} x {one.sequences} sequences"
        text = f"{words}, {batch}, {one.again:.0%} twice: "
        text += f"{tokens:,.0f} tokens/s, {total:.0f} GiB"
        text += f", {one.chunks} parts of a stage" * (one.chunks > 1)
        found.setdefault((one.tp, one.pp, one.shard), text)
    return list(found.values())[:_SHOWN] or ["no plan fits"]


def _draw(words, pace, memory, seconds, room, others) -> draw.Picture:
    said = "; ".join(filter(None, (words, pace, f"fastest that fits: {others[0]}")))
    picture = draw.Picture(draw.WIDEST, 232 + 18 * len(others), said)
    picture.text(8, 20, words, 13, weight="bold")
    if memory:
        most = max(room, sum(memory.values()))
        gigabytes = [f"{part} {size / GIB:.1f} GiB" for part, size in memory.items()]
        _bar(picture, 30, memory.values(), gigabytes, draw.COLOURS, most)
        edge = 8 + (draw.WIDEST - 16) * USABLE * room / most
        picture.line(edge, 26, edge, 70)
        picture.text(edge - 4, 76, "the limit", 11, "end")
    picture.text(8, 118, pace, 13, weight="bold")
    if seconds:
        spent = [f"{part} {time:.2f} s" for part, time in seconds.items()]
        fills = [draw.COLOURS[i] for i in (0, 1, 3, 5, 2)]
        whole = sum(seconds.values())
        _bar(picture, 128, seconds.values(), spent, fills, whole)
    title = "The fastest plans that fit (predicted)"
    picture.text(8, 218, title, 13, weight="bold")
    for number, text in enumerate(others):
        picture.text(8, 237 + 18 * number, text, 12)
    return picture


def _bar(picture: draw.Picture, y: int, sizes, words, fills, whole: float) -> None:
    """A bar of one box for each size, and what they are below it."""
    x, scale = 8.0, (draw.WIDEST - 16) / whole
    apart = (draw.WIDEST - 16) / len(words)
    for i, (size, text, fill) in enumerate(zip(sizes, words, fills, strict=False)):
        picture.box(x, y, size * scale, 34, fill)
        x += size * scale
        picture.box(8 + apart * i, y + 50, 14, 14, fill)
        picture.text(28 + apart * i, y + 62, text, 12)
