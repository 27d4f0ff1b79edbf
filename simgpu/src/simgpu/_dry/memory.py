"""What the memory of a card held when it held most: by kind, and by line."""

import contextlib
import functools
import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch

from simgpu._compat import (
    current_graph_task_id,
    fsdp_param_group,
    fsdp_runtime,
    is_absent,
)
from simgpu._device import workspaces
from simgpu._device.history import History
from simgpu._dispatch.placement import block_of, inner_tensors, is_plain
from simgpu._frames import is_program_code, shown

_DISTRIBUTED = str(Path(torch.distributed.__file__).parent)
# of it what calls operations of the model, as everything else does
_MODEL = tuple(
    str(Path(_DISTRIBUTED, name))
    for name in ("tensor", "algorithms", "pipelining/microbatch.py")
)
# what it calls of the program's is not its own: a layer, a backward pass
_CALLS = {torch.nn.modules.module.__file__, torch.autograd.__file__}
_TENSOR = str(Path(_DISTRIBUTED, "tensor"))
_DDP = torch.nn.parallel.distributed.__file__  # its buckets
_OPTIM = str(Path(torch.__file__).parent / "optim")
# what FSDP2 and FSDP1 gather parameters into, by file: the functions that make it
_GATHERS = {
    str(Path(_DISTRIBUTED, "fsdp", file)): names
    for file, *names in (
        ("_fully_shard/_fsdp_param.py", "init_all_gather_outputs", "alloc_storage"),
        ("_flat_param.py", "_alloc_padded_unsharded_flat_param"),
    )
}
GATHERED = "gathered"
_MESSAGES = "", "communication"  # what a frame further out may know better
KINDS = ("parameters", GATHERED, "gradients", "optimizer", "buffers", "activations",
         "communication", "workspaces", "other")  # fmt: skip


class Course(NamedTuple):
    """How the memory of a card went on.

    Attributes:
        moments: bytes by kind, at equal distances, in allocations and frees.
        ends: where each step ends, between 0 and 1.
    """

    moments: list[dict[str, int]]
    ends: list[float]


def _is_message(file: str) -> bool:
    if file == _DDP:
        return True
    return file.startswith(_DISTRIBUTED) and not file.startswith(_MODEL)


class _File(NamedTuple):
    """What a file on the stack says of a block that was made below it.

    Attributes:
        kind: of the block; "" if it says nothing.
        calls: whether it calls layers and backward passes, which are not of that kind.
        of_dtensor: what a DTensor gathers is the model's, as its result.
    """

    kind: str
    calls: bool
    of_dtensor: bool


@functools.cache
def _file(name: str) -> _File:
    kind = "communication" if _is_message(name) else ""
    if name == workspaces.__file__:
        kind = "workspaces"
    elif name.startswith(_OPTIM):
        kind = "optimizer"
    return _File(kind, name in _CALLS, name.startswith(_TENSOR))


def _gathers(code: CodeType) -> bool:
    return code.co_name in _GATHERS.get(code.co_filename, ())


class _Lines(History):
    """Of each block, the program's line and what made it."""

    def frames(self) -> list[dict]:
        # the allocator's own frames say nothing, and a frame is dear
        frame: FrameType | None = sys._getframe(3)
        kind, called = "", False
        while frame is not None:
            name = frame.f_code.co_filename
            file = _file(name)
            called = called or file.calls
            if file.kind == "communication":
                if not called and kind in _MESSAGES:
                    kind = GATHERED if _gathers(frame.f_code) else file.kind
            elif kind == "communication" and file.of_dtensor:
                kind = ""
            elif not kind:
                kind = file.kind
            if is_program_code(name):
                break
            frame = frame.f_back
        if not kind and current_graph_task_id() != -1:
            kind = "backward"
        if frame is None:
            return [{"filename": "PyTorch", "line": 0, "name": "", "kind": kind}]
        code = frame.f_code
        return [{"filename": code.co_filename, "line": frame.f_lineno,
                 "name": code.co_name, "kind": kind}]  # fmt: skip


def _named(frame: dict) -> str:
    """A line of the program: "train.py:12"."""
    name = shown(frame["filename"]).replace("\\", "/").rpartition("/")[2]
    return f"{name}:{frame['line']}" if frame["line"] else name


def _parameters() -> Iterator[torch.nn.Parameter]:
    """All that there are."""
    for found in gc.get_objects():
        # its type first: an object may do anything when asked for its class
        if issubclass(type(found), torch.Tensor):
            if isinstance(found, torch.nn.Parameter):
                yield found


def _of_fsdp_2(_, gradients: list, *more) -> list:
    """What `foreach_reduce` is given; also what is reduced in part, by HSDP."""
    return gradients + [each for each in more if isinstance(each, torch.Tensor)]


def _of_fsdp_1(_, handle) -> list:
    """What `_reduce_grad` is given."""
    return [handle.flat_param.grad]


class Watch:
    """Watches the allocator of a GPU.

    Args:
        gpu: whose.
        keep: whether a snapshot will be asked for, for which all events are kept.
    """

    def __init__(self, gpu, keep: bool = False):
        self._kept: list[dict] | None = [] if keep else None
        self.memory = gpu.memory
        self.memory.history = _Lines(self.memory)
        skipped = () if keep else ("free_requested",)  # which nobody asks for
        self.memory.history.record(10**8, "alloc", skipped)
        self._kinds: dict[int, str] = {}  # number of an allocation -> kind
        self._live: dict[int, int] = {}  # address -> number of its allocation
        self._made: list[tuple[int, dict]] = []  # of each allocation
        self._moves: list[tuple[int, int]] = []  # (number, 1 or -1)
        self._ends: list[int] = []  # how many of them there were after each step
        self._leaves: list[weakref.ref] | None = None  # parameters, as of this step

    def _follow(self) -> None:
        """Read the events that came since."""
        events = self.memory.history.events
        while events:
            event = events.popleft()
            if self._kept is not None:
                self._kept.append(event)
            action, address = event["action"], event.get("addr")
            if action == "alloc":
                number = len(self._made)
                where = event["frames"][0]
                self._made.append((event["size"], where))
                self._live[address] = number
                self._moves.append((number, 1))
            elif action == "free_completed":
                number = self._live.pop(address, None)
                if number is not None:
                    self._moves.append((number, -1))

    def _follow_all(self) -> None:
        self.memory._take_back_freed()
        self._follow()

    def optimizer_steps(self, optimizer) -> None:
        """Before an optimizer steps: what are gradients, parameters, states."""
        self._follow_all()
        self.tag_parameters(frozen=True)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._tag(parameter, "parameters")
                self._tag_gradients([parameter.grad])
        self._tag_states(optimizer)

    def tag_parameters(self, frozen: bool = False) -> None:
        """Before any optimizer has stepped: what are parameters and gradients.

        Args:
            frozen: of those alone that are not trained, and that no optimizer has.
        """
        if self._ends or not self._live:
            return
        for found in _parameters():
            if not (frozen and found.requires_grad):
                self._tag(found, "parameters")
                self._tag_gradients([found.grad])

    def backward_is_over(self) -> None:
        """What has been added up so far are gradients, whoever frees them later.

        `main_grad` is where Megatron-LM adds them up, in float32.
        """
        self._follow_all()
        if self._leaves is None:
            self._leaves = [weakref.ref(found) for found in _parameters()]
        for ref in self._leaves:
            if (leaf := ref()) is not None:
                self._tag_gradients([leaf.grad, getattr(leaf, "main_grad", None)])

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, what FSDP2 and FSDP1 reduce is seen before they free it."""
        with contextlib.ExitStack() as stack:
            for module, name, gradients in (
                (fsdp_param_group, "foreach_reduce", _of_fsdp_2),
                (fsdp_runtime, "_reduce_grad", _of_fsdp_1),
            ):
                if not is_absent(module) and hasattr(module, name):
                    seen = self._seeing(getattr(module, name), gradients)
                    stack.enter_context(mock.patch.object(module, name, seen))
            yield

    def _seeing(self, reduce: Callable, gradients: Callable) -> Callable:
        @functools.wraps(reduce)
        def seen(*args, **kwargs) -> Any:
            self._follow_all()
            self._tag_gradients(gradients(*args))
            return reduce(*args, **kwargs)

        return seen

    def _tag_gradients(self, gradients: Iterable[torch.Tensor | None]) -> None:
        for gradient in gradients:
            if gradient is not None:
                self._tag(gradient, "gradients")

    def _tag_states(self, optimizer) -> None:
        for its in optimizer.state.values():
            for value in its.values() if isinstance(its, dict) else ():
                if isinstance(value, torch.Tensor):
                    self._tag(value, "optimizer")

    def step_is_over(self, optimizer) -> None:
        """After it: what are its states, made in its first step."""
        self._follow_all()
        self._leaves = None
        self._ends.append(len(self._moves))
        self._tag_states(optimizer)

    def snapshot(self) -> dict:
        """What `torch.cuda.memory._snapshot` returns, of this card alone."""
        self._follow_all()
        traces: list[list[dict]] = [[] for _ in range(self.memory.index)]
        return {
            "segments": self.memory.history.snapshot(),
            "device_traces": [*traces, self._kept or []],
            "external_annotations": [],
            "allocator_settings": {},
        }

    def _tag(self, tensor, kind: str) -> None:
        for part in [tensor] if is_plain(tensor) else inner_tensors(tensor):
            block = block_of(part)
            if block is not None and block.address in self._live:
                self._kinds.setdefault(self._live[block.address], kind)

    def _kind(self, number: int) -> str:
        """Of an allocation."""
        where = self._made[number][1]
        kind = self._kinds.get(number) or where["kind"] or "activations"
        return {"backward": "other"}.get(kind, kind)

    def course(self, whole: bool, most: int = 600) -> Course:
        """What the memory held, from the first allocation on.

        Args:
            whole: to the end, and not only to that of the last step.
            most: moments that are kept; of all between two, that with most bytes.
        """
        self._follow_all()
        count = len(self._moves)
        if self._ends and not whole:
            count = self._ends[-1]
        each = max(count / most, 1.0)
        now: Counter[str] = Counter()
        total, high, moments = 0, -1, []
        for place, (number, sign) in enumerate(self._moves[:count]):
            size = sign * self._made[number][0]
            now[self._kind(number)] += size
            total += size
            if int(place / each) == len(moments):  # the next of those that are kept
                moments.append({})
                high = -1
            if total > high:
                high = total
                moments[-1] = {kind: now[kind] for kind in KINDS if now[kind]}
        return Course(moments, [end / max(count, 1) for end in self._ends])

    def peak(self) -> tuple[int, dict[str, int], list[dict]]:
        """The most bytes that tensors took, by kind, and by kind and line."""
        self._follow_all()
        self.tag_parameters()
        total = most = when = 0
        for i, (number, sign) in enumerate(self._moves):
            total += sign * self._made[number][0]
            if total > most:
                most, when = total, i + 1
        there = set()
        for number, sign in self._moves[:when]:
            there.add(number) if sign > 0 else there.discard(number)
        kinds, lines = Counter(), Counter()
        for number in there:
            size, where = self._made[number]
            kind = self._kind(number)
            kinds[kind] += size
            lines[kind, _named(where)] += size
        rows = [
            {"kind": kind, "line": line, "bytes": size}
            for (kind, line), size in lines.most_common()
        ]
        return most, {k: kinds[k] for k in KINDS if kinds[k]}, rows
