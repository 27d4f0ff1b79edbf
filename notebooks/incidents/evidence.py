"""What the incidents of lesson 29 leave: programs that make the logs and curves.

A notebook calls the first three functions and `draw_losses`; the others run in ranks.
"""

import contextlib
import io
import logging
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from matplotlib import pyplot as plt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import simgpu

# -- A and B: hangs --------------------------------------------------------------------

PROGRAM = Path(__file__).with_name("stuck_rank.py")
_folder = tempfile.TemporaryDirectory()  # until this process ends


def make_folder() -> str:
    """A folder for logs, where ranks that start later leave `log_0`, `log_1`, …"""
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = os.path.join(_folder.name, "log_")
    return _folder.name


def start_job(command: str, folder: str) -> subprocess.CompletedProcess:
    """Run incident A.

    Args:
        command: as in a shell; its last word names the program.
        folder: where a job that was killed has left a lock file, and for the files of
            the flight recorder.
    """
    Path(folder, "part-3-2.lock").touch()
    words = [sys.executable, *command.split()[1:-1], str(PROGRAM)]
    more = {"TORCH_FR_DUMP_TEMP_FILE": os.path.join(folder, "rank_")}
    return subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=300,
    )


def run_job(command: str, folder: str) -> None:
    """Run incident A, and print its losses and what each rank's watchdog says first."""
    done = start_job(command, folder)
    print(done.stdout, end="")
    wanted = r"^\[rank\d\].*(?:Watchdog caught.*WorkNCCL|Received a dump).*"
    lines = re.findall(wanted, done.stderr, re.M)
    for line in sorted(lines):
        line = re.sub(r"E\d+ [\d:.]+", "E…", line)  # without the time
        line = re.sub(r"from  rank \d and .* info", "from rank … …", line)
        print(re.sub(r"\.This is .*", ".", line))


def analyse(prefix: str, folder: str, first: int = 0) -> None:
    """Run `torchfrtrace`, and print of its report what this lesson reads.

    Left out are numbers and sizes that repeat others, what is different in a call, and
    frames of PyTorch itself.

    Args:
        prefix: of the files.
        folder: that has them.
        first: the rank whose file is read first, as a folder's order would have it.
    """

    def walk(path):
        files = sorted(os.listdir(path), key=lambda f: (not f.endswith(str(first)), f))
        return [(path, [], [f for f in files if f.startswith(prefix)])]

    said, log = io.StringIO(), logging.getLogger("Flight Recorder")
    with contextlib.redirect_stderr(io.StringIO()):  # a package is not installed
        from torch.distributed.flight_recorder import fr_trace
    log.handlers = [logging.StreamHandler(said)]
    with mock.patch.object(os, "walk", walk):
        fr_trace.main(["--prefix", prefix, folder])
    report = re.search(
        r"^(Not all ranks|Collective seq).*", said.getvalue(), re.M | re.S
    )
    left_out = "internal|group info|output|world size|expected ranks|stack trace"
    left_out += f"|{re.escape(torch.__path__[0])}|<module>"
    for line in report[0].splitlines() if report else [said.getvalue()]:
        if line.strip() and not re.search(left_out, line):
            line = re.sub(r"/\S*ipykernel\S*py:", "this notebook:", line)
            if line.startswith("error msg"):  # PyTorch has them in any order
                culprits = sorted(re.findall(r"Culprit rank \d+", line))
                line = f"error msg: {', '.join(culprits)}"
            print(re.sub(r" at /\S*/", " at ", line).strip())


def start_training():
    """Returns this rank's images and labels, and a classifier with DDP."""
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    images = torch.randn(64, 64)[rank :: dist.get_world_size()].cuda()
    labels = images[:, :10].argmax(1)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
    return images, labels, DDP(model, device_ids=[rank])


# -- C: sequences ----------------------------------------------------------------------


def sequences() -> tuple[Tensor, Tensor]:
    """Returns inputs and targets of eight sequences, padded with -100: (8, 12) each."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 20, (8, 13)).cuda()
    lengths = torch.tensor([4, 12, 12, 9, 3, 12, 11, 12]).cuda()
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[torch.arange(12).cuda() >= lengths[:, None]] = -100
    return inputs, targets


# -- D: NaN and a spike ----------------------------------------------------------------


def batch(step: int) -> tuple[Tensor, Tensor]:
    """This rank's quarter of a batch: two of them are broken."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(256, 64, generator=generator)[rank::4].clone()
    labels = images[:, :10].argmax(1)
    if (rank, step) == (2, 10):
        images[5, 7] = float("nan")
    if (rank, step) == (1, 20):
        images *= 1000
    return images.cuda(), labels.cuda()


def draw_losses(runs: dict[str, list[list[float]]]) -> None:
    """Draw the mean loss of each step; a step in which a rank has NaN is left out.

    Args:
        runs: name -> for each rank, the loss of each step.
    """
    _, axes = plt.subplots(figsize=(6, 2.8))
    for step, what in ((10, "NaN in\na batch"), (20, "huge values\nin a batch")):
        axes.axvline(step, color="lightgray", zorder=0)
        axes.text(step - 0.3, 0.98, what, size=8, va="top", ha="right",
                  transform=axes.get_xaxis_transform())  # fmt: skip
    styles = {"every_step": "x:", "if_finite": "o-", "if_usual": "s--"}
    for name, losses in runs.items():
        mean = torch.tensor(losses).mean(0)
        (line,) = axes.semilogy(mean, styles[name], markersize=4)
        last = int(mean.isfinite().nonzero()[-1])
        place = (last + 0.4, mean[last] * (1.5 if name == "every_step" else 1))
        axes.text(*place, name, color=line.get_color(), size=9, va="center")
    axes.set(xlabel="step", ylabel="mean loss (log axis)", title="simulated GPUs",
             xlim=(-0.5, 34))  # fmt: skip
    plt.show()


# -- E and F: memory -------------------------------------------------------------------

_kept: list = []  # what a rank still uses


def load_start(path: str) -> float:
    """Make a model, and load its first values as incident E does.

    Returns:
        The memory that is free on this rank's own GPU, in GiB.
    """
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).cuda()
    if rank == 0:
        torch.save(model.state_dict(), path)
    dist.barrier(device_ids=[rank])
    state = torch.load(path)
    model.load_state_dict(state)
    _kept.extend([model, state])
    dist.barrier(device_ids=[rank])  # all ranks have loaded
    return torch.cuda.mem_get_info()[0] / 2**30


def large_step() -> str | None:
    """On rank 0, a step of 13 GiB.

    Returns:
        PyTorch's error, a sentence a line. The numbers of processes, and their order,
        change from run to run.
    """
    if dist.get_rank() > 0:
        return None
    try:
        torch.empty(13 * 2**30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        said = re.sub(r"Process \d+", "Process …", str(error)).split(". ")
        said[3:7] = sorted(said[3:7])
        return ".\n".join(sentence.strip() for sentence in said)


def draw_memory_of_gpu_0(error: str, free: float) -> None:
    """Draw what is on GPU 0, as the error of `large_step` says it.

    Args:
        error: of rank 0.
        free: GiB.
    """
    used = re.findall(r"([\d.]+) MiB memory in use", error)
    used = [float(mib) / 1024 for mib in used]
    names = ["rank 0", "rank 1", "rank 2", "rank 3"]
    _, axes = plt.subplots(figsize=(6, 1.7))
    left = 0.0
    for name, gib in zip(names, used, strict=True):
        axes.barh("GPU 0", gib, left=left, edgecolor="black", label=name)
        left += gib
    asked = {"color": "white", "edgecolor": "gray", "hatch": "//"}
    axes.barh("GPU 0", 13, left=left, label="13 GiB asked for", **asked)
    axes.axvline(left + free, color="black", linewidth=2)
    axes.text(left + 13 + 0.1, 0, "end of\nGPU 0", va="center", fontsize=8)
    axes.set_xlim(0, 16.5)
    axes.set(xlabel="GiB", title="simulated T4, 14.74 GiB")
    axes.legend(
        ncols=3, fontsize=8, loc="center", bbox_to_anchor=(0.52, 0.5), framealpha=1
    )
    plt.show()


def validate(model, batches):
    losses = [cross_entropy(model(x), y) for x, y in batches]
    return torch.stack(losses).mean()


def epochs(path: str) -> list[str] | None:
    """On rank 0, four epochs of incident F, and a memory snapshot at the end.

    Returns:
        A line for each epoch.
    """
    if dist.get_rank() > 0:
        return None
    _kept.clear()  # of incident E
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history()
    model = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 10)).cuda()
    batches = [(torch.randn(128, 64).cuda(), torch.arange(128).cuda() % 10)] * 4
    history, lines = [], []
    for epoch in range(4):
        history.append(validate(model, batches))
        used = torch.cuda.memory_allocated() / 2**20
        held = torch.cuda.memory_reserved() / 2**20
        lines.append(f"epoch {epoch}: {used:4.1f} MiB allocated, {held:.0f} reserved")
    torch.cuda.memory._dump_snapshot(path)
    torch.cuda.memory._record_memory_history(None)
    return lines


# -- G: a slow rank --------------------------------------------------------------------


def step_on_sorted() -> int:
    """Three steps of incident G, of which the last is on the timeline.

    Returns:
        The tokens of this rank.
    """
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    lengths = torch.arange(16, 272, 4)  # of 64 sequences
    mine = torch.argsort(lengths).chunk(4)[rank]
    torch.manual_seed(0)
    layers = nn.Embedding(20, 128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 20)
    model = DDP(nn.Sequential(*layers).cuda(), device_ids=[rank])
    x = torch.zeros(1, int(lengths[mine].sum()), dtype=torch.long).cuda()
    for _ in range(3):
        torch.cuda.synchronize()
        simgpu.timeline().clear()
        model(x).square().mean().backward()
    torch.cuda.synchronize()
    return x.numel()


# -- H: a checkpoint -------------------------------------------------------------------


def _new_job():
    torch.manual_seed(0)
    layers = nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)
    model = DDP(nn.Sequential(*layers).cuda(), device_ids=[dist.get_rank()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return model, optimizer, scheduler


def _weights(model) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().cpu()


def _step(step: int, model, optimizer, scheduler) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of a step, and parameters before it, gradient and update."""
    before = _weights(model)
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(256, 64, generator=generator)[dist.get_rank() :: 4].cuda()
    loss = cross_entropy(model(x), x[:, :10].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()]).cpu()
    update = _weights(model) - before
    return loss.detach(), {
        "parameters": before, "gradient": gradient, "update": update
    }  # fmt: skip


def train_and_restart(path: str) -> tuple[Tensor, Tensor, dict, dict]:
    """Train 16 steps, and go on from step 8 as incident H does.

    Returns:
        The mean loss of each step, without the restart and with it, and of step 8,
        without and with: parameters, gradient and update.
    """
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    losses, noted = torch.zeros(2, 16, device="cuda"), []
    for again in (False, True):
        job = _new_job()
        if again:
            losses[1] = losses[0]
            job[0].module.load_state_dict(torch.load(path, map_location="cpu"))
        for step in range(8 if again else 0, 16):
            if step == 8 and not again:
                if rank == 0:
                    torch.save(job[0].module.state_dict(), path)
                dist.barrier(device_ids=[rank])
            losses[int(again), step], values = _step(step, *job)
            if step == 8:
                noted.append(values)
    dist.all_reduce(losses, op=dist.ReduceOp.AVG)
    return *losses.cpu(), *noted
