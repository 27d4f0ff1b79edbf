#!/usr/bin/env python3
"""Runs the lessons where much is missing: as others' machines are, and worse.

    sudo python tests/faults.py                       every lesson, all faults at once
    sudo python tests/faults.py 09 12 --at-a-time 2   these, two together
    sudo python tests/faults.py --only network home   these faults alone

Every lesson runs in one kernel of its own, with a copy of the course, and no cell may
raise that is not meant to. The faults:

    twice    all cells once more in the same kernel
    user     somebody who is not root, whom this machine does not know
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests import watch  # noqa: E402
from tests.nbplus import MARK, reap  # noqa: E402

FAULTS = ("twice", "user", "path", "home", "shm", "network", "memory")
TOOLS = ("ip", "mount", "setpriv", "unshare")
SOMEBODY = 54321  # a user and a group without a name
STRANGE = "Übungen für 多GPU – zweite Fassung"
SHM = 64 * 2**20
MEMORY = 2 * 10**9
MINUTES = 15  # that a lesson may take, twice and on a busy machine
LEFT_OUT = shutil.ignore_patterns(*watch.PASSED_OVER, ".venv.*", "*.egg-info")
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
import os, socket, subprocess, sys
from pathlib import Path
import helpers

def fails(attempt):
    try:
        attempt()
    except OSError:
        return True

def outside():
    socket.create_connection(("1.1.1.1", 53), 5).close()

def here():
    with socket.create_server(("127.0.0.1", 0)) as door:
        socket.create_connection(door.getsockname(), 5).close()

block = [sys.executable, "-c", "block = b'x' * 2_100_000_000"]
holds = {
    "user": lambda: os.geteuid() != 0 and not os.access(sys.argv[1], os.W_OK),
    "path": lambda: " " in helpers.__file__ and not helpers.__file__.isascii(),
    "home": lambda: not os.access(Path.home(), os.W_OK),
    "shm": lambda: shm.f_blocks * shm.f_frsize == 64 * 2**20,
    "network": lambda: fails(outside) and not fails(here),
    "memory": lambda: subprocess.run(block).returncode == -9,
}
shm = os.statvfs("/dev/shm")
print(*(name for name in sys.argv[2:] if holds[name]()))
"""


# -- outside: what must be there before, and gone after --------------------------------


def why_not() -> str | None:
    """One sentence on why lessons cannot be run like this here; None if they can."""
    if sys.platform != "linux":
        return "namespaces and control groups are Linux's"
    if missing := [name for name in TOOLS if shutil.which(name) is None]:
        return f"not found: {', '.join(missing)}; install iproute2 and util-linux"
    if os.geteuid() != 0:
        return f"only root may do this: sudo {sys.executable} tests/faults.py"
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--net", "mount", "-t", "tmpfs",
         "none", "/mnt"], capture_output=True, text=True,
    )  # fmt: skip
    if tried.returncode:
        return f"no namespaces can be made here: {tried.stderr.strip()}"
    try:
        with limited(1):
            return None
    except OSError as error:
        return f"no control groups can be made here: {error}"


@contextlib.contextmanager
def limited(count: int) -> Iterator[list[str]]:
    """Control groups with `MEMORY` each: the files that take in a process."""
    root, limits = Path("/sys/fs/cgroup"), {"memory.max": MEMORY, "memory.swap.max": 0}
    one_tree = (root / "cgroup.controllers").exists()  # or one for each kind
    if not one_tree:
        root /= "memory"
        limits = {f"memory.{kind}limit_in_bytes": MEMORY for kind in ("", "memsw.")}
    groups = [root / f"course-faults-{os.getpid()}-{i}" for i in range(count)]
    try:
        if one_tree:
            (root / "cgroup.subtree_control").write_text("+memory")
        for group in groups:
            group.mkdir()
            for name, most in limits.items():
                if (group / name).exists():  # no swap, no limit of it
                    (group / name).write_text(str(most))
        yield [str(group / "cgroup.procs") for group in groups]
    finally:
        for group in filter(Path.exists, groups):
            group.rmdir()


def outside(arguments: argparse.Namespace) -> int:
    """Make a copy of the course, enter new namespaces, and run all in them."""
    groups = contextlib.nullcontext(["/dev/null"] * arguments.at_a_time)
    if "memory" in arguments.only:
        groups = limited(arguments.at_a_time)
    enter = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork"]
    enter += ["--kill-child", "--mount-proc"]
    if "network" in arguments.only:
        enter.append("--net")
    with tempfile.TemporaryDirectory() as work, groups as takers:
        os.chmod(work, 0o755)
        name = STRANGE if "path" in arguments.only else "course"
        shutil.copytree(ROOT, Path(work, name), ignore=LEFT_OUT)
        inside = [sys.executable, __file__, *sys.argv[1:], "--inside", work, *takers]
        return subprocess.run([*enter, *inside]).returncode


# -- inside ----------------------------------------------------------------------------


class Stage:
    """Where lessons run: folders and mounts in namespaces of this process alone.

    Args:
        work: an empty folder but for the copy of the course.
        faults: which of `FAULTS`.
        takers: files that take in the processes of a lesson, one for each at a time.
    """

    def __init__(self, work: Path, faults: list[str], takers: list[str]) -> None:
        self.faults, self.takers = faults, takers
        (self.course,) = work.iterdir()
        self.home, self.temporary = work / "home", work / "tmp"
        self.runtime = work / "runtime"  # Jupyter's; a hub gives one to each user
        for folder in (self.home, self.temporary, self.runtime):
            folder.mkdir()
        if "user" in faults:
            for path in (work, *work.rglob("*")):
                os.chown(path, SOMEBODY, SOMEBODY)
            for prefix in {sys.prefix, sys.base_prefix}:
                let_in(Path(prefix))
        if "home" in faults:
            mount("--bind", self.home, self.home)
            mount("-o", "remount,bind,ro", self.home)
        if "shm" in faults:
            mount("-t", "tmpfs", "-o", f"size={SHM}", "none", "/dev/shm")
        if "network" in faults:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        self.before = self.files()

    def files(self) -> dict[str, tuple]:
        """All that it may write, but for temporary files."""
        found = watch.files(self.course) | watch.files_at_home(self.home)
        if "shm" in self.faults:
            found |= watch.files(watch.SHARED)
        return found

    def start(
        self, *words: str, output: BinaryIO, slot: int = 0, mark: str = ""
    ) -> subprocess.Popen:
        """Start Python on words in the notebooks' folder, as somebody would."""
        become = f"--reuid={SOMEBODY} --regid={SOMEBODY} --clear-groups".split()
        take_in = ["sh", "-c", 'echo $$ >"$0" && exec "$@"', self.takers[slot]]
        return subprocess.Popen(
            [*take_in, *["setpriv", *become] * ("user" in self.faults),
             sys.executable, "-c", *words],
            cwd=self.course / "notebooks",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": str(self.home),
                "TMPDIR": str(self.temporary), "PYTHONPATH": str(self.course),
                "JUPYTER_RUNTIME_DIR": str(self.runtime), "NO_COLOR": "1",
                "HELPERS_GPUS": "simulated", "OMP_NUM_THREADS": "1", MARK: mark,
            },
        )  # fmt: skip

    def probe(self) -> set[str]:
        """The faults that do not hold, though they should."""
        wanted = [fault for fault in self.faults if fault != "twice"]
        with tempfile.TemporaryFile() as output:
            self.start(PROBE, str(ROOT), *wanted, output=output).wait(120)
            return set(wanted) - set(read(output).split())

    def run(self, lesson: str, slot: int) -> list[str]:
        """Run a lesson, print a line on it, and return complaints."""
        mark, start = uuid.uuid4().hex, time.monotonic()
        watched = watch.Watch(f"{MARK}={mark}")
        times = str(1 + ("twice" in self.faults))
        with tempfile.TemporaryFile() as output:  # a pipe would wait for what is left
            words = RUN, f"{lesson}.ipynb", times
            process = self.start(*words, output=output, slot=slot, mark=mark)
            try:
                found = [read(output)] if process.wait(60 * MINUTES) else []
            except subprocess.TimeoutExpired:
                found = [f"has not ended in {MINUTES} minutes"]
            watched.note_sockets()
            left = reap(mark)
            process.wait(60)
        watched.stop()
        found += [f"left running: {words}" for words in left]
        found += [f"a socket not on loopback: {words}" for words in watched.outward]
        seconds, peak = time.monotonic() - start, watched.peak / 1e6
        how = "failed" if found else "ran"
        print(f"{lesson:40} {how:6} {seconds:4.0f} s {peak:5.0f} MB", flush=True)
        return [f"{lesson}: {words}" for words in found]

    def run_together(self, lessons: list[str]) -> list[str]:
        """Run lessons at the same time; complaints of them, and of files they left."""
        with ThreadPoolExecutor(len(lessons)) as pool:
            found = sum(pool.map(self.run, lessons, range(len(lessons))), [])
        names, after = " and ".join(lessons), self.files()
        wrote = watch.changed(self.before, after)
        found += [f"{names}: wrote {path}" for path in wrote]
        self.before = after
        return found


def read(file: BinaryIO) -> str:
    """All that was written to a file, without colours."""
    file.seek(0)
    return re.sub(r"\x1b\[[\d;]*m", "", file.read().decode(errors="replace"))


def mount(*words: str | Path) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)


def let_in(folder: Path) -> None:
    """Make a folder reachable for everybody, if a folder above it is not.

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
    """Run the lessons in the namespaces that `outside` has made."""
    work, *takers = arguments.inside
    stage = Stage(Path(work), arguments.only, takers)
    if missing := stage.probe():
        print(f"these faults do not hold here: {', '.join(sorted(missing))}")
        return 2
    print(f"these hold: {' '.join(arguments.only)}", flush=True)
    names = [path.stem for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    if arguments.lessons:
        names = [name for name in names if name[:2] in arguments.lessons]
    found = []
    for first in range(0, len(names), arguments.at_a_time):
        found += stage.run_together(names[first : first + arguments.at_a_time])
    for complaint in found:
        print(complaint)
    return int(bool(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lessons", nargs="*", metavar="NN", help="numbers; none: all")
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--at-a-time", type=int, choices=(1, 2), default=1)
    parser.add_argument("--inside", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        return inside(arguments)
    if reason := why_not():
        parser.error(reason)
    return outside(arguments)


if __name__ == "__main__":
    sys.exit(main())
