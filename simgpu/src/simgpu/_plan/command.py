"""The command: `simgpu plan --model llama3-8b --gpus 64 --tokens 4M --sequence 8192`.

Exit status: 0 if a layout fits, 3 if none does, 2 for a command line that cannot be.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

FITS, WRONG, FULL = 0, 2, 3
_UNITS = {"": 1, "k": 10**3, "M": 2**20, "B": 10**9, "T": 10**12}
_HELP = """\
what is planned: FSDP2 over all ranks, or in groups with replicas (shards: ranks of such
a group; ZeRO 3 frees whole parameters between forward and backward, ZeRO 2 keeps them,
ZeRO 1, as every pipeline, adds gradients up whole and sends them once a step), slices
of layers with sequence parallelism (tp), parts of each sequence (cp, of the shards;
where a rank keeps at least 8,192 tokens, or --cp asks for it), experts spread over
ranks (ep; of tp and shards; all get as many tokens, or the fullest --imbalance times
the mean), stages of a pipeline (pp; 1F1B, or interleaved, chunks of blocks on each
rank), micro-batches, and recomputing (none; selective: all but attention and every
second product; full). Parameters are bfloat16, gradients are reduced in float32,
AdamW's states are float32.
models: {models}; a config.json of Hugging Face ({families}); or sizes:
layers=32,hidden=4096,heads=32,kv_heads=8,intermediate=14336,vocab=128256 (and
experts=128,chosen=8, of a token)
"""


def count(text: str) -> int:
    """A number of tokens: "4194304", "500k", "15T"; "4M" is 4 times 2**20.

    Raises:
        argparse.ArgumentTypeError: for what is no such number.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kMBT]?)", text)
    number = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if number < 1 or number != int(number):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of tokens; write 4194304, 4M (2**22) or 15T"
        )
    return int(number)


def parser() -> argparse.ArgumentParser:
    from simgpu._plan.shapes import _FAMILIES, MODELS

    made = argparse.ArgumentParser(
        prog="simgpu plan", allow_abbrev=False,
        usage="%(prog)s --model MODEL --gpus N --tokens N [--sequence N] [--card CARD] "
        "[--node N] [--network BANDWIDTH] [--compile] [--host KIND] "
        "[--imbalance F] [--AXIS N ...] "
        "[--top N] [--why A B] [--check [A]] [--total-tokens N] [--price DOLLARS] "
        "[--picture FILE] [--json FILE]",
        description="All layouts of a decoder on so many cards: which fit, how fast "
        "they are, and what a run costs. All times are simulated.",
        epilog=_HELP.format(models=", ".join(MODELS), families=", ".join(_FAMILIES)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = made.add_argument
    add("--model", required=True, help="its name, its config.json, or its sizes")
    add("--gpus", type=int, required=True, metavar="N", help="of the job")
    add("--tokens", type=count, required=True, metavar="N",
        help="of a step of the whole job: 4M is 2**22")  # fmt: skip
    add("--sequence", type=int, default=4096, metavar="N",
        help="tokens of a sequence (default 4096)")  # fmt: skip
    add("--card", default="H100",
        help="of every rank (default H100), or a file of simgpu measure")  # fmt: skip
    add(
        "--node",
        type=int,
        metavar="N",
        help="cards that NVLink connects (default 8; of GB200 and GB300, 72)",
    )
    add("--network", metavar="BANDWIDTH",
        help='of a node: "400 GB/s" (default: 200 Gbit/s for each card)')  # fmt: skip
    add("--compile", action="store_true", help="blocks are compiled")
    add("--host", default="bare", metavar="KIND",
        help="what a launch costs, as in simgpu dry-run")  # fmt: skip
    add("--imbalance", type=float, default=1.0, metavar="F",
        help="of tokens, for the fullest rank of experts: times the mean")  # fmt: skip
    for axis, what in (
        ("tp", "ranks among which layers are sliced"), ("pp", "stages of a pipeline"),
        ("cp", "ranks that have parts of each sequence"),
        ("ep", "ranks over which experts are spread"),
        ("shards", "ranks that share parameters and states"),
        ("micro", "sequences of a micro-batch"),
        ("chunks", "stages on a rank of a pipeline"), ("zero", "3, 2 or 1"),
    ):  # fmt: skip
        add(f"--{axis}", type=int, nargs="+", metavar="N", help=f"only these: {what}")
    add("--recompute", nargs="+", metavar="HOW",
        help="only these: none, selective, full")  # fmt: skip
    add("--top", type=int, default=10, metavar="N", help="rows (default 10)")
    add("--why", type=int, nargs=2, metavar=("A", "B"),
        help="why one row is faster than another")  # fmt: skip
    add(
        "--check",
        type=int,
        nargs="?",
        const=1,
        metavar="A",
        help="dry-run the whole program of a row (default: the first) beside its plan",
    )
    add("--total-tokens", type=count, metavar="N", help="of the whole run: 15T")
    add("--price", type=float, metavar="DOLLARS", help="of a card for an hour")
    add("--picture", type=Path, metavar="FILE",
        help="all layouts by memory and rate, as SVG")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="all for programs; - is stdout")
    return made


def main(words: Sequence[str]) -> int:
    """Plan, and print it.

    Args:
        words: after `simgpu plan`.

    Returns:
        The exit status.
    """
    made = parser()
    options = made.parse_args(words)
    if options.top < 1:
        made.error("--top is at least 1")
    if options.price is not None and not options.price > 0:
        made.error("--price is above 0")
    for path in (options.json, options.picture):
        if path and str(path) != "-" and not path.absolute().parent.is_dir():
            made.error(f"there is no folder {path.absolute().parent}")
    from simgpu._plan import show
    from simgpu._plan.search import AXES, plan

    only = {axis: its for axis in AXES if (its := getattr(options, axis)) is not None}
    try:
        found = plan(
            options.model, options.gpus, tokens=options.tokens,
            sequence=options.sequence, card=options.card, node=options.node,
            network=options.network, compile=options.compile, host=options.host,
            imbalance=options.imbalance, only=only, progress=show.progress,
        )  # fmt: skip
        lines = show.lines(found, options.top, options.total_tokens, options.price)
        if options.why:
            lines += ["", *found.why(*options.why)]
        if options.check is not None:
            lines += ["", *show.check(found, options.check)]
    except ValueError as error:
        print(f"simgpu plan: {error}", file=sys.stderr)
        return WRONG
    if options.json and str(options.json) == "-":
        print(json.dumps(found.as_dict(), indent=1))
    else:
        print("\n".join(lines))
        if options.json:
            text = json.dumps(found.as_dict(), indent=1)
            options.json.write_text(text + "\n", encoding="utf-8")
    if options.picture:
        options.picture.write_text(found.picture()._repr_svg_(), encoding="utf-8")
    return FITS if found.fitting else FULL
