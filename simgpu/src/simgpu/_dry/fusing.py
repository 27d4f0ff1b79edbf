"""`--compile fuse`: the kernels that `torch.compile` makes of chains of operations.

Models, in compiled code: a pointwise operation, or one that goes along rows (a softmax,
a norm), takes no kernel and no memory until its result is needed: by a matrix product
or whatever else is no such operation, by a reduction, or as a result of the compiled
code. Then one kernel reads what it comes from and writes it. Kernels with the same
elements that read the same are one, also where a product stands between them that
neither needs. What only backward needs is computed there again. A result which others
read in its kernel, and which is still there afterwards, is written too if that costs
less than to read twice what it comes from: so the sum of a residual is kept, and its
addends are not.
Leaves out: Inductor's choice of block sizes, products with a fused end, CUDA graphs,
`_foreach` operations (which count as without compiling), what is read twice because a
row is long, the time of compiling, and what Inductor's thresholds of reads
(`realize_reads_threshold`, `realize_acc_reads_threshold`) keep in memory.

Source: torch/_inductor/scheduler.py (which nodes are fused) and
torch/_functorch/partitioners.py (what is kept for backward) of PyTorch 2.13.
"""

import weakref
from collections import deque
from collections.abc import Iterable

import torch

from simgpu._device.gpu import Gpu
from simgpu._dispatch.kernel_work import bytes_in
from simgpu._dispatch.placement import (
    DeviceMemory,
    place_all,
    storage_of,
    tensors_in,
)
from simgpu._timing.kernel_cost import Work

_POINTWISE = {
    "_to_copy", "cat", "stack", "native_dropout", "constant_pad_nd", "slice_backward",
    "select_backward", "nll_loss_backward", "index_select", "gather", "index",
    "_unsafe_index", "repeat", "roll", "flip", "tril", "triu", "zeros", "ones", "full",
    "arange", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones",
    "new_full", "scalar_tensor", "copy_", "zero_", "fill_", "copy", "fill",
    "one_hot", "log_sigmoid_forward", "_conj_physical",
}  # fmt: skip
_ROWS = {
    "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data",
    "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm",
    "_fused_rms_norm_backward", "native_group_norm", "native_group_norm_backward",
    "native_batch_norm", "native_batch_norm_backward", "cudnn_batch_norm",
    "cudnn_batch_norm_backward",
}  # fmt: skip
_REDUCTIONS = {
    "sum", "mean", "amax", "amin", "max", "min", "any", "all", "argmax", "argmin",
    "var", "std", "var_mean", "std_mean", "prod", "nll_loss_forward", "mse_loss",
    "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "linalg_vector_norm", "norm", "logsumexp",
}  # fmt: skip
# arguments of which no element is read
_UNREAD = {"nll_loss_backward": {1}, "copy_": {0}, "zero_": {0}, "fill_": {0}}
_MASKS_OF = {"native_dropout"}  # random numbers are not drawn again
_RECENT = 8  # kernels that one more operation may still join
_DEEPEST = 200  # chain of operations that are not written
_NAMED = 4  # operations in the name of a kernel


class Lazy(DeviceMemory):
    """The mark of a storage that nobody has written yet, and that has no block."""

    __slots__ = ("node", "__weakref__")

    def __init__(self, gpu: Gpu, nbytes: int, node: "Node"):
        self.gpu, self.nbytes, self.node = gpu, nbytes, node
        self.block = self.arriving = self.awaited = None
        node.lazy = weakref.ref(self)

    def resize(self, nbytes: int) -> None:
        self.node = None
        super().resize(nbytes)


class Node:
    """A result that is computed where it is needed.

    Attributes:
        name: of the operation.
        numel: elements that a kernel goes through for it.
        sources: (mark or node, bytes that are read of it, where they begin).
        lazy: its mark, or None when nobody else can read it any more.
        memory: its mark once it is written.
        depth: operations between it and what is in memory.
        number: it was made after those with a smaller one.
    """

    __slots__ = ("name", "numel", "sources", "lazy", "memory", "depth", "number")

    def __init__(self, name: str, numel: int, sources: tuple, number: int):
        self.name, self.numel, self.sources, self.number = name, numel, sources, number
        self.lazy = self.memory = None
        self.depth = 1 + max(
            (s.depth for s, _, _ in sources if type(s) is Node), default=0
        )

    def ancestors(self) -> list["Node"]:
        """What it comes from and is not in memory, oldest first; itself is the last."""
        found, stack = {id(self): self}, [self]
        while stack:
            for source, _, _ in stack.pop().sources:
                if type(source) is Node and source.memory is None:
                    if id(source) not in found:
                        found[id(source)] = source
                        stack.append(source)
        return sorted(found.values(), key=lambda node: node.number)

    def reads(self) -> dict[tuple[int, int], tuple[DeviceMemory, int]]:
        """(address of a mark, where) -> the mark, and bytes that are read of it."""
        found: dict[tuple[int, int], tuple[DeviceMemory, int]] = {}
        for node in self.ancestors():
            for source, nbytes, first in node.sources:
                if type(source) is Node:
                    if source.memory is None:
                        continue
                    source = source.memory
                key = id(source), first
                if key not in found or found[key][1] < nbytes:
                    found[key] = source, nbytes
        return found


class Kernel:
    """A fused kernel.

    Attributes:
        place: among all kernels of the compiled code.
        numel: elements that it goes through.
        launched: whether it is on the clock; what it does beyond that comes after.
    """

    def __init__(self, gpu: Gpu, stream: int, place: int, numel: int):
        self.gpu, self.stream, self.place, self.numel = gpu, stream, place, numel
        self.launched = False
        self.nbytes = 0
        self.names: dict[str, None] = {}
        self._reads: dict[tuple[int, int], int] = {}
        self._read: dict[int, int] = {}  # mark -> bytes
        self._wrote: set[int] = set()

    def shares(self, reads: dict) -> bool:
        """Whether it has read, or written, something of that."""
        return any(key[0] in self._read or key[0] in self._wrote for key in reads)

    def add(self, reads: dict, written: Iterable[tuple[DeviceMemory, int]]) -> int:
        """It reads and writes more.

        Returns:
            bytes that this takes.
        """
        before = self.nbytes
        for key, (memory, nbytes) in reads.items():
            if key[0] in self._wrote:
                continue
            read = self._read.get(key[0], 0)
            more = min(nbytes - self._reads.get(key, 0), memory.nbytes - read)
            if more > 0:
                self._reads[key] = nbytes
                self._read[key[0]] = read + more
                self.nbytes += more
        for memory, nbytes in written:
            if id(memory) not in self._wrote:
                self._wrote.add(id(memory))
                self.nbytes += nbytes
        return self.nbytes - before

    @property
    def name(self) -> str:
        names = list(self.names)
        more = ", ..." if len(names) > _NAMED else ""
        return f"fused {', '.join(names[:_NAMED])}{more}"


class Fusing:
    """The compiled code of a dry run.

    Attributes:
        region: what runs now is compiled; None where nothing is.
    """

    def __init__(self, runtime):
        self.runtime = runtime
        self.region: object = None
        self._made: list[weakref.ref[Lazy]] = []  # in this region
        self._number = self._place = 0
        self._open: list[Kernel] = []  # not launched yet
        self._recent: deque[Kernel] = deque(maxlen=_RECENT)
        # address of a mark -> place of the kernel that wrote it; + 0.5 where the kernel
        # must have ended before anybody can read it
        self._born: dict[int, float] = {}

    # -- regions -----------------------------------------------------------------------

    def enter(self, region: object) -> None:
        self.region = region

    def leave(self, results: Iterable[torch.Tensor] | None) -> None:
        """The end of a region.

        Args:
            results: that are written now; None: all that are left.
        """
        if results is None:
            made = [lazy() for lazy in self._made]
            lazies = [lazy for lazy in made if lazy is not None]
        else:
            lazies = [lazy for lazy in map(lazy_of, results) if lazy is not None]
        for lazy in lazies:
            self.write(lazy)
        self.region = None
        self.launch()

    def launch(self) -> None:
        """What was collected is a kernel now."""
        for kernel in self._open:
            work = Work(kernel.nbytes, 0, kernel.numel)
            kernel.launched = True
            self.runtime.clock.kernel(kernel.gpu, kernel.stream, kernel.name, work)
        self._open.clear()
        if self.region is None:
            self._made.clear()
            self._recent.clear()
            self._born.clear()

    # -- operations --------------------------------------------------------------------

    def takes(self, call) -> bool:
        """Whether an operation that begins is fused; else what it reads is written."""
        operation = call.operation
        if operation.silent or operation.in_parts and operation.name != "_to_copy":
            return False
        if self.region is not None and self._is_fused(call):
            return True
        lazies = [lazy for lazy in map(lazy_of, call.tensors) if lazy is not None]
        for lazy in lazies:
            self.write(lazy)
        if self._open:
            self.launch()
        return False

    def _is_fused(self, call) -> bool:
        operation, gpus = call.operation, call.gpus
        name = operation.name if operation.makes else operation.name.rstrip("_")
        if not (
            operation.name in _POINTWISE or name in _ROWS or name in _REDUCTIONS
            or torch.Tag.pointwise in operation.func.tags
        ):  # fmt: skip
            return False
        if operation.random and operation.name not in _MASKS_OF:
            return False
        if "out" in call.kwargs or operation.func.namespace != "aten":
            return False
        device = call.kwargs.get("device")
        if device is not None and device.type == "cpu" and self._asked_for_host():
            return False
        first = gpus[0] if gpus else None
        for tensor, gpu in zip(call.tensors, gpus, strict=True):
            if tensor.layout is not torch.strided:
                return False
            if gpu is not first and (gpu is not None or tensor.dim()):
                return False
        if call.is_dynamic(operation, call.args):
            return False
        return first is not None or not gpus

    def _asked_for_host(self) -> bool:
        thread = self.runtime.thread
        return thread.asked_for_copy or thread.asked_for_cpu

    def run(self, call, gpu: Gpu, out):
        """An operation that is fused has the result `out`."""
        operation = call.operation
        outputs = tensors_in(out if isinstance(out, (tuple, list)) else (out,))
        new = [t for t in outputs if getattr(storage_of(t), "_simgpu", None) is None]
        sources = self._sources(call, outputs)
        numel = max((t.numel() for t in (*call.tensors, *outputs)), default=1)
        node = self._node(operation.name, numel, sources)
        if operation.name in _REDUCTIONS:
            place_all(new, gpu)
            self._write_at_once(node, gpu, new, _ends_kernel(call))
            return
        if not new:  # in place
            written = call.tensors[:1]
            for lazy in map(lazy_of, written):
                if lazy is not None:
                    self.write(lazy)
            sources = self._sources(call, outputs)
            self._write_at_once(
                self._node(operation.name, numel, sources), gpu, written, False
            )
            return
        if operation.name not in _ROWS:
            later = [t for t in new if t.dtype is not torch.bool
                     or operation.name not in _MASKS_OF]  # fmt: skip
        else:
            later = [t for t in new if t.numel() >= call.tensors[0].numel()]
        small = [t for t in new if all(t is not other for other in later)]
        if small:
            place_all(small, gpu)
            whole = "batch_norm" in operation.name
            forward = "backward" not in operation.name
            drawn = operation.name in _MASKS_OF
            node = self._node(operation.name, numel, () if drawn else sources)
            self._write_at_once(node, gpu, small, whole or not forward)
            if whole or forward:
                sources += tuple(_source(t) for t in small)
        for tensor in later:
            self._make_lazy(tensor, gpu, operation.name, sources)

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

    def _sources(self, call, outputs: list[torch.Tensor]) -> tuple:
        if call.operation.is_factory:
            return ()
        found = []
        unread = _UNREAD.get(call.operation.name, ())
        for i, (tensor, gpu) in enumerate(zip(call.tensors, call.gpus, strict=True)):
            if gpu is None or i in unread or not tensor.numel():
                continue
            source = _source(tensor)
            if not i and (call.operation.gathers or call.operation.name in _PICKS):
                least = sum(bytes_in(out) for out in outputs)
                source = source[0], min(source[1], least), source[2]
            found.append(source)
        return tuple(found)

    def note_written(self, tensors: Iterable[torch.Tensor]) -> None:
        """A kernel that is not fused has written tensors."""
        self._place += 1
        for tensor in tensors:
            memory = getattr(storage_of(tensor), "_simgpu", None)
            if memory is not None:
                self._born[id(memory)] = self._place

    # -- kernels -----------------------------------------------------------------------

    def write(self, lazy: Lazy) -> None:
        """A result is needed in memory."""
        if lazy.node is None:
            return
        for node in self._kept(lazy.node):
            self._write(node)
        self._write(lazy.node)

    def _kept(self, node: Node) -> list[Node]:
        """Of what a result comes from, what is better written than computed again."""
        found = []
        for other in node.ancestors()[:-1]:
            lazy = other.lazy and other.lazy()
            if lazy is not None and other.memory is None:
                read = sum(nbytes for _, nbytes in other.reads().values())
                if read >= 2 * lazy.nbytes:
                    found.append(other)
        return found

    def _write(self, node: Node) -> None:
        lazy, reads = node.lazy(), node.reads()
        kernel = self._add(node, lazy.gpu, reads, [(lazy, lazy.nbytes)])
        self._born[id(lazy)] = kernel.place
        lazy.node, node.sources = None, ()
        if any(memory.nbytes == lazy.nbytes for memory, _ in reads.values()):
            del reads  # what only it has read is written in place (`inplace_buffers`)
        lazy.block = lazy.gpu.memory.malloc(lazy.nbytes, kernel.stream)
        node.memory = lazy

    def _write_at_once(self, node: Node, gpu: Gpu, tensors: list, ends: bool) -> None:
        written = [(storage_of(t)._simgpu, bytes_in(t)) for t in tensors]
        kernel = self._add(node, gpu, node.reads(), written)
        for memory, _ in written:
            self._born[id(memory)] = kernel.place + (0.5 if ends else 0)

    def _add(self, node: Node, gpu: Gpu, reads: dict, written: list) -> Kernel:
        """Let a kernel write results of a node: one of the last, or a new one."""
        stream = self.runtime.stream_of(gpu)
        least = max((nbytes for _, nbytes in written), default=0)
        ready = 0.0
        for memory, _ in reads.values():
            born = self._born.get(id(memory), 0)
            # the end of a reduction may go on with its results
            ready = max(ready, int(born) if least <= memory.nbytes else born)
        for kernel in reversed(self._recent):
            if (
                kernel.place >= ready and kernel.numel % max(node.numel, 1) == 0
                and kernel.gpu is gpu and kernel.stream == stream
                and kernel.shares(reads)
            ):  # fmt: skip
                break
        else:
            self._place += 1
            kernel = Kernel(gpu, stream, self._place, max(node.numel, 1))
            self._recent.append(kernel)
            self._open.append(kernel)
        for other in node.ancestors():
            kernel.names[other.name] = None
        more = kernel.add(reads, written)
        if kernel.launched and more:
            self.runtime.clock.go_on(
                gpu, stream, f"{kernel.name} (more)", Work(more, 0, node.numel)
            )
        return kernel


_PICKS = {"nll_loss_forward"}


def lazy_of(tensor: torch.Tensor) -> Lazy | None:
    """The mark of a tensor that is not written yet, else None."""
    try:
        memory = getattr(storage_of(tensor), "_simgpu", None)
    except (NotImplementedError, RuntimeError):  # it has no storage: sparse
        return None
    return memory if type(memory) is Lazy and memory.node is not None else None


def _source(tensor: torch.Tensor) -> tuple:
    memory = storage_of(tensor)._simgpu
    if type(memory) is Lazy and memory.node is not None:
        memory = memory.node
    return memory, bytes_in(tensor), tensor.storage_offset()


def _ends_kernel(call) -> bool:
    """Whether a reduction goes over more than rows: who reads it needs all of it."""
    rank, dims = call.tensors[0].dim(), call.argument(1, "dim")
    if isinstance(dims, int):
        dims = [dims]
    if not isinstance(dims, (list, tuple)) or not dims or len(dims) == rank:
        return True
    return {dim % rank for dim in dims} != set(range(rank - len(dims), rank))
