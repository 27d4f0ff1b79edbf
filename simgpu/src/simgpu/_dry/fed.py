"""What a step is fed: tokens, samples and images, as far as a program shows it.

**Tokens** are indices that go into embeddings. Positions (T5's table of distances,
BERT's of places) are none: they are counted up by `arange`, not fed. Tables that one
module calls describe the same tokens (of words, of places, of segments), of which the
one with most counts; those of different modules, as an encoder's and a decoder's, add
up.

**Samples** are the rows of what the outermost module is called with, where it has
parameters and gradients are wanted; they are images if that has the shape of images.

All calls of a step count, so all micro-batches. They are this rank's. Ranks of a mesh
that split a model ("tp", "pp") share them; those that split sequences ("cp", "sp") have
tokens of their own, of the same samples. All others have their own.
"""

import contextlib
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules import module as hooks

from simgpu._compat import current_graph_task_id
from simgpu._dispatch.placement import storage_of, tensors_in

_SPLIT = {"tp", "pp", "tensor", "pipeline"}
_CUT = {"cp", "sp", "context", "sequence", "ring", "ulysses"}
_COUNTS_UP = {"arange", "linspace"}


class Fed(NamedTuple):
    """What a step of one rank is fed."""

    tokens: int = 0
    samples: int = 0
    images: bool = False  # the samples are


class _Looked(NamedTuple):
    """Indices that have gone into a table."""

    table: object
    caller: object  # the module that has called its layer
    count: int
    are_places: bool


class _Step:
    """What has been counted of a step."""

    def __init__(self):
        self.tokens: dict[object, Counter[object]] = {}  # caller -> table -> tokens
        self.samples: Counter[int] = Counter()  # outermost module -> samples


class Counted:
    """Counts what one rank is fed."""

    def __init__(self):
        self._fed, self._counted_up = _Step(), _Step()
        self._of_images: set[int] = set()  # outermost modules
        self._pending: list[_Looked] = []  # in the call of the outermost module
        self._depth = 0  # of modules that are being called
        self._trains = True  # the outermost one
        self.sharing = 1  # ranks that have the same tokens
        self.cutting = 1  # ranks that have parts of the same samples

    def note(self, table: torch.Tensor, indices: torch.Tensor) -> None:
        """Indices have gone into an embedding's table, in a forward pass."""
        if not (self._trains if self._depth else torch.is_grad_enabled()):
            return
        layer, caller = _modules()
        looked = _Looked(
            layer or tuple(table.shape), caller, indices.numel(), _are_places(indices)
        )
        if self._depth:
            self._pending.append(looked)
        else:
            self._add([looked], None)

    def _add(self, looked: list[_Looked], given: torch.Tensor | None) -> None:
        """Count what a module has looked up that was called with `given`."""
        numbers = given is not None and _is_of_numbers(given)
        for its in looked:
            # beside numbers, one for each sample is a label
            if not numbers or not (its.are_places or its.count == len(given)):
                step = self._counted_up if its.are_places else self._fed
                tables = step.tokens.setdefault(its.caller, Counter())
                tables[its.table] += its.count

    def take(self) -> Fed:
        """What came since the last call."""
        # a program may count up what stands for tokens
        tokens = (self._fed.tokens or self._counted_up.tokens).values()
        samples = self._fed.samples or self._counted_up.samples
        busiest = max(samples, key=samples.__getitem__, default=0)
        found = Fed(
            sum(max(tables.values()) for tables in tokens), samples[busiest],
            busiest in self._of_images,
        )  # fmt: skip
        self._fed, self._counted_up = _Step(), _Step()
        return found

    # -- modules and meshes ------------------------------------------------------------

    def _enter(self, module: nn.Module, args: tuple) -> None:
        if not self._depth:
            self._trains = torch.is_grad_enabled()
        self._depth += 1

    def _leave(self, module: nn.Module, args: tuple, *more) -> None:
        self._depth -= 1
        kwargs = more[0] if len(more) == 2 else {}  # none after an error
        if self._depth or current_graph_task_id() != -1:  # backward does it again
            return
        given = next(_batches((*args, *kwargs.values())), None)
        looked, self._pending = self._pending, []
        self._add(looked, given)
        if given is None or not self._trains:
            return
        if next(module.parameters(), None) is None:  # a loss
            return
        step = self._counted_up if _are_places(given) else self._fed
        step.samples[id(module)] += len(given)
        if given.dim() == 4 and _is_of_numbers(given):
            self._of_images.add(id(module))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """See which modules are called, and which meshes the program makes."""
        begin = DeviceMesh.__init__

        def seen(mesh, *args, **kwargs):
            begin(mesh, *args, **kwargs)
            sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
            self.sharing = max(self.sharing, _ranks(sizes, _SPLIT))
            self.cutting = max(self.cutting, _ranks(sizes, _CUT))

        with contextlib.ExitStack() as undo:
            undo.enter_context(mock.patch.object(DeviceMesh, "__init__", seen))
            undo.callback(hooks.register_module_forward_pre_hook(self._enter).remove)
            after = hooks.register_module_forward_hook(
                self._leave, with_kwargs=True, always_call=True
            )
            undo.callback(after.remove)
            yield


def _ranks(sizes: dict[str, int], names: set[str]) -> int:
    return math.prod(n for name, n in sizes.items() if str(name).lower() in names)


def _modules() -> tuple[int | None, int | None]:
    """The layer whose `forward` runs, and the module that has called it.

    A table's own address changes when it is sharded. A module that holds one other and
    nothing else (of FSDP1, of an activation checkpoint) is no caller.
    """
    frame: FrameType | None = sys._getframe(2)
    layer, inside = None, None
    while frame is not None:
        if frame.f_code.co_name == "forward":
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                if layer is None:
                    layer = id(module)
                elif list(module.children()) != [inside]:
                    return layer, id(module)
                inside = module
        frame = frame.f_back
    return layer, None


def _batches(values: Iterable) -> Iterator[torch.Tensor]:
    """Tensors with rows among arguments, in order; of a DTensor this rank's part."""
    for value in values:
        if isinstance(value, torch.Tensor):
            value = getattr(value, "_local_tensor", value)
            if value.dim():
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _batches(value)
        elif isinstance(value, dict):
            yield from _batches(value.values())


def _is_of_numbers(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.dtype is torch.uint8


# -- what is counted up, and not fed ---------------------------------------------------


def _are_places(tensor: torch.Tensor) -> bool:
    try:
        return getattr(storage_of(tensor), "_simgpu_places", False)
    except (NotImplementedError, RuntimeError):  # it has no storage: sparse
        return False


def follow(operation, tensors: list[torch.Tensor], out) -> None:
    """An operation has run: does what it made or wrote come of `arange` alone?"""
    if operation.makes:
        if operation.name in _COUNTS_UP or (
            tensors and not operation.random and all(map(_are_places, tensors))
        ):
            made = [out] if isinstance(out, torch.Tensor) else tensors_in(out or ())
            for tensor in made:
                storage_of(tensor)._simgpu_places = True
    elif operation.writes and tensors and _are_places(tensors[0]):
        if operation.random or not all(map(_are_places, tensors[1:])):
            storage_of(tensors[0])._simgpu_places = False
