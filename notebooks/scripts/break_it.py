"""Run train_elastic.py with trouble: ranks that wait, raise or hang before a step.

    torchrun … break_it.py --folder FOLDER --hold 9 16 [options of train_elastic.py]

A rank that reaches a step of `--hold` waits until there is a file FOLDER/go-STEP. So a
test can kill something at a step and not at a second. `--trouble` breaks one rank once,
and with `--always` again after each restart.
Used in lesson 24 and its tests; not for real jobs.
"""

import argparse
import os
import sys
import time
from pathlib import Path

if __package__:
    from scripts import train_elastic
else:
    import train_elastic

rows_of_step = train_elastic.rows_of_step  # the real one


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

    def held(step: int, batch: int, size: int):
        """Called by each rank before each step."""
        while step in asked.hold and not (asked.folder / f"go-{step}").exists():
            time.sleep(0.01)
        if step == asked.at and _my_turn(asked):
            if asked.trouble == "raise":
                raise ValueError(f"a broken sample in step {step}")
            time.sleep(3600)
        return rows_of_step(step, batch, size)

    train_elastic.rows_of_step = held
    train_elastic.main([f"--folder={asked.folder}", *rest])


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
