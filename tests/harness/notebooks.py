"""Notebooks as tests: what nbval lacks, as one pytest plugin.

* The same numbers everywhere: simulated GPUs, one thread, no colours, an empty home
  folder.
* A lesson that a reader has worked in runs, and is not compared (tests/lessons.py).
* Numbers that depend on the processor are compared to their last place (numbers.py),
  and what depends on PyTorch only with the version that needs it (versions.py).
* The sanitizer is found from any working directory, and stderr is not compared.
* A kernel that dies fails its cell at once (kernels.py), and a cell has a limit of time
  that fits the machine.
* After a cell that raised, the notebook's later cells are skipped, not failed.
* The last test of a notebook is its budget (budgets.py). It ends the kernel.
* No process outlives its notebook (processes.py).
* `-n 2` keeps the cells of a notebook together, and begins with what takes longest
  (order.py).
* A line every half minute says how far a run is (progress.py).
* A run ends with a line for each cell that failed (last_lines.py).
* A run ends with the number of outputs compared and with what each notebook took.
* A run of everything leaves the slow tests out, unless `-m` asks for some.

`HELPERS_GPUS=real pytest --nbval-lax notebooks` is the one way to run the lessons on
real GPUs; in every other run simulated ones are forced, whatever HELPERS_GPUS says.
"""

import gc
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from nbval.plugin import IPyNbCell, IPyNbFile, NbCellError

from support import limits
from tests import lessons
from tests.harness import budgets, last_lines, numbers, usage, versions
from tests.harness.kernels import Kernel, KernelDied
from tests.harness.processes import fix_environment

SANITIZER = Path(__file__).with_name("sanitize.cfg")
# the head of a run, and the limit of every test
pytest_plugins = ["support.limits_plugin"]
NBVALS_OWN = 2000  # seconds for a cell, where no option says how many
# the home folder of a run's kernels: what they write there is theirs, not yours
HOME = pytest.StashKey[Path]()


class Cell(IPyNbCell):
    """A cell whose numbers may be compared to their last place."""

    difference = ""  # where its outputs differ first

    def compare_outputs(self, test, ref, skip_compare=None):
        if numbers.TAG in self.cell.metadata.get("tags", []):
            test = numbers.outputs_as_stored(test, ref)
        equal = super().compare_outputs(test, ref, skip_compare)
        if not equal:
            self.difference = last_lines.first_difference(test, ref, self.sanitize)
        return equal


class Notebook(IPyNbFile):
    """A notebook whose cells are tests.

    Attributes:
        broken: why the rest of the cells cannot run, if so.
        cells_run: how many cells were started.
        worked_in: whether a reader has: then no output is compared, and the answers,
            and the cells that are the reader's own, may raise.
        measurement: what the notebook takes; None where that cannot be measured.
    """

    broken: str | None = None
    cells_run = 0
    worked_in = False
    measurement: budgets.Measurement | None = None

    def collect(self) -> Iterator[pytest.Item]:
        torch = versions.installed()
        cells = list(super().collect())
        self.worked_in = lessons.is_worked_in(self.nb)
        for cell in cells:
            name = cell.cell.get("id", "")
            if self.worked_in or versions.reason(name, torch):
                cell.options["check"] = False
            if self.worked_in:
                cell.options["check_exception"] |= lessons.is_readers(cell.cell)
            ours = Cell.from_parent(
                self,
                name=cell.name,
                cell_num=cell.cell_num,
                cell=cell.cell,
                options=cell.options,
            )
            ours.output_timeout = limits.GRACE  # once its code has ended
            yield ours
        yield Budget.from_parent(self, name="budget")

    def setup(self) -> None:
        self.skip_compare += ("stderr",)
        self.setup_sanitize_files()
        mark = uuid.uuid4().hex
        home = self.config.stash.get(HOME, None)
        if home is not None:
            self.measurement = budgets.Measurement(mark, self.path.parent, home)
        self.kernel = Kernel(self.path.parent, limits.SHORT, mark, home)

    def teardown(self) -> None:
        if self.kernel is not None:
            self.kernel.stop()
        if self.measurement is not None:
            self.measurement.sampler.stop()


class Budget(pytest.Item):
    """The last test of a notebook: it took no more than it may."""

    def setup(self) -> None:
        if self.parent.measurement is None:
            pytest.skip("there is no /proc here that tells what processes take")
        if self.parent.worked_in:
            pytest.skip(lessons.WHY)
        if self.config.option.nbval_lax:
            pytest.skip("only runs that compare outputs are judged: --nbval")
        cells = sum(cell.cell_type == "code" for cell in self.parent.nb.cells)
        if self.parent.cells_run < cells:
            pytest.skip(f"{self.parent.cells_run} of {cells} cells were run")

    def runtest(self) -> None:
        notebook = self.parent
        notebook.measurement.sampler.note_sockets()
        notebook.kernel.stop()
        figures = {
            "notebook": notebook.path.stem,
            "left": notebook.kernel.left,
            "uses_store": budgets.has_code(notebook.nb.cells, budgets.STORE),
            "opens_store": budgets.has_code(notebook.nb.cells, budgets.OPENED),
            **notebook.measurement.figures(),
        }
        self.user_properties.append(("budget", figures))
        if complaints := budgets.over(figures):
            pytest.fail("\n".join(complaints), pytrace=False)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.nodeid


# -- before the tests ------------------------------------------------------------------


def pytest_configure(config):
    option = config.option
    fix_environment(option.nbval_lax and os.environ.get("HELPERS_GPUS") == "real")
    if usage.MEASURABLE:
        config.stash[HOME] = Path(tempfile.mkdtemp(prefix="home-"))
    if option.nbval_cell_timeout == NBVALS_OWN:
        option.nbval_cell_timeout = limits.CELL
    if option.nbval_sanitize_with is None:
        option.nbval_sanitize_with = str(SANITIZER)
    everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if everything and not option.markexpr:  # xdist hands it down
        option.markexpr = "not slow"


def pytest_unconfigure(config):
    if HOME in config.stash:
        shutil.rmtree(config.stash[HOME], ignore_errors=True)


def pytest_ignore_collect(collection_path):
    """A reader's own notebook beside the lessons is left out; who names it runs it."""
    if collection_path.suffix != ".ipynb" or collection_path in lessons.lessons():
        return None
    return True if collection_path.parent == lessons.NOTEBOOKS else None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path, parent):
    return [
        Notebook.from_parent(parent, path=file_path)
        if isinstance(node, IPyNbFile)
        else node
        for node in (yield)
    ]


def pytest_itemcollected(item):
    if isinstance(item, IPyNbCell) and item.cell.outputs:  # counted in the summary
        item.user_properties.append(("compared", bool(item.options["check"])))


def pytest_collection_finish(session):
    gc.freeze()  # judges collect garbage often: they need not look at all this


# -- each cell -------------------------------------------------------------------------


def pytest_runtest_setup(item):
    if isinstance(item.parent, Notebook) and item.parent.broken:
        pytest.skip(item.parent.broken)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    if not isinstance(item, IPyNbCell):
        return (yield)
    item.parent.cells_run += 1
    try:
        if not item.parent.kernel.is_alive():
            raise item.parent.kernel.death()
        return (yield)
    except KernelDied as error:
        item.raise_cell_error(str(error))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if isinstance(item, IPyNbCell) and report.failed and call.when != "teardown":
        error = call.excinfo.value
        differ = isinstance(error, NbCellError) and "outputs differ" in str(error)
        cause = "" if differ else last_lines.exception_line(error)
        what = item.difference or cause
        line = last_lines.cell_line(item.path.name, item.cell_num, what)
        report.user_properties += [(last_lines.LINE, line), (last_lines.CAUSE, cause)]
        if not differ:
            item.parent.broken = f"cell {item.cell_num} stopped this notebook: {cause}"
    return report


# -- after the tests -------------------------------------------------------------------


def pytest_report_header():
    notes = [versions.note(versions.installed())]
    if theirs := lessons.worked_in():
        names = ", ".join(sorted(path.stem for path in theirs))
        notes.append(f"run and not compared, for somebody has worked in them: {names}")
    return [note for note in notes if note]


def pytest_terminal_summary(terminalreporter):
    properties = [
        pair
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for pair in report.user_properties
    ]
    if figures := [value for name, value in properties if name == "budget"]:
        terminalreporter.write_line(budgets.table(figures))
    if compared := [value for name, value in properties if name == "compared"]:
        some, of = sum(compared), len(compared)
        percent = 100 * some // of
        terminalreporter.write_line(f"outputs compared: {some} of {of} ({percent} %)")
