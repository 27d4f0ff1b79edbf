"""Programs under `python -m simgpu`, in processes that have PyTorch already.

A server that has imported PyTorch forks each process, which then does what
`python -m simgpu` does; a new Python takes two seconds of CPU to get there. What may
depend on how Python itself begins and ends asks for a new one.
"""

import contextlib
import faulthandler
import functools
import multiprocessing
import os
import random
import runpy
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

SECONDS = 300  # that a program may take, beside others
_SERVER = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
if hasattr(os, "fork"):
    _SERVER.set_forkserver_preload(
        [
            "simgpu._startup",
            "torch._dynamo",
            "torch.distributed.optim",
            "torch.distributed.fsdp",
        ]
    )


def free_port() -> int:
    """A port that nobody uses, below those that the system gives to connections."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as door, contextlib.suppress(OSError):
            door.bind(("", port))
            return port


class Done(NamedTuple):
    """What a program leaves: of several ranks, the first status that is not 0."""

    status: int
    stdout: str
    stderr: str


def simulated(folder: Path, *arguments, new_python=False, **environment: str) -> Done:
    """Run `python -m simgpu` with these arguments in a folder, and wait for its end."""
    environ = _environment(environment)
    if not new_python:
        return _run(folder, arguments, [environ])
    return in_new_python(folder, "-m", "simgpu", *arguments, **environment)


def in_new_python(folder: Path, *arguments, **environment: str) -> Done:
    """Run `python` with these arguments in a folder, and wait for its end."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=_environment(environment),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def in_ranks(folder: Path, ranks: int, *arguments) -> Done:
    """Run `torchrun --nproc-per-node=RANKS -m simgpu` with these arguments.

    As under torchrun, the ranks meet at a store that is not theirs.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    common = {
        "MASTER_ADDR": "localhost", "MASTER_PORT": store.port, "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }  # fmt: skip
    environs = [common | {"RANK": i, "LOCAL_RANK": i} for i in range(ranks)]
    return _run(folder, arguments, [_environment(environ) for environ in environs])


def _environment(more: dict) -> dict[str, str]:
    environ = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    environ |= {"SIMGPU": "on", "OMP_NUM_THREADS": "1"}
    return environ | {name: str(value) for name, value in more.items()}


def _run(folder: Path, arguments, environs: list[dict]) -> Done:
    """A forked process for each environment; what they print comes together."""
    arguments = [str(argument) for argument in arguments]
    with tempfile.TemporaryDirectory() as printed:
        processes = [
            _SERVER.Process(target=_become, args=(arguments, folder, printed, environ))
            for environ in environs
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(SECONDS)
        late = [process for process in processes if process.is_alive()]
        for process in late:
            process.kill()
        out, error = (Path(printed, name).read_text() for name in ("1", "2"))
        assert not late, f"{len(late)} processes did not end: {error}"
        failed = [process.exitcode for process in processes if process.exitcode]
        return Done(failed[0] if failed else 0, out, error)


def _become(arguments: list[str], folder: Path, printed: str, environ: dict) -> None:
    """What one process does: become `python -m simgpu`."""
    for number in (1, 2):
        file = os.open(f"{printed}/{number}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
    faulthandler.dump_traceback_later(SECONDS - 5, file=2)  # where it stands then
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.argv = ["simgpu", *arguments]
    torch.set_num_threads(1)
    # PyTorch renews its pool of threads at the first use after a fork; of two threads
    # that are the first to use it, one may find none and abort.
    os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, 1))
    runpy.run_module("simgpu", run_name="__main__", alter_sys=True)
