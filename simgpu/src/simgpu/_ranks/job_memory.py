"""The memory of the GPUs of all ranks of a job, to look at.

The figures are `torch.cuda`'s own, of simulated GPUs and real ones alike.
"""

from collections.abc import Iterable
from typing import NamedTuple

from simgpu._device.sizes import show_bytes


class GpuMemory(NamedTuple):
    """What a rank has on one GPU, in bytes; it can be pickled."""

    rank: int
    device: str  # "cuda:0"
    allocated: int  # to tensors, now
    peak: int  # the most that ever was
    reserved: int  # the most that the allocator ever held
    total: int  # that the GPU has


class JobMemory(list):
    """A `GpuMemory` for each GPU that a rank has used; it draws itself.

    Args:
        rows: in any order.
        simulated: whether the GPUs are.

    Attributes:
        kind: "simulated" or "measured": what the figures are.
    """

    def __init__(self, rows: Iterable[GpuMemory], simulated: bool = True) -> None:
        super().__init__(sorted(rows))
        self.kind = "simulated" if simulated else "measured"

    def _repr_svg_(self) -> str | None:
        from simgpu._pictures.jobs import job_memory

        return job_memory(self)._repr_svg_()

    def __repr__(self) -> str:
        return "\n".join(
            f"rank {row.rank} on {row.device}: {show_bytes(row.allocated)} allocated, "
            f"at most {show_bytes(row.peak)}, {show_bytes(row.reserved)} reserved, "
            f"of {show_bytes(row.total)}"
            for row in self
        )


def memory_of(rank: int) -> list[GpuMemory]:
    """The GPUs that this process has used."""
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        peak = torch.cuda.max_memory_allocated(index)
        if peak:
            found.append(
                GpuMemory(
                    rank,
                    f"cuda:{index}",
                    torch.cuda.memory_allocated(index),
                    peak,
                    torch.cuda.max_memory_reserved(index),
                    torch.cuda.get_device_properties(index).total_memory,
                )
            )
    return found
