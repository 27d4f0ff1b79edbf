"""What ranks cost to start, to keep and to call, beside other ways to launch them.

    python tests/benchmarks/ranks_start.py [RANKS]

Prints, for `helpers.Ranks`, ipyparallel (if it is installed) and
`torch.multiprocessing.spawn`: seconds to the first all-reduce, memory (PSS) of all
processes after a DDP step, this one included, and milliseconds of a warm call. Each way
runs in a fresh process, which does not import PyTorch before it has to. Linux only, as
PSS is.
"""

import multiprocessing
import os
import subprocess
import sys
import time

import psutil


def reduce() -> float:
    """One all-reduce: the sum of the ranks' numbers."""
    import torch
    import torch.distributed as dist

    x = torch.full((1,), float(dist.get_rank()))
    dist.all_reduce(x)
    return x.item()


def step() -> None:
    """A training step of DistributedDataParallel."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    layers = (torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()


def pss() -> float:
    """MB of this process and its descendants, shared pages counted once."""
    me = psutil.Process()
    everyone = [me, *me.children(recursive=True)]
    return sum(p.memory_full_info().pss for p in everyone) / 2**20


def report(name: str, start: float, memory: float, call: float) -> None:
    print(f"{name:22}{start:8.2f} s{memory:8.0f} MB{call * 1e3:10.1f} ms", flush=True)


def timed(function, *args) -> float:
    begin = time.perf_counter()
    function(*args)
    return time.perf_counter() - begin


def ours(size: int) -> None:
    from helpers import Ranks

    begin = time.perf_counter()
    ranks = Ranks(size)
    assert ranks.run(reduce) == [size * (size - 1) / 2] * size
    start = time.perf_counter() - begin
    ranks.run(step)
    memory = pss()
    call = min(timed(ranks.run, reduce) for _ in range(5))
    report("helpers.Ranks", start, memory, call)
    ranks.close()
    again = timed(lambda: Ranks(size).run(reduce))
    print(f"{'  opened again':22}{again:8.2f} s", flush=True)


def with_ipyparallel(size: int) -> None:
    import ipyparallel

    def join(folder: str, rank: int, size: int) -> None:
        import torch.distributed as dist

        store = dist.FileStore(f"{folder}/store", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

    import tempfile

    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        with ipyparallel.Cluster(n=size, log_level=40) as client:
            view = client[:]
            view.map_sync(join, [folder] * size, range(size), [size] * size)
            assert view.apply_sync(reduce) == [size * (size - 1) / 2] * size
            start = time.perf_counter() - begin
            view.apply_sync(step)
            memory = pss()
            call = min(timed(view.apply_sync, reduce) for _ in range(5))
    report("ipyparallel", start, memory, call)


def _spawned(rank: int, folder: str, size: int, queue) -> None:
    import torch.distributed as dist

    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    reduce()
    queue.put("reduced")
    step()
    queue.put("stepped")
    dist.barrier()
    time.sleep(1.5)  # the parent looks at our memory
    dist.destroy_process_group()
    os._exit(0)


def with_spawn(size: int) -> None:
    import tempfile

    begin = time.perf_counter()
    import torch.multiprocessing as mp

    queue = mp.get_context("spawn").Queue()
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(_spawned, (folder, size, queue), size, join=False)
        for _ in range(size):
            assert queue.get(timeout=120) == "reduced"
        start = time.perf_counter() - begin
        for _ in range(size):
            assert queue.get(timeout=120) == "stepped"
        memory = pss()
        while not context.join(60):
            pass
    report("mp.spawn (no calls)", start, memory, float("nan"))


WAYS = {"ours": ours, "ipyparallel": with_ipyparallel, "spawn": with_spawn}


def main() -> None:
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    if len(sys.argv) > 2:
        WAYS[sys.argv[2]](size)
        return
    cores = multiprocessing.cpu_count()
    print(f"{size} ranks, {cores} cores\n{'':22}  start    memory   warm call")
    for way in WAYS:
        command = [sys.executable, __file__, str(size), way]
        result = subprocess.run(command, timeout=300, stderr=subprocess.PIPE, text=True)
        if result.returncode:
            last = result.stderr.strip().splitlines()[-1:]
            print(f"{way:22}did not run: {' '.join(last)}")


if __name__ == "__main__":
    main()
