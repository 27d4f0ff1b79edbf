"""Finds races between streams, with PyTorch's own sanitizer.

Models: every kernel's and copy's reads and writes, by the simulated addresses of what
it touches, so that memory which the allocator hands out anew is known to be the same;
and all that puts work in order: events, waiting streams, the waiting host, copies
between GPUs. They go to the `EventHandler` of `torch.cuda._sanitizer`: events and waits
from the first stream or event on, reads and writes from the second stream on, because
one stream alone cannot race. What the default streams wrote until then is remembered
with one line of the program.
The host against copies that it has not waited for is in `host_copies.py`.
Leaves out: reads by the default streams before the second stream existed, and what an
operation writes without saying so in its schema (the running statistics of batch
normalization).
"""

import sys
import threading
import traceback
from collections import deque
from functools import cache
from pathlib import Path

import torch

from simgpu._lines import write_line
from simgpu._locking import one_at_a_time
from simgpu._sanitizer.handler import new_handler
from simgpu._sanitizer.host_copies import HostCopies
from simgpu._sanitizer.intervals import IntervalMap, runs
from simgpu._sanitizer.race_report import RaceError, place, stream_name, warning

_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
Key = tuple[int, int]  # (GPU, number of the stream on it)


class StreamSanitizer:
    """Feeds the `EventHandler` of `torch.cuda._sanitizer` and reports what it finds.

    Args:
        mode: "raise" an error at a race; "show": a racy read gives what the memory
            held before, and other races raise; "warn": each two lines that race are
            named once on stderr, and values are those of the program's order; "off": no
            access counts, and a collective that nobody waits for may be seen undone.
    """

    def __init__(self, mode: str = "raise"):
        self.mode = mode
        self.lock = threading.RLock()  # threads launch one at a time
        self._forgotten: deque[int] = deque()  # events that nobody will ask for
        self.watching = False  # there is a second stream
        self.handler = None  # PyTorch's, once there is a stream or event
        self.number = 0  # of kernels so far
        self.last: dict[Key, int] = {}  # the last kernel of each stream
        self.seen: dict[Key, int] = {}  # up to where the host has waited for it
        self._intervals = IntervalMap()
        # how often each stream was waited for, or an event was recorded in it
        self._epochs: dict[Key, int] = {}
        self._warned: set[tuple] = set()  # of which lines
        self.host_copies = HostCopies(self)
        self.is_first = lambda place: True  # of several ranks, to name these lines

    # -- what puts work in order -------------------------------------------------------

    @one_at_a_time
    def follow_events(self) -> None:
        """There is a stream or an event: from now on events and waits count."""
        if self.handler is None and self.mode != "off":
            self.handler = new_handler()
            for key in self.last:
                self.handler.syncs.host_sync_state[self._sync(key)] = self.seen.get(
                    key, 0
                )

    @one_at_a_time
    def watch_accesses(self) -> None:
        """There is a second stream: from now on reads and writes count, too."""
        self.follow_events()
        self.watching = self.mode != "off"

    def _sync(self, key: Key) -> int:
        """Bring the sanitizer up to date on one stream; its name there."""
        self.handler.seq_num = self.number
        if key in self.last:
            self.handler.syncs.update_seq_num(stream_name(*key), self.last[key])
        return stream_name(*key)

    def up_to_date(self, key: Key) -> int:
        """The name of a stream, of which the `EventHandler` knows all work now."""
        self.follow_events()
        return self._sync(key)

    def event_recorded(self, event: int, key: Key) -> None:
        """An event has been recorded in a stream."""
        self._epochs[key] = self._epochs.get(key, 0) + 1
        if self.handler is not None:
            self.handler._handle_event_record(event, self._sync(key))
            while self._forgotten:
                self.handler.syncs.recorded_sync_states.pop(
                    self._forgotten.popleft(), None
                )

    def stream_waits(self, key: Key, event: int) -> None:
        """A stream waits for an event."""
        if self.handler is not None:
            self.handler._handle_event_wait(event, self._sync(key))

    def host_saw(self, event: int) -> None:
        """The host knows that the work before an event is done."""
        if self.handler is not None:
            self.handler._handle_event_synchronization(event)
            if self.host_copies.unfinished:
                self.host_copies.host_waited()

    @one_at_a_time
    def host_waited(self, keys: list[Key]) -> None:
        """The host has waited for some streams."""
        for key in keys:
            self._epochs[key] = self._epochs.get(key, 0) + 1
            self.seen[key] = self.number
            if self.handler is not None:
                self.handler._handle_stream_synchronization(self._sync(key))
        if self.host_copies.unfinished:
            self.host_copies.host_waited()

    def forget_event(self, event: int) -> None:
        """Nobody will ask for an event again. May be called at any moment."""
        if self.handler is not None:
            self._forgotten.append(event)

    @one_at_a_time
    def join_streams(self, keys: list[Key]) -> None:
        """A copy between two GPUs puts the streams of both ends in order."""
        if self.handler is None or len(keys) == 1:
            return
        for i, key in enumerate(keys):
            event = -1 - i  # a number that no event of the clock has
            self.handler._handle_event_record(event, self._sync(key))
        for i, key in enumerate(reversed(keys)):
            self.handler._handle_event_wait(-1 - i, self._sync(key))

    def keep_old_value(self, key: Key, block, old) -> None:
        """Before a write: keep what the block holds, for a racy read to find.

        As long as a stream goes on writing and nobody waits for it, the oldest counts.

        Args:
            key: the stream that writes.
            block: what it writes.
            old: makes a copy of what the block holds; None for fresh memory.
        """
        since = (key, self._epochs.get(key, 0))
        if block.written_since != since:
            block.before = None if old is None else old()
            block.written_since = since

    # -- accesses ----------------------------------------------------------------------

    def note_writer(self, func, key: Key, written: list) -> None:
        """One stream alone: keep who wrote the blocks last."""
        with self.lock:
            self.number += 1
            self.last[key] = number = self.number
        # the four frames from here on are the simulator's, and a frame is dear
        frame = sys._getframe(4)
        while _is_machinery(frame.f_code.co_filename) and frame.f_back:
            frame = frame.f_back
        writer = (number, key, func, frame.f_code, frame.f_lineno)
        for block in written:
            block.writer = writer

    @one_at_a_time
    def access(self, operator: str, key: Key, reads: list, writes: list, new=False):
        """A kernel reads and writes tensors. Returns which of them race.

        While races are shown, these are positions in `reads`; while they are warned of,
        in `[*reads, *writes]`.

        Args:
            operator: the schema of the operation.
            reads, writes: (name of the argument, tensor, block).
            new: whether the writes are to outputs that did not exist before.

        Raises:
            CUDASanitizerErrors: at a race; not at a racy read while races are shown.
        """
        names: dict[int, list[str]] = {}  # first address of a piece -> arguments
        read: dict[int, list[str]] = {}
        written: dict[int, list[str]] = {}
        for accesses, found in ((reads, read), (writes, written)):
            for argument, tensor, block in accesses:
                alone = [argument]
                for piece in self._pieces_of(tensor, block):
                    before = names.get(piece)
                    names[piece] = alone if before is None else [*before, argument]
                    found[piece] = names[piece]
        self.number += 1
        self.handler.seq_num = self.number - 1
        self.last[key] = self.number
        errors = self.handler.launch(stream_name(*key), operator, read, written, new)
        touched: dict[int, set[int]] = {}  # piece -> positions
        if errors:
            counted = [*reads, *writes] if self.mode == "warn" else reads
            for position, (_, tensor, block) in enumerate(counted):
                for piece in self._pieces_of(tensor, block):
                    touched.setdefault(piece, set()).add(position)
        self._merge(writes)
        if self.mode == "warn":
            self.warn(errors)
            for error in errors:  # one missing wait is named once, not at each use
                self._take_as_waited(error.current_access, error.previous_access)
        racy = [error for error in errors if error.data_ptr in touched]
        if errors and (self.mode == "raise" or len(racy) < len(errors)):
            raise RaceError(errors)
        return sorted(set().union(*(touched[error.data_ptr] for error in racy)))

    def _take_as_waited(self, current, previous) -> None:
        """From now on as if the one stream had waited for the other's access."""
        known = self.handler.syncs.current_sync_states[current.stream]
        seen = known.get(previous.stream, -1)
        known[previous.stream] = max(seen, previous.seq_num)

    def warn(self, errors: list) -> None:
        """Name the lines that race, if they have not been named yet."""
        for error in errors:
            lines = place(error)
            if lines in self._warned:
                continue
            self._warned.add(lines)
            if self.is_first(str(lines)):
                write_line(warning(error))

    @one_at_a_time
    def used_since(self, number: int, tensor, block) -> bool:
        """Whether a kernel has used a tensor after the kernel of this number."""
        for piece in self._pieces_of(tensor, block):
            info = self.handler.tensors_accessed.accesses[piece]
            accesses = [*info.reads, info.write] if info.write else info.reads
            if any(access.seq_num > number for access in accesses):
                return True
        return False

    @one_at_a_time
    def arrived(self, tensor, block) -> None:
        """The host has put values into new memory: nothing that was before counts."""
        block.writer = None
        if self.watching:
            for piece in self._pieces_of(tensor, block):
                info = self.handler.tensors_accessed.accesses[piece]
                info.reads, info.write = [], None

    def _pieces_of(self, tensor, block) -> list[int]:
        """The pieces of memory that a tensor covers, known to the sanitizer."""
        found = []
        known = self.handler.tensors_accessed
        for low, high in runs(tensor, block.address):
            pieces, cuts = self._intervals.cover(low, high)
            for piece, part_of in cuts:  # both parts have the same history
                info = known.accesses[part_of]
                known.accesses[piece] = type(info)(None, list(info.reads), info.write)
            for piece in pieces:
                if piece not in known.accesses:
                    known.create_tensor(piece, None)
                    self._restore_writer(piece, block)
            found += pieces
        return found

    def _merge(self, writes: list) -> None:
        """What has just been written as a whole has one history from now on."""
        for _, tensor, block in writes:
            for low, high in runs(tensor, block.address):
                for piece in self._intervals.join(low, high):
                    del self.handler.tensors_accessed.accesses[piece]

    def _restore_writer(self, interval: int, block) -> None:
        """Tell the sanitizer who wrote the block before it was watching."""
        if block.writer is None:
            return
        number, key, func, code, line = block.writer
        if number <= self.seen.get(key, 0):
            return
        from simgpu._compat import Access, AccessType

        stack = traceback.StackSummary.from_list(
            [(code.co_filename, line, code.co_name, None)]
        )
        operator = str(func._schema)
        access = Access(
            AccessType.WRITE, number, stream_name(*key), operator, [], True, stack
        )
        self.handler.tensors_accessed.set_write(interval, access)


@cache
def _is_machinery(filename: str) -> bool:
    """Whether a file is the simulator's or PyTorch's."""
    return filename.startswith((_OURS, _TORCH))
