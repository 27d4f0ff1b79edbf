"""What the clock writes down: kernels, copies, waits, and positions in streams."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from simgpu._timing.meeting import Meeting

FIRST_OF_NCCL = 1000  # number of NCCL's first stream; programs' own are smaller


class Event(NamedTuple):
    """One thing that ran: a kernel on a GPU, or a copy to or from one."""

    kind: str  # "kernel", "copy" or "collective"
    name: str  # the operation: "addmm"; for a copy "cpu to cuda:1"
    device: str  # whose stream it ran on
    start: float  # simulated seconds since the simulator started
    end: float
    nbytes: int  # bytes read and written, or copied
    flops: int
    source: str = ""  # of a copy
    target: str = ""
    stream: int = 0  # number of the stream on its device; 0 is the default one
    launched: float = 0.0  # when the host launched it
    source_stream: int = 0  # of a copy between GPUs: the stream that it held up there
    group: str = ""  # of a collective: the process group, "all ranks" or "ranks 0, 2"
    waited: float = 0.0  # of a collective: seconds in which it waited for a rank, ...
    waited_for: int = -1  # ... this one
    # of a collective: what a profiler that runs is told
    about: dict[str, object] | None = None
    graph: int = 0  # of work in a CUDA graph: the number of the launch that ran it


class Wait(NamedTuple):
    """A time in which the host waited, or was busy with something else."""

    name: str  # "wait for cuda:0", "pin", or what `host_busy` was told
    start: float
    end: float


class StreamPosition(NamedTuple):
    """A point in the work of a stream: what CUDA's event record remembers."""

    time: float  # simulated seconds at which all work before it is done
    number: int  # names it
    clock: object  # the `Clock` whose time it is
    # collectives before it of which the end was not known then
    after: tuple["Meeting", ...] = ()
