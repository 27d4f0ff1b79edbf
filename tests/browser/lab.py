"""JupyterLab as the README starts it, and a learner's moves in it.

The server runs in a copy of the course, so nothing that a lesson does touches this
one. The copy's `.venv` is a thin one: it borrows the packages of the Python that runs
the tests, so `python3 -m helpers lab` has nothing to install.
What is left out: `lab`'s own set-up, which tests/test_commands.py looks after,
Windows, and browsers other than Chromium.
"""

import contextlib
import json
import re
import shutil
import site
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from playwright.sync_api import (
    BrowserContext,
    ConsoleMessage,
    Error,
    Locator,
    Page,
    Route,
    TimeoutError,
)

from support.limits import LESSON, MOMENT, SHORT
from support.ports import free_port
from tests.harness.processes import (
    end_processes,
    find_processes,
    kernel_environment,
)

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "of-the-tests"
# the line of a cell that makes one
EXPLORER = re.compile(r"^(?:explore|plan_explorer)\.\w+\(\w*\)$", re.MULTILINE)
LIGHT, DARK = "JupyterLab Light", "JupyterLab Dark"

NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build")
# No news that pop up, and every cell in the page, also those out of sight.
SETTINGS = {
    "notebook-extension/tracker": '{"windowingMode": "none"}',
    "apputils-extension/notification": '{"fetchNews": "false"}',
}
COUNT_AS_BUILT = """
from helpers.__main__ import LESSONS_VENV, wanted
LESSONS_VENV.built_from.write_text("\\n".join(wanted(LESSONS_VENV)))
"""
# What a lesson fetches from the network; of anything else the browser complains.
BADGES = re.compile(
    r"https://(mybinder\.org/badge_|colab\.research\.google\.com/assets/)"
)
SVG = "image/svg+xml"
BADGE = '<svg xmlns="http://www.w3.org/2000/svg" width="109" height="20"/>'


def copy_course(folder: Path) -> None:
    """Copy what a clone has, and give it a `.venv` that counts as set up."""
    shutil.copytree(ROOT, folder, ignore=NOT_COPIED)
    environment = folder / ".venv"
    venv.create(environment, symlinks=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    borrowed = [path for path in site.getsitepackages() if Path(path).is_dir()]
    lines = [f"import site; site.addsitedir({path!r})" for path in borrowed]
    (packages / "course.pth").write_text("\n".join([str(folder), *lines]) + "\n")
    torchrun = environment / "bin" / "torchrun"  # a command of what is borrowed
    start = "from torch.distributed.run import main\n\nmain()\n"
    torchrun.write_text(f"#!{environment / 'bin' / 'python'}\n{start}")
    torchrun.chmod(0o755)
    for name in ("share", "etc"):  # JupyterLab's own files, and those of the widgets
        (environment / name).symlink_to(Path(sys.prefix) / name)
    subprocess.run([sys.executable, "-c", COUNT_AS_BUILT], cwd=folder, check=True)


class Lab:
    """A JupyterLab of its own.

    Args:
        folder: an empty one, for the course and for all that Jupyter writes.
    """

    def __init__(self, folder: Path):
        self.course, self.log = folder / "course", folder / "log"
        self.url = f"http://127.0.0.1:{free_port()}"
        self.mark = uuid.uuid4().hex
        copy_course(self.course)
        for name, text in SETTINGS.items():
            path = folder / f"settings/@jupyterlab/{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self._environment = kernel_environment(self.mark) | {
            "HOME": str(folder),
            "IPYTHONDIR": str(folder / "ipython"),
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTER_DATA_DIR": str(folder / "data"),
            "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        }
        del self._environment["NO_COLOR"]  # a learner sees colours

    @contextlib.contextmanager
    def running(self) -> Iterator["Lab"]:
        """Start the server; at the end it stops, and nothing of it is left."""
        command = [sys.executable, "-m", "helpers", "lab", "--no-browser"]
        command += ["--port=" + self.url.rpartition(":")[2]]
        command += ["--ServerApp.port_retries=0", f"--IdentityProvider.token={TOKEN}"]
        command += ["--LabApp.expose_app_in_browser=True"]
        # files as sockets: a port that is free now may be taken when the kernel binds
        command += ["--KernelManager.transport=ipc"]
        with tempfile.TemporaryDirectory(prefix="lab-") as runtime:
            try:
                with open(self.log, "w") as log:
                    server = subprocess.Popen(
                        command, cwd=self.course, stdin=subprocess.DEVNULL,
                        env={**self._environment, "JUPYTER_RUNTIME_DIR": runtime},
                        stdout=log, stderr=subprocess.STDOUT,
                    )  # fmt: skip
                self._wait_for(server)
                yield self
                server.terminate()
                server.wait(SHORT)
                assert not self.processes(), "the server left processes"
            finally:
                end_processes(self.mark)

    def _wait_for(self, server: subprocess.Popen) -> None:
        late = time.monotonic() + SHORT
        while True:
            words = self.log.read_text()
            assert "Installing" not in words, words
            assert server.poll() is None and time.monotonic() < late, words
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/api?token={TOKEN}", timeout=MOMENT)
                return
            time.sleep(0.1)

    def processes(self) -> set[psutil.Process]:
        """All that run in it: the server, the kernels, and what kernels started."""
        return set(find_processes(self.mark))

    def kernels(self) -> list[dict]:
        """The kernels, in the words of the server."""
        url = f"{self.url}/api/kernels?token={TOKEN}"
        with urllib.request.urlopen(url, timeout=SHORT) as answer:
            return json.load(answer)

    def end_kernels(self) -> None:
        """Without the menu: after a failure, for the next lesson to begin alone."""
        for kernel in self.kernels():
            url = f"{self.url}/api/kernels/{kernel['id']}?token={TOKEN}"
            request = urllib.request.Request(url, method="DELETE")
            urllib.request.urlopen(request, timeout=SHORT).close()

    @contextlib.contextmanager
    def opened(self, browser: BrowserContext, name: str) -> Iterator["Notebook"]:
        """Open a lesson, with its kernel held back until `start_kernel`.

        When it is shut down, through the menu, nothing that it started may be left,
        and the browser's console may have no error.
        """
        before = self.processes()
        with browser.new_page() as page:
            notebook = Notebook(page)
            notebook.open(f"{self.url}/lab/tree/notebooks/{name}?token={TOKEN}&reset")
            try:
                yield notebook
            except BaseException:
                self.end_kernels()
                raise
            notebook.shut_down()
            # not asleep: the page's request to end the kernel passes through here
            notebook.wait(
                lambda: self.processes() <= before, f"the end of what {name} started"
            )
            assert not notebook.complaints, notebook.complaints


# What the page says of the notebook's code cells.
CELLS = """() => jupyterapp.shell.currentWidget.content.widgets
  .map((widget, number) => ({widget, number}))
  .filter(({widget}) => widget.model.type === "code")
  .map(({widget, number}) => ({
    number,
    source: widget.model.sharedModel.source,
    mayRaise: (widget.model.getMetadata("tags") ?? []).includes("raises-exception"),
    running: widget.model.executionState === "running",
    count: widget.model.executionCount,
    errors: widget.model.outputs.toJSON()
      .filter(output => output.output_type === "error")
      .map(output => `${output.ename}: ${output.evalue}`),
  }))"""
# Stored counts are those of a run that is over: without them the next one can be seen.
FORGET_COUNTS = """() => {
  for (const widget of jupyterapp.shell.currentWidget.content.widgets)
    if (widget.model.type === "code") widget.model.executionCount = null;
}"""
CHANGE_THEME = """
  theme => jupyterapp.commands.execute("apputils:change-theme", {theme})"""
DONE = f"""() => {{
  const cells = ({CELLS})();
  return (cells.every(cell => cell.count) || cells.some(stopped))
    && !cells.some(cell => cell.running)
    && jupyterapp.shell.currentWidget.sessionContext.kernelDisplayStatus === "idle";
  function stopped(cell) {{ return cell.errors.length && !cell.mayRaise; }}
}}"""


class Notebook:
    """A notebook on a page of its own; every wait for it has a limit."""

    def __init__(self, page: Page):
        self.page = page
        self.complaints: list[str] = []
        self._held: list[Route] = []
        self._hold_kernel = True
        page.set_default_timeout(SHORT * 1000)
        page.on("console", self._listen)
        page.on("pageerror", self._note)
        page.route(BADGES, lambda route: route.fulfill(body=BADGE, content_type=SVG))
        page.route(re.compile(r"/api/sessions\b"), self._start_or_hold)

    def _listen(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.complaints.append(f"{message.text} ({message.location['url']})")

    def _note(self, error: Error) -> None:
        """An exception in the page: of the widgets, which are an extension.

        Those of JupyterLab's own code are left out. On a busy machine its React now
        and then removes a node that is gone; the lesson goes on as if nothing was.
        """
        if "/lab/extensions/" in (error.stack or ""):
            self.complaints.append(f"{error.message}\n{error.stack}")

    def _start_or_hold(self, route: Route) -> None:
        if self._hold_kernel and route.request.method == "POST":
            self._held.append(route)
        else:
            route.continue_()

    # -- what a learner does -------------------------------------------------------

    def open(self, url: str) -> None:
        """Open it, up to where the page asks for a kernel; it does not get one yet."""
        self.page.goto(url)
        self.page.locator(".jp-Notebook .jp-Cell").first.wait_for()
        self.wait(lambda: bool(self._held), "the page asks for a kernel")

    def start_kernel(self) -> None:
        """Let the page have its kernel."""
        self._hold_kernel = False
        self._held.pop().continue_()
        self.wait_until_idle()

    def menu(self, name: str, command: str) -> None:
        """Choose from the menu bar."""
        self.page.get_by_role("menuitem", name=name, exact=True).click()
        self.page.locator(f".lm-Menu-item[data-command='{command}']").click()

    def confirm(self) -> None:
        """Answer a question of JupyterLab with yes."""
        self.page.locator(".jp-Dialog .jp-mod-accept").click()

    def run_all(self) -> list[dict]:
        """Run All, through the menu; what `CELLS` says at the end, or too late."""
        self.page.evaluate(FORGET_COUNTS)
        self.menu("Run", "runmenu:run-all")
        with contextlib.suppress(TimeoutError):
            self.page.wait_for_function(DONE, timeout=LESSON * 1000)
        return self.cells()

    def run(self, number: int) -> None:
        """Start a cell, by Shift-Enter."""
        self.page.evaluate(FORGET_COUNTS)
        self.cell(number).locator(".jp-InputPrompt").click()
        self.page.keyboard.press("Shift+Enter")

    def write(self, number: int, text: str) -> None:
        """Replace the text of a code cell."""
        self.cell(number).locator(".cm-content").fill(text)

    def restart(self) -> None:
        """Restart the kernel, through the menu."""
        self.menu("Kernel", "kernelmenu:restart")
        with self.page.expect_response(re.compile("/restart")):
            self.confirm()

    def shut_down(self) -> None:
        """Close it and shut its kernel down, through the menu."""
        self.menu("File", "filemenu:close-and-cleanup")
        self.confirm()

    def show(self, theme: str, size: dict[str, int]) -> None:
        """Choose a theme, and the size of the window."""
        self.page.set_viewport_size(size)
        self.page.evaluate(CHANGE_THEME, theme)
        body = self.page.locator(f"body[data-jp-theme-name='{theme}']")
        body.wait_for(state="attached")

    # -- what there is to see ------------------------------------------------------

    def cell(self, number: int) -> Locator:
        """A cell; the first is 0."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(number)

    def cells(self) -> list[dict]:
        """What `CELLS` says of each code cell."""
        return self.page.evaluate(CELLS)

    def output(self, number: int) -> str:
        """What a cell has said in text, once it is done."""
        done = f"number => ({CELLS})().some(c => c.number === number && c.count)"
        self.page.wait_for_function(done, arg=number)
        return self.cell(number).locator(".jp-OutputArea").inner_text()

    def explorers(self) -> list[int]:
        """The cells that make an explorer."""
        return [c["number"] for c in self.cells() if EXPLORER.search(c["source"])]

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something that the page does not tell; it may take `SHORT`."""
        late = time.monotonic() + SHORT
        while not condition():
            assert time.monotonic() < late, f"it has not come: {what}"
            self.page.wait_for_timeout(50)

    def wait_until_idle(self) -> None:
        """Until the status bar says that the kernel waits for work."""
        self.page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
