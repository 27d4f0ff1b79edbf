"""What came out of a dry run, for people and for programs."""

from collections import defaultdict
from dataclasses import asdict, dataclass, field

GIB = 2**30


@dataclass
class DryReport:
    """What one rank of a job would need, and how long its step would take.

    Attributes:
        fits: whether it ran without running out of memory.
        peak_bytes: the most that tensors took at a time.
        reserved_bytes: the most that the caching allocator held.
        total_bytes: of the card.
        step_seconds: of a steady step; None if no two steps were seen.
    """

    world: int
    rank: int
    card: str
    fits: bool
    peak_bytes: int
    reserved_bytes: int
    total_bytes: int
    step_seconds: float | None
    compute_seconds: float | None
    exposed_seconds: float | None
    host_seconds: float | None
    tokens_per_second: float | None
    mfu: float | None
    unknown_reads: list
    memory_by_kind: dict
    memory_by_line: list
    exposed_by_group: dict
    error: str = ""
    steps: int = 0

    def as_dict(self) -> dict:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"rank {self.rank} of {self.world}, {self.card}: "
                 + ("fits" if self.fits else "does not fit")]
        lines.append(f"peak {self.peak_bytes / GIB:.2f} GiB, reserved "
                     f"{self.reserved_bytes / GIB:.2f} of {self.total_bytes / GIB:.2f}")
        for kind, size in self.memory_by_kind.items():
            lines.append(f"  {kind:14}{size / GIB:8.2f} GiB")
        if self.step_seconds:
            lines.append(f"step {self.step_seconds * 1e3:.1f} ms: computing "
                         f"{self.compute_seconds * 1e3:.1f}, messages that nothing hides "
                         f"{self.exposed_seconds * 1e3:.1f}, host {self.host_seconds * 1e3:.1f}")
        if self.mfu:
            lines.append(f"MFU {self.mfu:.1%}")
        for read in self.unknown_reads:
            lines.append(f"{read}")
        if self.error:
            lines.append(self.error)
        return "\n".join(lines)


def make(dry, out_of_memory) -> DryReport:
    runtime, gpu = dry.runtime, dry.gpu
    peak, kinds, lines = dry.watch.peak()
    step = compute = exposed = host = mfu = None
    groups: dict[str, float] = {}
    if len(dry.moments) > 1:
        (first, _, i), (last, _, j) = dry.moments[-2:]
        step = last - first
        compute, groups = split(dry.events, first, last)
        exposed = sum(groups.values())
        host = max(step - compute - exposed, 0.0)
        flops = sum(e.flops for e in dry.events[i:j] if e.kind == "kernel")
        mfu = flops / step / gpu.card.peak_flops("bfloat16") if hasattr(gpu.card, "peak_flops") else None
    return DryReport(
        dry.world, dry.rank, gpu.card.name, out_of_memory is None, peak,
        gpu.memory.both.reserved_bytes.peak, gpu.memory.total, step, compute, exposed,
        host, None, mfu,
        [{"line": line, "value": v, "times": n} for (line, v), n in dry.reads.items()],
        kinds, lines[:20], groups, str(out_of_memory or ""), len(dry.moments),
    )


def split(events, first: float, last: float) -> tuple[float, dict[str, float]]:
    """Seconds in which kernels run, and in which only messages do, by group and kind."""
    kernels = merged((e.start, e.end) for e in events
                     if e.kind != "collective" and e.end > first and e.start < last)
    kernels = [(max(a, first), min(b, last)) for a, b in kernels]
    busy = sum(b - a for a, b in kernels)
    alone: dict[str, float] = defaultdict(float)
    taken = list(kernels)
    for event in sorted((e for e in events if e.kind == "collective"
                         and e.end > first and e.start < last), key=lambda e: e.start):
        start, end = max(event.start, first), min(event.end, last)
        free = end - start - covered(taken, start, end)
        if free > 0:
            alone[f"{event.name.split()[0]}, {event.group}"] += free
            taken = merged([*taken, (start, end)])
    return busy, dict(sorted(alone.items(), key=lambda item: -item[1]))


def merged(spans) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def covered(spans, start, end) -> float:
    return sum(max(min(b, end) - max(a, start), 0.0) for a, b in spans)
