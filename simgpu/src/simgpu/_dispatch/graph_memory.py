"""What the steps of a CUDA graph use: its own memory, memory outside, places in it.

A graph knows addresses and not tensors: see `graph_values.py`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from simgpu._compat import storage_of_weak_ref
from simgpu._errors import NotSimulated


class Memory:
    """Bytes of the host that belong to graphs, for as long as there are any."""

    __slots__ = ("storage", "__weakref__")

    def __init__(self, storage):
        self.storage = storage


class Outside:
    """Memory that was there before a capture.

    Args:
        storage: of a tensor that an operation was given.
        words: which operation used it first, and as what.
    """

    __slots__ = ("_ref", "nbytes", "words", "before", "uses")

    def __init__(self, storage, words: str):
        self._ref, self.nbytes = StorageWeakRef(storage), storage.nbytes()
        self.words = words
        self.before: torch.Tensor | None = None  # its bytes, where the capture writes
        # what of it is used, as dtype and place -> whether it is written
        self.uses: dict[tuple, bool] = {}

    @property
    def is_gone(self) -> bool:
        return self._ref.expired()

    @property
    def is_there(self) -> bool:
        """Whether the program still holds it, as large as it was."""
        return not self.is_gone and self._storage().nbytes() == self.nbytes

    def _storage(self):
        return storage_of_weak_ref(self._ref.cdata)

    def storage(self):
        """Itself.

        Raises:
            NotSimulated: if the program has let go of it.
        """
        if not self.is_there:
            raise NotSimulated(
                f"Replaying a CUDA graph whose memory is gone ({self.words})",
                "On a GPU it would use what lies at that address by now: keep the "
                "tensors that a graph reads and writes for as long as the graph.",
            )
        return self._storage()


class Place(NamedTuple):
    """Where a tensor lies in memory that was there before, without the tensor."""

    outside: Outside
    dtype: torch.dtype
    where: tuple  # offset, shape, strides
    is_conj: bool
    is_neg: bool


class Step(NamedTuple):
    """One operation of a graph; tensors are the graph's own, or places outside."""

    name: str
    func: Callable
    args: list
    kwargs: dict
    results: list[torch.Tensor | None]  # where its new tensors lie; None for others
    draw: tuple | None  # (generator, offset from the start, whether it is given)
    grad: bool  # whether gradients were kept, by which some kernels decide
