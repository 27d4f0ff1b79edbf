"""`Ranks`, what a notebook opens: it calls functions and runs cells in every rank.

It starts the ranks, starts them afresh after a crash or a hang, and ends them.
"""

import atexit
import linecache
import os
import pickle
import threading
from collections.abc import Callable
from numbers import Integral

from simgpu import _frames as frames
from simgpu._ranks import fork_server, pickling, worker
from simgpu._ranks.job_memory import JobMemory
from simgpu._ranks.rank_error import RankError, may_have_lost_connections
from simgpu._ranks.remote_call import RemoteCall
from simgpu._ranks.which_gpus import choose
from simgpu._ranks.worker_group import WorkerGroup
from simgpu._timing.job import JobTimeline

MOST_RANKS = 32
RUN_SECONDS = 180.0  # that a call or a cell may take, also on a busy machine
COLLECTIVE_SECONDS = 20.0  # before a collective gives up
KEPT_CELLS = 100  # whose lines are kept, to be shown in an error
_current: "Ranks | None" = None  # that are open in this notebook


class Ranks:
    """N processes, each one rank of a process group, as under torchrun.

    Each sees as many GPUs as there are ranks on its node: simulated ones, or with
    SIMGPU=off the machine's own. The process group is there, over NCCL, and
    RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and
    MASTER_PORT are set; `torch.cuda.set_device` is yours to call. On the CPU, the
    process group is over gloo, and nothing is simulated.

    Opening ranks closes those that were open before.

    Args:
        size: how many ranks (the world size), 1 to 32.
        device: "cuda", or "cpu".
        card: which GPU to simulate: "T4", "V100", "A100", "H100", "H200", "B200" or
            "L40S", or a file that `simgpu measure` has written, "my.json".
        memory: cap for each GPU, in bytes or as text ("512MB").
        nodes: on which the ranks lie, equally many on each; more than one are
            simulated.
        network: between nodes: bytes/s, text such as "100 Gbit/s", or such a file.
        timeout: seconds before a collective that waits for another rank gives up.
        threads: of PyTorch in each rank.

    Attributes:
        backend: "nccl", or on the CPU "gloo".
        simulated: whether the GPUs are.

    Raises:
        ValueError: for ranks, GPUs, nodes or a network that cannot be.
        RuntimeError: if SIMGPU=off and the machine has fewer GPUs.
        RankError: if they do not come up.
    """

    def __init__(
        self,
        size: int,
        *,
        device: str = "cuda",
        card: str = "A100",
        memory: int | str | None = None,
        nodes: int = 1,
        network: float | str | None = None,
        timeout: float = COLLECTIVE_SECONDS,
        threads: int = 1,
    ):
        global _current
        if not isinstance(size, Integral) or isinstance(size, bool):
            raise ValueError(f"the number of ranks is a whole number, not {size!r}")
        if not 1 <= size <= MOST_RANKS:
            raise ValueError(
                f"{size} ranks cannot be started; choose 1 to {MOST_RANKS}"
            )
        gpus = choose(size, device, card, memory, nodes, network)
        if _current is not None:
            _current.close()
        self.size = size
        self._gpus = gpus
        self.backend = "gloo" if gpus is None else "nccl"
        self.simulated = gpus is not None and gpus.simulated
        self._timeout = timeout
        self._threads = threads
        self._cells = 0
        self._busy = threading.Lock()
        self._workers: WorkerGroup | None = None
        self._start()
        _current = self
        ranks = f"{size} rank" if size == 1 else f"{size} ranks"
        if gpus is None:
            ranks = ranks.replace(" ", " real ")
        where = "the CPU" if gpus is None else gpus
        print(f"{ranks}: processes on {where}, backend {self.backend}.")

    def run(
        self,
        function: Callable,
        *args: object,
        timeout: float = RUN_SECONDS,
        **kwargs: object,
    ) -> list:
        """Call a function in every rank.

        Args:
            function: may be defined in a cell; what it needs is sent along.
            args, kwargs: for it, the same in every rank.
            timeout: seconds after which ranks that still run are given up.

        Returns:
            What it returned; item r came from rank r.

        Raises:
            RankError: naming the ranks that failed, and where.
            TypeError: if the function or an argument cannot be sent.
        """
        try:
            payload = pickling.dumps((function, args, kwargs))
        except Exception as error:
            raise TypeError(f"cannot send this to the ranks: {error}") from None
        results = self._call("call", payload, timeout)
        try:
            return [pickle.loads(result) for result in results]
        except Exception as error:
            raise RankError(f"a result cannot be read here: {error}") from None

    def cell(self, source: str, timeout: float = RUN_SECONDS) -> None:
        """Run the text of a cell in every rank's own namespace, as `%%ranks` does."""
        self._cells = self._cells % KEPT_CELLS + 1
        name = f"{frames.CELL} {self._cells}>"
        lines = source.splitlines(keepends=True)
        linecache.cache[name] = (len(source), None, lines, name)
        self._call("cell", (name, source), timeout)

    def timeline(self) -> JobTimeline:
        """What the simulated GPUs of all ranks did, on one axis; it draws itself.

        To begin anew, clear the log of every rank first:
        `ranks.run(lambda: simgpu.timeline().clear())`.

        Raises:
            RankError: if the ranks have no simulated GPUs, or a collective is under way
                that not all ranks have called.
        """
        if not self.simulated:
            raise RankError(
                "only simulated GPUs have a timeline (unset SIMGPU); torch.profiler "
                "records real ones"
            )
        # pickled by name, with no code of the notebook
        return JobTimeline(self.run(worker.timeline))

    def memory(self) -> JobMemory:
        """What each rank has on its GPU, now and at most; it draws itself.

        Raises:
            RankError: if the ranks are on the CPU.
        """
        if self.backend != "nccl":
            raise RankError("these ranks are on the CPU, whose memory is not counted")
        rows = (row for rows in self.run(worker.memory) for row in rows)
        return JobMemory(rows, self.simulated)

    def _call(self, kind: str, payload: object, timeout: float) -> list:
        """The answers of all ranks, in their order."""
        if self._workers is None:
            raise RankError("these ranks are closed; open new ones with Ranks(...)")
        if not self._busy.acquire(blocking=False):
            raise RankError("these ranks are at work on another call")
        try:
            frames.run_cell(payload[0] if kind == "cell" else "")
            return self._call_alone(kind, payload, timeout)
        finally:
            self._busy.release()

    def _call_alone(self, kind: str, payload: object, timeout: float) -> list:
        call = RemoteCall(self._workers)
        # until all has gone well: an answer may still come, or half of one was read
        usable = False
        count = "rank has" if self.size == 1 else f"{self.size} ranks have"
        afresh = f"The {count} been started afresh; what they had defined is gone."
        try:
            call.send(kind, payload)
            call.wait(timeout)
            report = call.finish()
            usable = not call.broken and self._can_go_on_after(report)
        except KeyboardInterrupt:
            usable = call.interrupt() and self._can_go_on_after_interrupt()
            if not usable:
                print(afresh)
            raise
        finally:
            if not usable:
                self._restart()
        if report:
            raise RankError(report if usable else f"{report}\n{afresh}")
        return [call.results[rank] for rank in range(self.size)]

    def _can_go_on_after(self, report: str) -> bool:
        """Whether the ranks, which have all answered, are still of use."""
        if self.simulated:
            # one may have launched a collective and failed before it was needed
            usable = "DistBackendError" not in report
            return report == "" or (usable and self._can_still_talk())
        if self.backend == "nccl":  # which lets nobody ask: a barrier could hang
            return report == ""
        return not may_have_lost_connections(report) or self._can_still_talk()

    def _can_go_on_after_interrupt(self) -> bool:
        return self._can_still_talk() if self.simulated else self.backend == "gloo"

    def _can_still_talk(self) -> bool:
        """Whether a barrier succeeds: a time-out costs gloo its connections.

        On simulated GPUs: whether all collectives so far were launched by all.
        """
        call = RemoteCall(self._workers)
        call.send("barrier", None)
        call.wait(call.grace)
        return call.finish() == ""

    def _start(self) -> None:
        self._workers = WorkerGroup(self.size, self._gpus, self._timeout, self._threads)

    def _restart(self) -> None:
        workers, self._workers = self._workers, None
        workers.close()
        self._start()

    def close(self) -> None:
        """End the ranks. Does nothing if they have ended."""
        global _current
        if self._workers is not None:
            self._workers.close()
            self._workers = None
        if _current is self:
            _current = None

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def __repr__(self) -> str:
        state = self.backend
        if self.simulated:
            state = f"simulated GPUs, {state}"
        if self._workers is None:
            state = "closed"
        return f"Ranks({self.size}, {state})"


def current() -> Ranks | None:
    """The ranks that are open in this notebook."""
    return _current


def close() -> None:
    """End the ranks, and the fork server, which `Ranks.close` keeps."""
    if _current is not None:
        _current.close()
    fork_server.stop()


def _forget() -> None:
    """A forked child of the notebook has no ranks; it must not end its parent's."""
    global _current
    if _current is not None:
        _current._workers = None
    _current = None


atexit.register(close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
