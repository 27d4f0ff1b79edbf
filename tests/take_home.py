"""The script that a lesson ends with, and the commands for it.

Its section `## Take it home` has two blocks of bash with a line each: the command for
real GPUs, and the same command for simulated ones, which is `python -m simgpu --gpus N`
before it. `run` executes the second one, unmodified.
"""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from helpers.processes import free_port
from tests.launching import NOTEBOOKS, ROOT, SCRIPTS, environment, prose_of

SECONDS = 200  # that a script may take
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
