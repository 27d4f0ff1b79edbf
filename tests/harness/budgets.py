"""What a lesson may take, and what it took: memory, time, sockets and files.

Time is limited twice: as what the notebook's processes computed, and as what passed on
the clock less what others computed meanwhile. So a busy machine fails no test, and on a
quiet one the second is the time on the clock.

Leaves out: files written elsewhere than in the notebook's folder, the home folder and
/dev/shm (tests/tools/faults.py runs the lessons as a user who may write nowhere else,
and looks at the whole course), and all systems but Linux.
"""

import importlib.util
import os
import re
import time
from pathlib import Path

import psutil

from support.limits import JOB
from tests.harness import files
from tests.harness.usage import Sampler

# PyTorch built for CUDA: a process that imports it takes some 150 MB more
_PYTORCH = Path(importlib.util.find_spec("torch").origin).parent
CUDA = any(_PYTORCH.glob("lib/*torch_cuda.*"))
MEMORY = 2.4e9 if CUDA else 1.2e9  # bytes of all processes of a notebook together
SECONDS = JOB  # nearly twice what the slowest computed on the slowest machine: 160 s
# a notebook whose code says so may ask a name server: see `Sampler.questions`
STORE = re.compile(
    r"TCPStore|torchrun|torch\.distributed\.run"
    r'|Ranks\((?![^)]*device="cpu")'  # on GPUs they meet at one
)
# one that itself opens a store, to show where that listens, may listen there
OPENED = re.compile(r"TCPStore\([^)]*is_master=True")


class Measurement:
    """What a notebook takes from now on; stop its `sampler` in the end.

    Args:
        mark: of its processes; the first of them must start after this.
        folder: where the notebook is; it must not write there.
        home: the home folder of its processes alone; it must not write there either.
    """

    def __init__(self, mark: str, folder: Path, home: Path) -> None:
        self._folder, self._home = folder, home
        self._files = self._watched_files()
        self._clock, self._busy, self._own = time.monotonic(), _busy(), _own()
        self.sampler = Sampler(mark)

    def _watched_files(self) -> dict[str, tuple[int, int]]:
        return files.files(self._folder) | files.files_at_home(self._home)

    def figures(self) -> dict[str, object]:
        """Returns what it took, as plain data, when all its processes have ended."""
        self.sampler.stop()
        cpu, clock = _own() - self._own, time.monotonic() - self._clock
        return {
            "peak": self.sampler.peak,
            "cpu": cpu,
            "clock": clock,
            "others": max(0.0, _busy() - self._busy - cpu),
            "sockets": sorted(self.sampler.outward),
            "stores": sorted(self.sampler.stores),
            "questions": sorted(self.sampler.questions),
            "files": files.changed(self._files, self._watched_files())
            + sorted(files.still_unused(sorted(self.sampler.shared))),
        }


def has_code(cells: list, pattern: re.Pattern) -> bool:
    """Whether the code of a notebook has what `STORE` or `OPENED` describes."""
    code = (cell.source for cell in cells if cell.cell_type == "code")
    return any(pattern.search(source) for source in code)


def over(figures: dict) -> list[str]:
    """Returns what a notebook took that it must not, in words."""
    found = []
    if not figures["peak"]:
        found.append("none of its processes was seen")
    if figures["peak"] > MEMORY:
        most = f"{MEMORY / 1e6:.0f} MB is the most"
        found.append(f"its processes had {figures['peak'] / 1e6:.0f} MB; {most}")
    if figures["cpu"] > SECONDS:
        most = f"{SECONDS:.0f} is the most"
        found.append(f"its processes computed for {figures['cpu']:.0f} s; {most}")
    elif figures["clock"] - figures["others"] > SECONDS:
        what = f"{figures['clock']:.0f} s, {figures['others']:.0f} of them for others"
        found.append(f"it took {what}; {SECONDS:.0f} is the most")
    found += [f"left running: {words}" for words in figures["left"]]
    found += [
        f"a socket not on loopback: {words}"
        for words in figures["sockets"]
        if not (figures["opens_store"] and words.startswith(psutil.CONN_LISTEN))
    ]
    if not figures["uses_store"]:
        found += [f"asked a name server: {words}" for words in figures["questions"]]
    found += [f"not in the temporary folder: {path}" for path in figures["files"]]
    return found


def table(measured: list[dict]) -> str:
    """Returns what each notebook took, a line for each."""
    width = max(len(figures["notebook"]) for figures in measured)
    lines = [f"{'notebook':{width}}  peak MB  computed s  clock s"]
    for figures in sorted(measured, key=lambda figures: figures["notebook"]):
        line = (
            f"{figures['notebook']:{width}}  {figures['peak'] / 1e6:7.0f}"
            f"  {figures['cpu']:10.1f}  {figures['clock']:7.1f}"
        )
        if figures["stores"]:
            line += f"  {len(figures['stores'])} stores of torchrun on all addresses"
        if figures["questions"]:
            line += "  asked a name server"
        lines.append(line)
    return "\n".join(lines)


def _own() -> float:
    """Seconds that ended children of this process, and theirs, have computed."""
    times = os.times()
    return times.children_user + times.children_system


def _busy() -> float:
    """Seconds that this machine has computed, or was not there (steal)."""
    times = psutil.cpu_times()._asdict()
    counted = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(times[name] for name in counted)
