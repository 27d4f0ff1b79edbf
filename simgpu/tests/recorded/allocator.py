"""What the allocator does on a GPU: programs, recordings of them, and replays.

Random programs of `torch.empty` and `del` whose figures must agree after every step,
and steps of training in float32, float16 and bfloat16, with every event recorded.
The programs run on a real GPU, where this file writes down what they did, and on a
simulated one. Nothing here knows on which.

    python tests/recorded/allocator.py allocator_my_card.json       # with CUDA
"""

import argparse
import gc
import json
import os
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

from simgpu._device.allocator import CachingAllocator

MIB = 2**20


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


def agreeing_steps(golden: dict) -> tuple[int, int, list[str]]:
    """In how many steps the model has the card's figures, of how many; its faults."""
    allocated, reserved, stats = replay_trace(golden)
    ours = list(zip(allocated, reserved, strict=True))
    measured = list(zip(golden["allocated"], golden["reserved"], strict=True))
    agreeing = sum(a == b for a, b in zip(ours, measured, strict=True))
    name, faults = golden["name"], []
    for step, a, b in zip(golden["steps"], ours, measured, strict=True):
        if a != b:
            faults.append(f"{name}, step {step}: {a} bytes, measured {b}")
            break
    for key in sorted(stats.keys() & golden["stats"].keys() - {"max_split_size"}):
        if stats[key] != golden["stats"][key]:
            faults.append(f"{name}: {key} {stats[key]}, not {golden['stats'][key]}")
    return agreeing, len(ours), faults


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


def placed_blocks(golden: dict) -> tuple[int, int, list[str]]:
    """How many blocks the model puts where the card did, of how many, and its faults.

    It replays what the allocator was asked for, and is told where segments begin.
    """
    if golden["left"]:
        return 0, 0, [f"{golden['name']}: {golden['left']} bytes were reserved before"]
    memory = Replay(golden["total"])
    name, live, faults, placed, blocks = golden["name"], {}, [], 0, 0
    for action, address, nbytes, stream in golden["events"]:
        if action == "segment_alloc":
            memory.addresses.append(address)
        elif action == "alloc":
            live[address] = block = memory.malloc(nbytes, stream)
            blocks += 1
            placed += block.address == address and not memory.addresses
        elif action == "free_requested":
            memory.free(live.pop(address))
    if placed < blocks:
        faults.append(f"{name}: {blocks - placed} blocks are put elsewhere")
    ours = {
        "allocated": memory.allocated,
        "reserved": memory.reserved,
        "peak_allocated": memory.both.allocated_bytes.peak,
        "peak_reserved": memory.both.reserved_bytes.peak,
    }
    faults += [
        f"{name}: {key} {value}, measured {golden[key]}"
        for key, value in ours.items()
        if value != golden[key]
    ]
    return placed, blocks, faults


# -- a file of them --------------------------------------------------------------------


def record(training: Iterable[str] = tuple(TRAINING)) -> dict:
    """A recording of the current GPU, of all programs and of steps of training."""
    return {
        "what": "random programs and steps of training, event by event",
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": [
            *(record_trace(name) for name in TRACES),
            *(record_training(name) for name in training),
        ],
    }


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    path = parser.parse_args(words).file
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if os.environ.get(name):
            raise SystemExit(f"{name} changes the allocator: unset it")
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU here")
    path.write_text(json.dumps(record()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
