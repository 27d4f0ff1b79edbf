"""Programs that a program starts as commands, launchers of ranks above all.

`--children`, which a known launcher implies, hands the GPUs down in the environment:
every Python below finds them there when it starts (`_child_commands.py`). Without it
one line says that such a program has none. Nothing here needs PyTorch.
"""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from simgpu import _failures as failures
from simgpu import _nvidia_smi as nvidia_smi
from simgpu._child_commands import VARIABLE
from simgpu._device import ledger
from simgpu._launch import shown

LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch",
             "accelerate", "accelerate.commands.launch",
             "accelerate.commands.accelerate_cli", "deepspeed")  # fmt: skip
# those that start ranks through PyTorch's elastic engine
_ELASTIC = LAUNCHERS[:-1]
_CAN_FORK = sys.platform == "linux"
_BECOME = Path(__file__).parent / "_launch" / "launcher.py"
_SITE = str(Path(__file__).parent / "_site")
_PYTHON = re.compile(r"(^|[\s/\\])(python[\d.]*|torchrun|accelerate)(\.exe)?(\s|$)")
_COMMAND = "SIMGPU_COMMAND"  # tells all processes below which command's they are
_ROUNDS = 100  # of looking for processes to end
_SAYS = (
    "simgpu: a program that this one starts as a command has no simulated GPUs; "
    "python -m simgpu --children hands them down"
)


def find_command(name: str) -> list[str] | None:
    """A program beside this Python, or on PATH."""
    beside = os.path.dirname(sys.executable)
    found = shutil.which(name, path=beside) or shutil.which(name)
    return None if found is None else [found]


def hand_down(found, failed: str | None = None) -> dict[str, str]:
    """What the environment of children must have.

    Args:
        found: the options.
        failed: a folder where a rank that fails says so.
    """
    words = {
        "gpus": found.request, "network": found.network, "nodes": found.nodes,
        "timeline": found.timeline and str(found.timeline), "failures": failed,
    }  # fmt: skip
    before = os.environ.get("PYTHONPATH")
    path = _SITE if not before else os.pathsep.join((_SITE, before))
    return {VARIABLE: json.dumps(words), "PYTHONPATH": path}


def run(found, simulated: bool) -> int:
    """Run a command whose Pythons have the GPUs; returns its exit status."""
    with (
        tempfile.TemporaryDirectory(prefix="simgpu") as folder,
        nvidia_smi.on_path(found.request) as path,
    ):
        environ, command = dict(os.environ), found.command
        if simulated:
            cards, failed = Path(folder) / ledger.FILE, Path(folder) / "failed"
            ledger.create(cards)
            failed.mkdir()
            environ["PATH"] = path
            environ |= hand_down(found, str(failed))
            environ |= {_COMMAND: folder, ledger.VARIABLE: str(cards)}
        if simulated and _CAN_FORK and not found.no_fork and _is_elastic(command):
            command = [sys.executable, "-u", str(_BECOME), *command]
            environ = shown.with_room(environ)
        guard = _Guard(folder) if simulated and _CAN_FORK else contextlib.nullcontext()
        with guard:
            process = start([*command, *found.arguments], environ)
            status = _wait(process)
        if status and simulated:
            failures.show_first(failed)
    return 128 - status if status < 0 else status


def start(words: list[str], environ: dict[str, str]) -> subprocess.Popen:
    """The process of a command."""
    return subprocess.Popen(words, env=environ)


def _wait(process: subprocess.Popen) -> int:
    """The exit status of a process, which has the signals that this one gets."""

    def pass_on(number: int, frame) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    # Ctrl-C at a terminal reaches all of its processes
    interrupted = signal.SIG_IGN if sys.stdin and sys.stdin.isatty() else pass_on
    signal.signal(signal.SIGINT, interrupted)
    return process.wait()


class _Guard:
    """A process that ends what the command has started if that is killed.

    It is told when the block ends; else it finds the processes by their environment,
    which names the command's own folder, and removes that. It is no child of the
    command, whose only one is what it starts. On Linux only.

    Args:
        folder: of the command.
    """

    def __init__(self, folder: str):
        self.folder = folder

    def __enter__(self) -> None:
        wait, self._tell = os.pipe()
        self._over, over = os.pipe()
        between = os.fork()
        if between == 0:
            try:
                if os.fork() == 0:
                    os.close(self._tell)
                    os.setsid()  # Ctrl-C at a terminal is not for it
                    if not os.read(wait, 1):
                        _end_all(self.folder)
            finally:
                os._exit(0)
        os.waitpid(between, 0)
        os.close(wait)
        os.close(over)

    def __exit__(self, *raised) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._tell, b"x")
        os.close(self._tell)
        os.read(self._over, 1)  # nothing comes but its end
        os.close(self._over)


def _end_all(folder: str) -> None:
    """Kill every process whose environment names a folder, and remove that."""
    named = os.fsencode(f"{_COMMAND}={folder}\0")
    for _ in range(_ROUNDS):  # those that it finds may be starting others
        found = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
                 if pid != os.getpid() and named in _environ_of(pid)]  # fmt: skip
        if not found:
            break
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)


def _environ_of(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read()
    except OSError:  # it has ended, or is somebody else's
        return b""


def _is_elastic(command: list[str]) -> bool:
    """Whether a command is such a launcher, and a program of this very Python."""
    if command[0] == sys.executable:
        return command[-1] in _ELASTIC
    folder, name = os.path.split(command[0])
    if name not in _ELASTIC or folder != os.path.dirname(sys.executable):
        return False
    with open(command[0], "rb") as file:
        first = file.readline()
    return first.startswith(b"#!") and b"python" in first


def tell_of_children() -> None:
    """Say, once, that a Python started as a command has no simulated GPUs.

    Not an audit hook, which Python would call at each look at a stack, too.
    """
    start = subprocess.Popen.__init__
    told = False

    @functools.wraps(start)
    def told_start(process, args, *more, **options):
        nonlocal told
        words = args if isinstance(args, (list, tuple)) else [args]
        text = " ".join(map(str, words))
        if not told and _PYTHON.search(text) and "-m simgpu" not in text:
            told = True
            print(_SAYS, file=sys.stderr, flush=True)
        start(process, args, *more, **options)

    subprocess.Popen.__init__ = told_start
