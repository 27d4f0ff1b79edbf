"""The most bytes on each GPU in one step of training: counted by PyTorch itself.

`tracked` trains one step on tensors without memory, in a process of its own
(`tracker_process.py`), and reads PyTorch's FSDPMemTracker. It does so with few blocks
and extrapolates to all of them.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from scripts.plan.memory import Bytes, largest
from scripts.plan.model import Model
from scripts.plan.run import Run, make_run

TRACKED_LAYERS = (4, 5)  # blocks that are tracked; the others are like these
SECONDS = 60  # that tracking one job may take
PROCESS = "scripts.plan.tracker_process"


def tracked(
    model: "str | Model",
    gpus: int,
    batch: int = 1,
    tokens: int = 4096,
    checkpointing: bool = True,
    strategy: str = "fsdp",
    layers: int | None = None,
) -> Bytes:
    """The most bytes on each GPU in one step: counted, with tensors without memory.

    Builds the model as fake tensors, shards it with `fully_shard` over a process group
    of which only this rank exists, trains one step, and reads PyTorch's
    FSDPMemTracker. It does so with 4 and with 5 blocks and goes on along a straight
    line, separately for each moment in the step (see `tracked_moments`).

    Args:
        model: a name in `MODELS`, or a `Model`.
        gpus: 1 to 8, or a multiple of 8.
        batch: sequences on each GPU.
        tokens: of each sequence.
        checkpointing: whether blocks keep only their input for backward.
        strategy: "fsdp"; the tracker knows no other.
        layers: blocks of the model, if not all.

    Raises:
        ValueError: for an unknown model, or what cannot be tracked.
        RuntimeError: if tracking fails or takes longer than `SECONDS`.

    Source: `torch.distributed._tools.fsdp2_mem_tracker`.
    """
    job = dict(model=model, gpus=gpus, batch=batch, tokens=tokens)
    job |= dict(checkpointing=checkpointing, strategy=strategy, layers=layers)
    return tracked_all([job])[0]


def tracked_all(jobs: "list[dict]") -> list[Bytes]:
    """Several jobs in one process, which is quicker: dicts of `tracked`'s arguments."""
    return [largest(moments) for moments in tracked_moments(jobs)]


def tracked_moments(jobs: "list[dict]") -> "list[dict[str, Bytes]]":
    """For each job the peak of each moment in the step, in its order.

    Moments: the loss ("head"), backward of the last block, of the one before, of the
    second and of the first block (with what is outside the blocks), and the update.
    What lies between two of them lies on a straight line between their bytes.
    """
    checked = [check_job(**job) for job in jobs]
    runs = [asdict(run) | {"layers": n} for run, _, counts in checked for n in counts]
    found = iter(run_tracking(runs))
    results = []
    for _, layers, counts in checked:
        points = {n: next(found) for n in counts}
        results.append(extrapolate(points, layers))
    return results


def check_job(layers: int | None = None, **job) -> "tuple[Run, int, tuple[int, ...]]":
    """What to run, for how many blocks, and the numbers of blocks to run it with."""
    run = make_run(**job)
    if run.strategy != "fsdp":
        raise ValueError(
            f'strategy {run.strategy!r} cannot be tracked, only "fsdp"; '
            "plan.bytes_per_gpu has them all"
        )
    layers = layers or run.model.layers
    least = min(TRACKED_LAYERS)
    if layers < least:
        raise ValueError(f"tracking needs at least {least} blocks, not {layers}")
    return run, layers, (layers,) if layers in TRACKED_LAYERS else TRACKED_LAYERS


def extrapolate(points: "dict[int, dict]", layers: int) -> "dict[str, Bytes]":
    """The moments at some number of layers, on the line through one or two points.

    Args:
        points: number of layers: its moments, with bytes by part.
        layers: of the model.
    """
    few, more = min(points), max(points)
    low, high = points[few], points[more]
    steps = (layers - few) / (more - few) if more > few else 0
    return {
        moment: Bytes(
            (part, round(nbytes + steps * (high[moment][part] - nbytes)))
            for part, nbytes in parts.items()
        )
        for moment, parts in low.items()
    }


def run_tracking(runs: "list[dict]") -> "list[dict]":
    """Track each run in one process of its own: nothing of it stays here.

    Raises:
        RuntimeError: with the last words of the process, or if it took too long.
    """
    home = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-W", "ignore", "-m", PROCESS, str(os.getpid())]
    process = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": paths}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        limit = SECONDS * max(1, len(runs))
        answer, errors = process.communicate(json.dumps(runs), timeout=limit)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"tracking took more than {limit} seconds") from None
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        words = errors.strip().splitlines() or [f"exit status {process.returncode}"]
        raise RuntimeError(f"tracking failed: {words[-1].removeprefix('[rank0]: ')}")
    return json.loads(answer)
