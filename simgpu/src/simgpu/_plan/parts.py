"""What the parts of a model cost on a rank, by micro-batch and slices."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from simgpu._device.cards import Card
from simgpu._dry.api import dry_run
from simgpu._plan.llama import Block, First, Last, angles_of
from simgpu._plan.pieces import Cost, Piece, called, measured, passes
from simgpu._plan.shapes import Shape

_ROOM = 2**50  # bytes: what has no room on the card is found out later
_NUMBERS = 2**26  # by which an optimizer is measured


class Machine(NamedTuple):
    """Where a job runs."""

    card: Card
    node: int  # cards that NVLink connects
    network: float | str | None  # of a node
    compiled: bool = False  # blocks are compiled


class Key(NamedTuple):
    """What decides what a part costs."""

    micro: int  # sequences
    tokens: int  # of each, on all ranks that have a part of it
    slices: int
    recompute: str
    spread: int = 1  # ranks over which experts are spread
    context: int = 1  # ranks that have parts of each sequence


class Parts(NamedTuple):
    first: Piece
    block: Piece
    last: Piece
    experts: int = 0  # numbers of a block's weights that are experts'
    routed: Piece = Piece(Cost(), Cost())  # of a block, the experts and the way there
    dense: Piece = Piece(Cost(), Cost())  # a block with an MLP in place of experts

    def crowded(self, by: float, recompute: str) -> "Parts":
        """Where the fullest rank's experts get `by` times as many tokens as the mean.

        All wait for it: in the messages to the experts and back as in their products.
        What selective recomputing keeps of the experts counts as if it kept all.
        """
        more, (first, then) = by - 1, self.routed[:2]
        kept = first if recompute != "full" else first._replace(kept=0, most=0)
        if recompute == "none":
            again = then
        else:
            again = then.stretched(1, first)._replace(most=first.kept + then.most)
        block = self.block._replace(
            forward=self.block.forward.stretched(more, kept),
            backward=self.block.backward.stretched(more, again._replace(kept=0)),
        )
        routed = self.routed._replace(
            forward=first.stretched(more, first), backward=then.stretched(more, then)
        )
        return self._replace(block=block, routed=routed)


class Rates(NamedTuple):
    """Seconds of the card for a number."""

    adam: float  # a step of AdamW in float32
    clip: float  # its norm, and its scaling
    add: float  # a gradient of bfloat16 to a sum in float32
    copy: float  # in bfloat16
    cast: float  # from bfloat16 to float32


@contextlib.contextmanager
def on_card(numbers: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """What a part makes is on the card, in half precision."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(numbers)
    torch.set_default_device("cuda")
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)


def parts_of(shape: Shape, keys: list[Key], machine: Machine,
             progress: Callable[[int, int], None] | None = None,
             ) -> dict[Key, Parts]:  # fmt: skip
    """The parts for each key, which are measured once in a process."""
    known = _KNOWN.setdefault((shape, repr(machine)), {})  # a card is not hashable
    missing = [key for key in dict.fromkeys(keys) if key not in known]
    if missing:

        def run() -> None:
            dist.init_process_group("nccl")
            torch.cuda.set_device(0)
            groups: dict[range, dist.ProcessGroup] = {}
            for done, key in enumerate(missing):
                if progress is not None:
                    progress(done, len(missing))
                of_parts = range(0, key.slices * key.context, key.slices)
                own = []
                for ranks in (range(key.slices), range(key.spread), of_parts):
                    if len(ranks) == 1:
                        own.append(None)
                        continue
                    if ranks not in groups:
                        groups[ranks] = dist.new_group(ranks)
                    own.append(groups[ranks])
                with on_card():
                    known[key] = _measured(shape, key, *own, machine)

        most = (max(key.spread, key.slices * key.context) for key in missing)
        _alone(run, machine, max(machine.node, *most))
    return known


_KNOWN: dict[tuple[Shape, str], dict[Key, Parts]] = {}
_RATES: dict[str, Rates] = {}


def _measured(shape: Shape, key: Key, group, spread, context,
              machine: Machine) -> Parts:  # fmt: skip
    tokens = key.tokens // key.context
    ids = torch.zeros(tokens, key.micro, dtype=torch.int64)
    x = torch.empty(tokens // key.slices, key.micro, shape.hidden)
    x.requires_grad_()
    with torch.device("cpu"):
        angles = angles_of(shape, tokens, context).to("cuda")
    parts = {
        "first": (First(shape, group), (ids,)),
        "block": (Block(shape, group, key.recompute, spread, context), (x, angles)),
        "last": (Last(shape, group), (x, ids)),
    }
    if shape.dense:
        dense = Block(shape, group, key.recompute, spread, context, is_dense=True)
        parts["dense"] = dense, (x, angles)
    if machine.compiled:
        for name in parts.keys() & {"block", "dense"}:
            parts[name][0].compile()
    ring = called(context) if context else None
    made = {}
    for name in ("block", *parts):  # the first of all has what libraries take
        part, inputs = parts[name]
        forward, backward = passes(part, *inputs, ring=ring)
        made[name] = Piece(
            forward, backward, tuple(p.numel() for p in part.parameters())
        )
        for its in (x, *part.parameters()):
            its.grad = None
    if not shape.experts:
        return Parts(**made)
    mlp = parts["block"][0].mlp
    experts = sum(weight.numel() for weight in mlp.experts.parameters())
    return Parts(**made, experts=experts, routed=Piece(*passes(mlp, x)))


def rates_of(machine: Machine) -> Rates:
    """Measured once in a process."""
    if repr(machine) in _RATES:
        return _RATES[repr(machine)]
    found = {}

    def run() -> None:
        torch.cuda.set_device(0)
        with on_card():
            half, other = torch.empty(_NUMBERS), torch.empty(_NUMBERS)
            whole = torch.empty(_NUMBERS, dtype=torch.float32)
            owned = torch.empty(_NUMBERS, dtype=torch.float32)
            owned.grad = whole
            adam = torch.optim.AdamW([owned], fused=True)
            adam.step()
            for name, doing in {
                "adam": adam.step,
                "clip": lambda: (torch.linalg.vector_norm(whole), whole.mul_(0.5)),
                "add": lambda: whole.add_(half),
                "copy": lambda: half.copy_(other),
                "cast": lambda: whole.copy_(half),
            }.items():
                found[name] = measured(doing)[0].seconds / _NUMBERS

    _alone(run, machine)
    _RATES[repr(machine)] = Rates(**found)
    return _RATES[repr(machine)]


def _alone(run, machine: Machine, world: int = 0) -> None:
    dry_run(run, world=world or machine.node, node=machine.node,
            card=replace(machine.card, total_memory=_ROOM), network=machine.network,
            compile="fuse" if machine.compiled else "refuse")  # fmt: skip
