"""What a lesson may take, as one pytest plugin (loaded by the conftest.py at the root).

The last test of each notebook, `budget`, ends its kernel and looks at what the whole
notebook took: memory, sockets, processes that were left, files outside the temporary
folder, time. The figures of all notebooks stand at the end of a run.

Time is asserted as what the notebook's processes computed, and as what passed on the
clock less what others computed meanwhile: so a busy machine fails no test, and on a
quiet one the second is the time on the clock. The kernels of one run have an empty
home folder to themselves, so that what they write there can be told from what others
write in yours.

Leaves out: files written elsewhere than in the notebook's folder, the home folder and
/dev/shm (faults.py runs the lessons as a user who may write nowhere else, and looks at
the whole course), and all systems but Linux.
"""

import os
import re
import shutil
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from nbval.plugin import IPyNbCell

from tests import watch
from tests.nbplus import HOME, MARK, Notebook, noted

MEMORY = 1.2e9  # bytes of all processes of a notebook together
SECONDS = 300.0  # nearly twice what the slowest computed on the slowest machine: 160 s
# whose code says so may ask a name server: see `Watch.questions`
STORE = re.compile(r"TCPStore|torchrun|torch\.distributed\.run")


class Measured(Notebook):
    """A notebook that is watched while its cells run."""

    def collect(self):
        yield from super().collect()
        yield Budget.from_parent(self, name="budget")

    def setup(self) -> None:
        self.cells_run = 0
        if not watch.SOUND:
            super().setup()
            return
        self.home = self.config.stash[HOME]
        self.before = self.files()
        self.shared = set(watch.SHARED.iterdir())
        self.clock, self.busy, self.own = time.monotonic(), _busy(), _own()
        self.watch = watch.Watch(f"{MARK}={self.mark}")
        super().setup()

    def files(self) -> dict[str, tuple]:
        """The files that it must not write."""
        here = watch.files(self.path.parent)
        return here | watch.files_at_home(Path(self.home))

    def figures(self) -> dict[str, object]:
        """End the kernel and the watch; what the notebook took, as plain data."""
        self.watch.note_sockets()
        self.kernel.stop()
        self.watch.stop()
        cpu, clock = _own() - self.own, time.monotonic() - self.clock
        shared = map(str, set(watch.SHARED.iterdir()) - self.shared)
        return {
            "notebook": self.path.stem,
            "peak": self.watch.peak,
            "cpu": cpu,
            "clock": clock,
            "others": max(0.0, _busy() - self.busy - cpu),
            "left": self.kernel.left,
            "sockets": sorted(self.watch.outward),
            "stores": sorted(self.watch.stores),
            "questions": sorted(self.watch.questions),
            "uses_store": uses_store(self.nb.cells),
            "files": watch.changed(self.before, self.files())
            + sorted(watch.left(list(shared))),
        }

    def teardown(self) -> None:
        super().teardown()
        if watch.SOUND:
            self.watch.stop()


class Budget(pytest.Item):
    """The last test of a notebook: it took no more than it may."""

    def setup(self) -> None:
        if not watch.SOUND:
            pytest.skip("there is no /proc here that tells what processes take")
        if self.config.option.nbval_lax:
            pytest.skip("only runs that compare outputs are judged: --nbval")
        cells = sum(cell.cell_type == "code" for cell in self.parent.nb.cells)
        if self.parent.cells_run < cells:
            pytest.skip(f"{self.parent.cells_run} of {cells} cells were run")

    def runtest(self) -> None:
        figures = self.parent.figures()
        self.user_properties.append(("budget", figures))
        if complaints := over(figures):
            pytest.fail("\n".join(complaints), pytrace=False)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.nodeid


def uses_store(cells: list) -> bool:
    """Whether the code of a notebook is what may ask a name server."""
    code = (cell.source for cell in cells if cell.cell_type == "code")
    return any(map(STORE.search, code))


def over(figures: dict) -> list[str]:
    """What a notebook took that it must not, in words."""
    found = []
    if not figures["peak"]:
        found.append("none of its processes was seen")
    if figures["peak"] > MEMORY:
        most = f"{MEMORY / 1e6:.0f} MB is the most"
        found.append(f"its processes had {figures['peak'] / 1e6:.0f} MB; {most}")
    if figures["cpu"] > SECONDS:
        most = f"{SECONDS:.0f} is the most"
        found.append(f"its processes computed for {figures['cpu']:.0f} s; {most}")
    elif figures["clock"] - figures["others"] > SECONDS:
        what = f"{figures['clock']:.0f} s, {figures['others']:.0f} of them for others"
        found.append(f"it took {what}; {SECONDS:.0f} is the most")
    found += [f"left running: {words}" for words in figures["left"]]
    found += [f"a socket not on loopback: {words}" for words in figures["sockets"]]
    if not figures["uses_store"]:
        found += [f"asked a name server: {words}" for words in figures["questions"]]
    found += [f"not in the temporary folder: {path}" for path in figures["files"]]
    return found


def _own() -> float:
    """Seconds that ended children of this process, and theirs, have computed."""
    times = os.times()
    return times.children_user + times.children_system


def _busy() -> float:
    """Seconds that this machine has computed, or was not there (steal)."""
    times = psutil.cpu_times()._asdict()
    counted = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(times[name] for name in counted)


def pytest_configure(config):
    if watch.SOUND:
        config.stash[HOME] = tempfile.mkdtemp(prefix="home-")


def pytest_unconfigure(config):
    if HOME in config.stash:
        shutil.rmtree(config.stash[HOME], ignore_errors=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after that of nbplus has answered
def pytest_collect_file(file_path, parent):
    return [
        Measured.from_parent(parent, path=file_path)
        if isinstance(node, Notebook)
        else node
        for node in (yield)
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    if isinstance(item, IPyNbCell):
        item.parent.cells_run += 1


def pytest_terminal_summary(terminalreporter):
    measured = noted(terminalreporter, "budget")
    if not measured:
        return
    write = terminalreporter.write_line
    width = max(len(figures["notebook"]) for figures in measured)
    write(f"{'notebook':{width}}  peak MB  computed s  clock s")
    for figures in sorted(measured, key=lambda figures: figures["notebook"]):
        write(row(figures, width))


def row(figures: dict, width: int) -> str:
    """What a notebook took, as a line of the table at the end of a run."""
    stores = len(figures["stores"])
    return (
        f"{figures['notebook']:{width}}  {figures['peak'] / 1e6:7.0f}"
        f"  {figures['cpu']:10.1f}  {figures['clock']:7.1f}"
        + f"  {stores} stores of torchrun on all addresses" * bool(stores)
        + "  asked a name server" * bool(figures["questions"])
    )
