"""The values of a CUDA graph: what a replay computes, and in which memory.

As on a card, a graph knows addresses and not tensors. Memory that is made in a capture
belongs to the graph, whatever becomes of the tensors; of memory that was there before,
the graph only knows where it is. A replay computes each step again from what lies there
then, and writes its results where they were.

Leaves out: that a graph whose input has been given back reads what others have put
there, which is refused; that blocks of a private pool are used again within a graph
(each result has memory of its own); that a capture resizes what it has made; sparse
tensors.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack, to_dlpack

from simgpu._compat import (
    DisableTorchDispatch,
    DisableTorchFunction,
    DispatchKey,
    SetExcludeDispatchKeyGuard,
    StorageBase,
    TensorBase,
    conj,
    is_torch,
    neg_view,
    storage_of_weak_ref,
    storage_use_count,
)
from simgpu._dispatch.device_asserts import is_found_by_kernel
from simgpu._dispatch.graph_memory import Memory, Outside, Place, Step
from simgpu._dispatch.operation import Operation
from simgpu._dispatch.placement import (
    is_pinned,
    is_plain,
    memory_of_storage,
    over,
    storage_of,
    tensors_in,
)
from simgpu._dispatch.random_numbers import numbers
from simgpu._errors import NotSimulated

_data_ptr = StorageBase.data_ptr  # the host's; a program hears that of the GPU
_WRITTEN_BESIDE = ("running_mean", "running_var")  # by batch norm, in no schema
_ASK_THE_HOST = ("_pack_padded_sequence",)  # lengths, as on a card
_OURS = 2  # who holds a storage that was shared: its `Memory`, and what shares it
_REGISTERS_ITSELF = is_torch((2, 13))  # a generator, where a capture draws from it
_UNREGISTERED = (
    "capturing_ INTERNAL ASSERT FAILED, please report a bug to PyTorch. Attempt to "
    "increase offset for a CUDA generator not in capture mode."
)


class Steps:
    """What a graph computes, in the order of the program.

    Args:
        memories: of all graphs of the process, by address.
        pool: of blocks that the capture is given.
        generators: that the graph may draw from.
    """

    def __init__(self, memories: weakref.WeakValueDictionary, pool, generators: list):
        self._memories, self._pool = memories, pool
        self._steps: list[Step] = []
        self._outside: list[Outside] = []
        self._known: dict[int, Outside] = {}  # by the address of a storage in C++
        self._made: list[tuple[Memory, StorageWeakRef]] = []  # as ours, and as theirs
        self._own: set[Memory] = set()
        self._held: set[Memory] = set()  # of other graphs, too
        # of other graphs, where the capture writes: what it held before
        self._before: dict[Memory, torch.Tensor] = {}
        self._begun = {id(g.position): (g, g.offset) for g in generators}
        self._moves: list[tuple[Any, int]] = []  # generators, and how far

    # -- while it is captured ----------------------------------------------------------

    def offset_of(self, generator) -> int:
        """Where a generator was when the capture began.

        Raises:
            RuntimeError: if it is not registered with the graph, in PyTorch's words.
        """
        key = id(generator.position)
        if key not in self._begun:
            if not _REGISTERS_ITSELF:
                raise RuntimeError(_UNREGISTERED)
            self._begun[key] = generator, generator.offset
        return self._begun[key][1]

    def run(self, operation: Operation, func, args, kwargs, draw, compute):
        """Compute an operation by `compute` and keep how; returns what it returns."""
        __tracebackhide__ = True
        given = tensors_in([*args, *kwargs.values()])
        written, grad = _written(operation, args, kwargs), torch.is_grad_enabled()
        with _unseen():
            for tensor in given:
                _check(tensor, operation)
                self._take_over(tensor)
                if not operation.silent:
                    is_written = any(tensor is t for t in written)
                    self._note_use(tensor, operation, is_written)
            before = {_address_of(t) for t in given}
        out = compute(func, args, kwargs)
        with _unseen():
            made = tensors_in(out if isinstance(out, (tuple, list)) else (out,))
            seen: dict[int, Any] = {}  # address -> the storage that the program gets
            for tensor in made:
                _check(tensor, operation)
            results = [self._keep(tensor, before, seen) for tensor in made]
            for tensor in written:  # one may have been empty before
                self._keep(tensor, before, seen)
            if not operation.silent:
                place = functools.partial(self._place, operation.name)
                step = Step(
                    operation.name, getattr(func, "asks", func), _map(args, place),
                    {name: _map(v, place) for name, v in kwargs.items()},
                    results, draw, grad,
                )  # fmt: skip
                self._steps.append(step)
        return out

    def _take_over(self, tensor) -> None:
        """Memory that C++ has made and filled by itself in this capture is ours, too.

        A replay begins with the same values.
        """
        storage = storage_of(tensor)
        mark = getattr(storage, "_simgpu", None)
        if mark is None or not hasattr(storage, "_simgpu_filled"):
            return
        if mark.block is None or mark.block.pool.owner is not self._pool:
            return
        if _data_ptr(storage) not in self._memories:
            values = over(storage, torch.uint8).clone()
            self._keep(tensor, set(), {})
            if storage_use_count(storage._cdata) > _OURS:
                storage._simgpu = mark  # others of C++ lie in it: on the GPU, too
            own = over(self._memories[_address_of(tensor)].storage, torch.uint8)
            self._steps.append(
                Step("fill", _given, [values], {}, [own], None, grad=False)
            )

    def _note_use(self, tensor, operation: Operation, is_written: bool) -> None:
        """Before an operation: it uses memory that may have been there before."""
        storage = storage_of(tensor)
        if not _is_reached(tensor, storage):
            return
        memory = self._memories.get(_data_ptr(storage))
        if memory is not None:
            if is_written and memory not in self._own and memory not in self._before:
                self._before[memory] = over(memory.storage, torch.uint8).clone()
            return
        outside = self._outside_of(storage)
        if outside is None:
            shape = tuple(tensor.shape)
            words = f"{operation.name} uses a tensor of {shape}, {tensor.dtype}"
            outside = self._known[storage._cdata] = Outside(storage, words)
            self._outside.append(outside)
        if is_written and outside.before is None:
            outside.before = over(storage, torch.uint8).clone()
        place = tensor.dtype, *_where(tensor)
        outside.uses[place] = is_written or outside.uses.get(place, False)

    def _outside_of(self, storage) -> Outside | None:
        found = self._known.get(storage._cdata)
        return None if found is None or found.is_gone else found

    def _keep(self, tensor, before: set, seen: dict) -> torch.Tensor | None:
        """Memory that is new belongs to the graph; where a tensor lies in it."""
        address = _address_of(tensor)
        if not address or address in before:
            return None
        if address not in seen:
            if address in self._memories:
                return None
            seen[address] = self._share(storage_of(tensor))
        where = _where(tensor)
        own = _over(self._memories[address].storage, tensor)
        TensorBase.set_(tensor, seen[address], *where)
        return own

    def _share(self, storage):
        """Another storage on the same bytes, for the program; the first is ours."""
        memory = self._memories[_data_ptr(storage)] = Memory(storage)
        self._own.add(memory)
        shared = storage_of(from_dlpack(to_dlpack(over(storage, torch.uint8))))
        if (mark := getattr(storage, "_simgpu", None)) is not None:
            shared._simgpu = mark  # a block that it has taken over
            del storage._simgpu
        self._made.append((memory, StorageWeakRef(shared)))
        return shared

    def _place(self, name: str, tensor):
        """What stands for a tensor in the step of operation `name`."""
        storage = storage_of(tensor)
        memory = self._memories.get(_data_ptr(storage)) if storage.nbytes() else None
        if memory is not None:
            self._held.add(memory)
            return _over(memory.storage, tensor)
        if not _is_reached(tensor, storage):
            if tensor.dim() and name not in _ASK_THE_HOST:
                # a copy would be what it is now at every replay
                what = f"{name} of {tuple(tensor.shape)} on the host in a CUDA graph"
                raise NotSimulated(what, "Make it a tensor of the GPU before.")
            with torch.inference_mode(False):  # a number, as it is now
                return tensor.clone()
        is_conj, is_neg = tensor.is_conj(), tensor.is_neg()
        outside = self._outside_of(storage)
        return Place(outside, tensor.dtype, _where(tensor), is_conj, is_neg)

    def roll_back(self) -> None:
        """The capture has ended: nothing has run, nothing has been drawn."""
        for generator, begun in self._begun.values():
            if generator.offset != begun:
                self._moves.append((generator, generator.offset - begun))
                generator.offset = begun
        with _unseen():
            for outside in self._outside:
                before, outside.before = outside.before, None
                if before is not None and outside.is_there:
                    over(outside.storage(), torch.uint8).copy_(before)
            for memory, before in self._before.items():
                over(memory.storage, torch.uint8).copy_(before)
            self._before.clear()
            for memory in self._own:
                over(memory.storage, torch.uint8).zero_()

    # -- when it is replayed -----------------------------------------------------------

    def replay(self, fail: Callable[[str, Exception], None]) -> None:
        """Compute all of it again, from what lies in its memory now.

        Args:
            fail: called with the name of an operation of which a kernel would assert,
                and what the CPU says; nothing is computed after it.

        Raises:
            NotSimulated: if memory is gone that it uses.
        """
        __tracebackhide__ = True
        with _unseen():
            storages = {id(outside): outside.storage() for outside in self._outside}

            def tensor_at(place: Place) -> torch.Tensor:
                found = over(storages[id(place.outside)], place.dtype, *place.where)
                found = conj(found) if place.is_conj else found
                return neg_view(found) if place.is_neg else found

            for step in self._steps:
                args = _map(step.args, tensor_at, Place)
                kwargs = {k: _map(v, tensor_at, Place) for k, v in step.kwargs.items()}
                try:
                    with _numbers(step.draw), torch.set_grad_enabled(step.grad):
                        out = step.func(*args, **kwargs)
                except (IndexError, RuntimeError) as error:
                    if not is_found_by_kernel(step.name, error):
                        raise
                    fail(step.name, error)
                    return
                if any(own is not None for own in step.results):
                    made = tensors_in(out if isinstance(out, (tuple, list)) else (out,))
                    for own, tensor in zip(step.results, made, strict=True):
                        if own is not None:
                            own.copy_(tensor)
        for generator, count in self._moves:
            generator.offset += count

    def uses(self) -> tuple[list, list]:
        """What a replay reads and writes of memory that the program still holds.

        Returns:
            Two lists of ("", tensor, block).
        """
        reads, writes = [], []
        with _unseen():
            for outside in self._outside:
                storage = outside.storage()
                if (memory := memory_of_storage(storage)) is not None:
                    for place, is_written in outside.uses.items():
                        use = "", over(storage, *place), memory.block
                        (writes if is_written else reads).append(use)
            for _, ref in self._made:
                storage = None if ref.expired() else storage_of_weak_ref(ref.cdata)
                memory = None if storage is None else memory_of_storage(storage)
                if memory is not None and memory.block is not None:
                    writes.append(("", over(storage, torch.uint8), memory.block))
        return reads, writes


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """No mode sees what is done here, no gradient is kept and no type changed."""
    with (
        DisableTorchFunction(), DisableTorchDispatch(), torch.no_grad(),
        SetExcludeDispatchKeyGuard(DispatchKey.AutocastCUDA, True),
        SetExcludeDispatchKeyGuard(DispatchKey.AutocastCPU, True),
    ):  # fmt: skip
        yield


def _numbers(draw: tuple | None):
    """The random numbers of a step."""
    if draw is None:
        return contextlib.nullcontext()
    generator, offset, is_given = draw
    return numbers(generator, generator.offset + offset, is_given)


def _given(values: torch.Tensor) -> torch.Tensor:
    return values


def _check(tensor, operation: Operation) -> None:
    if tensor.layout is not torch.strided or not is_plain(tensor):
        raise NotSimulated(f"{operation.name} of such a tensor in a CUDA graph")


def _written(operation: Operation, args, kwargs) -> list[torch.Tensor]:
    """The tensors that an operation changes."""
    names = {*operation.writes, *_WRITTEN_BESIDE}
    given = {**dict(zip(operation.arguments, args, strict=False)), **kwargs}
    return tensors_in([value for name, value in given.items() if name in names])


def _is_reached(tensor, storage) -> bool:
    """Whether a GPU finds it at its address: on the GPU, or in pinned memory."""
    if not storage.nbytes():
        return False
    return memory_of_storage(storage) is not None or is_pinned(tensor)


def _address_of(tensor) -> int:
    storage = storage_of(tensor)
    return _data_ptr(storage) if storage.nbytes() else 0


def _where(tensor) -> tuple:
    return tensor.storage_offset(), tensor.shape, tensor.stride()


def _over(storage, like) -> torch.Tensor:
    """A tensor of our own on other storage, where `like` lies in its own."""
    with torch.inference_mode(False):
        found = over(storage, like.dtype, *_where(like))
        found = conj(found) if like.is_conj() else found
        return neg_view(found) if like.is_neg() else found


def _map(value, change: Callable, kind: type = torch.Tensor):
    """A value in which each `kind` is another, also inside lists."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [_map(item, change, kind) for item in value]
    return value
