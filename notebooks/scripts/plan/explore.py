"""The plan explorer: does a training run on many GPUs fit, and how fast is it?"""

from helpers import draw
from helpers.explore.explorer import Explorer, choice, slider
from scripts.plan.kernels import SUSTAINED
from scripts.plan.memory import bytes_per_gpu
from scripts.plan.model import MODELS, parameters
from scripts.plan.run import MACHINE, STRATEGIES
from scripts.plan.step_time import step_seconds
from simgpu.device.cards import find_card

_PLANNED = 4096  # tokens of a sequence
# memory of a machine's host: what NVIDIA's DGX of these cards have (datasheets)
HOST_BYTES = 2 * 10**12
OFFLOADED = 16  # bytes a parameter: weight, gradient and Adam's two numbers, float32
_AGAIN = {"all blocks": True, "every second block": 0.5, "no block": False}


def plan() -> Explorer:
    """A training run on many GPUs: does it fit, and how fast is it?"""
    return Explorer(
        plan_picture,
        machines=slider("machines of 8 GPUs", 8, 1, 128),
        model=choice("model", tuple(MODELS), "8B"),
        strategy=choice("strategy", STRATEGIES, "fsdp"),
        card=choice("card", tuple(SUSTAINED), "H100"),
        batch=slider("sequences on each GPU", 1, 1, 16),
        twice=choice("computed twice", tuple(_AGAIN)),
    )


def plan_picture(
    machines: int, model: str, strategy: str, card: str, batch: int, twice: str
) -> draw.Picture:
    """The bytes of a GPU beside its memory, and the seconds of a step: by arithmetic.

    What is offloaded must fit into the memory of the hosts (`HOST_BYTES`), too.
    Where 8 GPUs share each matrix, they share 8 times as many sequences as well.
    """
    gpus = machines * MACHINE
    together = MACHINE if strategy.endswith("tensor 8") else 1
    run = dict(
        model=model, gpus=gpus, strategy=strategy, batch=batch * together,
        tokens=_PLANNED, checkpointing=_AGAIN[twice],
    )  # fmt: skip
    sizes, step = bytes_per_gpu(**run), step_seconds(card=card, **run)
    memory = find_card(card).total_memory
    fits = sizes.total <= memory
    title = (
        f"{model} on {gpus} {card}, {strategy}: {sizes.total / 1e9:.1f} GB each, "
        f"{'fits' if fits else 'does not fit'} into {memory / 1e9:.0f} GB"
    )
    hosts = ""
    if strategy == "fsdp offload":
        held = OFFLOADED * parameters(model) / machines
        here = held <= HOST_BYTES
        fits = fits and here
        hosts = (
            f"{held / 1e12:.2f} TB in the host of each machine, "
            f"{'fits' if here else 'does not fit'} into {HOST_BYTES / 1e12:.0f} TB"
        )
    pace = (
        f"{'' if fits else 'if it did: '}{step.seconds:.2f} s a step, "
        f"{step.tokens_per_second:,.0f} tokens/s on each GPU, "
        f"{step.mfu:.0%} of its peak (planned)"
    )
    words = "; ".join(filter(None, (title, hosts, pace)))
    picture = draw.Picture(draw.WIDEST, 222, words)
    picture.text(8, 20, title, 14, weight="bold")
    if hosts:
        picture.text(8, 118, hosts, 14, weight="bold")
    most = max(memory, sizes.total)
    gigabytes = {part: f"{part} {size / 1e9:.1f}" for part, size in sizes.items()}
    _cut(picture, 32, sizes.values(), gigabytes.values(), draw.COLOURS, most)
    edge = 8 + (draw.WIDEST - 16) * memory / most
    picture.line(edge, 28, edge, 72)
    side = ("end", -4) if edge > draw.WIDEST / 2 else ("start", 4)
    picture.text(edge + side[1], 82, f"memory of the {card}", 12, side[0])
    picture.text(8, 136, pace, 14, weight="bold")
    spent = {
        "computing": step.compute,
        "update": step.update,
        "waiting for others": step.exposed,
    }
    seconds = [f"{part} {time:.3f} s" for part, time in spent.items()]
    fills = (draw.COLOURS[0], draw.COLOURS[2], draw.COLOURS[5])
    _cut(picture, 148, spent.values(), seconds, fills, step.seconds)
    return picture


def _cut(picture: draw.Picture, y: int, sizes, words, fills, whole: float) -> None:
    """A bar of one box for each size, and what they are below it."""
    x, scale = 8.0, (draw.WIDEST - 16) / whole
    apart = (draw.WIDEST - 16) / len(words)
    for i, (size, text, fill) in enumerate(zip(sizes, words, fills, strict=False)):
        picture.box(x, y, size * scale, 34, fill)
        x += size * scale
        picture.box(8 + apart * i, y + 56, 14, 14, fill)
        picture.text(28 + apart * i, y + 68, text, 12)
