"""The instruments of 18-shard-everything: what a rank holds, sends, and has whole.

    report = three_steps(model, optimizer, data)   # in a rank
    picture(ranks, shard, data, "each block")      # in the notebook

Not a program to launch. `torchrun` launches `shard_digits.py`.
"""

import subprocess
import sys
import weakref
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import helpers
from helpers import Messages, draw
from scripts import shard_digits as script


class Report(NamedTuple):
    """What a rank held just before the last optimizer step, and sent in that step."""

    weights: int  # bytes
    gradients: int
    state: int  # of the optimizer
    log: list  # of helpers.messages.Message, of the last step

    @property
    def held(self) -> int:
        return self.weights + self.gradients + self.state

    @property
    def sent(self) -> int:
        return sum(message.sent for message in self.log)

    def given(self, name: str) -> int:
        """Bytes handed to one kind of collective."""
        return sum(message.nbytes for message in self.log if message.name == name)

    def __str__(self) -> str:
        lines = [
            f"a rank holds {self.held:,} bytes: {self.weights:,} weights, "
            f"{self.gradients:,} gradients, {self.state:,} optimizer"
        ]
        for name in dict.fromkeys(message.name for message in self.log):
            calls = sum(message.name == name for message in self.log)
            lines.append(f"a step: {calls} x {name}, {self.given(name):,} bytes")
        return "\n".join(
            [*lines, f"sent, if the ranks form a ring: {self.sent:,} bytes"]
        )


def in_memory(tensors) -> int:
    """Bytes on this rank; views of one memory count once."""
    here = [getattr(t, "_local_tensor", t).detach() for t in tensors]  # of a DTensor
    return sum({s.data_ptr(): s.nbytes() for s in map(_storage, here)}.values())


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def three_steps(model, optimizer, data, by_hand=()) -> Report:
    """Train, and report on the last step.

    Args:
        model: of this rank.
        optimizer: of the model.
        data: the digits.
        by_hand: the lesson's own layers: those that have not reduced their gradients
            when the step comes do it then; those that are whole gather afterwards.
    """
    for step in range(3):
        with Messages() as messages:
            messages.when = "forward"
            loss = script.loss_of(model, data, script.rows_of(step))
            messages.when = "backward"
            loss.backward()
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            weights = [*model.parameters(), *trained]
            gradients = [p.grad for p in weights if p.grad is not None]
            state = [v for values in optimizer.state.values() for v in values.values()]
            held = weights, gradients, [v for v in state if v.dim()]
            sizes = [in_memory(tensors) for tensors in held]
            messages.when = "step"
            for layer in by_hand:
                if layer.mine.grad is None:
                    layer.reduce()
            optimizer.step()
            optimizer.zero_grad()
            for layer in by_hand:
                if _storage(layer.flat).nbytes():
                    layer.gather()
    return Report(*sizes, messages.log)


def most_gradients(Zero, data) -> int:
    """Bytes of whole gradients in memory at a time, at most, in one `backward()`."""
    model, seen = script.make_model().to(script.device()), []
    parameters = list(model.parameters())

    def note(_):
        there = [p.grad for p in parameters if p.grad is not None]
        seen.append(in_memory(there))

    for p in parameters:
        p.register_post_accumulate_grad_hook(note)  # comes before the hooks of Zero
    layers = nn.Sequential(*map(Zero, model))
    script.loss_of(layers, data, script.rows_of(0)).backward()
    return max(seen)


# -- who is whole when -----------------------------------------------------------------


def is_whole(p: torch.Tensor) -> bool:
    """An ordinary tensor, not a DTensor, with memory behind it."""
    return not hasattr(p, "placements") and _storage(p).nbytes() > 0


def whole_layers(shard, data, **options) -> list[list[bool]]:
    """Which layers are whole while each block computes, forward and then backward."""
    model, log = script.make_model().to(script.device()), []
    layers = list(model)

    def note(*_):
        log.append([all(map(is_whole, layer.parameters())) for layer in layers])

    def note_twice(module, inputs, output):
        note()
        output.register_hook(note)

    for block in layers[1:-1]:
        block.down.register_forward_hook(note_twice)
    model = shard(model, **options)
    for _ in range(2):
        log.clear()
        script.loss_of(model, data, script.rows_of(0)).backward()
    return log


def picture(ranks, shard, data, title: str, **options) -> draw.Picture:
    """A column for each moment, a row for each layer; filled where it is whole."""
    log = ranks.run(whole_layers, shard, data, **options)[0]
    blocks, rows = len(log) // 2, len(log[0])
    title += f": at most {max(map(sum, log))} of {rows} layers whole on rank 0"
    image = draw.Picture(570, 58 + 28 * rows, title)
    image.text(8, 20, title, 14, weight="bold")
    names = ["first", *(f"block {i + 1}" for i in range(blocks)), "last"]
    for x, whole in enumerate(log):
        words = f"F {x + 1}" if x < blocks else f"B {2 * blocks - x}"
        image.text(104 + 60 * x, 44, words, 13, "middle")
        for y, yes in enumerate(whole):
            fill = draw.COLOURS[0] if yes else "white"
            image.box(76 + 60 * x, 52 + 28 * y, 56, 24, fill)
    for y, name in enumerate(names):
        image.text(8, 69 + 28 * y, name, 13)
    return image


# -- activations -----------------------------------------------------------------------


class Alive(TorchDispatchMode):
    """Keeps a weak reference to the memory of each tensor that is made."""

    def __init__(self):
        super().__init__()
        self.made = weakref.WeakSet()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.made.add(_storage(result))
        return result


def left_by_forward(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes that a forward pass has made and that are still there when it is over."""
    with Alive() as alive:
        result = model(x)
    own = {_storage(t).data_ptr() for t in (*model.parameters(), x)}
    assert result.requires_grad  # and is alive, too
    return sum(s.nbytes() for s in alive.made if s.data_ptr() not in own)


# -- the script ------------------------------------------------------------------------


def torchrun(ranks: int, *arguments: str) -> str:
    """Launch `shard_digits.py`; what it printed.

    Ends the notebook's ranks first, to have their memory.
    """
    helpers.ranks.close()
    words = f"-m torch.distributed.run --standalone --nproc-per-node={ranks}"
    file = Path(__file__).with_name("shard_digits.py")
    command = [sys.executable, *words.split(), str(file), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.strip()
