"""A step of a layout, put together from its parts.

Models: FSDP2 in bfloat16, gradients reduced in float32, AdamW in float32; blocks by
themselves, embedding and head together. A block's all-gather runs beside the block
before it, its reduce-scatter beside the block behind it in backward, and the two beside
each other. With ZeRO 1, as in every pipeline, whole parameters stay, gradients are
added up whole in float32, and both messages are sent once a step. Messages of FSDP take
multiprocessors from what runs beside them. Leaves out: the fragments of a caching
allocator (there is `RESERVE` for them), and what the host of a pipeline launches for
FSDP.
"""

import functools
import itertools
from typing import NamedTuple

from simgpu._device import overhead
from simgpu._plan import schedule
from simgpu._plan.layout import Layout, blocks_of
from simgpu._plan.parts import Machine, Parts, Rates
from simgpu._plan.pieces import Cost, Piece
from simgpu._plan.schedule import Pass, Stage
from simgpu._plan.shapes import Shape
from simgpu._timing.collective_cost import Group, collective_seconds
from simgpu._timing.cost import CHANNELS, Launches
from simgpu._timing.topology import Topology

WORKSPACES = 2 * 32 * 2**20  # bytes of cuBLAS, for forward and backward
RESERVE = 0.05  # of the card, for fragments


class Seconds(NamedTuple):
    """Of a step, what it is made of. A rank computes all of `computing`.

    Attributes:
        computing: of the rank that computes longest, without what it does again.
        again: what it recomputes.
        slices: messages of tensor parallelism.
        experts: messages to experts and back.
        ring: messages between ranks that have parts of a sequence.
        shards: messages of FSDP beside which nothing is computed.
        bubble: in which the rank waits for another stage.
        optimizer: of the step, with clipping.
        host: in which the card waits for the host.
    """

    computing: float
    again: float
    slices: float
    experts: float
    ring: float
    shards: float
    bubble: float
    optimizer: float
    host: float

    @property
    def total(self) -> float:
        return sum(self)


class Unit(NamedTuple):
    """What FSDP gathers and reduces at a time: a block, or what is not its experts.

    Attributes:
        piece: the block.
        gather: seconds of a message.
        out: of the copies around it.
        forward: the part of a block's forward pass that needs it last.
        backward: of its backward pass.
        cast: seconds of the copy before gradients are reduced.
        reduce: of that message.
        add_up: of the one between replicas.
    """

    piece: Piece
    gather: float
    out: float
    forward: float
    backward: float
    cast: float
    reduce: float
    add_up: float


class Composed:
    """A step of a layout; figures are computed when they are first asked for."""

    def __init__(self, shape: Shape, of: Layout, tokens: int, machine: Machine,
                 parts: Parts, plain: Parts, rates: Rates, host: Launches):  # fmt: skip
        self.shape, self.of, self.machine = shape, of, machine
        self.tokens = tokens // of.context  # of a sequence, on a rank
        self.parts, self.plain, self.rates, self.host = parts, plain, rates, host
        nodes = max(1, of.gpus // machine.node)
        self.place = Topology(machine.card, machine.node, nodes, machine.network)
        self.blocks = blocks_of(shape.layers, of.stages * of.chunks)
        before = itertools.accumulate(self.blocks, initial=0)
        self.dense = [min(n, max(0, shape.dense - b))
                      for n, b in zip(self.blocks, before, strict=False)]  # fmt: skip

    # memory

    @functools.cached_property
    def peak(self) -> int:
        """Bytes of tensors on the fullest rank."""
        return max(self._peak(rank) for rank in range(self.of.stages))

    @functools.cached_property
    def used(self) -> int:
        """Bytes of the card: tensors, and what is there beside them."""
        buffers = self.of.groups(self.shape) * overhead.NCCL_BUFFERS
        return self.peak + overhead.CONTEXT + buffers

    @property
    def fits(self) -> bool:
        return self.used <= (1 - RESERVE) * self.machine.card.total_memory

    def _held(self, rank: int) -> tuple[int, int]:
        """Numbers of blocks and of both ends that a rank has whole."""
        of = self.of
        ends = sum(self.parts.first.weights) * (rank == 0)
        ends += sum(self.parts.last.weights) * (rank == of.stages - 1)
        if self.shape.tied and of.stages == 1:
            ends -= sum(self.parts.first.weights)
        return sum(n * sum(its.weights) for its, n in self._layers(rank)), ends

    def _layers(self, rank: int, parts: Parts | None = None) -> list[tuple[Piece, int]]:
        """Blocks that a rank has, and how many of each."""
        return self._of_stages(slice(rank, None, self.of.stages), parts or self.parts)

    def _of_stages(self, which: slice, parts: Parts) -> list[tuple[Piece, int]]:
        dense = sum(self.dense[which])
        others = sum(self.blocks[which]) - dense
        return [its for its in ((parts.dense, dense), (parts.block, others)) if its[1]]

    def _experts(self, rank: int) -> int:
        """Numbers of all experts that a rank has."""
        count = sum(n for its, n in self._layers(rank) if its is self.parts.block)
        return count * self.parts.experts

    def _peak(self, rank: int) -> int:
        of, parts = self.of, self.parts
        layers = self._layers(rank)
        blocks, ends = self._held(rank)
        experts = self._experts(rank)
        shared = self._shared(blocks + ends - experts, experts)
        static = 12 * shared + WORKSPACES
        kept = sum(n * its.forward.kept for its, n in layers)
        # the blocks with most parameters are the last ones, from which backward begins
        block = layers[-1][0] if layers else Piece(Cost(), Cost())
        back, is_last = block.backward.most, rank == of.stages - 1
        last = parts.last if is_last else Piece(Cost(), Cost())
        loss = max(last.forward.most, last.forward.kept + last.backward.most)
        head = 2 * sum(last.weights)  # whole gradients, until all of both ends are
        if of.zero == 1:
            whole = 2 * (blocks + ends) + 4 * (blocks + ends)
            if is_last and of.stages > 1:  # scores stay as long as the stage's pass
                loss += 2 * of.micro * self.tokens * self.shape.vocab // of.slices
            waiting = int(self._waiting(rank, kept))
            return static + whole + waiting + max(loss, head + back)
        gathered = 2 * ends
        one = sum(block.weights)
        its = parts.experts if block is parts.block else 0
        rest = one - its
        if of.zero == 2:
            gathered += 2 * blocks
            fetched = 0
        else:
            fetched = 2 * rest  # the next, in the message's buffer
        if of.accumulate > 1:
            static += 4 * shared
        made = 0 if of.accumulate > 1 else 4 * shared
        own = 2 * one if of.zero == 3 else 0
        of_rest = 4 * (rest + self._shared(rest, 0))
        of_experts = 4 * (its + self._shared(0, its))
        # the one is reduced when the next is there, the other when it is free
        reduced = of_rest + of_experts
        if of.zero == 3:
            reduced = max(fetched + of_rest, of_experts)
        return (
            static
            + gathered
            + max(
                kept + loss + fetched,
                kept + head + own + fetched + back,
                kept - block.forward.kept + head + own + back + reduced,
                made + 2 * ends + 4 * ends + 4 * ends // of.shards,
            )
        )

    def _shared(self, numbers: int, experts: int) -> int:
        """Of so many numbers, and of those of a rank's experts, what a shard has."""
        of = self.of
        return numbers // of.shards + experts * of.spread // (of.shards * of.slices)

    def _waiting(self, rank: int, kept: int) -> float:
        """Bytes of activations that are held at most, where one pass keeps so many."""
        of = self.of
        if of.chunks == 1:
            return min(of.stages - rank, of.accumulate) * kept
        ahead = 2 * (of.stages - rank - 1) + (of.chunks - 1) * of.stages + 1
        passes = min(ahead, of.accumulate * of.chunks)
        return passes * kept / of.chunks

    # time

    @functools.cached_property
    def seconds(self) -> Seconds:
        of = self.of
        slowest = max(range(of.stages), key=lambda r: self._own(r, self.parts).seconds)
        own = self._own(slowest, self.parts)
        plain = self._own(slowest, self.plain)
        optimizer = max(self._optimizer(rank) for rank in range(of.stages))
        computing = (plain.seconds - plain.messages) * of.accumulate
        again = (own.seconds - own.messages) * of.accumulate - computing
        experts = own.exchanges * of.accumulate
        ring = own.ring * of.accumulate
        slices = own.messages * of.accumulate - experts - ring
        busy = own.seconds * of.accumulate
        added = self._added(self._pieces(slowest, self.parts))
        adding = added.card * of.accumulate
        if of.stages == 1:
            sent = 1 if of.zero == 1 else of.accumulate  # times in a step
            shards = (sum(self._with_shards(0)) - own.seconds) * sent
            launched = (self._host(own) + added.host) * of.accumulate
            launched += self._host(self._sharding()) * sent
            host = max(0.0, launched - busy - adding - shards)
            return Seconds(computing + adding, again, slices, experts, ring, shards,
                           0.0, optimizer, host)  # fmt: skip
        stages = [self._stage(i) for i in range(of.stages * of.chunks)]
        message = self._message()
        passes = schedule.seconds(tuple(stages), of.accumulate, message, of.chunks)
        idle = [Stage(*(Pass(its.card, 0.0) for its in stage)) for stage in stages]
        alone = schedule.seconds(tuple(idle), of.accumulate, message, of.chunks)
        # the first pass through all stages, and the last one back
        shards = sum(sum(self._with_shards(rank)) - self._own(rank, self.parts).seconds
                     for rank in range(of.stages))  # fmt: skip
        return Seconds(computing + adding, again, slices, experts, ring, shards,
                       alone - busy - adding, optimizer, passes - alone)  # fmt: skip

    def _own(self, rank: int, parts: Parts) -> Cost:
        """Both passes of a micro-batch through all that a rank has."""
        made = Cost()
        for part, count in self._pieces(rank, parts):
            made += (part.forward + part.backward).times(count)
        return made

    def _pieces(self, rank: int, parts: Parts) -> list[tuple[Piece, int]]:
        made = [(parts.first, 1)] if rank == 0 else []
        made += self._layers(rank, parts)
        return made + ([(parts.last, 1)] if rank == self.of.stages - 1 else [])

    def _stage(self, number: int) -> Stage:
        """One of all stages, `chunks` of which lie on a rank."""
        parts = self.parts
        pieces = self._of_stages(slice(number, number + 1), parts)
        for part, at in ((parts.first, 0), (parts.last, len(self.blocks) - 1)):
            if number == at:
                pieces.append((part, 1))
        forward = backward = Cost()
        for its, count in pieces:
            forward += its.forward.times(count)
            backward += its.backward.times(count)
        added = self._added(pieces)
        return Stage(Pass(forward.seconds, self._host(forward)),
                     Pass(backward.seconds + added.card,
                          self._host(backward) + added.host))  # fmt: skip

    def _added(self, pieces: list[tuple[Piece, int]]) -> Pass:
        """A micro-batch's gradients to those before it, one by one: ZeRO 1 adds whole
        ones; else shards are added beside other work, but for the first ones."""
        numbers = sum(count * sum(piece.weights) for piece, count in pieces)
        if self.shape.tied and self.of.stages == 1:
            numbers -= sum(self.parts.first.weights)
        adds = sum(count * len(piece.weights) for piece, count in pieces)
        if self.of.zero == 1:
            return Pass(numbers * self.rates.add, adds * self.host.launch)
        others = 1 - 1 / self.of.accumulate
        return Pass(0.0, others * adds * self.host.launch)

    def _message(self) -> float:
        """Seconds from one stage to the next."""
        of = self.of
        nbytes = 2 * of.micro * self.tokens * self.shape.hidden // of.slices
        far = of.replicas * of.shards * of.slices >= self.machine.node
        ends = Group(2, 1 + far, 2 - far, 1 if far else 2)
        return collective_seconds("send", nbytes, ends, self.place)

    def _with_shards(self, rank: int) -> tuple[float, float]:
        """Both passes of a micro-batch with FSDP's messages, where they are sent."""
        of, parts, rates = self.of, self.parts, self.rates
        _, ends = self._held(rank)
        layers = [self._units(its) for its, n in self._layers(rank) for _ in range(n)]
        copied = rates.copy + rates.cast / of.shards
        taken = CHANNELS / self.machine.card.multi_processors
        now = fetched = reduced = summed = 0.0
        sent: list[tuple[float, float]] = []  # messages, from when to when

        def compute(its: Cost, part: float = 1.0) -> float:
            end = now + part * its.seconds
            slower = taken / (1 - taken) * (1 - its.messages / (its.seconds or 1.0))
            for first, last in sent[-2:]:
                end += max(0.0, min(last, end) - max(first, now)) * slower
            return end

        def send(seconds: float) -> float:
            sent.append((now, now + seconds))
            return now + seconds

        following = [unit for units in layers for unit in units]
        now = self._gather(ends) + ends * copied
        # the head alone: none
        fetched = send(following[0].gather) if following else now
        if rank == 0:
            now = compute(parts.first.forward)
        for i, its in enumerate(following):
            now = max(now, fetched) + its.out
            if i + 1 < len(following):
                fetched = send(following[i + 1].gather)
            now = compute(its.piece.forward, its.forward)
        if rank == of.stages - 1:
            now = compute(parts.last.forward)
        middle, again = now, of.zero == 3
        layers.reverse()
        following = [unit for units in layers for unit in units]
        fetched = send(following[0].gather) if again and following else now
        if rank == of.stages - 1:
            now = compute(parts.last.backward)
        gathered = 0
        for units in layers:
            for its in units[: len(units) * again]:
                now = max(now, fetched) + its.out
                gathered += 1
                if gathered < len(following):
                    fetched = send(following[gathered].gather)
            for its in reversed(units):
                now = compute(its.piece.backward, its.backward)
                now = max(now, reduced) + its.cast
                reduced = send(its.reduce)
                summed = max(summed, reduced) + its.add_up  # in a stream of its own
        if rank == 0:
            now = compute(parts.first.backward)
        now = max(now, reduced) + ends * rates.cast + self._reduce(ends)
        return middle, max(now, summed) + self._sum(ends) - middle

    def _units(self, piece: Piece) -> list[Unit]:
        """Of a block, in the order in which a pass needs them."""
        parts, rates = self.parts, self.rates
        experts = parts.experts if piece is parts.block else 0
        rest = sum(piece.weights) - experts
        forward = backward = 0.0  # the experts' parts
        if experts:
            (first, then), (block, back) = parts.routed[:2], piece[:2]
            forward = min(1.0, first.seconds / block.seconds)
            done = then.seconds + first.seconds * (self.of.recompute != "none")
            backward = min(1.0, done / back.seconds)

        def unit(numbers: int, its: int, forward: float, backward: float) -> Unit:
            # from and to messages' buffers; a shard is rounded before it is sent
            out = (numbers + its) * rates.copy + self._shared(numbers, its) * rates.cast
            return Unit(piece, self._gather(numbers, its), out, forward, backward,
                        (numbers + its) * rates.cast, self._reduce(numbers, its),
                        self._sum(numbers, its))  # fmt: skip

        made = [unit(rest, 0, 1 - forward, 1 - backward)]
        return made + [unit(0, experts, forward, backward)] * (experts > 0)

    def _sharding(self) -> Cost:
        """What FSDP launches in both passes: three copies around each gather, one
        before gradients are reduced, and the messages."""
        of, inner = self.of, self.shape.layers
        if self.parts.experts:
            inner += self.shape.layers - self.shape.dense
        units = inner + 1
        gathers = units + inner * (of.zero == 3)
        calls = gathers + units * (1 + (of.replicas > 1))
        return Cost(launches=3 * gathers + units, calls=calls)

    def _gather(self, numbers: int, experts: int = 0) -> float:
        return self._of_shards("all_gather", 2, numbers, experts)

    def _reduce(self, numbers: int, experts: int = 0) -> float:
        return self._of_shards("reduce_scatter", 4, numbers, experts)

    def _of_shards(self, name: str, size: int, numbers: int, experts: int) -> float:
        """A message among shards, or among those of a rank's experts."""
        of = self.of
        group = self._group(of.shards, of.slices)
        if experts:
            group = self._group(of.shards * of.slices // of.spread, of.spread)
        numbers = numbers or experts
        return collective_seconds(name, size * numbers, group, self.place)

    def _sum(self, numbers: int, experts: int = 0) -> float:
        """Of what ranks have reduced, over the replicas."""
        of = self.of
        group = self._group(of.replicas, of.slices * of.shards)
        nbytes = 4 * self._shared(numbers, experts)
        return collective_seconds("all_reduce", nbytes, group, self.place)

    def _group(self, size: int, apart: int) -> Group:
        """Ranks that lie `apart` from each other."""
        near = max(1, min(size, self.machine.node // apart))
        return Group(size, size // near, near, near)

    def _optimizer(self, rank: int) -> float:
        experts = self._experts(rank)
        numbers = self._shared(sum(self._held(rank)) - experts, experts)
        return numbers * (self.rates.adam + self.rates.clip)

    def _host(self, cost: Cost) -> float:
        launches = cost.launches + cost.back_launches
        return launches * self.host.launch + cost.calls * self.host.call
