"""The instruments of 27-train-it-all: who takes which rows, what a way costs, curves.

    found = report("--parallel ddp")     # in a rank: train, then count one more step
    curves(losses, reference)            # in the notebook

Not a program to launch. `torchrun` launches `train_gpt.py`.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from helpers import Messages, draw, simgpu
from helpers.gpus import count_copies
from scripts import train_gpt as script
from scripts.shard_watch import in_memory


def picture() -> draw.Picture:
    """A row for each way, a box for each of the 16 rows of a step."""
    image = draw.Picture(630, 152, "who takes which of the 16 rows of a step")
    ways = {
        "one process": lambda i: (0, 1),
        "4 GPUs, DataParallel": lambda i: (i // 4, 1),
        "4 ranks": lambda i: (i % 4, 1),
        "4 ranks, 3 parts": lambda i: (i % 4, (1, 1, 2, 3)[i // 4]),
    }
    for y, (way, owner) in enumerate(ways.items()):
        image.text(8, 28 + 36 * y, way)
        for i in range(16):
            device, part = owner(i)
            image.box(170 + 28 * i, 10 + 36 * y, 26, 26, draw.COLOURS[device])
            image.text(183 + 28 * i, 28 + 36 * y, str(part), 13, "middle", "bold")
    return image


# -- one way ---------------------------------------------------------------------------


class Report(NamedTuple):
    """What a training has come to, and what its next step cost on this device."""

    losses: torch.Tensor
    bits: list[float]  # per letter of the test, before and after
    held: int  # bytes of weights, gradients and Adam's state
    sent: int  # bytes to other devices; of ranks, if they form a ring


def train(words: str) -> "script.Training":
    """As the command line says."""
    return script.Training(script.options(words.split())).run()


def losses(words: str) -> list[float]:
    return train(words).losses


def report(words: str) -> Report:
    """Train, then take one step more to count.

    Simulated GPUs count what they hold, but for cuBLAS's workspaces; elsewhere the
    tensors are added up.
    """
    training, sizes = train(words), []

    def note(optimizer, *_):
        weights, states = list(training.model.parameters()), optimizer.state.values()
        state = [v for values in states for v in values.values() if v.dim()]
        sizes.append(in_memory([*weights, *(p.grad for p in weights), *state]))
        if training.args.device == "cuda" and simgpu.count():
            torch._C._cuda_clearCublasWorkspaces()  # larger than all of the model
            sizes[0] = torch.cuda.memory_allocated()

    hook = training.optimizer.register_step_post_hook(note)
    with Messages() if dist.is_initialized() else count_copies() as seen:
        training.take_step()
    hook.remove()  # or it keeps all of this alive
    if dist.is_initialized():
        sent = seen.sent()
    else:
        sent = sum(c.nbytes for c in seen if "cpu" not in (c.source, c.target))
    return Report(torch.tensor(training.losses), training.bits, sizes[0], sent)


# -- all ways --------------------------------------------------------------------------


def costs(guesses: dict[str, tuple[int, int]], reports: dict[str, Report]) -> None:
    """Print bytes held and sent, predicted and counted.

    Raises:
        AssertionError: naming the way in which they differ by more than 2 %; not on
            real GPUs, where not every byte can be counted.
    """
    strict = simgpu.count() or not torch.cuda.is_available()
    print(
        f"{'':24} {'held: predicted, counted':>25}   {'sent: predicted, counted':>25}"
    )
    for way, guess in guesses.items():
        found = reports[way].held, reports[way].sent
        (a, b), (c, d) = zip(guess, found, strict=True)
        print(f"{way:24} {a:13,} {b:11,}   {c:13,} {d:11,}")
        if strict and any(abs(x - y) > 0.02 * x for x, y in ((a, b), (c, d))):
            raise AssertionError(f"{way}: more than 2 % off")


def table(losses: dict[str, torch.Tensor], steps: list[int]) -> None:
    """Print the losses of some steps, a line for each way."""
    print(f"{'step':24}", *(f"{step:5}" for step in steps))
    for way, curve in losses.items():
        print(f"{way:24}", *(f"{curve[step]:5.2f}" for step in steps))


def curves(losses: dict[str, torch.Tensor], reference: torch.Tensor) -> None:
    """Draw all curves on top of each other, and beside them the distances."""
    from matplotlib import pyplot as plt  # not for the ranks: it takes half a second

    _, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    shown = len(draw.COLOURS)
    for i, (way, curve) in enumerate(losses.items()):
        gap = (curve - reference).abs()
        print(f"{way:24} largest distance {gap.max():.0e}")
        look = {"color": draw.COLOURS[i % shown], "linestyle": ("-", "--")[i // shown]}
        left.plot(curve, linewidth=1.5 * (len(losses) - i), label=way, **look)
        right.semilogy(gap.clamp(min=1e-8), linewidth=2, **look)
    left.set(xlabel="step", ylabel="loss (nats per letter)", title="all ways")
    right.set(xlabel="step", ylabel="distance (1e-8: none)", title="off by")
    for line in left.legend(fontsize=7).get_lines():
        line.set_linewidth(3)
    plt.show()
