"""What the parts of a training step cost: each is dry-run alone, once for each shape.

A part runs behind a kernel that takes long, so that the card never waits for the host:
its time is then that of its kernels and messages, and the host's is counted apart.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from simgpu import _runtime as state

_BEHIND = 25.0  # seconds


class Cost(NamedTuple):
    """Of one pass through a part; sums and multiples are of what is done in a row.

    Attributes:
        seconds: of the card.
        messages: of these, in which collectives ran, behind which everything waits.
        exchanges: of these, those between the ranks of experts.
        ring: of these, those between ranks that have parts of a sequence.
        launches: of kernels and copies by the host in forward.
        back_launches: in backward.
        calls: of collectives.
        functions: of Python that autograd calls.
        kept: bytes that are there afterwards and were not before.
        most: bytes that were there at the peak, beyond those before.
    """

    seconds: float = 0.0
    messages: float = 0.0
    exchanges: float = 0.0
    ring: float = 0.0
    launches: int = 0
    back_launches: int = 0
    calls: int = 0
    functions: int = 0
    kept: int = 0
    most: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        figures = [a + b for a, b in zip(self[:9], other[:9], strict=True)]
        return Cost(*figures, max(self.most, self.kept + other.most))

    def stretched(self, by: float, part: "Cost") -> "Cost":
        """Where `part` of it takes so much more time and memory; launches stay."""
        longer = (self[i] + by * part[i] for i in range(3))
        kept, most = (int(by * size) for size in (part.kept, part.most))
        return self._replace(
            **dict(zip(self._fields[:3], longer, strict=True)),
            kept=self.kept + kept, most=self.most + most,
        )  # fmt: skip

    def times(self, count: int) -> "Cost":
        if not count:
            return Cost()
        most = max(self.most, (count - 1) * self.kept + self.most)
        return Cost(*(count * its for its in self[:9]), most)


class Piece(NamedTuple):
    """Both passes of a part; `weights` are the numbers of its parameters."""

    forward: Cost
    backward: Cost
    weights: tuple[int, ...] = ()


def measured(run: Callable[[], object], backward: bool = False,
             ring: str | None = None) -> tuple[Cost, object]:  # fmt: skip
    """What a call costs, and what it returns.

    Args:
        run: the call.
        backward: whether it is a backward pass.
        ring: what events call the group whose ranks have parts of a sequence.
    """
    runtime = state.current()
    clock, gpu = runtime.clock, runtime.gpus[0]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    key = (gpu.index, torch.cuda.current_stream().stream_id)
    clock.spin(gpu, key[1], _BEHIND)
    first = len(runtime.dry.events)
    with _counted() as functions:
        start = clock.record(*key).time
        made = run()
        clock.settle()
        end = max(seconds for where, seconds in clock.done.items()
                  if where[0] == gpu.index)  # fmt: skip
    events = runtime.dry.events[first:]
    sent = [event for event in events if event.kind == "collective"]
    messages = sum(event.end - event.start for event in sent)
    exchanges = sum(e.end - e.start for e in sent if e.name.startswith("all_to_all"))
    around = sum(e.end - e.start for e in sent if e.group == ring)
    calls, launches = len(sent), len(events) - len(sent)
    kept = torch.cuda.memory_allocated() - before
    most = torch.cuda.max_memory_allocated() - before
    cost = Cost(end - start, messages, exchanges, around, launches * (not backward),
                launches * backward, calls, functions[0], kept, most)  # fmt: skip
    return cost, made


class _counted:  # noqa: N801 - used as a context
    """Counts the autograd functions of Python that are called."""

    def __enter__(self) -> list[int]:
        self.found = found = [0]
        self.apply = vars(torch.autograd.Function)["apply"]
        apply = torch.autograd.Function.apply

        def counting(cls, *args, **kwargs):
            found[0] += 1
            return apply.__func__(cls, *args, **kwargs)

        torch.autograd.Function.apply = classmethod(counting)
        return found

    def __exit__(self, *error) -> None:
        torch.autograd.Function.apply = self.apply


def called(group) -> str:
    """What events call a group."""
    one = torch.empty(1, device="cuda")
    dist.broadcast(one, group_src=0, group=group)
    torch.cuda.synchronize()
    return state.current().dry.events[-1].group


def passes(
    run: Callable, *inputs: torch.Tensor, ring: str | None = None
) -> tuple[Cost, Cost]:
    """Both passes of a part, of which gradients of the parameters stay.

    Args:
        run: the part.
        inputs: of it.
        ring: what events call the group whose ranks have parts of a sequence.
    """
    forward, out = measured(lambda: run(*inputs), ring=ring)
    if out.dim() == 0:
        grad = None
    else:
        grad = torch.empty_like(out)
    functions = forward.functions
    ends = [out, grad]
    del out, grad

    def back():
        torch.autograd.backward(ends.pop(0), ends.pop())

    backward, _ = measured(back, True, ring)
    return forward, backward._replace(functions=functions)
