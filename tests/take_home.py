"""The script that a lesson ends with, and the commands for it.

Its section `## Take it home` has two blocks of bash with a line each: the command for
real GPUs, and the same command for simulated ones, which is `python -m simgpu --gpus N`
before it. `run` executes the second one, unmodified; `Runs` keeps what scripts print.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from helpers.processes import free_port
from tests.launching import NOTEBOOKS, ROOT, SCRIPTS, environment, prose_of

SECONDS = 200  # that a script may take
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
    (path,) = NOTEBOOKS.glob(f"{number}-*.ipynb")
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
        said = pool.map(run_command, [command] * nodes, [folder] * nodes)
    return "".join(said)


class Ran(NamedTuple):
    """What a script has left."""

    text: str  # that it printed
    folder: Path  # in which it was started


class Runs:
    """What the scripts of lessons print; each way to start one runs once.

    Args:
        new_folder: makes an empty folder.
    """

    def __init__(self, new_folder: Callable[[], Path]):
        self._new_folder = new_folder
        self._ran: dict[tuple[str, str, str], Ran] = {}

    def __call__(self, number: str, way: str = OWN, after: str = "") -> Ran:
        """What a lesson's script printed, started in one way.

        Args:
            number: of the lesson.
            way: `OWN`, or how many and options: "2 ranks --tp 2", "1 gpus --length 8".
            after: another way, in whose folder this one goes on.
        """
        key = (number, way, after)
        if key not in self._ran:
            folder = self(number, after).folder if after else self._new_folder()
            if way != OWN:
                text = run_command(command_for(number, way), folder)
            elif number in AGENTS:
                text = run_agents(number, folder, AGENTS[number])
            else:
                text = run(number, folder)
            self._ran[key] = Ran(text, folder)
        return self._ran[key]


def command_for(number: str, way: str) -> str:
    """The command that starts a lesson's script on as many GPUs as it has ranks."""
    count, what, *options = way.split()
    script = script_of(commands(prose_of(lesson_of(number)))[0])
    launcher = {
        "ranks": ["torchrun", "--standalone", f"--nproc-per-node={count}"],
        "gpus": [],
    }
    words = ["python", "-m", "simgpu", "--gpus", count, *launcher[what], script]
    return " ".join([*words, *options])


def run_command(command: str, folder: Path) -> str:
    """What a command prints that begins with `python` and names one of the scripts."""
    done = start_command(command, folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def start_command(command: str, folder: Path) -> subprocess.CompletedProcess:
    """The same for a command that may fail."""
    python, *words = command.split()
    assert python == "python", command
    words = [str(SCRIPTS / w) if w.endswith(".py") else w for w in words]
    with environment(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)) as environ:
        return subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
