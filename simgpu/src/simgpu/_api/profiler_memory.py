"""Memory in PyTorch's profiler: what the GPUs' allocators gave, and took back.

PyTorch notes what the CPU's allocator does, where the values of GPU tensors lie, too.
What belongs to a GPU tensor is found by its size and time, and replaced by the block of
the GPU's allocator. Models: bytes and moments of each block, in real time, as the host
asks for them. Leaves out: the reserved bytes beside them in a trace.
"""

import bisect
import time

from torch.autograd import DeviceType

from simgpu._device.gpu import Gpu

_MEMORY = "[memory]"
_OPERATION = 10_000_000_000  # ns that an operation takes on this machine, at most
_NEAR = 1_000_000  # ns between the moments at which a block and its values are freed


class MemoryRecording:
    """What happens to the memory of some GPUs, from now until `finish`."""

    def __init__(self, gpus: list[Gpu]):
        # (real ns, GPU, bytes of the tensor, bytes of the block), negative where freed
        self.changes: list[tuple[int, int, int, int]] = []
        self._allocators = [gpu.memory for gpu in gpus]
        for gpu in gpus:
            self._watch(gpu.memory, gpu.index)

    def _watch(self, allocator, index: int) -> None:
        malloc, free = allocator.malloc, allocator.free

        def watched_malloc(nbytes, stream=0):
            __tracebackhide__ = True
            block = malloc(nbytes, stream)
            if block is not None:
                now = time.time_ns()
                self.changes.append((now, index, block.requested, block.size))
            return block

        def watched_free(block):
            now = time.time_ns()
            self.changes.append((now, index, -block.requested, -block.size))
            free(block)

        allocator.malloc, allocator.free = watched_malloc, watched_free

    def finish(self) -> None:
        for allocator in self._allocators:
            vars(allocator).pop("malloc", None)
            vars(allocator).pop("free", None)
        self._allocators = []


class _OnGpu:
    """An event of PyTorch's profiler that tells of a GPU's memory.

    Args:
        event: one of the host's, which has all else.
        at_ns: when, if not when that was.
        index: of the GPU.
        nbytes: of the block; negative where it was freed.
    """

    def __init__(self, event, at_ns: int | None, index: int, nbytes: int):
        self._event, self._index, self._nbytes = event, index, nbytes
        self._at = event.start_ns() if at_ns is None else at_ns

    def name(self) -> str:
        return _MEMORY

    def __getattr__(self, name: str):
        return getattr(self._event, name)

    def start_ns(self) -> int:
        return self._at

    def nbytes(self) -> int:
        return self._nbytes

    def device_type(self):
        return DeviceType.CUDA

    def device_index(self) -> int:
        return self._index


class Result:
    """The result of a profile, in which GPU tensors are in the memory of their GPU."""

    def __init__(self, result, recording: MemoryRecording):
        self._result = result
        self._events = _placed(list(result.events()), recording.changes)

    def __getattr__(self, name: str):
        return getattr(self._result, name)

    def events(self) -> list:
        return self._events


def _placed(events: list, changes: list[tuple]) -> list:
    """Events of a profile, with those of GPUs' memory in the place of the host's."""
    by_size: dict[int, list] = {}  # bytes -> (time, number of the event)
    for number, event in enumerate(events):
        if event.name() == _MEMORY:
            by_size.setdefault(event.nbytes(), []).append((event.start_ns(), number))
    for times in by_size.values():
        times.sort()
    more = []
    for at, index, nbytes, block in changes:
        number = _take(by_size.get(nbytes, []), at, nbytes < 0)
        if number is not None:
            events[number] = _OnGpu(events[number], None, index, block)
        elif events:  # values from before the profile, or a library's workspace
            more.append(_OnGpu(events[0], at, index, block))
    return events + more


def _take(times: list[tuple[int, int]], at: int, freed: bool) -> int | None:
    """The event of a tensor's values, which is then taken; None if none is near.

    Args:
        times: (time, number) of the events that are left.
        at: when the GPU's block was given or freed.
        freed: whether it was freed: close by. The values are made before the block is.
    """
    i = bisect.bisect_right(times, (at, len(times)))
    near = [k for k in ((i - 1, i) if freed else (i - 1,)) if 0 <= k < len(times)]
    if not near:
        return None
    best = min(near, key=lambda k: abs(times[k][0] - at))
    if abs(times[best][0] - at) > (_NEAR if freed else _OPERATION):
        return None
    return times.pop(best)[1]
