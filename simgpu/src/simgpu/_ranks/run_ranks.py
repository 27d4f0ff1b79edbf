"""Runs a function on several ranks with simulated GPUs, as torchrun runs a script.

    def train(steps):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
        ...
        return loss.item()

    losses = run_ranks(train, 4, 10)  # what each of the four ranks has returned

Every rank is a process with the GPUs of its node and with the environment variables of
torchrun; it is started as those of a notebook are (`rank_processes.py`). Leaves out:
restarting ranks that fail.
"""

import contextlib
import importlib.util
import inspect
import multiprocessing.spawn
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import NoReturn

from simgpu import _frames as frames
from simgpu._device import ledger
from simgpu._device.cards import find_card
from simgpu._rank_variables import Place
from simgpu._ranks.listener import Rendezvous
from simgpu._ranks.rank_processes import RankProcesses, dump_stack_when_asked
from simgpu._request import check_request
from simgpu._timing.topology import Network, Topology

_OURS = str(Path(__file__).parents[1]) + os.sep
_LOOK = 0.5  # seconds between two looks at which ranks have ended
# Seconds that the others have to end once a rank has failed. Where they are too short,
# their words are missing from an error that is raised anyway.
_GRACE = 5.0
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
    seconds: float = 180.0,
    **kwargs: object,
) -> list:
    """Call a function on every rank of a job and return what each has returned.

    Args:
        function: at the top level of a module, which every rank imports.
        ranks: how many.
        args: of the function, on every rank.
        card: "T4", "V100", "A100", "H100", "H200", "B200" or "L40S", or a file of
            `simgpu measure`.
        memory: of each GPU, in bytes or as text ("512MB"); None is all the card has.
        nodes: on which the ranks lie, as many on each.
        network: of a node: "100 Gbit/s", "25 GB/s EFA", bytes/s, a `Network` or such a
            file.
        seconds: real time after which the ranks are killed.
        kwargs: of the function.

    Returns:
        The results in the order of the ranks, with tensors on the host.

    Raises:
        RanksFailed: if a rank raises, ends or is late, with the traceback of each that
            has failed. Once one has failed, the others have five seconds to end.
        RankError: if the processes of the ranks do not come up.
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
    module, file, call = _pickled(function, args, kwargs)
    work = _Work(module, file, call, ranks, nodes, request, network, dict(os.environ),
                 _preparation(call))  # fmt: skip
    return _Job(ranks, seconds).run(work)


def _preparation(call: bytes) -> dict:
    """How multiprocessing prepares a new process to be like this one.

    Args:
        call: pickled; a rank imports this process's main module only if it is in it.
    """
    # without what the simulator, if it runs here, adds for processes that are spawned
    found = inspect.unwrap(multiprocessing.spawn.get_preparation_data)("a rank")
    del found["authkey"]  # cannot be sent; nobody asks a rank for it
    if b"__main__" not in call:
        found = {k: v for k, v in found.items() if not k.startswith("init_main_")}
    return found


def _pickled(function: Callable, args, kwargs) -> tuple[str, str | None, bytes]:
    """The function with its arguments; the name and file of its module."""
    try:
        data = pickle.dumps((function, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(_NOT_FOUND.format(error)) from None
    module = getattr(function, "__module__", "")
    return module, getattr(sys.modules.get(module), "__file__", None), data


@dataclass(frozen=True)
class _Work:
    """What each rank has to do, and where.

    Attributes:
        module: of the function, and `file` is its file.
        call: the function and its arguments, pickled.
        ranks, nodes: how many there are.
        request: the arguments of `simgpu.start`.
        network: between nodes.
        environ: of the process that has called.
        preparation: what makes a process like the one that has called.
    """

    module: str
    file: str | None
    call: bytes
    ranks: int
    nodes: int
    request: dict
    network: Network | float | str | None
    environ: dict[str, str]
    preparation: dict


class _Job:
    """One call of `run_ranks`.

    Args:
        ranks: how many.
        seconds: that it may take.
    """

    def __init__(self, ranks: int, seconds: float):
        self.ranks, self.seconds = ranks, seconds
        self.end = time.monotonic() + seconds
        self.results: dict[int, bytes] = {}
        self.failures: dict[int, str] = {}

    def run(self, work: _Work) -> list:
        """Start the ranks, wait for them, and leave nothing running."""
        __tracebackhide__ = True
        self.processes = RankProcesses()
        try:
            self.processes.start(_be_rank, self.ranks, work, with_store=True)
            self._wait()
        finally:
            for name, file in (("out", sys.stdout), ("err", sys.stderr)):
                printed = self.processes.folder / name
                if printed.exists():
                    file.write(printed.read_text("utf-8", "replace"))
            self.processes.close()
        if self.failures:
            raise RanksFailed(self.failures)
        return [pickle.loads(self.results[rank]) for rank in range(self.ranks)]

    def _wait(self) -> None:
        """Until all have ended, or one has failed and the others had their time."""
        end = self.end
        running = {c: rank for rank, c in self.processes.connections.items()}
        while running and (left := end - time.monotonic()) > 0:
            for ready in connection.wait(list(running), min(left, _LOOK)):
                if not self._receive(running[ready], ready):
                    del running[ready]
            # what a rank has forked may keep its connection open
            for quiet in [c for c in running if not c.poll()]:
                if self.processes.exit_status(running[quiet]) is not None:
                    self._note_end(running.pop(quiet))
            if self.failures:
                end = min(end, time.monotonic() + _GRACE)
        late = time.monotonic() >= self.end
        for rank in running.values():
            if late:
                state = f"has not ended within {self.seconds:g} s"
            else:
                state = "was killed, because another rank has failed"
            self.failures.setdefault(rank, f"{state}\n{self._where(rank)}".rstrip())

    def _receive(self, rank: int, from_rank: connection.Connection) -> bool:
        """Take what a rank sends; whether it still runs."""
        try:
            failed, value = from_rank.recv()
        except (EOFError, OSError):
            self._note_end(rank)
            return False
        if failed:
            self.failures[rank] = value
        else:
            self.results[rank] = value
        return True

    def _note_end(self, rank: int) -> None:
        if rank not in self.results and rank not in self.failures:
            how = self.processes.wait_for_exit(rank)
            if not how.startswith("was killed"):
                how = f"has {how}, without a result"
            self.failures[rank] = how

    def _where(self, rank: int) -> str:
        """Where a rank stands: the lines of the program, if there are any."""
        stack = self.processes.stack(rank, __file__)[::-1]
        if not stack:
            return ""
        own = [frame for frame in stack if frames.is_program_code(frame.file)]
        lines = [
            f'  File "{frame.file}", line {frame.line} in {frame.function}'
            for frame in own or stack
        ]
        return "\n".join(["It stood here, the innermost call first:", *lines])


# -- in the rank's process -------------------------------------------------------------


def _be_rank(rank: int, rendezvous: Rendezvous, work: _Work) -> NoReturn:
    """What the process of a rank does: call the function, tell what came of it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(rendezvous.folder / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
    sys.stdout, sys.stderr = (
        open(number, "w", buffering=1, encoding="utf-8", closefd=False)
        for number in (1, 2)
    )
    dump_stack_when_asked(rendezvous.folder, rank)
    starter = rendezvous.report(rank)
    port = starter.recv()
    os.environ.clear()
    os.environ.update(work.environ, OMP_NUM_THREADS="1")
    os.environ.update(Place(rank, work.ranks, work.nodes).environ(port))
    os.environ[ledger.VARIABLE] = str(rendezvous.folder / ledger.FILE)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # it is the machine's own it may hide
    import torch

    import simgpu
    from simgpu import _runtime as state
    from simgpu._compat import tree_map_only
    from simgpu._distributed.children import leave

    status = 0
    try:
        torch.set_num_threads(1)
        torch.distributed.set_debug_level_from_env()
        simgpu.start(**work.request)
        runtime = state.current()
        runtime.for_children, runtime.network = work.request, work.network
        multiprocessing.spawn.prepare(work.preparation | {"name": f"rank {rank}"})
        result = _load(work)()
        on_host = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), result)
        answer = (False, pickle.dumps(on_host))
    except BaseException as error:
        status = 1
        answer = (True, _text_of(error))
    with contextlib.suppress(OSError):
        starter.send(answer)
    leave(status)


def _load(work: _Work) -> Callable:
    """The function and its arguments, as one call."""
    if work.module not in sys.modules and work.file is not None:
        try:
            importlib.import_module(work.module)
        except ModuleNotFoundError:  # it was imported by its path: do that, too
            spec = importlib.util.spec_from_file_location(work.module, work.file)
            sys.modules[work.module] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    function, args, kwargs = pickle.loads(work.call)
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
