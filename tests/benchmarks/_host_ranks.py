"""Ranks on two hosts that a slow cable connects, for a benchmark to give tasks to.

Each rank is a process on a host of its own (notebooks/scripts/two_hosts.py: a network
namespace with a virtual card, and `tc` lets no more than a given rate through, each
way). So the link is slow for real: nothing is simulated, and gloo's own TCP runs over
it. Needs root, Linux, and the commands `ip` and `tc`. The hosts go when the program
ends, also when it fails. What it leaves out is latency: a veth has nearly none.
"""

import argparse
import datetime
import json
import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
sys.path.insert(0, str(NOTEBOOKS))
from scripts.two_hosts import TwoHosts, why_not  # noqa: E402

BATCH = 1024  # rows of both ranks together


# -- a rank ----------------------------------------------------------------------------


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
