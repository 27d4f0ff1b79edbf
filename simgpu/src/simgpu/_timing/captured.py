"""CUDA graphs on the clock: a capture notes work, and a replay runs all of it at once.

Models: the streams that are part of a capture, which grow by events and have to come
back; what a capture forbids, and that it is lost then; a replay as one launch on one
stream, in which each kernel starts once those are done that it waits for. Leaves out:
collectives and copies between GPUs, which are refused; streams of several GPUs; the
time of ending a capture and of the first replay.

What a launch costs on the host: 2.5 µs and 1 ns for each kernel. Source: NVIDIA,
Constant Time Launch for Straight-Line CUDA Graphs (2024), for straight lines on Ampere;
graphs with branches cost more there.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from simgpu._cuda_errors import words_of_cuda
from simgpu._errors import NotSimulated
from simgpu._timing import cost
from simgpu._timing.clock import Clock
from simgpu._timing.engine import book_together
from simgpu._timing.events import Event, StreamPosition
from simgpu._timing.meeting import Key

if TYPE_CHECKING:
    from simgpu._device.gpu import Gpu

LAUNCH = 2.5e-6  # seconds of the host for any graph, and ...
LAUNCH_OF_NODE = 1e-9  # ... for each kernel in it

NOT_PINNED = (
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU "
    "tensor is pinned. Please use tensor.pin_memory() or allocate the tensor with "
    "pin_memory=True."
)
_FORBIDDEN = (
    "operation not permitted when stream is capturing",
    "cudaErrorStreamCaptureUnsupported",
)
_LOST = (
    "operation failed due to a previous error during capture",
    "cudaErrorStreamCaptureInvalidated",
)
_OF_CAPTURE = (
    "operation not permitted on an event last recorded in a capturing stream",
    "cudaErrorCapturedEvent",
)
_APART = (
    "dependency created on uncaptured work in another stream",
    "cudaErrorStreamCaptureIsolation",
)
_MERGED = (
    "operation would result in a merge of separate capture sequences",
    "cudaErrorStreamCaptureMerge",
)
_NOT_BACK = (
    "capturing stream has unjoined work",
    "cudaErrorStreamCaptureUnjoined",
)
_TWICE = (
    "the operation cannot be performed in the present state",
    "cudaErrorIllegalState",
)


def _refusal(what: str, name: str) -> torch.AcceleratorError:
    return torch.AcceleratorError(words_of_cuda(what, name))


class Node(NamedTuple):
    """A kernel or a copy in a graph."""

    kind: str  # "kernel" or "copy"
    name: str
    seconds: float
    share: float  # of the GPU that it takes up
    nbytes: int
    flops: int
    stream: int  # on which it was captured
    after: tuple[int, ...]  # nodes that it waits for
    source: "Gpu | None" = None  # of a copy
    target: "Gpu | None" = None


class _Within:
    """What an event in a capture stands for, in place of collectives before it."""

    def __init__(self, capture: "Capture", after: tuple[int, ...]):
        self.capture, self.after = capture, after

    def __iter__(self):
        """Who wants to wait for it outside of the capture is refused."""
        raise _refusal(*_OF_CAPTURE)


class Capture:
    """What streams are given while they are captured.

    Args:
        gpu: whose streams.
        stream: the number of the one on which it begins and ends.
        mode: "global", "thread_local" or "relaxed": whom it forbids to wait.
    """

    def __init__(self, gpu: "Gpu", stream: int, mode: str):
        self.gpu, self.stream, self.mode = gpu, stream, mode
        self.thread = threading.get_ident()
        self.nodes: list[Node] = []
        # stream -> the nodes that what it is given next waits for
        self.last: dict[int, tuple[int, ...]] = {stream: ()}
        self.is_lost = False  # by something that is forbidden
        self.steps: Any = None  # what computes the values of a replay, a layer above
        self.after_replay: list[Callable[[], None]] = []  # called after each

    def add(self, stream: int, kind: str, name: str, seconds: float, share: float,
            nbytes: int, flops: int, *ends: "Gpu | None") -> None:  # fmt: skip
        """Note work of a stream.

        Raises:
            torch.AcceleratorError: if the capture is lost.
        """
        self.check()
        after = self.last[stream]
        self.last[stream] = (len(self.nodes),)
        node = Node(kind, name, seconds, share, nbytes, flops, stream, after, *ends)
        self.nodes.append(node)

    def add_to_last(self, stream: int, seconds: float, nbytes: int, flops: int) -> None:
        """Note more work of the kernel that a stream was given last."""
        self.check()
        for i in self.last[stream]:
            node = self.nodes[i]
            self.nodes[i] = node._replace(
                seconds=node.seconds + seconds, nbytes=node.nbytes + nbytes,
                flops=node.flops + flops,
            )  # fmt: skip

    def check(self) -> None:
        """Whether it goes on.

        Raises:
            torch.AcceleratorError: if it is lost.
        """
        if self.is_lost:
            raise _refusal(*_LOST)

    def lose(self, what: tuple[str, str] = _FORBIDDEN) -> torch.AcceleratorError:
        """Something forbidden was done: what to raise."""
        if self.is_lost:
            return _refusal(*_LOST)
        self.is_lost = True
        return _refusal(*what)

    def finish(self) -> list[Node]:
        """The nodes, once all streams have come back to the first.

        Raises:
            torch.AcceleratorError: if they have not, or it is lost.
        """
        self.check()
        found, left = set(), list(self.last[self.stream])
        while left:
            if (i := left.pop()) not in found:
                found.add(i)
                left += self.nodes[i].after
        if len(found) < len(self.nodes):
            raise _refusal(*_NOT_BACK)
        return self.nodes


class GraphClock(Clock):
    """What a clock becomes with the first CUDA graph."""

    captures: dict[Key, Capture]  # by (GPU, stream)

    def begin(self, capture: Capture) -> None:
        """A stream is captured from now on.

        Raises:
            torch.AcceleratorError: if it is already.
        """
        key = capture.gpu.index, capture.stream
        if key in self.captures:
            raise self.captures[key].lose(_TWICE)
        self.captures[key] = capture

    def end(self, capture: Capture) -> None:
        """Its streams run again what they are given."""
        for key, its in list(self.captures.items()):
            if its is capture:
                del self.captures[key]

    # -- work --------------------------------------------------------------------------

    def _launch(self, gpu, stream, name, seconds, share, nbytes, flops, more=False):
        capture = self.captures.get((gpu.index, stream))
        if capture is None:
            super()._launch(gpu, stream, name, seconds, share, nbytes, flops, more)
            return
        with self.lock:
            if more:
                capture.add_to_last(stream, seconds, nbytes, flops)
                return
            self.host += self.launch
            capture.add(stream, "kernel", name, seconds, share, nbytes, flops)

    def copy(self, source, target, nbytes, streams, pinned=False, wait=True):
        ends = [gpu for gpu in (source, target) if gpu is not None]
        keys = [(gpu.index, s) for gpu, s in zip(ends, streams, strict=True)]
        capture = self._capture_of(keys)
        if capture is None:
            if len(ends) == 1 and wait:
                self.forbid_waiting()
            super().copy(source, target, nbytes, streams, pinned, wait)
            return
        if len(ends) == 2:
            capture.is_lost = True
            raise NotSimulated("a copy between GPUs in a CUDA graph")
        if source is None and not pinned:
            raise RuntimeError(NOT_PINNED)
        if wait:
            raise capture.lose()
        with self.lock:
            self.host += self.launch
            names = (gpu.name if gpu else "cpu" for gpu in (source, target))
            seconds = cost.copy_seconds(source, target, nbytes, pinned)
            capture.add(streams[0], "copy", " to ".join(names), seconds, 1.0, nbytes, 0,
                        source, target)  # fmt: skip

    def meet(self, gpu, stream, behind, name, nbytes, seconds, beside=None):
        capture = self._capture_of([(gpu.index, stream), (gpu.index, behind)])
        if capture is not None:
            capture.is_lost = True
            raise NotSimulated(
                f"{name} in a CUDA graph",
                "Capture what is between collectives, and call these as before.",
            )
        return super().meet(gpu, stream, behind, name, nbytes, seconds, beside)

    def _capture_of(self, keys: list[Key]) -> Capture | None:
        return next((self.captures[k] for k in keys if k in self.captures), None)

    # -- events ------------------------------------------------------------------------

    def record(self, index: int, stream: int) -> StreamPosition:
        capture = self.captures.get((index, stream))
        if capture is None:
            return super().record(index, stream)
        with self.lock:
            capture.check()
            self.recorded += 1
            within = _Within(capture, capture.last[stream])
            return StreamPosition(0.0, self.recorded, self, within)

    def stream_waits(self, index: int, stream: int, position: StreamPosition) -> None:
        if position.clock is not self:
            return
        capture = self.captures.get((index, stream))
        within = position.after
        if not isinstance(within, _Within):
            if capture is not None:
                raise capture.lose(_APART)
            super().stream_waits(index, stream, position)
            return
        with self.lock:
            if within.capture not in self.captures.values():
                raise _refusal(*_OF_CAPTURE)
            if capture not in (None, within.capture):
                raise capture.lose(_MERGED)
            if index != within.capture.gpu.index:
                within.capture.is_lost = True
                raise NotSimulated("a CUDA graph of several GPUs")
            capture = self.captures[index, stream] = within.capture
            before = capture.last.get(stream, ())
            capture.last[stream] = tuple(dict.fromkeys((*before, *within.after)))

    # -- replays -----------------------------------------------------------------------

    def replay(self, gpu: "Gpu", stream: int, of: int, nodes: Sequence[Node],
               number: int) -> None:  # fmt: skip
        """Launch a graph on a stream of `gpu`.

        Args:
            gpu: where it runs.
            stream: the number of the stream.
            of: the number of the stream on which the capture began and ended.
            nodes: that were captured.
            number: of the launch, which tells the work of two launches apart.
        """
        key = gpu.index, stream
        self.settle([key])
        with self.lock:
            launched = self.host
            self.host = launched + LAUNCH + LAUNCH_OF_NODE * len(nodes)
            ready = max(self.host + self.start, self.done.get(key, 0.0))
            ends: list[float] = []
            for node in nodes:
                first = max([ready, *(ends[i] for i in node.after)])
                start, end = self._book(gpu, node, first)
                ends.append(end)
                where = stream if node.stream == of else node.stream
                source = target = ""
                if node.kind == "copy":
                    source, target = node.name.split(" to ")
                self._log(
                    Event(node.kind, node.name, gpu.name, start, end, node.nbytes,
                          node.flops, source, target, where, launched, graph=number)
                )  # fmt: skip
            self.done[key] = max([ready, *ends])

    def _book(self, gpu: "Gpu", node: Node, ready: float) -> tuple[float, float]:
        """When work of a graph that is ready at `ready` starts and ends."""
        seconds = node.seconds
        if node.kind == "copy":
            engines = self._copy_engines(node.source, node.target)
            start = book_together(engines, ready, seconds)
        else:
            if gpu.index in self.beside and node.share > 1 / 2:
                seconds = self._beside_collectives(gpu, ready, seconds)
            start = self.compute[gpu.index].book(ready, seconds, node.share)
        return start, start + seconds

    # -- what is forbidden -------------------------------------------------------------

    def forbid_waiting(self, index: int | None = None) -> None:
        here = threading.get_ident()
        for capture in self.captures.values():
            may = capture.mode == "relaxed" or (
                capture.mode == "thread_local" and capture.thread != here
            )
            if not may or capture.gpu.index == index:
                raise capture.lose()

    def forbid_waiting_for(self, index: int, stream: int) -> None:
        if (capture := self.captures.get((index, stream))) is not None:
            raise capture.lose()
        self.forbid_waiting()


def with_graphs(clock: Clock) -> GraphClock:
    """The clock, which knows graphs from now on."""
    if not isinstance(clock, GraphClock):
        clock.captures = {}
        clock.__class__ = GraphClock
    return clock
