"""The command line of `python -m simgpu`. Nothing here needs PyTorch."""

import argparse
import os
import shlex
import sys
from pathlib import Path

from simgpu._device import measured
from simgpu._device.cards import CARDS
from simgpu._launchers import LAUNCHERS, find_command
from simgpu._rank_variables import lay_out
from simgpu._request import RACES, check_request
from simgpu._timing.topology import Topology

_WITH_VALUE = (
    "--gpus", "--card", "--memory", "--nodes", "--network", "--timeline", "--races",
)  # fmt: skip
_LONGEST_LINE = 256  # that Linux reads of a program's first
_NO_SUCH = (
    "there is no script {0}; {0} is a command: say --children to run it, and what it "
    "starts, on simulated GPUs"
)


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; everything after the program belongs to the program.

    Beside the options: `arguments` of the program, its `command` where it is not to run
    in this process, `request` as `simgpu.start` takes it.
    """
    parser = _parser()
    arguments = sys.argv[1:] if arguments is None else arguments
    ours, theirs = split(arguments)
    parsed = parser.parse_args(ours)
    parsed.arguments = theirs
    parsed.command = _command(parsed, parser)
    if parsed.timeline is not None:
        parsed.timeline = parsed.timeline.absolute()  # the script may go elsewhere
        if not parsed.timeline.parent.is_dir():
            parser.error(f"there is no folder {parsed.timeline.parent}")
    if parsed.nodes != 1 and parsed.command is None:
        try:
            lay_out(parsed.nodes)
        except ValueError as error:
            parser.error(str(error))
    parsed.card = measured.absolute(parsed.card)
    parsed.network = measured.absolute(parsed.network)
    if parsed.gpus is None:
        parsed.gpus = int(os.environ["LOCAL_WORLD_SIZE"])
    parsed.request = {
        "number": parsed.gpus, "card": parsed.card, "memory": parsed.memory,
        "honour_visible": True, "races": parsed.races,
        "compile": "eager" if parsed.no_compile else "refuse",
    }  # fmt: skip
    try:
        request = check_request(
            parsed.gpus, parsed.card, parsed.memory, compile=parsed.request["compile"]
        )
        Topology(request.card, parsed.gpus, network=parsed.network)
    except ValueError as error:
        sys.exit(str(error))
    return parsed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m simgpu",
        description="Run a CUDA program on simulated GPUs.",
        allow_abbrev=False,
        usage="%(prog)s --gpus N [--card CARD] [--memory SIZE] [--nodes N] "
        "[--network BANDWIDTH] [--timeline FILE] [--races raise|show|warn|off] "
        "[--no-compile] [--children] [--no-fork] "
        "(SCRIPT | -m MODULE | LAUNCHER) [ARGUMENT ...]",
    )
    add = parser.add_argument
    add("--gpus", type=int, required="LOCAL_WORLD_SIZE" not in os.environ, metavar="N",
        help="under torchrun, as many as there are ranks on this node")  # fmt: skip
    add("--card", default="A100",
        help=", ".join(CARDS) + ", or a file of simgpu measure")  # fmt: skip
    add("--memory", metavar="SIZE", help='of each card: "512MB"')
    add("--nodes", type=int, default=1, metavar="N",
        help="number this machine's ranks as those of N nodes")  # fmt: skip
    add(
        "--network",
        metavar="BANDWIDTH",
        help='between nodes: "100 Gbit/s", "400 GB/s EFA", or a file of simgpu measure',
    )
    add("--timeline", metavar="FILE", type=Path, help="a trace of all ranks")
    add("--races", default="warn", choices=RACES,
        help="where streams use memory in no order: warn (default), raise, off, or "
        "show: a read gives what the memory held before",
        metavar="WHAT")  # fmt: skip
    add(
        "--no-compile",
        action="store_true",
        help="torch.compile gives back what it is given, which runs as it is",
    )
    add("--children", action="store_true",
        help="what the program starts as commands has the GPUs, too")  # fmt: skip
    add("--no-fork", action="store_true",
        help="each rank of a launcher is a new Python, own hashes")  # fmt: skip
    add("-m", dest="module", action="store_true", help="as in python")
    add("program", help="a script, a module with -m, or a launcher: torchrun")
    return parser


def _command(parsed, parser: argparse.ArgumentParser) -> list[str] | None:
    """The words that start the program; None if it is to run in this process."""
    name = os.path.basename(parsed.program)
    is_launcher = name in LAUNCHERS
    if parsed.module:
        return [sys.executable, "-m", name] if is_launcher else None
    if not is_launcher and os.path.exists(parsed.program):
        return other_program(parsed.program)
    command = find_command(parsed.program)
    if command is None:
        parser.error(f"there is no script {parsed.program}")
    if not is_launcher and not parsed.children:
        parser.error(_NO_SUCH.format(parsed.program))
    return command


def other_program(path: str) -> list[str] | None:
    """The words that run a file that is no Python program, such as a shell script."""
    if path.endswith(".py") or not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        first = file.readline(_LONGEST_LINE)
    path = os.path.abspath(path)
    if first.startswith(b"\x7fELF"):
        return [path]
    if not first.startswith(b"#!"):
        return ["sh", path] if path.endswith(".sh") else None
    if b"python" in first:
        return None
    words = shlex.split(os.fsdecode(first[2:]))
    return [*words, path] if words else None


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Our part of the command line, up to the program, and the program's own."""
    position = 0
    while position < len(arguments):
        word = arguments[position]
        if not word.startswith("-"):
            break
        position += 2 if word in _WITH_VALUE else 1
    return arguments[: position + 1], arguments[position + 1 :]
