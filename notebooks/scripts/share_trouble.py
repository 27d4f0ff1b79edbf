"""Ways to lose a shared tensor, each in processes of its own and within seconds.

Every function here must run in a process that may be thrown away: it changes limits,
threads or sharing strategies. Used in 14-share-tensors-between-processes, which runs
them in a forked child. Needs fork, and `small_shm` needs Linux.
"""

import ctypes
import faulthandler
import mmap
import os
import re
import resource
import sys
import tempfile
from multiprocessing.util import get_temp_dir
from pathlib import Path

import torch
import torch.multiprocessing as mp

fork = mp.get_context("fork")


def one_line(error: Exception) -> str:
    """Type and text of an error, without the parts that change in every run."""
    text = re.sub(r"/torch_\w+", "/torch_…", str(error)).strip()
    return f"{type(error).__name__}: {text}"


# -- threads ---------------------------------------------------------------------------


def compute() -> None:
    torch.ones(1_000_000).add(1).sum()  # enough for two threads


def fork_after(threads: int) -> str:
    torch.set_num_threads(threads)
    compute()
    child = fork.Process(target=compute)
    child.start()
    child.join(2)
    child.kill()
    child.join()
    return "the child computed" if child.exitcode == 0 else "the child hung for 2 s"


# -- open files ------------------------------------------------------------------------


def keep_all(inbox, outbox) -> None:
    files = len(os.listdir("/dev/fd")) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    kept = []
    try:
        while (tensor := inbox.get()) is not None:
            kept.append(tensor)
        outbox.put(f"all {len(kept)} arrived")
    except (OSError, RuntimeError) as error:
        kept.clear()
        outbox.put(one_line(error))


def send_200(strategy: str) -> str:
    mp.set_sharing_strategy(strategy)
    inbox, outbox = fork.Queue(), fork.Queue()
    consumer = fork.Process(target=keep_all, args=(inbox, outbox), daemon=True)
    consumer.start()
    for i in range(200):
        inbox.put(torch.full((3,), float(i)))
    inbox.put(None)
    answer = outbox.get(timeout=10)
    inbox.cancel_join_thread()
    consumer.join(5)
    return answer


# -- a producer that does not wait -----------------------------------------------------


def produce(queue, received) -> None:
    queue.put(torch.arange(3.0))
    queue.close()
    queue.join_thread()  # it is on its way
    if received is not None:
        received.wait(10)


def fetch_late(strategy: str, wait: bool) -> str:
    mp.set_sharing_strategy(strategy)
    get_temp_dir()  # made in this process, so that its end removes it
    queue, received = fork.Queue(), fork.Event()
    producer = fork.Process(target=produce, args=(queue, received if wait else None))
    producer.start()
    producer.join(0.5 if wait else 10)
    try:
        answer = str(queue.get(timeout=5).tolist())
    except (OSError, EOFError) as error:
        answer = type(error).__name__
    received.set()
    producer.join(5)
    return answer


# -- a small /dev/shm ------------------------------------------------------------------


def make_shm_small(megabytes: int) -> bool:
    if sys.platform != "linux":
        return False
    libc, user, group = ctypes.CDLL(None), os.getuid(), os.getgid()
    new_user, new_mounts = 0x10000000, 0x00020000
    if libc.unshare(new_user | new_mounts):
        return False  # not every machine allows it
    me = Path("/proc/self")
    try:
        (me / "setgroups").write_text("deny")
        (me / "uid_map").write_text(f"{user} {user} 1")
        (me / "gid_map").write_text(f"{group} {group} 1")
    except OSError:
        return False  # nor this: Ubuntu 24.04 refuses it to all but root
    size = f"size={megabytes}m".encode()
    return libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, size) == 0


def as_tensor(nbytes: int) -> None:
    torch.zeros(nbytes // 4).share_memory_()


def as_mapping(nbytes: int) -> None:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(nbytes)
        mmap.mmap(file.fileno(), nbytes)[:] = bytes(nbytes)


def as_file(nbytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/weights.bin"
        torch.from_file(path, shared=True, size=nbytes // 4).fill_(1)


def attempt(function, nbytes: int, limit: int, connection) -> None:
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        function(nbytes)
        connection.send("fine")
    except (OSError, RuntimeError) as error:
        connection.send(one_line(error))


def small_shm() -> list[str]:
    own = make_shm_small(64)
    said = ["a /dev/shm of 64 MB" if own else "a limit of 64 MB on files in /dev/shm"]
    for function, megabytes in (
        (as_tensor, 40), (as_tensor, 80), (as_mapping, 80), (as_file, 80),
    ):  # fmt: skip
        limit = resource.RLIM_INFINITY if own or function is as_file else 64 << 20
        here, there = fork.Pipe()
        args = (function, megabytes * 1_000_000, limit, there)
        child = fork.Process(target=attempt, args=args)
        child.start()
        child.join(10)
        end = here.recv() if here.poll() else f"ended by signal {-child.exitcode}"
        for left in Path("/dev/shm").glob(f"torch_{child.pid}_*"):
            left.unlink()
        said.append(f"{function.__name__}, {megabytes} MB: {end}")
    return said
