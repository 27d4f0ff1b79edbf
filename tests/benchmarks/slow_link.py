#!/usr/bin/env python3
"""A step of DistributedDataParallel when the link between its two ranks is slow.

    sudo python tests/benchmarks/slow_link.py [--rounds 7] [--output FILE]

Each rank is a process in a network namespace of its own. A pair of virtual network
cards (veth) joins the two, and `tc` lets no more than a given rate through in each
direction. So the link is slow for real: nothing is simulated, and gloo's own TCP runs
over it. Needs root, Linux, and the commands `ip` and `tc`. The namespaces go when the
program ends, also when it fails. A round takes about 70 seconds.

What it measures, for networks of several widths and the same batch: a step of one
process alone with the whole batch; a step of each rank with half of it and no
messages; a step with DDP, at each rate. Beside them, the time of an all-reduce of one
number, and what the link carries. Every figure is the lower quartile of its calls,
and the best of all rounds, because other programs on the machine only ever add.
`own` is DDP's own time: a step of the smallest model with the link as it is, less half
the batch and a message. What it leaves out is latency: a veth has nearly none.

It writes a file that lesson 13-average-gradients draws. The stored one has 7 rounds,
made in one run while the machine had little else to do.
"""

import argparse
import contextlib
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

WIDTHS = (16, 64, 256, 1024, 2048)
BATCH = 1024  # rows of both ranks together
RATES = (100, 300, 1000, None)  # Mbit/s in each direction; None: as it is
OUTPUT = Path(__file__).parents[2] / "notebooks" / "scripts" / "slow_link.json"
SECONDS = 1.0  # to spend on each figure
STORE = Path("store")


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


def be_rank(rank: int, card: str, folder: str) -> None:
    """Do the tasks named on stdin and answer each with a line of JSON."""
    os.environ["GLOO_SOCKET_IFNAME"] = card
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / STORE), 2)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    for line in sys.stdin:
        print(json.dumps(TASKS[line.strip()]()), flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo may abort the process while Python shuts down


# -- the two namespaces ----------------------------------------------------------------


class TwoPlaces:
    """Two network namespaces, joined by a pair of virtual cards.

    Everything has this process's id in its name; leaving the context removes it.
    """

    def __init__(self):
        self.spaces = [f"slow{os.getpid()}-{r}" for r in range(2)]
        self.cards = [f"v{os.getpid()}-{r}" for r in range(2)]
        self.ranks: list[subprocess.Popen] = []

    def __enter__(self) -> "TwoPlaces":
        try:
            for space in self.spaces:
                _do("ip", "netns", "add", space)
            one, other = self.cards
            _do("ip", "link", "add", one, "type", "veth", "peer", "name", other)
            for r, (space, card) in enumerate(
                zip(self.spaces, self.cards, strict=True)
            ):
                _do("ip", "link", "set", card, "netns", space)
                inside = ("ip", "-n", space)
                _do(*inside, "addr", "add", f"10.99.7.{r + 1}/24", "dev", card)
                _do(*inside, "link", "set", card, "up")
                _do(*inside, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # a second one must not stop this
        for rank in self.ranks:
            rank.kill()
            rank.wait(10)
        for space in self.spaces:  # its cards go with it
            with contextlib.suppress(subprocess.CalledProcessError):
                _do("ip", "netns", "del", space)
        with contextlib.suppress(subprocess.CalledProcessError):
            _do("ip", "link", "del", self.cards[0])  # if it never got into its space

    def start(self, folder: str) -> None:
        """Start a rank in each namespace."""
        for r, (space, card) in enumerate(zip(self.spaces, self.cards, strict=True)):
            command = ["ip", "netns", "exec", space, sys.executable, __file__]
            command += ["--rank", str(r), "--card", card, "--folder", folder]
            pipe = subprocess.PIPE
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.ranks.append(
                subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, text=True, env=environment
                )
            )

    def limit(self, rate: int | None) -> None:
        """Let no more than `rate` Mbit/s through, in each direction."""
        for space, card in zip(self.spaces, self.cards, strict=True):
            at = ("qdisc", "dev", card, "root")
            tc = ("tc", "-n", space, at[0])
            with contextlib.suppress(subprocess.CalledProcessError):
                _do(*tc, "del", *at[1:])
            if rate is not None:
                # Bytes that pass at full speed after a pause: less than the messages
                # that are measured. Above 1 Gbit/s so few would slow the link further.
                burst = max(2_000, rate * 8)  # what passes in 64 us
                shape = ("tbf", "rate", f"{rate}mbit", "burst", str(burst))
                # room for 2 s in the queue, so that nothing is dropped
                _do(*tc, "add", *at[1:], *shape, "latency", "2s")

    def ask(self, task: str):
        """What rank 0 answers when both ranks do a task."""
        for rank in self.ranks:
            rank.stdin.write(f"{task}\n")
            rank.stdin.flush()
        answers = [rank.stdout.readline() for rank in self.ranks]
        if not all(answers):
            raise SystemExit(f"a rank ended during {task!r}")
        return json.loads(answers[0])


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


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
    with tempfile.TemporaryDirectory() as folder, TwoPlaces() as places:
        places.start(folder)
        for _ in range(count):
            found = {"compute": places.ask("compute")}
            for rate in RATES:
                places.limit(rate)
                found[str(rate)] = {**places.ask("link"), "ddp": places.ask("steps")}
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


def main() -> None:
    parser = argparse.ArgumentParser(description="DDP over a slow link.")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--rounds", type=int, default=5)
    for name, kind in (("rank", int), ("card", str), ("folder", Path)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        be_rank(args.rank, args.card, args.folder)
    if sys.platform != "linux" or os.geteuid() != 0:
        parser.error("this needs Linux and root")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and clean up
    text = json.dumps(summary(measure(args.rounds)), indent=1)
    text = re.sub(r"\[[^\[\]{}]*\]", lambda row: " ".join(row[0].split()), text)
    args.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
