"""The course's commands: `python3 -m helpers lab`, `test`, `check` and `badges`.

Standard library only, because the first command must work before anything is
installed. An old Python must be able to read this file as far as the sentence that
turns it away, so there is no syntax in it that is newer than Python 3.6.

Every command that needs packages builds `.venv` first. What `.venv` was built from is
written into it last, so a set-up that was killed is recognised and started over.
What is not covered: an environment that somebody changes by hand afterwards.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

if sys.version_info < (3, 10):  # noqa: UP036 - here an older Python is turned away
    sys.exit(f"Python 3.10 or newer is needed, this is {sys.version.split()[0]}.")

# Where the course is published. Every badge and clone address names these two;
# `python3 -m helpers badges OWNER/REPO` changes them, here and there.
REPOSITORY = "multi-gpu-course/multi-gpu-course"
BRANCH = "main"

ROOT = Path(__file__).resolve().parents[1]
FIRST_NOTEBOOK = ROOT / "notebooks" / "00-start-here.ipynb"
REQUIREMENTS = ROOT / "requirements.txt"

# What lessons import beside PyTorch.
LESSONS_NEED = ("numpy", "matplotlib", "ipywidgets", "psutil", "cloudpickle")

WINDOWS = os.name == "nt"
VENV = ROOT / ".venv"
VENV_BIN = VENV / ("Scripts" if WINDOWS else "bin")
VENV_PYTHON = VENV_BIN / ("python.exe" if WINDOWS else "python")
BUILT_FROM = VENV / ".built-from"
LOCK = VENV / ".lock"

WORKERS = 3  # of a test run, which often waits; a lesson needs up to 1.2 GB in each
SECONDS_TO_STOP = 10  # that a child gets to end by itself after Ctrl-C
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


def say(text: str) -> None:
    """Tell the reader what is going on, at once."""
    print(text, flush=True)


# --- Child processes ------------------------------------------------------------


def environment() -> dict[str, str]:
    """The environment of every child: `.venv` comes first, and nothing hides it.

    PYTHONHOME and PYTHONPATH would bring in the packages of another Python. Where
    pip's configuration asks for "user" installs, it would refuse to fill `.venv`.
    """
    env = dict(os.environ, VIRTUAL_ENV=str(VENV), PIP_USER="0")
    env["PATH"] = str(VENV_BIN) + os.pathsep + env.get("PATH", os.defpath)
    env.pop("PYTHONHOME", None)
    env.pop("PYTHONPATH", None)
    return env


@contextlib.contextmanager
def child(command: list[str], **options: object) -> "Iterator[subprocess.Popen]":
    """Start a child process that does not outlive the `with` block.

    Args:
        command: Program and arguments; it starts in the course's folder.
        options: More arguments of `subprocess.Popen`.
    """
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), **options)
    try:
        yield process
    except KeyboardInterrupt:  # the terminal has interrupted the child as well
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_STOP)
        raise
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def run_step(command: list[str], lock: int) -> "tuple[int, str]":
    """Run one step of the set-up in front of the reader.

    The step's complaints go to stdout, where they read as progress, so that stderr
    holds one sentence in the end. On Linux and macOS the step also inherits the lock:
    if this process is killed, the next start waits until the step has ended.

    Returns:
        The exit status, and all that the step wrote to its stderr.
    """
    inherited = () if WINDOWS else (lock,)
    complaints = []
    with child(command, stderr=subprocess.PIPE, pass_fds=inherited) as process:
        for line in process.stderr:
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
            complaints.append(line.decode("utf-8", "replace"))
        return process.wait(), "".join(complaints)


# --- Setting up .venv -----------------------------------------------------------


def wanted() -> list[str]:
    """What `.venv` has to be built from: two lines, the place and the packages.

    A new Python or a moved folder (its path is written all over `.venv`) means
    building anew; new requirements mean running pip once more.
    """
    packages = hashlib.sha256()
    for file in (REQUIREMENTS, ROOT / "helpers" / "pyproject.toml"):
        packages.update(file.read_bytes() + b"\0")
    return [f"{sys.implementation.cache_tag} {ROOT}", packages.hexdigest()]


def built_from() -> list[str]:
    """What `.venv` was built from; empty if it is missing, unfinished or broken."""
    try:
        lines = BUILT_FROM.read_text(encoding="utf-8").splitlines()
        # A venv without its pyvenv.cfg or its pip is not one any more.
        works = "import sys, pip; sys.exit(sys.prefix == sys.base_prefix)"
        test = subprocess.run([VENV_PYTHON, "-I", "-c", works], capture_output=True)
    except (OSError, UnicodeDecodeError):
        return []
    return lines if test.returncode == 0 else []


def set_up() -> None:
    """Make `.venv` hold what requirements.txt asks for; quick if it already does."""
    want = wanted()
    if built_from() == want:
        return
    VENV.mkdir(exist_ok=True)
    with only_one() as lock:
        have = built_from()
        if have == want:  # another start has done it meanwhile
            return
        BUILT_FROM.unlink(missing_ok=True)
        if have[:1] != want[:1]:
            make_venv(lock)
        install(lock)
        finished = BUILT_FROM.with_suffix(".new")
        finished.write_text("\n".join(want), encoding="utf-8")
        finished.replace(BUILT_FROM)


if WINDOWS:
    import msvcrt

    def try_lock(file: int) -> bool:
        """Take the lock if nobody else has it; it ends with the process."""
        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def try_lock(file: int) -> bool:
        """Take the lock if nobody else has it; it ends with the process."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:  # some network file systems have no locks at all
            return error.errno in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP)
        return True


@contextlib.contextmanager
def only_one() -> "Iterator[int]":
    """Hold the set-up's lock, after waiting for another start that has it.

    Yields:
        The descriptor of the locked file.
    """
    with open(LOCK, "a") as file:
        if not try_lock(file.fileno()):
            say("Another start is setting up .venv. Waiting for it, Ctrl-C stops.")
            while not try_lock(file.fileno()):
                time.sleep(0.1)
        yield file.fileno()


def make_venv(lock: int) -> None:
    """Build an empty `.venv`, in place of whatever is there."""
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            raise Trouble(
                f"This Python has no {module} module, which making .venv needs; on "
                "Debian or Ubuntu run `sudo apt install python3-venv`, then this again."
            )
    say(f"Making .venv with Python {sys.version.split()[0]}.")
    for entry in VENV.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry != LOCK:
            entry.unlink()
    # Not sys.executable: that one may live in the .venv that was just emptied.
    python = getattr(sys, "_base_executable", sys.executable)
    status, complaints = run_step([python, "-m", "venv", str(VENV)], lock)
    if status:
        raise step_failed("Making .venv", status, complaints)


def install(lock: int) -> None:
    """Let pip install the requirements into `.venv`."""
    say("Installing the packages of requirements.txt: minutes the first time.")
    pip = [str(VENV_PYTHON), "-m", "pip", "install", "--disable-pip-version-check"]
    status, complaints = run_step([*pip, "-r", REQUIREMENTS.name], lock)
    if status:
        raise step_failed("Installing the packages", status, complaints)


def step_failed(step: str, status: int, complaints: str) -> Trouble:
    """Find the one sentence that says why a step of the set-up failed."""
    little_space = shutil.disk_usage(VENV).free < LITTLE_SPACE
    if little_space or DISK_SIGNS.search(complaints):
        return Trouble(DISK_IS_FULL)
    if NETWORK_SIGNS.search(complaints):
        return Trouble(
            f"{step} failed because the package index could not be reached; check the "
            "network connection (and proxy), then run this again."
        )
    lines = [line.strip() for line in complaints.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    reason = (errors or lines or [f"exit status {status}"])[-1].rstrip(".")
    return Trouble(f"{step} failed: {reason}; the lines above say more.")


# --- Commands -------------------------------------------------------------------


def lab(arguments: list[str]) -> int:
    """Set up, then run JupyterLab on the first notebook until it ends.

    Args:
        arguments: Options for JupyterLab, such as `--no-browser` or `--port 8889`.

    Returns:
        JupyterLab's exit status.
    """
    if not FIRST_NOTEBOOK.is_file():
        raise Trouble(f"{FIRST_NOTEBOOK} is missing: this copy of the course is torn.")
    asked = lab_options(arguments)
    check_port(asked.port)
    set_up()
    sign()
    command = [
        str(VENV_PYTHON),
        "-m",
        "jupyterlab",
        f"--ServerApp.root_dir={ROOT}",
        "--ServerApp.answer_yes=True",  # one Ctrl-C stops it, without a question
        f"--LabApp.default_url=/lab/tree/{FIRST_NOTEBOOK.relative_to(ROOT).as_posix()}",
    ]
    if asked.ip is None:  # JupyterLab refuses an option that it is given twice
        command.append("--ServerApp.ip=127.0.0.1")
    if not WINDOWS and os.geteuid() == 0:  # containers
        command.append("--allow-root")
    with child(command + arguments) as server:
        return server.wait()


def sign() -> None:
    """Tell JupyterLab that the lessons' stored pictures may be shown.

    It shows SVG only of notebooks that were signed by this user; of others it shows a
    line of text, until their cells run here.
    """
    lessons = map(str, sorted(FIRST_NOTEBOOK.parent.glob("*.ipynb")))
    command = [str(VENV_PYTHON), "-m", "nbformat.sign", *lessons]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with child(command, **quiet) as signing:
        if signing.wait():
            say("The lessons cannot be signed: run their cells to see the pictures.")


def lab_options(arguments: list[str]) -> argparse.Namespace:
    """Find the port and the address that the reader asked for among the options."""
    parser = argparse.ArgumentParser(
        prog="python3 -m helpers lab", add_help=False, allow_abbrev=False
    )
    parser.add_argument("--port", "--ServerApp.port", type=int, default=0)
    parser.add_argument("--ip", "--ServerApp.ip")
    return parser.parse_known_args(arguments)[0]


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


def test(arguments: list[str]) -> int:
    """Set up, then run pytest in the course's folder.

    Args:
        arguments: Options for pytest. Without any, the tests are shared out to
            `WORKERS` processes, where there is more than one core.

    Returns:
        pytest's exit status, where pytest does not take this process over.
    """
    set_up()
    if not arguments and (os.cpu_count() or 1) > 1:
        arguments = ["-n", str(WORKERS)]
    command = [str(VENV_PYTHON), "-m", "pytest", *arguments]
    if WINDOWS:
        with child(command) as tests:
            return tests.wait()
    os.chdir(ROOT)
    os.execve(command[0], command, environment())


def check(arguments: list[str]) -> int:
    """Set up, then run one lesson and print what its exercises say of the answers.

    Returns:
        0 if all of them are right, else 1.
    """
    parser = argparse.ArgumentParser(prog="python3 -m helpers check")
    parser.add_argument("lesson", metavar="NN", help="its number, such as 03")
    number = parser.parse_args(arguments).lesson
    set_up()
    command = [str(VENV_PYTHON), "-m", "helpers.solved", number]
    with child(command) as lesson:
        return lesson.wait()


def join(arguments: list[str]) -> int:
    """Add `helpers` to the running Python, with what the lessons lack there.

    For Colab and Kaggle, whose own packages must stay: what is there is kept in
    whatever version, and PyTorch is never installed.
    """
    if arguments:
        raise Trouble("join takes no options.")
    if importlib.util.find_spec("torch") is None:
        raise Trouble("PyTorch is missing here; install it first, then run this again.")
    lacking = [name for name in LESSONS_NEED if importlib.util.find_spec(name) is None]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    steps = [[*pip, "--no-deps", str(ROOT / "helpers")]]
    if lacking:
        steps.append([*pip, *requirements_for(lacking)])
    for step in steps:
        status = subprocess.call(step)
        if status:
            raise Trouble("pip failed; the lines above say why.")
    return 0


def requirements_for(names: list[str]) -> list[str]:
    """The lines of requirements.txt for these packages, without their comments."""
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    texts = [line.partition("#")[0].strip() for line in lines]
    return [text for text in texts if re.split("[<>=]", text)[0] in names]


def badges(arguments: list[str]) -> int:
    """Move every badge, link and clone address to another repository or branch.

    This file comes last: it tells what the others name now, so a run that was
    interrupted can simply be repeated.
    """
    parser = argparse.ArgumentParser(prog="python3 -m helpers badges")
    parser.add_argument("repository", metavar="OWNER/REPO", type=repository_name)
    parser.add_argument("--branch", metavar="NAME", type=branch_name, default=BRANCH)
    new = parser.parse_args(arguments)
    readme = ROOT / "README.md"
    for file in (readme, *sorted((ROOT / "notebooks").glob("*.ipynb"))):
        rewrite(file, lambda text: move_links(text, new.repository, new.branch))
    rewrite(Path(__file__), lambda text: move_home(text, new.repository, new.branch))
    return 0


def repository_name(text: str) -> str:
    """Check that a text has the shape OWNER/REPO of a GitHub repository."""
    if not re.fullmatch(r"[\w-]+/(?!\.)[\w.-]+(?<!\.git)", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form OWNER/REPO, such as ada/multi-gpu-course"
        )
    return text


def branch_name(text: str) -> str:
    """Check that a text can stand as a branch in every link, without escapes."""
    if not re.fullmatch(r"\w[\w.-]*", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a branch name of letters, digits, '.', '_' and '-'"
        )
    return text


def move_links(text: str, repository: str, branch: str) -> str:
    """Point the Binder, Colab and GitHub links of this course elsewhere.

    Links to other repositories stay, and so does a branch or tag that is not BRANCH.
    """
    name_ends = r"(?![\w-])(?!\.(?!git\b)\w)"  # .git may follow, .io may not
    link = re.compile(
        r"(?P<site>(?<![\w-])(?:mybinder\.org/v2/gh/|github\.com[/:]"
        r"|colab\.research\.google\.com/github/|raw\.githubusercontent\.com/))"
        rf"{re.escape(REPOSITORY)}{name_ends}"
        rf"(?:(?P<to_branch>/(?:(?:blob|tree|raw)/)?){re.escape(BRANCH)}{name_ends})?",
        re.ASCII,
    )

    def moved(found: "re.Match[str]") -> str:
        named_branch = found["to_branch"] + branch if found["to_branch"] else ""
        return found["site"] + repository + named_branch

    return link.sub(moved, text)


def move_home(text: str, repository: str, branch: str) -> str:
    """Change the two constants at the top of this file."""
    for name, value in (("REPOSITORY", repository), ("BRANCH", branch)):
        text = re.sub(rf'(?m)^{name} = ".*"$', f'{name} = "{value}"', text, count=1)
    return text


def rewrite(file: Path, change: "Callable[[str], str]") -> None:
    """Change a text file in one go, leaving its other bytes as they are."""
    old = file.read_bytes()
    new = change(old.decode("utf-8")).encode("utf-8")
    if new != old:
        whole = file.with_name(file.name + ".new")
        whole.write_bytes(new)
        whole.replace(file)
        say(f"{file.relative_to(ROOT).as_posix()}: changed")


class Command(NamedTuple):
    """One line of the table of commands."""

    run: "Callable[[list[str]], int]"
    arguments: str
    summary: str


COMMANDS = {
    "lab": Command(lab, "[options]", "set up, then open JupyterLab on lesson 00"),
    "test": Command(test, "[options]", "set up, then run all tests with pytest"),
    "check": Command(check, "NN", "set up, then check the exercises of lesson NN"),
    "join": Command(join, "", "add helpers to this very Python (Colab, Kaggle)"),
    "badges": Command(
        badges, "OWNER/REPO [--branch NAME]", "point the badges at your repository"
    ),
}


def usage() -> str:
    """The text that `--help` prints."""
    lines = ["usage: python3 -m helpers COMMAND", ""]
    for name, command in COMMANDS.items():
        lines.append(f"  {name} {command.arguments:<{33 - len(name)}}{command.summary}")
    lines += ["", "The options of lab go to JupyterLab, those of test to pytest."]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Run one command.

    Returns:
        The exit status: 130 after Ctrl-C, 2 for a command that does not exist, 1 for
        trouble that the reader can act on, else what the command returned.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    if arguments[0] not in COMMANDS:
        print(f"There is no command {arguments[0]!r}.\n\n{usage()}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        return COMMANDS[arguments[0]].run(arguments[1:])
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
