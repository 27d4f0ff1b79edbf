"""Ask for GPUs, real or simulated, and count what travels between them.

They are simulated, unless the environment variable `HELPERS_GPUS` is `real`.
"""

import contextlib
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

import simgpu.pictures

_CHOICES = ("simulated", "real")


def need_gpus(number: int, card: str = "A100", memory: int | str | None = None) -> None:
    """Make sure that `torch.cuda` has at least `number` GPUs; print one line on them.

    They are simulated, unless HELPERS_GPUS=real asks for the machine's own. Asking
    again for others ends the simulated ones; tensors on them go on as CPU tensors.

    Args:
        number: of GPUs.
        card: which one to simulate: "T4", "V100", "A100", "H100", "H200", "B200" or
            "L40S".
        memory: cap for each GPU, in bytes or as text ("512MB").

    Raises:
        ValueError: for a number, card or memory that cannot be.
        RuntimeError: if HELPERS_GPUS=real and the machine has fewer, or if this process
            has begun to use real ones and is to simulate.

    Taught in 00-start-here.
    """
    choice = _wanted()
    os.environ["SIMGPU"] = "off" if choice == "real" else "on"  # of ranks, too
    wanted_gpus = simgpu.check_request(number, card, memory)
    if choice == "real":
        simgpu.stop()
        real = torch.cuda.device_count()
        if real < number:
            raise RuntimeError(
                f"HELPERS_GPUS=real, but this machine has {real} of {number} GPUs; "
                "set HELPERS_GPUS=simulated"
            )
        _use_real(number, memory)
        return
    if simgpu.request() != wanted_gpus:
        simgpu.stop()
        simgpu.start(number, card, memory)
    size = simgpu.show_bytes(torch.cuda.get_device_properties(0).total_memory)
    what = f"simulated {'GPUs' if number > 1 else 'GPU'} ({card.upper()}, {size} each)"
    print(f"{number} {what}: values computed on this CPU, memory and time counted.")
    if simgpu.real_gpus() >= number and "HELPERS_GPUS" not in os.environ:
        print(f"HELPERS_GPUS=real takes this machine's own: {simgpu.real_gpus()} real.")


def _wanted() -> str:
    """What HELPERS_GPUS asks for: "simulated", as where it is not set, or "real"."""
    choice = os.environ.get("HELPERS_GPUS", "simulated")
    if choice not in _CHOICES:
        raise ValueError(f"HELPERS_GPUS={choice!r}; use {' or '.join(_CHOICES)}")
    return choice


def _use_real(number: int, memory: int | str | None) -> None:
    for index in range(number):
        simgpu.cap_memory(index, memory)
    names = Counter(torch.cuda.get_device_name(i) for i in range(number))
    cards = ", ".join(f"{count} x {name}" for name, count in sorted(names.items()))
    cap = "" if memory is None else f", capped at {memory} each"
    plural = "GPUs" if number > 1 else "GPU"
    print(f"{number} real {plural}: {cards}{cap}. Memory and time are measured.")


class Copy(NamedTuple):
    """One copy between two devices."""

    source: str  # "cpu" or "cuda:0"
    target: str
    nbytes: int


class Copies(list):
    """The copies that `count_copies` saw, in order."""

    @property
    def nbytes(self) -> int:
        """Bytes of all copies together."""
        return sum(copy.nbytes for copy in self)

    def __repr__(self) -> str:
        total = f"{len(self)} {'copy' if len(self) == 1 else 'copies'}"
        lines = [f"{total}, {self.nbytes:,} bytes"]
        groups: dict[tuple[str, str], list[int]] = {}
        for copy in self:
            groups.setdefault((copy.source, copy.target), []).append(copy.nbytes)
        for (source, target), sizes in groups.items():
            times = f"{len(sizes)} x {source} to {target}"
            lines.append(f"  {times:24} {sum(sizes):>12,} bytes")
        return "\n".join(lines)


@contextlib.contextmanager
def count_copies() -> Iterator[Copies]:
    """Count the copies between devices while the block runs.

    Simulated GPUs: from the simulator's log. Real GPUs: from `torch.profiler`.

    Raises:
        RuntimeError: if there are no GPUs.

        with count_copies() as copies:
            x.cuda()
        copies

    Taught in 00-start-here.
    """
    copies = Copies()
    if simgpu.is_running():
        with simgpu.timeline().recording() as events:
            yield copies
        copies += [
            Copy(event.source, event.target, event.nbytes)
            for event in events
            if event.kind == "copy"
        ]
        return
    if not torch.cuda.is_available():
        raise RuntimeError("there are no GPUs to count copies of; call need_gpus first")
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield copies
        _wait_for_all()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        copies += copies_in_trace(json.loads(trace.read_text(encoding="utf-8")))


def copies_in_trace(trace: dict) -> list[Copy]:
    """The copies between devices in a Chrome trace of `torch.profiler`.

    The trace does not say which card a card-to-card copy came from: "cuda".
    """
    found = []
    for event in trace["traceEvents"]:
        if event.get("cat") != "gpu_memcpy":
            continue
        about = event["args"]
        here = f"cuda:{about['device']}"
        ends = {"HtoD": ("cpu", here), "DtoH": (here, "cpu"), "PtoP": ("cuda", here)}
        for way, (source, target) in ends.items():
            if way in event["name"]:
                found.append(Copy(source, target, int(about["bytes"])))
    return found


def gpu_seconds(program: Callable, *args) -> float:
    """Seconds until `program(*args)` is done on the host and on every GPU.

    Simulated GPUs: counted, from an empty log, which `timeline()` then draws. Real
    GPUs: measured, the second of two runs.

    Taught in 00-start-here.
    """
    if simgpu.is_running():
        simgpu.timeline().clear()
        program(*args)
        return simgpu.timeline().seconds
    seconds = 0.0
    for _ in range(2):
        _wait_for_all()
        start = time.perf_counter()
        program(*args)
        _wait_for_all()
        seconds = time.perf_counter() - start
    return seconds


def host_seconds() -> float:
    """What the host's clock says, in seconds, without waiting for any GPU.

    Simulated GPUs: the simulated host's, which launching and waiting move on. Real
    GPUs: `time.perf_counter()`.

    Taught in 07-time-it-right.
    """
    return simgpu.timeline().host if simgpu.is_running() else time.perf_counter()


def kind_of_time() -> str:
    """ "simulated" or "measured": what the seconds of `gpu_seconds` are.

    Taught in 05-overlap-with-streams.
    """
    return "simulated" if simgpu.is_running() else "measured"


def _wait_for_all() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def timeline(
    phases: dict[str, int] | None = None,
) -> simgpu.Timeline | simgpu.pictures.Picture | str:
    """What ran on the simulated GPUs, as a picture; a line of text on real ones.

    Args:
        phases: name -> how many of the events it has, in turn, to mark it.

    Taught in 00-start-here.
    """
    if simgpu.is_running():
        log = simgpu.timeline()
        return simgpu.pictures.timeline(log, phases=phases) if phases else log
    return "The timeline shows simulated GPUs; lesson 07 shows how to record real ones."
