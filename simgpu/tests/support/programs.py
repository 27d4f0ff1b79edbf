"""Programs under `python -m simgpu`, in processes that have PyTorch already.

A server that has imported PyTorch forks each process, which then does what
`python -m simgpu` does; a new Python takes four seconds of CPU to get there. So is a
launcher forked that stands behind the command, and its ranks, which simgpu forks from
the launcher. What may depend on how Python itself begins and ends asks for a new one.
"""

import faulthandler
import functools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from simgpu import _launchers as launchers
from simgpu._launch import launcher, server, shown
from support.limits import JOB, MOMENT

_WHERE = signal.SIGUSR2 if hasattr(os, "fork") else None  # asks for a traceback
_SERVER = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
if hasattr(os, "fork"):
    _SERVER.set_forkserver_preload(
        [
            "simgpu._startup",
            "torch._dynamo",
            "torch.distributed.checkpoint",
            "torch.distributed.fsdp",
            "torch.distributed.optim",
            "torch.distributed.pipelining",
            "torch.distributed.run",
            "torch.distributed.tensor",
        ]
    )


class Done(NamedTuple):
    """What a program leaves: of several ranks, the first status that is not 0."""

    status: int
    stdout: str
    stderr: str


def simulated(folder: Path, *arguments, new_python=False, **environment: str) -> Done:
    """Run `python -m simgpu` with these arguments in a folder, and wait for its end."""
    if not new_python:
        return in_environment(folder, arguments, _environment(environment))
    return in_new_python(folder, "-m", "simgpu", *arguments, **environment)


def in_environment(folder: Path, arguments, environ: dict, seconds=JOB) -> Done:
    """Run `python -m simgpu` with these arguments and nothing else in the environment.

    Args:
        folder: where it starts.
        arguments: behind `python -m simgpu`.
        environ: all variables.
        seconds: that it may take.
    """
    return _run(folder, arguments, [environ], seconds)


def in_new_python(folder: Path, *arguments, **environment: str) -> Done:
    """Run `python` with these arguments in a folder, and wait for its end."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=_environment(environment),
        capture_output=True,
        text=True,
        timeout=JOB,
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


def _run(folder: Path, arguments, environs: list[dict], seconds=JOB) -> Done:
    """A forked process for each environment; what they print comes together."""
    arguments = [str(argument) for argument in arguments]
    with mock.patch.dict(os.environ, shown.with_room({})):
        forkserver.ensure_running()  # its processes can show what they become
    with tempfile.TemporaryDirectory() as printed:
        processes = [
            _SERVER.Process(target=_become, args=(arguments, folder, printed, environ))
            for environ in environs
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(seconds)
        late = [process for process in processes if process.is_alive()]
        for process in late:
            os.kill(process.pid, _WHERE)
            process.join(MOMENT)  # in which it says where it stands
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
        os.close(file)
    faulthandler.register(_WHERE, file=2)  # no thread: the program may fork
    shown.take([sys.executable, "-m", "simgpu", *arguments], environ)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.argv = ["simgpu", *arguments]
    tempfile.tempdir = None  # of this environment
    torch.set_num_threads(1)
    # PyTorch renews its pool of threads at the first use after a fork; of two threads
    # that are the first to use it, one may find none and abort.
    os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, 1))
    forkserver._forkserver.__init__()  # one of this process is as in a new Python
    launchers.start = functools.partial(_start_launcher, launchers.start)
    runpy.run_module("simgpu", run_name="__main__", alter_sys=True)


def _start_launcher(otherwise: Callable, words: list, environ: dict) -> object:
    """In place of `simgpu._launchers.start`: a launcher that is forked from here."""
    words = list(map(str, words))
    if words[:3] != [sys.executable, "-u", launcher.__file__]:
        return otherwise(words, environ)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return server.ForkedRank(words, pid)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    resource_tracker._resource_tracker.__init__()  # this one's file has been closed
    shown.take(words, environ)
    sys.argv = words[2:]
    del sys.path[0]  # the folder, where `python -m simgpu` was started
    launcher.main()
    raise AssertionError("a launcher does not return")
