"""`--since COMMIT`: no more tests than what differs from a commit can change.

What differs are files between the commit and the working tree, and new ones that git
does not ignore. `TABLE` says which tests each of them is for; most rows ask the
sources, which import and name each other. All tests run for a file that has no row or
no test, is gone, or is new and not added to git; and where git cannot tell what
differs: there is none, it has no such commit, the clone is shallow. A file that the
command names is run in any case. Slow tests are left out unless `-m` asks for them.

Not seen: a test that reads a file which it does not name, and the table does not know.
So a run of everything proves a change; this one says sooner what is wrong with it.
"""

import ast
import contextlib
import functools
import itertools
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

from support import checkout

ROOT = Path(__file__).resolve().parents[2]
ROOTS = ("", "notebooks/", "simgpu/tests/")  # where imports are looked for
LESSON = re.compile(r"notebooks/\d\d-[^/]*\.ipynb")
TEST = re.compile(rf"(.*/)?test_\w+\.py|{LESSON.pattern}")
MOST_NAMES = 3  # of files in the line of a run


# -- what the sources say --------------------------------------------------------------


@functools.cache
def files() -> tuple[str, ...]:
    """The project's files, from its root."""
    return tuple(path.relative_to(ROOT).as_posix() for path in checkout.files(ROOT))


@functools.cache
def tests() -> tuple[str, ...]:
    """Those that pytest can be given: files of tests, and lessons."""
    return tuple(filter(TEST.fullmatch, files()))


@functools.cache
def source(file: str) -> str:
    """The text of a file; of a notebook, of its cells; "" if it is no text."""
    try:
        text = (ROOT / file).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""
    if file.endswith(".ipynb"):
        return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return text


@functools.cache
def _tree(file: str) -> ast.Module:
    """The program, or those of a lesson's cells; without what is none, a reader's."""
    programs = [source(file)]
    if file.endswith(".ipynb"):
        cells = json.loads((ROOT / file).read_text(encoding="utf-8"))["cells"]
        texts = ("".join(c["source"]) for c in cells if c["cell_type"] == "code")
        programs = [re.sub(r"^[%!].*", "", text, flags=re.M) for text in texts]
    body: list[ast.stmt] = []
    for program in programs:
        with contextlib.suppress(SyntaxError):
            body += ast.parse(program).body
    return ast.Module(body, [])


@functools.cache
def _imports(file: str) -> frozenset[str]:
    """The project's files that a file imports, wherever in it; none of simgpu."""
    if not file.endswith((".py", ".ipynb")):
        return frozenset()
    modules = set()
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            modules |= {node.module, *names}
    paths = [module.replace(".", "/") for module in modules]
    beside = f"{PurePosixPath(file).parent}/"
    known = set(files())
    return frozenset(
        name
        for path in paths
        for root in (*ROOTS, beside)
        for name in (f"{root}{path}.py", f"{root}{path}/__init__.py")
        if name in known
    )


@functools.cache
def _base_names() -> dict[str, list[str]]:
    """Name of a program, or of what it reads -> the files that have this name."""
    found: dict[str, list[str]] = {}
    for file in files():
        name = PurePosixPath(file).name
        if not file.startswith("simgpu/src/") and not name.startswith(
            ("__", "README", "requirements")
        ):
            found.setdefault(name, []).append(file)
    return found


@functools.cache
def uses(file: str) -> frozenset[str]:
    """What a file imports, and what it calls by name: a script, its data."""
    if not file.endswith((".py", ".ipynb")):
        return frozenset()
    found = {*_imports(file)}
    for word in set(re.findall(r"[\w-]+(?:\.\w+)+", source(file))):
        if not (word.endswith(".py") and file.startswith("helpers/")):  # only imports
            found |= set(_base_names().get(word, ()))
    if LESSON.fullmatch(file):  # which imports them by its number
        found.add(f"notebooks/exercises/lesson_{_number(file)}.py")
    return frozenset(found & {*files()} - {file, *tests()})


@functools.cache
def needs(file: str) -> frozenset[str]:
    """A file, and all that it uses, by way of others too."""
    found, new = {file}, [file]
    while new:
        more = uses(new.pop()) - found
        found |= more
        new += more
    return frozenset(found)


@functools.cache
def _said(test: str) -> str:
    """The text of a test, and of what it uses, but for what lessons import whole."""
    general = ("helpers/", "tests/harness/", "conftest.py")
    own = (it for it in needs(test) if it == test or not it.startswith(general))
    return "\n".join(map(source, own))


def _number(file: str) -> str:
    """Of a lesson, in the name of what belongs to it."""
    return re.findall(r"\d\d", PurePosixPath(file).name)[0]


# -- which tests a file is for ---------------------------------------------------------

Rule = Callable[[str], Iterable[str]]


def itself(file: str) -> Iterable[str]:
    """The file, which is a test."""
    return [file]


def everything(file: str) -> Iterable[str]:
    """All: what such a file changes cannot be told."""
    return tests()


def naming(file: str) -> Iterable[str]:
    """Those that import or name it, or what does."""
    return (test for test in tests() if file in needs(test))


def calling(file: str) -> Iterable[str]:
    """Of those, as they import the whole package: which say one of its names."""
    package = {it for it in files() if re.fullmatch(r"helpers/.*(?<!__)\.py", it)}
    above, new = {file}, [file]
    while new:
        one = new.pop()
        more = {it for it in package if one in _imports(it)} - above
        above |= more
        new += more
    said = re.compile(rf"\b({'|'.join(sorted(set().union(*map(_public, above))))})\b")
    return (test for test in naming(file) if said.search(_said(test)))


def _public(file: str) -> set[str]:
    """The names that a module defines for others, and its own."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    names = {node.name for node in _tree(file).body if isinstance(node, kinds)}
    return {name for name in names if name[0] != "_"} | {PurePosixPath(file).stem}


def of_its_lesson(file: str) -> Iterable[str]:
    """The lesson whose number is in its name, and what says this number."""
    return _of_lesson(_number(file))


@functools.cache
def _of_lesson(number: str) -> list[str]:
    own = [test for test in tests() if test.startswith(f"notebooks/{number}-")]
    said = re.compile(rf"[\"'/]{number}[\"'-]")
    others = (test for test in tests() if not LESSON.fullmatch(test))
    return own + [test for test in others if said.search(_said(test))]


def of_its_lessons(file: str) -> Iterable[str]:
    """The same for each lesson that names it, whose commands start it."""
    of_each = [of_its_lesson(it) for it in naming(file) if LESSON.fullmatch(it)]
    return itertools.chain(*of_each)


def saying(words: str) -> Rule:
    """Those that have words in their sources, or in what they use."""
    said = re.compile(words)

    @functools.cache
    def found() -> list[str]:
        return [test for test in tests() if said.search(_said(test))]

    return lambda file: found()


class Row(NamedTuple):
    """What a change of some files can change.

    Attributes:
        files: a pattern of paths from the root; `*` is any text, with slashes too.
        tests: patterns of paths, and rules that find some for a file.
    """

    files: str
    tests: tuple[str | Rule, ...]


ALWAYS = (  # they look at all files, and take seconds
    "tests/test_badges.py", "tests/test_layers.py", "tests/test_limits.py",
    "tests/test_lint.py", "tests/test_package.py", "tests/harness/test_touched.py",
    "simgpu/tests/test_layers.py",
)  # fmt: skip
ALL_LESSONS = (saying(r"tests\.lessons|lessons\(\)"), "tests/test_take_home.py")
EXERCISES = ("tests/test_check.py", "tests/test_solved.py")
PAGES = (
    "tests/test_pages.py", "tests/test_site.py", "tests/test_lesson_rules.py",
    "tests/tools/test_commands.py", "simgpu/tests/test_readme.py",
    "simgpu/tests/test_wheel.py",
)  # fmt: skip
TABLE = [  # the first row that fits is a file's
    Row("*/test_*.py", (itself, naming)),
    # the course
    Row("notebooks/[0-9][0-9]-*.ipynb", (itself, of_its_lesson, *ALL_LESSONS)),
    Row("notebooks/exercises/lesson_*.py", (of_its_lesson, naming, *EXERCISES)),
    Row("notebooks/exercises/*", (naming, *EXERCISES)),
    Row("notebooks/incidents/*", (naming, "notebooks/29-*", "tests/test_incidents.py")),
    Row("notebooks/scripts/trainer/*", (naming, saying("trainer/"))),
    Row("notebooks/scripts/*", (naming, of_its_lessons, "tests/test_take_home.py")),
    Row("notebooks/images/*", (saying("lab.png"),)),
    Row("notebooks/helpers.py", (everything,)),
    Row("notebooks/*.md", PAGES),
    Row("helpers/__*.py", (everything,)),
    Row("helpers/*.py", (calling, "tests/test_check.py")),
    Row("helpers/*", (naming,)),
    # the simulator
    Row(
        "simgpu/src/simgpu/_dry/*",
        (saying('simgpu[ .]dry|_dry|dry_run|"(dry|sweep)"|simgpu sweep'),),
    ),
    Row(
        "simgpu/src/simgpu/_prove/*",
        (saying('simgpu[ .]prove|_prove|"prove"|assert_same_on'),),
    ),
    Row(
        "simgpu/src/simgpu/_plan/*",
        (saying('simgpu[ .]plan|_plan|"plan"|layouts'),),
    ),
    Row("simgpu/src/simgpu/_measure/*", (saying('simgpu measure|_measure|"measure"'),)),
    Row("simgpu/src/*", (everything,)),
    Row("simgpu/pyproject.toml", (everything,)),
    Row("simgpu/[!/]*.md", (naming, *PAGES)),
    Row("simgpu/LICENSE", ("simgpu/tests/test_wheel.py",)),
    Row("simgpu/MANIFEST.in", ("simgpu/tests/test_wheel.py",)),
    # tests, and what they use
    Row("*conftest.py", (everything,)),
    Row("tests/__init__.py", (everything,)),
    Row("tests/lessons.py", (everything,)),
    Row("tests/harness/*", (everything,)),
    Row("simgpu/tests/support/limits*.py", (everything,)),
    Row("simgpu/tests/support/checkout.py", (everything,)),
    Row("tests/answers/*", ("tests/test_check.py",)),
    Row("tests/browser/*", ("tests/browser/test_lessons.py",)),
    Row("tests/models/*", (naming, "tests/test_trainers*.py")),
    Row("tests/tools/*", (naming, "tests/tools/test_*.py")),
    Row("tests/benchmarks/*", (naming, "tests/tools/test_commands.py")),
    Row("tests/README.md", PAGES),
    Row("*/recordings/*", (naming, saying('recordings[/"]'))),
    Row(
        "simgpu/tests/scripts/cluster/*",
        (naming, "simgpu/tests/test_cluster.py", "simgpu/tests/test_dry_twins.py"),
    ),
    Row("simgpu/tests/scripts/figures/*", (naming, "simgpu/tests/test_figures.py")),
    Row("simgpu/tests/scripts/silent/*", (naming, "simgpu/tests/test_prove_twins.py")),
    Row(
        "simgpu/tests/scripts/packages/*",
        (naming, "simgpu/tests/test_packages.py", "simgpu/tests/test_children.py"),
    ),
    Row("simgpu/tests/tools/*", (naming, "tests/tools/test_commands.py")),
    Row("tests/*", (naming,)),
    Row("simgpu/tests/*", (naming,)),
    # the repository
    Row("requirements.txt", (everything,)),
    Row("pyproject.toml", (everything,)),
    Row("noxfile.py", ("tests/test_package.py",)),
    Row("*.md", PAGES),
    Row("LICENSE", ("simgpu/tests/test_wheel.py",)),
    Row(".ci/*", ("tests/test_site.py",)),
    Row(".github/*", (naming, "tests/test_site.py")),
    Row(".pre-commit-config.yaml", ("tests/test_lint.py",)),
    Row(".gitignore", ("tests/test_site.py",)),
    Row("binder/*", ("tests/test_badges.py", "tests/test_lesson_rules.py")),
]


def row_of(file: str) -> Row | None:
    """The row of a file."""
    return next((row for row in TABLE if fnmatchcase(file, row.files)), None)


def tests_of(file: str) -> set[str] | None:
    """The tests that its change can change; None: that cannot be told."""
    row = row_of(file) if file in files() else None
    if row is None or everything in row.tests:
        return None
    found: set[str] = set()
    for rule in row.tests:
        found |= set(rule(file) if callable(rule) else matching(rule))
    return found & set(tests()) or None


def matching(pattern: str) -> list[str]:
    """The tests whose paths fit a pattern."""
    return [test for test in tests() if fnmatchcase(test, pattern)]


# -- what differs ----------------------------------------------------------------------


class CannotTell(Exception):
    """Why git does not say what differs."""


def _git(*words: str) -> list[str]:
    # a hook of git says by variables where it works, which need not be here
    environ = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, env=environ, capture_output=True
        )
    except OSError as error:
        raise CannotTell("there is no git here") from error
    if done.returncode:
        raise CannotTell("git knows of no such commit here")
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]


def differing(commit: str) -> list[str]:
    """Files that differ from a commit, or are new; from the root, sorted.

    Raises:
        CannotTell: if there is no git, or no such commit.
    """
    _git("rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}")
    changed = _git("diff", "--name-only", "-z", "--no-renames", "--relative", commit)
    new = _git("ls-files", "--others", "--exclude-standard", "-z")
    return sorted({*changed, *new})


def selection(commit: str) -> tuple[list[str] | None, str]:
    """Which tests to run, None for all, and the line that says why."""
    try:
        changed = differing(commit)
    except CannotTell as error:
        return None, f"since {commit}: all tests, because {error}"
    found = {file: tests_of(file) for file in changed}
    if untold := [file for file, of_it in found.items() if of_it is None]:
        return None, f"since {commit}: all tests, because of {_listed(untold)}"
    selected = {test for of_it in found.values() for test in of_it or ()}
    if changed:
        selected |= {test for pattern in ALWAYS for test in matching(pattern)}
    counts = f"{len(selected)} of {len(tests())} files"
    why = _listed(changed) if changed else "nothing differs"
    return sorted(selected), f"since {commit}: {counts}, for {why}"


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMES
    listed = ", ".join(names[:MOST_NAMES])
    return f"{listed} and {more} more" if more > 0 else listed


# -- a run -----------------------------------------------------------------------------

SELECTED = pytest.StashKey[list[str] | None]()  # the tests to run; None: all
SAID = pytest.StashKey[str]()  # the line that says why


def pytest_addoption(parser):
    parser.addoption(
        "--since",
        metavar="COMMIT",
        help="run only the tests that what differs from a commit can change",
    )


def pytest_configure(config):
    since = config.option.since
    if hasattr(config, "workerinput"):
        config.stash[SELECTED] = config.workerinput["since"]
    elif since is not None:
        config.stash[SELECTED], config.stash[SAID] = selection(since)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):  # of xdist: all workers have what this process found
    node.workerinput["since"] = node.config.stash.get(SELECTED, None)


def pytest_ignore_collect(collection_path, config):
    selected = config.stash.get(SELECTED, None)
    if selected is None or not collection_path.is_relative_to(ROOT):
        return None
    file = collection_path.relative_to(ROOT).as_posix()
    return True if TEST.fullmatch(file) and file not in selected else None


def pytest_report_header(config):
    return config.stash.get(SAID, None)


def pytest_sessionfinish(session):
    nothing = session.config.stash.get(SELECTED, None) == []
    if nothing and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter, config):
    if said := config.stash.get(SAID, None):
        terminalreporter.write_line(said)
