"""On which streams backward runs: each step on those of its forward operation.

Models: PyTorch's engine, for which a node of the graph remembers the stream that was
current when it was made. The node runs on it, after the nodes that give it gradients;
the first one also after what the caller's stream was given before `backward()`. When
all is done, the caller's stream waits for those on which gradients were stored, and for
no others. Which stream was current follows from the node's number: PyTorch numbers the
nodes of a thread as it makes them.
Leaves out: nodes that were made in another thread than the one that calls `backward()`,
which are taken for its own; the stream of a leaf, which here is that of its first use
in the graph, and on a GPU may be that of an earlier graph that is still there; and that
of a tensor's hook, which runs on the streams of the node before.
Sums of gradients from several streams wait for all of these, and not only for two.

Source: "Streaming backwards" in torch/csrc/autograd/engine.cpp of PyTorch.
"""

import contextlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable

import torch

from simgpu import _runtime as state
from simgpu._compat import execution_engine, sequence_number

Streams = tuple[tuple[int, int], ...]  # (GPU, stream) of those that are not default
_LEAF = 2**64 - 1  # the number of every node that stores a gradient
_MOST_CHANGES = 100_000  # that are remembered; of older nodes the stream is forgotten


def note_streams() -> None:
    """The current streams of this thread have changed: its next nodes are theirs."""
    thread = state.current().thread
    changes, number, now = thread.stream_changes, sequence_number(), _current()
    if changes and changes[-1][0] == number:  # no node was made in between
        changes.pop()
    if now != (changes[-1][1] if changes else ()):
        changes.append((number, now))
        if len(changes) > _MOST_CHANGES:
            del changes[: _MOST_CHANGES // 2]


def _current() -> Streams:
    streams = state.current().thread.streams
    return tuple(sorted((gpu, number) for gpu, number in streams.items() if number))


def _become(streams: Streams) -> None:
    """Make these streams current, and the default ones of all other GPUs."""
    state.current().thread.streams = dict(streams)
    note_streams()


def _wait(streams: Streams, others: Iterable[Streams]) -> None:
    """What `streams` are given from now on waits for what `others` were given."""
    clock, its = state.current().clock, dict(streams)
    for other in map(dict, others):
        for gpu in {*its, *other}:
            number, before = its.get(gpu, 0), other.get(gpu, 0)
            if number != before:
                position = clock.record(gpu, before)
                clock.stream_waits(gpu, number, position)
                clock.forget(position)


@contextlib.contextmanager
def streams_of_forward(outputs, inputs):
    """While backward runs from `outputs`, its nodes run on their own streams.

    Args:
        outputs: tensors, or the edges of the graph that stand for them.
        inputs: whose gradients are returned, and not stored.
    """
    if not state.current().thread.stream_changes:
        yield  # only default streams were ever current
        return
    caller = _current()
    graph = _Graph(outputs)
    if all(streams == caller for streams in graph.streams.values()):
        yield
        return
    run = _Run(graph, caller, bool(inputs))
    try:
        yield
    finally:
        run.end()


class _Graph:
    """The nodes behind some tensors.

    Attributes:
        roots: the nodes of the tensors themselves.
        streams: of each node.
        givers: (node, number of an input) -> the nodes that give it a gradient.
    """

    def __init__(self, outputs):
        changes = state.current().thread.stream_changes
        numbers: dict[object, int] = {}
        self.givers = defaultdict(list)
        self.roots = {node for node in map(_node_of, outputs) if node is not None}
        waiting = list(self.roots)
        while waiting:
            node = waiting.pop()
            if node in numbers:
                continue
            numbers[node] = node._sequence_nr()
            for following, position in node.next_functions:
                if following is not None:
                    self.givers[following, position].append(node)
                    waiting.append(following)
        for (node, _), givers in self.givers.items():
            if numbers[node] in (_LEAF, -1):
                numbers[node] = min(numbers[giver] for giver in givers)
        self.streams = {}
        for node, number in numbers.items():
            i = bisect_right(changes, number, key=lambda change: change[0])
            self.streams[node] = changes[i - 1][1] if i else ()


def _node_of(output):
    """Where backward begins for a tensor, or for an edge of the graph."""
    return output.grad_fn if isinstance(output, torch.Tensor) else output.node


class _Run:
    """One backward pass over a graph with several streams."""

    def __init__(self, graph: _Graph, caller: Streams, returns: bool):
        self.caller = caller
        self.begun = self.ended = False
        self.hooks = []
        self.last: set[Streams] = set()  # for which the caller waits in the end
        before = {node: set() for node in graph.streams}
        for node in graph.roots:
            before[node].add(caller)
        after = defaultdict(set)
        for (node, _), givers in graph.givers.items():
            streams = {graph.streams[giver] for giver in givers}
            before[node] |= streams
            if len(streams) > 1:  # the engine adds their gradients up
                for giver in givers:
                    after[giver] |= streams
        for node, streams in graph.streams.items():
            if returns or not node.next_functions:
                self.last.add(streams)
            self.hooks.append(node.register_prehook(self._start(streams, before[node])))
            if node in after:
                hook = self._finish(streams, after[node])
                self.hooks.append(node.register_hook(hook))

    def _start(self, streams: Streams, others: set[Streams]):
        def start(*_) -> None:
            if not self.begun:  # before the first of the callbacks for the end
                self.begun = True
                execution_engine.queue_callback(self.go_back)
            _become(streams)
            _wait(streams, others)

        return start

    def _finish(self, streams: Streams, others: set[Streams]):
        return lambda *_: _wait(streams, others)

    def go_back(self) -> None:
        """The caller goes on, after the streams that have stored gradients."""
        if not self.ended:
            self.ended = True
            _become(self.caller)
            _wait(self.caller, self.last)

    def end(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.go_back()
