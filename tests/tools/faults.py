"""Runs the lessons where much is missing: as others' machines are, and worse.

    sudo python -m tests.tools.faults                       every lesson, all faults
    sudo python -m tests.tools.faults 09 12                 these lessons
    sudo python -m tests.tools.faults --only network home   these faults alone

Every lesson runs in one kernel of its own, in a copy of the course, and no cell may
raise that is not meant to. The faults:

    twice    all cells once more in the same kernel
    user     a user who is not root and has no name on this machine
    path     the course is in a folder with spaces and letters beyond ASCII
    home     the home folder cannot be written
    shm      /dev/shm has 64 MB
    network  nothing but loopback
    memory   2 GB for all processes of a lesson together

First a probe looks, where the lessons will run, whether each of these really holds.
Afterwards nothing may be left: no process, and no file that was not there before, but
in the temporary folder.

Linux and root only (namespaces, mounts, control groups), and minutes: so only two
lessons are part of the test suite (test_faults.py). Leaves out the set-up of .venv.
"""

import argparse
import contextlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tests.harness import files
from tests.harness.processes import MARK, end_processes
from tests.harness.usage import Sampler
from tests.lessons import lessons

ROOT = Path(__file__).resolve().parents[2]
FAULTS = ("twice", "user", "path", "home", "shm", "network", "memory")
COMMANDS = ("ip", "mount", "setpriv", "unshare")
USER = 54321  # of a user and a group without a name
FOLDER = "Übungen für 多GPU – zweite Fassung"
SHM = 64 * 2**20
MEMORY = 2 * 10**9
MINUTES = 15  # that a lesson may take, twice and on a busy machine
LEFT_OUT = shutil.ignore_patterns(*files.PASSED_OVER, ".venv.*", "*.egg-info")
RUN = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
client = NotebookClient(notebook, timeout=400, resources={"metadata": {"path": "."}})
with client.setup_kernel():
    for again in range(int(sys.argv[2])):
        for number, cell in enumerate(notebook.cells):
            client.execute_cell(cell, number)
"""
PROBE = """
import importlib.util, os, socket, subprocess, sys
from pathlib import Path

def fails(attempt):
    try:
        attempt()
    except OSError:
        return True

def outside():
    socket.create_connection(("1.1.1.1", 53), 5).close()

def here():
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), 5).close()

course = importlib.util.find_spec("helpers").origin
shm = os.statvfs("/dev/shm")
block = [sys.executable, "-c", "block = b'x' * 2_100_000_000"]
holds = {
    "user": lambda: os.geteuid() != 0 and not os.access(sys.argv[1], os.W_OK),
    "path": lambda: " " in course and not course.isascii(),
    "home": lambda: not os.access(Path.home(), os.W_OK),
    "shm": lambda: shm.f_blocks * shm.f_frsize == 64 * 2**20,
    "network": lambda: fails(outside) and not fails(here),
    "memory": lambda: subprocess.run(block).returncode == -9,
}
print(*(name for name in sys.argv[2:] if holds[name]()))
"""


# -- outside: make the namespaces ------------------------------------------------------


def why_not() -> str | None:
    """One sentence on why lessons cannot be run like this here; None if they can."""
    if sys.platform != "linux":
        return "namespaces and control groups are Linux's"
    if missing := [name for name in COMMANDS if shutil.which(name) is None]:
        return f"not found: {', '.join(missing)}; install iproute2 and util-linux"
    if os.geteuid() != 0:
        return f"only root may do this: sudo {sys.executable} -m tests.tools.faults"
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--net", "mount", "-t", "tmpfs",
         "none", "/mnt"], capture_output=True, text=True,
    )  # fmt: skip
    if tried.returncode:
        return f"no namespaces can be made here: {tried.stderr.strip()}"
    try:
        with control_group():
            return None
    except OSError as error:
        return f"no control group can be made here: {error}"


@contextlib.contextmanager
def control_group() -> Iterator[str]:
    """A control group with `MEMORY`: the file that takes in a process."""
    root, limits = Path("/sys/fs/cgroup"), {"memory.max": MEMORY, "memory.swap.max": 0}
    version_2 = (root / "cgroup.controllers").exists()
    if not version_2:
        root /= "memory"
        limits = {f"memory.{kind}limit_in_bytes": MEMORY for kind in ("", "memsw.")}
    group = root / f"course-faults-{os.getpid()}"
    if version_2:
        (root / "cgroup.subtree_control").write_text("+memory")
    group.mkdir()
    try:
        for name, most in limits.items():
            if (group / name).exists():  # no swap, no limit of it
                (group / name).write_text(str(most))
        yield str(group / "cgroup.procs")
    finally:
        group.rmdir()


def outside(arguments: argparse.Namespace) -> int:
    """Makes a copy of the course, enters new namespaces, and runs `inside` there."""
    group = contextlib.nullcontext("/dev/null")
    if "memory" in arguments.only:
        group = control_group()
    enter = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork"]
    enter += ["--kill-child", "--mount-proc"]
    if "network" in arguments.only:
        enter.append("--net")
    with tempfile.TemporaryDirectory() as work, group as group_file:
        os.chmod(work, 0o755)
        name = FOLDER if "path" in arguments.only else "course"
        shutil.copytree(ROOT, Path(work, name), ignore=LEFT_OUT)
        again = [sys.executable, "-m", "tests.tools.faults", *sys.argv[1:]]
        again += ["--inside", work, group_file]
        return subprocess.run([*enter, *again], cwd=ROOT).returncode


# -- inside: run the lessons -----------------------------------------------------------


class Sandbox:
    """Folders and mounts, in namespaces of this process alone.

    Args:
        work: an empty folder but for the copy of the course.
        faults: which of `FAULTS`.
        group_file: the file by which a lesson's processes join a control group.
    """

    def __init__(self, work: Path, faults: list[str], group_file: str) -> None:
        self.faults, self.group_file = faults, group_file
        (self.course,) = work.iterdir()
        self.home, self.temporary = work / "home", work / "tmp"
        self.runtime = work / "runtime"  # Jupyter's; a hub gives one to each user
        for folder in (self.home, self.temporary, self.runtime):
            folder.mkdir()
        if "user" in faults:
            for path in (work, *work.rglob("*")):
                os.chown(path, USER, USER)
            for prefix in {sys.prefix, sys.base_prefix}:
                make_reachable(Path(prefix))
        if "home" in faults:
            mount("--bind", self.home, self.home)
            mount("-o", "remount,bind,ro", self.home)
        if "shm" in faults:
            mount("-t", "tmpfs", "-o", f"size={SHM}", "none", files.SHARED_MEMORY)
        if "network" in faults:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        # not what is installed: the copy, which everybody may read
        folders = (self.course, self.course / "simgpu" / "src")
        self.python_path = os.pathsep.join(map(str, folders))
        self.before = self.files()

    def files(self) -> dict[str, tuple]:
        """All that lessons may write, but for temporary files."""
        found = files.files(self.course) | files.files_at_home(self.home)
        if "shm" in self.faults:
            found |= files.files(files.SHARED_MEMORY)
        return found

    def start(self, *words: str, output: BinaryIO, mark: str) -> subprocess.Popen:
        """Starts Python on words in the notebooks' folder, as a user would."""
        join_group = ["sh", "-c", 'echo $$ >"$0" && exec "$@"', self.group_file]
        become = []
        if "user" in self.faults:
            become = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
        return subprocess.Popen(
            [*join_group, *become, sys.executable, "-c", *words],
            cwd=self.course / "notebooks",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": str(self.home),
                "TMPDIR": str(self.temporary), "PYTHONPATH": self.python_path,
                "JUPYTER_RUNTIME_DIR": str(self.runtime), "NO_COLOR": "1",
                "HELPERS_GPUS": "simulated", "OMP_NUM_THREADS": "1", MARK: mark,
            },
        )  # fmt: skip

    def missing_faults(self) -> set[str]:
        """The faults that do not hold, though they should."""
        wanted = [fault for fault in self.faults if fault != "twice"]
        with tempfile.TemporaryFile() as output:
            self.start(PROBE, str(ROOT), *wanted, output=output, mark="").wait(120)
            return set(wanted) - set(read(output).split())

    def run(self, lesson: str) -> list[str]:
        """Runs a lesson, prints a line on it, and returns complaints."""
        mark, start = uuid.uuid4().hex, time.monotonic()
        sampler = Sampler(mark)
        times = str(1 + ("twice" in self.faults))
        with tempfile.TemporaryFile() as output:  # a pipe would wait for what is left
            words = RUN, f"{lesson}.ipynb", times
            process = self.start(*words, output=output, mark=mark)
            try:
                found = [read(output)] if process.wait(60 * MINUTES) else []
            except subprocess.TimeoutExpired:
                found = [f"has not ended in {MINUTES} minutes"]
            sampler.note_sockets()
            left = end_processes(mark)
            process.wait(60)
        sampler.stop()
        found += [f"left running: {words}" for words in left]
        found += [f"a socket not on loopback: {words}" for words in sampler.outward]
        after = self.files()
        found += [f"wrote {path}" for path in files.changed(self.before, after)]
        self.before = after
        seconds, peak = time.monotonic() - start, sampler.peak / 1e6
        how = "failed" if found else "ran"
        print(f"{lesson:40} {how:6} {seconds:4.0f} s {peak:5.0f} MB", flush=True)
        return [f"{lesson}: {words}" for words in found]


def read(file: BinaryIO) -> str:
    """Returns all that was written to a file, without colours."""
    file.seek(0)
    return re.sub(r"\x1b\[[\d;]*m", "", file.read().decode(errors="replace"))


def mount(*words: str | Path) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)


def make_reachable(folder: Path) -> None:
    """Makes a folder reachable for everybody, if a folder above it is not.

    That one is covered by an empty one, in this namespace only, with `folder` in it.
    """
    closed = [
        f for f in reversed(folder.parents) if not f.stat().st_mode & stat.S_IXOTH
    ]
    if not closed:
        return
    with tempfile.TemporaryDirectory() as kept:
        mount("--bind", folder, kept)
        mount("-t", "tmpfs", "-o", "mode=755", "none", closed[0])
        folder.mkdir(parents=True)
        mount("--move", kept, folder)


def inside(arguments: argparse.Namespace) -> int:
    """Runs the lessons in the namespaces that `outside` has made."""
    work, group_file = arguments.inside
    sandbox = Sandbox(Path(work), arguments.only, group_file)
    if missing := sandbox.missing_faults():
        print(f"these faults do not hold here: {', '.join(sorted(missing))}")
        return 2
    print(f"these hold: {' '.join(arguments.only)}", flush=True)
    names = [path.stem for path in lessons()]
    if arguments.lessons:
        names = [name for name in names if name[:2] in arguments.lessons]
    found = [words for name in names for words in sandbox.run(name)]
    for complaint in found:
        print(complaint)
    return int(bool(found))


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.faults",
        description="Runs the lessons where much is missing.",
    )
    parser.add_argument("lessons", nargs="*", metavar="NN", help="numbers; none: all")
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.inside:
        return inside(arguments)
    if reason := why_not():
        parser.error(reason)
    return outside(arguments)


if __name__ == "__main__":
    sys.exit(main())
