"""The instruments of 25-leave-one-machine: two machines played by this one, tables.

    with two_machines(("127.0.0.1", "127.0.0.2"), "train_elastic.py", …) as job: …
    on_one_machine(steps)      # the weights of the same training, in two ranks of ours
    start_line("slurm.sbatch") # what a file for a cluster starts

Not a program to launch. `two_hosts.py` makes two hosts with a network between them.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import tempfile
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from torch.distributed import TCPStore

from helpers import Job, Ranks, draw
from scripts import plan
from scripts import train_elastic as script

HERE = Path(__file__).parent
RECORDINGS = HERE.parents[1] / "tests" / "recordings"
GPUS = 8, 16, 24, 64, 512, 1024

# -- two machines ----------------------------------------------------------------------


def picture() -> draw.Picture:
    """Two machines of eight GPUs, and the cable between their network cards."""
    found = draw.Picture(700, 170, "Two machines of eight GPUs, joined by a cable")
    for machine in (0, 1):
        x = 8 + 390 * machine
        found.box(x, 8, 294, 150, fill="#F7F7F7")
        found.text(x + 12, 30, f"machine {machine}", weight="bold")
        for gpu in range(8):
            left, top = x + 12 + 68 * (gpu % 4), 42 + 56 * (gpu // 4)
            found.box(left, top, 60, 40, draw.COLOURS[machine])
            found.text(left + 30, top + 25, f"GPU {gpu}", 13, "middle")
    found.line(302, 86, 398, 86, stroke=draw.COLOURS[5])
    found.text(350, 76, "network card", 13, "middle")
    return found


def loopback_store() -> TCPStore:
    """A store that only this machine can reach, at any free port.

    With an address alone, `TCPStore` listens at every address of the machine.
    """
    door = socket.create_server(("127.0.0.1", 0))
    port = door.getsockname()[1]
    how = {"is_master": True, "wait_for_workers": False}
    return TCPStore("127.0.0.1", port, **how, master_listen_fd=door.detach())


def two_machines(addresses: tuple[str, str], *words: str, **options) -> Job:
    """A job of two agents, each of which says that it lives at an address.

    Both are on this machine. The first hosts the rendezvous.

    Args:
        addresses: of the two, for `--local-addr`.
        words: the script and its arguments.
        options: of `Job`.
    """
    job = Job(*words, nodes=2, **options)
    plain = job.command
    for address in addresses:
        mine = f"--local-addr={address}"
        job.command = [mine if "--local-addr" in word else word for word in plain]
        job.add()
    return job


def on_one_machine(steps: int) -> list[torch.Tensor]:
    """The weights after the same training in two ranks of this notebook."""
    with tempfile.TemporaryDirectory() as folder, Ranks(2, device="cpu") as ranks:
        ranks.run(_train, folder, steps)
        return list(torch.load(f"{folder}/weights.pt").values())


def _train(folder: str, steps: int) -> None:
    args = argparse.Namespace(folder=Path(folder), steps=steps, batch=120, every=100)
    args.hold, args.trouble, args.at, args.of = (), None, 0, 0
    script.train(args, script.Log(args.folder))


# -- files for clusters ----------------------------------------------------------------

_OF_SSH = "RANKS", "PORT", "TORCHRUN"  # ssh.sh takes these from its environment
_FROM = {"slurm.sbatch": "srun ", "kubeflow.yaml": "    command:"}


def start_line(name: str) -> str:
    """The lines of a file for a cluster that start the agents."""
    if name == "ssh.sh":
        return _dry_run("host0", "host1")
    lines = (HERE / "cluster" / name).read_text(encoding="utf-8").splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(_FROM[name]))
    return "\n".join(lines[begin:])


def _dry_run(*hosts: str) -> str:
    """What ssh.sh would run on each host, a few words in a line."""
    folders = {"FOLDER": "/shared", "COURSE": "/course"}
    settings = {"SSH": "echo", "JOB": "digits", **folders}
    plain = {k: v for k, v in os.environ.items() if k not in _OF_SSH}
    done = subprocess.run(
        ["bash", HERE / "cluster" / "ssh.sh", *hosts], env=plain | settings,
        capture_output=True, text=True, timeout=20, check=True,
    )  # fmt: skip
    found = []
    for line in sorted(done.stdout.splitlines()):  # each host writes when it likes
        host, _, command = line.partition(" ")
        found.append(f"ssh {host}")
        command = command.replace(" --", "\n--").replace(" .venv", "\n.venv")
        for word in command.splitlines():
            if len(found[-1]) + len(word) > 80:
                found.append("   ")
            found[-1] += f" {word}"
    return "\n".join(line.rstrip() for line in found)


# -- tables ----------------------------------------------------------------------------


def show_table(title: str, function, unit: float = 1) -> None:
    """A row for each model, a column for each number of GPUs.

    Numbers have two digits after the point if all are below 100, else one.

    Args:
        title: what the numbers are, and in what unit.
        function: of a model's name and a number of GPUs.
        unit: what its numbers are divided by.
    """
    print(f"{title:18}", *(f"{gpus:6}" for gpus in GPUS), " GPUs")
    names = "1B", "7B", "70B"
    rows = [[float(function(name, n)) / unit for n in GPUS] for name in names]
    digits = 2 if max(map(max, rows)) < 100 else 1
    for name, row in zip(names, rows, strict=True):
        print(f"{name:>18}", *(f"{number:6.{digits}f}" for number in row))


def show_seconds(sent: float, networks: tuple[int, ...]) -> None:
    """How long so many bytes take at each number of Gbit/s."""
    for gigabit in networks:
        print(f"{gigabit:5} Gbit/s: {sent / (gigabit * 1e9 / 8):6.2f} s")


def show_tracked(
    by_hand, jobs: list[tuple[str, int]], tracked: list[plan.Bytes]
) -> None:
    """Bytes by hand, by `plan`'s arithmetic and by PyTorch's tracker.

    Args:
        by_hand: of a model's name and a number of GPUs; returns bytes.
        jobs: names and numbers.
        tracked: of each job.
    """
    print("GB            by hand  plan  tracked = states + activations + other")
    for job, found in zip(jobs, tracked, strict=True):
        states = found["weights"] + found["gradients"] + found["optimizer"]
        columns = (
            (by_hand(*job), 7), (plan.bytes_per_gpu(*job).total, 6), (found.total, 9),
            (states, 9), (found["activations"], 14), (found["other"], 8),
        )  # fmt: skip
        words = "".join(f"{float(n) / 1e9:{wide}.1f}" for n, wide in columns)
        print(f"{job[0]:>3}, {job[1]:4} GPUs{words}")
        print(f"      most in the {found.moment}")
    print()


def show_published() -> None:
    """`plan.compare`, a line for each run, and below it tables of others in short."""
    print(f"{'':28}tokens/s of each GPU{'MFU':>10}{'GB':>12}")
    print(f"{'':26} measured planned  error   measured, planned")
    for row in plan.compare():
        measured, planned = row["tokens/s"]
        line = f"{row['name']:26}{measured:9,.0f}{planned:8,.0f}"
        line += f"{planned / measured - 1:+7.0%}".replace("-0%", " 0%")
        mfu = "" if row["MFU"] is None else "{:9.2f}{:5.2f}".format(*row["MFU"])
        size = "" if row["GB"] is None else "{:7.0f}{:5.0f}".format(*row["GB"])
        print(f"{line}{mfu:14}{size}".rstrip())
    print("\nplanned / measured:      rows  median  from    to  within 1.15")
    for name, ratios in _ratios().items():
        near = sum(1 / 1.15 <= ratio <= 1.15 for ratio in ratios)
        numbers = (statistics.median(ratios), min(ratios), max(ratios))
        print(f"{name:23}{len(ratios):6}", end="")
        print("{:8.2f}{:6.2f}{:6.2f}".format(*numbers), f"{near:8}")


def _ratios() -> dict[str, list[float]]:
    """Of all published runs, fitted or not by their model: planned over measured."""
    ratios: dict[str, list[float]] = {"runs of models fitted": [], "all others": []}
    fitted, others = ratios.values()
    for row in plan.compare():
        measured, planned = row["tokens/s"]
        (fitted if row["fitted"] else others).append(planned / measured)
    for path in sorted(RECORDINGS.glob("train_*.json")):
        recording = json.loads(path.read_text(encoding="utf-8"))
        for _, planned, measured, is_fitted in plan.predict_published(recording):
            (fitted if is_fitted else others).append(planned / measured)
    return ratios


# -- the stored measurement ------------------------------------------------------------


def stored() -> dict:
    """What `tests/benchmarks/two_hosts_link.py` has measured."""
    return json.loads((HERE / "two_hosts.json").read_text(encoding="utf-8"))


def _limited(found: dict) -> dict[tuple[int, str], list[dict]]:
    """(ranks, way) -> its runs at the rates that were set."""
    runs: dict[tuple[int, str], list[dict]] = {}
    for run in found["runs"]:
        if run["limited"]:
            runs.setdefault((run["ranks"], run["way"]), []).append(run)
    return runs


def show_cable(found: dict, ring: dict[tuple[int, str], float]) -> None:
    """Bytes and seconds of a step, predicted and measured.

    Args:
        found: by `stored`.
        ring: (ranks, way) -> what host 0 sends, for each byte of the parameters.
    """
    size = 4 * found["parameters"] / 1e6
    rates = [run["mbit"] for run in next(iter(_limited(found).values()))]
    print("         MB sent: by      seconds of a step, planned and measured, at")
    print("ranks       ring  card", *(f"{f'{rate} Mbit/s':>15}" for rate in rates))
    for (ranks, way), runs in _limited(found).items():
        if (ranks, way) not in ring:
            continue
        sent = f"{ring[ranks, way] * size:5.2f} {runs[0]['sent'] / 1e6:5.2f}"
        pairs = (f"{r['predicted_seconds']:9.3f} {r['seconds']:5.3f}" for r in runs)
        print(f"{ranks} {way:9} {sent}", *pairs)


def draw_cable(found: dict) -> None:
    """Seconds against the rate: predictions are lines, measurements are dots."""
    for i, ((ranks, way), runs) in enumerate(_limited(found).items()):
        rates = [run["mbit"] for run in runs]
        line, colour = "-" if ranks == 2 else "--", draw.COLOURS[i % len(draw.COLOURS)]
        expected = [run["predicted_seconds"] for run in runs]
        plt.loglog(rates, expected, line, color=colour, label=f"{way}, {ranks} ranks")
        plt.loglog(rates, [run["seconds"] for run in runs], "o", color=colour)
        plt.xticks(rates, rates)
    seconds = (0.05, 0.1, 0.2, 0.5, 1, 2)
    plt.yticks(seconds, seconds)
    plt.minorticks_off()
    title = f"stored; measured on {found['hardware']}, torch {found['torch']}"
    plt.gca().set(xlabel="Mbit/s of the cable", ylabel="seconds of a step", title=title)
    plt.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    plt.show()
