"""Races between streams: found by PyTorch's own sanitizer, and shown if asked for.

Models: every kernel's and copy's reads and writes, by the simulated addresses of what
it touches, so that memory which the allocator hands out anew is known to be the same;
and all that puts work in order: events, waiting streams, the waiting host, copies
between GPUs. They go to the `EventHandler` of `torch.cuda._sanitizer`. Nothing is
handed over until a second stream exists, because one stream alone cannot race; what
the default streams wrote until then is remembered with one line of the program.
Leaves out: the host reading pinned memory too early, reads by the default streams
before the second stream existed, and what an operation writes without saying so in its
schema (the running statistics of batch normalization).

Taught in 04-overlap-with-streams.
"""

import sys
import threading
import traceback
from bisect import bisect_left
from collections import deque
from functools import cache, wraps
from pathlib import Path

import torch

from helpers import frames

WAYS = ("raise", "show")
_RUNS = 1024  # a strided tensor is watched as at most so many runs of memory
_OURS = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
Key = tuple[int, int]  # (GPU, number of the stream on it)


def one_at_a_time(method):
    """Threads share the clock, the sanitizer and the memories behind one lock."""

    @wraps(method)
    def locked(self, *args, **kwargs):
        __tracebackhide__ = True
        with self.lock:
            return method(self, *args, **kwargs)

    return locked


class Races:
    """Feeds the sanitizer and says what it found.

    Args:
        way: "raise" an error at a race; or "show": a racy read gives what the memory
            held before, and other races raise.
    """

    def __init__(self, way: str = "raise"):
        self.way = way
        self.lock = threading.RLock()  # threads launch one at a time
        self.dead: deque[int] = deque()  # marks that nobody will ask for
        self.watching = False  # there is a second stream
        self.handler = None  # PyTorch's, once there is a stream or event
        self.number = 0  # of kernels so far
        self.last: dict[Key, int] = {}  # the last kernel of each stream
        self.seen: dict[Key, int] = {}  # up to where the host has waited for it
        self._atoms = Atoms()
        self._turns: dict[Key, int] = {}  # how often somebody looked at each stream

    # -- what puts work in order -------------------------------------------------------

    @one_at_a_time
    def start(self) -> None:
        """There is a stream or an event: give the sanitizer what it must know."""
        if self.handler is None:
            from torch.cuda._sanitizer import EventHandler

            self.handler = EventHandler()
            for key in self.last:
                self._sync(key)
                self.handler.syncs.host_sync_state[name(key)] = self.seen.get(key, 0)

    @one_at_a_time
    def watch(self) -> None:
        """There is a second stream: from now on every access counts."""
        self.start()
        self.watching = True

    def _sync(self, key: Key) -> int:
        """Bring the sanitizer up to date on one stream; its name there."""
        self.handler.seq_num = self.number
        if key in self.last:
            self.handler.syncs.update_seq_num(name(key), self.last[key])
        return name(key)

    def record(self, mark: int, key: Key) -> None:
        """A mark has been put into a stream."""
        self._turns[key] = self._turns.get(key, 0) + 1
        if self.handler is not None:
            self.handler._handle_event_record(mark, self._sync(key))
            while self.dead:
                self.handler.syncs.recorded_sync_states.pop(self.dead.popleft(), None)

    def stream_waits(self, key: Key, mark: int) -> None:
        if self.handler is not None:
            self.handler._handle_event_wait(mark, self._sync(key))

    def host_saw(self, mark: int) -> None:
        """The host knows that the work before a mark is done."""
        if self.handler is not None:
            self.handler._handle_event_synchronization(mark)

    @one_at_a_time
    def host_waits(self, keys: list[Key]) -> None:
        """The host has waited for some streams."""
        for key in keys:
            self._turns[key] = self._turns.get(key, 0) + 1
            self.seen[key] = self.number
            if self.handler is not None:
                self.handler._handle_stream_synchronization(self._sync(key))

    @one_at_a_time
    def meet(self, keys: list[Key]) -> None:
        """A copy between two GPUs puts the streams of both ends in order."""
        if self.handler is None or len(keys) == 1:
            return
        for i, key in enumerate(keys):
            mark = -1 - i  # a name that no mark of the clock has
            self.handler._handle_event_record(mark, self._sync(key))
        for i, key in enumerate(reversed(keys)):
            self.handler._handle_event_wait(-1 - i, self._sync(key))

    def keep(self, key: Key, block, old) -> None:
        """Before a write: keep what the block holds, for a racy read to find.

        As long as a stream goes on writing and nobody waits for it, the oldest counts.

        Args:
            key: the stream that writes.
            block: what it writes.
            old: makes a copy of what the block holds; None for fresh memory.
        """
        since = (key, self._turns.get(key, 0))
        if block.since != since:
            block.before = None if old is None else old()
            block.since = since

    # -- accesses ----------------------------------------------------------------------

    def remember(self, func, key: Key, written: list) -> None:
        """One stream alone: keep who wrote the blocks last."""
        with self.lock:
            self.number += 1
            self.last[key] = number = self.number
        frame = sys._getframe(2)
        while _is_machinery(frame.f_code.co_filename) and frame.f_back:
            frame = frame.f_back
        writer = (number, key, func, frame.f_code, frame.f_lineno)
        for block in written:
            block.writer = writer

    @one_at_a_time
    def access(self, operator: str, key: Key, reads: list, writes: list, new=False):
        """A kernel reads and writes tensors. Returns the reads that are racy.

        Args:
            operator: the schema of the operation.
            reads, writes: (name of the argument, tensor, block).
            new: whether the writes are to outputs that did not exist before.

        Raises:
            CUDASanitizerErrors: at a race; not at a racy read while races are shown.
        """
        aliases: dict[int, list[str]] = {}
        touched: dict[int, set[int]] = {}  # atom -> positions in reads
        sets: list[set[int]] = []
        for accesses in (reads, writes):
            atoms = set()
            for position, (argument, tensor, block) in enumerate(accesses):
                for atom in self._atoms_of(tensor, block):
                    aliases.setdefault(atom, []).append(argument)
                    if accesses is reads:
                        touched.setdefault(atom, set()).add(position)
                    atoms.add(atom)
                    self._forget_reads(atom, key)
            sets.append(atoms)
        read, written = sets
        self.number += 1
        self.handler.seq_num = self.number - 1
        self.last[key] = self.number
        errors = self.handler._handle_kernel_launch(
            name(key), read - written, written, written if new else set(), operator,
            aliases,
        )  # fmt: skip
        self._merge(writes)
        racy = [error for error in errors if error.data_ptr in touched]
        if errors and (self.way == "raise" or len(racy) < len(errors)):
            raise race_error()(errors)
        return sorted(set().union(*(touched[error.data_ptr] for error in racy)))

    def _atoms_of(self, tensor, block) -> list[int]:
        """The pieces of memory that a tensor covers, known to the sanitizer."""
        found = []
        known = self.handler.tensors_accessed
        for low, high in runs(tensor, block.address):
            pieces, cuts = self._atoms.cover(low, high)
            for piece, part_of in cuts:  # both parts have the same history
                info = known.accesses[part_of]
                known.accesses[piece] = type(info)(None, list(info.reads), info.write)
            for piece in pieces:
                if piece not in known.accesses:
                    known.create_tensor(piece, None)
                    self._recall(piece, block)
            found += pieces
        return found

    def _merge(self, writes: list) -> None:
        """What has just been written as a whole has one history from now on."""
        for _, tensor, block in writes:
            for low, high in runs(tensor, block.address):
                for piece in self._atoms.join(low, high):
                    del self.handler.tensors_accessed.accesses[piece]

    def _forget_reads(self, atom: int, key: Key) -> None:
        """Of a stream's reads only the last counts: what follows it follows all."""
        info = self.handler.tensors_accessed.accesses[atom]
        if info.reads:
            info.reads = [read for read in info.reads if read.stream != name(key)]

    def _recall(self, atom: int, block) -> None:
        """Tell the sanitizer who wrote the block before it was watching."""
        if block.writer is None:
            return
        number, key, func, code, line = block.writer
        if number <= self.seen.get(key, 0):
            return
        from torch.cuda._sanitizer import Access, AccessType

        stack = traceback.StackSummary.from_list(
            [(code.co_filename, line, code.co_name, None)]
        )
        operator = str(func._schema)
        access = Access(AccessType.WRITE, number, name(key), operator, [], True, stack)
        self.handler.tensors_accessed.set_write(atom, access)


@cache
def _is_machinery(filename: str) -> bool:
    """Whether a file is the simulator's or PyTorch's."""
    return filename.startswith((_OURS, _TORCH))


@cache
def race_error() -> type[Exception]:
    """The error that is raised at a race: PyTorch's, with the whole report."""
    from torch.cuda._sanitizer import CUDASanitizerErrors

    class RaceError(CUDASanitizerErrors):
        """Two streams use the same memory, and nothing puts them in order."""

        def __init__(self, errors):
            super().__init__(errors)
            for error in errors:
                for access in (error.current_access, error.previous_access):
                    access.stack_trace = lines_of_program(access.stack_trace)

        def __str__(self):
            return "\n".join(map(str, self.errors))

    return RaceError


def lines_of_program(stack) -> traceback.StackSummary:
    """A stack without the lines of Python's and PyTorch's own files."""
    kept = [frame for frame in stack if not _is_foreign(frame.filename)]
    return traceback.StackSummary.from_list(
        [
            (
                frames.shown(frame.filename),
                frame.lineno,
                frame.name,
                frames.text(frame.filename, frame.lineno),
            )
            for frame in kept or stack[-1:]
        ]
    )


def _is_foreign(filename: str) -> bool:
    return not frames.is_learners(filename) or filename.startswith(_TORCH)


def name(key: Key) -> int:
    """A stream's name for the sanitizer: unlike CUDA's, its own on each GPU."""
    return key[0] + 1000 * key[1] if key[1] else key[0]


def runs(tensor, base: int) -> list[tuple[int, int]]:
    """The runs of memory that a tensor covers: (first address, end)."""
    if tensor.numel() == 0:
        return []
    size = tensor.element_size()
    start = base + tensor.storage_offset() * size
    dims = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    length = 1  # elements that lie together
    while dims and (dims[0][0] <= length or dims[0][1] == 1):
        stride, count = dims.pop(0)
        if stride and count > 1:
            length += stride * (count - 1)
    offsets = [0]
    for stride, count in dims:
        count = min(count, _RUNS // len(offsets))
        offsets = [o + i * stride for i in range(count) for o in offsets]
    return [(start + o * size, start + (o + length) * size) for o in offsets]


class Atoms:
    """Memory cut into the largest pieces that are always accessed as a whole."""

    def __init__(self):
        self.lows: list[int] = []
        self.ends: dict[int, int] = {}  # first address -> end

    def cover(self, low: int, high: int) -> tuple[list[int], list[tuple[int, int]]]:
        """The pieces that cover [low, high) exactly, by their first addresses.

        Returns:
            The pieces, and those cut off just now: (new piece, piece it was part of).
        """
        cuts = [cut for cut in (self._cut(low), self._cut(high)) if cut]
        pieces = []
        while low < high:
            i = bisect_left(self.lows, low)
            following = self.lows[i] if i < len(self.lows) else high
            if following > low:
                self._add(low, min(following, high))
            pieces.append(low)
            low = self.ends[low]
        return pieces, cuts

    def join(self, low: int, high: int) -> list[int]:
        """Make one piece of those that cover [low, high) exactly; the rest of them."""
        first = bisect_left(self.lows, low)
        last = bisect_left(self.lows, high)
        gone = self.lows[first + 1 : last]
        if gone:
            del self.lows[first + 1 : last]
            for piece in gone:
                del self.ends[piece]
            self.ends[low] = high
        return gone

    def _cut(self, point: int) -> tuple[int, int] | None:
        """Cut the piece within which `point` lies, if there is one."""
        i = bisect_left(self.lows, point) - 1
        if i < 0 or self.ends[self.lows[i]] <= point:
            return None
        part_of = self.lows[i]
        self._add(point, self.ends[part_of])
        self.ends[part_of] = point
        return point, part_of

    def _add(self, low: int, end: int) -> None:
        self.lows.insert(bisect_left(self.lows, low), low)
        self.ends[low] = end
