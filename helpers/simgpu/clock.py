"""Time and the log of what ran on simulated GPUs. Counted, never measured.

Models: a host that launches one operation after the other, and one queue for each
GPU. An operation takes the larger of FLOPs over rate and bytes over bandwidth; a copy
takes its bytes over the slowest link on its way; reading a value back makes the host
wait. Leaves out: several streams on one GPU, events, pinned memory and `non_blocking`
(every copy to or from the host makes it wait), the sizes that a GPU sends back for
`nonzero` and boolean masks, and what the host computes itself (the CPU's own
operations cost nothing here).

The efficiencies below are assumed, not measured.
"""

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

LAUNCH = 5e-6  # seconds of the host for each launch (assumed)
COPY_LATENCY = 10e-6  # seconds before the first byte of a copy moves (assumed)
OF_PEAK_FLOPS = 0.7  # a good matrix product reaches this share of the peak (assumed)
OF_PEAK_BYTES = 0.8  # and an element-wise kernel this share of bandwidth (assumed)
KEPT = 100_000  # events the log keeps; the oldest go first


class Event(NamedTuple):
    """One thing that ran: a kernel on a GPU, or a copy to or from one."""

    kind: str  # "kernel" or "copy"
    name: str  # the operation: "addmm"; for a copy "cpu to cuda:1"
    device: str  # whose queue it ran on
    start: float  # simulated seconds since the simulator started
    end: float
    nbytes: int  # bytes read and written, or copied
    flops: int
    source: str = ""  # of a copy
    target: str = ""


class Clock:
    """The host's time, each GPU's queue, and the log of events."""

    def __init__(self, gpus: list):
        self.gpus = gpus
        self.events: deque[Event] = deque(maxlen=KEPT)
        self.recordings: list[list[Event]] = []
        self.clear()

    def clear(self) -> None:
        """Forget every event and set the time to zero."""
        self.events.clear()
        self.host = 0.0  # simulated seconds
        self.busy_until = {gpu.index: 0.0 for gpu in self.gpus}

    def kernel(self, gpu, func, args, kwargs, tensors: list, out) -> None:
        """Log operation `func` on `gpu`, which gave `out`, and let it take its time."""
        outputs = [t for t in _as_tuple(out) if isinstance(t, torch.Tensor)]
        nbytes = sum(t.numel() * t.element_size() for t in (*tensors, *outputs))
        flops = _flops(func, args, kwargs, out)
        dtype = str(outputs[0].dtype).removeprefix("torch.") if outputs else "float32"
        rate = gpu.card.flops.get(dtype, gpu.card.flops["float32"]) * OF_PEAK_FLOPS
        seconds = max(
            flops / rate, nbytes / (gpu.card.memory_bandwidth * OF_PEAK_BYTES)
        )
        self.host += LAUNCH
        start, end = self._enqueue((gpu,), seconds)
        name = func._schema.name.removeprefix("aten::")
        self._log(Event("kernel", name, str(gpu.device), start, end, nbytes, flops))

    def copy(self, source, target, nbytes: int) -> None:
        """Log a copy of `nbytes` from `source` to `target` (a GPU, or None: host).

        The host waits for it, as it does for memory that is not pinned.
        """
        ends = [gpu for gpu in (source, target) if gpu is not None]
        if len(ends) == 2 and all(gpu.card.nvlink_bandwidth for gpu in ends):
            bandwidth = min(gpu.card.nvlink_bandwidth for gpu in ends)
        else:
            bandwidth = min(gpu.card.pcie_bandwidth for gpu in ends)
        self.host += LAUNCH
        start, end = self._enqueue(ends, COPY_LATENCY + nbytes / bandwidth)
        if len(ends) == 1:  # between cards, the host need not wait
            self.host = end
        a, b = (str(gpu.device) if gpu else "cpu" for gpu in (source, target))
        device = str(ends[-1].device)
        self._log(Event("copy", f"{a} to {b}", device, start, end, nbytes, 0, a, b))

    def _log(self, event: Event) -> None:
        self.events.append(event)
        for recording in self.recordings:
            recording.append(event)

    def wait(self, gpu) -> None:
        """The host waits until `gpu` has nothing left to do."""
        self.host = max(self.host, self.busy_until[gpu.index])

    def _enqueue(self, gpus, seconds: float) -> tuple[float, float]:
        start = max(self.host, *(self.busy_until[gpu.index] for gpu in gpus))
        for gpu in gpus:
            self.busy_until[gpu.index] = start + seconds
        return start, start + seconds


def _as_tuple(out) -> tuple:
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def _flops(func, args, kwargs, out) -> int:
    """Floating-point operations of `func`, by PyTorch's own formulas.

    Operations without one (element-wise ones, reductions) count as bytes alone.
    """
    formula = flop_registry.get(func.overloadpacket)
    if formula is None:
        return 0
    key = (func, *(_shape(value) for value in (*args, *kwargs.values())))
    if key not in _known_flops:
        if len(_known_flops) >= KEPT:
            _known_flops.clear()
        _known_flops[key] = int(formula(*args, **kwargs, out_val=out))
    return _known_flops[key]


_known_flops: dict[tuple, int] = {}


def _shape(value):
    """What the formulas read of an argument, as something to look up by."""
    if isinstance(value, torch.Tensor):
        return value.shape
    return tuple(map(_shape, value)) if isinstance(value, (list, tuple)) else value


class Timeline:
    """What ran since the last `clear()`: a list of events that draws itself."""

    def __init__(self, clock: Clock):
        self._clock = clock

    @property
    def events(self) -> list[Event]:
        """Every event, in the order of launch."""
        return list(self._clock.events)

    @property
    def copies(self) -> list[Event]:
        """The copies to, from and between GPUs."""
        return [event for event in self._clock.events if event.kind == "copy"]

    @property
    def seconds(self) -> float:
        """Simulated seconds until the host and every GPU are done."""
        return max([self._clock.host, *self._clock.busy_until.values()])

    def busy(self) -> dict[str, float]:
        """Simulated seconds that each GPU worked."""
        busy = {str(gpu.device): 0.0 for gpu in self._clock.gpus}
        for event in self._clock.events:
            for device in {event.device, event.source, event.target} & set(busy):
                busy[device] += event.end - event.start
        return busy

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Event]]:
        """A list of all that runs while the block does, whatever the log forgets."""
        events: list[Event] = []
        self._clock.recordings.append(events)
        try:
            yield events
        finally:
            self._clock.recordings[:] = [
                r for r in self._clock.recordings if r is not events
            ]

    def clear(self) -> None:
        """Start again from time zero with an empty log."""
        self._clock.clear()

    def _repr_svg_(self) -> str:
        from helpers import draw

        return draw.timeline(self)._repr_svg_()

    def __repr__(self) -> str:
        count = len(self._clock.events)
        return (
            f"Timeline({count} events, {len(self.copies)} of them copies, "
            f"{self.seconds * 1e6:.0f} µs simulated)"
        )
