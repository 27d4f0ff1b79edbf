"""One dry run: it is started, watches the program, and makes the report."""

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from simgpu import _startup as startup
from simgpu._device import measured, overhead
from simgpu._device.cards import CARDS, MORE_CARDS, Card, find_card
from simgpu._device.out_of_memory import out_of_memory_of
from simgpu._device.sizes import parse_memory
from simgpu._dispatch.kernel_work import work_of
from simgpu._dispatch.placement import tensors_in
from simgpu._dry import fed, files, report, values
from simgpu._dry import kinds as kinds_of_ranks
from simgpu._dry.call import DryCall
from simgpu._dry.drawn import drawn_of
from simgpu._dry.memory import Watch
from simgpu._dry.peers import Peers, objects_of
from simgpu._dry.progress import Progress
from simgpu._dry.steps import Over, Steps
from simgpu._dry.wide import meshes_apart, narrowed
from simgpu._frames import called_from
from simgpu._nvidia_smi import on_path
from simgpu._rank_variables import Place
from simgpu._request import COMPILE, MOST_GPUS, Request
from simgpu._runtime import Runtime
from simgpu._timing.cost import host_seconds, launches
from simgpu._timing.topology import Topology

_LOADERS = str(Path(torch.utils.data.__file__).parent)
ROUTING = ("even", "refuse")


@dataclass(frozen=True)
class Job:
    """What is asked of a dry run.

    Attributes:
        world: ranks of the job.
        node: of them on a node; None: at most 8.
        rank: which one runs.
        card: of every rank.
        memory: of it, bytes or text; None is all it has. Of 4 GiB and more, CUDA and
            its libraries take what they take of a card.
        network: of a node, as `Topology` takes it.
        steps: after which the program is left.
        kinds: which ranks run where ranks differ, see `kinds.parse`.
        routing: "even": the indices that `topk`, `max` and `argmax` find are spread
            evenly, as a router's would be; "refuse": they are not known.
        compile: what `torch.compile` does, as `simgpu.start` takes it.
        tokens: of a step of the whole job; None: counted, see `fed.py`.
        host: what launches and collectives cost it, as `cost.launches` takes it.
        samples: of a step of the whole job; None: counted, as tokens are.

    Raises:
        ValueError: for what cannot be, with what to do.
    """

    world: int = 1
    node: int | None = None
    rank: int = 0
    card: str | Card = "H100"
    memory: int | str | None = None
    network: float | str | None = None
    steps: int = 3
    kinds: str | None = None
    routing: str = "even"
    compile: str = "fuse"
    tokens: int | None = None
    host: str | float = "bare"
    samples: int | None = None
    found: kinds_of_ranks.Kinds = field(init=False, repr=False)

    def __post_init__(self):
        world, node = self.world, self.node
        if world < 1:
            raise ValueError(f"a job of {world} ranks; choose 1 or more")
        if node is None:
            node = min(world, 8)
        if node < 1 or world % node:
            raise ValueError(
                f"{world} ranks cannot be spread over nodes of {node}; choose a world "
                "that the node size divides"
            )
        if not 0 <= self.rank < world:
            raise ValueError(
                f"there is no rank {self.rank} among {world}; choose 0 to {world - 1}"
            )
        if self.steps < 2:
            raise ValueError(
                f"{self.steps} steps cannot tell a steady one from the first; choose 2 "
                "or more"
            )
        if self.routing not in ROUTING:
            raise ValueError(f"routing={self.routing!r}; use one of {ROUTING}")
        if self.compile not in COMPILE:
            raise ValueError(f"compile={self.compile!r}; use one of {COMPILE}")
        object.__setattr__(self, "host", str(self.host))  # frozen; it may be a number
        launches(self.host)
        object.__setattr__(self, "node", node)  # frozen
        found = kinds_of_ranks.parse(self.kinds, world, self.rank)
        object.__setattr__(self, "found", found)
        Topology(find_card(self.card), node, world // node, self.network)
        self.request()

    def request(self) -> Request:
        card = find_card(self.card)
        total = card.total_memory if self.memory is None else parse_memory(self.memory)
        if total > card.total_memory:
            raise ValueError(f"a {self.card} does not have {self.memory} of memory")
        taken = total >= overhead.SMALLEST_CARD  # by CUDA and its libraries
        return Request(
            self.node, card, total, "off", taken, self.compile, str(self.host)
        )


def run(job: Job, program: Callable[[], Any], progress: Progress | None = None,
        keep: report.Kept = report.NOTHING) -> "report.DryReport":  # fmt: skip
    """Run a program without its values, as the ranks of `job` that run.

    Args:
        job: what is asked for.
        program: is called once in each rank that runs.
        progress: says how far it is.
        keep: what else is wanted of it.

    Raises:
        kinds.KindFailed: if several ranks run and the program failed in one.
        Exception: what the program raises, if one rank runs.
    """
    ranks = job.found.ranks

    def one(rank: int, store: tuple[str, int] | None = None) -> "report.DryReport":
        shown = progress if rank == ranks[0] else None
        return DryRun(job, rank, store, shown).run(program, keep)

    if len(ranks) == 1:
        return one(ranks[0])
    found = kinds_of_ranks.run_all(ranks, one)
    return report.merged([its for its in found if its is not None])


def import_for_optimizers() -> None:
    """Import what the first optimizer of all does, before the program is watched."""
    torch.optim.SGD([torch.zeros(1)])


class DryRun:
    """One rank of a dry run, and what has been seen of it so far."""

    def __init__(self, job: Job, rank: int, store: tuple[str, int] | None = None,
                 progress: Progress | None = None):  # fmt: skip
        self.job, self.rank, self.progress = job, rank, progress
        self.runtime = Runtime(job.request(), False)
        self.runtime.call_kind = self.runtime.usual_kind = DryCall
        self.runtime.peers = Peers(job.found, store)
        self.runtime.dry, self.runtime.network = self, job.network
        self.gpu = self.runtime.gpus[rank % job.node]
        self.reads: Counter[tuple[str, object]] = Counter()
        self.moments: list[report.Moment] = []  # the end of each step
        self.events: list = []
        self.host_seconds = 0.0  # in which the host computes
        self.recomputed = 0  # floating-point operations of forward done again
        self.fed = fed.Counted()
        self.flex_attention: set[bool] = set()  # whether its calls are compiled
        self.compiles = False  # `torch.compile` was called

    def resize(self, storage, nbytes: int, resize_: Callable) -> None:
        """A storage changes its size; see `values.resize`."""
        values.resize(storage, nbytes, resize_)

    def host_computes(self, call: DryCall, out) -> None:
        """The host computes with large tensors of its own; a loader is left out."""
        if _is_loading():
            return
        outputs = [out] if isinstance(out, torch.Tensor) else tensors_in(out or ())
        nbytes = work_of(call, out, outputs).nbytes
        seconds = host_seconds(nbytes)
        self.host_seconds += seconds
        self.runtime.clock.busy(seconds, "compute on the host")

    def note_read(self, value: object) -> None:
        """The program has read a value that nobody knows."""
        self.reads[called_from(), value] += 1

    def note_read_by_host(self, tensor: torch.Tensor) -> None:
        """The host is about to read a tensor of its own as numbers."""
        if values.is_unknown(tensor):
            self.note_read(values.make_plausible(tensor))

    def note_printed(self, tensor: torch.Tensor) -> None:
        """A tensor is printed: as zeros, if it has no values."""
        if values.is_unknown(tensor):
            self.note_read(0)

    def run(self, program: Callable[[], Any], keep: report.Kept) -> "report.DryReport":
        """Run the program, up to enough steps, and say what came of it."""
        job, clock = self.job, self.runtime.clock
        environ = Place(self.rank, job.world, job.world // job.node).environ()
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        full: BaseException | None = None
        import_for_optimizers()
        with (
            _with_nvidia_smi(job) as path, _environment(environ | {"PATH": path}),
            self.fed.watching(), objects_of(job.found),
            meshes_apart(), narrowed(), files.without_values(),
            startup.apart(self.runtime),
        ):  # fmt: skip
            self.watch = Watch(self.gpu, keep.snapshot is not None)
            clock.recordings.append(self.events)
            steps = Steps(job.steps, self.watch.optimizer_steps, self._step_is_over)
            if self.progress is not None:
                self.progress.begin(self)
            try:
                with self.watch.watching():
                    program()
            except Over:
                pass
            except BaseException as error:
                full = out_of_memory_of(error)
                ended = isinstance(error, SystemExit) and not error.code
                if full is None and not ended:
                    self._leave()
                    raise
            finally:
                steps.close()
                if self.progress is not None:
                    self.progress.end()
            if full is None:
                clock.settle()
            clock.recordings.remove(self.events)
            made = report.of(self, full)
            keep.write(self)
            if keep.pictures:
                made.drawn = drawn_of(self, full is not None)
            self._leave()
        return made

    def _step_is_over(self, optimizer) -> None:
        clock = self.runtime.clock
        if self.runtime.cluster is not None:
            self.runtime.cluster.settle()
        self.moments.append(
            report.Moment(
                clock.total(),
                len(self.events),
                self.recomputed,
                self.fed.take(),
                self.host_seconds,
            )
        )
        self.watch.step_is_over(optimizer)

    def _leave(self) -> None:
        if torch.distributed.is_initialized():
            with contextlib.suppress(Exception):
                torch.distributed.destroy_process_group()


def _with_nvidia_smi(job: Job) -> contextlib.AbstractContextManager[str]:
    """A PATH with the stand-in, which finds its card by name."""
    named = job.card
    if isinstance(named, Card):
        cards = CARDS | MORE_CARDS
        named = next((name for name, its in cards.items() if its == named), "")
    if not named:
        return contextlib.nullcontext(os.environ.get("PATH", os.defpath))
    total = job.request().total_memory
    number = min(job.node or 1, MOST_GPUS)
    return on_path(
        {"number": number, "card": measured.absolute(named), "memory": total}
    )


def _is_loading() -> bool:
    """Whether a `DataLoader` of PyTorch is at work in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_LOADERS):
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
