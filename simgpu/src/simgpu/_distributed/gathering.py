"""One timeline of all ranks under torchrun: each hands in its log, rank 0 writes it.

The logs travel through the job's store. A rank that has died is left out, and so are
processes that a program spawns by itself.
"""

import contextlib
import os
import pickle
import signal
import sys
import time
import zlib
from pathlib import Path

import torch.distributed as dist

from simgpu import _runtime as state
from simgpu._distributed.board import Board
from simgpu._timing.job import JobTimeline, RankLog, log_of

_PIECE = 1 << 22  # bytes; the store takes at most 8 MiB at once
_LOOK = 0.02  # seconds between two looks for a log
_PATIENCE = 600.0  # seconds that rank 0 waits for the others after its own end, ...
_HURRY = 5.0  # ... and if something has gone wrong
_DIED = "its process ended before it could hand in its log"
_LATE = "it has not handed in its log"
_ALONE = "there was no process group through which to hand in its log"


def write(path: Path, failed: bool) -> None:
    """Hand in the log of this rank; rank 0 writes those of all to a file.

    Args:
        path: of the file: a Chrome trace.
        failed: the program has ended with an error: collectives that are under way may
            never end, and other ranks may not come.
    """
    runtime = state.current()
    rank = int(os.environ.get("RANK", 0))
    if runtime.cluster is not None:
        rank = runtime.cluster.rank
    log = _own_log(runtime.clock, rank, failed)
    size = int(os.environ.get("WORLD_SIZE", 1))
    missing: dict[int, str] = {}
    if runtime.cluster is None:
        logs = [log]
        missing = {other: _ALONE for other in range(size) if other != rank}
    elif rank == 0:
        found = _collect(runtime.cluster.board, _HURRY if failed else _PATIENCE)
        logs = [log, *(its for its in found.values() if isinstance(its, RankLog))]
        missing = {other: its for other, its in found.items() if isinstance(its, str)}
    else:
        with contextlib.suppress(RuntimeError):  # the store is gone, and rank 0 says so
            _hand_in(runtime.cluster.board, log)
    if rank == 0:
        for other, why in missing.items():
            print(f"rank {other} is not in {path.name}: {why}", file=sys.stderr)
        JobTimeline(logs, missing).export_chrome_trace(path)


def _own_log(clock, rank: int, failed: bool) -> RankLog:
    """The log of this rank, without collectives that never end."""
    if not failed:
        with contextlib.suppress(dist.DistBackendError):
            return log_of(clock, rank)
    return log_of(clock, rank, settle=False)


def _hand_in(board: Board, log: RankLog) -> None:
    words = zlib.compress(pickle.dumps(log), level=1)
    pieces = [words[i : i + _PIECE] for i in range(0, len(words), _PIECE)]
    for number, piece in enumerate(pieces):
        board.post(f"timeline/{log.rank}/{number}", piece)
    board.post(f"timeline/{log.rank}", len(pieces))


def _collect(board: Board, seconds: float) -> dict[int, RankLog | str]:
    """The logs of the other ranks, or why one has none.

    torchrun asks a rank to end when another one has failed: then it does not wait long.
    """
    found: dict[int, RankLog | str] = {}
    end = [time.monotonic() + seconds]

    def hurry(*_) -> None:
        end[0] = min(end[0], time.monotonic() + _HURRY)

    signal.signal(signal.SIGTERM, hurry)
    left = [rank for rank in range(board.size) if rank != board.rank]
    try:
        while left:
            for rank in left:
                alive = board.is_alive(rank)  # before: it may hand it in and end
                if board.store.check([f"timeline/{rank}"]):
                    found[rank] = _take(board, rank)
                elif not alive:
                    found[rank] = _DIED
                elif time.monotonic() > end[0]:
                    found[rank] = _LATE
            left = [rank for rank in left if rank not in found]
            if left:
                time.sleep(_LOOK)
    except RuntimeError:  # the store is gone
        found |= {rank: _LATE for rank in left if rank not in found}
    return found


def _take(board: Board, rank: int) -> RankLog:
    def at(key: str):
        return pickle.loads(board.store.get(key))

    count = at(f"timeline/{rank}")
    words = b"".join(at(f"timeline/{rank}/{number}") for number in range(count))
    return pickle.loads(zlib.decompress(words))
