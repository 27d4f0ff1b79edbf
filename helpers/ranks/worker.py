"""What a rank does: it starts up, then runs what the notebook sends, and answers.

A rank is a process that the fork server has forked, or a new Python process where there
is no fork. It ends with `os._exit`, because a thread of gloo may still hold tensors
while Python shuts down, which aborts the process.

The notebook sends (kind, payload): ("call", pickled function and arguments),
("cell", (name, source)) or ("barrier", None). The rank answers ("ok", pickled result or
None) or ("error", a `report.Failure`).
"""

import ast
import ctypes
import datetime
import faulthandler
import os
import pickle
import signal
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import cloudpickle

from helpers.ranks.listener import connect
from helpers.ranks.process import exit_with_stdin
from helpers.ranks.report import describe


@dataclass(frozen=True)
class WorkerSettings:
    """What a rank must know to start; the same for all ranks of a group."""

    address: tuple[str, int]  # where the notebook listens
    key: bytes  # of its listener
    folder: Path  # of output, stacks and the store at which the group meets
    world_size: int
    backend: str  # "gloo" or "nccl"
    timeout: float  # seconds before a collective gives up
    threads: int  # of PyTorch in each rank
    module_path: list[str]  # what the notebook can import, a rank can
    cwd: str
    environ: dict[str, str]

    def output_file(self, rank: int) -> Path:
        return self.folder / f"{rank}.out"

    def stack_file(self, rank: int) -> Path:
        return self.folder / f"{rank}.stack"


def run_spawned_worker(rank: int, settings: WorkerSettings) -> NoReturn:
    """Be one rank in a new Python process, where there is no fork."""
    exit_with_stdin()
    run_worker(rank, settings)


def run_worker(rank: int, settings: WorkerSettings) -> NoReturn:
    """Be one rank until the notebook hangs up."""
    _set_environment(rank, settings)
    _redirect_output(settings.output_file(rank))
    _dump_stack_when_asked(settings.stack_file(rank))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # heard while there is work only
    notebook = connect(settings.address, settings.key)
    notebook.send((rank, os.getpid()))
    try:
        _init_process_group(rank, settings)
        namespace = _make_namespace(rank, settings)
    except BaseException as error:
        notebook.send(("error", describe(error)))
        os._exit(1)
    notebook.send(("ok", None))
    while True:
        try:
            kind, payload = notebook.recv()
        except (EOFError, OSError):
            os._exit(0)
        answer = _answer(kind, payload, namespace)
        _flush()
        try:
            notebook.send(answer)
        except OSError:
            os._exit(0)


# -- starting --------------------------------------------------------------------------


def _set_environment(rank: int, settings: WorkerSettings) -> None:
    sys.path[:] = settings.module_path
    os.chdir(settings.cwd)
    size = str(settings.world_size)
    os.environ.update(
        settings.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size,
        LOCAL_WORLD_SIZE=size, OMP_NUM_THREADS=str(settings.threads),
    )  # fmt: skip


def _redirect_output(path: Path) -> None:
    """Write what Python, C and child processes print to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = sys.stdout


def _dump_stack_when_asked(path: Path) -> None:
    """At SIGUSR1, write the stack of the main thread."""
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=open(path, "w"), all_threads=False)


def _init_process_group(rank: int, settings: WorkerSettings) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(settings.threads)
    dist.set_debug_level_from_env()
    on_gpus = settings.backend == "nccl"
    if on_gpus:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
        store=dist.FileStore(str(settings.folder / "store"), settings.world_size),
        rank=rank,
        world_size=settings.world_size,
        timeout=datetime.timedelta(seconds=settings.timeout),
        device_id=torch.device("cuda", rank) if on_gpus else None,
    )
    dist.barrier()


def _make_namespace(rank: int, settings: WorkerSettings) -> dict:
    """The names that cells find in this rank."""
    import numpy
    import torch
    import torch.distributed as dist

    numpy.random.seed()  # noqa: NPY002 - forked ranks would all draw the same
    # a module, so that what a cell defines can be pickled
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.torch = torch
    main.dist = dist
    main.rank = rank
    main.world_size = settings.world_size
    return vars(main)


# -- working ---------------------------------------------------------------------------


def _answer(kind: str, payload, namespace: dict) -> tuple:
    """Do what the notebook has sent; Ctrl-C in the notebook interrupts it."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if kind == "call":
            return "ok", _call_function(payload)
        if kind == "cell":
            _run_cell(*payload, namespace)
        elif kind == "barrier":
            _barrier()
        return "ok", None
    except BaseException as error:  # also SystemExit and KeyboardInterrupt
        return "error", describe(error)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _call_function(payload: bytes) -> bytes:
    """Call a function and return its pickled result."""
    function, args, kwargs = pickle.loads(payload)
    result = function(*args, **kwargs)
    try:
        return cloudpickle.dumps(result)
    except Exception as error:
        kind = type(result).__name__
        raise TypeError(f"the result, a {kind}, cannot be sent: {error}") from None


def _run_cell(name: str, source: str, namespace: dict) -> None:
    """Run the text of a cell; print the value of its last expression."""
    tree = ast.parse(source, name)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)
    exec(compile(tree, name, "exec"), namespace)
    if last is not None:
        value = eval(compile(last, name, "eval"), namespace)
        if value is not None:
            print(repr(value))


def _barrier() -> None:
    import torch.distributed as dist

    dist.barrier()


def _flush() -> None:
    """Write out what Python and C have printed."""
    sys.stdout.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)
