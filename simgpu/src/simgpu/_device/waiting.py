"""Blocks that the program has freed while other streams may still use them.

`record_stream` has named those streams. Each is given an event where the block is
freed, and the block is free when all of them are reached. While a graph is captured no
event may be recorded or asked: blocks that are freed then wait for its end, and for no
stream that was named during the capture, as what is captured does not run.

Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch, `insert_events`, `process_events`,
`insert_events_deferred_until_no_capture` and `synchronize_and_free_events`. Leaves out:
`graph_capture_record_stream_reuse`.
"""

from simgpu._device.blocks import Block


class WaitingBlocks:
    """Those of one GPU.

    Attributes:
        blocks: each with its events; with None if a capture keeps it from having any.
    """

    def __init__(self, allocator):
        self.allocator = allocator
        self.blocks: list[tuple[Block, list | None]] = []  # this very list, always
        self._captured: dict[Block, set] = {}  # streams named while graphs are captured

    def note_use(self, block: Block, stream: tuple[int, int]) -> None:
        """A stream, of some GPU, uses the block."""
        block.stream_uses = {*(block.stream_uses or ()), stream}
        if self.allocator.private.capturing:
            self._captured.setdefault(block, set()).add(stream)

    def add(self, block: Block) -> None:
        """The program has freed a block that other streams use."""
        block.waiting = True
        events = None
        if not self.allocator.private.capturing:
            if self._captured:
                self._captured.pop(block, None)
            events = self._record(block.stream_uses)
        self.blocks.append((block, events))

    def process(self) -> None:
        """Blocks for which other streams have done their work become free."""
        if self.allocator.private.capturing:
            return
        reached = self.allocator.clock.reached
        for block, events in self._take_out():
            if events is None:
                events = self._record_late(block)
            if all(map(reached, events)):
                self._end(block, events)
            else:
                self.blocks.append((block, events))

    def end_capture(self, owner) -> None:
        """What a capture freed in its private pool need not wait for the capture."""
        for block, events in self._take_out():
            if events is None and block.pool.owner is owner:
                events = self._record_late(block)
                if not events:
                    self._end(block, events)
                    continue
            self.blocks.append((block, events))

    def wait(self, owner=None) -> None:
        """Wait for the streams, and free every block, or those of one private pool."""
        self.allocator.counts["num_sync_all_streams"] += 1
        if not self.blocks:
            return
        self.allocator.clock.wait_for_device(self.allocator.index)
        for block, events in self._take_out():
            if events is None:
                events = self._record_late(block)
            if owner is None or block.pool.owner is owner:
                self._end(block, events)
            else:
                self.blocks.append((block, events))

    def _take_out(self) -> list:
        taken = self.blocks[:]
        self.blocks.clear()
        return taken

    def _record(self, streams: set[tuple[int, int]]) -> list:
        return [self.allocator.clock.record(*stream) for stream in sorted(streams)]

    def _record_late(self, block: Block) -> list:
        return self._record(block.stream_uses - self._captured.pop(block, set()))

    def _end(self, block: Block, events: list) -> None:
        for event in events:
            self.allocator.clock.forget(event)
        block.waiting = False
        self.allocator._free_block(block)
