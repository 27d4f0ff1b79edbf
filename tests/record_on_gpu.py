"""Record on a real GPU what the simulator should predict.

    python tests/record_on_gpu.py [OUT_FOLDER]     # on a machine with CUDA; 2 minutes
    python tests/record_on_gpu.py --simulated      # a rehearsal, without a GPU

Writes <card>-torch<version>.json into OUT_FOLDER, by default `tests/golden`: what the
allocator does; memory and seconds of training steps in float32, float16 and bfloat16;
seconds of kernels and copies. A rehearsal takes the quick programs only and writes into
a temporary folder. `tests/fidelity.py` has the programs and reports on the files,
`tests/test_fidelity.py` tests the simulator against them. Needs torch 2.11 or later,
and nothing else beyond this repository.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

if __package__ in (None, ""):  # run as a script, maybe where nothing is installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from helpers import simgpu
from simgpu.device.cards import CARDS
from tests import fidelity


def driver() -> str:
    """The version of the driver, if it can be asked."""
    command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except OSError:
        return "unknown"
    return out.stdout.split("\n")[0].strip() or "unknown"


def describe() -> dict:
    """The GPU and the software; never the date, so that files can be compared."""
    name = torch.cuda.get_device_name().removesuffix(" (simulated)")
    known = [key for key, card in CARDS.items() if card.name == name]
    simulated = simgpu.count() > 0
    return {
        "card": known[0] if known else None,  # as simgpu.start() knows it
        "name": name + (" (simulated)" if simulated else ""),
        "total_memory": torch.cuda.get_device_properties(0).total_memory,
        "torch": torch.__version__,
        "cuda": "simulated" if simulated else torch.version.cuda,
        "driver": "simulated" if simulated else driver(),
    }


def write(folder: Path, recorded: dict) -> Path:
    """Write a golden file; its path."""
    card = recorded["card"] or re.sub(r"\W+", "-", recorded["name"])
    version = recorded["torch"].split("+")[0]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{card}-torch{version}.json"
    text = json.dumps(recorded, indent=1)
    # a list of numbers or of short lists stays on one line
    text = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", _on_one_line, text)
    path.write_text(text + "\n")
    return path


def _on_one_line(match: re.Match) -> str:
    return "[" + " ".join(match[1].split()) + "]"


def main(arguments: list[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--simulated", action="store_true")
    chosen = parser.parse_args(arguments)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if os.environ.get(name):
            raise SystemExit(f"{name} changes the allocator: unset it")
    if chosen.simulated:
        folder = chosen.folder or Path(tempfile.mkdtemp(prefix="golden-"))
        simgpu.start(1)
    else:
        folder = chosen.folder or fidelity.GOLDEN
        if not torch.cuda.is_available():
            raise SystemExit("no CUDA GPU here; --simulated rehearses without one")
    try:
        recorded = describe()
        if chosen.simulated:
            recorded |= fidelity.record(quick=True, runs=1, warm_up=1)
        else:
            recorded |= fidelity.record(quick=False)
    finally:
        if chosen.simulated:
            simgpu.stop()
    path = write(folder, recorded)
    print(path)
    return path


if __name__ == "__main__":
    main()
