"""The course's commands: `python3 -m helpers lab`, `test`, `check` and their like.

Standard library only, because the first command must work before anything is
installed. An old Python must be able to read this file as far as the sentence that
turns it away, so there is no syntax in it that is newer than Python 3.6.

Commands that need packages build `.venv` first; `site` builds `.venv.site`, so that the
lessons' packages stay as they are. What an environment was built from is written into
it last, so a set-up that was killed is recognised and started over. Then the command's
program takes this process over. Not covered: an environment that somebody changes by
hand afterwards.
"""

import argparse
import contextlib
import errno
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

if sys.version_info < (3, 10):  # noqa: UP036 - here an older Python is turned away
    sys.exit(f"Python 3.10 or newer is needed, this is {sys.version.split()[0]}.")

WINDOWS = os.name == "nt"
if WINDOWS:
    import msvcrt
else:
    import fcntl

ROOT = Path(__file__).resolve().parents[1]
FIRST_NOTEBOOK = ROOT / "notebooks" / "00-start-here.ipynb"
REQUIREMENTS = ROOT / "requirements.txt"
SITE = ROOT / ".github" / "site"
SIMULATOR = ROOT / "simgpu"
OLD_NAME = "multi-gpu-course"  # the course was once a package of this name

# What lessons import beside PyTorch.
LESSONS_NEED = ("numpy", "matplotlib", "ipywidgets", "psutil", "cloudpickle")

BIN = "Scripts" if WINDOWS else "bin"
LOCK = ROOT / ".venv.lock"

WORKERS = 3  # of a test run, which often waits; a lesson needs up to 1.2 GB in each
LITTLE_SPACE = 50_000_000  # bytes; below that a failed step is blamed on the disk

# How pip says that it could not reach a package index.
NETWORK_SIGNS = re.compile(
    "connection broken by|failed to establish a new connection|name resolution"
    "|connection ?error|connect ?timeout|read ?timed? ?out|incomplete ?read"
    "|connection aborted|proxy ?error|ssl ?error|5[0-9][0-9] server error",
    re.IGNORECASE,
)
DISK_SIGNS = re.compile(rf"errno ({errno.ENOSPC}|{errno.EDQUOT})\]", re.IGNORECASE)
DISK_IS_FULL = (
    "No space is left on the disk: the packages need several GB in this folder and, "
    "while they are unpacked, in the temporary folder; free some and run this again."
)


class Trouble(Exception):
    """Something the reader can act on: one sentence is printed, no traceback."""


class Venv(NamedTuple):
    """A virtual environment, and the file of what is installed into it."""

    folder: Path
    requirements: Path

    @property
    def python(self) -> Path:
        """Its Python."""
        return self.folder / BIN / ("python.exe" if WINDOWS else "python")

    @property
    def built_from(self) -> Path:
        """The file that is written last, when all is installed."""
        return self.folder / ".built-from"


LESSONS_VENV = Venv(ROOT / ".venv", REQUIREMENTS)
SITE_VENV = Venv(ROOT / ".venv.site", SITE / "requirements.txt")


# --- Setting up an environment ----------------------------------------------------


def set_up(venv: Venv) -> None:
    """Make an environment hold what its file asks for; quick if it already does."""
    want = wanted(venv)
    if built_from(venv) == want:
        return
    with only_one() as lock:
        have = built_from(venv)
        if have == want:  # another start has done it meanwhile
            return
        venv.built_from.unlink(missing_ok=True)
        making = f"Making {venv.folder.name}"
        if have[:1] != want[:1]:
            print(f"{making} with Python {sys.version.split()[0]}.")
            # Not sys.executable: that one may live in the .venv that is cleared.
            python = getattr(sys, "_base_executable", sys.executable)
            make = [python, "-m", "venv", "--clear", str(venv.folder)]
            run_step(venv, making, make, lock)
        file = venv.requirements.relative_to(ROOT).as_posix()
        print(f"Installing the packages of {file}: minutes the first time.")
        pip = [str(venv.python), "-m", "pip", "install", "--disable-pip-version-check"]
        run_step(venv, "Installing the packages", [*pip, "-r", file], lock)
        forget_old_package(venv, lock)
        finished = venv.built_from.with_suffix(".new")
        finished.write_text("\n".join(want), encoding="utf-8")
        finished.replace(venv.built_from)


def wanted(venv: Venv) -> list[str]:
    """What it has to be built from: two lines, the place and the packages.

    A new Python or a moved folder (its path is written all over an environment) means
    building anew; new requirements mean running pip once more.
    """
    packages = hashlib.sha256()
    for file in (venv.requirements, SIMULATOR / "pyproject.toml"):
        packages.update(file.read_bytes() + b"\0")
    return [f"{sys.implementation.cache_tag} {ROOT}", packages.hexdigest()]


def forget_old_package(venv: Venv, lock: int) -> None:
    """Take out the package that the course was until it was run from its folder.

    It would go on announcing its plugin to pytest, from the environment or from the
    folder beside its sources.
    """
    shutil.rmtree(ROOT / f"{OLD_NAME.replace('-', '_')}.egg-info", ignore_errors=True)
    pip = [str(venv.python), "-m", "pip", "--disable-pip-version-check", "-qq"]
    name = "Taking out the old package"
    run_step(venv, name, [*pip, "uninstall", "-y", OLD_NAME], lock)


def built_from(venv: Venv) -> list[str]:
    """What it was built from; empty if it is missing, unfinished or broken."""
    try:
        lines = venv.built_from.read_text(encoding="utf-8").splitlines()
        # A venv without its pyvenv.cfg or its pip is not one any more.
        works = "import sys, pip; sys.exit(sys.prefix == sys.base_prefix)"
        test = subprocess.run([venv.python, "-I", "-c", works], capture_output=True)
    except (OSError, UnicodeDecodeError):
        return []
    return lines if test.returncode == 0 else []


@contextlib.contextmanager
def only_one() -> Iterator[int]:
    """Hold the set-up's lock, after waiting for another start that has it.

    Yields:
        The descriptor of the locked file.
    """
    with open(LOCK, "a") as file:
        if not try_lock(file.fileno()):
            print("Another start is setting up. Waiting for it, Ctrl-C stops.")
            while not try_lock(file.fileno()):
                time.sleep(0.1)
        yield file.fileno()


def try_lock(file: int) -> bool:
    """Take the lock if nobody else has it; it ends with the process."""
    try:
        if WINDOWS:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # some network file systems have no locks at all
        return error.errno in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP)
    return True


def run_step(venv: Venv, name: str, command: list[str], lock: int) -> None:
    """Run one step of the set-up in front of the reader.

    The step's complaints go to stdout, where they read as progress, so that stderr
    holds one sentence in the end. On Linux and macOS the step also inherits the lock:
    if this process is killed, the next start waits until the step has ended.

    Raises:
        Trouble: if the step fails.
    """
    inherited = () if WINDOWS else (lock,)
    complaints = []
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(venv),
        stderr=subprocess.PIPE,
        pass_fds=inherited,
    ) as process:
        for line in process.stderr:
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
            complaints.append(line.decode("utf-8", "replace"))
    if process.returncode:
        raise step_failed(name, process.returncode, "".join(complaints))


def step_failed(name: str, status: int, complaints: str) -> Trouble:
    """Find the one sentence that says why a step of the set-up failed."""
    little_space = shutil.disk_usage(ROOT).free < LITTLE_SPACE
    if little_space or DISK_SIGNS.search(complaints):
        return Trouble(DISK_IS_FULL)
    if NETWORK_SIGNS.search(complaints):
        return Trouble(
            f"{name} failed because the package index could not be reached; check the "
            "network connection (and proxy), then run this again."
        )
    lines = [line.strip() for line in complaints.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    reason = (errors or lines or [f"exit status {status}"])[-1].rstrip(".")
    return Trouble(f"{name} failed: {reason}; the lines above say more.")


def environment(venv: Venv) -> dict[str, str]:
    """The environment variables of every child: nothing comes before its packages.

    PYTHONHOME and PYTHONPATH would bring in the packages of another Python. Where
    pip's configuration asks for "user" installs, it would refuse to fill `.venv`.
    """
    env = dict(os.environ, VIRTUAL_ENV=str(venv.folder), PIP_USER="0")
    env["PATH"] = str(venv.folder / BIN) + os.pathsep + env.get("PATH", os.defpath)
    env.pop("PYTHONHOME", None)
    env.pop("PYTHONPATH", None)
    return env


def become(venv: Venv, *arguments: str) -> int:
    """Let the Python of an environment take this process over, in the course's folder.

    Args:
        venv: one that is set up.
        arguments: what its Python runs, such as `-m` and a module.

    Returns:
        On Windows, where no program can do that, its exit status. It also has Ctrl-C
        for itself there.
    """
    command = [str(venv.python), *arguments]
    if WINDOWS:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return subprocess.call(command, cwd=ROOT, env=environment(venv))
    os.chdir(ROOT)
    os.execve(command[0], command, environment(venv))


# --- Commands -------------------------------------------------------------------


def lab(arguments: list[str]) -> int:
    """Set up, then become JupyterLab on the first notebook.

    Args:
        arguments: Options for JupyterLab, such as `--no-browser` or `--port 8889`.
    """
    if not FIRST_NOTEBOOK.is_file():
        raise Trouble(f"{FIRST_NOTEBOOK} is missing: this copy of the course is torn.")
    parser = argparse.ArgumentParser(
        prog="python3 -m helpers lab", add_help=False, allow_abbrev=False
    )
    parser.add_argument("--port", "--ServerApp.port", type=int, default=0)
    parser.add_argument("--ip", "--ServerApp.ip")
    asked = parser.parse_known_args(arguments)[0]
    check_port(asked.port)
    set_up(LESSONS_VENV)
    sign()
    options = [
        f"--ServerApp.root_dir={ROOT}",
        "--ServerApp.answer_yes=True",  # one Ctrl-C stops it, without a question
        f"--LabApp.default_url=/lab/tree/{FIRST_NOTEBOOK.relative_to(ROOT).as_posix()}",
    ]
    if asked.ip is None:  # JupyterLab refuses an option that it is given twice
        options.append("--ServerApp.ip=127.0.0.1")
    if not WINDOWS and os.geteuid() == 0:  # containers
        options.append("--allow-root")
    return become(LESSONS_VENV, "-m", "jupyterlab", *options, *arguments)


def check_port(port: int) -> None:
    """Refuse a port that another program has; 0 stands for any free one.

    Unless it is asked for one, JupyterLab itself moves on to the next free port.
    """
    with socket.socket() as probe:
        if not WINDOWS:  # there this option would let two programs share a port
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise Trouble(
                f"Port {port} cannot be used ({error}); ask for another one, or leave "
                "--port out and JupyterLab finds a free one."
            ) from error


def sign() -> None:
    """Tell JupyterLab that the lessons' stored pictures may be shown.

    It shows SVG only of notebooks that were signed by this user; of others it shows a
    line of text, until their cells run here.
    """
    lessons = map(str, sorted(FIRST_NOTEBOOK.parent.glob("*.ipynb")))
    command = [str(LESSONS_VENV.python), "-m", "nbformat.sign", *lessons]
    env = environment(LESSONS_VENV)
    signing = subprocess.run(command, cwd=ROOT, env=env, capture_output=True)
    if signing.returncode:
        print("The lessons cannot be signed: run their cells to see the pictures.")


def test(arguments: list[str]) -> int:
    """Set up, then become pytest.

    Args:
        arguments: Options for pytest. Without any, the tests are shared out to
            `WORKERS` processes, where there is more than one core.
    """
    set_up(LESSONS_VENV)
    if not arguments:
        several = (os.cpu_count() or 1) > 1
        arguments = ["--progress", *(["-n", str(WORKERS)] if several else [])]
    return become(LESSONS_VENV, "-m", "pytest", "--once-more", *arguments)


def check(arguments: list[str]) -> int:
    """Set up, then become the program that checks the exercises of one lesson."""
    parser = argparse.ArgumentParser(prog="python3 -m helpers check")
    parser.add_argument("lesson", metavar="NN", help="its number, such as 03")
    number = parser.parse_args(arguments).lesson
    set_up(LESSONS_VENV)
    return become(LESSONS_VENV, "-m", "helpers.solved", number)


def site(arguments: list[str]) -> int:
    """Set up `.venv.site`, then build the reading site; executes no notebook."""
    parser = argparse.ArgumentParser(prog="python3 -m helpers site")
    parser.add_argument("folder", metavar="FOLDER", nargs="?", default=ROOT / "site")
    folder = parser.parse_args(arguments).folder
    place = Path(folder).resolve()  # before `become` goes to the course's folder
    set_up(SITE_VENV)
    return become(SITE_VENV, str(SITE / "build.py"), str(place))


def join(arguments: list[str]) -> int:
    """Add the simulator to the running Python, with what the lessons lack there.

    For Colab and Kaggle, whose own packages must stay: what is there is kept in
    whatever version, and PyTorch is never installed.
    """
    if arguments:
        raise Trouble("join takes no options.")
    if importlib.util.find_spec("torch") is None:
        raise Trouble("PyTorch is missing here; install it first, then run this again.")
    lacking = [name for name in LESSONS_NEED if importlib.util.find_spec(name) is None]
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    texts = [line.partition("#")[0].strip() for line in lines]
    packages = [text for text in texts if re.split("[<>=]", text)[0] in lacking]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    for installed in (["--no-deps", str(SIMULATOR)], packages):
        if installed and subprocess.call([*pip, *installed]):
            raise Trouble("pip failed; the lines above say why.")
    return 0


COMMANDS = {
    "lab": lab,
    "test": test,
    "check": check,
    "site": site,
    "join": join,
}
USAGE = """\
usage: python3 -m helpers COMMAND

  lab [options]    set up, then open JupyterLab on lesson 00
  test [options]   set up, then run all tests with pytest
  check NN         set up, then check the exercises of lesson NN
  site [FOLDER]    set up, then build the reading site into FOLDER
  join             add what the lessons need to this Python (Colab, Kaggle)

The options of lab go to JupyterLab, those of test to pytest."""


def main(arguments: list[str]) -> int:
    """Run one command.

    Returns:
        The exit status: 130 after Ctrl-C, 2 for a command that does not exist, 1 for
        trouble that the reader can act on, else what the command returned.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if arguments[0] not in COMMANDS:
        print(f"There is no command {arguments[0]!r}.\n\n{USAGE}", file=sys.stderr)
        return 2
    sys.stdout.reconfigure(line_buffering=True)  # the reader sees at once what goes on
    try:
        return COMMANDS[arguments[0]](arguments[1:])
    except KeyboardInterrupt:
        return 130
    except Trouble as trouble:
        print(trouble, file=sys.stderr)
    except OSError as error:
        print(os_trouble(error), file=sys.stderr)
    return 1


def os_trouble(error: OSError) -> str:
    """Put into one sentence what the operating system refused."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DISK_IS_FULL
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            f"Writing to {error.filename} is not allowed; copy the course into a "
            "folder of your own and run this there."
        )
    return f"{error.filename}: {error.strerror}."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
