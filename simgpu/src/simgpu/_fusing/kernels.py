"""Kernels of compiled code, and results that none has written yet. See `fusing.py`."""

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch

from simgpu._device.gpu import Gpu
from simgpu._dispatch.kernel_work import bytes_in
from simgpu._dispatch.placement import DeviceMemory, storage_of

Mark = weakref.ref[DeviceMemory]  # one that is dead is equal to no other
_IN_STEPS = 1024  # elements that one block of threads does not add up for a result
_NAMED = 4  # operations in the name of a kernel


class Way(NamedTuple):
    """How a kernel goes through its elements.

    Attributes:
        along: "rows" or "columns" that it adds up, or "" where it does not.
        ends: whether it must have ended before anybody can read what it writes.
        mixes: whether it may go along rows at the same time (`mix_order_reduction`).
        in_steps: whether a second kernel adds up what its blocks have found.
    """

    along: str = ""
    ends: bool = False
    mixes: bool = False
    in_steps: bool = False


EACH, ROW = Way(), Way("rows")


class Lazy(DeviceMemory):
    """The mark of a storage that nobody has written yet, and that has no block."""

    __slots__ = ("node",)

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
        number: it was made after those with a smaller one.
        lazy: its mark; of None, nobody but other nodes can read it.
        held: its mark, if that is to outlive the storage.
        memory: its mark once it is written.
        kernel: the first that has computed it.
        depth: operations between it and what is in memory.
    """

    __slots__ = ("name", "numel", "sources", "number", "lazy", "held", "memory",
                 "kernel", "depth")  # fmt: skip

    def __init__(self, name: str, numel: int, sources: tuple, number: int):
        self.name, self.numel, self.sources, self.number = name, numel, sources, number
        self.lazy: weakref.ref[Lazy] | None = None
        self.held: Lazy | None = None
        self.memory: Lazy | None = None
        self.kernel: Kernel | None = None
        depths = (s.depth for s, _, _ in sources if type(s) is Node)
        self.depth = 1 + max(depths, default=0)

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

    def reads(self) -> dict[tuple[Mark, int], tuple[DeviceMemory, int]]:
        """(mark, where) -> the mark itself, and bytes that are read of it."""
        found: dict[tuple[Mark, int], tuple[DeviceMemory, int]] = {}
        for node in self.ancestors():
            for source, nbytes, first in node.sources:
                if type(source) is Node:
                    if source.memory is None:
                        continue
                    source = source.memory
                key = weakref.ref(source), first
                if key not in found or found[key][1] < nbytes:
                    found[key] = source, nbytes
        return found

    def is_left(self) -> bool:
        """Whether a program or autograd could still read it, and it is not written."""
        return self.memory is None and self.lazy is not None and bool(self.lazy())


class Kernel:
    """A fused kernel.

    Attributes:
        place: among all kernels of the compiled code.
        numel: elements that it goes through.
        along: rows, columns, or both at once.
        in_steps: whether a second kernel adds up what its blocks have found.
        launched: whether it is on the clock; what it does beyond that comes after.
    """

    def __init__(self, gpu: Gpu, stream: int, place: int, numel: int):
        self.gpu, self.stream, self.place, self.numel = gpu, stream, place, numel
        self.along: set[str] = set()
        self.in_steps = self.launched = self._mixes = False
        self.nbytes = 0
        self._names: dict[str, None] = {}
        self._parts: dict[tuple[Mark, int], int] = {}  # (mark, where) -> bytes read
        self._read: dict[Mark, int] = {}  # bytes
        self._wrote: set[Mark] = set()

    @property
    def name(self) -> str:
        names = list(self._names)
        more = ", ..." if len(names) > _NAMED else ""
        return f"fused {', '.join(names[:_NAMED])}{more}"

    def suits(self, node: Node, way: Way, reads: dict) -> bool:
        """Whether it can compute a node, too, and reads or wrote something of it."""
        if way.mixes and "rows" in self.along or self._mixes and way.along == "rows":
            same_way = True
        else:
            same_way = ("columns" in self.along) == (way.along == "columns")
        if self.along - {""}:  # what it adds up has fewer elements
            same_size = self.numel % max(node.numel, 1) == 0
        else:
            same_size = self.numel == node.numel
        if not same_way or not same_size:
            return False
        return any(key[0] in self._read or key[0] in self._wrote for key in reads)

    def add(self, node: Node, way: Way, reads: dict,
            written: Iterable[tuple[DeviceMemory, int]]) -> int:  # fmt: skip
        """It computes a node, too.

        Returns:
            bytes that it reads and writes for that.
        """
        self.along.add(way.along)
        self._mixes = self._mixes or way.mixes
        self.in_steps = self.in_steps or way.in_steps
        for other in node.ancestors():
            self._names[other.name] = None
            other.kernel = other.kernel or self
        before = self.nbytes
        for key, (memory, nbytes) in reads.items():
            if key[0] in self._wrote:
                continue
            read = self._read.get(key[0], 0)
            more = min(nbytes - self._parts.get(key, 0), memory.nbytes - read)
            if more > 0:
                self._parts[key] = nbytes
                self._read[key[0]] = read + more
                self.nbytes += more
        for memory, nbytes in written:
            mark = weakref.ref(memory)
            if mark not in self._wrote:
                self._wrote.add(mark)
                self.nbytes += nbytes
        return self.nbytes - before


def lazy_of(tensor: torch.Tensor) -> Lazy | None:
    """The mark of a tensor that is not written yet, else None."""
    try:
        memory = getattr(storage_of(tensor), "_simgpu", None)
    except (NotImplementedError, RuntimeError):  # it has no storage: sparse
        return None
    return memory if type(memory) is Lazy and memory.node is not None else None


def source_of(tensor: torch.Tensor) -> tuple:
    """What a node reads of a tensor, as `Node.sources` has it."""
    memory = storage_of(tensor)._simgpu
    if type(memory) is Lazy and memory.node is not None:
        memory = memory.node
    return memory, bytes_in(tensor), tensor.storage_offset()


def in_steps(numel: int, results: int) -> bool:
    """Whether so many elements are added up to so few results by two kernels."""
    return numel // max(results, 1) >= _IN_STEPS
