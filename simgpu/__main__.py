"""Runs an unmodified CUDA script on simulated GPUs.

    python -m simgpu --gpus 4 [--card T4] [--memory 512MB] script.py [args]
    python -m simgpu --gpus 4 -m package.module [args]
    torchrun --nproc-per-node=4 -m simgpu script.py [args]

Under torchrun each rank has as many simulated GPUs as there are ranks on its node, and
gloo answers where the script asks for NCCL (`distributed.py`).
CUDA_VISIBLE_DEVICES hides GPUs, as it does from a new process on a real machine. With
HELPERS_GPUS=real the script runs on the machine's own GPUs instead. Processes that the
script spawns (`torch.multiprocessing.spawn`) have the same GPUs. Left out: processes
that it starts as commands of their own.
"""

import argparse
import os
import runpy
import sys

import torch

import simgpu
from simgpu import runtime
from simgpu.choice import wanted
from simgpu.device.cards import CARDS
from simgpu.distributed.children import leave

# programs that start others, which would see no simulated GPUs
LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch",
             "accelerate", "accelerate.commands.launch", "deepspeed")  # fmt: skip
# frames between the interpreter and the program: our own and runpy's
_MACHINERY = {__file__, runpy.run_path.__code__.co_filename}


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; everything after the script belongs to the script."""
    parser = argparse.ArgumentParser(
        prog="python -m simgpu",
        description="Run a CUDA script on simulated GPUs.",
        allow_abbrev=False,
        usage="%(prog)s --gpus N [--card CARD] [--memory SIZE] "
        "(SCRIPT | -m MODULE) [ARGUMENT ...]",
    )
    here = os.environ.get("LOCAL_WORLD_SIZE")
    parser.add_argument(
        "--gpus",
        type=int,
        required=here is None,
        default=here,
        metavar="N",
        help="under torchrun, as many as there are ranks on this node",
    )
    parser.add_argument("--card", default="A100", help=", ".join(CARDS))
    parser.add_argument("--memory", metavar="SIZE", help='of each card: "512MB"')
    parser.add_argument("-m", dest="module", action="store_true", help="as in python")
    parser.add_argument("program", help="a script, or a module with -m")
    arguments = sys.argv[1:] if arguments is None else arguments
    ours, theirs = split(arguments)
    found = parser.parse_args(ours)
    found.arguments = theirs
    if os.path.basename(found.program) in LAUNCHERS:
        parser.error(
            "put the launcher first: torchrun --nproc-per-node=4 -m simgpu script.py"
        )
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
        if wanted() == "real":
            real = torch.cuda.device_count()
            if real < found.gpus:
                sys.exit(
                    f"HELPERS_GPUS=real, but this machine has {real} of {found.gpus} "
                    "GPUs; set HELPERS_GPUS=simulated"
                )
        else:
            request = {
                "number": found.gpus,
                "card": found.card,
                "memory": found.memory,
                "honour_visible": True,
            }
            simgpu.start(**request)
            runtime.current().for_children = request
    except ValueError as error:
        sys.exit(str(error))
    sys.argv = [found.program, *found.arguments]
    status = 0
    try:
        become(found)
    except BaseException:
        status = status_of(sys.exc_info())
    if runtime.running is not None and runtime.running.gloo_groups:
        leave(status)
    sys.exit(status)


def become(found: argparse.Namespace) -> None:
    """Run the program in this process, as `python` would."""
    if found.module:
        runpy.run_module(found.program, run_name="__main__", alter_sys=True)
    else:  # python puts the script's folder first, where -m has put the current one
        sys.path[0] = os.path.dirname(os.path.abspath(found.program))
        runpy.run_path(found.program, run_name="__main__")


def status_of(raised: tuple) -> int:
    """Say why the program ended, as `python` does, and with which exit status."""
    kind, error, trace = raised
    if not issubclass(kind, SystemExit):
        while trace.tb_next and trace.tb_frame.f_code.co_filename in _MACHINERY:
            trace = trace.tb_next  # the program's own part is left
        sys.excepthook(kind, error.with_traceback(trace), trace)
        return 130 if issubclass(kind, KeyboardInterrupt) else 1
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    main()
