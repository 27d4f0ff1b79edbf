"""Names of modules and parameters that do not depend on how the model is wrapped.

DDP, `torch.compile`, checkpoint wrappers and the first FSDP put a module around another
one. Its part of the name is left out, so that the parameters of one process and of many
ranks have the same names.
"""

import weakref
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

_INNER = "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"


def modules_of(root: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Each module with its name, wrappers with the name of what they wrap."""
    yield prefix, root
    wraps = isinstance(root, DataParallel | DistributedDataParallel)
    for name, child in root.named_children():
        if name in _INNER or (wraps and name == "module"):
            yield from modules_of(child, prefix)
        else:
            yield from modules_of(child, f"{prefix}.{name}".lstrip("."))


class Names:
    """Names of everything in the models that the program has called."""

    def __init__(self):
        self.roots: list[nn.Module] = []

    def add(self, root: nn.Module) -> None:
        """Note a model, unless it is known, or a part of one that is."""
        if not any(root is module for module, _ in self._modules()):
            inside = set(map(id, root.modules()))
            self.roots = [old for old in self.roots if id(old) not in inside]
            self.roots.append(root)

    def of_module(self, module: nn.Module) -> str | None:
        """Its name, "" for the model itself; None if it belongs to none."""
        return next((name for m, name in self._modules() if m is module), None)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Each parameter once, under its first name."""
        found: dict[str, nn.Parameter] = {}
        seen: set[int] = set()
        for module, name in self._modules():
            for own, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    found[f"{name}.{own}".lstrip(".")] = parameter
        return found

    def buffers(self) -> dict[str, torch.Tensor]:
        """Each buffer by its name."""
        return {
            f"{name}.{own}".lstrip("."): buffer
            for module, name in self._modules()
            for own, buffer in module.named_buffers(recurse=False)
        }

    def _modules(self) -> Iterator[tuple[nn.Module, str]]:
        for number, root in enumerate(self.roots):
            for name, module in modules_of(root):
                several = f"model {number}: " if number else ""
                yield module, several + name


class Ties:
    """Parameters that two modules were given, and that should stay one parameter."""

    def __init__(self):
        self._places: dict[int, list[tuple[weakref.ref, str]]] = {}
        self._kept: list[nn.Parameter] = []  # or a number could come again

    def add(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """Note that a module was given a parameter."""
        if parameter is not None:
            self._kept.append(parameter)
            places = self._places.setdefault(id(parameter), [])
            places.append((weakref.ref(module), name))

    def broken(self, names: Names) -> tuple[str, str] | None:
        """The names of two parameters that were one when the model was made."""
        for places in self._places.values():
            found = []
            for reference, own in places:
                module = reference()
                name = None if module is None else names.of_module(module)
                if name is not None and own in module._parameters:
                    label = f"{name}.{own}".lstrip(".")
                    found.append((label, module._parameters[own]))
            for label, parameter in found[1:]:
                if parameter is not found[0][1]:
                    return found[0][0], label
        return None
