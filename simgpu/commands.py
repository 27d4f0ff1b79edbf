"""Programs that a program starts as commands, launchers of ranks above all.

`--children`, which a known launcher implies, hands the GPUs down in the environment:
every Python below finds them there when it starts (`inherit.py`). Without it one line
says that such a program has none. Nothing here needs PyTorch.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from simgpu import failures
from simgpu.inherit import VARIABLE

LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch",
             "accelerate", "accelerate.commands.launch",
             "accelerate.commands.accelerate_cli", "deepspeed")  # fmt: skip
_SITE = str(Path(__file__).parent / "site")
_PYTHON = re.compile(r"(^|[\s/\\])(python[\d.]*|torchrun|accelerate)(\.exe)?(\s|$)")
_EVENTS = {"subprocess.Popen": 1, "os.posix_spawn": 1, "os.exec": 1}  # -> the words
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
    with tempfile.TemporaryDirectory(prefix="simgpu") as folder:
        environ = dict(os.environ)
        if simulated:
            environ |= hand_down(found, folder)
        process = subprocess.Popen([*found.command, *found.arguments], env=environ)

        def pass_on(number: int, frame) -> None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

        signal.signal(signal.SIGTERM, pass_on)
        # Ctrl-C at a terminal reaches all of its processes
        interrupted = signal.SIG_IGN if sys.stdin and sys.stdin.isatty() else pass_on
        signal.signal(signal.SIGINT, interrupted)
        status = process.wait()
        if status:
            failures.show_first(Path(folder))
    return 128 - status if status < 0 else status


def tell_of_children() -> None:
    """Say, once, that a Python started as a command has no simulated GPUs."""
    told = False

    def hook(event: str, arguments: tuple) -> None:
        nonlocal told
        if told or event not in _EVENTS:
            return
        words = arguments[_EVENTS[event]]
        text = words if isinstance(words, str) else " ".join(map(str, words))
        if _PYTHON.search(text) and "simgpu" not in text:
            told = True
            print(_SAYS, file=sys.stderr, flush=True)

    sys.addaudithook(hook)
