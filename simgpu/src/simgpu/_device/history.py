"""What happened to a GPU's memory, in the format of `torch.cuda.memory._snapshot`.

PyTorch's own viewer (`torch.cuda._memory_viz`) reads it. Models: the events, segments
and blocks of one allocator, with the Python stack of each. Leaves out: C++ frames.
"""

import sys
from collections import deque
from pathlib import Path

import torch

from simgpu._device.blocks import DEFAULT_POOL, Block, stream_handle

CONTEXTS = (None, "state", "alloc", "all")
_SIMULATOR = str(Path(__file__).parents[1])
# files through which PyTorch hands a call to the simulator, and to no real GPU
_DISPATCHERS = tuple(
    str(Path(torch.__file__).parent / name) for name in ("_ops.py", "overrides.py")
)


class History:
    """The recorded events of one allocator, and its snapshot."""

    def __init__(self, allocator):
        self.allocator = allocator
        self.events: deque[dict] | None = None  # while they are recorded
        self.context: str | None = None  # whose frames are kept: one of CONTEXTS
        self.is_recording = False
        self.skipped: frozenset[str] = frozenset()  # actions that are not kept
        self.metadata = ""  # the program's own, kept with each event

    def record(self, most: int | None, context: str | None, skipped=()) -> None:
        """Remember what happens from now on, at most so many events (None: stop).

        Args:
            most: how many events.
            context: whose frames: "state" of living blocks; "alloc" also of each event,
                for a free those of its allocation; "all" also of each free; or None.
            skipped: actions that are not remembered: "alloc", "free_requested", ...
        """
        with self.allocator.clock.lock:
            self.allocator._take_back_freed()
            kept = self.events or ()
            self.events = None if most is None else deque(kept, maxlen=most)
            self.context = context
            self.skipped = frozenset(skipped)
            self.is_recording = most is not None

    def note(self, action: str, address: int, size: int, stream: int, frames,
             pool: tuple[int, int]) -> None:  # fmt: skip
        """Record one event; for an "oom" the address is the bytes that were free."""
        if action in self.skipped:
            return
        where = "device_free" if action == "oom" else "addr"
        self.events.append(
            {
                "action": action,
                where: address,
                "size": size,
                "stream": stream_handle(self.allocator.index, stream),
                "time_us": int(self.allocator.clock.host * 1e6),
                "pool_id": pool,
                "compile_context": "N/A",
                "user_metadata": self.metadata,
                "frames": [] if self.context == "state" else frames,
            }
        )

    def note_allocated(self, block: Block) -> None:
        block.frames = self.frames()
        where = block.address, block.requested, block.stream
        self.note("alloc", *where, block.frames, block.pool.id)

    def note_segment(self, block: Block) -> None:
        """A new segment, of one block."""
        block.segment_frames = self.frames()
        where = block.address, block.size, block.stream
        self.note("segment_alloc", *where, block.segment_frames, block.pool.id)

    def note_free(self, action: str, block: Block) -> None:
        frames = self.frames() if self.context == "all" else block.frames
        where = block.address, block.requested, block.stream
        self.note(action, *where, frames, block.pool.id)

    def note_given_back(self, action: str, block: Block, start: int, size: int) -> None:
        frames = self.frames() if self.context == "all" else block.segment_frames
        self.note(action, start, size, block.stream, frames, block.pool.id)

    def frames(self) -> list[dict]:
        """The Python stack, innermost first, without the simulator's own lines."""
        if self.context is None:
            return []
        frames, frame = [], sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if not code.co_filename.startswith((_SIMULATOR, *_DISPATCHERS)):
                line = {"filename": code.co_filename, "line": frame.f_lineno}
                frames.append({**line, "name": code.co_name})
            frame = frame.f_back
        return frames

    def snapshot(self, only: tuple[int, int] = DEFAULT_POOL) -> list[dict]:
        """The segments and their blocks; one that can grow is a segment for each piece.

        A piece is what has memory without a gap.

        Args:
            only: the private pool whose segments they are, if not all are wanted.
        """
        allocator = self.allocator
        with allocator.clock.lock:
            allocator._take_back_freed()
            found = []
            for address in sorted(allocator.segments):
                block = allocator.segments[address]
                if only not in (DEFAULT_POOL, block.pool.id):
                    continue
                while block is not None:
                    if block.mapped and (block.prev is None or not block.prev.mapped):
                        found.append(self._segment(block))
                    block = block.next
            if self.is_recording:
                active = sum(segment["active_size"] for segment in found)
                self.note("snapshot", 0, active, 0, [], only)
            return found

    def _segment(self, first: Block) -> dict:
        blocks, block = [], first
        while block is not None and block.mapped:
            blocks.append(_as_dict(block))
            block = block.next
        allocated = [b for b in blocks if b["state"] == "active_allocated"]
        used = [b for b in blocks if b["state"] != "inactive"]
        index = self.allocator.index
        return {
            "device": index,
            "address": first.address,
            "total_size": sum(b["size"] for b in blocks),
            "allocated_size": sum(b["size"] for b in allocated),
            "active_size": sum(b["size"] for b in used),
            "requested_size": sum(b["requested_size"] for b in used),
            "stream": stream_handle(index, first.stream),
            "segment_type": "small" if first.pool.small else "large",
            "segment_pool_id": first.pool.id,
            "is_expandable": first.segment is not None,
            "frames": first.segment_frames,
            "blocks": blocks,
        }


def _as_dict(block: Block) -> dict:
    state = "active_allocated" if block.allocated else "inactive"
    if block.waiting:
        state = "active_pending_free"
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": block.requested,
        "state": state,
        "frames": block.frames,
    }
