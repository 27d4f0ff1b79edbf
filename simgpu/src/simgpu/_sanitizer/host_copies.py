"""Host memory that a copy still uses: who may touch it before the host has waited.

Models: copies to and from pinned memory for which the host does not wait
(`non_blocking=True`). Until it has waited for such a copy, the host may neither read
what the copy writes nor write what the copy reads, and neither may a stream that comes
after no event of the copy's. What puts work in order is known to the sanitizer's
`EventHandler`; the simulated time does not count. Pinned memory that the program lets
go of is not used again before the copy is done, so it is forgotten with its storage.
Leaves out: what is written through `numpy()`, which PyTorch does not see, and sparse
tensors.
"""

import sys
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from simgpu._compat import Access, AccessType
from simgpu._sanitizer.handler import program_stack
from simgpu._sanitizer.intervals import runs
from simgpu._sanitizer.race_report import HOST, HostRace, RaceError, stream_name

Key = tuple[int, int]  # (GPU, number of the stream on it)
Runs = list[tuple[int, int]]  # of memory: (first address, end)


class HostAccess(NamedTuple):
    """An operation's use of host memory.

    Attributes:
        argument: the name of the tensor among the operation's arguments.
        tensor: on the host.
        address: of its storage.
        writes: whether it is changed.
    """

    argument: str
    tensor: object
    address: int
    writes: bool

    @property
    def runs(self) -> Runs:
        return runs(self.tensor, self.address)


class HostCopy:
    """A copy for which the host has not waited.

    Attributes:
        key: the stream that it runs on.
        access: its use of host memory.
        runs: the memory.
        land: puts what it has copied into host memory, where that is kept back.
        again: copies once more, for a host that has changed the source; None where
            that would show nothing.
    """

    __slots__ = ("key", "access", "runs", "land", "again")

    def __init__(self, key: Key, access: Access, runs: Runs, land=None, again=None):
        self.key = key
        self.access = access
        self.runs = runs
        self.land: Callable[[], None] | None = land
        self.again: Callable[[int, object], Callable | None] | None = again

    @property
    def writes(self) -> bool:
        return self.access.type is AccessType.WRITE

    def meets(self, used: HostAccess) -> bool:
        """Whether another access to memory that it uses needs an order."""
        return (self.writes or used.writes) and _overlap(self.runs, used.runs)

    def finish(self) -> None:
        if self.land is not None:
            self.land()
            self.land = None


class HostCopies:
    """The copies for which the host has not waited, by the storage that they use.

    Args:
        sanitizer: knows what is in order.

    Attributes:
        unfinished: address of a storage -> its copies, the oldest first.
    """

    def __init__(self, sanitizer):
        self.sanitizer = sanitizer
        self.unfinished: dict[int, list[HostCopy]] = {}
        self._freed: deque[int] = deque()

    def freed(self, address: int) -> None:
        """A storage is gone. May be called at any moment."""
        self._freed.append(address)

    def unpinned(self, address: int, size: int) -> None:
        """The program has unpinned memory of its own."""
        for start in list(self.unfinished):
            if 0 <= start - address < size:
                self.freed(start)

    def begin(self, operator: str, key: Key, used: HostAccess, land=None, again=None):
        """A copy has been launched for which the host does not wait."""
        sanitizer = self.sanitizer
        with sanitizer.lock:
            self._forget_freed()
            sanitizer.follow_events()
            sanitizer.number += 1
            sanitizer.last[key] = sanitizer.number
            copies = self.unfinished.setdefault(used.address, [])
            access = _access(sanitizer.number, stream_name(*key), operator, used)
            new = HostCopy(key, access, used.runs, land, again)
            if again is None:  # an older one of the same stream is done before it
                copies[:] = [
                    old for old in copies
                    if (old.key, old.writes, old.runs) != (key, new.writes, new.runs)
                ]  # fmt: skip
            copies.append(new)

    def host_waited(self) -> None:
        """Copies that the host knows to be done count no more."""
        self._forget_freed()
        done = self.sanitizer.handler.syncs.host_sync_state
        for address, copies in list(self.unfinished.items()):
            left = []
            for copy in copies:
                if done.get(stream_name(*copy.key), -1) >= copy.access.seq_num:
                    copy.finish()
                else:
                    left.append(copy)
            if left:
                self.unfinished[address] = left
            else:
                del self.unfinished[address]

    def used_by_host(self, operator: str, accesses: list[HostAccess]) -> list[Callable]:
        """The host reads and writes memory.

        Returns:
            What is to be called when it has: copies that see what it has written.

        Raises:
            RaceError: at a race, unless it is only named or can be shown.
        """
        __tracebackhide__ = True
        with self.sanitizer.lock:
            self._forget_freed()
            errors, later = [], []
            for used in accesses:
                for copy in self.unfinished.get(used.address, ()):
                    if not copy.meets(used):
                        continue
                    if self.sanitizer.mode == "show":
                        if copy.writes:
                            continue  # what it writes has been kept back
                        again = copy.again and copy.again(
                            copy.access.seq_num, used.tensor
                        )
                        if again:
                            later.append(again)
                            continue
                    now = _access(self.sanitizer.number + 1, HOST, operator, used)
                    errors.append(HostRace(used.address, now, copy.access))
            self._report(errors)
            return later

    def used_by_stream(self, operator: str, key: Key, used: HostAccess) -> None:
        """A stream is given a copy that reads or writes host memory.

        Raises:
            RaceError: at a race with a copy of another stream, as above.
        """
        __tracebackhide__ = True
        sanitizer = self.sanitizer
        with sanitizer.lock:
            self._forget_freed()
            name, errors = sanitizer.up_to_date(key), []
            for copy in self.unfinished.get(used.address, ()):
                if not copy.meets(used):
                    continue
                previous = copy.access
                if copy.key == key or sanitizer.handler.syncs.is_ordered_after(
                    name, previous.seq_num, previous.stream
                ):
                    if not used.writes:
                        copy.finish()
                elif sanitizer.mode != "show" or used.writes:
                    now = _access(sanitizer.number + 1, name, operator, used)
                    errors.append(HostRace(used.address, now, previous))
            self._report(errors)

    def _report(self, errors: list) -> None:
        __tracebackhide__ = True
        if errors and self.sanitizer.mode == "warn":
            self.sanitizer.warn(errors)
        elif errors:
            raise RaceError(errors)

    def _forget_freed(self) -> None:
        while self._freed:
            self.unfinished.pop(self._freed.popleft(), None)


def _access(number: int, stream: int, operator: str, used: HostAccess) -> Access:
    kind = AccessType.WRITE if used.writes else AccessType.READ
    stack = program_stack(sys._getframe(1))
    aliases = [used.argument] if used.argument else []
    return Access(kind, number, stream, operator, aliases, not aliases, stack)


def _overlap(some: Runs, others: Runs) -> bool:
    """Whether two lists of runs have memory in common; each is in order."""
    i = j = 0
    while i < len(some) and j < len(others):
        if some[i][1] <= others[j][0]:
            i += 1
        elif others[j][1] <= some[i][0]:
            j += 1
        else:
            return True
    return False
