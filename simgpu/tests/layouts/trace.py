"""Which memory the parts of a layer stack take and give back, in which order.

A short chain of parts (first, block, block, last) is dry-run once for each shape, and
what its allocator is asked for is written down: of the second block, as of one of any
number. Small requests are left out; they are not a thousandth.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from simgpu import _runtime as state

SMALLEST = 2**16  # bytes of the requests that are kept
# Of the launch queue, that a collective takes: an event, a wait of its own stream for
# that, its kernel, and an event behind it
ENTRIES = 4
_COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


class Event(NamedTuple):
    """A block is taken (its bytes) or given back (0).

    Attributes:
        piece: whose block: 0 of the part itself, -1 of the one before (its output),
            1 of the one behind (the gradient of its input).
        backward: in which pass it was taken.
        number: of the block in that pass; of a neighbour's block always 0.
        nbytes: of the block.
        launches: of the pass so far.
        sent: whether a collective has had it.
    """

    piece: int
    backward: bool
    number: int
    nbytes: int
    launches: int
    sent: bool = False


class Trace(NamedTuple):
    """Of both passes of a part.

    Attributes:
        forward: events, and those of `backward`.
        launches: of both passes.
        out: number and bytes of the block that the next part is given.
        grad: number of the gradient of the input, in backward; -1 if it lies where that
            of the output did.
        weights: numbers of the blocks that are left: gradients of parameters.
    """

    forward: list[Event]
    backward: list[Event]
    launches: tuple[int, int]
    out: tuple[int, int]
    grad: int
    weights: list[int]


class _Recorder:
    """Writes down what the allocator of the card is asked for."""

    def __init__(self) -> None:
        runtime = state.current()
        self.memory, self.done = runtime.gpus[0].memory, runtime.dry.events
        self.events: list = []  # (block's key, bytes, launches, sent), or a mark
        self.keys: dict[int, int] = {}  # address -> key
        self.sent: set[int] = set()  # keys
        self.made = self.calls = 0

    @property
    def launches(self) -> int:
        return len(self.done) + (ENTRIES - 1) * self.calls

    def mark(self, name: str) -> None:
        self.events.append((name, self.launches))

    def key_of(self, tensor: torch.Tensor) -> int | None:
        return self.keys.get(tensor.untyped_storage().data_ptr())

    def _taken(self, nbytes: int, stream: int):
        block = self._take(nbytes, stream)
        if nbytes >= SMALLEST:
            self.keys[block.address] = self.made
            self.events.append((self.made, nbytes, self.launches, False))
            self.made += 1
        return block

    def _given_back(self, block) -> None:
        key = self.keys.pop(block.address, None)
        if key is not None:
            self.events.append((key, 0, self.launches, key in self.sent))
        self._give_back(block)

    @contextmanager
    def recording(self) -> Iterator[None]:
        memory = self.memory
        memory.allocated  # noqa: B018 - takes back what was freed before
        self._take, self._give_back = memory._malloc, memory._take_back
        memory._malloc, memory._take_back = self._taken, self._given_back
        calls = {name: getattr(dist, name) for name in _COLLECTIVES}

        def noting(call):
            def noted(*tensors, **options):
                self.calls += 1
                its = [t for t in tensors if isinstance(t, torch.Tensor)]
                self.sent.update(
                    key for t in its if (key := self.key_of(t)) is not None
                )
                return call(*tensors, **options)

            return noted

        for name, call in calls.items():
            setattr(dist, name, noting(call))
        try:
            yield
            memory.allocated  # noqa: B018
        finally:
            del memory._malloc, memory._take_back
            for name, call in calls.items():
                setattr(dist, name, call)


def traces(parts: list, inputs: list[tuple]) -> list[Trace]:
    """Of each part of a chain: its modules, and their inputs beside the first.

    The first part is given its inputs alone. Of the last the output is a loss. Buffers
    and what libraries take are there before.
    """
    recorder = _Recorder()
    with recorder.recording():
        outs = _chain(parts, inputs, recorder)
    return _sorted(recorder, len(parts), outs)


def _chain(parts: list, inputs: list[tuple], recorder: _Recorder) -> list:
    """Both passes; (key, bytes) of what is handed on at each border, there and back."""
    outs, x = [], None
    for number, (part, given) in enumerate(zip(parts, inputs, strict=True)):
        recorder.mark("part")
        x = part(*given) if x is None else part(x, *given)
        if number < len(parts) - 1:
            outs.append((recorder.key_of(x), x.untyped_storage().nbytes()))

            def between(grad):
                outs.append((recorder.key_of(grad), 0))
                recorder.mark("part")

            x.register_hook(between)
    recorder.mark("part")
    x.backward()
    del x
    recorder.mark("end")
    return outs


def _sorted(recorder: _Recorder, count: int, outs: list) -> list[Trace]:
    """The events, part by part, with blocks named from where they are used."""
    spans, at = [[] for _ in range(2 * count)], -1
    starts = []
    owner: dict[int, tuple[int, int]] = {}  # key -> span, number in it
    numbers = [0] * (2 * count)
    for event in recorder.events:
        if isinstance(event[0], str):
            at += 1
            starts.append(event[1])
            continue
        span = min(at, 2 * count - 1)
        key, nbytes, launches, sent = event
        if nbytes:
            owner[key] = span, numbers[span]
            numbers[span] += 1
        spans[span].append((key, nbytes, launches - starts[span], sent))
    alive = set(owner) - {its[0] for span in spans for its in span if not its[1]}
    given = [key for key, _ in outs[: count - 1]]  # at the border behind each part
    grads = [key for key, _ in reversed(outs[count - 1 :])]
    made = []
    for i in range(count):
        before = given[i - 1] if i else None
        behind = grads[i] if i < count - 1 else None
        ways = []
        for span in (i, 2 * count - 1 - i):
            way = []
            for key, nbytes, launches, sent in spans[span]:
                of, number = owner[key]
                if of in (i, 2 * count - 1 - i):
                    piece = 0
                elif key in (before, behind):
                    piece, number = (-1 if key == before else 1), 0
                else:
                    raise ValueError(f"a block of part {of} ends in {i}")
                way.append(Event(piece, of >= count, number, nbytes, launches, sent))
            ways.append(way)
        launches = tuple(starts[s + 1] - starts[s] for s in (i, 2 * count - 1 - i))
        out = (owner[given[i]][1], outs[i][1]) if i < count - 1 else (-1, 0)
        grad = -1
        if i and (key := grads[i - 1]) != behind:
            grad = owner[key][1]
        weights = [n for key, (of, n) in owner.items()
                   if key in alive and of == 2 * count - 1 - i]  # fmt: skip
        made.append(Trace(*ways, launches, out, grad, weights))
    return made
