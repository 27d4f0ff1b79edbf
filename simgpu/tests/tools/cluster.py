"""What a cluster on simulated GPUs costs: a GPT with FSDP2 and tensor parallel.

    python tests/tools/cluster.py [--ranks 8] [--steps 10]

Prints seconds from the command to its end, seconds a step, and the memory (PSS) of all
processes at its peak, for `tests/scripts/cluster/fsdp2_tp_gpt.py` under torchrun. A
benchmark, not a test: nothing is asserted. Linux only, as PSS is.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

SCRIPT = Path(__file__).parents[1] / "scripts" / "cluster" / "fsdp2_tp_gpt.py"


def memory_of(process: psutil.Process) -> int:
    """Bytes (PSS) of a process and all below it."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_full_info().pss
        except psutil.Error:  # it has just ended
            continue
    return total


def watch(process: subprocess.Popen, found: list[int]) -> None:
    """Note the memory of the processes twice a second, until they end."""
    parent = psutil.Process(process.pid)
    while process.poll() is None:
        try:
            found.append(memory_of(parent))
        except psutil.NoSuchProcess:
            return
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    command = [
        sys.executable, "-m", "torch.distributed.run",
        f"--nproc-per-node={args.ranks}", "-m", "simgpu", str(SCRIPT),
        f"--steps={args.steps}",
    ]  # fmt: skip
    start = time.perf_counter()
    process = subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    found: list[int] = []
    watcher = threading.Thread(target=watch, args=(process, found))
    watcher.start()
    output, _ = process.communicate(timeout=600)
    watcher.join()
    print(output, end="")
    seconds, peak = time.perf_counter() - start, max(found, default=0)
    cost = f"{seconds:.1f} s in all, {peak / 2**30:.2f} GiB at the peak"
    done = f"exit status {process.returncode}"
    print(f"{args.ranks} ranks, {args.steps} steps: {cost}, {done}")


if __name__ == "__main__":
    main()
