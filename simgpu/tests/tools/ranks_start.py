"""What ranks cost to start, to keep and to call.

    python tests/tools/ranks_start.py [--ranks 4] [--device cpu]

On simulated GPUs, or on the CPU. Prints seconds to the first all-reduce, memory (PSS)
of all processes after a DDP step, this one included, milliseconds of a warm call, and
seconds to open ranks again. PyTorch is not imported here before the ranks need it.
Linux only, as PSS is.
"""

import argparse
import os
import time

import psutil

from simgpu import Ranks


def device() -> str:
    """In a rank: of its tensors."""
    import torch
    import torch.distributed as dist

    if dist.get_backend() == "gloo":
        return "cpu"
    torch.cuda.set_device(dist.get_rank())
    return "cuda"


def reduce() -> float:
    """One all-reduce: the sum of the ranks' numbers."""
    import torch
    import torch.distributed as dist

    x = torch.full((1,), float(dist.get_rank()), device=device())
    dist.all_reduce(x)
    return x.item()


def step() -> None:
    """A training step of DistributedDataParallel."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    layers = (torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 64, device=device())).sum().backward()
    optimizer.step()


def shared_out_megabytes() -> float:
    """PSS of this process and its descendants: shared pages are counted once."""
    me = psutil.Process()
    everyone = [me, *me.children(recursive=True)]
    return sum(p.memory_full_info().pss for p in everyone) / 2**20


def seconds(function, *args) -> float:
    """How long a call takes."""
    begin = time.perf_counter()
    function(*args)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description="What ranks cost.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    size, where = options.ranks, options.device
    begin = time.perf_counter()
    ranks = Ranks(size, device=where)
    assert ranks.run(reduce) == [size * (size - 1) / 2] * size
    start = time.perf_counter() - begin
    ranks.run(step)
    memory = shared_out_megabytes()
    call = min(seconds(ranks.run, reduce) for _ in range(5))
    ranks.close()
    again = min(
        seconds(lambda: Ranks(size, device=where).run(reduce)) for _ in range(5)
    )
    print(f"{size} ranks, {os.cpu_count()} cores: start {start:.2f} s, "
          f"memory {memory:.0f} MB, warm call {call * 1e3:.1f} ms, "
          f"opened again {again:.2f} s")  # fmt: skip


if __name__ == "__main__":
    main()
