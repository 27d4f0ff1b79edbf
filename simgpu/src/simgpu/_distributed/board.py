"""Where ranks post what they do, for the others to read: the job's own store.

Who reads waits until all is there. A wait that cannot end is found out: a rank that has
ended, or ranks that wait for each other.
"""

import contextlib
import json
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist

_LOOK = 0.5  # seconds after which one looks what the others do
_SHORTEST, _LONGEST = 5e-5, 2e-3  # seconds between two looks at the store
# Seconds that the store stays for other ranks, as long as NCCL lets them wait. One that
# has ended is not waited for.
_PATIENCE = 600.0
_PIECE = 1 << 22  # bytes of a value that go in one message
_ENDED = "{} waits for rank {}, which {}. NCCL would wait here until its time limit."
_CIRCLE = (
    "these ranks wait for each other, and NCCL would wait here until its time limit:\n"
    "{}\nEvery rank must call the same collectives of a group in the same order, and "
    "every recv needs a send."
)
_LATE = (
    "Watchdog caught collective operation timeout: {} has waited {:.1f} s for rank {}: "
    "its time limit."
)


class _Pieces(NamedTuple):
    """What stands in the store for a value that is too large for one message."""

    nbytes: int

    def keys(self, key: str) -> list[str]:
        return [f"{key}/from {place}" for place in range(0, self.nbytes, _PIECE)]


class Board:
    """The job's store, as one rank writes to it and reads it.

    Args:
        store: of the job's first process group.
        rank: of this process in the job.
        size: how many ranks the job has.
        place: of this process's arena: the process and its file.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, place: tuple):
        self.rank, self.size = rank, size
        self.present = range(size)  # the ranks that run, of a dry run not all
        self.turn = 0  # in a notebook: number of the cell that all ranks run
        self._kept = store  # in one rank it is the server; a clone is a client alone
        with contextlib.suppress(RuntimeError, NotImplementedError):
            store = store.clone()  # a wait must not keep the program from its store
        self.store = store
        self._has_ended = False
        self._cut: dict[str, _Pieces] = {}  # what was posted in pieces
        # the threads that use it, and whether each one waits
        self._threads: dict[threading.Thread, bool] = {}
        self.post(f"who/{rank}", (socket.gethostname(), *place))

    def post(self, key: str, value) -> None:
        """Let everyone read `value` under `key`."""
        self._threads.setdefault(threading.current_thread(), False)
        data = pickle.dumps(value)
        if len(data) > _PIECE:  # the store's server hangs up on much larger ones
            self._cut[key] = pieces = _Pieces(len(data))
            for i, name in enumerate(pieces.keys(key)):
                self.store.set(name, data[i * _PIECE : (i + 1) * _PIECE])
            data = pickle.dumps(pieces)
        self.store.set(key, data)

    def has(self, keys: list[str]) -> bool:
        """Whether all this has been posted."""
        return self.store.check(keys)

    def is_first(self, what: str) -> bool:
        """Whether no rank of the job has asked this before."""
        try:
            return self.store.add(f"first/{what}", 1) == 1
        except RuntimeError:  # the store is gone
            return True

    def first(self, key: str, value: list):
        """Leave `value`, which JSON can say, unless another rank was first: its value.

        Returns:
            What stands under `key` from now on.
        """
        return json.loads(self.store.compare_set(key, "", json.dumps(value)))

    def forget(self, key: str) -> None:
        """Nobody will read what this rank has posted under `key`."""
        self.store.delete_key(key)
        if key in self._cut:
            for piece in self._cut.pop(key).keys(key):
                self.store.delete_key(piece)

    def read(self, keys: dict[str, int], doing: str | Callable[[], str],
             limit: float, is_over: Callable | None = None) -> list:  # fmt: skip
        """What ranks have posted; waits until it is all there.

        Args:
            keys: key -> the rank that posts it.
            doing: what this rank does, for the error: "rank 0: all_reduce ...";
                a function is asked once it is needed.
            limit: seconds that the wait may take.
            is_over: whether the wait has become needless; then nothing is returned.

        Raises:
            torch.distributed.DistBackendError: if the wait cannot end, or has taken
                too long.
        """
        __tracebackhide__ = True
        names = list(keys)
        begin = time.monotonic()
        said, look_again = False, begin + _LOOK
        pause = _SHORTEST
        try:
            # a blocking wait of the store could not be interrupted, and would print
            # a warning each time that it gives up
            while not self.store.check(names):
                if is_over is not None and is_over():
                    return []
                now = time.monotonic()
                if now > look_again:
                    missing = self._missing(keys)
                    if not missing:  # it has just come
                        break
                    said, look_again = True, now + _LOOK
                    doing = doing if isinstance(doing, str) else doing()
                    self._wait(doing, missing)
                    if now > begin + limit:
                        late = next(iter(missing.values()))
                        error = dist.DistBackendError(_LATE.format(doing, limit, late))
                        error.waited = limit
                        raise error
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST)
            found = self.store.multi_get(names)
        except dist.DistNetworkError:
            raise self._store_is_gone() from None
        finally:
            if said:
                self._threads[threading.current_thread()] = False
                with contextlib.suppress(RuntimeError):  # the store is gone
                    self._say(("works", "", {}))
        return [self._whole(*one) for one in zip(names, found, strict=True)]

    def _whole(self, key: str, posted: bytes):
        """What was posted under a key, if need be put together again."""
        value = pickle.loads(posted)
        if isinstance(value, _Pieces):
            return pickle.loads(b"".join(self.store.multi_get(value.keys(key))))
        return value

    def arenas(self, ranks: list[int], doing: str, limit: float) -> dict:
        """Rank -> (process, file) of its arena; waits until all have joined the job."""
        __tracebackhide__ = True
        keys = {f"who/{rank}": rank for rank in ranks}
        found = zip(ranks, self.read(keys, doing, limit), strict=True)
        here = socket.gethostname()
        return {rank: (pid, file) for rank, (host, pid, file) in found if host == here}

    def _missing(self, keys: dict[str, int]) -> dict[str, int]:
        return {key: rank for key, rank in keys.items() if not self.store.check([key])}

    # -- what a rank does --------------------------------------------------------------

    def _say(self, state: tuple) -> None:
        self.post(f"state/{self.rank}", (*state, self.turn))

    def say_idle(self, why: str) -> None:
        """This rank will call no collective before the next turn: it "has ..."."""
        self._say(("idle", why, {}))

    def wait_for_others(self) -> None:
        """The store is in this process: stay until the others have ended, too."""
        end = time.monotonic() + _PATIENCE
        left = [rank for rank in range(self.size) if rank != self.rank]
        with contextlib.suppress(RuntimeError):
            while left and time.monotonic() < end:
                left = [rank for rank in left if self._state_of(rank)[0] != "ended"]
                if left:
                    time.sleep(0.01)

    def say_ended(self, why: str = "") -> None:
        """Once said, this rank leaves the store alone: its server may have gone."""
        if not self._has_ended:
            self._has_ended = True
            with contextlib.suppress(RuntimeError):
                self._say(("ended", why, {}))

    def _state_of(self, rank: int) -> tuple:
        key = f"state/{rank}"
        state = ("works", "", {}, self.turn)
        if self.store.check([key]):
            state = pickle.loads(self.store.get(key))
        if state[0] != "ended" and not self.is_alive(rank):
            return ("ended", "", {}, self.turn)
        return state

    def is_alive(self, rank: int) -> bool:
        """Whether its process runs; where that cannot be known, it does."""
        key = f"who/{rank}"
        if not self.store.check([key]):
            return True  # it has not come yet
        host, pid, _ = pickle.loads(self.store.get(key))
        if host != socket.gethostname() or os.name != "posix":
            return True
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                return file.read().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return True

    # -- waits that cannot end ---------------------------------------------------------

    def waits(self) -> bool:
        """Whether a thread of this rank has been waiting for others for a while."""
        return any(self._threads.copy().values())

    @contextlib.contextmanager
    def for_now(self):
        """This thread may not use the board again: it counts only while it is here."""
        thread = threading.current_thread()
        is_new = thread not in self._threads
        try:
            yield
        finally:
            if is_new:
                self._threads.pop(thread, None)

    @contextlib.contextmanager
    def in_cpp(self, doing: str, keys: dict[str, int]):
        """This thread waits where nobody can tell: the others may find out."""
        with self.for_now():
            self._waits_for(doing, keys)
            try:
                yield
            finally:
                self._threads[threading.current_thread()] = False
                with contextlib.suppress(RuntimeError):  # the store is gone
                    self._say(("works", "", {}))

    def _waits_for(self, doing: str, missing: dict[str, int]) -> bool:
        """Note that this thread waits; whether all threads of the rank do."""
        self._threads[threading.current_thread()] = True
        threads = self._threads.copy().items()
        is_idle = all(waits for thread, waits in threads if thread.is_alive())
        if is_idle:
            self._say(("waits", doing, missing))
        return is_idle

    def _wait(self, doing: str, missing: dict[str, int]) -> None:
        """A wait goes on: say so, and raise if it cannot end."""
        __tracebackhide__ = True
        self.check_others(doing, missing)
        if self._waits_for(doing, missing):
            self._check_circle(doing, missing)

    def check_others(self, doing: str, missing: dict[str, int]) -> None:
        """Raise if others are known to wait for ever, or to have ended."""
        __tracebackhide__ = True
        self.check_verdict()
        self._check_ended(doing, missing)

    def _check_ended(self, doing: str, missing: dict[str, int]) -> None:
        """Raise if one of the ranks that one waits for will never come."""
        __tracebackhide__ = True
        for rank in sorted(set(missing.values()) - {self.rank}):
            kind, text, _, turn = self._state_of(rank)
            if kind == "ended" or (kind == "idle" and turn >= self.turn):
                if rank in self._missing(missing).values():
                    how = text if kind == "idle" else f"has ended{text}"
                    raise dist.DistBackendError(_ENDED.format(doing, rank, how))

    def _check_circle(self, doing: str, missing: dict[str, int]) -> None:
        """Raise if all that one waits for wait themselves."""
        __tracebackhide__ = True
        lines = {self.rank: f"  {doing}, waits for {_ranks(missing, self.rank)}"}
        ask = list(missing.values())
        while ask:
            rank = ask.pop()
            if rank in lines:
                continue
            kind, text, its, _ = self._state_of(rank)
            if kind != "waits":
                return  # or it has ended: whoever waits for that one will say so
            if len(self._missing(its)) < len(its):
                return  # it is about to go on
            lines[rank] = f"  {text}, waits for {_ranks(its, rank)}"
            ask += its.values()
        if len(self._missing(missing)) < len(missing):
            return
        text = _CIRCLE.format("\n".join(lines[rank] for rank in sorted(lines)))
        self.post("verdict", text)
        raise dist.DistBackendError(text)

    def check_verdict(self) -> None:
        """Raise if ranks of the job have been found to wait for each other."""
        __tracebackhide__ = True
        if self.store.check(["verdict"]):
            raise dist.DistBackendError(pickle.loads(self.store.get("verdict")))

    def _store_is_gone(self) -> Exception:
        return dist.DistBackendError(
            f"rank {self.rank}: the process that keeps the job's store has ended"
        )


def _ranks(missing: dict[str, int], own: int) -> str:
    """Whom rank `own` waits for: "ranks 0, 2", "rank 1 itself"."""
    ranks = sorted(set(missing.values()))
    names = [f"{rank} itself" if rank == own else f"{rank}" for rank in ranks]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}"
