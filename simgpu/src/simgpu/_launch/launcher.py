"""Becomes a launcher of ranks, torchrun for example, whose ranks are forked.

`python -m simgpu` starts this file with the words of the launcher. It imports PyTorch,
forks the server from which the launcher has its ranks, and is the launcher.
"""

import os
import sys

_HERE = os.path.dirname(os.path.realpath(__file__))
if sys.path and sys.path[0] == _HERE:  # this folder is nobody's
    del sys.path[0]

import gc  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import re  # noqa: E402
import socket  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import NoReturn  # noqa: E402

from simgpu import _child_commands as child_commands  # noqa: E402
from simgpu._launch import program, server, shown  # noqa: E402

# what scripts import sooner or later, by a word that is found in them then
_PRELOADED = {
    r"optim|DistributedDataParallel|compile|checkpoint": "torch._dynamo",
    r"fsdp|FullyShardedDataParallel": "torch.distributed.fsdp",
    r"distributed\.checkpoint": "torch.distributed.checkpoint",
    r"pipelining": "torch.distributed.pipelining",
    r"DTensor|tensor\.parallel|device_mesh": "torch.distributed.tensor",
}
_STARTS_WORKERS = (
    "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
)


def main() -> NoReturn:
    """Be the launcher, or one of its ranks."""
    words = sys.argv[1:]
    child_commands.disarm()
    _import()
    for_launcher, for_server = socket.socketpair()
    launcher = os.getpid()
    if os.fork() == 0:
        for_launcher.close()
        _be_rank(server.serve(for_server, launcher, _wanted(words)))
    for_server.close()
    _be_launcher(server.RankServer(for_launcher), words)


def _import() -> None:
    """Import PyTorch and the simulator; numpy's library is to have no threads yet."""
    alone = {"OPENBLAS_NUM_THREADS"} - set(os.environ)
    os.environ.update(dict.fromkeys(alone, "1"))
    gc.disable()  # a third of the time of these imports is the collector's
    try:
        importlib.import_module("torch")
        importlib.import_module("simgpu._startup")
    except ImportError as error:
        sys.exit(str(error))
    gc.freeze()
    gc.enable()
    for name in alone:
        del os.environ[name]


def _wanted(words: list[str]) -> list[str]:
    """Modules that the script will import, as far as its text tells.

    The text is also that of the files beside it that it imports, and that these do.
    """
    left = [Path(word) for word in words[1:] if word.endswith(".py")]
    texts = {}
    while left:
        file = left.pop()
        if file not in texts and file.is_file():
            texts[file] = file.read_text(encoding="utf-8", errors="replace")
            found = re.findall(r"^\s*(?:import|from) (\w+)", texts[file], re.MULTILINE)
            left += [file.with_name(f"{name}.py") for name in found]
    text = "".join(texts.values())
    return [module for hint, module in _PRELOADED.items() if re.search(hint, text)]


def _be_launcher(ranks: server.RankServer, words: list[str]) -> NoReturn:
    handler = importlib.import_module(_STARTS_WORKERS)
    if hasattr(handler, "Popen"):
        handler.Popen = ranks.popen
    shown.take([sys.executable, *words], dict(os.environ))
    child_commands.start(json.loads(os.environ[child_commands.VARIABLE]))
    program.become(words[1:] if words[0] == sys.executable else words)


def _be_rank(asked: server.Asked) -> NoReturn:
    program.renew_random_numbers()
    hidden = program.hide_torch()
    child_commands.arm(hidden)
    program.become(asked.words[2:])


if __name__ == "__main__":
    main()
