"""Runs an unmodified CUDA program on simulated GPUs.

    python -m simgpu --gpus 4 [--card T4] [--memory 512MB] script.py [args]
    python -m simgpu --gpus 4 -m package.module [args]
    python -m simgpu --gpus 4 torchrun --nproc-per-node=4 script.py [args]
    python -m simgpu --gpus 4 accelerate launch --num_processes 4 script.py [args]
    torchrun --nproc-per-node=4 -m simgpu script.py [args]
    python -m simgpu prove script.py --worlds 1,2,4
    python -m simgpu dry-run --world 1024 --card H100 script.py [args]
    python -m simgpu sweep --world 64 'script.py --tp {1,2,4} --batch {1,2}'
    python -m simgpu plan --model llama3-8b --gpus 64 --tokens 4M
    python -m simgpu measure my.json
    torchrun --nproc-per-node=8 -m simgpu --nodes 2 --network "100 Gbit/s" script.py

The launcher may stand behind the command or before it. Behind it, `--gpus` counts the
GPUs of a node, and the last word on the screen is the traceback of the rank that failed
first. Before it, each rank has as many simulated GPUs as there are ranks on its node.
The simulator answers where the program asks for NCCL (`_distributed/`). With --nodes
the ranks of this machine are numbered as if they were on several. --timeline writes
what ran on the GPUs of all ranks to a file, for ui.perfetto.dev.

--races: where two streams use the same memory in no order, `warn` (the default) names
each two lines once on stderr, and the program goes on with the right values; `raise`
ends it with PyTorch's report; `show` lets a read find what the memory held before, and
ends it where a write comes too early; `off` says nothing.
--no-compile: `torch.compile` gives back what it is given. Without this, its values are
the same, and its operations are timed as the kernels that they would be fused into.
--no-fork: a launcher behind the command starts a new Python for each rank, which takes
longer. Ranks that are forked share the seed of Python's hashes.
--children: what the program starts as commands (`subprocess`, the launcher of
Lightning) has the same GPUs, too; a launcher implies it.

CUDA_VISIBLE_DEVICES hides GPUs, as it does from a new process on a real machine. With
SIMGPU=off the program runs on the machine's own GPUs instead. Processes that it
spawns (`torch.multiprocessing.spawn`) or forks have the same GPUs, and are left out of
the timeline, unless they are ranks of a job.
"""

import importlib
import os
import runpy
import signal
import sys

import simgpu
from simgpu import _child_commands as child_commands
from simgpu import _failures as failures
from simgpu import _launchers as launchers
from simgpu import _nvidia_smi as nvidia_smi
from simgpu._device import ledger
from simgpu._options import SUBCOMMANDS, options
from simgpu._switch import wanted

# frames between the interpreter and the program: our own and runpy's
_MACHINERY = {__file__, runpy.run_path.__code__.co_filename}


_NEEDED = ("torch", "numpy", "cloudpickle")
# what PyTorch says where `env://` finds none of a launcher's variables
_ALONE = "variable RANK expected, but not set"
_LAUNCH = (
    "simgpu: the script is one rank of a job, and no launcher has started it; "
    "write: simgpu --gpus {gpus} torchrun --nproc-per-node={gpus} {program}"
)


def main() -> None:
    """Start the GPUs, then become the program, or start it."""
    if sys.argv[1:2] != ["measure"]:  # whose GPUs may be those of a command above it
        child_commands.disarm()
    if sys.argv[1:2] and sys.argv[1] in SUBCOMMANDS:
        sys.exit(_subcommand(*sys.argv[1:]))
    parsed = options()
    try:
        simulated = wanted() != "real"
    except ValueError as error:
        sys.exit(str(error))
    if not simulated:
        _check_real(parsed)
    if parsed.command is not None:
        sys.exit(launchers.run(parsed, simulated))
    sys.argv = [parsed.program, *parsed.arguments]
    if not simulated:
        sys.exit(_status(parsed))
    _start(parsed)
    with nvidia_smi.on_path(parsed.request) as path:
        os.environ["PATH"] = path
        status = _status(parsed)
    sys.exit(_end(parsed, status))


def _subcommand(name: str, *words: str) -> int:
    """Run `simgpu prove` or another; returns its exit status."""
    try:
        command = importlib.import_module(SUBCOMMANDS[name])
        return command.main(words)
    except ModuleNotFoundError as error:  # of ours; those of a program end earlier
        if error.name not in _NEEDED:
            raise
        sys.exit(
            f"simgpu needs {error.name}, which is not installed here: "
            f"pip install {error.name}"
        )


def _status(parsed) -> int:
    """Be the program; returns its exit status."""
    try:
        become(parsed)
    except BaseException as error:
        status = status_of(sys.exc_info())
        if isinstance(error, ValueError) and _ALONE in str(error):
            program = f"-m {parsed.program}" if parsed.module else parsed.program
            hint = _LAUNCH.format(gpus=parsed.gpus, program=program)
            print(hint, file=sys.stderr)
        return status
    return 0


def _check_real(parsed) -> None:
    """Whether this machine's own GPUs will do."""
    if parsed.nodes != 1 or parsed.timeline is not None:
        sys.exit("--nodes and --timeline are for simulated GPUs")
    import torch

    real = torch.cuda.device_count()
    if real < parsed.gpus:
        sys.exit(
            f"SIMGPU=off, but this machine has {real} of {parsed.gpus} GPUs; "
            "unset SIMGPU"
        )


def _start(parsed) -> None:
    """Simulate the GPUs, for this process and those that it starts."""
    os.environ.pop(ledger.VARIABLE, None)  # this command has cards of its own
    if parsed.children:
        os.environ.update(launchers.hand_down(parsed))
    else:
        launchers.tell_of_children()
    try:
        simgpu.start(**parsed.request)
    except ImportError as error:  # PyTorch or numpy is not there, or too old
        sys.exit(str(error))
    from simgpu import _runtime as state

    runtime = state.current()
    runtime.for_children, runtime.network = parsed.request, parsed.network
    if parsed.timeline is not None:
        signal.signal(signal.SIGTERM, child_commands.end_by_signal)


def _end(parsed, status: int) -> int:
    """What the program leaves is written, and the ranks of its job know of its end."""
    from simgpu import _runtime as state
    from simgpu._distributed import gathering
    from simgpu._distributed.children import leave

    runtime = state.running
    if runtime is not None and parsed.timeline is not None:
        gathering.write(parsed.timeline, failed=status != 0)
    if runtime is not None and runtime.gloo_groups:
        leave(status)
    return status


def become(parsed) -> None:
    """Run the program in this process, as `python` would."""
    if parsed.module:
        runpy.run_module(parsed.program, run_name="__main__", alter_sys=True)
    else:  # python puts the script's folder first, where -m has put the current one
        path = os.path.abspath(parsed.program)
        sys.path[0] = os.path.dirname(path)
        _tell_of_namesake(sys.path[0])
        runpy.run_path(path, run_name="__main__")


def _tell_of_namesake(folder: str) -> None:
    """Say so if the program has a `simgpu` of its own, which it cannot import."""
    for name in ("simgpu.py", os.path.join("simgpu", "__init__.py")):
        path = os.path.join(folder, name)
        if os.path.exists(path) and not os.path.samefile(path, simgpu.__file__):
            print(
                f"simgpu: {path} cannot be imported under this command, whose own "
                "`simgpu` is imported instead; rename it",
                file=sys.stderr,
            )


def status_of(raised: tuple) -> int:
    """Say why the program ended, as `python` does, and with which exit status."""
    kind, error, trace = raised
    if not issubclass(kind, SystemExit):
        while trace and trace.tb_frame.f_code.co_filename in _MACHINERY:
            trace = trace.tb_next  # the program's own part is left
        error = error.with_traceback(trace)
        failures.report(kind, error, trace, sys.excepthook)
        return 130 if issubclass(kind, KeyboardInterrupt) else 1
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    main()
