"""What stands for the clock where an allocator is used without one."""

import threading


class NoTime:
    """Stands for the clock where time does not matter: all work is done at once."""

    host = 0.0

    def __init__(self):
        self.lock = threading.RLock()

    def record(self, index: int, stream: int):
        """A position in a stream, after all that it has been given."""

    def reached(self, position) -> bool:
        """Whether the host can see that the work before a position is done."""
        return True

    def forget(self, position) -> None:
        """Nobody will ask for a position again."""

    def wait_for_device(self, index: int) -> None:
        """A segment is given back to CUDA, which waits for the GPU."""

    def wait_for_stream(self, index: int, stream: int) -> None:
        """Memory of a stream is given back, for which PyTorch waits for the stream."""
