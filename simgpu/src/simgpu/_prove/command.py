"""The command: `simgpu prove train.py --worlds 1,2,4 [-- its arguments]`.

Exit status: 0 if all worlds agree, 1 if something was found, 2 if it could not run.
"""

import argparse
import sys
from collections.abc import Sequence

from simgpu._prove.run import RUN_SECONDS, STEPS, prove


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Our own words, and those of the script, which stand after `--`."""
    where = words.index("--") if "--" in words else len(words)
    return words[:where], words[where + 1 :]


def main(arguments: Sequence[str]) -> int:
    """Compare, and say what was found.

    Args:
        arguments: the words after `simgpu prove`.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(
        prog="simgpu prove",
        usage="%(prog)s [-h] [--worlds 1,2] [--steps N] [--seconds S] "
        "(SCRIPT | -m MODULE) [-- ARGUMENTS]",
        description="Run a training script on several numbers of simulated GPUs, and "
        "name the first step and place where they differ.",
    )
    parser.add_argument("script", help="as torchrun would run it, over NCCL")
    parser.add_argument("-m", dest="module", action="store_true", help="as in python")
    parser.add_argument(
        "--worlds", default="1,2", help="numbers of ranks, such as 1,2,4 (default 1,2)"
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, help=f"to compare (default {STEPS})"
    )
    parser.add_argument(
        "--seconds", type=float, default=RUN_SECONDS,
        help=f"that one run may take (default {RUN_SECONDS:g})",
    )  # fmt: skip
    words, of_script = _split(list(arguments))
    options, unknown = parser.parse_known_args(words)
    if unknown:
        said = " ".join(unknown)
        parser.error(
            f"unrecognized arguments: {said}; what the script is given stands behind "
            f"--: simgpu prove {'-m ' * options.module}{options.script} -- {said}"
        )
    try:
        worlds = [int(word) for word in options.worlds.split(",")]
    except ValueError:
        parser.error(f"--worlds {options.worlds}: write numbers of ranks, such as 1,2")
    try:
        report = prove(
            options.script, worlds, arguments=of_script, steps=options.steps,
            seconds=options.seconds, module=options.module,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(report)
    return 0 if report else 1
