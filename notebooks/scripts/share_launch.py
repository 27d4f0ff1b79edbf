"""Start processes, hear how they end, and leave nothing running.

A job is a function of a rank and of a folder that all ranks see. Used in
14-share-tensors-between-processes. Needs fork.
"""

import contextlib
import gc
import io
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil
import torch.multiprocessing as mp

from helpers import RankError

fork = mp.get_context("fork")
loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform, "lo")
os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # ranks talk on this machine
PATIENCE = 100  # seconds: on a busy machine a new process imports PyTorch for long


def own_megabytes() -> float:
    """Memory that this process shares with no other (USS)."""
    return psutil.Process().memory_full_info().uss / 1e6


def in_child(function, *args, seconds=PATIENCE):
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
    """Call the function for each job, each in a forked process.

    Raises:
        RuntimeError: if one of them fails, or takes longer than `PATIENCE`.
    """
    processes = [fork.Process(target=function, args=job) for job in jobs]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
        process.kill()  # if it has not ended by itself
        process.join()
    codes = [process.exitcode for process in processes]
    if any(codes):
        raise RuntimeError(f"workers ended with {codes}")


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
        process.join(PATIENCE)
        process.kill()
        errors.seek(0)
        lines = errors.read().splitlines() or [""]
    return lines[-1].partition(" on <module")[0]


# -- two ranks, and how they end ------------------------------------------------------


def watch(ranks) -> str:
    """Start two processes, and say how they end."""
    for process in ranks:
        process.start()
    end = time.monotonic() + PATIENCE
    while any(p.exitcode is None for p in ranks) and time.monotonic() < end:
        time.sleep(0.01)
        if any(p.exitcode for p in ranks):  # one has failed: the other gets two seconds
            end = min(end, time.monotonic() + 2)
    codes = [p.exitcode for p in ranks]
    if codes == [0, 0]:
        return "fine"
    if None in codes:
        return ", ".join("hangs" if code is None else f"exit {code}" for code in codes)
    return f"exit {codes[0]}, {codes[1]}"


def tell(way, job, folder: str) -> str:
    """Start two ranks in some way, say how they end, and leave none of them running."""
    before = set(mp.active_children())
    try:
        silent = contextlib.redirect_stdout(io.StringIO())
        with child_errors(), silent, stop_button(folder):
            answer = way(job, folder)
    except mp.ProcessRaisedException as error:
        return str(error).strip().splitlines()[-1]
    except mp.ProcessExitedException as error:
        return f"exit {error.exit_code}"
    except RankError as error:
        lines = str(error).splitlines()
        return next((line for line in lines if "Error" in line), lines[0])
    except KeyboardInterrupt:
        alive = still_running(folder)
        return f"{alive} run on" if alive else "all ended"
    finally:
        for process in set(mp.active_children()) - before:
            process.kill()
            process.join()
    return answer if isinstance(answer, str) else "fine"


@contextlib.contextmanager
def stop_button(folder: str):
    """Press Jupyter's stop button half a second after both ranks are at work.

    They are when each has written its process number into the folder; a job that writes
    none is not interrupted.
    """
    done = threading.Event()

    def press():
        while len(process_numbers(folder)) < 2:
            if done.wait(0.02):
                return
        if done.wait(0.5):
            return
        if os.getpgrp() == os.getpid():  # a kernel: all processes of its group
            os.killpg(os.getpgrp(), signal.SIGINT)
        else:
            os.kill(os.getpid(), signal.SIGINT)

    finger = threading.Thread(target=press)
    finger.start()
    try:
        yield
    finally:
        done.set()
        finger.join()


def process_numbers(folder: str) -> list[int]:
    texts = [path.read_text() for path in Path(folder).glob("rank*")]
    return [int(text) for text in texts if text.strip()]


def still_running(folder: str) -> int:
    """How many of the ranks have not ended after a second."""
    numbers = process_numbers(folder)
    for _ in range(10):
        mp.active_children()  # takes note of those that have ended
        alive = sum(map(is_alive, numbers))
        if not alive:
            break
        time.sleep(0.1)
    return alive


def is_alive(number: int) -> bool:
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_helpers() -> None:
    """End the processes that spawn and forkserver keep running.

    One of them ignores polite requests to end, and Jupyter would wait for it.
    """
    gc.collect()  # a pool that is still there would miss them when it goes
    for helper in (forkserver._forkserver, resource_tracker._resource_tracker):
        stop = getattr(helper, "_stop", None)  # from Python 3.9 on
        if stop is not None:
            stop()
