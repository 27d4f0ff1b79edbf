"""The command: `python -m helpers.prove train.py --worlds 1,2,4 [-- its arguments]`.

Exit status: 0 if all worlds agree, 1 if something was found, 2 if it could not run.
"""

import argparse
import sys

from helpers.prove.run import RUN_SECONDS, STEPS, across_worlds


def main() -> None:
    """Read the command line, compare, and say what was found."""
    parser = argparse.ArgumentParser(
        prog="python -m helpers.prove",
        description="Run a training script on several numbers of simulated GPUs, and "
        "name the first step and place where they differ.",
    )
    parser.add_argument("script", help="runs under torchrun, over NCCL")
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
    parser.add_argument("arguments", nargs="*", help="of the script, after --")
    args = parser.parse_args()
    try:
        worlds = [int(word) for word in args.worlds.split(",")]
        report = across_worlds(
            args.script, worlds, arguments=args.arguments, steps=args.steps,
            seconds=args.seconds,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(report)
    sys.exit(0 if report else 1)


if __name__ == "__main__":
    main()
