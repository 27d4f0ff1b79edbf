"""How many tokens a step has, as far as a program shows it.

Counted are the indices that go into embeddings: of the table that gets most of them in
a step, which is that of the tokens. They are this rank's. Ranks of a mesh that split a
model ("tp", "pp") share them; all others have their own, as those do that split
sequences ("cp", "sp"), each of which gets its part of a batch.
"""

import contextlib
import math
import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh

_SPLIT = {"tp", "pp", "tensor", "pipeline"}


def _module_of() -> int | None:
    """The layer whose `forward` runs; a table's own address changes when sharded."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "forward":
            layer = frame.f_locals.get("self")
            if isinstance(layer, torch.nn.Module):
                return id(layer)
        frame = frame.f_back
    return None


class Counted:
    """Counts the tokens of one rank."""

    def __init__(self):
        self._seen: Counter[object] = Counter()
        self.sharing = 1  # ranks that have the same tokens

    def note(self, table, indices) -> None:
        """Indices have gone into an embedding's table."""
        self._seen[_module_of() or tuple(table.shape)] += indices.numel()

    def take(self) -> int:
        """Those since the last call."""
        most = max(self._seen.values(), default=0)
        self._seen.clear()
        return most

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """See which meshes the program makes."""
        begin = DeviceMesh.__init__

        def seen(mesh, *args, **kwargs):
            begin(mesh, *args, **kwargs)
            names = mesh.mesh_dim_names or ()
            sizes = zip(names, mesh.shape, strict=False)
            shared = math.prod(n for name, n in sizes if str(name).lower() in _SPLIT)
            self.sharing = max(self.sharing, shared)

        with mock.patch.object(DeviceMesh, "__init__", seen):
            yield
