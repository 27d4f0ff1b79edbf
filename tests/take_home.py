"""The script that a lesson ends with, and the commands for it.

Its section `## Take it home` has two blocks of bash with a line each: the command for
real GPUs, and the same command for simulated ones, which is `python -m simgpu --gpus N`
before it. `run` executes the second one, unmodified; `Runs` keeps what scripts print.

The lessons' own commands are started as a reader starts them. Others begin with
`python -m simgpu` as well, and run in forked processes that have PyTorch already
(`support.programs`).
"""

import hashlib
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from support import checkout
from support.limits import JOB
from support.ports import free_port
from tests.launching import NOTEBOOKS, ROOT, SCRIPTS, environment, prose_of

OWN = "the lesson's own command"
AGENTS = {"25": 2}  # lesson -> how often its command is started, once for each node
SIMULATED = re.compile(r"python -m simgpu --gpus \d ")
_SECTION = re.compile(r"^## Take it home$(.*?)(?=^## |\Z)", re.M | re.S)
_BLOCK = re.compile(r"^```bash\n(.*?)\n```$", re.M | re.S)


def commands(prose: str) -> list[str]:
    """The commands of the section `Take it home`, in their order."""
    section = _SECTION.search(prose)
    return [] if section is None else _BLOCK.findall(section[1])


def script_of(command: str) -> str:
    """The name of the script in a command."""
    return next(word for word in command.split() if word.endswith(".py"))


def lesson_of(number: str) -> str:
    """The file of a lesson, by its number."""
    (path,) = checkout.here(NOTEBOOKS, f"{number}-*.ipynb")
    return path.name


def run(number: str, folder: Path) -> str:
    """What a lesson's script prints on simulated GPUs, started in this folder."""
    _, simulated = commands(prose_of(lesson_of(number)))
    assert SIMULATED.match(simulated), simulated
    return run_command(simulated, folder)


def run_agents(number: str, folder: Path, nodes: int) -> str:
    """What a lesson's script prints when its command is started once for each node.

    `$HOST:29500` in the command becomes this machine and a free port.
    """
    _, simulated = commands(prose_of(lesson_of(number)))
    command = simulated.replace("$HOST:29500", f"localhost:{free_port()}")
    with ThreadPoolExecutor(nodes) as pool:
        said = pool.map(
            run_command, [command] * nodes, [folder] * nodes, [True] * nodes
        )
    return "".join(said)


class Ran(NamedTuple):
    """What a script has left."""

    text: str  # that it printed
    folder: Path  # in which it was started


class Runs:
    """What the scripts of lessons print; each way to start one runs once.

    Also if the tests are shared out to several processes: what one of them has started,
    the others read. Of one lesson, one way runs at a time.

    Args:
        folder: for what they leave, the same one in all processes.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def __call__(
        self, number: str, way: str = OWN, after: str = "", code: int = 0
    ) -> Ran:
        """What a lesson's script printed, started in one way.

        Args:
            number: of the lesson.
            way: `OWN`, or how many and options: "2 ranks --tp 2", "1 gpus --length 8".
            after: another way, in whose folder this one goes on.
            code: the exit status with which this one must end.
        """
        import fcntl  # not on Windows, where no test starts a script

        with open(self._folder / f"{number}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # each way ends within JOB
            return self._run_once(number, way, after, code)

    def _run_once(self, number: str, way: str, after: str, code: int = 0) -> Ran:
        key = hashlib.sha256("\n".join((number, way, after)).encode()).hexdigest()
        printed = self._folder / f"{number}-{key[:16]}.txt"
        if after:
            folder = self._run_once(number, after, "").folder
        else:
            folder = printed.with_suffix("")
        if not printed.exists():
            folder.mkdir(exist_ok=True)
            if way != OWN:
                text = run_command(command_for(number, way), folder, code=code)
            elif number in AGENTS:
                text = run_agents(number, folder, AGENTS[number])
            else:
                text = run(number, folder)
            printed.write_text(text, "utf-8")
        return Ran(printed.read_text("utf-8"), folder)


def command_for(number: str, way: str) -> str:
    """The command that starts a lesson's script on as many GPUs as it has ranks."""
    return command_of(script_of(commands(prose_of(lesson_of(number)))[0]), way)


def command_of(script: str | Path, way: str) -> str:
    """The same for a script of any name."""
    count, what, *options = way.split()
    launcher = {
        "ranks": ["torchrun", "--standalone", f"--nproc-per-node={count}"],
        "gpus": [],
    }
    words = ["python", "-m", "simgpu", "--gpus", count, *launcher[what], str(script)]
    return " ".join([*words, *options])


def run_command(
    command: str, folder: Path, new_python: bool = False, code: int = 0
) -> str:
    """What a command prints that begins with `python` and names one of the scripts."""
    done = start_command(command, folder, new_python)
    assert done.returncode == code, done.stderr
    return done.stdout


def start_command(
    command: str, folder: Path, new_python: bool = False
) -> subprocess.CompletedProcess:
    """The same for a command that may fail.

    Args:
        command: `python -m simgpu ...` or `python SCRIPT ...`.
        folder: where it starts.
        new_python: whether nothing may be forked.
    """
    python, *words = command.split()
    assert python == "python", command
    words = [str(SCRIPTS / w) if w.endswith(".py") else w for w in words]
    with environment(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)) as environ:
        if words[:2] == ["-m", "simgpu"] and hasattr(os, "fork") and not new_python:
            from support import programs  # which pytest finds, and no tool needs

            done = programs.in_environment(folder, words[2:], environ, JOB)
            return subprocess.CompletedProcess(words, *done)
        return subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=JOB,
        )
