"""One dry run: it is started, watches the program, and makes the report."""

import contextlib
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from simgpu import _runtime as state
from simgpu import _startup as startup
from simgpu._device.cards import find_card, parse_memory
from simgpu._dry import peers, report
from simgpu._dry.call import DryCall
from simgpu._dry.memory import Watch
from simgpu._dry.steps import Over, Steps
from simgpu._frames import called_from
from simgpu._rank_variables import Place
from simgpu._request import Request
from simgpu._runtime import Runtime


class DryRun:
    """What is asked of a dry run, and what it has seen so far.

    Args:
        world: ranks of the job.
        node: of them on a node.
        rank: which one runs.
        card: its name.
        memory: of it; None is all it has.
        network: of a node.
        steps: after which the program is left.
        compile: "refuse" or "eager".
    """

    def __init__(self, world: int = 1, node: int | None = None, rank: int = 0,
                 card: str = "H100", memory: int | str | None = None,
                 network: str | None = None, steps: int = 3,
                 compile: str = "refuse", tokens: int | None = None):  # fmt: skip
        node = min(world, 8) if node is None else node
        check(world, node, rank, steps)
        self.world, self.node, self.rank, self.steps = world, node, rank, steps
        self.tokens = tokens
        found = find_card(card)
        total = found.total_memory if memory is None else parse_memory(memory)
        request = Request(node, found, total, "off", memory is None, compile)
        self.runtime = Runtime(request, False)
        self.runtime.call_kind, self.runtime.peers = DryCall, peers
        self.runtime.dry, self.runtime.network = self, network
        self.reads: Counter[tuple[str, object]] = Counter()
        self.moments: list[float] = []  # simulated, at the end of each step
        self.real = []
        self.events: list = []
        self.watch: Watch | None = None

    def note_read(self, value: object) -> None:
        """The program has read a value that nobody knows."""
        self.reads[called_from(), value] += 1

    def run(self, program: Callable[[], Any]) -> "report.DryReport":
        """Run the program, up to enough steps, and say what came of it."""
        environ = Place(self.rank, self.world, self.world // self.node).environ()
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        out_of_memory = None
        with _environment(environ), startup.apart(self.runtime):
            self.gpu = self.runtime.gpus[self.rank % self.node]
            self.watch = Watch(self.gpu)
            recording: list = []
            self.runtime.clock.recordings.append(recording)
            self.events = recording
            steps = Steps(self.steps, self.watch.optimizer_steps, self._step_is_over)
            try:
                program()
            except Over:
                pass
            except torch.OutOfMemoryError as error:
                out_of_memory = error
            finally:
                steps.close()
                self.runtime.clock.recordings.remove(recording)
            self.runtime.clock.settle()
            made = report.make(self, out_of_memory)
            self._leave()
        return made

    def _step_is_over(self, optimizer) -> None:
        clock = self.runtime.clock
        self.runtime.cluster and self.runtime.cluster.settle()
        self.moments.append((clock.total(), clock.host, len(self.events)))
        self.real.append(time.perf_counter())
        self.watch.step_is_over(optimizer)

    def _leave(self) -> None:
        if torch.distributed.is_initialized():
            with contextlib.suppress(Exception):
                torch.distributed.destroy_process_group()


def check(world: int, node: int, rank: int, steps: int) -> None:
    """Raise for numbers that cannot be.

    Raises:
        ValueError: with what to do.
    """
    if world < 1 or node < 1 or world % node:
        raise ValueError(
            f"{world} ranks cannot be spread over nodes of {node}; choose a world that "
            "the node size divides"
        )
    if not 0 <= rank < world:
        raise ValueError(f"there is no rank {rank} among {world}; choose 0 to {world - 1}")
    if steps < 2:
        raise ValueError(f"{steps} steps cannot tell a steady one from the first; 2 or more")


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
