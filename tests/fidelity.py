"""How close the simulator comes to real GPUs: programs, predictions and a report.

    python tests/fidelity.py        # predicted beside measured, for every golden file

The programs here run on a real GPU, where `tests/record_on_gpu.py` writes down what
they took (a golden file), and on a simulated one of the same card, for the prediction:
allocations whose figures must agree to the byte, steps of training in float32, float16
and bfloat16 whose memory must be near, and programs, these steps among them, whose time
must be near. Nothing here knows on which it runs.
"""

import gc
import json
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

if __package__ in (None, ""):  # run as a script, maybe where nothing is installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from helpers import simgpu
from simgpu.device.allocator import CachingAllocator

GOLDEN = Path(__file__).parent / "golden"
MIB = 2**20
OF_MEMORY = 0.01  # a predicted peak may differ by this share
OF_TIME = 1.3  # a predicted time may be so many times too long or too short


# -- allocations -----------------------------------------------------------------------

# name -> (seed, steps, bytes that the program may take, or None)
TRACES = {
    "small": (1, 300, None),
    "mixed": (2, 300, None),
    "two streams": (3, 300, None),
    "on a full card": (4, 300, 160 * MIB),
}
_SIZES = {
    "small": (2_000, 100_000, MIB),
    "mixed": (2_000, MIB, 10 * MIB, 40 * MIB),
    "two streams": (100_000, 4 * MIB, 24 * MIB),
    "on a full card": (MIB, 10 * MIB, 40 * MIB),
}


def trace_steps(name: str) -> list[list]:
    """The steps of a program, the same everywhere.

    ["alloc", bytes, stream], ["record", tensor], ["free", tensor] or ["empty"]; a
    tensor is a number, taken modulo how many live.
    """
    seed, count, _ = TRACES[name]
    draw = random.Random(seed).random  # the one method that never changes
    streams = 2 if name == "two streams" else 1
    steps = []
    for _ in range(count):
        kind = draw()
        if kind < 0.55:
            most = _SIZES[name][int(draw() * len(_SIZES[name]))]
            steps.append(["alloc", int(draw() * most), int(draw() * streams)])
        elif kind < 0.65 and streams > 1:
            steps.append(["record", int(draw() * 1000)])
        elif kind < 0.98:
            steps.append(["free", int(draw() * 1000)])
        else:
            steps.append(["empty"])
    return steps


def record_trace(name: str) -> dict:
    """Run a program of `torch.empty` and `del`; the figures after every step."""
    start_afresh()
    total = torch.cuda.mem_get_info()[1]
    limit = TRACES[name][2]
    fraction = 1.0 if limit is None else limit / total
    torch.cuda.set_per_process_memory_fraction(fraction)
    other = torch.cuda.Stream()
    streams = (torch.cuda.current_stream(), other)
    live: list[tuple[torch.Tensor, bool]] = []
    allocated, reserved, steps = [], [], trace_steps(name)
    watch()
    for kind, *args in steps:
        if kind == "alloc":
            try:
                with torch.cuda.stream(streams[args[1]]):
                    live.append((torch.empty(args[0], dtype=torch.uint8,
                                             device="cuda"), False))  # fmt: skip
            except torch.OutOfMemoryError:
                pass
        elif kind == "empty":
            torch.cuda.empty_cache()
        elif live:
            number = args[0] % len(live)
            tensor, recorded = live[number]
            if kind == "record":
                tensor.record_stream(other)
                live[number] = (tensor, True)
            else:
                del live[number]
            del tensor
            if recorded:  # so that it is free at the next call, not some time later
                torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
        reserved.append(torch.cuda.memory_reserved())
    stats = dict(torch.cuda.memory_stats())
    segments = [event[1:3] for event in watched() if event[0] == "segment_alloc"]
    live.clear()
    torch.cuda.set_per_process_memory_fraction(1.0)
    return {
        "name": name, "total": total, "fraction": fraction, "steps": steps,
        "allocated": allocated, "reserved": reserved, "stats": stats,
        "segments": segments,
    }  # fmt: skip


def start_afresh() -> int:
    """No cache, no workspaces, all statistics at zero; the bytes that are left."""
    gc.collect()
    clear_workspaces()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    return torch.cuda.memory_reserved()


def clear_workspaces() -> int:
    """Free what the libraries keep in PyTorch's memory; how many bytes that were."""
    before = torch.cuda.memory_allocated()
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        torch.cuda.synchronize()
        clear()
    return before - torch.cuda.memory_allocated()


def watch() -> None:
    """Record what the allocator does from now on."""
    torch.cuda.memory._record_memory_history(
        context=None, stacks="python", max_entries=10**6, clear_history=True
    )


def watched() -> list[list]:
    """What it did: [action, address, bytes, stream]; streams numbered as they came."""
    trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    trace = [event for event in trace if "addr" in event]
    base = min((e["addr"] for e in trace if e["action"] == "segment_alloc"), default=0)
    streams = {0: 0}
    return [
        [
            event["action"],
            event["addr"] - base,
            event["size"],
            streams.setdefault(event["stream"], len(streams)),
        ]
        for event in trace
        if event["action"] != "snapshot"
    ]


class Replay(CachingAllocator):
    """The model, on a card whose addresses are known: ties break as they did there."""

    def __init__(self, total: int, addresses=()):
        super().__init__(0, total)
        self.addresses = list(addresses)

    def _room_for(self, nbytes: int) -> int:
        return self.addresses.pop(0) if self.addresses else super()._room_for(nbytes)


def replay_trace(golden: dict) -> tuple[list[int], list[int], dict]:
    """What the model says: allocated and reserved after each step, and statistics."""
    memory = Replay(golden["total"], [address for address, _ in golden["segments"]])
    memory.fraction = golden["fraction"]
    live, allocated, reserved = [], [], []
    for kind, *args in golden["steps"]:
        if kind == "alloc":
            try:
                live.append(memory.malloc(args[0], args[1]))
            except torch.OutOfMemoryError:
                pass
        elif kind == "empty":
            memory.empty_cache()
        elif live:
            number = args[0] % len(live)
            block = live[number]
            if kind == "free":
                del live[number]
            if block is not None and kind == "free":
                memory.free(block)
            elif block is not None:
                memory.record_stream(block, 0, 1)
        allocated.append(memory.allocated)
        reserved.append(memory.reserved)
    return allocated, reserved, flat(memory.stats())


def flat(stats: dict) -> dict:
    """Statistics as `torch.cuda.memory_stats` names them."""
    found = {}
    for name, value in stats.items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": n for key, n in flat(value).items()}
        else:
            found[name] = value
    return found


def faults_of_trace(golden: dict) -> list[str]:
    """Where the model's figures are not those of the card."""
    allocated, reserved, stats = replay_trace(golden)
    faults = []
    for what, ours in (("allocated", allocated), ("reserved", reserved)):
        for i, (a, b) in enumerate(zip(ours, golden[what], strict=True)):
            if a != b:
                step = golden["steps"][i]
                faults.append(
                    f"{golden['name']}, step {i} {step}: {what} {a}, measured {b}"
                )
                break
    for key in stats.keys() & golden["stats"].keys() - {"max_split_size"}:
        if stats[key] != golden["stats"][key]:
            measured = golden["stats"][key]
            faults.append(f"{golden['name']}: {key} {stats[key]}, measured {measured}")
    return sorted(faults)


# -- training --------------------------------------------------------------------------


class Attention(nn.Module):
    """A block of a transformer in plain operations: no choice of a fused kernel."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):  # (batch, length, width)
        parts = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts
        )
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(self.up(self.norms[1](x)).relu())


# the types of a training step; below float32 it is mixed, under autocast
NUMBERS = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def training_step(
    model: nn.Module, loss_of: Callable[[], torch.Tensor], numbers: str
) -> Callable[[], None]:
    """A step of Adam: float16 has a scaler, bfloat16 and float32 need none."""
    mixed = {"dtype": NUMBERS[numbers], "enabled": numbers != "float32"}
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=numbers == "float16")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", **mixed):
            loss = loss_of()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def mlp(numbers: str = "float32", size: int = 1024) -> Callable[[], None]:
    """A step of training: three layers, 512 rows."""
    layers = (nn.Linear(size, 4 * size), nn.ReLU(), nn.Linear(4 * size, size),
              nn.ReLU(), nn.Linear(size, 10))  # fmt: skip
    model = nn.Sequential(*layers).cuda()
    x = torch.randn(512, size, device="cuda")
    y = torch.randint(10, (512,), device="cuda")
    return training_step(
        model, lambda: nn.functional.cross_entropy(model(x), y), numbers
    )


def transformer(
    numbers: str = "float32", width: int = 256, words: int = 1000
) -> Callable[[], None]:
    """A step of training: two blocks over 16 sequences of 128 words."""
    model = nn.Sequential(
        nn.Embedding(words, width), Attention(width, 4), Attention(width, 4),
        nn.Linear(width, words),
    ).cuda()  # fmt: skip
    x = torch.randint(words, (16, 128), device="cuda")

    def loss() -> torch.Tensor:
        scores, target = model(x[:, :-1]), x[:, 1:].flatten()
        return nn.functional.cross_entropy(scores.flatten(0, 1), target)

    return training_step(model, loss, numbers)


# name -> what makes the step
TRAINING: dict[str, Callable[[], Callable[[], None]]] = {
    f"{make.__name__} {numbers}": lambda make=make, numbers=numbers: make(numbers)
    for make in (mlp, transformer)
    for numbers in NUMBERS
}
# for a rehearsal: half precision is slow on a CPU that has no instructions for it
QUICK_TRAINING: dict[str, Callable[[], Callable[[], None]]] = {
    f"small mlp {numbers}": lambda numbers=numbers: mlp(numbers, size=192)
    for numbers in NUMBERS
}


def record_training(name: str) -> dict:
    """Three steps of training: every event of the allocator, and the memory it took."""
    left = start_afresh()
    torch.manual_seed(0)
    watch()
    step = (TRAINING | QUICK_TRAINING)[name]()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    found = {
        "name": name,
        "total": torch.cuda.mem_get_info()[1],
        "left": left,  # reserved before it began: nothing, or no replay is exact
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "events": watched(),
    }
    found["workspaces"] = clear_workspaces()  # bytes that are cuBLAS's, not ours
    return found


def faults_of_events(golden: dict) -> list[str]:
    """Replay what the allocator was asked for; where the model did something else."""
    events = golden["events"]
    if golden["left"]:
        return [f"{golden['name']}: {golden['left']} bytes were reserved before it"]
    memory = Replay(golden["total"])
    live, name = {}, golden["name"]
    for i, (action, address, nbytes, stream) in enumerate(events):
        if action == "segment_alloc":
            memory.addresses.append(address)
        elif action == "alloc":
            live[address] = block = memory.malloc(nbytes, stream)
            if block.address != address or memory.addresses:
                return [f"{name}, event {i}: {nbytes} bytes are put elsewhere"]
        elif action == "free_requested":
            memory.free(live.pop(address))
    ours = {
        "allocated": memory.allocated,
        "reserved": memory.reserved,
        "peak_allocated": memory.both.allocated_bytes.peak,
        "peak_reserved": memory.both.reserved_bytes.peak,
    }
    return [
        f"{name}: {key} {value}, measured {golden[key]}"
        for key, value in ours.items()
        if value != golden[key]
    ]


# -- times -----------------------------------------------------------------------------


def _matmul(size: int, dtype: str) -> Callable[[], None]:
    a, b = (
        torch.randn(size, size, device="cuda").to(getattr(torch, dtype))
        for _ in range(2)
    )
    return lambda: a @ b


def _elementwise(count: int) -> Callable[[], None]:
    x = torch.randn(count, device="cuda")
    return lambda: x.mul(2).add(1).relu()


def _copy(way: str, memory: str, nbytes: int) -> Callable[[], None]:
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=memory == "pinned")
    card = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    target, source = (card, host) if way == "to" else (host, card)
    return lambda: target.copy_(source, non_blocking=memory == "pinned")


def _overlap(size: int, nbytes: int) -> Callable[[], None]:
    """A copy on a side stream beside matrix products on the current one."""
    side = torch.cuda.Stream()
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)
    card = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    x = torch.randn(size, size, device="cuda")

    def run() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            card.copy_(host, non_blocking=True)
        for _ in range(3):
            x @ x
        torch.cuda.current_stream().wait_stream(side)

    return run


def _tiny(count: int) -> Callable[[], None]:
    x = torch.zeros(1, device="cuda")

    def run() -> None:
        for _ in range(count):
            x.add_(1)

    return run


# name -> what to call for the program
TIMED: dict[str, Callable[[], Callable[[], None]]] = {
    **{
        f"matmul {size} {dtype}": lambda size=size, dtype=dtype: _matmul(size, dtype)
        for dtype in NUMBERS
        for size in (256, 1024, 2048, 4096)
    },
    **{
        f"element-wise 2**{power}": lambda power=power: _elementwise(2**power)
        for power in (16, 20, 24)
    },
    **{
        f"copy {nbytes // 1024} KiB {way} the card, {memory}": (
            lambda way=way, memory=memory, nbytes=nbytes: _copy(way, memory, nbytes)
        )
        for way in ("to", "from")
        for memory in ("pinned", "pageable")
        for nbytes in (64 * 1024, 4 * MIB, 64 * MIB)
    },
    "copy beside matmuls": lambda: _overlap(2048, 32 * MIB),
    "200 tiny kernels": lambda: _tiny(200),
    **{f"step of {name}": make for name, make in TRAINING.items()},
}
# for a rehearsal on the simulator, which computes it all on the CPU
QUICK = ("matmul 256 float32", "matmul 256 bfloat16", "element-wise 2**16",
         "copy 64 KiB to the card, pinned", "copy 4096 KiB from the card, pageable",
         "200 tiny kernels")  # fmt: skip


def measure(name: str, runs: int, warm_up: int) -> float:
    """Milliseconds that a program takes: the median of many runs."""
    torch.manual_seed(0)
    run = TIMED[name]()
    times = []
    for i in range(warm_up + runs):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if i >= warm_up:
            times.append(start.elapsed_time(end))
    return round(statistics.median(times), 6)


# -- a recording, and a prediction of it -----------------------------------------------


def record(quick: bool, runs: int = 50, warm_up: int = 10) -> dict:
    """All that a golden file holds of the current GPU, but for the GPU's name."""
    torch.set_float32_matmul_precision("highest")  # no TF32
    found = {
        "traces": [record_trace(name) for name in TRACES],
        "training": [
            record_training(name) for name in (QUICK_TRAINING if quick else TRAINING)
        ],
        "milliseconds": {
            name: measure(name, runs, warm_up)
            for name in (QUICK if quick else TIMED)
        },
    }  # fmt: skip
    gc.collect()
    torch.cuda.empty_cache()
    return found


def predict(golden: dict) -> list[tuple[str, float, float]]:
    """(what, predicted, measured) for the peak memory and the times of a golden file.

    Runs the same programs on a simulated card. A card that the simulator does not know
    has no predicted times. The libraries' workspaces are left out on both sides.
    """
    rows = []
    known = golden["card"] is not None
    simgpu.start(1, card=golden["card"] if known else "A100")
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for measured in golden["training"]:
            name = measured["name"]
            ours = record_training(name)
            peaks = [r["peak_allocated"] - r["workspaces"] for r in (ours, measured)]
            rows.append((f"peak of {name}, MiB", *(peak / MIB for peak in peaks)))
        for name, milliseconds in golden["milliseconds"].items() if known else ():
            rows.append((f"{name}, ms", measure(name, 1, 1), milliseconds))
    finally:
        torch.set_float32_matmul_precision(precision)
        simgpu.stop()
    return rows


def faults_of(rows: list[tuple[str, float, float]]) -> list[str]:
    """The predictions that are too far off, and pairs of times in the wrong order."""
    faults = []
    for what, predicted, measured in rows:
        allowed = 1 + OF_MEMORY if what.endswith("MiB") else OF_TIME
        if not 1 / allowed <= predicted / measured <= allowed:
            ratio = f"{predicted / measured:.2f} times"
            faults.append(f"{what}: {predicted:.4g} is {ratio} the measured figure")
    times = [row for row in rows if row[0].endswith(", ms")]
    for a in times:
        for b in times:
            if a[2] > b[2] * OF_TIME and a[1] <= b[1]:
                faults.append(f"{a[0]} should take longer than {b[0]}")
    return faults


def read(folder: Path = GOLDEN) -> dict[str, dict]:
    """The golden files, by name."""
    return {p.stem: json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))}


def report(golden: dict) -> str:
    """Predicted beside measured, for one golden file."""
    lines = [
        f"{golden['name']}, torch {golden['torch']}, CUDA {golden['cuda']}, "
        f"driver {golden['driver']}",
        f"  {'':44}{'predicted':>11}{'measured':>11}{'ratio':>8}",
    ]
    for what, predicted, measured in predict(golden):
        lines.append(
            f"  {what:44}{predicted:11.4f}{measured:11.4f}{predicted / measured:8.2f}"
        )
    for measured in golden["training"]:
        workspaces = measured["workspaces"] / MIB
        lines.append(f"  workspaces in {measured['name']}: {workspaces:.2f} MiB")
    faults = [fault for trace in golden["traces"] for fault in faults_of_trace(trace)]
    faults += [fault for t in golden["training"] for fault in faults_of_events(t)]
    steps = sum(len(trace["steps"]) for trace in golden["traces"])
    steps += sum(len(measured["events"]) for measured in golden["training"])
    exact = "as measured, to the byte" if not faults else "\n    ".join(faults)
    lines.append(f"  the allocator in {steps} steps: {exact}")
    return "\n".join(lines)


def main() -> None:
    found = read()
    for golden in found.values():
        print(report(golden), end="\n\n")
    if not found:
        print("not yet measured: run tests/record_on_gpu.py on a machine with CUDA")


if __name__ == "__main__":
    main()
