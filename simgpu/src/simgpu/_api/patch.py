"""One replaced attribute of PyTorch or Python, and how replacements come and go."""

import functools
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType

from simgpu import _runtime as state
from simgpu._compat import builtin_table, is_absent

_ABSENT = object()
_FUNCTIONS = (FunctionType, MethodType)
_NAMES = ("__module__", "__name__", "__qualname__", "__doc__")  # of functions
# id of a function -> the operation that TorchScript has for it
_torchscript_names = builtin_table()


@dataclass(frozen=True)
class Patch:
    """What stands for an attribute while GPUs are simulated."""

    owner: object  # a module or a class
    name: str  # of the attribute
    new: object
    reason: str
    # "attribute": it is replaced. "call": it stays, but the function mode answers calls
    # of it, also of those who have imported it before. "both". "item": of a dictionary.
    where: str = "attribute"


def patches(owner: object, reason: str, where: str = "attribute", **new) -> list[Patch]:
    """A row of the table for each attribute of one owner: name=what stands for it."""
    return [Patch(owner, name, value, reason, where) for name, value in new.items()]


class Patches:
    """The replacements that are in place, to be undone in reverse."""

    def __init__(self) -> None:
        self._undo: list[tuple[object, str, object]] = []
        self._undo_items: list[tuple[dict, str, object]] = []
        self.functions: dict = {}  # torch function -> what answers calls of it

    def apply(self, table: list[Patch]) -> None:
        """Put everything in place; whatever fails leaves the rest to `undo`."""
        for patch in table:
            if is_absent(patch.owner):
                continue  # what PyTorch does not have, it does not ask either
            if patch.where == "item":
                self._undo_items.append(
                    (patch.owner, patch.name, patch.owner.get(patch.name, _ABSENT))
                )
                patch.owner[patch.name] = patch.new
                continue
            old = vars(patch.owner).get(patch.name, _ABSENT)
            if patch.where != "attribute" and not hasattr(patch.owner, patch.name):
                continue  # nobody can call it
            if patch.where != "attribute":
                self.functions[getattr(patch.owner, patch.name)] = patch.new
            if patch.where != "call":
                self._undo.append((patch.owner, patch.name, old))
                self._replace(patch, old)

    def _replace(self, patch: Patch, old) -> None:
        new = patch.new
        if isinstance(patch.owner, ModuleType) and isinstance(new, _FUNCTIONS):
            new = _while_running(new, old)
        setattr(patch.owner, patch.name, new)
        # TorchScript, which has code of its own for `old`, has the same for `new`
        if id(old) in _torchscript_names and new is not old:
            _torchscript_names[id(new)] = _torchscript_names[id(old)]

    def undo(self) -> None:
        """Put back what was there before, whatever was put on top of it since."""
        while self._undo_items:
            owner, name, old = self._undo_items.pop()
            if old is _ABSENT:
                owner.pop(name, None)
            else:
                owner[name] = old
        while self._undo:
            owner, name, old = self._undo.pop()
            if vars(owner).get(name) is not old:
                _torchscript_names.pop(id(vars(owner).get(name)), None)
            if old is not _ABSENT:
                setattr(owner, name, old)
            elif name in vars(owner):
                delattr(owner, name)


def _while_running(new, old):
    """`new`, which other modules may keep: `old` again once no GPUs are simulated."""
    if old is _ABSENT:
        return new

    @functools.wraps(new)
    def either(*args, **kwargs):
        __tracebackhide__ = True
        return (old if state.running is None else new)(*args, **kwargs)

    functools.update_wrapper(either, old, _NAMES, ())  # PyTorch finds some by these
    either.__wrapped__ = new
    return either
