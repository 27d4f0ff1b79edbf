"""Parts of loading: what takes its time, what counts, what dies, and a small /dev/shm.

Used in 11-feed-the-gpu. Needs fork; `in_small_shm` needs Linux as well, and must run in
a process that may be thrown away. Times are measured but for `fed`, which moves the
simulated host's clock on.
"""

import gc
import os
import re
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from helpers import digits, host_busy, host_seconds
from scripts.share_trouble import make_shm_small

# -- loading, on the host's clock ------------------------------------------------------


def fed(batches, seconds: float, workers: int = 0, factor: int = 2):
    """Yield the batches when a loader would, whose batches take so long to load.

    Worker `i % workers` loads batch i. It may begin once its last batch is done, and
    once the loop has taken batch `i - workers * factor`. Nobody really loads.
    """
    taken, free = [], [host_seconds()] * workers
    for i, batch in enumerate(batches):
        if workers == 0:
            host_busy(seconds, "load")
        else:
            begin = free[i % workers]
            if i >= workers * factor:
                begin = max(begin, taken[i - workers * factor])
            free[i % workers] = begin + seconds
            host_busy(max(0, begin + seconds - host_seconds()), "wait for a worker")
        taken.append(host_seconds())
        yield batch


# -- loading that takes its time, measured ---------------------------------------------


def loaded(number: int = 20) -> Iterator[int]:
    """Yield numbers that take 10 ms each to load."""
    for i in range(number):
        time.sleep(0.01)
        yield i


def seconds_to_use(batches: Iterable, number: int = 20) -> float:
    """Take all of `loaded`'s numbers, and use each for 10 ms.

    Raises:
        AssertionError: if a number is missing, or out of order.
    """
    start, numbers = time.perf_counter(), []
    for i in batches:
        time.sleep(0.01)
        numbers.append(i)
    assert numbers == list(range(number)), numbers
    return time.perf_counter() - start


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def epochs(loader: DataLoader) -> tuple[float, float]:
    """Seconds to the first batch of a first epoch, and for a whole later epoch.

    The shorter of two later ones. With persistent workers they start no processes.
    """
    start = time.perf_counter()
    first = [time.perf_counter() - start for _ in loader][0]
    later = []
    for _ in range(2):
        start = time.perf_counter()
        for _ in loader:
            pass
        later.append(time.perf_counter() - start)
    return first, min(later)


def seconds_to_pick(dataset: Dataset, rows: torch.Tensor, size: int) -> float:
    """Load rows of a data set of tensors `x` and `y`, the shortest of three times.

    `size` rows at a time, or one by one through `dataset[i]` where it is 1.
    """
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        if size == 1:
            for i in rows.tolist():
                dataset[i]
        else:
            for part in rows.split(size):
                dataset.x[part], dataset.y[part]
        seconds.append(time.perf_counter() - start)
    return min(seconds)


# -- training on digits ----------------------------------------------------------------


def learned(epoch_of: Callable[[], Iterable]) -> tuple[list[torch.Tensor], int]:
    """Train a small network for three epochs; its weights, and right test images.

    `epoch_of()` gives the batches of one epoch, on the GPU. In float64.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    net = net.double().to("cuda")
    sgd = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    for _ in range(3):
        for x, y in epoch_of():
            cross_entropy(net(x.double() / 16), y).backward()
            sgd.step()
            sgd.zero_grad()
    data = digits()
    scores = net(data.test_x.double().to("cuda")).cpu()
    right = (scores.argmax(1) == data.test_y).sum().item()
    return [p.detach().cpu() for p in net.parameters()], right


# -- what workers hold, and who they are -----------------------------------------------


class Sums(Dataset):
    """Item i of 100 is the sum of the i-th hundredth of a million numbers."""

    def __init__(self, numbers: list[int] | torch.Tensor):
        self.numbers = numbers

    def __len__(self) -> int:
        return 100

    def __getitem__(self, i: int) -> int:
        return int(sum(self.numbers[i * 10_000 : (i + 1) * 10_000][::100]))


def own_megabytes(loader: DataLoader) -> float:
    """Memory of each persistent worker that it shares with nobody, after two epochs."""
    before = set(mp.active_children())
    gc.collect()
    gc.freeze()  # a worker that looked for garbage would copy all that it looks at
    for _ in range(2):
        for _ in loader:
            pass
    gc.unfreeze()
    workers = set(mp.active_children()) - before
    sizes = [psutil.Process(p.pid).memory_full_info().uss for p in workers]
    return sum(sizes) / len(sizes) / 1e6


class Eight(Dataset):
    """A data set of eight items."""

    def __len__(self) -> int:
        return 8


class Who(Eight):
    """Each of eight items is the number of the process that loads it."""

    def __getitem__(self, i: int) -> int:
        return os.getpid()


class Counted(list):
    """A batch_sampler of 20 batches of one row, that counts those it has given out."""

    asked = 0

    def __iter__(self):
        for i in range(20):
            self.asked += 1
            yield [i % 8]


def asked(load: Callable, workers: int, factor: int) -> tuple[int, int]:
    """Batches asked for before the loop gets the first, and when it has taken five."""
    rows = Counted()
    batches = iter(load(Who(), workers, batch_sampler=rows, prefetch_factor=factor))
    at_first = rows.asked
    list(islice(batches, 5))
    return at_first, rows.asked


# -- a file that is opened where it is read --------------------------------------------


class Lines(Dataset):
    """The numbers in a text file, one a line; each process opens it for itself."""

    def __init__(self, path: str, length: int):
        self.path, self.length, self.lines = path, length, None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> int:
        if self.lines is None:  # the first item in this process
            self.lines = Path(self.path).read_text().splitlines()
        return int(self.lines[i])


# -- workers that fail -----------------------------------------------------------------


class Fails(Eight):
    """Something happens to whoever loads the sixth item."""

    def __init__(self, accident: Callable[[], None]):
        self.accident = accident

    def __getitem__(self, i: int) -> int:
        if i == 5:
            time.sleep(0.2)  # the batch before is on its way: the queue is free
            self.accident()
        return i


def raises() -> None:
    raise ValueError("row 5 is bad")


def exits() -> None:
    os._exit(1)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs() -> None:
    time.sleep(10)


def let_go(error: BaseException | None) -> None:
    """Free what an error holds: a loader that is held would end its workers late.

    Where only the garbage collector frees it, each worker is waited for for 5 seconds.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def last_words(loader: DataLoader) -> str:
    """The line of a loader's error that says why, without process numbers."""
    try:
        for _ in loader:
            pass
    except (RuntimeError, ValueError) as error:
        # a dead worker interrupts the loop: where, decides which error wraps which
        text = str(error.__cause__ or "").strip() or str(error).strip()
        text = text.splitlines()[-1]
        let_go(error)
        return re.sub(r"pid \d+", "pid …", text)
    return "no error"


# -- a small /dev/shm ------------------------------------------------------------------


class Photos(Dataset):
    """128 pictures of 3 x 224 x 224 zeros."""

    def __init__(self, dtype=torch.float32):
        self.dtype = dtype

    def __len__(self) -> int:
        return 128

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.zeros(3, 224, 224, dtype=self.dtype)


def as_arrays(pictures: list) -> np.ndarray:
    """A collate_fn: NumPy's arrays go through the pipe, without shared memory."""
    return np.stack([picture.numpy() for picture in pictures])


WAYS = {  # of loading 128 pictures, with two workers
    "64 pictures, float32": {"batch_size": 64, "num_workers": 2},
    "16 pictures, float32": {"batch_size": 16, "num_workers": 2},
    "64 pictures, uint8": {
        "batch_size": 64, "num_workers": 2, "dtype": torch.uint8,
    },
    "64 pictures, as arrays": {
        "batch_size": 64, "num_workers": 2, "collate_fn": as_arrays,
    },
}  # fmt: skip


def load_all(dtype=torch.float32, **how) -> str:
    """What a loader of `Photos` says: the number of pictures, or its error."""
    context = "fork" if how.get("num_workers") else None
    batches = iter(DataLoader(Photos(dtype), multiprocessing_context=context, **how))
    workers = [process.pid for process in mp.active_children()]
    try:
        return f"{sum(len(batch) for batch in batches)} pictures"
    except RuntimeError as error:
        last = [line for line in str(error).splitlines() if line.strip()][-1]
        let_go(error)
        return re.sub(r"/torch_\w+", "/torch_…", last)
    finally:
        for pid in workers:  # a file that could not grow stays
            for left in Path("/dev/shm").glob(f"torch_{pid}_*"):
                left.unlink()


def in_small_shm(ways: dict, megabytes: int = 64) -> list[str]:
    """How /dev/shm was made small, and what each way of loading says there."""
    gc.freeze()  # what the parent has left is not this process's to clear away
    torch.set_num_threads(1)
    said = [f"a /dev/shm of {megabytes} MB"]
    if not make_shm_small(megabytes):
        limit = megabytes << 19  # half of it, since two batches are there at once
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        said = [f"a limit of {megabytes // 2} MB on each file in /dev/shm"]
    for name, how in ways.items():
        said.append(f"{name}: {load_all(**how)}")
    return said
