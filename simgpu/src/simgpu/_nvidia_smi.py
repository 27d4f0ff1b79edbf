"""`nvidia-smi` for programs under `python -m simgpu`: a list of the simulated GPUs.

A small program of this name stands first on the PATH of the program and its children.
Models: `nvidia-smi`, `-L`, `--query-gpu=... --format=csv[,noheader][,nounits]`, `-i`;
the memory that processes of the command have in use on a card (of the first node, where
there are several). Leaves out: what the model has none of; that is "[N/A]", as of a
card that cannot tell. Nothing here needs PyTorch.
"""

import contextlib
import json
import os
import shlex
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":  # a file that the shell starts
    sys.path[0] = str(Path(__file__).parents[1])

from simgpu._device import ledger  # noqa: E402
from simgpu._device.visible import uuid_of  # noqa: E402
from simgpu._request import Request, check_request  # noqa: E402

_DRIVER = "580.00"  # the first that CUDA 13.0 runs on is an R580
_CUDA = "13.0"
_UNKNOWN = "[N/A]"
# fields that nvidia-smi has and that have no answer -> their unit
_WITHOUT_ANSWER = {
    "memory.reserved": "MiB", "utilization.gpu": "%", "utilization.memory": "%",
    "temperature.gpu": "", "temperature.memory": "", "power.draw": "W",
    "power.limit": "W", "fan.speed": "%", "pstate": "",
    "persistence_mode": "", "compute_mode": "", "ecc.mode.current": "",
    "pci.bus_id": "", "serial": "", "timestamp": "", "mig.mode.current": "",
}  # fmt: skip
_SHOWN = """\
+-----------------------------------------------------------------------------------+
| simulated GPUs, by simgpu      Driver Version: {driver:<9} CUDA Version: {cuda:<7} |
+-----------------------------------------+-----------------------------------------+
| GPU  Name                               |                            Memory       |
+-----------------------------------------+-----------------------------------------+
{rows}
+-----------------------------------------+-----------------------------------------+"""
_SAYS = (
    "nvidia-smi: the one of simgpu, which stands for simulated GPUs, knows -L, -i ID, "
    "--query-gpu=FIELDS --format=csv[,noheader][,nounits], and no {}"
)


def main(words: list[str]) -> int:
    """Answer: the first word says which GPUs there are, as JSON."""
    request = check_request(**json.loads(words[0]))
    options = iter(words[1:])
    chosen, fields, form, lists = range(request.number), None, [], False
    for option in options:
        name, equals, value = option.partition("=")
        if name in ("-i", "--id", "--query-gpu", "--format") and not equals:
            value = next(options, "")
        if name in ("-L", "--list-gpus"):
            lists = True
        elif name in ("-i", "--id"):
            chosen = _chosen(request, value)
        elif name == "--query-gpu":
            fields = [field.strip() for field in value.split(",")]
        elif name == "--format":
            form = [word.strip() for word in value.split(",")]
        else:
            print(_SAYS.format(option), file=sys.stderr)
            return 2
    if chosen is None:
        print("No devices were found")
        return 6
    if fields is not None:
        return _query(request, chosen, fields, form)
    rows = _line if lists else _row
    text = "\n".join(rows(request, index) for index in chosen)
    print(text if lists else _SHOWN.format(driver=_DRIVER, cuda=_CUDA, rows=text))
    return 0


def _chosen(request: Request, text: str) -> list[int] | None:
    """The GPUs of `-i 0,2` or their UUIDs; None if one of them is not there."""
    names = {str(i): i for i in range(request.number)}
    names |= {_uuid(i): i for i in range(request.number)}
    found = [names.get(word.strip()) for word in text.split(",")]
    return None if None in found else found


def _uuid(index: int) -> str:
    return f"GPU-{uuid_of(index)}"


def _name(request: Request) -> str:
    return f"{request.card.name} (simulated)"


def _mebibytes(request: Request) -> int:
    return request.total_memory // 2**20


def _used(request: Request) -> list[int]:
    """MiB of each card that processes have in use."""
    cards = ledger.join((request.number, request.card.name, request.total_memory))
    if cards is None:
        return [0] * request.number
    entries = [cards.entry(index) for index in range(request.number)]
    found = [sum(entry.others().values()) // 2**20 for entry in entries]
    cards.leave()
    return found


def _line(request: Request, index: int) -> str:
    return f"GPU {index}: {_name(request)} (UUID: {_uuid(index)})"


def _row(request: Request, index: int) -> str:
    memory = f"{_used(request)[index]}MiB / {_mebibytes(request)}MiB"
    return f"| {index:>3}  {_name(request):<34} | {memory:>32}        |"


def _query(request: Request, chosen, fields: list[str], form: list[str]) -> int:
    """One line for each GPU."""
    if "csv" not in form:
        print('"--format=" switch is missing. See nvidia-smi -h for more information.')
        return 2
    major, minor = request.card.capability
    known = {  # field -> (unit, answer)
        "name": ("", _name(request)), "gpu_name": ("", _name(request)),
        "count": ("", request.number), "driver_version": ("", _DRIVER),
        "compute_cap": ("", f"{major}.{minor}"),
        "memory.total": ("MiB", _mebibytes(request)),
        "clocks.max.sm": ("MHz", request.card.clock // 1000),
        "clocks.max.memory": ("MHz", request.card.memory_clock // 1000),
        **{name: (unit, _UNKNOWN) for name, unit in _WITHOUT_ANSWER.items()},
    }  # fmt: skip
    used = _used(request)
    own = {  # the same of each GPU
        "index": ("", str), "uuid": ("", _uuid), "gpu_uuid": ("", _uuid),
        "memory.used": ("MiB", lambda i: used[i]),
        "memory.free": ("MiB", lambda i: _mebibytes(request) - used[i]),
    }  # fmt: skip
    for field in fields:
        if field not in known and field not in own:
            print(f'Field "{field}" is not a valid field to query.')
            return 2
    if "noheader" not in form:
        units = [(known.get(field) or own[field])[0] for field in fields]
        units = [f" [{unit}]" if unit else "" for unit in units]
        print(", ".join(map("".join, zip(fields, units, strict=True))))
    for index in chosen:
        words = []
        for field in fields:
            unit, value = known.get(field) or (own[field][0], own[field][1](index))
            bare = not unit or "nounits" in form or value == _UNKNOWN
            words.append(f"{value}" if bare else f"{value} {unit}")
        print(", ".join(words))
    return 0


@contextlib.contextmanager
def on_path(request: dict) -> Iterator[str]:
    """A PATH on which `nvidia-smi` is ours, while the block runs.

    Args:
        request: as `simgpu.start` takes it.
    """
    asked = {name: request[name] for name in ("number", "card", "memory")}
    words = [sys.executable, str(Path(__file__)), json.dumps(asked)]
    with tempfile.TemporaryDirectory(prefix="simgpu") as folder:
        if os.name == "posix":
            program = Path(folder, "nvidia-smi")
            program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        yield os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
