"""`torch.cuda.CUDAGraph`, and with it `torch.cuda.graph` and `make_graphed_callables`.

Models: PyTorch's C++ class below its own Python: a capture notes what its streams are
given and runs nothing, its memory comes from a private pool, a replay is one launch.
Whoever waits for a GPU meanwhile loses the capture, in CUDA's words, unless its mode
allows that. Leaves out: raw handles, conditional nodes, what `torch.compiler` does with
graphs.

Source: aten/src/ATen/cuda/CUDAGraph.cpp of PyTorch.
"""

import functools
import itertools
import os
import warnings
from typing import Any

import torch
import torch.cuda.graphs

from simgpu import _runtime as state
from simgpu._api.patch import Patch, patches
from simgpu._api.rebased import rebased
from simgpu._device.private_pools import new_pool_id
from simgpu._dispatch import device_asserts, sanitizing
from simgpu._dispatch.captured_call import CapturedCall, current_capture
from simgpu._dispatch.graph_values import Steps
from simgpu._dispatch.named_devices import gpu_named
from simgpu._errors import NotSimulated
from simgpu._fusing.call import FusingCall
from simgpu._timing.captured import Capture, with_graphs

_MODES = ("global", "thread_local", "relaxed")
_EMPTY = (
    "The CUDA Graph is empty. This usually means that the graph was attempted to be "
    "captured on wrong device or stream."
)
_launches = itertools.count(1)


class _UseOfPool:
    """A graph's use of its pool of memory, which ends with it."""

    __slots__ = ("_pools", "_id", "_process")

    def __init__(self, pools, pool_id: tuple[int, int]):
        self._pools, self._id, self._process = pools, pool_id, os.getpid()

    def __del__(self, getpid=os.getpid) -> None:  # Python may be about to end
        if self._process == getpid():  # a forked child has none of the GPUs
            self._pools.release(self._id)


class _Graph:
    """What is C++ in PyTorch, below its Python class."""

    def __new__(cls, keep_graph: bool = False):
        self = object.__new__(cls)
        self._begin(keep_graph)
        return self

    def __init__(self, *args, **kwargs):
        pass

    def _begin(self, keep_graph: bool) -> None:
        self._keeps_template = self._may_again = keep_graph
        self._generators: list = []
        self._forget()

    def _forget(self) -> None:
        self._capture: Capture | None = None  # under way, or over
        self._nodes = None  # once it is over
        self._steps: Steps | None = None
        self._pool: tuple[int, int] | None = None
        self._use: _UseOfPool | None = None
        self._is_ready = False  # instantiated
        self._runtime = None

    # -- capture -----------------------------------------------------------------------

    def capture_begin(self, pool=None, capture_error_mode: str = "global") -> None:
        """The current stream is captured from now on.

        Raises:
            RuntimeError: if it owns a graph, in the default stream, for other modes.
            torch.AcceleratorError: if the stream is captured already.
        """
        if capture_error_mode not in _MODES:
            raise RuntimeError(
                "Unknown capture error mode. Expected `global`, `thread_local`, or "
                f"`relaxed`, got {capture_error_mode}"
            )
        if self._is_ready:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. To capture a "
                "new graph, create a new instance."
            )
        runtime, gpu = state.current(), gpu_named()
        stream = runtime.stream_of(gpu)
        if stream == 0:
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after "
                "capture, it's ok to replay them on the default stream.)"
            )
        clock = with_graphs(runtime.clock)
        capture = Capture(gpu, stream, capture_error_mode)
        chosen = tuple(pool) if pool is not None else new_pool_id(user=False)
        clock.begin(capture)
        try:
            gpu.memory.private.begin(
                chosen, lambda s: clock.captures.get((gpu.index, s)) is capture
            )
        except RuntimeError:
            clock.end(capture)
            raise
        self._runtime, self._capture, self._pool = runtime, capture, chosen
        self._nodes = self._use = self._steps = None  # of a capture before
        if _has_values(runtime):
            generators = [gpu.generator, *self._generators]
            blocks = gpu.memory.private.pools[chosen]
            capture.steps = self._steps = Steps(
                runtime.graph_memory, blocks, generators
            )
            runtime.call_kind = CapturedCall

    def capture_end(self) -> None:
        """Capture no more, and be ready for replays.

        Raises:
            RuntimeError: on another stream than the one on which it began.
            torch.AcceleratorError: if the capture was lost, or a stream is not back.
        """
        self.capture_end_pre()
        if not self._keeps_template:
            self.instantiate()
        self.capture_end_post()

    def capture_end_pre(self) -> None:
        capture, runtime = self._capture, self._runtime
        if capture is None or runtime is None or self._nodes is not None:
            raise RuntimeError("capture_end() called before capture_begin().")
        gpu = capture.gpu
        here = gpu_named()
        if (here, runtime.stream_of(here)) != (gpu, capture.stream):
            raise RuntimeError("Capture must end on the same stream it began on.")
        try:
            self._nodes = capture.finish()
        finally:
            runtime.clock.end(capture)
            if not runtime.clock.captures and runtime.call_kind is CapturedCall:
                runtime.call_kind = runtime.usual_kind
            gpu.memory.private.end(self._pool)
            use = _UseOfPool(gpu.memory.private, self._pool)
            if self._steps is not None:
                self._steps.roll_back()
        self._use = use  # if the capture is lost, it ends here
        if not self._nodes:
            warnings.warn(_EMPTY, stacklevel=4)

    def capture_end_post(self) -> None:
        """PyTorch destroys the template here, of which we have none."""

    def instantiate(self) -> None:
        if self._nodes is None:
            raise RuntimeError(
                "capture_end() must have been called before calling instantiate"
            )
        if self._is_ready and not self._may_again:
            raise RuntimeError(
                "instantiate() is intended to be called by the user only when "
                "keep_graph=true"
            )
        self._is_ready = True

    @property
    def _has_graph_exec(self) -> bool:
        return self._is_ready

    # -- replay ------------------------------------------------------------------------

    def replay(self) -> None:
        """Run all of it on the current stream, as one launch.

        Raises:
            RuntimeError: if nothing was captured.
            NotSimulated: within a capture, and if memory is gone that it uses.
        """
        __tracebackhide__ = True
        if self._nodes is None or self._capture is None or self._runtime is None:
            raise RuntimeError(
                "Called CUDAGraph::replay without a preceding successful capture."
            )
        if not self._is_ready:
            self.instantiate()
        runtime, gpu = self._runtime, self._capture.gpu
        stream = runtime.stream_of(gpu)
        clock = runtime.clock
        if (gpu.index, stream) in clock.captures:
            raise NotSimulated("replaying a CUDA graph while another is captured")
        if self._steps is not None:
            self._note_uses(runtime, gpu, stream)
            with runtime.random_lock:
                self._steps.replay(
                    functools.partial(device_asserts.fail, runtime, gpu.index)
                )
        nodes, first = self._nodes, self._capture.stream
        clock.replay(gpu, stream, first, nodes, next(_launches))
        for call in self._capture.after_replay:
            call()

    def _note_uses(self, runtime, gpu, stream: int) -> None:
        """Tell the sanitizer what a replay reads and writes."""
        sanitizer = runtime.sanitizer
        if sanitizer.watching:
            key, (reads, writes) = (gpu.index, stream), self._steps.uses()
            sanitizing.access(sanitizer, "a CUDA graph", key, reads, writes)
            sanitizing.keep_old_values(sanitizer, key, writes)

    def reset(self) -> None:
        """Forget what was captured; its memory may be given back."""
        self._forget()

    # -- what else there is ------------------------------------------------------------

    def pool(self) -> tuple[int, int]:
        if self._nodes is None:
            raise RuntimeError(
                "Called CUDAGraph::pool() without a preceding successful capture."
            )
        return self._pool

    def pools(self) -> list[tuple[int, int]]:
        return [self.pool()]

    def register_generator_state(self, generator: torch.Generator) -> None:
        """Let the graph draw from a generator of the GPU, too."""
        self._generators.append(generator)

    def enable_debug_mode(self) -> None:
        self._may_again = True

    def raw_cuda_graph(self) -> int:
        raise NotSimulated("CUDAGraph.raw_cuda_graph")

    def raw_cuda_graph_exec(self) -> int:
        raise NotSimulated("CUDAGraph.raw_cuda_graph_exec")

    def debug_dump(self, *args, **kwargs) -> None:
        raise NotSimulated("CUDAGraph.debug_dump")

    def _retain_pool(self, pool) -> None:
        raise NotSimulated("CUDAGraph._retain_pool")

    def begin_capture_to_if_node(self, *args) -> None:
        raise NotSimulated("CUDAGraph.begin_capture_to_if_node")

    def end_capture_to_conditional_node(self, *args) -> None:
        raise NotSimulated("CUDAGraph.end_capture_to_conditional_node")


CUDAGraph: Any = rebased(torch.cuda.graphs.CUDAGraph, _Graph)


def _has_values(runtime) -> bool:
    """Whether a replay has anything to compute: not in dry runs and estimates."""
    return runtime.call_kind in (None, FusingCall, CapturedCall)


def is_current_stream_capturing() -> bool:
    """Whether a CUDA graph is captured on the current stream."""
    return current_capture() is not None


_raw_begin = torch.cuda.graph.__init__


def _begin_context(self, *args, **kwargs) -> None:
    """`torch.cuda.graph(...)`, for which PyTorch makes a stream once for all."""
    theirs = torch.cuda.graph
    stream: Any = theirs.default_capture_stream
    if stream is not None and not stream._gpu.alive:
        theirs.default_capture_stream = None
    _raw_begin(self, *args, **kwargs)


def rows() -> list[Patch]:
    """Their part of the table of replacements."""
    why, ask = "graphs are simulated", is_current_stream_capturing
    return [
        *patches(torch.cuda, why, CUDAGraph=CUDAGraph, is_current_stream_capturing=ask),
        *patches(torch.cuda.graphs, why, CUDAGraph=CUDAGraph,
                 _cuda_isCurrentStreamCapturing=ask),
        *patches(torch.cuda.graph, "its stream is of GPUs that may be gone",
                 __init__=_begin_context),
    ]  # fmt: skip
