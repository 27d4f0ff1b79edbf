"""A dry run from Python: `simgpu.dry_run(train, world=64)`."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simgpu._device import measured
from simgpu._device.cards import CARDS, Card, find_card
from simgpu._dry.fresh import FreshRun
from simgpu._dry.report import DryReport, Kept, of_dict
from simgpu._request import COMPILE

_SECONDS = 600.0


class DryRunFailed(RuntimeError):
    """A script failed in a dry run; its error is in the message."""


def dry_run(
    program: Callable[..., Any] | str | os.PathLike, *arguments: Any, world: int = 64,
    node: int | None = None, card: str | Card = "H100",
    network: float | str | None = None, rank: int = 0, memory: int | str | None = None,
    steps: int = 3, kinds: str | None = None, routing: str = "even",
    compile: str = "fuse", tokens: int | None = None,
    timeline: str | os.PathLike | None = None,
    memory_snapshot: str | os.PathLike | None = None, seconds: float = _SECONDS,
    host: str | float = "bare", samples: int | None = None,
) -> DryReport:  # fmt: skip
    """Run a program as one rank of any number, without its values.

    It finds the environment of torchrun, `torch.cuda` and NCCL, and is left after
    enough calls of `Optimizer.step`. A function runs in this process, whether or not
    other GPUs are simulated in it, which go on as they were; so it must not use their
    tensors. A script runs in a process of its own, and its report draws no pictures.

        report = simgpu.dry_run(train, world=64, network="400 Gbit/s")
        assert report.fits and report.peak_bytes < 70 * 2**30
        report.memory_picture()
        report.timeline()

    Args:
        program: a function, or the path of a script.
        arguments: of the function, or words for the script.
        world: ranks of the job.
        node: of them on a node; None: at most 8.
        card: of every rank: "H100", or a file that `simgpu measure` has written.
        network: of a node: "400 Gbit/s", bytes per second, or such a file.
        rank: which one runs.
        memory: of each card, in bytes or as text ("40GB"); None is all it has.
        steps: after which the program is left, 2 or more.
        kinds: where ranks differ, which of them run, in forked processes: "pp=4" for
            stages of as many ranks each, "0,16" for these ranks; "same": a message to
            another rank is like that rank's own.
        routing: of tokens to experts: "even" or "refuse".
        compile: what `torch.compile` does: "fuse": count a chain of pointwise
            operations and reductions as one kernel; "eager": give back what it is
            given; or "refuse".
        tokens: of a step of the whole job; None: counted at the embedding.
        timeline: a file for a trace, which ui.perfetto.dev opens.
        memory_snapshot: a file for PyTorch's viewer of memory.
        seconds: that a script may take.
        host: "bare": a launch takes what a small operation alone does; "fast" and
            "slow": what it takes in a trainer, with its own Python; or microseconds of
            a launch.
        samples: of a step of the whole job; None: counted where the model is called.

    Returns:
        What it needs; `fits` says whether the memory is enough.

    Raises:
        ValueError: for a job that cannot be.
        DryRunFailed: if a script fails, or takes too long.
        RuntimeError: if this process has a process group, or uses CUDA for real.
        Exception: what a function raises.
    """
    files = [None if its is None else Path(its).absolute()
             for its in (timeline, memory_snapshot)]  # fmt: skip
    if callable(program):
        return _function(
            lambda: program(*arguments), files, world, node, rank, card, memory,
            network, steps, kinds, routing, compile, tokens, host, samples,
        )  # fmt: skip
    if isinstance(network, float | int):
        network = f"{network:.0f} B/s"
    elif measured.names_file(network):
        network = measured.absolute(network)
    elif network is not None and not isinstance(network, str):
        raise ValueError(
            f'network={network!r}: a script takes text, such as "400 Gbit/s"'
        )
    if compile not in COMPILE:
        raise ValueError(f"compile={compile!r}; use one of {COMPILE}")
    options = {
        "world": world, "node": node, "rank": rank, "card": _name_of(card),
        "memory": memory, "network": network, "steps": steps, "kinds": kinds,
        "routing": routing, "compile": compile, "tokens": tokens, "host": host,
        "samples": samples, "timeline": files[0],
        "memory-snapshot": files[1],
    }  # fmt: skip
    words = [f"--{name}={its}" for name, its in options.items() if its is not None]
    return _script([*words, os.fspath(program), *map(str, arguments)], seconds)


def _function(program: Callable[[], Any], files: list, *job: Any) -> DryReport:
    import torch.distributed as dist

    from simgpu._dry.run import Job, run

    asked = Job(*job)
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError(
            "this process has a process group already, and the program of a dry run "
            "makes its own; call torch.distributed.destroy_process_group() before"
        )
    return run(asked, program, keep=Kept(*files, pictures=True))


def _script(words: list[str], seconds: float) -> DryReport:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.json")
        fresh = FreshRun(words, path)
        try:
            status = fresh.status(seconds)
        finally:
            fresh.kill()
        if status is None:
            raise DryRunFailed(f"it took longer than {seconds:g} s; give seconds=")
        said = fresh.said()
        if status == 2:
            raise ValueError(said.rpartition("\n")[2])
        if status not in (0, 3):
            raise DryRunFailed(f"the script failed, exit status {status}:\n{said}")
        return of_dict(json.loads(path.read_text(encoding="utf-8")))


def _name_of(card: str | Card) -> str:
    """What the command takes for a card."""
    found = find_card(card)
    if not isinstance(card, Card) and measured.names_file(card):
        return str(measured.absolute(card))
    for name, its in CARDS.items():
        if its == found:
            return name
    raise ValueError(f"a script runs on a card of the table, not on {found.name}")
