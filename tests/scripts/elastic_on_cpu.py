"""Train on handwritten digits, and survive: checkpoints, restarts, any number of ranks.

    torchrun --nnodes=1:3 --max-restarts=5 … elastic_on_cpu.py --folder FOLDER

Lesson 24's script on the CPU, with gloo, for tests between two hosts.
Each step takes `--batch` rows, whatever the number of ranks; a rank takes every n-th of
them. So the weights after a step do not depend on who computed it (but for rounding).
A checkpoint is written to another name first, then renamed: whoever reads it finds all
of it or none. Every rank notes what it does in FOLDER/log.jsonl.
"""

import time

BEGIN = time.time()

import argparse  # noqa: E402 - the clock starts before the imports
import datetime  # noqa: E402
import hashlib  # noqa: E402
import io  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import record  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402

from helpers import digits  # noqa: E402

IMPORTED = time.time()
KEEP = 2  # checkpoints: should the newest be spoilt, there is one before it
TO_JOIN = datetime.timedelta(seconds=120)  # some ranks start much later than others


# -- what must not depend on who computes it -------------------------------------------


def rows_of_step(step: int, batch: int, size: int) -> torch.Tensor:
    """The rows of a step, the same in every rank: epochs are shuffled by their number.

    The rows that are left over at the end of an epoch are not used in it.
    """
    steps = size // batch
    generator = torch.Generator().manual_seed(step // steps)
    order = torch.randperm(size, generator=generator)
    first = step % steps * batch
    return order[first : first + batch]


def mean_over_ranks(losses: torch.Tensor, batch: int) -> torch.Tensor:
    """This rank's part of the mean over the whole batch, for DDP's average."""
    return losses.sum() / batch * dist.get_world_size()


# -- checkpoints -----------------------------------------------------------------------


def save(folder: Path, step: int, state: dict) -> None:
    """Write a checkpoint so that no reader can see half of it; drop the oldest."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    name = f"step-{step:06}.pt"
    half = folder / f"{name}.half"
    with half.open("wb") as file:
        file.write(hashlib.sha256(content).digest() + content)
        file.flush()
        os.fsync(file.fileno())  # on the disk before it has its name
    half.replace(folder / name)
    for old in sorted(folder.glob("step-*.pt"))[:-KEEP]:
        old.unlink()


def newest(folder: Path) -> tuple[dict | None, list[str]]:
    """The newest checkpoint that is whole, and the names of those that are not."""
    spoilt = []
    for path in sorted(folder.glob("step-*.pt"), reverse=True):
        content = path.read_bytes()
        if hashlib.sha256(content[32:]).digest() == content[:32]:
            return torch.load(io.BytesIO(content[32:]), weights_only=True), spoilt
        spoilt.append(path.name)
    return None, spoilt


# -- the training ----------------------------------------------------------------------


class Log:
    """One line of JSON for each thing that happens, from all ranks in one file."""

    def __init__(self, folder: Path):
        self.file = os.open(
            folder / "log.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )
        self.who = {
            "rank": int(os.environ["RANK"]), "ranks": int(os.environ["WORLD_SIZE"]),
            "restart": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
            "pid": os.getpid(), "agent": os.getppid(),
        }  # fmt: skip

    def __call__(self, event: str, at: float | None = None, **more) -> None:
        line = {"time": at or time.time(), "event": event, **self.who, **more}
        os.write(self.file, json.dumps(line).encode() + b"\n")  # one write: never mixed


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(args, log: Log, group: dist.ProcessGroup | None = None) -> None:
    """Train from the newest checkpoint on; the ranks of `group` do the steps."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = digits()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    box = [None]
    if rank == 0:  # one rank reads, so that all start from the same
        state, spoilt = newest(args.folder)
        box = [state]
        if spoilt:
            log("spoilt", names=spoilt)
    dist.broadcast_object_list(box)
    step = 0
    if box[0] is not None:
        step = box[0]["step"]
        model.load_state_dict(box[0]["model"])
        optimizer.load_state_dict(box[0]["optimizer"])
    log("loaded", step=step)
    dist.barrier()  # the first one has waited for the last: now patience holds
    parallel = DDP(model, process_group=group)
    while step < args.steps:
        while step in args.hold and not (args.folder / f"go-{step}").exists():
            time.sleep(0.01)
        if in_trouble(args, "raise", step):
            raise ValueError(f"a bad row in step {step}")
        if in_trouble(args, "hang", step):
            time.sleep(3600)
        rows = rows_of_step(step, args.batch, len(data.x))
        mine = rows[rank::ranks]
        losses = cross_entropy(parallel(data.x[mine]), data.y[mine], reduction="none")
        optimizer.zero_grad()
        mean_over_ranks(losses, args.batch).backward()
        optimizer.step()
        log("step", step=step, rows=mine.tolist(), loss=losses.sum().item())
        step += 1
        if rank == 0 and step % args.every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save(args.folder, step, {**state, "step": step})
    if rank == 0:
        torch.save(model.state_dict(), args.folder / "weights.pt")
        with torch.no_grad():
            right = model(data.test_x).argmax(1) == data.test_y
        log("done", accuracy=right.float().mean().item())


def in_trouble(args, kind: str, step: int) -> bool:
    """Whether this rank is to be broken now; only once, not again after a restart."""
    if (args.trouble, args.at, args.of) != (kind, step, dist.get_rank()):
        return False
    try:
        (args.folder / "trouble").touch(exist_ok=args.always)
    except FileExistsError:
        return False
    return True


def rows_that_count(log: list[dict]) -> dict[int, list[int]]:
    """Step -> the rows that made the final weights, of all ranks, sorted.

    A step that was lost is done again after the restart; then only the second counts.
    """
    steps: dict[int, list[int]] = {}
    for entry in log:
        if entry["event"] == "loaded":
            steps = {step: rows for step, rows in steps.items() if step < entry["step"]}
        elif entry["event"] == "step":
            steps.setdefault(entry["step"], []).extend(entry["rows"])
    return {step: sorted(rows) for step, rows in steps.items()}


@record  # an exception goes to the agent as a file, and into its last words
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train on digits; may be restarted.")
    parser.add_argument("--folder", type=Path, required=True, help="of checkpoints")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=120, help="rows of all ranks")
    parser.add_argument("--every", type=int, default=5, help="steps to a checkpoint")
    parser.add_argument(
        "--hold", type=int, nargs="*", default=(), metavar="STEP",
        help="wait before these steps until there is a file FOLDER/go-STEP",
    )  # fmt: skip
    parser.add_argument(
        "--patience", type=float, default=20,
        help="seconds that a rank waits for others in a step",
    )  # fmt: skip
    parser.add_argument("--trouble", choices=("raise", "hang"), help="to be broken")
    parser.add_argument("--at", type=int, default=0, help="in this step")
    parser.add_argument("--of", type=int, default=0, help="by this rank")
    parser.add_argument("--always", action="store_true", help="after restarts too")
    args = parser.parse_args(arguments)
    log = Log(args.folder)
    log("begin", BEGIN)
    log("imported", IMPORTED)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TO_JOIN)
    group = dist.new_group(timeout=datetime.timedelta(seconds=args.patience))
    log("joined")
    train(args, log, group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # A thread of gloo may still hold a tensor while Python shuts down, which aborts
    # the process ("terminate called without an active exception"). So leave at once.
    sys.stdout.flush()
    os._exit(0)
