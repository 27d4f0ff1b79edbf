"""Start two processes in one of five ways, and see what becomes of an error.

    python launch_ways.py mp.spawn raises

Process 1 raises an error, or is killed. Process 0 works for three seconds more, and
then writes a file. The functions with `by_` are the ways. Used in
lesson 14.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path


def work(rank, how):
    if rank == 0:
        while not Path("failing").exists():
            time.sleep(0.05)
        time.sleep(3)
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
        worker.join(60)
    print("exit codes", [worker.exitcode for worker in workers])


def by_pool(how):
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        pool.starmap_async(work, [(0, how), (1, how)], chunksize=1).get(timeout=8)


def by_executor(how):
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        list(pool.map(work, [0, 1], [how, how], timeout=60))


def by_mp_spawn(how):
    import torch.multiprocessing as mp

    mp.spawn(work, args=(how,), nprocs=2)


def by_torchrun(how):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", __file__, "as a rank", how]
    done = subprocess.run(command, timeout=60)
    print("exit code", done.returncode)


WAYS = {
    "Process": by_process,
    "Pool": by_pool,
    "ProcessPoolExecutor": by_executor,
    "mp.spawn": by_mp_spawn,
    "torchrun": by_torchrun,
}

if __name__ == "__main__":
    way, how = sys.argv[1:3]
    if way == "as a rank":
        work(int(os.environ["RANK"]), how)
    else:
        try:
            WAYS[way](how)
        except Exception as error:
            told = "in work" in f"{error}{error.__cause__}"
            print(type(error).__name__ + " with traceback" * told)
