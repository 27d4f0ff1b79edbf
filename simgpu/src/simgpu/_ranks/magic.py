"""The cell magic `%%ranks [--timeout SECONDS]`: runs its cell in every rank."""

import argparse
import shlex
import sys

from simgpu._ranks.notebook import RUN_SECONDS, current
from simgpu._ranks.rank_error import RankError


def register() -> None:
    """In a notebook, make `%%ranks` known."""
    if "IPython" in sys.modules:
        from IPython import get_ipython

        if (shell := get_ipython()) is not None:
            shell.register_magic_function(run_cell_in_ranks, "cell", "ranks")


def run_cell_in_ranks(line: str, cell: str) -> None:
    """%%ranks [--timeout SECONDS]: run the cell in every rank."""
    parser = argparse.ArgumentParser(prog="%%ranks", add_help=False)
    parser.add_argument("--timeout", type=float, default=RUN_SECONDS)
    parser.error = _raise_usage  # argparse would end the notebook's process
    options = parser.parse_args(shlex.split(line))
    ranks = current()
    if ranks is None:
        raise RankError("there are no ranks; open some with ranks = Ranks(4)")
    # an error then names the line by the number that an editor shows
    ranks.cell(f"\n{cell}", options.timeout)


def _raise_usage(*_) -> None:
    raise ValueError("usage: %%ranks [--timeout SECONDS]")
