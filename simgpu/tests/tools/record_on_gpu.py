"""Record on a real GPU what the simulator should predict.

    python tests/tools/record_on_gpu.py [OUT_FOLDER]   # with CUDA; 5 minutes
    python tests/tools/record_on_gpu.py --simulated    # a rehearsal, without a GPU

Writes a folder <card>-torch<version> into OUT_FOLDER, by default `tests/recordings`,
with one file for each kind of figures, in the formats of `tests/recordings/README.md`:
products, convolutions, passes, small operations, copies, and what the allocator does. A
rehearsal takes few and small ones, and writes into a temporary folder. Needs torch 2.11
or later, and nothing else beyond this repository.
"""

import argparse
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

if __package__ in (None, ""):  # run as a script, maybe where nothing is installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.profiler import ProfilerActivity, profile

import simgpu
from recorded import allocator, operations
from simgpu._device.cards import CARDS

RECORDINGS = Path(__file__).resolve().parents[1] / "recordings"
WARM_UP, RUNS = 5, 25
MIB = 2**20

# kind -> the columns between card and time
COLUMNS: dict[str, list[tuple]] = {
    "gemm_fp16": [
        (m, n, k)
        for m in (1, 64, 512, 2048, 4096)
        for n, k in ((1024, 1024), (4096, 4096), (11008, 4096), (4096, 11008))
    ],
    "gemm_fp32": [
        *(("linear", 1, m, n, n) for m in (128, 1024) for n in (512, 2048, 4096)),
        *(("bmm", b, 256, 64, 256) for b in (16, 256)),
        *(("bmm", b, 512, 512, 512) for b in (4, 64)),
    ],
    "bmm_fp16": [("bmm", b, n) for b, n in ((64, 256), (64, 512), (32, 1024))],
    "conv_fp32": [
        (32, 64, 64, 3, 56, 1, 1), (32, 256, 64, 1, 56, 1, 0),
        (32, 128, 128, 3, 28, 1, 1), (32, 512, 512, 3, 7, 1, 1),
        (32, 3, 64, 7, 224, 2, 3),
    ],
    "vector_fp32": [
        (op, rows, width)
        for op in ("add", "relu", "gelu", "softmax", "ln")
        for rows, width in ((2048, 1024), (16384, 1024), (16384, 4096), (65536, 4096))
    ],
    "add_fp16": [("add", 6 * 2**power) for power in range(12, 26, 2)],
    "host_floor": [(op, RUNS) for op in ("add", "relu", "softmax", "ln", "bmm")],
}  # fmt: skip
COPIES = [
    (way, memory, nbytes)
    for way in ("host to device", "device to host")
    for memory in ("pinned", "pageable")
    for nbytes in (64 * MIB, 512 * MIB)
]
QUICK: dict[str, list[tuple]] = {
    "gemm_fp16": [(64, 128, 128)],
    "gemm_fp32": [("linear", 1, 64, 128, 128), ("bmm", 4, 32, 64, 64)],
    "bmm_fp16": [("bmm", 4, 64)],
    "conv_fp32": [(2, 8, 8, 3, 16, 1, 1)],
    "vector_fp32": [("ln", 256, 128)],
    "add_fp16": [("add", 6 * 2**12)],
    "host_floor": [("add", 1), ("bmm", 1)],
}
QUICK_COPIES = COPIES[:1] + COPIES[-2:-1]  # of 64 MiB


# -- times -----------------------------------------------------------------------------


def times_of(kind: str, columns: tuple, runs: int, warm_up: int) -> list[float]:
    """Microseconds of an operation, run again and again."""
    program = operations.KINDS[kind].program(*columns)
    tensors = [
        torch.randn(tensor.shape, device="cuda").to(tensor.dtype)
        for tensor in program.tensors
    ]
    measure = alone if operations.KINDS[kind].alone else operations.between_events
    with torch.no_grad():
        for _ in range(warm_up):
            program.run(*tensors)
        return [1e6 * measure(program.run, *tensors) for _ in range(runs)]


def alone(run: Callable, *tensors) -> float:
    """Seconds of an operation's kernels, from the profiler."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run(*tensors)
        torch.cuda.synchronize()
    rows = profiler.key_averages()
    on_gpu = [
        row for row in rows
        if row.device_type == torch.autograd.DeviceType.CUDA
        and not row.is_user_annotation
    ]  # fmt: skip
    return 1e-6 * sum(row.self_device_time_total for row in on_gpu)


def copy_rate(way: str, memory: str, nbytes: int, runs: int) -> float:
    """GB/s of a copy between the host and the card: the median."""
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=memory == "pinned")
    card = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    target, source = (card, host) if way == "host to device" else (host, card)
    seconds = [
        operations.between_events(lambda: target.copy_(source, non_blocking=True))
        for _ in range(runs)
    ]
    return nbytes / statistics.median(seconds) / 1e9


def record_times(card: str, quick: bool) -> dict[str, list[list]]:
    """kind -> rows."""
    runs, warm_up = (1, 1) if quick else (RUNS, WARM_UP)
    found: dict[str, list[list]] = {}
    for kind, all_columns in (QUICK if quick else COLUMNS).items():
        rows = found[kind] = []
        for columns in all_columns:
            times = times_of(kind, columns, runs, warm_up)
            middle = round(statistics.median(times), 3)
            last = [middle, round(min(times), 3)] if kind == "host_floor" else [middle]
            rows.append([card, *columns, *last])
    found["copies"] = [
        [card, *columns, round(copy_rate(*columns, runs), 3)]
        for columns in (QUICK_COPIES if quick else COPIES)
    ]
    return found


# -- files -----------------------------------------------------------------------------


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
    simulated = simgpu.count() > 0
    return {
        "hardware": name + (" (simulated)" if simulated else ""),
        "torch": torch.__version__,
        "cuda": "simulated" if simulated else torch.version.cuda,
        "driver": "simulated" if simulated else driver(),
        "precision": "float32 without TF32",
    }


def known_card() -> str:
    """The GPU as `simgpu.start` knows it, or else a name made of its own."""
    name = torch.cuda.get_device_name().removesuffix(" (simulated)")
    known = [key for key, card in CARDS.items() if card.name == name]
    return known[0] if known else re.sub(r"\W+", "-", name)


def write(path: Path, recorded: dict) -> None:
    """Write a recording; a row of numbers and words stays on one line."""
    text = json.dumps(recorded, indent=1)
    text = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", _on_one_line, text)
    path.write_text(text + "\n", encoding="utf-8")


def _on_one_line(match: re.Match) -> str:
    return "[" + " ".join(match[1].split()) + "]"


def record(folder: Path, quick: bool) -> Path:
    """Record all there is to record of the current GPU; the folder of the files."""
    card, about = known_card(), describe()
    torch.set_float32_matmul_precision("highest")  # no TF32
    files = record_times(card, quick)
    names = allocator.QUICK_TRAINING if quick else allocator.TRAINING
    files["allocator"] = [
        *(allocator.record_trace(name) for name in allocator.TRACES),
        *(allocator.record_training(name) for name in names),
    ]
    target = folder / f"{card}-torch{torch.__version__.split('+')[0]}"
    target.mkdir(parents=True, exist_ok=True)
    for kind, rows in files.items():
        write(target / f"{kind}.json", {**about, "card": card, "rows": rows})
    gc.collect()
    torch.cuda.empty_cache()
    return target


def main(arguments: list[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--simulated", action="store_true")
    chosen = parser.parse_args(arguments)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if os.environ.get(name):
            raise SystemExit(f"{name} changes the allocator: unset it")
    if chosen.simulated:
        folder = chosen.folder or Path(tempfile.mkdtemp(prefix="recordings-"))
        simgpu.start(1)
    else:
        folder = chosen.folder or RECORDINGS
        if not torch.cuda.is_available():
            raise SystemExit("no CUDA GPU here; --simulated rehearses without one")
    try:
        target = record(folder, quick=chosen.simulated)
    finally:
        if chosen.simulated:
            simgpu.stop()
    print(target)
    return target


if __name__ == "__main__":
    main()
