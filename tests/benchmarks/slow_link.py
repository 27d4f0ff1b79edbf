#!/usr/bin/env python3
"""A step of DistributedDataParallel when the link between its two ranks is slow.

    sudo python tests/benchmarks/slow_link.py [--rounds 7] [--output FILE]

Each rank is a process on a host of its own (notebooks/scripts/two_hosts.py: a network
namespace with a virtual card, and `tc` lets no more than a given rate through, each
way). So the link is slow for real: nothing is simulated, and gloo's own TCP runs over
it. Needs root, Linux, and the commands `ip` and `tc`. The hosts go when the program
ends, also when it fails. A round takes about 70 seconds.

What it measures, for networks of several widths and the same batch: a step of one
process alone with the whole batch; a step of each rank with half of it and no
messages; a step with DDP, at each rate. Beside them, the time of an all-reduce of one
number, and what the link carries. Every figure is the lower quartile of its calls,
and the best of all rounds, because other programs on the machine only ever add.
`own` is DDP's own time: a step of the smallest model with the link as it is, less half
the batch and a message. What it leaves out is latency: a veth has nearly none.

It writes a file that lesson 17-keep-ranks-in-step draws. The stored one has 7 rounds,
made in one run while the machine had little else to do.
"""

import argparse
import datetime
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
sys.path.insert(0, str(NOTEBOOKS))
from scripts.two_hosts import TwoHosts, why_not  # noqa: E402

WIDTHS = (16, 64, 256, 1024, 2048)
BATCH = 1024  # rows of both ranks together
RATES = (100, 300, 1000, None)  # Mbit/s in each direction; None: as it is
OUTPUT = NOTEBOOKS / "scripts" / "slow_link.json"
SECONDS = 1.0  # to spend on each figure


# -- a rank ----------------------------------------------------------------------------


def network(width: int) -> nn.Sequential:
    """Digits in, ten classes out, two hidden layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 10),
    )  # fmt: skip


def training_step(model: nn.Module, rows: int):
    """A function that takes one step with so many rows."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.rand(rows, 64, generator=generator)
    y = torch.randint(0, 10, (rows,), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def quick_seconds(call, together: bool) -> float:
    """The lower quartile of as many calls as fit into SECONDS, at least 5.

    Args:
        call: what to time.
        together: whether the ranks take their steps at the same time. They then agree
            on the number of calls.
    """
    for _ in range(3):
        call()
    begin = time.perf_counter()
    call()
    count = torch.tensor([SECONDS / (time.perf_counter() - begin)])
    if together:
        dist.all_reduce(count, op=dist.ReduceOp.MIN)
        dist.barrier()
    times = []
    for _ in range(max(5, min(500, int(count)))):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.quantiles(times, n=4)[0]


def steps_with_ddp() -> list[float]:
    """Seconds of a step of both ranks, for each width."""
    found = []
    for width in WIDTHS:
        model = DistributedDataParallel(network(width))
        found.append(quick_seconds(training_step(model, BATCH // 2), True))
    return found


def steps_without_messages() -> dict[str, list[float]]:
    """Seconds of a step of one process alone, and of two with half the rows each."""
    alone, half = [], []
    for width in WIDTHS:
        if dist.get_rank() == 0:
            alone.append(quick_seconds(training_step(network(width), BATCH), False))
        dist.barrier()
        half.append(quick_seconds(training_step(network(width), BATCH // 2), True))
    return {"alone": alone, "half": half}


def link() -> dict[str, float]:
    """Seconds of an all-reduce of one number, and of 2 MiB.

    With two ranks each sends as many bytes as the tensor has.
    """
    one, many = torch.ones(1), torch.ones(2**19)
    return {
        "one_number": quick_seconds(lambda: dist.all_reduce(one), True),
        "two_mib": quick_seconds(lambda: dist.all_reduce(many), True),
    }


TASKS = {"steps": steps_with_ddp, "link": link, "compute": steps_without_messages}


def be_rank(tasks: dict, rank: int, each: int, folder: str) -> None:
    """Do the tasks named on stdin, with arguments; answer each with a line of JSON."""
    torch.set_num_threads(1)
    size = 2 * each
    store = dist.FileStore(f"{folder}/store-{size}", size)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=limit
    )
    for line in sys.stdin:
        name, *arguments = line.split()
        print(json.dumps(tasks[name](*arguments)), flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo may abort the process while Python shuts down


# -- both ranks ------------------------------------------------------------------------


class Ranks:
    """A rank, or more, on each of two hosts; they do tasks that they are asked to.

    Args:
        hosts: where they live, and die.
        program: what they are, with `--rank` and `--folder`; it calls `be_rank`.
        folder: to meet in.
        each: how many on a host.
    """

    def __init__(self, hosts: TwoHosts, program: str, folder: str, each: int = 1):
        pipe = subprocess.PIPE
        options = {"stdin": pipe, "stdout": pipe, "stderr": None, "text": True}
        self.ranks = []
        for rank in range(2 * each):
            command = [sys.executable, program, "--folder", folder]
            command += ["--rank", str(rank), "--each", str(each)]
            self.ranks.append(hosts[rank // each].start(*command, **options))

    def ask(self, task: str):
        """What rank 0 answers when all ranks do a task."""
        for rank in self.ranks:
            rank.stdin.write(f"{task}\n")
            rank.stdin.flush()
        answers = [rank.stdout.readline() for rank in self.ranks]
        if not all(answers):
            raise SystemExit(f"a rank ended during {task!r}")
        return json.loads(answers[0])


def hardware() -> str:
    """The name of this machine's processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{os.cpu_count()} cores of {line.partition(': ')[2]}"
    return f"{os.cpu_count()} cores of {platform.machine()}"


def best(rounds: list):
    """The smallest of each figure over the rounds; figures stand in lists and dicts."""
    first = rounds[0]
    if isinstance(first, dict):
        return {name: best([each[name] for each in rounds]) for name in first}
    if isinstance(first, list):
        return [best(list(each)) for each in zip(*rounds, strict=True)]
    return round(min(rounds), 6)


def measure(count: int) -> list[dict]:
    """The figures of every round."""
    rounds = []
    with tempfile.TemporaryDirectory() as folder, TwoHosts() as hosts:
        ranks = Ranks(hosts, __file__, folder)
        for _ in range(count):
            found = {"compute": ranks.ask("compute")}
            for rate in RATES:
                hosts.limit(rate)
                found[str(rate)] = {**ranks.ask("link"), "ddp": ranks.ask("steps")}
            rounds.append(found)
            print(found, flush=True)
    return rounds


def summary(rounds: list[dict]) -> dict:
    """What the file holds."""
    models = [network(width) for width in WIDTHS]
    figures = best(rounds)
    rates = []
    for rate in RATES:
        row = figures[str(rate)]
        carries = 2**21 / (row["two_mib"] - row["one_number"])  # bytes a second
        mbit = rate or round(carries / 125_000)
        rates.append({"mbit": mbit, "limited": rate is not None, **row})
    free = figures[str(None)]
    own = free["ddp"][0] - figures["compute"]["half"][0] - free["one_number"]
    return {
        "hardware": hardware(), "torch": torch.__version__, "backend": "gloo",
        "link": "veth between two network namespaces, tc qdisc tbf",
        "rounds": len(rounds), "ranks": 2, "threads": 1,
        "batch": BATCH, "widths": WIDTHS,
        "parameters": [sum(p.numel() for p in m.parameters()) for m in models],
        "seconds": figures["compute"], "own": round(own, 6), "rates": rates,
    }  # fmt: skip


def write(path: Path, content: dict) -> None:
    """As JSON; a list of figures on one line."""
    text = json.dumps(content, indent=1)
    text = re.sub(r"\[[^\[\]{}]*\]", lambda row: " ".join(row[0].split()), text)
    path.write_text(text + "\n", encoding="utf-8")


def options(description: str, output: Path, rounds: int, tasks: dict):
    """What was asked for on the command line; a rank does not come back from here."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, default=output)
    parser.add_argument("--rounds", type=int, default=rounds)
    for name, kind in (("rank", int), ("each", int), ("folder", str)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        be_rank(tasks, args.rank, args.each, args.folder)
    if reason := why_not():
        parser.exit(2, f"{reason}\n")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and clean up
    return args


def main() -> None:
    args = options("DDP over a slow link.", OUTPUT, 5, TASKS)
    write(args.output, summary(measure(args.rounds)))


if __name__ == "__main__":
    main()
