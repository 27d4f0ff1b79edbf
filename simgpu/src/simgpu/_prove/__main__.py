"""The command: `python -m simgpu._prove train.py --worlds 1,2,4 [-- its arguments]`.

Exit status: 0 if all worlds agree, 1 if something was found, 2 if it could not run.
"""

import argparse
import sys

from simgpu._prove.run import RUN_SECONDS, STEPS, across_worlds


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Our own words, and those of the script, which stand after `--`."""
    where = words.index("--") if "--" in words else len(words)
    return words[:where], words[where + 1 :]


def main() -> None:
    """Read the command line, compare, and say what was found."""
    parser = argparse.ArgumentParser(
        prog="python -m simgpu._prove",
        usage="%(prog)s [-h] [--worlds 1,2] [--steps N] [--seconds S] SCRIPT "
        "[-- ARGUMENTS]",
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
    words, arguments = _split(sys.argv[1:])
    args = parser.parse_args(words)
    try:
        worlds = [int(word) for word in args.worlds.split(",")]
        report = across_worlds(
            args.script, worlds, arguments=arguments, steps=args.steps,
            seconds=args.seconds,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(report)
    sys.exit(0 if report else 1)


if __name__ == "__main__":
    main()
