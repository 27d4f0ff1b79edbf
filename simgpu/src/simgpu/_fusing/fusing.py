"""The kernels that `torch.compile` makes of chains of operations.

Models, in compiled code: a pointwise operation, or one that goes along rows (a softmax,
a norm), takes no kernel and no memory until its result is needed: by a matrix product
or whatever else is no such operation, by a reduction, or as a result of the compiled
code. Then one kernel reads what it comes from and writes it. Kernels with the same
elements that read the same are one, also where a product stands between them that
neither needs. What only backward needs is computed there again from what it comes
from, which is kept. A result of which two kernels are made, and which comes from more
than four tensors in memory, is written by the first.
Leaves out: Inductor's choice of block sizes, products with a fused end, CUDA graphs,
`_foreach` operations (which count as without compiling), what is read twice because a
row is long, sums that are kept in place of two addends that nobody else needs, and the
time of compiling.

Source: torch/_inductor/scheduler.py (which nodes are fused), config.py
(`realize_reads_threshold`) and torch/_functorch/partitioners.py (what is kept for
backward) of PyTorch 2.13. How near that comes is in `tests/test_dry_fuse.py`.
"""

import threading
import weakref
from collections import deque
from collections.abc import Iterable

import torch

from simgpu._device.gpu import Gpu
from simgpu._dispatch.kernel_work import bytes_in
from simgpu._dispatch.placement import memory_of, place_all, storage_of, tensors_in
from simgpu._fusing import fusible
from simgpu._fusing.kernels import (
    EACH,
    ROW,
    Kernel,
    Lazy,
    Mark,
    Node,
    Way,
    lazy_of,
    source_of,
)
from simgpu._timing.kernel_cost import Work

_REUSED = 4  # `realize_reads_threshold`: what is read for a result that is used again
_RECENT = 8  # kernels that one more operation may still join
_DEEPEST = 200  # operations in a chain that is not written


class Fusing:
    """The compiled code of a program.

    Attributes:
        region: what runs now is compiled; None where nothing is.
        thread: in which it does; what other threads run meanwhile is not.
    """

    def __init__(self, runtime):
        self.runtime = runtime
        self.region: object = None
        self.thread = 0
        self._made: list[weakref.ref[Lazy]] = []  # in this region
        self._held: list[Node] = []  # with marks that a later kernel may need
        self._number = self._place = 0
        self._lock = threading.RLock()  # a program's threads come in turn
        self._open: list[Kernel] = []  # not launched yet
        self._recent: deque[Kernel] = deque(maxlen=_RECENT)
        # mark -> place of the kernel that wrote it; + 0.5 where the kernel
        # must have ended before anybody can read it
        self._born: dict[Mark, float] = {}

    # -- regions -----------------------------------------------------------------------

    def enter(self, region: object) -> None:
        self.region, self.thread = region, threading.get_ident()

    def is_inside(self) -> bool:
        """Whether what this thread runs is compiled."""
        return self.region is not None and self.thread == threading.get_ident()

    def leave(self, results: Iterable[torch.Tensor] | None) -> None:
        """The end of a region.

        Args:
            results: that are written now; None: all that are left.
        """
        with self._lock:
            if results is None:
                lazies = [lazy() for lazy in self._made]
            else:
                lazies = [lazy_of(result) for result in results]
            for lazy in lazies:
                if lazy is not None:
                    self.write(lazy)
            self.region = None
            self._launch()

    def _launch(self) -> None:
        """What was collected are kernels now."""
        run = self.runtime.clock.kernel
        for kernel in self._open:
            work = Work(kernel.nbytes, 0, kernel.numel)
            run(kernel.gpu, kernel.stream, kernel.name, work)
            if kernel.in_steps:
                run(kernel.gpu, kernel.stream, f"{kernel.name} (sums)", Work(0))
            kernel.launched = True
        self._open.clear()
        if self.region is None:
            for node in self._held:
                node.held = None
            self._held.clear()
            self._made.clear()
            self._recent.clear()
            self._born.clear()

    # -- operations --------------------------------------------------------------------

    def takes(self, call) -> bool:
        """Whether a call that begins is fused; else what it reads is written."""
        operation = call.operation
        if operation.silent or operation.in_parts and operation.name != "_to_copy":
            return False
        inside = self.is_inside()
        if inside and fusible.is_fused(call):
            return True
        with self._lock:
            for tensor in call.tensors:
                lazy = lazy_of(tensor)
                if lazy is not None:
                    self.write(lazy)
            if self._open:
                self._launch()
            if inside and fusible.breaks_graph(call):
                self._recent.clear()
        return False

    def write_now(self, lazy: Lazy) -> None:
        """The program asks where a result is."""
        with self._lock:
            self.write(lazy)
            self._launch()

    def run(self, call, gpu: Gpu, out) -> None:
        """A call that is fused has the result `out`."""
        with self._lock:
            self._run(call, gpu, out)

    def _run(self, call, gpu: Gpu, out) -> None:
        name = call.operation.name
        outputs = tensors_in(out if isinstance(out, (tuple, list)) else (out,))
        new = [t for t in outputs if getattr(storage_of(t), "_simgpu", None) is None]
        if not new:
            self._change(call, gpu, outputs)
            return
        if fusible.is_reduction(call, new):
            later = []
        elif name in fusible.ROWS:
            later = [t for t in new if t.numel() >= call.tensors[0].numel()]
        elif name in fusible.DRAWS:
            later = new[:1]
        else:
            later = new
        sources = fusible.sources(call, outputs)
        at_once = [t for t in new if all(t is not other for other in later)]
        if at_once:
            place_all(at_once, gpu)
            drawn = name in fusible.DRAWS
            way = EACH if drawn else fusible.way_of(call, at_once)
            self._write_at_once(call, gpu, at_once, () if drawn else sources, way)
            if later and ("backward" not in name or "batch_norm" in name):
                sources += tuple(map(source_of, at_once))
        for tensor in later:
            self._make_lazy(tensor, gpu, name, sources)

    def _change(self, call, gpu: Gpu, outputs: list[torch.Tensor]) -> None:
        """In place: what is there is written first, in the same kernel if it can be."""
        written = call.tensors[:1]
        lazy = lazy_of(written[0])
        if lazy is not None:
            self.write(lazy)
        sources = fusible.sources(call, outputs)
        self._write_at_once(call, gpu, written, sources, EACH)

    def note_written(self, tensors: Iterable[torch.Tensor]) -> None:
        """A kernel that is not fused has written tensors."""
        self._place += 1
        for tensor in tensors:
            memory = memory_of(tensor)
            if memory is not None:
                self._born[weakref.ref(memory)] = self._place

    def _node(self, name: str, numel: int, sources: tuple) -> Node:
        self._number += 1
        return Node(name, numel, sources, self._number)

    def _make_lazy(self, tensor, gpu: Gpu, name: str, sources: tuple) -> None:
        storage = storage_of(tensor)
        node = self._node(name, tensor.numel(), sources)
        lazy = storage._simgpu = Lazy(gpu, storage.nbytes(), node)
        self._made.append(weakref.ref(lazy))
        if node.depth > _DEEPEST:
            self.write(lazy)

    # -- kernels -----------------------------------------------------------------------

    def write(self, lazy: Lazy) -> None:
        """A result is needed in memory."""
        node = lazy.node
        if node is None:
            return
        rows = any(other.name in fusible.ROWS for other in node.ancestors())
        written = [(lazy, lazy.nbytes)]
        kernel = self._compute(node, lazy.gpu, written, ROW if rows else EACH)
        self._is_written(lazy, kernel)

    def _is_written(self, lazy: Lazy, kernel: Kernel) -> None:
        node, reads = lazy.node, lazy.node.reads()
        lazy.node, node.sources, node.held = None, (), None
        self._born[weakref.ref(lazy)] = kernel.place
        if any(memory.nbytes == lazy.nbytes for memory, _ in reads.values()):
            del reads  # what only it has read is written in place (`inplace_buffers`)
        lazy.block = lazy.gpu.memory.malloc(lazy.nbytes, kernel.stream)
        node.memory = lazy

    def _write_at_once(self, call, gpu: Gpu, tensors: list, sources: tuple,
                       way: Way) -> None:  # fmt: skip
        numel = max(t.numel() for t in (*call.tensors, *tensors))
        node = self._node(call.operation.name, numel, sources)
        written = [(storage_of(t)._simgpu, bytes_in(t)) for t in tensors]
        kernel = self._compute(node, gpu, written, way)
        for memory, _ in written:
            self._born[weakref.ref(memory)] = kernel.place + (0.5 if way.ends else 0)

    def _compute(self, node: Node, gpu: Gpu, written: list, way: Way) -> Kernel:
        """Let one of the last kernels, or a new one, compute a node."""
        least = max((nbytes for _, nbytes in written), default=0)
        kernel = self._kernel_for(node, gpu, way, least)
        again = [
            other for other in node.ancestors()[:-1]
            if other.kernel is not kernel and other.kernel in self._recent
            and other.is_left() and len(other.reads()) > _REUSED
        ]  # fmt: skip
        for other in again:
            first, lazy = other.kernel, other.lazy()
            self._add(first, other, [(lazy, lazy.nbytes)], EACH)
            self._is_written(lazy, first)
        if again:
            kernel = self._kernel_for(node, gpu, way, least)
        if kernel is None:
            self._place += 1
            stream = self.runtime.stream_of(gpu)
            kernel = Kernel(gpu, stream, self._place, max(node.numel, 1))
            self._recent.append(kernel)
            self._open.append(kernel)
        self._add(kernel, node, written, way)
        for other in node.ancestors()[:-1]:
            if other.is_left() and len(other.reads()) > _REUSED:
                other.held = other.lazy()
                self._held.append(other)
        return kernel

    def _add(self, kernel: Kernel, node: Node, written: list, way: Way) -> None:
        more = kernel.add(node, way, node.reads(), written)
        if kernel.launched and more:
            name, work = f"{kernel.name} (more)", Work(more, 0, node.numel)
            self.runtime.clock.kernel(kernel.gpu, kernel.stream, name, work, True)

    def _kernel_for(self, node: Node, gpu: Gpu, way: Way, least: int) -> Kernel | None:
        """That of the last kernels which a node joins."""
        reads, ready = node.reads(), 0.0
        for memory, _ in reads.values():
            born = self._born.get(weakref.ref(memory), 0)
            # the end of a reduction may go on with its results
            ready = max(ready, int(born) if least <= memory.nbytes else born)
        stream = self.runtime.stream_of(gpu)
        for kernel in reversed(self._recent):
            if kernel.place >= ready and kernel.gpu is gpu and kernel.stream == stream:
                if kernel.suits(node, way, reads):
                    return kernel
        return None
