"""Runs an unmodified CUDA script on simulated GPUs.

    python -m simgpu --gpus 4 [--card T4] [--memory 512MB] script.py [args]
    python -m simgpu --gpus 4 -m package.module [args]
    torchrun --nproc-per-node=4 -m simgpu script.py [args]
    torchrun --nproc-per-node=8 -m simgpu --nodes 2 --network "100 Gbit/s" script.py

Under torchrun each rank has as many simulated GPUs as there are ranks on its node, and
the simulator answers where the script asks for NCCL (`distributed/`). With --nodes the
ranks of this machine are numbered as if they were on several. --timeline writes what
ran on the GPUs of all ranks to a file, for ui.perfetto.dev.
CUDA_VISIBLE_DEVICES hides GPUs, as it does from a new process on a real machine. With
HELPERS_GPUS=real the script runs on the machine's own GPUs instead. Processes that the
script spawns (`torch.multiprocessing.spawn`) have the same GPUs, and are left out of
the timeline. Left out altogether: processes that it starts as commands of their own.
"""

import argparse
import os
import runpy
import signal
import sys
from pathlib import Path

import torch

import simgpu
from simgpu import runtime
from simgpu.choice import wanted
from simgpu.device.cards import CARDS
from simgpu.distributed import gathering
from simgpu.distributed.children import leave
from simgpu.hosts import LOOPBACK
from simgpu.timing.topology import Topology

# programs that start others, which would see no simulated GPUs
LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch",
             "accelerate", "accelerate.commands.launch", "deepspeed")  # fmt: skip
# frames between the interpreter and the program: our own and runpy's
_MACHINERY = {__file__, runpy.run_path.__code__.co_filename}
_WITH_VALUE = ("--gpus", "--card", "--memory", "--nodes", "--network", "--timeline")


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; everything after the script belongs to the script."""
    parser = argparse.ArgumentParser(
        prog="python -m simgpu",
        description="Run a CUDA script on simulated GPUs.",
        allow_abbrev=False,
        usage="%(prog)s --gpus N [--card CARD] [--memory SIZE] [--nodes N] "
        "[--network BANDWIDTH] [--timeline FILE] (SCRIPT | -m MODULE) [ARGUMENT ...]",
    )
    here = os.environ.get("LOCAL_WORLD_SIZE")
    parser.add_argument(
        "--gpus",
        type=int,
        required=here is None,
        metavar="N",
        help="under torchrun, as many as there are ranks on this node",
    )
    parser.add_argument("--card", default="A100", help=", ".join(CARDS))
    parser.add_argument("--memory", metavar="SIZE", help='of each card: "512MB"')
    parser.add_argument(
        "--nodes", type=int, default=1, metavar="N",
        help="under torchrun: number this machine's ranks as those of N nodes",
    )  # fmt: skip
    parser.add_argument(
        "--network", metavar="BANDWIDTH", help='between nodes: "100 Gbit/s"'
    )
    parser.add_argument(
        "--timeline", metavar="FILE", type=Path, help="a trace of all ranks"
    )
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
    if found.timeline is not None:
        found.timeline = found.timeline.absolute()  # the script may go elsewhere
        if not found.timeline.parent.is_dir():
            parser.error(f"there is no folder {found.timeline.parent}")
    if found.nodes != 1:
        try:
            lay_out(found.nodes)
        except ValueError as error:
            parser.error(str(error))
    if found.gpus is None:
        found.gpus = int(os.environ["LOCAL_WORLD_SIZE"])
    return found


def lay_out(nodes: int) -> None:
    """Let the environment say that the ranks of this machine are on several nodes.

    Raises:
        ValueError: if the ranks cannot be shared equally, if there are none, or if they
            are on several machines already.
    """
    environ = os.environ
    if "LOCAL_WORLD_SIZE" not in environ:
        raise ValueError("--nodes is for ranks; start them with torchrun")
    size = int(environ["WORLD_SIZE"])
    if size != int(environ["LOCAL_WORLD_SIZE"]):
        raise ValueError("--nodes: these ranks are on several machines already")
    if nodes < 1 or size % nodes:
        raise ValueError(f"{size} ranks cannot be shared equally by {nodes} nodes")
    node, local_rank = divmod(int(environ["RANK"]), size // nodes)
    environ.update(
        LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(size // nodes),
        GROUP_RANK=str(node), GROUP_WORLD_SIZE=str(nodes),
    )  # fmt: skip
    if LOOPBACK:  # it is one machine all the same
        environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Our part of the command line, up to the program, and the program's own."""
    position = 0
    while position < len(arguments):
        word = arguments[position]
        if not word.startswith("-"):
            break
        position += 2 if word in _WITH_VALUE else 1
    return arguments[: position + 1], arguments[position + 1 :]


def main() -> None:
    """Start the GPUs, then become the program."""
    found = options()
    try:
        asked = simgpu.check_request(found.gpus, found.card, found.memory)
        Topology(asked.card, found.gpus, network=found.network)
        if wanted() == "real":
            if found.nodes != 1 or found.timeline is not None:
                sys.exit("--nodes and --timeline are for simulated GPUs")
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
            runtime.current().network = found.network
    except ValueError as error:
        sys.exit(str(error))
    sys.argv = [found.program, *found.arguments]
    if found.timeline is not None:
        signal.signal(signal.SIGTERM, _end)
    status = 0
    try:
        become(found)
    except BaseException:
        status = status_of(sys.exc_info())
    if found.timeline is not None and runtime.running is not None:
        gathering.write(found.timeline, failed=status != 0)
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


def _end(number: int, frame) -> None:
    """torchrun ends a rank when another one has failed: it can hand in its log yet."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


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
