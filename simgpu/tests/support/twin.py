"""Runs a program with values, or without: `twin.py FILE SCRIPT [ARGUMENT ...]`.

FILE gets what the first rank of the job did to memory, and when. What the program
asserts is true in a dry run, too, which takes tensors that it compares for equal.
"""

import gc
import json
import os
import sys

import torch
import torch._dynamo  # noqa: F401 - an import here and not in the first optimizer

from simgpu import _runtime as state


def be(path: str, script: str, arguments: list[str]) -> None:
    gc.disable()  # when it runs is chance, and it frees memory
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    with open(script, encoding="utf-8") as file:
        code = compile(file.read(), script, "exec")
    exec(code, {"__name__": "__main__", "__file__": script})
    runtime = state.current()
    if os.environ["RANK"] != "0":
        return
    memory = runtime.gpus[torch.cuda.current_device()].memory
    runtime.clock.settle()
    events = [(e.kind, e.name, e.stream, e.nbytes, e.flops, e.start, e.end)
              for e in runtime.clock.events]  # fmt: skip
    with open(path, "w", encoding="utf-8") as file:
        json.dump({
            "peak": memory.both.allocated_bytes.peak,
            "reserved": memory.both.reserved_bytes.peak,
            "seconds": runtime.clock.total(), "events": sorted(events, key=_order),
        }, file)  # fmt: skip


def _order(event: tuple) -> tuple:
    """Of each stream, one after the other."""
    return (event[2], event[5], event[6])


if __name__ == "__main__":
    be(sys.argv[1], sys.argv[2], sys.argv[3:])
