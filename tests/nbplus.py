"""What nbval lacks, as one pytest plugin (loaded by the conftest.py at the root).

* The same numbers everywhere: simulated GPUs, one thread, no colours, and nothing of
  pytest's own or of matplotlib's settings in a kernel's environment.
* The sanitizer is found from any working directory, and stderr is not compared.
* A dead kernel fails its cell at once and names the exit status.
* After a cell that raised, the notebook's later cells are skipped, not failed.
* No process outlives its notebook, whatever session it moved to.
* `-n 2` keeps the cells of a notebook together.
* The last lines of a run tell how many stored outputs were compared.

`HELPERS_GPUS=real pytest --nbval-lax notebooks` is the one way to run the lessons on
real GPUs; in every other run simulated ones are forced, whatever HELPERS_GPUS says.
"""

import gc
import os
import signal
import site
import tempfile
import time
import uuid
from pathlib import Path
from queue import Empty

import psutil
import pytest
from nbval.kernel import CURRENT_ENV_KERNEL_NAME, RunningKernel, start_new_kernel
from nbval.plugin import IPyNbCell, IPyNbFile, NbCellError

SANITIZER = Path(__file__).with_name("sanitize.cfg")
MARK = "NOTEBOOK_KERNEL"  # in the environment of a kernel and of all it starts
GRACE = 5  # seconds in which what a notebook started should notice that it has ended
HOME = pytest.StashKey[str]()  # of the kernels of a run, if it is not yours


def settle_environment(real_gpus: bool = False) -> None:
    """Fixes for this process, and all it starts, what would change the numbers."""
    if not real_gpus:
        os.environ["HELPERS_GPUS"] = "simulated"
    os.environ["OMP_NUM_THREADS"] = "1"  # sums in the same order on any machine


def kernel_environment(mark: str) -> dict[str, str]:
    """Returns what a kernel sees, so that it acts as it does in JupyterLab.

    With PYTEST_CURRENT_TEST ipykernel would not show what child processes print; with
    MPLBACKEND figures might not be shown.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTEST") and name != "MPLBACKEND"
    }
    return {**kept, "NO_COLOR": "1", MARK: mark}


def alive(mark: str) -> list[psutil.Process]:
    """Returns every process that carries the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.Error, OSError):
            continue  # gone, a zombie, or somebody else's
    return found


def reap(mark: str) -> list[str]:
    """Ends every process that carries the mark, after `GRACE` seconds to end by itself.

    Returns:
        Those that did not, in words.
    """
    start = time.monotonic()
    killed: dict[int, str] = {}
    while left := alive(mark):
        waited = time.monotonic() - start
        if waited > GRACE + 10:
            raise RuntimeError(f"processes that cannot be killed: {left}")
        for process in left if waited > GRACE else []:
            try:
                words = " ".join(process.cmdline())[:200]
                process.kill()
                killed[process.pid] = f"process {process.pid}: {words}"
            except psutil.NoSuchProcess:
                pass
        time.sleep(0.05)
    return list(killed.values())


class KernelDied(Exception):
    """The kernel's process ended while it was needed."""


class Kernel(RunningKernel):
    """A kernel of this Python that notices its own death and leaves nothing behind.

    Attributes:
        left: after `stop`, the processes that had to be killed, in words.
    """

    def __init__(
        self, cwd: str, startup_timeout: float, mark: str, home: str | None
    ) -> None:
        self.mark = mark
        self.left: list[str] = []
        environment = kernel_environment(mark)
        if home is not None:
            # the packages that you installed for yourself are still found
            environment |= {"HOME": home, "PYTHONUSERBASE": site.getuserbase()}
        self.log = tempfile.TemporaryFile()
        try:
            self.km, self.kc = start_new_kernel(
                startup_timeout,
                CURRENT_ENV_KERNEL_NAME,
                cwd=cwd,
                env=environment,
                stdout=self.log,
                stderr=self.log,
                extra_arguments=["--HistoryManager.hist_file=:memory:"],
            )
            self._ensure_iopub_up()
        except Exception as error:
            what = f"the kernel did not start: {error}\n{self.last_words()}"
            self.stop()
            raise KernelDied(what) from error

    def last_words(self) -> str:
        """Returns the last lines that the kernel's process wrote."""
        self.log.seek(0)
        return "\n".join(self.log.read().decode(errors="replace").splitlines()[-15:])

    def get_message(self, stream: str, timeout: float | None = None) -> dict:
        """As in nbval, but raises KernelDied when no message can come any more."""
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while True:
            alive = self.is_alive()
            left = max(0.0, deadline - time.monotonic())
            try:
                return super().get_message(stream, min(0.5, left) if alive else 0.1)
            except Empty:
                if not alive:
                    raise KernelDied(self.obituary()) from None
                if left == 0:
                    raise

    def obituary(self) -> str:
        """Says how the dead kernel ended."""
        status = self.km.provisioner.process.poll()
        how = f"exit status {status}"
        if status < 0:
            how += f", {signal.Signals(-status).name}"
        return f"the kernel died ({how})\n{self.last_words()}".rstrip()

    def stop(self) -> None:
        """Gives the kernel three seconds to end politely, then ends what is left."""
        if hasattr(self, "km"):
            self.kc.shutdown()
            deadline = time.monotonic() + 3
            while self.is_alive() and time.monotonic() < deadline:
                time.sleep(0.05)
            self.kc.stop_channels()
            self.km.shutdown_kernel(now=True)
            del self.km
        self.left += reap(self.mark)


class Notebook(IPyNbFile):
    """A notebook whose cells are tests; `broken` says why the rest cannot run."""

    broken: str | None = None

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.mark = uuid.uuid4().hex

    def setup(self) -> None:
        self.skip_compare += ("stderr",)
        self.setup_sanitize_files()
        self.kernel = Kernel(
            cwd=str(self.path.parent),
            startup_timeout=self.config.option.nbval_kernel_startup_timeout,
            mark=self.mark,
            home=self.config.stash.get(HOME, None),
        )

    def teardown(self) -> None:
        if self.kernel is not None:
            self.kernel.stop()


def pytest_configure(config):
    option = config.option
    settle_environment(option.nbval_lax and os.environ.get("HELPERS_GPUS") == "real")
    if option.nbval_sanitize_with is None:
        option.nbval_sanitize_with = str(SANITIZER)
    if getattr(option, "dist", "no") in ("load", "worksteal"):
        option.dist = "loadscope"
        option.loadscopereorder = False  # few tests may be slow: not to be the last


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path, parent):
    return [
        Notebook.from_parent(parent, path=file_path)
        if isinstance(node, IPyNbFile)
        else node
        for node in (yield)
    ]


def pytest_collection_finish(session):
    gc.freeze()  # judges collect garbage often: they need not look at all this


def pytest_itemcollected(item):
    if isinstance(item, IPyNbCell) and item.cell.outputs:  # counted in the summary
        item.user_properties.append(("compared", bool(item.options["check"])))


def pytest_runtest_setup(item):
    if isinstance(item.parent, Notebook) and item.parent.broken:
        pytest.skip(item.parent.broken)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    if not isinstance(item, IPyNbCell):
        return (yield)
    try:
        if not item.parent.kernel.is_alive():
            raise KernelDied(item.parent.kernel.obituary())
        return (yield)
    except KernelDied as error:
        item.raise_cell_error(str(error))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if isinstance(item, IPyNbCell) and report.failed and call.when != "teardown":
        error = call.excinfo.value
        if not (isinstance(error, NbCellError) and "outputs differ" in str(error)):
            reason = str(error).splitlines()[0]
            item.parent.broken = f"cell {item.cell_num} stopped this notebook: {reason}"
    return report


def noted(terminalreporter, wanted: str) -> list:
    """What tests have noted under a name among their properties, in any worker."""
    return [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == wanted
    ]


def pytest_terminal_summary(terminalreporter):
    if compared := noted(terminalreporter, "compared"):
        some, of = sum(compared), len(compared)
        percent = 100 * some // of
        terminalreporter.write_line(f"outputs compared: {some} of {of} ({percent} %)")
