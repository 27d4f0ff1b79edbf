"""The command line of `python -m simgpu`. Nothing here needs PyTorch."""

import argparse
import difflib
import os
import shlex
import sys
from pathlib import Path

import simgpu
from simgpu._device import measured
from simgpu._device.cards import CARDS
from simgpu._launchers import LAUNCHERS, find_command
from simgpu._rank_variables import lay_out
from simgpu._request import RACES, check_request
from simgpu._timing.topology import Topology

# `simgpu prove ...` is not a program called "prove", which is `./prove`
SUBCOMMANDS = {
    "prove": "simgpu._prove.command",
    "dry-run": "simgpu._dry.command",
    "sweep": "simgpu._dry.sweep_command",
    "plan": "simgpu._plan.command",
    "measure": "simgpu._measure.command",
}
_OTHERS = """other commands, each with a --help of its own:
  simgpu dry-run        one rank of a job of any size: will it fit, how fast is it
  simgpu sweep          the same for many layouts, as a table
  simgpu plan           all layouts of a model, and which are the fastest
  simgpu prove          does a script train the same on any number of ranks
  simgpu measure        figures of a real machine, for --card and --network"""
_WITH_VALUE = (
    "--gpus", "--card", "--memory", "--nodes", "--network", "--timeline", "--races",
)  # fmt: skip
_LONGEST_LINE = 256  # that Linux reads of a program's first
_NO_SUCH = (
    "there is no script {0}; {0} is a command: say --children to run it, and what it "
    "starts, on simulated GPUs"
)


_BEHIND = (
    "--gpus stands after {0}, so that it is an argument of {0}; write it before: "
    "simgpu --gpus N {0}"
)
_NO_LAUNCHER = "{0} is not installed beside this Python: pip install {1}"


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
    if parsed.gpus is None and "LOCAL_WORLD_SIZE" not in os.environ:
        parser.error(_no_number(parsed.program, theirs))
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
        "compile": "eager" if parsed.no_compile else "fuse",
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
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_OTHERS,
        description="Run a CUDA program on simulated GPUs.",
        allow_abbrev=False,
        usage="%(prog)s --gpus N [--card CARD] [--memory SIZE] [--nodes N] "
        "[--network BANDWIDTH] [--timeline FILE] [--races raise|show|warn|off] "
        "[--no-compile] [--children] [--no-fork] "
        "(SCRIPT | -m MODULE | LAUNCHER) [ARGUMENT ...]\n"
        f"       simgpu {{{','.join(SUBCOMMANDS)}}} --help",
    )
    add = parser.add_argument
    add("--version", action="version", version=f"simgpu {simgpu.__version__}")
    add("--gpus", type=int, metavar="N",
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
        help="torch.compile gives back what it is given: no kernels are fused",
    )
    add("--children", action="store_true",
        help="what the program starts as commands has the GPUs, too")  # fmt: skip
    add("--no-fork", action="store_true",
        help="each rank of a launcher is a new Python, own hashes")  # fmt: skip
    add("-m", dest="module", action="store_true", help="as in python")
    add("program", help="a script, a module with -m, or a launcher: torchrun")
    return parser


def _no_number(program: str, behind: list[str]) -> str:
    """What to say where nobody has said how many GPUs there are."""
    if any(word.partition("=")[0] == "--gpus" for word in behind):
        return _BEHIND.format(program)
    return _meant(program) or "--gpus N is missing: how many GPUs has the machine?"


def _meant(program: str) -> str:
    """A subcommand whose name is almost that of a program that is not there."""
    near = difflib.get_close_matches(program, SUBCOMMANDS, 1)
    if not near or os.path.exists(program):
        return ""
    return f"there is no script {program}; the command is: simgpu {near[0]}"


def _command(parsed, parser: argparse.ArgumentParser) -> list[str] | None:
    """The words that start the program; None if it is to run in this process."""
    name = os.path.basename(parsed.program)
    is_launcher = name in LAUNCHERS
    if parsed.module:
        return [sys.executable, "-m", name] if is_launcher else None
    if not is_launcher and os.path.exists(parsed.program):
        return other_program(parsed.program)
    command = find_command(parsed.program)
    if command is None and is_launcher:
        package = name if name in ("accelerate", "deepspeed") else "torch"
        parser.error(_NO_LAUNCHER.format(name, package))
    if command is None:
        known = _meant(parsed.program)
        parser.error(known or f"there is no script {parsed.program}")
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
