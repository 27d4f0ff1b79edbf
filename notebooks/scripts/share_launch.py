"""Start processes, hear how they end, and leave nothing running.

A job is a function of the rank. Used in 09-share-tensors-between-processes. Needs fork.
"""

import contextlib
import logging
import os
import sys
import tempfile
import time
from multiprocessing import forkserver, resource_tracker

import psutil
import torch.multiprocessing as mp

from helpers import RankError

fork = mp.get_context("fork")
loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform, "lo")
os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # ranks talk on this machine


def own_megabytes() -> float:
    """Memory that this process shares with no other (USS)."""
    return psutil.Process().memory_full_info().uss / 1e6


def in_child(function, *args, seconds=20):
    here, there = fork.Pipe()

    def work():
        try:
            there.send(function(*args))
        except Exception as error:
            there.send(error)

    child = fork.Process(target=work)
    child.start()
    late = TimeoutError(f"no answer in {seconds} s")
    answer = here.recv() if here.poll(seconds) else late
    child.join(2)
    child.kill()  # if it has not ended by itself
    if isinstance(answer, Exception):
        raise answer
    return answer


def run_all(function, jobs) -> None:
    """Call the function for each job, each in a forked process."""
    processes = [fork.Process(target=function, args=job) for job in jobs]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        process.kill()


def echo(connection):
    while (message := connection.recv()) is not None:
        connection.send(message)


def round_trip(message) -> float:
    here, there = fork.Pipe()
    fork.Process(target=echo, args=(there,), daemon=True).start()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        here.send(message)
        here.recv()
        seconds.append(time.perf_counter() - start)
    here.send(None)
    return min(seconds)


@contextlib.contextmanager
def child_errors():
    """What processes write to stderr that start in this block, as an open file."""
    with tempfile.TemporaryFile("w+") as file, contextlib.redirect_stderr(file):
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        logging.disable(logging.WARNING)
        try:
            yield file
        finally:
            logging.disable(logging.NOTSET)
            os.dup2(stderr, 2)
            os.close(stderr)


def last_words(process) -> str:
    """Run a process, and return the last line that it writes to stderr."""
    with child_errors() as errors:
        process.start()
        process.join(20)
        process.kill()
        errors.seek(0)
        lines = errors.read().splitlines() or [""]
    return lines[-1].partition(" on <module")[0]


def by_process(method: str, job) -> str:
    context = mp.get_context(method)
    ranks = [context.Process(target=job, args=(rank,)) for rank in range(2)]
    for process in ranks:
        process.start()
    end = time.monotonic() + 30
    while any(p.exitcode is None for p in ranks) and time.monotonic() < end:
        time.sleep(0.01)
        if any(p.exitcode for p in ranks):  # one has failed: the other gets two seconds
            end = min(end, time.monotonic() + 2)
    codes = ["hangs" if p.exitcode is None else f"exit {p.exitcode}" for p in ranks]
    for process in ranks:
        process.kill()
        process.join()
    return "fine" if codes == ["exit 0"] * 2 else ", ".join(codes)


def by_mp_spawn(job) -> str:
    try:
        mp.spawn(job, nprocs=2)
    except mp.ProcessRaisedException as error:
        return str(error).strip().splitlines()[-1]
    except mp.ProcessExitedException as error:
        return f"exit {error.exit_code}"
    return "fine"


def by_ranks(ranks, job) -> str:
    def with_rank():
        import torch.distributed as dist

        job(dist.get_rank())

    try:
        ranks.run(with_rank)
    except RankError as error:
        lines = str(error).splitlines()
        return next((line for line in lines if "Error" in line), lines[0])
    return "fine"


def end_helpers() -> None:
    """End the processes that spawn and forkserver keep running.

    One of them ignores polite requests to end, and Jupyter would wait for it.
    """
    for helper in (forkserver._forkserver, resource_tracker._resource_tracker):
        stop = getattr(helper, "_stop", None)  # from Python 3.9 on
        if stop is not None:
            stop()
