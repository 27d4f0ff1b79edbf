"""The face of the package: what is public, what it costs to import, its version."""

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

import simgpu
from support.limits import SHORT

FACE = Path(simgpu.__file__)
MODULES = ["simgpu.costs", "simgpu.pictures"]


def test_every_public_name_is_there():
    for name in simgpu.__all__:
        assert getattr(simgpu, name) is not None


def test_type_checkers_are_told_of_the_same_names_from_the_same_places():
    """What a checker reads stands in a block that Python never runs."""
    (block,) = [
        node
        for node in ast.parse(FACE.read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    told = {}
    for node in block.body:
        for alias in node.names:
            told[alias.asname or alias.name] = (node.module, alias.name)
    homes = {}
    for name, home in simgpu._HOMES.items():
        module, _, there = home.partition(":")
        homes[name] = (f"simgpu.{module}", there or name)
    assert told == homes
    assert {*homes, "__version__"} == set(simgpu.__all__)


@pytest.mark.parametrize("name", MODULES)
def test_a_public_module_has_what_it_lists_and_lists_what_it_has(name):
    module = importlib.import_module(name)
    assert getattr(simgpu, name.partition(".")[2]) is module
    for listed in module.__all__:
        assert getattr(module, listed) is not None
    typed = {"NamedTuple", "Card", "cost", "annotations"}
    there = {name for name in vars(module) if name[0] not in "_@"} - typed
    assert there == set(module.__all__)


def test_importing_simgpu_does_not_import_pytorch():
    """pytest looks at the plugin in every run, whatever is tested."""
    script = "import sys, simgpu.pytest_plugin; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=SHORT)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'simgpu' has no attribute 'gpu'"):
        simgpu.gpu  # noqa: B018


def test_the_installed_version_is_that_of_the_source():
    assert simgpu.__version__ == metadata.version("simgpu")


# -- types -----------------------------------------------------------------------------


def _callables(name: str, value: object) -> Iterator[tuple[str, Callable]]:
    """A function; of a class its public methods, getters and `__init__`."""
    if inspect.isfunction(value):
        yield name, value
    if not inspect.isclass(value) or not value.__module__.startswith("simgpu"):
        return
    for method, found in vars(value).items():
        if method.startswith("_") and method not in ("__init__", "__enter__"):
            continue
        found = getattr(found, "fget", None) or getattr(found, "__func__", found)
        written = getattr(found, "__module__", "") == value.__module__
        if inspect.isfunction(found) and written:
            yield f"{name}.{method}", found


def _not_annotated(function: Callable) -> list[str]:
    signature = inspect.signature(function)
    empty = inspect.Parameter.empty
    missing = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.annotation is empty and parameter.name not in ("self", "cls")
    ]
    returns = signature.return_annotation is empty and function.__name__ != "__init__"
    return missing + ["return"] * returns


def test_all_that_is_public_has_types():
    modules = [simgpu, *map(importlib.import_module, MODULES)]
    missing = {
        f"{name} ({function.__module__})": parts
        for module in modules
        for public in module.__all__
        for name, function in _callables(public, getattr(module, public))
        if (parts := _not_annotated(function))
    }
    assert missing == {}
