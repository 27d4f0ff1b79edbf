"""One missing name of PyTorch takes one feature away; versions that are not tested."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import simgpu
from simgpu import _compat

FOLDER = Path(simgpu.__file__).parent
# files that still name something private of PyTorch themselves
STILL = {
    "_messages.py", "_pictures/memory.py", "_prove/noise.py", "_prove/recorder.py",
    "_ranks/run_ranks.py",
}  # fmt: skip


def run(script: str, *options: str, **environment: str) -> subprocess.CompletedProcess:
    """Run a script in a process of its own."""
    return subprocess.run(
        [sys.executable, *options, "-c", script], capture_output=True, text=True,
        timeout=120, env={**os.environ, **environment},
    )  # fmt: skip


# -- where the names stand -------------------------------------------------------------


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(path: Path) -> set[str]:
    """What a file names of PyTorch that has a private part: "torch._C._nn"."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    known, found = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                known[alias.asname or first] = alias.name if alias.asname else first
                found.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                known[alias.asname or alias.name] = full
                found.add(full)
    for node in ast.walk(tree):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in known:
            found.add(".".join([known[node.id], *reversed(parts)]))
    return {
        name
        for name in found
        if name.split(".")[0] == "torch"
        and not name.startswith("torch.ops.")  # of operations, which have a schema
        and any(map(is_private, name.split(".")))
    }


def test_private_names_of_pytorch_stand_in_one_file():
    files = {
        path.relative_to(FOLDER).as_posix()
        for path in FOLDER.rglob("*.py")
        if path.name != "_compat.py" and private_names(path)
    }
    assert files == STILL


def test_each_name_stands_once():
    ours = [name for names in _compat._NAMES.values() for name in names]
    theirs = [path for names in _compat._NAMES.values() for path in names.values()]
    assert len(ours) == len(set(ours)) and len(theirs) == len(set(theirs))
    assert _compat.DOORS.keys() <= set(ours)


def test_what_this_pytorch_does_not_have_is_known():
    absent = {
        name
        for names in _compat._NAMES.values()
        for name in names
        if _compat.is_absent(getattr(_compat, name))
    }
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    expected = set()
    if version >= (2, 14):
        expected.add("raw_begin_sequence")
    else:
        expected.add("ensure_backend")
    if version < (2, 15):
        expected.add("check_stray_context")
    assert absent - {"raw_begin_sequence"} == expected - {"raw_begin_sequence"}
    assert ("raw_begin_sequence" in absent) == (version >= (2, 14))
