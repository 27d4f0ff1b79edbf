"""The sweep's layouts, composed from dry runs of their parts."""

import contextlib
import functools
from collections import Counter

import torch
import torch.distributed as dist

import simgpu
from layouts import megatron, nanotron, replay, trace
from layouts.machines import card_of
from layouts.shapes import Layout
from layouts.tensor_parallel import BUFFERS
from simgpu._device import overhead
from simgpu._plan import schedule
from simgpu._plan.parts import on_card
from simgpu._plan.pieces import Cost, Piece, measured, passes
from simgpu._plan.schedule import Pass, Stage
from simgpu._timing.collective_cost import Group, collective_seconds
from simgpu._timing.topology import Topology

TRAINERS = {"nanotron": nanotron, "megatron": megatron, "megatron 2025": nanotron}
# Fitted, and not understood: where a pipeline spans several nodes, each collective of
# the sweep's tensor parallelism takes the host so much longer for each other rank
LATE = 0.25e-3  # seconds
# Fitted to rows of the 1B model with tp 16 and 32, pp 1: where a tensor-parallel group
# spans nodes, each step of its rings takes the cards so much longer. No all-gather
# between nodes is recorded that would tell more
FAR = 40e-6  # seconds
# Fitted to rows of the 1B model with tp 1: so much longer than a kernel that is timed
# alone take those of a run of hours, on these machines. Whether it is the clock under
# load or the kernels is not known
LOAD = 1.25
WORLD = 512
BUCKET = 25 * 2**20  # bytes of gradients in half precision, of DDP
BLOCK = 2**26  # numbers by which the optimizer is measured


def shape_of(of: Layout) -> Layout:
    """What decides what parts cost."""
    return of._replace(layers=1, accumulate=1, dp=1, pp=1, zero=0, tied=False)


def measure(shapes: set[Layout], card: str) -> dict[Layout, dict[str, Piece]]:
    """The parts of each shape; none of one that the card has no room for."""
    found: dict = {}
    (network,) = {of.network for of in shapes}

    def run():
        dist.init_process_group("nccl")
        torch.cuda.set_device(0)
        groups = {1: None}
        for of in sorted(shapes):
            if 2.5 * _logits(of) > card_of(card).total_memory:
                found[of] = {}  # the rest has no room beside two of these
                continue
            if of.tp not in groups:
                groups[of.tp] = dist.new_group(range(of.tp))
            BUFFERS.clear()
            with on_card(_numbers(of)):
                try:
                    found[of] = _parts(of, groups[of.tp])
                except torch.OutOfMemoryError:
                    found[of] = {}
            BUFFERS.clear()

    simgpu.dry_run(run, world=WORLD, card=card_of(card), network=network)
    return found


def _numbers(of: Layout) -> torch.dtype:
    return torch.float16 if of.trainer == "megatron" else torch.bfloat16


def parts_of(layouts: list[Layout]) -> dict[Layout, dict[str, Piece]]:
    """The parts of all shapes among some layouts; each is measured once."""
    shapes: dict = {}
    for of in layouts:
        shapes.setdefault((of.card, of.network), set()).add(shape_of(of))
    for (card, _), its in shapes.items():
        if missing := its - _PARTS.keys():
            _PARTS.update(measure(missing, card))
    return _PARTS


_PARTS: dict = {}


def _logits(of: Layout) -> int:
    """Bytes of the logits in float32, of which there are two at a time."""
    return 4 * of.tokens * of.micro * of.vocab // of.tp


def _parts(of: Layout, group) -> dict[str, Piece]:
    ids = torch.zeros(of.micro, of.tokens, dtype=torch.int64)
    mask = torch.ones(of.micro, of.tokens, dtype=torch.bool)
    its = TRAINERS[of.trainer]
    slices = 1 if of.trainer == "megatron" else of.tp
    shape = (of.tokens // slices, of.micro, of.hidden)
    x = torch.empty(shape).requires_grad_()
    parts = {
        "first": (its.First(of, group), (ids,)),
        "block": (its.Block(of, group), (x, mask)),
        "last": (its.Last(of, group), (x, ids, mask)),
    }
    made = {}
    for name in ("block", "first", "block", "last"):  # the first has buffers to make
        part, inputs = parts[name]
        forward, backward = passes(part, *inputs)
        weights = tuple(its.numel() for its in part.parameters())
        made[name] = Piece(forward, backward, weights)
        for its in (x, *part.parameters()):
            its.grad = None
    made["buffers"] = BUFFERS.nbytes
    made["traces"] = ()
    if of.trainer == "nanotron":
        with contextlib.suppress(torch.OutOfMemoryError):  # a chain takes more
            made["traces"] = _traces(of, group, parts)
    return made


def _traces(of: Layout, group, parts: dict) -> list[trace.Trace]:
    """Of the first part, a block and the last."""
    (first, its), (block, (_, mask)), (last, (_, *ends)) = parts.values()
    chain = [first, block, nanotron.Block(of, group), last]
    found = trace.traces(chain, [its, (mask,), (mask,), tuple(ends)])
    for part in chain:
        part.zero_grad(set_to_none=True)
    return [found[0], found[2], found[3]]


@functools.cache
def optimizer_seconds(card: str) -> dict[str, float]:
    """Seconds of a parameter, of what is done once for each number."""
    found = {}

    def run():
        torch.cuda.set_device(0)
        with on_card():
            weight, grad = torch.empty(BLOCK), torch.empty(BLOCK)
            total = torch.empty(BLOCK, dtype=torch.float32)
            owned = torch.empty(BLOCK, dtype=torch.float32)
            owned.grad = total
            adam = torch.optim.AdamW([owned], fused=True)
            adam.step()
            for name, doing in {
                "add": lambda: total.add_(grad),
                "clip": lambda: (torch.linalg.vector_norm(total), total.mul_(0.5)),
                "adam": adam.step,
                "copy": lambda: weight.copy_(owned.detach()),
                "zero": total.zero_,
            }.items():
                found[name] = measured(doing)[0].seconds / BLOCK

    simgpu.dry_run(run, world=1, card=card_of(card), steps=100)
    return found


def topology(of: Layout) -> Topology:
    nodes = max(1, of.gpus // of.node)
    return Topology(card_of(of.card), of.node, nodes, of.network)


def group(of: Layout, size: int, apart: int) -> Group:
    """Ranks that lie `apart` from each other."""
    near = max(1, min(size, of.node // apart))
    return Group(size, size // near, near, near)


class Predicted:
    """A step of a layout; each figure is computed when it is first asked for."""

    def __init__(self, of: Layout, parts: dict, host):
        self.of, self.parts, self.host = of, parts, host
        self.stages = (megatron if "megatron" in of.trainer else nanotron).stages(of)

    @functools.cached_property
    def seconds(self) -> float:
        return self.with_host(self.host)

    @functools.cached_property
    def fits(self) -> bool:
        """Whether the tensors of the fullest stage do."""
        if not self.parts:
            return False
        most = max(self.tensors(i) for i in range(self.of.pp))
        return most < card_of(self.of.card).total_memory

    @functools.cached_property
    def peak(self) -> float:
        """Bytes of the first stage: of its segments for the sweep, else of tensors."""
        if not self.parts:
            return float("inf")
        if not self.parts["traces"]:
            return self.tensors(0)
        run = self.replayed()
        return run.reserved if run else card_of(self.of.card).total_memory

    def replayed(self) -> replay.Replay | None:
        """The first stage's first steps; None if they have no room.

        With one stage the host waits for nothing in a step, and is ahead of the card by
        all that CUDA's queue holds: the ranks of a group do not start together. With
        more it is as slow as in `_seconds`, but for what is `LATE` within a node: there
        the 1B model's rows show the host ahead.
        """
        of = self.of
        first, block, last = self.parts["traces"]
        count, has_head = self.stages[0]
        chain = [first, *[block] * count, *[last] * has_head]
        paces = (replay.STALLED,) * 2
        if of.pp > 1:
            paces = self._stage(0, of.tp > of.node)[:2]
        total = card_of(of.card).total_memory - overhead.CONTEXT
        try:
            return replay.steps(
                replay.program(chain, has_head), self.weights(0),
                replay.passes(0, of.pp, of.accumulate), paces, of.pp > 1, of.dp,
                of.zero, self.parts["buffers"] // 2, total,
            )  # fmt: skip
        except torch.OutOfMemoryError:
            return None

    def with_host(self, host) -> float:
        """Seconds of a step with another host."""
        before, self.host = self.host, host
        try:
            return self._seconds() if self.parts else float("inf")
        finally:
            self.host = before

    def _pieces(self, stage: int) -> list[tuple[Piece, int]]:
        count, has_head = self.stages[stage]
        made = [(self.parts["first"], 1)] if stage == 0 else []
        made.append((self.parts["block"], count))
        return made + ([(self.parts["last"], 1)] if has_head else [])

    def weights(self, stage: int) -> list[int]:
        """Numbers of each parameter; the head is not counted twice."""
        made = []
        for piece, count in self._pieces(stage):
            made += piece.weights * count
        if self.of.tied and stage == 0 and self.stages[0][1]:
            made.remove(max(self.parts["last"].weights))
        return made

    def passes(self, stage: int) -> tuple[Cost, Cost]:
        """Forward and backward of a micro-batch through a stage."""
        forward = backward = Cost()
        for piece, count in self._pieces(stage):
            forward += piece.forward.times(count)
        for piece, count in reversed(self._pieces(stage)):
            backward += piece.backward.times(count)
        return forward, backward

    def _host(self, cost: Cost, late: bool = True) -> float:
        """Seconds of the host, with what is `LATE`."""
        of, host = self.of, self.host
        launches = cost.launches + cost.back_launches
        seconds = launches * host.launch + cost.calls * host.call
        if late and of.trainer == "nanotron" and of.pp > 1 and of.gpus > of.node:
            seconds += cost.calls * (of.tp - 1) * LATE
        return seconds

    def _card(self, cost: Cost) -> float:
        """Seconds of the card."""
        of = self.of
        if of.trainer != "nanotron":
            return cost.seconds
        far = FAR if of.tp > of.node and of.pp == 1 else 0.0
        return cost.seconds * LOAD + cost.calls * (of.tp - 1) * far

    def _stage(self, stage: int, late: bool = True) -> Stage:
        forward, backward = self.passes(stage)
        weights = self.weights(stage)
        adding = sum(weights) * optimizer_seconds(self.of.card)["add"]
        there = Pass(self._card(forward), self._host(forward, late))
        back = self._host(backward, late) + len(weights) * self.host.launch
        return Stage(there, Pass(self._card(backward) + adding, back))

    def tensors(self, stage: int) -> int:
        """Bytes of a stage's tensors at the peak."""
        of = self.of
        size = sum(self.weights(stage))
        states = 12 * size / (of.dp if of.zero else 1)
        static = 6 * size + states + self.parts["buffers"] + 2 * replay.WORKSPACE
        if of.trainer == "nanotron" and of.dp > 1 and not of.zero:
            static += 2 * size  # DDP's buckets
        forward, backward = self.passes(stage)
        waiting = min(of.pp - stage, of.accumulate)
        if of.trainer == "megatron 2025":
            # the product that makes a weight's gradient adds it to the sum, and the
            # fused loss makes its own in place: backward only gives back
            return int(static + waiting * forward.kept)
        both = forward + backward
        return int(static + (waiting - 1) * forward.kept + both.most)

    def _seconds(self) -> float:
        of = self.of
        place = topology(of)
        nbytes = 2 * of.tokens // of.tp * of.micro * of.hidden
        far = of.dp * of.tp >= of.node
        ends = Group(2, 1 + far, 2 - far, 1 if far else 2)
        message = collective_seconds("send", nbytes, ends, place)
        message += 2 * collective_seconds("send", 64, ends, place)
        message += 6 * self.host.call
        stages = tuple(self._stage(i) for i in range(of.pp))
        passes = schedule.seconds(stages, of.accumulate, message, waits=True)
        return passes + max(self._end(i, stages[i], place) for i in range(of.pp))

    def _end(self, stage: int, its: Stage, place: Topology) -> float:
        """What is done once in a step."""
        of, rates = self.of, optimizer_seconds(self.of.card)
        weights = self.weights(stage)
        size = sum(weights)
        shares = of.dp if of.zero else 1
        seconds = size * (rates["clip"] + rates["zero"])
        seconds += size / shares * (rates["adam"] + rates["copy"])
        seconds = max(seconds, 5 * len(weights) * self.host.launch)
        dp = group(of, of.dp, of.tp)
        if of.dp > 1 and size:
            # DDP sums bucket by bucket, and the sweep's one connection to the card lets
            # little run beside that
            count = 1 if of.zero else -(-2 * size // BUCKET)
            one = collective_seconds("all_reduce", 4 * size // count, dp, place)
            seconds += count * one
            if of.zero:
                for numbers, times in Counter(weights).items():
                    one = collective_seconds("all_gather", 2 * numbers, dp, place)
                    seconds += times * one
        if of.tied and of.pp > 1 and stage in (0, of.pp - 1):
            pair = group(of, 2, of.dp * of.tp * (of.pp - 1))
            nbytes = 4 * of.vocab // of.tp * of.hidden
            seconds += collective_seconds("all_reduce", nbytes, pair, place)
        return seconds
