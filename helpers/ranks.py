"""Real ranks for a notebook: N processes with a process group, ready in about a second.

    with Ranks(4) as ranks:
        sums = ranks.run(function, 1, 2)     # sums[r] came from rank r

`%%ranks` runs a cell in every rank's own namespace and prints in rank order. Nothing is
simulated here: NCCL where there are enough real GPUs, gloo on the CPU otherwise.

This file is the notebook's side: it starts the ranks, sends them work, collects output
and failures, and starts them afresh after a crash or a hang. `rank_process.py` is the
other side. Leaves out: ranks on several machines, and pictures drawn by a rank (return
the numbers and draw in the notebook). Run on Linux and gloo; macOS, Windows and NCCL
are written for and were not run.
"""

import argparse
import atexit
import contextlib
import linecache
import os
import pickle
import queue
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Connection,
    answer_challenge,
    deliver_challenge,
    wait,
)
from pathlib import Path
from typing import NamedTuple

import cloudpickle

from helpers import frames

MOST = 32  # ranks
START = 60.0  # seconds that the ranks may take to come up
RUN = 60.0  # seconds that a call or a cell may take
GRACE = 3.0  # seconds that the other ranks may go on after one has failed
COLLECTIVE = 20.0  # seconds before a collective gives up
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
_DOUBTFUL = (*_LOST, "imeout", "imed out", "pair closure", "monitoredBarrier")
LOOPBACK = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)  # the network card's name
SHOWN = 10**7  # bytes of each rank's output that a call shows
_FORKS = sys.platform == "linux"  # elsewhere each rank is a new Python process
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)\n', re.M)  # of a whole line


class RankError(RuntimeError):
    """What went wrong in which rank, in the words that a learner needs."""

    def _render_traceback_(self) -> list[str]:
        """IPython shows this: the notebook's own stack says nothing about a rank."""
        return [f"RankError: {self}"]


class Ranks:
    """N real processes, each one rank of a process group.

    Opening ranks closes those that were open before.

    Args:
        size: how many ranks (the world size), 1 to 32.
        timeout: seconds before a collective that waits for another rank gives up.
        threads: of PyTorch in each rank.
        backend: "gloo" or "nccl"; None chooses.

    Raises:
        ValueError: for a number of ranks or a backend that cannot be.
        RankError: if they do not come up.

    Taught in 12-talk-between-ranks.
    """

    def __init__(
        self,
        size: int,
        *,
        timeout: float = COLLECTIVE,
        threads: int = 1,
        backend: str | None = None,
    ):
        if not isinstance(size, int) or isinstance(size, bool):
            raise ValueError(f"the number of ranks is a whole number, not {size!r}")
        if not 1 <= size <= MOST:
            raise ValueError(f"{size} ranks cannot be started; choose 1 to {MOST}")
        if backend not in (None, "gloo", "nccl"):
            raise ValueError(f"backend={backend!r}; use gloo or nccl")
        if _state.ranks is not None:
            _state.ranks.close()
        self.size = size
        self.backend = backend or _backend(size)
        self._crew: _Crew | None = None
        self._options = {"timeout": timeout, "threads": threads}
        self._cells = 0  # whose lines are kept
        self._busy = threading.Lock()
        self._start()
        _state.ranks = self
        where = "GPUs" if self.backend == "nccl" else "the CPU"
        ranks = "rank" if size == 1 else "ranks"
        print(f"{size} real {ranks}: processes on {where}, backend {self.backend}.")

    def _start(self) -> None:
        self._crew = _Crew(self.size, {**self._options, "backend": self.backend})

    def run(self, function: Callable, *args, timeout: float = RUN, **kwargs) -> list:
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
            payload = cloudpickle.dumps((function, args, kwargs))
        except Exception as error:
            raise TypeError(f"cannot send this to the ranks: {error}") from None
        answers = self._work(("call", payload), timeout)
        try:
            return [pickle.loads(answer) for answer in answers]
        except Exception as error:
            raise RankError(f"a result cannot be read here: {error}") from None

    def cell(self, source: str, timeout: float = RUN) -> None:
        """Run the text of a cell in every rank's own namespace, as `%%ranks` does."""
        self._cells = self._cells % 100 + 1
        name = f"{frames.CELL} {self._cells}>"
        lines = source.splitlines(keepends=True)
        linecache.cache[name] = (len(source), None, lines, name)
        self._work(("cell", (name, source)), timeout)

    def _work(self, message: tuple, timeout: float) -> list:
        if self._crew is None:
            raise RankError("these ranks are closed; open new ones with Ranks(...)")
        if not self._busy.acquire(blocking=False):
            raise RankError("these ranks are at work on another call")
        try:
            return self._work_alone(message, timeout)
        finally:
            self._busy.release()

    def _work_alone(self, message: tuple, timeout: float) -> list:
        job, clean = _Job(self._crew), False
        afresh = (
            f"The {_count(self.size)} been started afresh; "
            "what they had defined is gone."
        )
        try:
            job.send(message)
            job.wait(timeout)
            problem = job.explain(job.finish_or_stacks())
            doubtful = any(words in problem for words in _DOUBTFUL)
            lost = job.broken or (doubtful and not self._together())
            clean = not lost
        except KeyboardInterrupt:
            clean = job.interrupt()
            if not clean:
                print(afresh)
            raise
        finally:
            if not clean:  # an answer may still come, or half of one was read
                self._restart()
        if problem:
            raise RankError(f"{problem}\n{afresh}" if lost else problem)
        return [job.answers.pop(rank)[1] for rank in range(self.size)]

    def _together(self) -> bool:
        """Whether the ranks can still talk: a time-out costs gloo its connections."""
        job = _Job(self._crew)
        job.send(("barrier", None))
        job.wait(GRACE)
        return not job.explain(job.finish_or_stacks()) and not job.broken

    def _restart(self) -> None:
        crew, self._crew = self._crew, None
        crew.close()
        self._start()

    def close(self) -> None:
        """End the ranks. Does nothing if they have ended."""
        if self._crew is not None:
            self._crew.close()
            self._crew = None
        if _state.ranks is self:
            _state.ranks = None

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._crew is None else self.backend
        return f"Ranks({self.size}, {state})"


# -- processes -------------------------------------------------------------------------


class _Process:
    """A Python process that runs `rank_process`."""

    def __init__(self, what, setting: dict):
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }  # fmt: skip
        # what C++ logs has times and addresses; errors arrive as errors anyway
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        if LOOPBACK:
            environment["GLOO_SOCKET_IFNAME"] = LOOPBACK
        root = str(Path(__file__).resolve().parents[1])  # this very package
        with open(f"{setting['folder']}/start.err", "ab") as errors:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", _MAIN, root],
                stdin=subprocess.PIPE,  # stays open: a spawned rank ends with it
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the notebook alone
            )
        pickle.dump((os.getpid(), what, setting), self.popen.stdin)
        self.popen.stdin.flush()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(10)
        with contextlib.suppress(OSError):
            self.popen.stdin.close()


_MAIN = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from helpers.rank_process import main; main()"
)


class _Nursery:
    """The process that has imported PyTorch and forks ranks. One for each notebook."""

    def __init__(self):
        self.folder = _new_folder()  # the nursery removes it, should we be killed
        self.ended: dict[int, int] = {}  # process -> exit status
        self.gone = False
        self.process = self.link = None
        try:
            with _Door() as door:
                setting = {**door.setting, "folder": str(self.folder)}
                self.process = _Process("nursery", setting)
                self.link = door.accept(START, [self.process], self.folder)
        except BaseException:
            self.close()
            raise

    def fork(self, setting: dict) -> None:
        """Ask for new ranks."""
        self.link.send(setting)

    def is_there(self) -> bool:
        """Whether it answers."""
        with contextlib.suppress(EOFError, OSError):
            self.link.send(None)
            while self.link.poll(START):
                if self._read() == "yes":
                    return True
        return False

    def note_ends(self) -> None:
        """Read what it reports of ranks that have ended."""
        try:
            while self.link.poll():
                self._read()
        except (EOFError, OSError):
            self.gone = True

    def _read(self) -> str:
        kind, value = self.link.recv()
        if kind == "ended":
            self.ended[value[0]] = value[1]
        return kind

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
        if self.process is not None:
            self.process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _new_folder(inside: Path | None = None) -> Path:
    return Path(tempfile.mkdtemp(prefix="ranks-", dir=inside))


class _Door:
    """Where new processes report: a port of this machine alone, and a key to it.

    A stranger may come too, such as a program that looks for another one at a port it
    has had. It has no key; it is turned away, and nobody waits for it.
    """

    def __enter__(self) -> "_Door":
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=MOST)
        self.socket.settimeout(0.1)
        self.callers: list[socket.socket] = []
        self.known: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self.setting = {
            "address": self.socket.getsockname(), "key": secrets.token_bytes(16),
        }  # fmt: skip
        return self

    def __exit__(self, *exc_info) -> None:
        self.socket.close()
        for caller in self.callers:  # those that have neither given a key nor gone
            with contextlib.suppress(OSError):
                caller.shutdown(socket.SHUT_RDWR)

    def accept(
        self, seconds: float, processes: list[_Process], folder: Path
    ) -> Connection:
        """The next connection, while the processes that should make it are alive.

        Raises:
            RankError: if none comes, with the last line that they wrote to `folder`.
        """
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(TimeoutError):
                caller, _ = self.socket.accept()
                self.callers.append(caller)
                threading.Thread(target=self._ask, args=[caller], daemon=True).start()
            with contextlib.suppress(queue.Empty):
                return self.known.get(timeout=0.1)
            dead = [p.popen.returncode for p in processes if p.popen.poll() is not None]
            if dead:
                said = (folder / "start.err").read_text(errors="replace").splitlines()
                raise RankError(
                    f"a process ended while it started, with status {dead[0]}: "
                    f"{said[-1] if said else 'it said nothing'}"
                )
            if time.monotonic() > end:
                raise RankError(f"no answer from a new process after {seconds:.0f} s")

    def _ask(self, caller: socket.socket) -> None:
        """Let it in if it has the key. It may be long in saying so."""
        link = Connection(caller.dup().detach())
        try:
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            deliver_challenge(link, self.setting["key"])
            answer_challenge(link, self.setting["key"])
        except (AuthenticationError, EOFError, OSError):
            link.close()
            caller.close()
        else:
            caller.close()  # first, so that `__exit__` leaves the link alone
            self.known.put(link)


class _State:
    """What this notebook has running."""

    ranks: Ranks | None = None
    nursery: _Nursery | None = None

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.close()
        if self.nursery is not None:
            self.nursery.close()
            self.nursery = None

    def nursery_that_lives(self) -> _Nursery:
        if self.nursery is not None and not self.nursery.is_there():
            self.nursery.close()
            self.nursery = None
        if self.nursery is None:
            self.nursery = _Nursery()
        return self.nursery


_state = _State()
atexit.register(_state.close)


def current() -> Ranks | None:
    """The ranks that are open in this notebook."""
    return _state.ranks


def close() -> None:
    """End the ranks, and the process that forks them, which `Ranks.close` keeps."""
    _state.close()


def _forget() -> None:
    """A forked child of the notebook has no ranks; it must not end its parent's."""
    if _state.ranks is not None:
        _state.ranks._crew = None
    _state.ranks = _state.nursery = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _backend(size: int) -> str:
    """NCCL where there are enough real GPUs."""
    if os.environ.get("HELPERS_GPUS") == "simulated":
        return "gloo"
    if sys.platform == "linux" and not list(Path("/dev").glob("nvidia[0-9]*")):
        return "gloo"  # without importing PyTorch here
    from helpers import gpus

    real = gpus._REAL_GPUS
    return "nccl" if isinstance(real, int) and real >= size else "gloo"


class _Crew:
    """The processes of one start of the ranks, and the connections to them."""

    def __init__(self, size: int, setting: dict):
        self.size = size
        self.links: list[Connection | None] = [None] * size
        self.pids = [0] * size
        self.spawned: list[_Process] = []
        self.read = [0] * size  # bytes of each rank's output that were shown
        self.partial = [b""] * size  # and the begun line behind them
        self.nursery = _state.nursery_that_lives() if _FORKS else None
        self.folder = _new_folder(self.nursery.folder if self.nursery else None)
        try:
            with _Door() as door:
                setting = {
                    **setting, **door.setting, "world_size": size, "path": sys.path,
                    "folder": str(self.folder), "cwd": os.getcwd(),
                    "environ": dict(os.environ),
                }  # fmt: skip
                self._begin(setting)
                self._meet(door)
            self._come_up()
        except BaseException:
            self.close()
            raise

    def _begin(self, setting: dict) -> None:
        if self.nursery:
            self.nursery.fork(setting)
        else:
            self.spawned = [_Process(rank, setting) for rank in range(self.size)]

    def _meet(self, door: _Door) -> None:
        waiting_for = self.spawned or [self.nursery.process]
        for _ in range(self.size):
            link = door.accept(START, waiting_for, self.folder)
            _, (rank, pid) = link.recv()
            self.links[rank], self.pids[rank] = link, pid
            if self.nursery:
                self.nursery.ended.pop(pid, None)  # of one that had the number before

    def _come_up(self) -> None:
        job = _Job(self)
        job.wait(START)
        if problem := job.explain(job.finish_or_stacks()):
            raise RankError(f"the ranks did not come up:\n{problem}")

    def status(self, rank: int) -> int | None:
        """How a rank's process ended; negative for a signal; None if it lives."""
        if self.spawned:
            return self.spawned[rank].popen.poll()
        self.nursery.note_ends()
        return self.nursery.ended.get(self.pids[rank])

    def output(self, rank: int) -> Path:
        return self.folder / f"{rank}.out"

    def signal(self, rank: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, OSError):
            os.kill(self.pids[rank], number)

    def close(self) -> None:
        """End every process of it and leave nothing behind."""
        for link in filter(None, self.links):
            link.close()
        for process in self.spawned:
            process.kill()
        if self.nursery:
            self._end_forked()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end_forked(self) -> None:
        """End the ranks, with all that they have started, and see them gone."""
        for pid in filter(None, self.pids):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        end = time.monotonic() + 5
        while time.monotonic() < end and not self.nursery.gone:
            alive = [r for r, pid in enumerate(self.pids) if pid]
            if all(self.status(rank) is not None for rank in alive):
                return
            wait([self.nursery.link], 0.05)


# -- one piece of work -----------------------------------------------------------------


class _Failure(NamedTuple):
    """What a rank says of an error: see `rank_process._describe`."""

    what: str
    where: list[tuple[str, int, str]]


class _Job:
    """One call or cell: who has answered, who has died, what was printed."""

    def __init__(self, crew: _Crew):
        self.crew = crew
        self.answers: dict[int, tuple[str, object]] = {}
        self.died: dict[int, str] = {}
        self.failed_at: float | None = None
        self.receiving = False  # in the middle of an answer
        self._left = [SHOWN] * crew.size  # bytes that may still be shown
        self._stuck: list[int] = []

    @property
    def broken(self) -> bool:
        """Whether the ranks cannot go on as they are."""
        return bool(self.died or self._stuck)

    def _unfinished(self) -> dict[Connection, int]:
        return {
            link: rank
            for rank, link in enumerate(self.crew.links)
            if rank not in self.answers and rank not in self.died
        }

    def send(self, message: tuple) -> None:
        data = pickle.dumps(message)
        for rank, link in enumerate(self.crew.links):
            try:
                link.send_bytes(data)
            except OSError:
                self._bury(rank)

    def wait(self, seconds: float) -> None:
        """Collect answers until all are there, or it is clear that they will not be."""
        end = time.monotonic() + seconds
        while links := self._unfinished():
            limit = end if self.failed_at is None else min(end, self.failed_at + GRACE)
            left = limit - time.monotonic()
            if left <= 0:
                return
            for link in wait(list(links), min(left, 0.1)):
                self._receive(links[link], link)
            self._show(0)

    def _receive(self, rank: int, link: Connection) -> None:
        self.receiving = True
        try:
            kind, value = link.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            self.receiving = False
            self._bury(rank)
            return
        self.receiving = False
        self.answers[rank] = (kind, value)
        if kind == "error":
            self.failed_at = self.failed_at or time.monotonic()

    def _bury(self, rank: int) -> None:
        """A rank has hung up: find out how it ended."""
        end = time.monotonic() + 2
        while (status := self.crew.status(rank)) is None and time.monotonic() < end:
            if self.crew.nursery and self.crew.nursery.gone:
                break
            time.sleep(0.01)
        if status is None:
            self.died[rank] = "ended, and the one that forks ranks did too"
        elif status < 0:
            self.died[rank] = f"was killed by {signal.Signals(-status).name}"
        else:
            self.died[rank] = f"ended with status {status}"
        self.failed_at = self.failed_at or time.monotonic()

    def interrupt(self) -> bool:
        """Ctrl-C: tell the ranks that still run; whether all have answered then."""
        if self.receiving:
            return False  # the rest of that answer would be taken for the next one
        for rank in self._unfinished().values():
            self.crew.signal(rank, signal.SIGINT)
        with contextlib.suppress(KeyboardInterrupt):
            self.wait(2)
            self._show_all()
        return not self._unfinished() and not self.died

    def _show_all(self) -> None:
        for rank in range(self.crew.size):
            self._show(rank, final=True)

    def finish_or_stacks(self) -> dict[int, list[tuple[str, int, str]]]:
        """Show what was printed; where the ranks that have not answered are."""
        self._stuck = sorted(self._unfinished().values())
        self._show_all()
        return {rank: self._stack(rank) for rank in self._stuck}

    def _stack(self, rank: int) -> list[tuple[str, int, str]]:
        """The stack of a running rank, outermost first; empty if it cannot tell."""
        if not hasattr(signal, "SIGUSR1"):
            return []
        path = self.crew.folder / f"{rank}.stack"
        self.crew.signal(rank, signal.SIGUSR1)
        end, found = time.monotonic() + 1, []
        while time.monotonic() < end:
            text = path.read_text(encoding="utf-8", errors="replace")
            found = [(file, int(n), name) for file, n, name in _FRAME.findall(text)]
            if any("rank_process.py" in file for file, *_ in found):
                break
            time.sleep(0.01)
        return found[::-1]

    # -- what the learner sees ---------------------------------------------------------

    def _show(self, rank: int, final: bool = False) -> None:
        """Print the new lines of a rank under its number."""
        crew, path = self.crew, self.crew.output(rank)
        if path.exists() and path.stat().st_size > crew.read[rank]:
            with open(path, "rb") as file:
                file.seek(crew.read[rank])
                new = file.read(self._left[rank])
            crew.read[rank] += len(new)
            crew.partial[rank] += new
            self._left[rank] -= len(new)
            if self._left[rank] == 0:  # the rest is not shown
                crew.read[rank] = path.stat().st_size
        text = crew.partial[rank]
        end = len(text) if final else text.rfind(b"\n") + 1
        crew.partial[rank] = text[end:]
        for line in text[:end].decode("utf-8", "replace").splitlines():
            print(f"[{rank}] {line}")
        if final and self._left[rank] == 0:
            print(f"[{rank}] ... (more than {SHOWN // 10**6} MB in all)")
        if final and rank in self.answers and crew.read[rank]:
            os.truncate(path, 0)  # the rank appends
            crew.read[rank] = 0

    def explain(self, stacks: dict[int, list]) -> str:
        """What went wrong, one paragraph for all ranks with the same trouble."""
        told: dict[str, list[int]] = {}
        for rank in range(self.crew.size):
            if words := self._trouble(rank, stacks):
                told.setdefault(words, []).append(rank)
        return "\n".join(f"{_names(ranks)}: {words}" for words, ranks in told.items())

    def _trouble(self, rank: int, stacks: dict[int, list]) -> str:
        if rank in self.died:
            return f"the process {self.died[rank]}"
        if rank in stacks:
            where = _lines(stacks[rank])
            return f"did not finish; waiting{where or ' in code of its own'}"
        kind, value = self.answers.get(rank, ("ok", None))
        if kind != "error":
            return ""
        failure = _Failure(**value)
        if self.died and any(words in failure.what for words in _LOST):
            return f"lost another rank{_lines(failure.where)}"
        return f"{failure.what}{_lines(failure.where)}"


def _names(ranks: list[int]) -> str:
    """ "rank 1", "ranks 0, 2, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _lines(stack: list[tuple[str, int, str]]) -> str:
    """The learner's own lines of a stack, outermost first."""
    shown = []
    for file, line, name in stack:
        if frames.is_learners(file):
            inside = "" if name == "<module>" else f", in {name}"
            code = frames.text(file, line)
            shown.append(f"\n  {frames.shown(file)}, line {line}{inside}: {code}")
    if len(shown) > 8:  # a recursion without end
        shown[3:-3] = [f"\n  ... {len(shown) - 6} more"]
    return "".join(shown)


def _count(size: int) -> str:
    """ "rank has", "4 ranks have"."""
    return "rank has" if size == 1 else f"{size} ranks have"


# -- the cell magic --------------------------------------------------------------------


def _magic(line: str, cell: str) -> None:
    """%%ranks [--timeout SECONDS]: run the cell in every rank."""
    parser = argparse.ArgumentParser(prog="%%ranks", add_help=False)
    parser.add_argument("--timeout", type=float, default=RUN)
    parser.error = _wrong_options
    options = parser.parse_args(shlex.split(line))
    if _state.ranks is None:
        raise RankError("there are no ranks; open some with ranks = Ranks(4)")
    _state.ranks.cell(cell, options.timeout)


def _wrong_options(*_) -> None:
    raise ValueError("usage: %%ranks [--timeout SECONDS]")


def _register_magic() -> None:
    """In a notebook, make `%%ranks` known."""
    if "IPython" in sys.modules:
        from IPython import get_ipython

        if (shell := get_ipython()) is not None:
            shell.register_magic_function(_magic, "cell", "ranks")


_register_magic()
