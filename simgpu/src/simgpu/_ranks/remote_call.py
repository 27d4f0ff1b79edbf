"""One call in all ranks: it is sent, the answers come in, or it fails.

A call fails when a rank raises, when its process ends, or when it does not answer in
time. The others then wait for it in a collective, so they are given a moment and their
stacks are taken: `GRACE_SECONDS`, or twice what these ranks took to come up if that is
longer. On a machine that is slow or busy both are.
"""

import contextlib
import pickle
import signal
import time
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

from simgpu._ranks.rank_error import Failure, Frame, failure_report

if TYPE_CHECKING:
    from simgpu._ranks.worker_group import WorkerGroup

GRACE_SECONDS = 3.0  # that the other ranks may go on after one has failed


class RemoteCall:
    """Who has answered, who has failed, whose process has ended.

    Attributes:
        results: rank -> its pickled result.
        failed: rank -> the error that it raised.
        ended: rank -> how its process ended.
        hanging: rank -> where it is; known once the call is finished.
    """

    def __init__(self, workers: "WorkerGroup"):
        self.workers = workers
        self.results: dict[int, bytes | None] = {}
        self.failed: dict[int, Failure] = {}
        self.ended: dict[int, str] = {}
        self.hanging: dict[int, list[Frame]] = {}
        self._first_failure: float | None = None  # when it was noticed
        self._receiving = False
        for output in workers.outputs:
            output.begin_call()

    @property
    def broken(self) -> bool:
        """Whether the ranks cannot go on as they are."""
        return bool(self.ended or self.hanging)

    @property
    def grace(self) -> float:
        """Seconds in which a rank that can answer does, as fast as this machine is."""
        return max(GRACE_SECONDS, 2 * self.workers.took)

    def send(self, kind: str, payload: object) -> None:
        """Send the work to every rank; see `worker.py` for what there is."""
        message = pickle.dumps((kind, payload))
        for rank, connection in self.workers.connections.items():
            try:
                connection.send_bytes(message)
            except OSError:
                self._note_end(rank)

    def wait(self, seconds: float) -> None:
        """Collect answers until all are there, or it is clear that they will not be.

        What the ranks print is shown; only of rank 0, as long as it goes on.
        """
        end = time.monotonic() + seconds
        while unanswered := self._unanswered():
            if self._first_failure is not None:
                end = min(end, self._first_failure + self.grace)
            left = end - time.monotonic()
            if left <= 0:
                return
            for connection in wait(list(unanswered), min(left, 0.1)):
                self._receive(unanswered[connection], connection)
            self.workers.outputs[0].show()

    def finish(self) -> str:
        """Show the rest of the output and take the stacks of ranks that hang.

        Returns:
            What went wrong; the empty string if nothing did.
        """
        hanging = sorted(self._unanswered().values())
        self._finish_output()
        self.hanging = {rank: self.workers.where(rank) for rank in hanging}
        return failure_report(self.ended, self.hanging, self.failed)

    def interrupt(self) -> bool:
        """Ctrl-C: tell the ranks that still run; whether all have answered then."""
        if self._receiving:
            return False  # the rest of that answer would be taken for the next one
        for rank in self._unanswered().values():
            self.workers.send_signal(rank, signal.SIGINT)
        with contextlib.suppress(KeyboardInterrupt):
            self.wait(2)
            self._finish_output()
        return not self._unanswered() and not self.ended

    def _unanswered(self) -> dict[Connection, int]:
        return {
            connection: rank
            for rank, connection in self.workers.connections.items()
            if not self._answered(rank) and rank not in self.ended
        }

    def _answered(self, rank: int) -> bool:
        return rank in self.results or rank in self.failed

    def _receive(self, rank: int, connection: Connection) -> None:
        self._receiving = True
        try:
            kind, value = connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            self._receiving = False
            self._note_end(rank)
            return
        self._receiving = False
        if kind == "ok":
            self.results[rank] = value
        else:
            self.failed[rank] = value
            self._note_failure()

    def _note_end(self, rank: int) -> None:
        self.ended[rank] = self.workers.wait_for_exit(rank)
        self._note_failure()

    def _note_failure(self) -> None:
        if self._first_failure is None:
            self._first_failure = time.monotonic()

    def _finish_output(self) -> None:
        for output in self.workers.outputs:
            output.finish_call(empty=self._answered(output.rank))
