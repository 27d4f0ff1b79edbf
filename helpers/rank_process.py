"""What runs outside the notebook: the ranks, and the process that forks them.

The *nursery* imports PyTorch once and then forks ranks as often as it is asked, so
that a rank costs a few hundredths of a second and shares the nursery's memory. On all
but Linux each rank is a new Python process instead. A rank does what the notebook
sends: it calls a function or runs a cell, and answers with the result or with what went
wrong. It ends with `os._exit`, because a thread of gloo may still hold tensors while
Python shuts down, which aborts the process.

Started by `ranks.py`, which says over stdin what to be.
"""

import ast
import contextlib
import ctypes
import datetime
import faulthandler
import gc
import importlib
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
import traceback
import types
from multiprocessing.connection import Client, Connection, wait

import cloudpickle

PRELOAD = (
    "torch", "torch.distributed", "torch.nn.parallel.distributed", "torch.optim",
    "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint",
    "torch.distributed.pipelining", "numpy",
)  # fmt: skip
_HERE = __file__


def die_with(parent: int) -> None:
    """End this process when the one that forked it does, whatever it is doing then."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; we fork on Linux
    if os.getppid() != parent:
        os._exit(1)


def die_with_stdin() -> None:
    """End this process when whoever holds the other end of its stdin does."""

    def watch():
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def connect(setting: dict) -> Connection:
    """Connect to the notebook, which waits at `address` for who has the `key`."""
    link = Client(setting["address"], authkey=setting["key"])
    peer = socket.socket(fileno=link.fileno())
    # Or a message behind another one waits 40 ms for the system's acknowledgement.
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.detach()
    return link


# -- a rank ----------------------------------------------------------------------------


def be_rank(rank: int, setting: dict) -> None:
    """Be one rank until the notebook hangs up. Does not return.

    Args:
        rank: its number.
        setting: what `ranks.Ranks` says: address, key, world_size, folder, backend,
            timeout, threads, path (of modules), environ, cwd.
    """
    folder, size = setting["folder"], setting["world_size"]
    sys.path[:] = setting["path"]  # what the notebook can import, a rank can
    os.chdir(setting["cwd"])
    os.environ.update(
        setting["environ"], RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size), OMP_NUM_THREADS=str(setting["threads"]),
    )  # fmt: skip
    output = os.open(f"{folder}/{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = sys.stdout
    if hasattr(signal, "SIGUSR1"):
        stack = open(f"{folder}/{rank}.stack", "w")
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # heard while there is work only
    notebook = connect(setting)
    notebook.send(("hello", (rank, os.getpid())))
    try:
        names = _join(rank, setting)
    except BaseException as error:
        notebook.send(("error", _describe(error)))
        os._exit(1)
    notebook.send(("up", None))
    while True:
        try:
            kind, payload = notebook.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            answer = ("ok", _do(kind, payload, names))
        except BaseException as error:  # also SystemExit and KeyboardInterrupt
            answer = ("error", _describe(error))
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        _flush()
        try:
            notebook.send(answer)
        except OSError:
            os._exit(0)


def _flush() -> None:
    """Write out what Python and C have printed."""
    sys.stdout.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)


def _join(rank: int, setting: dict) -> dict:
    """Start the process group; the names that cells find in this rank."""
    import numpy
    import torch
    import torch.distributed as dist

    numpy.random.seed()  # noqa: NPY002 - forked ranks would all draw the same
    torch.set_num_threads(setting["threads"])
    dist.set_debug_level_from_env()
    on_gpus = setting["backend"] == "nccl"
    if on_gpus:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
        store=dist.FileStore(f"{setting['folder']}/store", setting["world_size"]),
        rank=rank,
        world_size=setting["world_size"],
        timeout=datetime.timedelta(seconds=setting["timeout"]),
        device_id=torch.device("cuda", rank) if on_gpus else None,
    )
    dist.barrier()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    names = {"torch": torch, "dist": dist, "rank": rank}
    vars(main).update(names, world_size=setting["world_size"])
    return vars(main)  # so that what a cell defines can be pickled


def _do(kind: str, payload, names: dict) -> bytes | None:
    """Call a function and return its pickled result, or run a cell."""
    if kind == "barrier":
        names["dist"].barrier()
        return None
    if kind == "call":
        function, args, kwargs = pickle.loads(payload)
        result = function(*args, **kwargs)
        try:
            return cloudpickle.dumps(result)
        except Exception as error:
            kind = type(result).__name__
            raise TypeError(f"the result, a {kind}, cannot be sent: {error}") from None
    name, source = payload
    tree = ast.parse(source, name)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)
    exec(compile(tree, name, "exec"), names)
    if last is not None:
        value = eval(compile(last, name, "eval"), names)
        if value is not None:
            print(repr(value))
    return None


def _describe(error: BaseException) -> dict:
    """An error as plain data: what it says, and where, innermost last."""
    if isinstance(error, SyntaxError) and error.filename:
        what = f"{type(error).__name__}: {error.msg}"
        return {"what": what, "where": [(error.filename, error.lineno, "<module>")]}
    lines = traceback.extract_tb(error.__traceback__)
    return {
        "what": "".join(traceback.format_exception_only(error)).strip(),
        "where": [
            (line.filename, line.lineno, line.name)
            for line in lines
            if line.filename != _HERE
        ],
    }


# -- the nursery -----------------------------------------------------------------------


def be_nursery(notebook: Connection, parent: int, folder: str) -> None:
    """Fork ranks as asked, and report how they end. Does not return.

    Args:
        notebook: who asks.
        parent: its process.
        folder: of all temporary files; it goes when the notebook does.
    """

    def end():
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)  # and the ranks with it

    def tell(what: str, value=None):
        try:
            notebook.send((what, value))
        except OSError:  # it has hung up; a dying one does so before it is dead
            end()

    gc.disable()  # a quarter of the time of these imports is the collector's
    for module in PRELOAD:
        importlib.import_module(module)
    gc.freeze()  # so that a rank's collector leaves the shared pages alone
    gc.enable()
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the notebook tells the ranks
    me = os.getpid()
    tell("ready")
    while True:
        ready = wait([notebook, read], 0.5)
        if os.getppid() != parent:
            end()
        if not ready:
            continue
        if read in ready:
            os.read(read, 4096)
            for pid, status in _ended():
                tell("ended", (pid, status))
            continue
        try:
            setting = notebook.recv()
        except (EOFError, OSError):
            end()
        if setting is None:  # are you there?
            tell("yes")
            continue
        for rank in range(setting["world_size"]):
            if os.fork() == 0:
                die_with(me)
                os.setpgid(0, 0)  # what a rank starts ends with it
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for fd in (notebook.fileno(), read, write):
                    os.close(fd)
                try:
                    be_rank(rank, setting)
                finally:
                    os._exit(1)


def _ended() -> list[tuple[int, int]]:
    """(process, exit status) of every rank that has ended; negative for a signal."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended.append((pid, os.waitstatus_to_exitcode(status)))
    return ended


def main() -> None:
    """Read who to be from stdin: (parent, what, its setting)."""
    parent, what, setting = pickle.load(sys.stdin.buffer)
    if what == "nursery":
        notebook = connect(setting)
        be_nursery(notebook, parent, setting["folder"])
    die_with_stdin()
    be_rank(what, setting)
