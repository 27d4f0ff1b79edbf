"""The simulator's layers import only downwards, and nothing of the course."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import simgpu
from support import checkout
from support.limits import SHORT

FOLDER = Path(simgpu.__file__).parent
# from the bottom to the top; a layer may import itself and those before it
LAYERS = [
    {
        "_errors", "_compat", "_cuda_errors", "_locking", "_private_names", "_frames",
        "_lines", "_loopback", "_rank_variables", "_switch",
    },
    {"_device"},
    {"_request"},
    {"_timing", "_pictures"},  # a timeline draws itself
    {"costs", "pictures"},
    {"_sanitizer"},
    {"_runtime"},
    {"_dispatch"},
    {"_fusing"},
    {"_api"},
    {"_distributed"},
    {"_messages"},
    {"_patches"},
    {"_startup"},
    {"_estimates"},
    {"_nvidia_smi"},
    {"_failures", "_child_commands", "_launch", "_launchers", "_options", "_site"},
    {
        "__main__", "_spawn_main", "_ranks", "_prove", "_dry", "_measure",
        "pytest_plugin",
    },
    {"_plan"},
    {"__init__"},  # its imports are for type checkers; what it loads comes later
]  # fmt: skip
HEIGHTS = {name: height for height, names in enumerate(LAYERS) for name in names}
MOST_LINES = 420
FILES = {
    path.relative_to(FOLDER).as_posix(): path for path in checkout.files(FOLDER, "*.py")
}


def layer(file: str) -> str:
    """ "_dispatch" of "_dispatch/mode.py", "_runtime" of "_runtime.py"."""
    return file.split("/")[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The modules that a file imports, wherever in it: "simgpu._runtime", "torch"."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
            if node.module.startswith("simgpu"):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layers_imported(path: Path) -> set[str]:
    parts = [name.split(".") for name in imported(path)]
    own = {p[1] for p in parts if p[0] == "simgpu" and len(p) > 1}
    return {name for name in own if name in HEIGHTS}


def test_every_file_has_a_layer():
    assert {layer(file) for file in FILES} == HEIGHTS.keys()


@pytest.mark.parametrize("file", FILES)
def test_a_layer_imports_only_itself_and_those_below(file):
    own = HEIGHTS[layer(file)]
    above = {name for name in layers_imported(FILES[file]) if HEIGHTS[name] > own}
    assert above == set()


@pytest.mark.parametrize("file", FILES)
def test_nothing_of_the_course_is_imported(file):
    roots = {name.split(".")[0] for name in imported(FILES[file])}
    assert not roots & {"helpers", "tests", "scripts", "matplotlib"}


@pytest.mark.parametrize("file", FILES)
def test_no_file_grows_too_long_to_read(file):
    assert len(FILES[file].read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_time_needs_no_pytorch():
    script = "import sys, simgpu._timing.timeline; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=SHORT)


# a timeline draws itself: it asks for the picture when it is shown
DRAW_THEMSELVES = {
    "_timing/timeline.py": "_pictures/timelines.py",
    "_timing/job.py": "_pictures/jobs.py",
}


def files_imported(file: str) -> set[str]:
    """The files of simgpu that a file imports when it runs, wherever in it."""
    tree = ast.parse(FILES[file].read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("simgpu."):
            names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
        elif isinstance(node, ast.ImportFrom) and node.module == "simgpu":
            names = [f"simgpu.{alias.name}" for alias in node.names]
        else:
            continue
        paths = [name.removeprefix("simgpu.").replace(".", "/") for name in names]
        found |= {f"{path}.py" for path in paths}
    return (found & set(FILES)) - {file, DRAW_THEMSELVES.get(file)}


def test_files_import_in_no_circle():
    graph = {file: files_imported(file) for file in FILES}
    assert sum(map(len, graph.values())) > 500
    assert list(graphlib.TopologicalSorter(graph).static_order())  # or CycleError
