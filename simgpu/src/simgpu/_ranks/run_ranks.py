"""Runs a function on several ranks with simulated GPUs, as torchrun runs a script.

    def train(steps):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
        ...
        return loss.item()

    losses = run_ranks(train, 4, 10)  # what each of the four ranks has returned

Every rank is a process with the GPUs of its node and with the environment variables of
torchrun. They meet at a store of this process. Where there is fork, a server that has
imported PyTorch forks them, so that a rank starts in a fraction of a second. Leaves
out: restarting ranks that fail.
"""

import contextlib
import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection, forkserver
from pathlib import Path

import torch
from torch.utils._pytree import tree_map_only

import simgpu
from simgpu import _frames as frames
from simgpu import _runtime as runtime
from simgpu._device.cards import find_card
from simgpu._distributed.children import leave
from simgpu._loopback import HOST, loopback_store
from simgpu._request import check_request
from simgpu._timing.topology import Network, Topology

_OURS = str(Path(__file__).parents[1]) + os.sep
# what programs import sooner or later: optimizers and DDP, for example, dynamo
_PRELOADED = ["simgpu._startup", "torch._dynamo", "torch.distributed.fsdp"]
_GRACE = 5.0  # seconds that the others have to end once a rank has failed
_MARGIN = 1.0  # seconds for the ranks to write where they stand
_NOT_FOUND = (
    "run_ranks needs a function that a new process can import, with arguments that "
    "can be pickled: define it at the top level of a module. ({})"
)


class RanksFailed(RuntimeError):
    """At least one rank has not returned.

    Attributes:
        failures: rank -> its traceback, or how it has ended; the first to fail first.
    """

    def __init__(self, failures: dict[int, str]):
        super().__init__(failures)
        self.failures = failures

    def __str__(self) -> str:
        return "\n".join(f"rank {r}: {text}" for r, text in self.failures.items())

    def __reduce__(self):
        return RanksFailed, (self.failures,)


def run_ranks(
    function: Callable,
    ranks: int,
    *args: object,
    card: str = "A100",
    memory: int | str | None = None,
    nodes: int = 1,
    network: Network | float | str | None = None,
    seconds: float = 60.0,
    **kwargs: object,
) -> list:
    """Call a function on every rank of a job and return what each has returned.

    Args:
        function: at the top level of a module, which every rank imports.
        ranks: how many.
        args: of the function, on every rank.
        card: "T4", "V100", "A100", "H100" or "H200".
        memory: of each GPU, in bytes or as text ("512MB"); None is all the card has.
        nodes: on which the ranks lie, as many on each.
        network: of a node: "100 Gbit/s", "25 GB/s", bytes/s or a `Network`.
        seconds: real time after which the ranks are killed.
        kwargs: of the function.

    Returns:
        The results in the order of the ranks, with tensors on the host.

    Raises:
        RanksFailed: if a rank raises, ends or is late, with the traceback of each that
            has failed. Once one has failed, the others have five seconds to end.
        TypeError: for a function that cannot be pickled.
        ValueError: for ranks, a card, memory or a network that cannot be.
    """
    __tracebackhide__ = True
    if ranks < 1 or nodes < 1 or ranks % nodes:
        raise ValueError(f"{ranks} ranks cannot lie on {nodes} nodes, as many on each")
    here = ranks // nodes
    check_request(here, card, memory)
    Topology(find_card(card), here, nodes, network)
    request = {"number": here, "card": card, "memory": memory, "honour_visible": True}
    job = _Job(_pickled(function, args, kwargs), request, network, seconds)
    return job.run(ranks, here)


def _pickled(function: Callable, args, kwargs) -> tuple[str, str | None, bytes]:
    """The function with its arguments; the name and file of its module."""
    try:
        data = pickle.dumps((function, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(_NOT_FOUND.format(error)) from None
    module = getattr(function, "__module__", "")
    return module, getattr(sys.modules.get(module), "__file__", None), data


class _Job:
    """The processes of one call of `run_ranks`.

    Args:
        work: what `_pickled` returns.
        request: the arguments of `simgpu.start`.
        network: between nodes.
        seconds: that it may take.
    """

    def __init__(self, work: tuple, request: dict, network, seconds: float):
        self.work, self.request, self.network = work, request, network
        self.end = time.time() + seconds
        self.seconds = seconds
        self.processes: list = []
        self.results: dict[int, object] = {}
        self.failures: dict[int, str] = {}

    def run(self, ranks: int, here: int) -> list:
        """Start them, wait for them, and leave nothing running."""
        __tracebackhide__ = True
        store = loopback_store()
        common = {
            "MASTER_ADDR": HOST, "MASTER_PORT": store.port, "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": here, "GROUP_WORLD_SIZE": ranks // here,
            "TORCHELASTIC_USE_AGENT_STORE": True, "OMP_NUM_THREADS": 1,
        }  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            readers = {}
            try:
                for rank in range(ranks):
                    own = {
                        "RANK": rank, "LOCAL_RANK": rank % here,
                        "GROUP_RANK": rank // here,
                    }  # fmt: skip
                    readers[self._start(folder, rank, common | own)] = rank
                self._wait(readers, folder)
            finally:
                self._kill()
                for reader in readers:
                    reader.close()
                for name, file in (("out", sys.stdout), ("err", sys.stderr)):
                    printed = Path(folder, name)
                    if printed.exists():
                        file.write(printed.read_text(errors="replace"))
        if self.failures:
            raise RanksFailed(self.failures)
        return [self.results[rank] for rank in range(ranks)]

    def _start(self, folder: str, rank: int, more: dict) -> connection.Connection:
        """Start a rank; returns where it writes its result."""
        hidden = {"CUDA_VISIBLE_DEVICES"}
        environ = {k: v for k, v in os.environ.items() if k not in hidden}
        environ |= {name: str(value) for name, value in more.items()}
        context = _context()
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(
            target=_become_rank,
            args=(self.work, self.request, self.network, environ, folder, self.end,
                  writer),
            name=f"rank {rank}",
        )  # fmt: skip
        process.start()
        self.processes.append(process)
        writer.close()
        return reader

    def _wait(self, readers: dict[connection.Connection, int], folder: str) -> None:
        """Until all have returned, or one has failed and the others had their time."""
        left = dict(readers)
        end = self.end + _MARGIN
        sentinels = {process.sentinel: process for process in self.processes}
        while left or sentinels:
            ready = connection.wait([*left, *sentinels], max(end - time.time(), 0.0))
            if not ready:
                break
            for reader in [r for r in left if r in ready or self._has_ended(left[r])]:
                self._take(reader, left.pop(reader))
            for sentinel in ready:
                sentinels.pop(sentinel, None)
            if self.failures:
                end = min(end, time.time() + _GRACE)
        for process in sentinels.values():
            rank = self.processes.index(process)
            if time.time() >= self.end:
                state = f"has not ended within {self.seconds:g} s"
            else:
                state = "was killed, because another rank has failed"
            self.failures.setdefault(rank, f"{state}\n{_where(folder, rank)}".rstrip())

    def _has_ended(self, rank: int) -> bool:
        return self.processes[rank].exitcode is not None

    def _take(self, reader: connection.Connection, rank: int) -> None:
        """Read what a rank has left, if it has left anything."""
        try:
            failed, value = reader.recv() if reader.poll() else (None, None)
        except (EOFError, OSError):
            failed = None
        if failed is None:
            self.processes[rank].join(_GRACE)
            self.failures[rank] = _how(self.processes[rank].exitcode)
        elif failed:
            self.failures[rank] = value
        else:
            self.results[rank] = pickle.loads(value)

    def _kill(self) -> None:
        """End what still runs: the ranks, and the processes that they have started."""
        for process in self.processes:
            if hasattr(os, "killpg"):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        for process in self.processes:
            process.join()


def _context():
    """How processes are started: forked by a server that has imported PyTorch."""
    if not hasattr(os, "fork"):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    others = forkserver._forkserver._preload_modules
    asked = dict.fromkeys([*others, *_PRELOADED])  # of no account once the server runs
    asked.pop("__main__", None)
    context.set_forkserver_preload(list(asked))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # what is preloaded is found
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


def _how(status: int | None) -> str:
    """How a process has ended that has left no result."""
    if status is None:
        return "has closed its connection to the process that started it"
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-status).name}"
    return f"has ended without a result, with exit status {status}"


def _where(folder: str, rank: int) -> str:
    """Where a rank stood at the end: the lines of the program, if there are any."""
    path = Path(folder, f"stack{rank}")
    if not path.exists():
        return ""
    stack = [
        line
        for line in path.read_text(errors="replace").splitlines()
        if line.startswith("  File ")
    ]
    own = [line for line in stack if frames.is_program_code(line.split('"')[1])]
    return "\n".join(["It stood here, the innermost call first:", *(own or stack)])


# -- in the rank's process -------------------------------------------------------------


def _become_rank(work: tuple, request: dict, network, environ: dict, folder: str,
                 end: float, writer) -> None:  # fmt: skip
    """What the process of a rank does: call the function, tell what came of it."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # killed together with the processes that it starts
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(environ)
    torch.set_num_threads(1)
    stack = open(f"{folder}/stack{environ['RANK']}", "w")
    faulthandler.dump_traceback_later(max(end - time.time(), 0.1), file=stack)
    status = 0
    try:
        simgpu.start(**request)
        now = runtime.current()
        now.for_children, now.network = request, network
        result = _load(work)()
        on_host = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), result)
        found = (False, pickle.dumps(on_host))
    except BaseException as error:
        status = 1
        found = (True, _text_of(error))
    with contextlib.suppress(BrokenPipeError):
        writer.send(found)
    _leave(status)


def _leave(status: int) -> None:
    """End the process; what others need of it, they get."""
    faulthandler.cancel_dump_traceback_later()
    leave(status)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    connection.wait([parent.sentinel])
    os._exit(1)


def _load(work: tuple) -> Callable:
    """The function and its arguments, as one call."""
    module, file, data = work
    if module not in sys.modules and file is not None:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:  # it was imported by its path: do that, too
            spec = importlib.util.spec_from_file_location(module, file)
            sys.modules[module] = found = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found)
    function, args, kwargs = pickle.loads(data)
    return lambda: function(*args, **kwargs)


def _text_of(error: BaseException) -> str:
    """The traceback of an error, without the simulator's own lines."""
    if isinstance(error, SystemExit):
        return f"has called sys.exit({error.code if error.code is not None else ''})"
    whole = told = traceback.TracebackException.from_exception(error)
    while told is not None:
        own = [f for f in told.stack if not f.filename.startswith(_OURS)]
        told.stack[:] = own or told.stack
        told = told.__cause__ or told.__context__
    return "".join(whole.format()).rstrip()
