"""The command: `simgpu measure my.json` on a machine with GPUs.

    simgpu measure my.json                                     # one card, 5 minutes
    torchrun --nproc-per-node=8 -m simgpu measure my.json      # its links, too
    simgpu measure --simulated H100 my.json                    # without a GPU

Exit status: 0 when the file is written, 1 if nothing could be measured, 2 for a command
line that cannot be.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from simgpu._device import measured

OK, FAILED, WRONG = 0, 1, 2
_SECONDS = 300.0
_REHEARSE = "`simgpu measure --simulated A100` rehearses without a GPU"


class CannotMeasure(Exception):  # noqa: N818 - its message is the error
    """There is nothing to measure, and why."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="simgpu measure",
        usage="%(prog)s [--seconds S] [--network-name NAME] [--fit] [--simulated CARD "
        "[--world N] [--node N] [--network BANDWIDTH]] [FILE]",
        description="Measure this machine's GPU, or under torchrun what connects "
        "several, and write a file for --card and --network.",
        allow_abbrev=False,
    )
    add = made.add_argument
    add("file", nargs="?", type=Path, metavar="FILE",
        help="to write; if it is there, what was not measured again stays (default: "
        "the card's name)")  # fmt: skip
    add("--seconds", type=float, default=_SECONDS, metavar="S",
        help=f"that it may take (default {_SECONDS:g})")  # fmt: skip
    add("--network-name", default="unnamed", metavar="NAME",
        help='in the rows: "EFA 4 x 100 Gbit/s per node"')  # fmt: skip
    add("--fit", action="store_true",
        help="measure nothing: fit FILE's constants to its figures again")  # fmt: skip
    add("--simulated", metavar="CARD", help="a rehearsal, without a GPU")
    add("--world", type=int, default=1, metavar="N", help="of it: ranks (default 1)")
    add("--node", type=int, metavar="N", help="of them on a node")
    add("--network", metavar="BANDWIDTH", help='of a node: "400 Gbit/s"')
    return made


def read(words: Sequence[str]) -> argparse.Namespace:
    made = parser()
    options = made.parse_args(words)
    if not options.seconds > 0:
        made.error(f"--seconds {options.seconds:g}: it takes more than that")
    if options.fit and options.file is None:
        made.error("--fit: of which file?")
    if options.simulated is None and (options.world, options.node, options.network) != (
        1, None, None
    ):  # fmt: skip
        made.error("--world, --node and --network go with --simulated")
    if options.file is not None and not options.file.absolute().parent.is_dir():
        made.error(f"there is no folder {options.file.absolute().parent}")
    return options


def main(words: Sequence[str]) -> int:
    """Measure, and write the file.

    Args:
        words: after `simgpu measure`.

    Returns:
        The exit status.
    """
    options = read(words)
    try:
        return _fit(options) if options.fit else _measure(options)
    except (CannotMeasure, ValueError) as error:
        print(f"simgpu measure: {error}", file=sys.stderr)
        return FAILED


def _fit(options: argparse.Namespace) -> int:
    from simgpu._measure import files

    data = files.fitted(measured.read(options.file))
    files.write(options.file, data)
    print(files.summary(data))
    return OK


def _measure(options: argparse.Namespace) -> int:
    try:
        import torch
    except ImportError as error:
        raise CannotMeasure(f"PyTorch is needed, and nothing else: {error}") from None
    import simgpu

    rank, ranks, here = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", 0), ("WORLD_SIZE", 0), ("LOCAL_WORLD_SIZE", 0))
    )
    if options.simulated is not None:
        job = {"world": options.world, "node": options.node, "card": options.simulated,
               "network": options.network}  # fmt: skip
        _rehearse(options, job, links=options.world > 1)
        return OK
    if ranks == 1:
        raise CannotMeasure(
            "one rank alone has no links; give torchrun --nproc-per-node=2 or more, or "
            "measure the card without torchrun"
        )
    if simgpu.is_running():
        if rank == 0:
            _rehearse(options, _job_like_this(ranks, here), links=ranks > 1)
        return OK
    _check(torch, here)
    write = _Written(options, rank)
    write(_Program(options, ranks > 1)(write.check))
    return OK


def _check(torch: Any, here: int) -> None:
    """Raises CannotMeasure if the machine's GPUs are not enough."""
    if torch.version.cuda is None:
        raise CannotMeasure(
            f"PyTorch {torch.__version__} is built without CUDA, so it sees no GPU; "
            f"install one with CUDA; {_REHEARSE}"
        )
    count = torch.cuda.device_count()
    if count == 0:
        raise CannotMeasure(f"PyTorch finds no GPU here (nvidia-smi?); {_REHEARSE}")
    if here > count:
        raise CannotMeasure(
            f"{here} ranks on {count} GPUs: each needs its own; give "
            f"--nproc-per-node={count} or less"
        )


class _Program:
    """What runs where the GPUs are: figures as the file has them."""

    def __init__(self, options: argparse.Namespace, links: bool):
        self.options, self.links = options, links

    def __call__(self, check: Callable[[str], None]) -> dict[str, Any]:
        from simgpu._measure import facts, figures, links, timing

        about = facts.about()
        check(about["hardware"])
        budget, card = timing.Budget(self.options.seconds), facts.known_card()
        data = {"kind": measured.KIND, "version": measured.VERSION, **about,
                "card_name": card, "properties": facts.properties()}  # fmt: skip
        if self.links:
            found = links.measure(card, budget, self.options.network_name)
            what = links.WHAT
            data["links"] = {"ranks": found.ranks, "nodes": found.nodes,
                             "nccl_buffers": found.nccl_buffers}  # fmt: skip
        else:
            data["memory"] = facts.memory()
            found = figures.measure(card, budget)
            data["launch"], what = found.launch, figures.WHAT
        data["left_out"] = found.left_out
        data["recordings"] = {
            kind: {"what": what[kind], "card": card, **recorded._asdict()}
            for kind, recorded in found.recordings.items()
        }
        return data


class _Written:
    """The file, which rank 0 writes."""

    def __init__(self, options: argparse.Namespace, rank: int):
        self.options, self.rank = options, rank
        self.before: dict[str, Any] | None = None

    def check(self, hardware: str) -> None:
        """Before anything takes long: whether it can be written."""
        from simgpu._measure import facts, files

        if self.rank:
            return
        self.path = self.options.file or Path(f"{facts.known_card()}.json")
        self.before = files.before(self.path, hardware)

    def __call__(self, now: dict[str, Any]) -> None:
        from simgpu._measure import files

        if self.rank:
            return
        if not now["recordings"]:
            raise CannotMeasure(
                f"nothing could be measured in {self.options.seconds:g} s; give "
                "--seconds"
            )
        data = files.fitted(files.together(self.before, now))
        files.write(self.path, data)
        print(files.summary(data))
        print(f"written to {self.path}: --card {self.path}", end="")
        print(f" --network {self.path}" if "network" in data else "")


def _job_like_this(ranks: int, here: int) -> dict[str, Any]:
    """The simulated GPUs of this process, for a rehearsal."""
    from simgpu import _runtime as state

    runtime = state.current()
    request = runtime.request
    world, node = (ranks, here) if ranks else (request.number,) * 2
    return {"world": world, "node": node, "card": request.card,
            "network": runtime.network}  # fmt: skip


def _rehearse(options: argparse.Namespace, job: dict[str, Any], links: bool) -> None:
    """Measure simulated GPUs, in a dry run: what the clock says, without values."""
    from simgpu._dry.run import Job, run

    program, write = _Program(options, links), _Written(options, rank=0)
    found: list[dict[str, Any]] = []
    run(Job(**job, kinds="same"), lambda: found.append(program(write.check)))
    write(found[0])
