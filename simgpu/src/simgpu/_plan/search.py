"""All layouts of a model on so many cards, the fastest that fit first."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simgpu._device.cards import Card, find_card
from simgpu._pictures import plans
from simgpu._pictures.picture import Picture
from simgpu._plan import parts, ring
from simgpu._plan.compose import Composed, Seconds
from simgpu._plan.layout import Layout
from simgpu._plan.llama import RECOMPUTE
from simgpu._plan.parts import Machine
from simgpu._plan.shapes import Shape, shape_of
from simgpu._timing.cost import Launches, launch_times
from simgpu._timing.topology import Topology

_MICRO = (1, 2, 4, 8, 16)
_CHUNKS = (1, 2, 4)
_LEAST = 8192  # tokens of a sequence on a rank, where the search may cut it
AXES = ("tp", "pp", "cp", "ep", "shards", "micro", "chunks", "zero", "recompute")
LOST = {
    "again": "recomputing", "slices": "messages of tp",
    "experts": "messages of experts", "ring": "messages of cp",
    "shards": "messages of FSDP",
    "bubble": "the bubble", "optimizer": "the optimizer", "host": "the host",
}  # fmt: skip
_DAY = 24 * 60 * 60
_WORTH = 0.002  # of a step: what is said of a difference


@dataclass(frozen=True)
class PlannedLayout:
    """A layout, its memory and its step. All times are simulated.

    Attributes:
        layout: how the model is spread.
        peak_bytes: of tensors on the fullest rank.
        used_bytes: of that card: with CUDA's context and NCCL's buffers.
        fits: whether the card has that, and room for fragments.
        step_seconds: of a step of the whole job.
        seconds: what it is made of.
        tokens_per_second: of the whole job.
        mfu: floating-point operations of the model (6 for a parameter and token, and
            attention in full) over what the cards could do in the time.
    """

    layout: Layout
    peak_bytes: int
    used_bytes: int
    fits: bool
    step_seconds: float
    seconds: Seconds
    tokens_per_second: float
    mfu: float

    @property
    def lost(self) -> tuple[str, float]:
        """To what most of the time goes that is not computing, and its share."""
        name = max(LOST, key=lambda its: getattr(self.seconds, its))
        return LOST[name], getattr(self.seconds, name) / self.step_seconds

    def days(self, tokens: float) -> float:
        """Days in which the job sees so many tokens."""
        return tokens / self.tokens_per_second / _DAY


@dataclass(frozen=True)
class Plan:
    """What `simgpu.plan` returns.

    Attributes:
        shape: sizes of the model.
        machine: the cards and what connects them.
        gpus: of the job.
        tokens: of a step of the whole job.
        sequence: tokens of a sequence.
        host: what launches cost it.
        imbalance: tokens of the rank whose experts get most of them, over the mean.
        layouts: all of them: those that fit first, the fastest of them first.
        took: seconds that it took here.
    """

    shape: Shape
    machine: Machine
    gpus: int
    tokens: int
    sequence: int
    host: str
    imbalance: float
    layouts: list[PlannedLayout] = field(repr=False)
    took: float

    @property
    def fitting(self) -> list[PlannedLayout]:
        return [its for its in self.layouts if its.fits]

    def at(self, place: int) -> PlannedLayout:
        """The layout of a place; 1 is the best.

        Raises:
            ValueError: for a place that there is not.
        """
        if not 1 <= place <= len(self.layouts):
            raise ValueError(
                f"there is no layout {place}; they are 1 to {len(self.layouts)}"
            )
        return self.layouts[place - 1]

    def why(self, a: int, b: int) -> list[str]:
        """Why the layout of one place (1 is the best) is faster than another's.

        Raises:
            ValueError: for a place that there is not.
        """
        one, two = self.at(a), self.at(b)
        lines = [_faster(a, b, one, two)]
        names = {"computing": "computing"} | LOST
        ours, theirs = one.seconds._asdict(), two.seconds._asdict()
        for its in sorted(names, key=lambda its: -abs(ours[its] - theirs[its])):
            if abs(ours[its] - theirs[its]) > _WORTH * one.step_seconds:
                lines.append(f"  {names[its]}: {1e3 * ours[its]:,.1f} ms against "
                             f"{1e3 * theirs[its]:,.1f}")  # fmt: skip
        for place, row in ((a, one), (b, two)):
            lines.append(
                f"  {place} needs {row.used_bytes / 2**30:.1f} GiB of a card"
                f"{'' if row.fits else ', and does not fit'}"
            )
        return lines

    def picture(self) -> Picture:
        """Each layout's memory and rate; the best for their memory by place."""
        return plans.layouts(self)

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return {
            "model": self.shape._asdict() | {
                "parameters": self.shape.parameters, "active": self.shape.active,
            },
            "card": self.machine.card.name, "node": self.machine.node,
            "gpus": self.gpus, "tokens": self.tokens, "sequence": self.sequence,
            "imbalance": self.imbalance,
            "layouts": [
                {**vars(its), "layout": its.layout._asdict(),
                 "seconds": its.seconds._asdict()} for its in self.layouts
            ],
        }  # fmt: skip


def _faster(a: int, b: int, one: PlannedLayout, two: PlannedLayout) -> str:
    share = two.step_seconds / one.step_seconds - 1
    words = "faster" if share >= 0 else "slower"
    return (
        f"{a} is {abs(share):.1%} {words} than {b}: a step takes "
        f"{1e3 * one.step_seconds:,.1f} ms against {1e3 * two.step_seconds:,.1f}"
    )


def plan(
    model: str | Mapping[str, Any] | Shape, gpus: int, *, tokens: int,
    sequence: int = 4096, card: str | Card = "H100", node: int | None = None,
    network: float | str | None = None, compile: bool = False,
    host: str = "bare", imbalance: float = 1.0,
    only: Mapping[str, Sequence[Any]] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:  # fmt: skip
    """The layouts of a decoder on so many cards, and which of them are the fastest.

        found = simgpu.plan("llama3-8b", 64, tokens=2**22, sequence=8192)
        best = found.layouts[0]

    Layouts are FSDP2 (over all ranks, or in groups with replicas; whole parameters
    freed behind forward or kept, gradients sent with each micro-batch or once a step),
    slices of layers with sequence parallelism, parts of each sequence (context
    parallelism, of the shards; where a rank keeps 8,192 tokens or `only` asks for it),
    experts spread over ranks, stages of a pipeline (1F1B, interleaved), micro-batches,
    and recomputing. What the parts of the model do is dry-run, once for each
    micro-batch, number of slices, number of parts of a sequence and number of ranks of
    experts, all of which get as many tokens.

    Args:
        model: "llama3-8b" or another of `simgpu plan --help`, a Hugging Face
            config.json (its path or what it holds), or sizes as text.
        gpus: of the job.
        tokens: of a step of the whole job.
        sequence: tokens of a sequence.
        card: a key of `simgpu.CARDS`, a file of `simgpu measure`, or a `Card`.
        node: cards that NVLink connects; None is what the card has, 8, or of the 72 of
            GB200 and GB300 so many that they divide the job.
        network: of a node, such as "400 GB/s"; None is 200 Gbit/s for each card.
        compile: whether blocks are compiled.
        host: what launches cost, as in `simgpu.dry_run`.
        imbalance: tokens of the rank whose experts get most of them, over the mean.
        only: values of "tp", "pp", "cp", "ep", "shards", "micro", "chunks", "zero" and
            "recompute" to which the search is held.
        progress: is told how many of all parts are measured.

    Raises:
        ValueError: for a model, a card or a job that cannot be, and where no layout
            divides it.
    """
    began = time.perf_counter()
    shape = shape_of(model)
    its = find_card(card)
    machine = Machine(its, _node(its, gpus, node), network, compile)
    if not imbalance >= 1:
        raise ValueError(f"imbalance is {imbalance!r}; the fullest rank has at least 1")
    found = _checked(shape, gpus, machine, tokens, sequence, dict(only or {}))
    keys = [its.key(sequence) for its in found]
    keys += [key._replace(recompute="none") for key in keys]
    known = parts.parts_of(shape, keys, machine, progress)
    rates = parts.rates_of(machine)
    call, collective, _ = launch_times(host, machine.card)

    def filled(key: parts.Key) -> parts.Parts:
        its = known[key]
        return its.crowded(imbalance, key.recompute) if key.spread > 1 else its

    rows = [
        _row(Composed(shape, of, sequence, machine, filled(of.key(sequence)),
                      filled(of.key(sequence)._replace(recompute="none")), rates,
                      Launches(call, collective)), tokens, gpus)
        for of in found
    ]  # fmt: skip
    rows.sort(key=lambda its: (not its.fits, its.step_seconds, its.used_bytes))
    took = time.perf_counter() - began
    return Plan(shape, machine, gpus, tokens, sequence, host, imbalance, rows, took)


def _node(card: Card, gpus: Any, node: int | None) -> int:
    """Cards that NVLink connects."""
    if type(gpus) is not int or gpus < 1:
        return node or card.domain  # refused later
    if node is None and card.domain > 8:  # a rack, of which a job takes a part
        return max(its for its in _divisors(gpus) if its <= card.domain)
    return min(node or card.domain, gpus)


def _row(its: Composed, tokens: int, gpus: int) -> PlannedLayout:
    seconds = its.seconds.total
    flops = its.shape.flops(its.tokens * its.of.context) * tokens
    peak = gpus * its.machine.card.flops["bfloat16"]
    return PlannedLayout(its.of, its.peak, its.used, its.fits, seconds, its.seconds,
                         tokens / seconds, flops / seconds / peak)  # fmt: skip


def _checked(shape: Shape, gpus: int, machine: Machine, tokens: int, sequence: int,
             only: dict[str, Sequence[Any]]) -> list[Layout]:  # fmt: skip
    """All layouts, or why there is none."""
    for name, its in (("gpus", gpus), ("tokens", tokens), ("sequence", sequence)):
        if isinstance(its, bool) or not isinstance(its, int) or its < 1:
            raise ValueError(f"{name} is {its!r}; it must be a whole number above 0")
    if gpus % machine.node:
        raise ValueError(f"{gpus} GPUs are no whole number of nodes of {machine.node}")
    Topology(machine.card, machine.node, gpus // machine.node, machine.network)
    if unknown := set(only) - set(AXES):
        raise ValueError(
            f"no axis is called {min(unknown)}; there are {', '.join(AXES)}"
        )
    for name, values in only.items():
        _check_values(name, values)
    if tokens % sequence:
        raise ValueError(
            f"a step of {tokens:,} tokens is no whole number of sequences of "
            f"{sequence:,}"
        )
    for axis in ("tp", "cp") if shape.latent else ():
        if max(only.get(axis, [1])) > 1:
            raise ValueError(
                f"{axis} is {max(only[axis])}; latent attention is planned neither in "
                "slices nor in parts of sequences"
            )
    if max(only.get("cp", [1])) > 1 and not ring.takes(shape.head_size, machine.card):
        raise ValueError(
            f"cp needs flash attention, which takes no heads of {shape.head_size} on "
            f"{machine.card.name}: up to {ring.WIDEST}, from compute capability 8.0 on"
        )
    found = list(_layouts(shape, gpus, machine, tokens // sequence, sequence, only))
    if not found:
        held = ", ".join(f"{axis} {tuple(its)}" for axis, its in only.items())
        raise ValueError(
            f"nothing divides {tokens // sequence} sequences, {shape.heads} heads "
            f"({shape.kv_heads} of keys) and {shape.layers} blocks among {gpus} GPUs"
            + (f" with {held}" if held else "")
            + "; a pipeline is ZeRO 1, which needs two micro-batches; cp divides "
            "shards, and 2 * cp * tp the sequence"
        )
    return found


def _check_values(axis: str, values: Any) -> None:
    if isinstance(values, str) or not isinstance(values, Iterable) or not [*values]:
        raise ValueError(f"{axis} is {values!r}; give its values as a list")
    for value in values:
        if axis == "recompute":
            if value not in RECOMPUTE:
                raise ValueError(f"recompute={value!r}; use {', '.join(RECOMPUTE)}")
        elif type(value) is not int or value < 1:
            raise ValueError(f"{axis} is {value!r}; it is a whole number above 0")
        elif axis == "zero" and value > 3:
            raise ValueError(f"zero is {value}; it is 1, 2 or 3")


def _layouts(shape: Shape, gpus: int, machine: Machine, batch: int, sequence: int,
             only: Mapping[str, Sequence[Any]]) -> Iterator[Layout]:  # fmt: skip
    node = machine.node

    def axis(name: str, values: Iterable[Any]) -> list[Any]:
        held = only.get(name)
        return [its for its in values if held is None or its in held]

    sizes = [shape.kv_heads, shape.heads, shape.vocab, sequence]
    if not shape.experts:
        sizes.append(shape.intermediate)
    spreads = [n for n in _divisors(shape.experts or 1)
               if n <= node or n % node == 0]  # fmt: skip
    for tp, pp, cp in itertools.product(
        axis("tp", _divisors(node)), axis("pp", _divisors(gpus)),
        only.get("cp") or _parts(shape, machine.card, sequence),
    ):  # fmt: skip
        if shape.latent and tp > 1:
            continue
        if any(size % tp for size in sizes) or gpus % (tp * pp) or pp > shape.layers:
            continue
        if cp < 1 or gpus // (tp * pp) % cp or (cp > 1 and sequence % (2 * cp * tp)):
            continue
        dp = gpus // (tp * pp)
        if batch % (dp // cp):
            continue
        of_each = batch // (dp // cp)
        near = max(1, node // tp)
        groups = only.get("shards") or (dp, near, 8 * near)
        whole = {n for n in groups if n > 0 and dp % n == 0 and n % cp == 0}
        for shards, micro, chunks in itertools.product(
            sorted(whole)[::-1],
            only.get("micro") or _MICRO,
            only.get("chunks") or _CHUNKS,
        ):
            count, left = divmod(of_each, micro)
            if left or not count or chunks > 1 and (pp == 1 or count % pp):
                continue
            if pp > 1 and (count < pp or pp * chunks > shape.layers):
                continue
            for zero, again, ep in itertools.product(
                axis("zero", (1,) if pp > 1 else (3, 2, 1) if count > 1 else (3, 2)),
                axis("recompute", RECOMPUTE), axis("ep", spreads),
            ):  # fmt: skip
                its = Layout(dp // shards, shards, tp, pp, chunks, micro, count, zero,
                             again, ep, cp)  # fmt: skip
                if _can_spread(shape, its):
                    yield its


def _parts(shape: Shape, card: Card, sequence: int) -> list[int]:
    """Among how many ranks the search cuts a sequence."""
    if shape.latent or not ring.takes(shape.head_size, card):
        return [1]
    return [1] + [2**i for i in range(1, 16) if sequence >> i >= _LEAST]


def _can_spread(shape: Shape, of: Layout) -> bool:
    """Whether experts can be on so many ranks."""
    return not shape.experts or of.shards * of.slices % of.spread == 0


def _divisors(number: int) -> list[int]:
    return [its for its in range(1, number + 1) if number % its == 0]
