"""What PyTorch's allocator takes of a card in the first steps of the sweep's trainer.

A stage's requests are put together from those of its parts (`trace.py`), in the order
of its 1F1B schedule, between those for parameters, gradients and the optimizer, and are
handed to the simulator's own allocator. So what is left over between blocks is found,
and not fitted. Sources: nanotron's trainer.py, optim/zero.py,
optim/gradient_accumulator.py and distributed.py at the time of the sweep.
"""

from collections import deque
from typing import NamedTuple

from layouts.trace import Trace
from simgpu._device.allocator import CachingAllocator
from simgpu._plan.schedule import Pass, order

QUEUE = 1024  # launches by which a host may be ahead of its card: CUDA's queue
BUCKET = 25 * 2**20  # bytes of gradients, after which a bucket of DDP is closed
WORKSPACE = 2**25  # cuBLAS has one for each thread, on cards from H100 on
# In the first step the next stage has its kernels and connections to make, once the
# first micro-batch has come: the card is kept by its second message, the host goes on
STALLED = Pass(1e6, 0.0)
STEPS = 2  # in the second the optimizer's states are there


class Program(NamedTuple):
    """A micro-batch of a stage: each event is a place and bytes, 0 to give it back.

    Attributes:
        forward: (place, bytes, launches so far, whether a collective had it), and those
            of `backward`.
        launches: of both passes.
        places: how many blocks there are in all.
        weights: places of the gradients of parameters.
    """

    forward: list[tuple[int, int, int, bool]]
    backward: list[tuple[int, int, int, bool]]
    launches: tuple[int, int]
    places: int
    weights: list[int]


def program(parts: list[Trace], has_head: bool) -> Program:
    """A stage's micro-batch, of its parts in the order of forward.

    Without a head its output is sent on, and the gradient of that received.
    """
    starts, total = [], 0
    for part in parts:
        pair = []
        for way in (part.forward, part.backward):
            pair.append(total)
            total += sum(e.nbytes > 0 for e in way)
        starts.append(pair)
    received = total
    total += not has_head
    outs = [starts[i][0] + part.out[0] for i, part in enumerate(parts)]
    grads = [0] * (len(parts) + 1)  # of the output of the part before each
    grads[len(parts)] = received
    for i in reversed(range(len(parts))):
        own = parts[i].grad
        grads[i] = starts[i][1] + own if own >= 0 else grads[i + 1]

    def placed(i: int, event) -> int:
        if not event.piece:
            return starts[i][event.backward] + event.number
        return grads[i + 1] if event.piece > 0 else outs[i - 1]

    ways: list[list] = [[], []]
    done = [0, 0]
    for back, numbers in enumerate((range(len(parts)), reversed(range(len(parts))))):
        if back and not has_head:
            ways[1].append((received, parts[-1].out[1], 0, False))
        for i in numbers:
            way = parts[i].backward if back else parts[i].forward
            ways[back] += [(placed(i, e), e.nbytes, done[back] + e.launches, e.sent)
                           for e in way]  # fmt: skip
            done[back] += parts[i].launches[back]
        if not back and not has_head:
            ways[0].append((outs[-1], 0, done[0], True))
    weights = [starts[i][1] + n for i, part in enumerate(parts) for n in part.weights]
    return Program(ways[0], ways[1], tuple(done), total, weights)


def buckets(weights: list[int]) -> list[int]:
    """Bytes of DDP's buckets, of the numbers of each parameter in half precision."""
    made, size = [], 0
    for numbers in reversed(weights):
        size += 2 * numbers
        if size >= BUCKET:
            made.append(size)
            size = 0
    return made + [size] * (size > 0)


class _Uncounted:
    """Stands for the statistics of a single pool, which nobody reads here."""

    def _nothing(self, *_) -> None:
        pass

    block_allocated = block_released = block_inactive = _nothing
    inactive_changed = segment_allocated = segment_released = _nothing


class Replay:
    """Hands the requests of one rank to an allocator.

    What a collective has had is free again only once the card has come so far
    (`record_stream`, as PyTorch's NCCL calls it up to 2.6). How far the host is ahead
    follows from what both take, and from CUDA's queue.

    Args:
        total: bytes of the card that PyTorch may have.
    """

    def __init__(self, total: int):
        self.memory = CachingAllocator(0, total)
        self.memory.small.stats = self.memory.large.stats = _Uncounted()
        self.launches, self.host, self.card = 0, 0.0, 0.0
        # (launches, the card's seconds, block) in the order of giving back
        self.late: deque = deque()

    def take(self, nbytes: int):
        return self.memory._malloc(nbytes, 0) if nbytes else None

    def give_back(self, block) -> None:
        if block is not None:
            self.memory._take_back(block)

    def waits(self) -> None:
        """The host waits for the card."""
        self.host = self.card = max(self.host, self.card)
        while self.late:
            self.memory._take_back(self.late.popleft()[2])

    def run(self, events: list, launches: int, blocks: list, pace: Pass) -> None:
        """A pass of a micro-batch; the card works in step with its launches."""
        late, start = self.late, self.launches
        take, give_back = self.memory._malloc, self.memory._take_back
        host, card = self.host, self.card
        each_host, each_card = pace.host / launches, pace.card / launches
        before = 0
        for place, nbytes, done, sent in events:
            new = done - before
            if new:
                before = done
                host += new * each_host
                card = max(card, host) + new * each_card
            if nbytes:
                while late and (
                    late[0][1] <= host or late[0][0] + QUEUE < start + done
                ):
                    host = max(host, late[0][1])
                    give_back(late.popleft()[2])
                blocks[place] = take(nbytes, 0)
            elif sent:
                late.append((start + done, card, blocks[place]))
            else:
                give_back(blocks[place])
        self.host = host + (launches - before) * each_host
        self.card = max(card, self.host) + (launches - before) * each_card
        self.launches = start + launches

    @property
    def reserved(self) -> int:
        return self.memory.both.reserved_bytes.current

    @property
    def most(self) -> int:
        """Bytes of blocks at the peak."""
        return self.memory.both.allocated_bytes.peak


def steps(
    its: Program, weights: list[int], ahead: list[bool], paces: tuple[Pass, Pass],
    waits: bool, dp: int, zero: int, buffers: int, total: int,
) -> Replay:  # fmt: skip
    """The first steps of a stage.

    Args:
        its: a micro-batch.
        weights: numbers of each parameter.
        ahead: whether each pass of a step is one forward.
        paces: seconds of the card and the host, forward and backward.
        waits: whether the host waits for the card before each backward pass.
        dp: ranks that sum their gradients.
        zero: whether these share the optimizer's states.
        buffers: bytes of each of the two buffers that all layers share.
        total: bytes that PyTorch may have of the card.
    """
    run, size = Replay(total), sum(weights)
    owned = [-(-numbers // dp) if zero else numbers for numbers in weights]
    for numbers in weights:
        run.take(2 * numbers)
    if dp > 1 and not zero:
        for nbytes in buckets(weights):
            run.take(nbytes)
    run.take(4 * size)  # sums of gradients
    run.take(4 * sum(owned))
    used: set[bool] = set()  # passes that have taken a workspace and a buffer
    for step in range(STEPS):
        waiting: deque = deque()
        for number, forward in enumerate(ahead):
            if forward not in used:
                used.add(forward)
                run.take(buffers)
                run.take(WORKSPACE)
            if forward:
                blocks: list = [None] * its.places
                waiting.append(blocks)
                stalls = waits and not step and number > 1 and ahead[number - 1]
                run.run(its.forward, its.launches[0], blocks,
                        STALLED if stalls else paces[0])  # fmt: skip
                continue
            if waits:
                run.waits()
            blocks = waiting.popleft()
            run.run(its.backward, its.launches[1], blocks, paces[1])
            for place in its.weights:  # each is added to its sum
                run.give_back(blocks[place])
            run.launches += len(weights)
        run.waits()
        if not step:
            for numbers in owned:
                run.take(4 * numbers)
                run.take(4 * numbers)
        if zero and dp > 1:
            part = run.take(2 * sum(owned))
            parts = [run.take(2 * sum(owned)) for _ in range(dp)]
            whole = run.take(2 * sum(owned) * dp)
            for block in (whole, part, *parts):
                run.give_back(block)
        run.waits()  # it reads the loss
    return run


def passes(stage: int, stages: int, count: int) -> list[bool]:
    """Those of a step, of no more micro-batches than change anything."""
    most = stages - stage + 1
    return [forward for forward, *_ in order(stage, stages, min(count, most))]
