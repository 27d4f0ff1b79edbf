"""What a rank does: it starts up, then runs what the notebook sends, and answers.

A rank is a process that the fork server has forked, or a new Python process where there
is no fork. It ends with `os._exit`, because a thread of gloo may still hold tensors
while Python shuts down, which aborts the process.

The notebook sends (kind, payload): ("call", pickled function and arguments),
("cell", (name, source)) or ("barrier", None). The rank answers ("ok", pickled result or
None) or ("error", a `report.Failure`). Before all that, it sends a rank on GPUs the
port of the store.
"""

import ast
import contextlib
import ctypes
import datetime
import gc
import io
import os
import pickle
import signal
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from simgpu import _frames as frames
from simgpu._device import ledger
from simgpu._rank_variables import Place
from simgpu._ranks import pickling
from simgpu._ranks.job_memory import GpuMemory, memory_of
from simgpu._ranks.listener import Rendezvous
from simgpu._ranks.rank_error import describe
from simgpu._ranks.rank_processes import dump_stack_when_asked
from simgpu._ranks.which_gpus import Gpus
from simgpu._timing.job import RankLog, log_of


@dataclass(frozen=True)
class WorkerSettings:
    """What a rank must know to start; the same for all ranks of a group."""

    world_size: int
    gpus: Gpus | None  # of the ranks; None: they are on the CPU
    timeout: float  # seconds before a collective gives up
    threads: int  # of PyTorch in each rank
    module_path: list[str]  # what the notebook can import, a rank can
    cwd: str
    environ: dict[str, str]

    def place(self, rank: int) -> Place:
        return Place(rank, self.world_size, self.gpus.nodes if self.gpus else 1)


def output_file(folder: Path, rank: int) -> Path:
    """Where a rank writes what it prints."""
    return folder / f"{rank}.out"


def run_worker(rank: int, rendezvous: Rendezvous, settings: WorkerSettings) -> NoReturn:
    """Be one rank until the notebook hangs up."""
    _set_environment(rank, settings)
    os.environ[ledger.VARIABLE] = str(rendezvous.folder / ledger.FILE)
    _keep_little()
    _redirect_output(output_file(rendezvous.folder, rank))
    dump_stack_when_asked(rendezvous.folder, rank)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # heard while there is work only
    notebook = rendezvous.report(rank)
    try:
        if settings.gpus is None:
            _init_on_cpu(rank, rendezvous.folder / "store", settings)
        else:
            os.environ.update(settings.place(rank).environ(notebook.recv()))
            _init_on_gpus(settings)
        namespace = _make_namespace(rank, settings)
    except BaseException as error:
        notebook.send(("error", describe(error)))
        os._exit(1)
    notebook.send(("ok", None))
    turn = 0
    while True:
        try:
            kind, payload = notebook.recv()
        except (EOFError, OSError):
            os._exit(0)
        turn += 1
        _begin_turn(turn)
        answer = _answer(kind, payload, namespace)
        _end_turn(kind, answer)
        _flush()
        try:
            notebook.send(answer)
        except OSError:
            os._exit(0)
        _give_back()


# -- starting --------------------------------------------------------------------------


def _set_environment(rank: int, settings: WorkerSettings) -> None:
    sys.path[:] = settings.module_path
    os.chdir(settings.cwd)
    own = settings.place(rank).environ()
    os.environ.update(settings.environ | own, OMP_NUM_THREADS=str(settings.threads))
    if settings.gpus and settings.gpus.simulated:
        # it is the machine's own that the notebook may hide
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)


def _redirect_output(path: Path) -> None:
    """Write what Python, C and child processes print to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = sys.stdout


def _init_on_cpu(rank: int, store: Path, settings: WorkerSettings) -> None:
    """Make the process group over gloo."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(settings.threads)
    dist.set_debug_level_from_env()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), settings.world_size),
        rank=rank,
        world_size=settings.world_size,
        timeout=datetime.timedelta(seconds=settings.timeout),
    )
    dist.barrier()


def _init_on_gpus(settings: WorkerSettings) -> None:
    """Make the process group over NCCL, as a script under torchrun does.

    Which GPU is the rank's own, `torch.cuda.set_device` says, and that is left to the
    program.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(settings.threads)
    dist.set_debug_level_from_env()
    if settings.gpus.simulated:
        _simulate(settings)
    elif settings.gpus.memory is not None:
        from simgpu._ranks.which_gpus import cap_memory

        cap_memory(int(os.environ["LOCAL_RANK"]), settings.gpus.memory)
    with contextlib.redirect_stderr(io.StringIO()):  # what the notebook says, too
        dist.init_process_group(
            "nccl", timeout=datetime.timedelta(seconds=settings.timeout)
        )


def _simulate(settings: WorkerSettings) -> None:
    """Give this rank as many simulated GPUs as its node has ranks."""
    import simgpu
    from simgpu import _runtime as state

    gpus = settings.gpus
    number = settings.world_size // gpus.nodes
    simgpu.start(number, gpus.card, gpus.memory, honour_visible=True)
    state.current().network = gpus.network


def _make_namespace(rank: int, settings: WorkerSettings) -> dict:
    """The names that cells find in this rank."""
    import torch
    import torch.distributed as dist

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
        frames.run_cell(payload[0] if kind == "cell" else "")
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
        return pickling.dumps(result)
    except Exception as error:
        kind = type(result).__name__
        raise TypeError(f"the result, a {kind}, cannot be sent: {error}") from None


def timeline() -> RankLog:
    """What this rank did on its simulated GPUs."""
    from simgpu import _runtime as state

    return log_of(state.current().clock, int(os.environ["RANK"]))


def memory() -> list[GpuMemory]:
    """What this rank has on its GPUs."""
    return memory_of(int(os.environ["RANK"]))


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
    """Succeed if the ranks can still talk."""
    import torch.distributed as dist

    if (cluster := _cluster()) is not None:
        cluster.settle()
    elif dist.get_backend() == "nccl":
        dist.barrier(device_ids=[int(os.environ["LOCAL_RANK"])])
    else:
        dist.barrier()


def _cluster():
    """The job on simulated GPUs, if there is one."""
    state = sys.modules.get("simgpu._runtime")
    return state and state.running and state.running.cluster


def _begin_turn(turn: int) -> None:
    """Ranks that wait for this one know from now on that it may come."""
    if (cluster := _cluster()) is not None:
        cluster.board.turn = turn


def _end_turn(kind: str, answer: tuple) -> None:
    """Ranks that wait for this one know from now on that it does not come."""
    if (cluster := _cluster()) is not None:
        what = {"call": "function"}.get(kind, kind)
        why = f"has come to the end of its {what} without this call"
        if answer[0] == "error":
            why = f"has raised {answer[1].message.partition(':')[0]}"
        with contextlib.suppress(RuntimeError):  # the store is gone: so are all
            cluster.board.say_idle(why)


def _flush() -> None:
    """Write out what Python and C have printed."""
    sys.stdout.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)


# of glibc's mallopt
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def _keep_little() -> None:
    """Let glibc return each large block as soon as it is free, not after the call.

    Of itself, it keeps ever larger ones: 7 MB in each of eight ranks.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):
            for threshold in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
                ctypes.CDLL(None).mallopt(threshold, 128 * 1024)


def _give_back() -> None:
    """Free what nobody can reach, and give the system what is free.

    Python collects after so many new objects, another number in each version. A failed
    step leaves tensors in cycles, and so the next peak would depend on the version.
    Many ranks share one small machine, and glibc keeps what tensors had, for the next
    ones. Other libraries have no such call.
    """
    gc.collect()  # 1 ms, without what was there before the fork
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
