"""An operation in a dry run: computed where its values are known, else not."""

import functools
import math
import sys
from types import FrameType

import torch
from torch import nn

from simgpu import _runtime as state
from simgpu._compat import (
    DisableTorchDispatch,
    DisableTorchFunction,
    TensorBase,
    current_graph_task_id,
    torch_ops,
)
from simgpu._dispatch.operation import Operation, operation_of
from simgpu._dispatch.placement import storage_of
from simgpu._dispatch.watched_call import Watched, WatchedCall, unwatched
from simgpu._dry import fed, values
from simgpu._errors import NotSimulated
from simgpu._frames import called_from
from simgpu._fusing.fusible import MASKS, is_dynamic

_READERS = {"_local_scalar_dense", "is_nonzero", "equal", "allclose"}
# what a program asks to see that nothing has gone wrong -> what it hears
_ASSUMED = {"isnan": False, "isinf": False, "isfinite": True, "any": False, "all": True,
            "isneginf": False, "isposinf": False}  # fmt: skip
# what a program asks on from an answer: of equal elements, one tells the result
_FOLLOWS = {"logical_or", "logical_and", "logical_xor", "logical_not", "bitwise_or",
            "bitwise_and", "bitwise_not", "add", "mul", "gt", "ge", "lt", "le", "eq",
            "ne", "max", "min", "maximum", "minimum", "amax", "amin", "any", "all",
            "_to_copy", "copy", "clone", "stack", "cat", "where",
            "mean", "bitwise_xor"}  # fmt: skip
_SETS = {"zero", "fill"}
_RESIZES = {"resize_", "resize_as_"}
_COUNTS = {"sum", "nansum", "count_nonzero"}
_TELLING = _FOLLOWS | _SETS | _COUNTS
_MESSAGES = ("c10d", "_c10d_functional")
_CHOOSES = {"topk", "max", "argmax"}
_WRITTEN = {"running_mean", "running_var"}  # by batch norm, whatever its schema says
# as PyTorch has it: a tensor that is asked itself looks for its GPU first
_is_meta = TensorBase.is_meta.__get__


class DryCall(WatchedCall):
    """A call of which nothing is computed if it is large, or comes of what is unknown.

    Raises:
        NotSimulated: where a shape depends on an unknown value.
    """

    __slots__ = ("_fusing",)

    def __init__(self, runtime, operation, func, args, kwargs):
        super().__init__(runtime, operation, func, args, kwargs)
        fusing = runtime.fusing
        # what fuses it, if it is a part of compiled code, and no `with_tensors`
        asks = fusing is not None and (args or kwargs)
        self._fusing = fusing if asks and fusing.takes(self) else None

    def _run_on_gpu(self, gpu):
        __tracebackhide__ = True
        if self._fusing is None:
            return super()._run_on_gpu(gpu)
        if hasattr(self._func, "asks"):  # in place only where it is a kernel by itself
            self.func = self._shaper(self._func.asks)
            self.operation = operation_of(self._func)
        out = self.compute_on(gpu)
        self._fusing.run(self, gpu, out)
        return out

    def computed(self, func, *args):
        return self.execute(func, args, {})

    def _run_on_host(self):
        __tracebackhide__ = True
        out = super()._run_on_host()
        made = self.operation.is_factory or self.operation.random  # a model's beginning
        if self.is_logged() and not made:
            if sum(t.nbytes for t in self.tensors) > values.SMALL:
                self.runtime.dry.host_computes(self, out)
        return out

    def log(self, gpu, out, outputs, blocks) -> None:
        super().log(gpu, out, outputs, blocks)
        dry, fusing, name = self.runtime.dry, self.runtime.fusing, self.operation.name
        if fusing is not None and fusing.is_inside():
            fusing.note_written(outputs or self.tensors[:1])
        if name == "embedding" and current_graph_task_id() == -1:
            dry.fed.note(*self.args[:2])
        if current_graph_task_id() != -1 and torch.is_grad_enabled():
            # a forward pass in backward: of an activation checkpoint
            dry.recomputed += dry.events[-1].flops if dry.events else 0

    def execute(self, func, args, kwargs):
        __tracebackhide__ = True
        if hasattr(func, "asks"):
            return func(*args, **kwargs)
        operation = self.operation
        if func is not operation.func and isinstance(func, torch_ops.OpOverload):
            operation = operation_of(func)
        tensors = values.tensors_of(args, kwargs)
        if operation.silent or operation.func.namespace in _MESSAGES:
            if "empty" in operation.name:
                found = values.result_of(self._shaper(func), args, kwargs)
                if found is not None and values.is_huge(found):
                    return found.made(values.new)
            elif operation.name in _RESIZES:
                values.make_room(args[0], getattr(args[1], "shape", args[1]))
            return func(*args, **kwargs)
        with DisableTorchFunction(), DisableTorchDispatch():
            unknown = [tensor for tensor in tensors if values.is_unknown(tensor)]
            if operation.name in _READERS:
                if unknown:
                    return self._read(unknown[0])
                return func(*args, **kwargs)
            known = not unknown and self._is_small(
                operation, func, tensors, args, kwargs
            )
            out = None if known else self._skip(operation, func, args, kwargs)
        if known:
            out = func(*args, **kwargs)
        with DisableTorchFunction():
            fed.follow(operation, tensors, out)
        return out

    # -- what is computed --------------------------------------------------------------

    def _is_small(self, operation, func, tensors, args, kwargs) -> bool:
        on_host = not any(self.gpus)
        for tensor in tensors:
            if _is_meta(tensor) or tensor.layout is not torch.strided:
                return True  # of which PyTorch computes nothing, or what we leave to it
            if not values.fits(tensor.nbytes, tensor.dtype, on_host):
                return False
        if not operation.makes or is_dynamic(operation, args):
            return True
        try:
            found = values.result_of(self._shaper(func), args, kwargs)
        except RuntimeError:  # the operation itself will say what is wrong
            return True
        if found is None:
            return True
        return all(values.fits(p.nbytes, p.dtype, on_host) for p in found.tensors())

    def _shaper(self, func):
        """What tells the shapes: the operation, or what computes it in its place."""
        while isinstance(func, Watched) or hasattr(func, "computes"):
            func = unwatched(func) if isinstance(func, Watched) else func.computes
        return func

    # -- what is not -------------------------------------------------------------------

    def _skip(self, operation, func, args, kwargs):
        __tracebackhide__ = True
        if not operation.makes:
            return self._skip_in_place(operation, func, args, kwargs)
        if operation.name == "index":
            args = _with_places(args)
        if is_dynamic(operation, args):
            raise NotSimulated(
                f"{operation.name}, whose shape depends on values that a dry run does "
                f"not know ({called_from()}),",
                "`simgpu --gpus` runs it with values; or mask instead of choosing.",
            )
        found = values.result_of(self._shaper(func), args, kwargs)
        if found is None:
            raise NotSimulated(f"{operation.func.name()} in a dry run")
        for position, name in _written_beside(operation):
            written = self.argument(position, name)
            if written is not None:
                values.forget(written)
        out = found.made(values.new)
        if operation.name in _CHOOSES and state.current().dry.job.routing == "even":
            _choose_evenly(out, args)
        if (answer := self._answer(operation, args, kwargs, out)) is not None:
            values.forget(out, answer)
        elif operation.name in _ASSUMED:
            values.forget(out, _ASSUMED[operation.name])
        return out

    def _skip_in_place(self, operation, func, args, kwargs):
        """What it writes has no values afterwards; it returns what it writes."""
        __tracebackhide__ = True
        written, by_name = [], {}
        arguments = operation.func._schema.arguments
        given = {a.name: v for a, v in zip(arguments, args, strict=False)} | kwargs
        for argument in arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = given.get(argument.name)
            by_name[frozenset(argument.alias_info.before_set)] = value
            written += [value] if isinstance(value, torch.Tensor) else value or []
        if any(a.is_out for a in arguments) and not all(t.numel() for t in written):
            found = values.result_of(self._shaper(func), args, kwargs)
            with torch.no_grad():
                values.reshape(written, found)
        kept = _KEPT.get(operation.name, ())
        answer = None
        if len(written) == 1:
            answer = self._answer(operation, args, kwargs, written[0])
        for tensor in written:
            if not any(tensor is given.get(name) for name in kept):
                whole = tensor.nbytes == storage_of(tensor).nbytes()
                values.forget(tensor, answer if whole else None)
        returns = [
            by_name.get(frozenset(r.alias_info.before_set)) if r.alias_info else None
            for r in operation.func._schema.returns
        ]
        if not returns:
            return None
        return returns[0] if len(returns) == 1 else tuple(returns)

    def _answer(self, operation, args, kwargs, made):
        """What each element of the result is, if it follows from answers; else None."""
        name = operation.name.rstrip("_")
        if name in ("eq", "ne") and _is_finite_asked(*args[:2]):
            return name == ("eq" if args[0] is args[1] else "ne")
        if name not in _TELLING:
            return None
        try:
            # what is overwritten tells nothing of the result
            over = len(args) if name in _SETS else int(name == "copy")
            ones = [_one_of(value, i < over) for i, value in enumerate(args)]
        except LookupError:
            return None
        more = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
        out = operation.func(*ones, **more)
        if not isinstance(out, torch.Tensor):  # with the places of a `max`
            return None
        one = out.reshape(-1)[0].item()
        if name in _COUNTS:  # of so many that are equal
            return one * (args[0].numel() // max(made.numel(), 1))
        return one

    def _read(self, tensor: torch.Tensor):
        if self.operation.name in ("equal", "allclose"):
            value = True
        else:
            value = values.read(tensor)
        if self.operation.name == "is_nonzero":
            value = bool(value)
        state.current().dry.note_read(value)
        return value


@functools.cache
def _written_beside(operation: Operation) -> list[tuple[int, str]]:
    """(position, name) of the arguments that change although it makes its results."""
    changes = {*operation.writes, *_WRITTEN}
    return [(i, name) for i, name in enumerate(operation.arguments) if name in changes]


def _is_finite_asked(one, other) -> bool:
    """Whether `one` is compared with itself or with infinity, as `isfinite` does."""
    return one is other or (isinstance(other, float) and math.isinf(other))


def _one_of(value, whatever: bool):
    """An argument with tensors of one element that stand for all of theirs.

    Raises:
        LookupError: if the elements are not known to be equal.
    """
    if isinstance(value, (list, tuple)):
        return [_one_of(item, whatever) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    answer = 0 if whatever else values.assumed_of(value)
    if answer is None:
        if values.is_unknown(value) or value.numel() != 1:
            raise LookupError
        answer = value.item()
    return torch.full((1,) * value.dim(), answer, dtype=value.dtype)


def _with_places(args: tuple) -> tuple:
    """Arguments of `index`, with the places that masks name in their stead.

    `SyncBatchNorm` leaves out ranks without rows, by a mask that is not known: of
    ranks that do the same, none is left out.
    """
    found: list = []
    for index in args[1]:
        if index is None or index.dtype not in MASKS:
            found.append(index)
        elif not values.is_unknown(index):
            found += index.nonzero(as_tuple=True)
        elif _is_called_by(nn.SyncBatchNorm.forward.__code__):
            found.append(torch.arange(index.numel()))
        else:
            return args
    return args[0], found


def _is_called_by(code) -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _choose_evenly(out, args) -> None:
    """The indices that `topk`, `max` or `argmax` returns are spread evenly.

    So a router sends as many tokens to each expert: token t's choices are t * k, ...,
    t * k + k - 1, counted round.
    """
    indices = out[1] if isinstance(out, tuple) else out
    given = args[0]
    if indices.dtype is not torch.int64 or not given.dim():
        return
    if not values.fits(indices.nbytes, indices.dtype, False):
        return
    dim = next((a for a in args[1:] if isinstance(a, int)), -1)
    if indices.dim() == given.dim():  # topk, or with keepdim
        dim = next((d for d in reversed(range(given.dim()))
                    if indices.shape[d] != given.shape[d]), dim)  # fmt: skip
    count = torch.arange(indices.numel()).view(indices.shape) % given.shape[dim]
    indices.copy_(count)
    values.know(indices)


# what keeps its values although the operation is not computed: no gradient is infinite
_KEPT = {"_amp_foreach_non_finite_check_and_unscale_": ("found_inf",)}
