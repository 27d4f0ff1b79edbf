"""What came out of a dry run, for people and for programs."""

import dataclasses
import pickle
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from simgpu._dry import words
from simgpu._dry.drawn import Drawn, timeline_of
from simgpu._dry.fed import Fed
from simgpu._frames import is_program_code, shown
from simgpu._pictures import dry_runs
from simgpu._pictures.picture import Picture
from simgpu._timing.job import JobTimeline, log_of

_FLEX = {True: "compiled", False: "uncompiled"}
_MATMUL = ("bfloat16", "float16")


class Moment(NamedTuple):
    """The end of a step."""

    time: float  # simulated seconds
    events: int  # until then
    recomputed: int  # floating-point operations of forward done again, until then
    fed: Fed  # in the step, to this rank
    host_seconds: float  # in which the host computed, until then


class Kept(NamedTuple):
    """Files that are written beside the report; of the first rank that runs."""

    timeline: Path | None = None
    snapshot: Path | None = None
    pictures: bool = False  # the report has what they show

    def write(self, dry) -> None:
        if dry.rank != dry.job.found.ranks[0]:
            return
        if self.timeline is not None:
            log = log_of(dry.runtime.clock, dry.rank, settle=False)
            JobTimeline([log], {}).export_chrome_trace(self.timeline)
        if self.snapshot is not None:
            self.snapshot.write_bytes(pickle.dumps(dry.watch.snapshot()))


NOTHING = Kept()


@dataclass
class DryReport:
    """What one rank of a job would need, and how long its step would take.

    Of several kinds of ranks, the memory is that of the one with the highest peak, and
    the times are those of the one that computes longest. All times are simulated.

    Attributes:
        world: ranks of the job.
        ranks: that ran.
        card: its name.
        fits: whether no rank that ran has run out of memory.
        peak_bytes: the most that tensors took at a time.
        reserved_bytes: the most that the caching allocator held.
        total_bytes: of the card.
        used_bytes: the most of it that was taken: reserved, CUDA's context, NCCL's
            buffers.
        outside_by_owner: of these, the most bytes that are not PyTorch's: "CUDA's
            context", "NCCL's buffers".
        memory_by_kind: bytes at the peak: parameters, gathered (whole ones, by FSDP),
            gradients, optimizer, buffers, activations, communication, workspaces (of
            cuBLAS), other.
        memory_by_line: the same by kind and line, largest first.
        steps: that were seen.
        step_seconds: of the last one; None if fewer than two were seen. So of all
            that follow.
        compute_seconds: of it in which a kernel ran or a copy.
        seconds_by_kernel: the same by the operation's name, the five longest.
        exposed_seconds: in which nothing but messages did.
        exposed_by_group: the same by collective and group, longest first.
        host_seconds: in which the card waited for the program.
        host_computes_seconds: in which the host computed with tensors of its own, as an
            optimizer does whose state is offloaded, whether or not the card waited.
        binds: "memory", "computing", "messages" or "the host".
        tokens: of a step of the whole job; None if that is not known.
        tokens_per_second: of the whole job.
        samples: of a step of the whole job, rows of a batch; None if that is not known.
        samples_per_second: of the whole job.
        samples_are: "images" or "samples".
        mfu: floating-point operations of the model, without those that activation
            checkpoints do again, over what the card could do in the time; of several
            ranks that ran, their mean.
        unknown_reads: values that the program has read and a dry run does not know.
        compiled: what `torch.compile` did: "eager", "fuse"; "" where nobody called it.
        flex_attention: "compiled", "uncompiled", or both: how it was called.
        error: of the out-of-memory.
        error_line: of the program where it came.
        kinds: reports of each rank, if several ran.
        drawn: what pictures show, if it was kept; no part of the JSON.
    """

    world: int
    ranks: list[int]
    card: str
    fits: bool
    peak_bytes: int
    reserved_bytes: int
    total_bytes: int
    memory_by_kind: dict[str, int]
    memory_by_line: list[dict]
    steps: int = 0
    step_seconds: float | None = None
    compute_seconds: float | None = None
    seconds_by_kernel: dict[str, float] = field(default_factory=dict)
    exposed_seconds: float | None = None
    exposed_by_group: dict[str, float] = field(default_factory=dict)
    host_seconds: float | None = None
    host_computes_seconds: float | None = None
    binds: str = ""
    tokens: int | None = None
    tokens_per_second: float | None = None
    samples: int | None = None
    samples_per_second: float | None = None
    samples_are: str = "samples"
    mfu: float | None = None
    unknown_reads: list[dict] = field(default_factory=list)
    compiled: str = ""
    flex_attention: list[str] = field(default_factory=list)
    error: str = ""
    error_line: str = ""
    used_bytes: int = 0
    outside_by_owner: dict[str, int] = field(default_factory=dict)
    kinds: list["DryReport"] = field(default_factory=list)
    drawn: Drawn | None = field(default=None, repr=False, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON has it."""
        made = dataclasses.asdict(dataclasses.replace(self, kinds=[], drawn=None))
        del made["drawn"]
        return made | {"kinds": [its.as_dict() for its in self.kinds]}

    def rates(self) -> list[tuple[float, int, str]]:
        """(a second, a step, of what): tokens, or else samples; images always."""
        found = []
        if self.tokens_per_second and self.tokens:
            found.append((self.tokens_per_second, self.tokens, "tokens"))
        if self.samples_per_second and self.samples:
            if not found or self.samples_are == "images":
                row = self.samples_per_second, self.samples, self.samples_are
                found.append(row)
        return found

    def timeline(self) -> JobTimeline:
        """The last step of the ranks that ran, on one axis; it draws itself.

        Without two steps, all that ran.

        Raises:
            ValueError: where nothing was kept to draw.
        """
        return timeline_of([self._drawn(its) for its in self.kinds or [self]])

    def memory_picture(self, rank: int | None = None) -> Picture:
        """What the memory held from the first allocation to the last, by kind.

        Args:
            rank: whose, of those that ran; None: of the one with the highest peak.

        Raises:
            ValueError: where nothing was kept to draw, or for a rank that did not run.
        """
        ran = [its for its in self.kinds or [self] if rank in (None, *its.ranks)]
        if not ran:
            raise ValueError(f"rank {rank} did not run; there are {self.ranks}")
        its = max(ran, key=lambda its: its.peak_bytes)
        course = self._drawn(its).course
        return dry_runs.memory(course, its.ranks[0], its.total_bytes)

    def _drawn(self, its: "DryReport") -> Drawn:
        if its.drawn is None:
            raise ValueError(
                "this report has nothing to draw: a script that runs in a process of "
                "its own leaves figures; give timeline= or memory_snapshot= a file"
            )
        return its.drawn

    def _repr_html_(self) -> str:
        return dry_runs.table(self)

    def __str__(self) -> str:
        return "\n".join(words.lines(self))


def of_dict(values: dict[str, Any]) -> DryReport:
    """The report that `as_dict` was made of, but for what pictures show."""
    return DryReport(**values | {"kinds": [of_dict(its) for its in values["kinds"]]})


def of(dry, full: BaseException | None) -> DryReport:
    """The report of one rank.

    Args:
        dry: what has been seen.
        full: the card's memory was.
    """
    job, gpu = dry.job, dry.gpu
    peak, by_kind, by_line = dry.watch.peak()
    made = DryReport(
        job.world, [dry.rank], gpu.card.name, full is None, peak,
        gpu.memory.both.reserved_bytes.peak, gpu.memory.total, by_kind, by_line,
        len(dry.moments), compiled=job.compile * dry.compiles,
        flex_attention=sorted(_FLEX[compiled] for compiled in dry.flex_attention),
        unknown_reads=[
            {"line": line, "value": value, "times": n}
            for (line, value), n in dry.reads.items()
        ],
        error=str(full or ""),
        error_line="" if full is None else _line_of(full),
        used_bytes=gpu.memory.share.most,
        outside_by_owner=_outside(gpu.memory.share),
    )  # fmt: skip
    if len(dry.moments) > 1:
        _time(made, dry)
    if full is not None:
        made.binds = "memory"
    return made


def _outside(share) -> dict[str, int]:
    """What else of a process had the card, when that was most."""
    found: Counter[str] = Counter()
    for name, nbytes in share.most_outside.items() if share.has_context else ():
        found["CUDA's context" if name == "context" else "NCCL's buffers"] += nbytes
    return dict(found)


def _line_of(error: BaseException) -> str:
    """The last line of the program in a traceback."""
    found, trace = "PyTorch", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_program_code(code.co_filename):
            name = shown(code.co_filename).replace("\\", "/").rpartition("/")[2]
            found = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _time(made: DryReport, dry) -> None:
    """What the last step took."""
    before, now = dry.moments[-2:]
    events = dry.events[before.events : now.events]
    made.step_seconds = seconds = now.time - before.time
    made.compute_seconds, made.exposed_by_group = _split(events, before.time, now.time)
    kernels: Counter[str] = Counter()
    for event in events:
        if event.kind == "kernel":
            kernels[event.name] += event.end - event.start
    made.seconds_by_kernel = dict(kernels.most_common(5))
    made.exposed_seconds = sum(made.exposed_by_group.values())
    rest = seconds - made.compute_seconds - made.exposed_seconds
    made.host_seconds = max(rest, 0.0)
    made.host_computes_seconds = now.host_seconds - before.host_seconds
    parts = {"computing": made.compute_seconds, "messages": made.exposed_seconds,
             "the host": made.host_seconds}  # fmt: skip
    made.binds = max(parts, key=parts.__getitem__)
    flops = sum(e.flops for e in events if e.kind == "kernel")
    flops -= now.recomputed - before.recomputed
    card = dry.gpu.card
    rate = max(card.flops[name] for name in _MATMUL)
    if not seconds:  # nothing ran on the GPU
        return
    made.mfu = flops / seconds / rate
    ranks = dry.job.world // dry.fed.sharing
    made.tokens = dry.job.tokens or now.fed.tokens * ranks or None
    if made.tokens is not None:
        made.tokens_per_second = made.tokens / seconds
    counted = now.fed.samples * ranks // dry.fed.cutting
    made.samples = dry.job.samples or counted or None
    if made.samples is not None:
        made.samples_per_second = made.samples / seconds
    if now.fed.images:
        made.samples_are = "images"


def merged(kinds: list[DryReport]) -> DryReport:
    """Of several ranks that ran together, one report."""
    highest = max(kinds, key=lambda its: its.peak_bytes)
    busiest = max(kinds, key=lambda its: its.compute_seconds or 0.0)
    fails = next((its for its in kinds if not its.fits), None)
    tokens = max((its.tokens or 0 for its in kinds), default=0) or None
    samples = max((its.samples or 0 for its in kinds), default=0) or None
    first = max(kinds, key=lambda its: its.samples_are == "images")
    seconds = busiest.step_seconds
    done = [its.mfu * its.step_seconds for its in kinds if its.mfu]
    reads: dict[tuple, int] = Counter()
    for its in kinds:
        for read in its.unknown_reads:
            reads[read["line"], read["value"]] += read["times"]
    return dataclasses.replace(
        busiest,
        ranks=[rank for its in kinds for rank in its.ranks],
        fits=fails is None,
        peak_bytes=highest.peak_bytes,
        reserved_bytes=max(its.reserved_bytes for its in kinds),
        used_bytes=max(its.used_bytes for its in kinds),
        outside_by_owner=highest.outside_by_owner,
        memory_by_kind=highest.memory_by_kind,
        memory_by_line=highest.memory_by_line,
        tokens=tokens,
        tokens_per_second=tokens / seconds if tokens and seconds else None,
        samples=samples,
        samples_per_second=samples / seconds if samples and seconds else None,
        samples_are=first.samples_are,
        mfu=sum(done) / len(kinds) / seconds if done and seconds else None,
        binds=busiest.binds if fails is None else "memory",
        unknown_reads=[
            {"line": line, "value": value, "times": n}
            for (line, value), n in reads.items()
        ],
        error=fails.error if fails is not None else "",
        error_line=fails.error_line if fails is not None else "",
        kinds=kinds,
        drawn=None,
    )


# -- a step ----------------------------------------------------------------------------


def _split(events, first: float, last: float) -> tuple[float, dict[str, float]]:
    """Seconds in which kernels ran, and in which only messages did, by group."""
    messages = [e for e in events if e.kind == "collective"]
    kernels = [e for e in events if e.kind != "collective"]
    busy = _spans((max(e.start, first), min(e.end, last)) for e in kernels)
    alone: Counter[str] = Counter()
    reached = 0  # of `busy`
    until = first  # all messages before have been counted
    for event in sorted(messages, key=lambda e: (e.start, e.end)):
        start, end = max(event.start, until), min(event.end, last)
        if end <= start:
            continue
        until = end
        while reached < len(busy) and busy[reached][1] <= start:
            reached += 1
        free, i = end - start, reached
        while i < len(busy) and busy[i][0] < end:
            free -= min(busy[i][1], end) - max(busy[i][0], start)
            i += 1
        if free > 1e-12:
            alone[f"{event.name.split()[0]}, {event.group}"] += free
    return sum(end - start for start, end in busy), dict(alone.most_common())


def _spans(pieces) -> list[tuple[float, float]]:
    """Times that may overlap, as ones that do not, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(piece for piece in pieces if piece[1] > piece[0]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found
