"""helpers is small, its imports make no circle, and a lesson finds it in one place."""

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from support import checkout
from support.limits import JOB
from tests.lessons import lessons

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "helpers"
NOTEBOOKS = ROOT / "notebooks"
MOST_LINES = 6000
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): (
        path
    )
    for path in checkout.files(FOLDER, "*.py")
}
Graph = dict[str, set[str]]


class Imports(ast.NodeVisitor):
    """The modules that a file imports, also inside functions, but not for types only.

    Attributes:
        found: modules, and what is imported from one: "helpers", "helpers.draw".
    """

    def __init__(self) -> None:
        self.found: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found |= {alias.name for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.found |= {f"{node.module}.{alias.name}" for alias in node.names}


def imports(source: str) -> set[str]:
    """What a file imports: "simgpu", or what it takes: "helpers.draw.stages"."""
    visitor = Imports()
    visitor.visit(ast.parse(source))
    return visitor.found


def module_of(name: str, modules: set[str]) -> str | None:
    """The module that an import runs: of "helpers.draw.stages", a function, its own."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def graph(sources: dict[str, str]) -> Graph:
    """Of each module, those of the same package that it imports.

    `helpers` itself loads its modules when they are used, so nothing leads from it.
    """
    modules = sources.keys()
    found = {
        name: {module_of(each, modules) for each in imports(source)} - {None, name}
        for name, source in sources.items()
    }
    return found


def circle(found: Graph) -> list[str]:
    """Modules of which each imports the next, and the last the first; none if empty."""
    try:
        TopologicalSorter(found).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_module_of_helpers_imports_itself_by_way_of_others():
    found = graph({name: path.read_text("utf-8") for name, path in FILES.items()})
    assert len(found["helpers.draw"]) > 20  # the graph is not empty
    assert circle(found) == []


def test_a_circle_is_seen_also_where_a_function_imports():
    sources = {
        "helpers.a": "from helpers import b",
        "helpers.b": "def late():\n    import helpers.c",
        "helpers.c": "from helpers.a import name",
    }
    assert set(circle(graph(sources))) == sources.keys()
    sources["helpers.c"] = "if TYPE_CHECKING:\n    from helpers.a import name"
    assert circle(graph(sources)) == []


def test_helpers_are_small():
    lines = sum(len(path.read_text("utf-8").splitlines()) for path in FILES.values())
    assert lines < MOST_LINES


@pytest.mark.parametrize("name", FILES)
def test_helpers_need_neither_tests_nor_scripts(name):
    roots = {each.split(".")[0] for each in imports(FILES[name].read_text("utf-8"))}
    assert not roots & {"tests", "scripts", "incidents"}


# -- a lesson finds helpers beside its folder, where nothing is installed --------------

PROGRAM = """
import multiprocessing, pickle, sys
sys.path[:0] = {path}

def main():
    from helpers import solved
    import helpers
    print(helpers.__file__)
    assert pickle.loads(pickle.dumps(solved.find)) is solved.find
    for method in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context(method)
        process = context.Process(target=solved.find, args=("03",))
        process.start()
        process.join()
        print(method, process.exitcode)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("path", [[""], ["", ".."], ["..", ""]])
def test_a_notebook_and_its_processes_get_the_package_from_beside_their_folder(
    tmp_path, path
):
    """As in Jupyter, whose kernels begin in the notebook's folder, and in pytest."""
    script = tmp_path / "lesson.py"
    script.write_text(PROGRAM.format(path=path))
    done = subprocess.run(
        [sys.executable, script],
        cwd=NOTEBOOKS, capture_output=True, text=True, timeout=JOB,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    found, *processes = done.stdout.splitlines()
    assert Path(found).resolve() == FOLDER / "__init__.py"
    assert processes and {line.split()[1] for line in processes} == {"0"}


# -- what belongs to a lesson is found by its number -----------------------------------

LESSONS = {path.name[:2]: path for path in lessons()}
SCRIPTS = [
    path
    for path in checkout.here(NOTEBOOKS / "scripts", "*.py")
    if path.stem != "__init__"
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_says_which_lesson_uses_it(script):
    said = ast.get_docstring(ast.parse(script.read_text("utf-8"))) or ""
    words = re.findall(r"[Ll]essons?\s[\d, andto]+", said)
    named = set(re.findall(r"\d\d", " ".join(words)))
    name = re.compile(rf"\b{script.stem}\b")
    using = {n for n, path in LESSONS.items() if name.search(path.read_text("utf-8"))}
    assert named <= LESSONS.keys() and named & using, (named, using)
