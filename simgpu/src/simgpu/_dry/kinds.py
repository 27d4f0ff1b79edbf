"""Which ranks of a job run in a dry run, and how those that do run together.

Ranks that do the same are of one kind, and one of them is enough. Where ranks differ,
as the stages of a pipeline do, one of each kind runs, in a process of its own; in what
they call together they meet, as ranks on simulated GPUs do.
"""

import contextlib
import multiprocessing
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

from simgpu import _failures as failures
from simgpu._frames import is_program_code
from simgpu._loopback import listen, loopback_store

SAME = "same"
# That a rank may take to end once it has answered, or what all took if that is longer.
# Without an end by itself, what it has printed last is lost.
_SECONDS_TO_END = 10.0


class Kinds(NamedTuple):
    """What `--kinds` says.

    Attributes:
        ranks: that run, one for each kind.
        same: whether all others do what the one that runs does, messages included.
    """

    ranks: tuple[int, ...]
    same: bool = False


def parse(text: str | None, world: int, rank: int) -> Kinds:
    """Read `--kinds`.

    Args:
        text: "pp=4", for stages of as many ranks each, one after the other; "0,16,32",
            the ranks that run; "same"; or None.
        world: ranks of the job.
        rank: the one that runs; of stages, the one at its place in each.

    Raises:
        ValueError: with what to write instead.
    """
    if text is None or text == SAME:
        return Kinds((rank,), text == SAME)
    name, _, number = text.partition("=")
    if number:
        if not number.isdecimal() or not name or not int(number):
            raise ValueError(f"--kinds {text}: write pp=4, for four stages")
        stages = int(number)
        if world % stages:
            raise ValueError(
                f"--kinds {text}: {world} ranks cannot be shared equally by {stages}"
            )
        each = world // stages
        return Kinds(tuple(rank % each + stage * each for stage in range(stages)))
    try:
        ranks = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ValueError(
            f'--kinds {text}: write "pp=4" for stages, ranks such as "0,16", or "same"'
        ) from None
    wrong = [r for r in ranks if not 0 <= r < world]
    if wrong:
        raise ValueError(f"--kinds {text}: there is no rank {wrong[0]} among {world}")
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"--kinds {text}: a rank is named twice")
    return Kinds(ranks)


class KindFailed(RuntimeError):
    """The program failed in a process of its own, which has said why."""


def run_all(ranks: tuple[int, ...], run: Callable[[int, tuple[str, int]], Any]) -> list:
    """Run each rank in a process of its own.

    Args:
        ranks: of the kinds.
        run: what a process does, with its rank and where the ranks find their store;
            it is forked, so it may be any function. What it returns must be pickled.

    Returns:
        What `run` returned, for each rank; None where the program failed because
        another rank had run out of memory.

    Raises:
        KindFailed: if the program failed in one of them.
        NotImplementedError: where processes cannot be forked.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise NotImplementedError(
            "ranks of several kinds run in processes that are forked, which this "
            "system cannot; leave --kinds out, or use Linux"
        )
    context = multiprocessing.get_context("fork")
    processes, ends, begun = [], {}, time.monotonic()
    sys.stdout.flush(), sys.stderr.flush()
    listener = listen()
    where = listener.getsockname()
    try:
        for rank in ranks:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_become, args=(run, rank, where, theirs, listener)
            )
            process.start()
            theirs.close()
            processes.append(process)
            ends[ours] = rank
        # not before: its thread asks for names of hosts, under a lock of the C library,
        # and a process that is forked meanwhile would wait for that lock for ever
        store = loopback_store(listener)
        for end in ends:
            with contextlib.suppress(OSError):  # it has ended: `_collect` will say so
                end.send("begin")
        found = _collect(ranks, ends)
        del store  # until here it is needed
        return found
    finally:
        listener.close()
        took = time.monotonic() - begun
        for process in processes:
            to_end = max(_SECONDS_TO_END, took) if sys.exc_info()[0] is None else 0
            process.join(to_end)
            if process.is_alive():
                process.kill()
                process.join()


def own_part(error: BaseException):
    """The traceback from the program's first line on, without the simulator's lines."""
    own = error.__traceback__
    while own is not None and not is_program_code(own.tb_frame.f_code.co_filename):
        own = own.tb_next
    return failures.of_program(own or error.__traceback__)


def _become(run: Callable, rank: int, store: tuple[str, int], end: Connection,
            listener: socket.socket) -> None:  # fmt: skip
    """In a process of its own, which ends when the one that started it does."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    listener.close()
    end.recv()  # the store is there
    torch.set_num_threads(1)  # OpenMP's pool does not survive a fork
    try:
        end.send(("done", run(rank, store)))
    except KeyboardInterrupt:
        os._exit(130)
    except SystemExit as error:
        end.send(("failed", f"rank {rank} ended with exit status {error.code}"))
    except BaseException as error:
        lines = traceback.format_exception(type(error), error, own_part(error))
        end.send(("failed", f"rank {rank}:\n{''.join(lines).rstrip()}"))
    finally:
        end.close()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    wait([parent.sentinel])
    os._exit(1)


def _collect(ranks: tuple[int, ...], ends: dict[Connection, int]) -> list:
    found, failed = {}, []
    while ends:
        for end in wait(list(ends)):
            rank = ends.pop(end)
            try:
                what, value = end.recv()
            except EOFError:
                what, value = "failed", f"the process of rank {rank} has ended"
            if what == "failed":
                failed.append(value)
            else:
                found[rank] = value
    full = any(not report.fits for report in found.values())
    if failed and not full:
        raise KindFailed(failed[0])
    return [found.get(rank) for rank in ranks]
