"""Runs an unmodified CUDA script on simulated GPUs.

    python -m helpers.simgpu --gpus 4 [--card T4] [--memory 512MB] script.py [args]
    python -m helpers.simgpu --gpus 4 -m package.module [args]

CUDA_VISIBLE_DEVICES hides GPUs, as it does from a new process on a real machine. With
HELPERS_GPUS=real the script runs on the machine's own GPUs instead. Left out: processes
that the script spawns see no simulated GPUs.
"""

import argparse
import os
import runpy
import sys

import torch

from helpers import gpus, simgpu
from helpers.simgpu.cards import CARDS


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; everything after the script belongs to the script."""
    parser = argparse.ArgumentParser(
        prog="python -m helpers.simgpu",
        description="Run a CUDA script on simulated GPUs.",
        usage="%(prog)s --gpus N [--card CARD] [--memory SIZE] "
        "(SCRIPT | -m MODULE) [ARGUMENT ...]",
    )
    parser.add_argument("--gpus", type=int, required=True, metavar="N")
    parser.add_argument("--card", default="A100", help=", ".join(CARDS))
    parser.add_argument("--memory", metavar="SIZE", help='of each card: "512MB"')
    parser.add_argument("-m", dest="module", action="store_true", help="as in python")
    parser.add_argument("program", help="a script, or a module with -m")
    arguments = sys.argv[1:] if arguments is None else arguments
    ours, theirs = split(arguments)
    found = parser.parse_args(ours)
    found.arguments = theirs
    if not found.module and not os.path.exists(found.program):
        parser.error(f"there is no script {found.program}")
    return found


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Our part of the command line, up to the program, and the program's own."""
    position = 0
    while position < len(arguments):
        word = arguments[position]
        if not word.startswith("-"):
            break
        position += 2 if word in ("--gpus", "--card", "--memory") else 1
    return arguments[: position + 1], arguments[position + 1 :]


def main() -> None:
    """Start the GPUs, then become the program."""
    found = options()
    try:
        simgpu.check_request(found.gpus, found.card, found.memory)
        if gpus.wanted() == "real":
            real = torch.cuda.device_count()
            if real < found.gpus:
                sys.exit(
                    f"HELPERS_GPUS=real, but this machine has {real} of {found.gpus} "
                    "GPUs; set HELPERS_GPUS=simulated"
                )
        else:
            simgpu.start(found.gpus, found.card, found.memory, honour_visible=True)
    except ValueError as error:
        sys.exit(str(error))
    sys.argv = [found.program, *found.arguments]
    if found.module:
        runpy.run_module(found.program, run_name="__main__", alter_sys=True)
    else:  # python puts the script's folder first, where -m has put the current one
        sys.path[0] = os.path.dirname(os.path.abspath(found.program))
        runpy.run_path(found.program, run_name="__main__")


if __name__ == "__main__":
    main()
