"""How many tokens a step has, as far as a program shows it.

Counted are the indices that go into embeddings: of the table that gets most of them in
a step, which is that of the tokens. They are this rank's. Ranks of a mesh that split a
model ("tp", "cp", "pp", "sp") share them; all others have their own.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from unittest import mock

from torch.distributed.device_mesh import DeviceMesh

_SPLIT = {"tp", "cp", "pp", "sp", "tensor", "context", "pipeline", "sequence"}


class Counted:
    """Counts the tokens of one rank."""

    def __init__(self):
        self._seen: Counter[tuple] = Counter()
        self.sharing = 1  # ranks that have the same tokens

    def note(self, table, indices) -> None:
        """Indices have gone into an embedding's table."""
        self._seen[tuple(table.shape)] += indices.numel()

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
