"""Run train_elastic.py with trouble: ranks that wait, raise or hang before a step.

    torchrun … break_it.py --folder FOLDER --hold 9 16 [options of train_elastic.py]

A rank that reaches a step of `--hold` waits until there is a file FOLDER/go-STEP. So a
test can kill something at a step and not at a second. `--trouble` breaks one rank once,
and with `--always` again after each restart. With BROKEN=12 in the environment of an
agent, its ranks raise before step 12, each time: a machine with a broken GPU.

Notes in FOLDER/log.jsonl who did what, and when. All ranks append to this one file,
which is safe on one machine, but not on NFS.
Used in lesson 24 and its tests; not for real jobs.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

if __package__:
    from scripts import train_elastic
else:
    import train_elastic

load, rows_of_step = train_elastic.load, train_elastic.rows_of_step  # the real ones


def main(arguments: list[str] | None = None) -> None:
    """Train as the script does, with what was asked for before its steps."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--hold", type=int, nargs="*", default=(), metavar="STEP")
    parser.add_argument("--trouble", choices=("raise", "hang"))
    parser.add_argument("--at", type=int, default=0, help="in this step")
    parser.add_argument("--of", type=int, default=0, help="by this rank")
    parser.add_argument("--always", action="store_true", help="after restarts too")
    asked, rest = parser.parse_known_args(arguments)
    log = Log(asked.folder)

    def loaded(folder, parts, data) -> int:
        step = load(folder, parts, data)
        log("loaded", step=step)
        return step

    def held(step: int, batch: int, size: int):
        """Called by each rank before each step."""
        gate = asked.folder / f"go-{step}"
        while step in asked.hold and not (gate.exists() or train_elastic.asked):
            time.sleep(0.01)
        if os.environ.get("BROKEN") == str(step):
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        if step == asked.at and _my_turn(asked):
            if asked.trouble == "raise":
                raise ValueError(f"a broken sample in step {step}")
            while not train_elastic.asked:
                time.sleep(0.1)
            raise SystemExit("ended while it hung")
        rows = rows_of_step(step, batch, size)
        log.step = {"step": step, "rows": rows[log.rank :: log.ranks].tolist()}
        return rows

    train_elastic.load, train_elastic.rows_of_step = loaded, held
    register_optimizer_step_post_hook(lambda *_: log("step", **log.step))
    train_elastic.main([f"--folder={asked.folder}", *rest])


class Log:
    """Lines of JSON, from all ranks in one file."""

    def __init__(self, folder: Path):
        how = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self.file = os.open(folder / "log.jsonl", how)
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.step: dict = {}  # what the optimizer is about to do

    def __call__(self, event: str, **more) -> None:
        who = {"rank": self.rank, "ranks": self.ranks, "agent": os.getppid()}
        line = {"time": time.time(), "event": event, **who, "pid": os.getpid(), **more}
        os.write(self.file, json.dumps(line).encode() + b"\n")  # one write: not mixed


def _my_turn(asked: argparse.Namespace) -> bool:
    """Whether this rank is to be broken now."""
    if asked.trouble is None or int(os.environ["RANK"]) != asked.of:
        return False
    try:
        (asked.folder / "trouble").touch(exist_ok=asked.always)
    except FileExistsError:  # it was broken before
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
