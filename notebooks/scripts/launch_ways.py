"""Start two processes in one of five ways, and see what becomes of an error.

    python launch_ways.py mp.spawn raises
    python launch_ways.py

Process 1 raises an error, or is killed. Process 0 works for ten seconds more, and
then writes a file. The functions with `by_` are the ways. Without arguments, they
are all tried, and two tables are printed. Used in lesson 14.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path


def work(rank, how):
    if rank == 0:
        while not Path("failing").exists():
            time.sleep(0.05)
        time.sleep(10)
        Path("finished").touch()
        return
    Path("failing").touch()
    if how == "raises":
        raise ValueError("bad batch")
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def by_process(how):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(rank, how)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    print("exit codes", [worker.exitcode for worker in workers])


def by_pool(how):
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        limit = 120 if how == "raises" else 15  # a killed worker is never noticed
        pool.starmap_async(work, [(0, how), (1, how)], chunksize=1).get(timeout=limit)


def by_executor(how):
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        list(pool.map(work, [0, 1], [how, how], timeout=120))


def by_mp_spawn(how):
    import torch.multiprocessing as mp

    mp.spawn(work, args=(how,), nprocs=2)


def by_torchrun(how):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", __file__, "as a rank", how]
    done = subprocess.run(command, timeout=150)
    print("exit code", done.returncode)


WAYS = {
    "Process": by_process,
    "Pool": by_pool,
    "ProcessPoolExecutor": by_executor,
    "mp.spawn": by_mp_spawn,
    "torchrun": by_torchrun,
}


def fate(way, how):
    """What the caller gets, and what becomes of worker 0."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, os.path.abspath(__file__), way, how]
        done = subprocess.run(
            command, cwd=place, capture_output=True, text=True, timeout=200
        )
        ends = "finishes" if Path(place, "finished").exists() else "is ended"
    return done.stdout.strip(), ends


def print_tables():
    """Three at a time, because five together take two gigabytes of memory."""
    jobs = [(way, how) for how in ("raises", "killed") for way in WAYS]
    with ThreadPoolExecutor(3) as pool:
        fates = dict(zip(jobs, pool.map(lambda job: fate(*job), jobs), strict=True))
    print("worker 1 raises an error     the caller gets          worker 0")
    for way in WAYS:
        told, ends = fates[way, "raises"]
        print(f"{way:29}{told:25}{ends}")
    print("worker 1 is killed           the caller gets")
    for way in WAYS:
        print(f"{way:29}{fates[way, 'killed'][0]}")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print_tables()
        sys.exit()
    way, how = sys.argv[1:3]
    if way == "as a rank":
        work(int(os.environ["RANK"]), how)
    else:
        try:
            WAYS[way](how)
        except Exception as error:
            print(type(error).__name__)
