"""The variables by which torchrun tells a rank where it is among the others."""

import os
from dataclasses import dataclass

from simgpu._loopback import HOST, LOOPBACK


@dataclass(frozen=True)
class Place:
    """Where a rank is among the others, as torchrun counts.

    Attributes:
        rank: of the job.
        size: how many ranks the job has.
        nodes: on which they lie, as many on each.
    """

    rank: int
    size: int
    nodes: int = 1

    @property
    def here(self) -> int:
        """How many ranks a node has."""
        return self.size // self.nodes

    def environ(self, port: int | None = None) -> dict[str, str]:
        """The variables that torchrun gives a rank.

        Args:
            port: of the store where the ranks meet; None if they meet otherwise.
        """
        node, local_rank = divmod(self.rank, self.here)
        found: dict[str, object] = {
            "RANK": self.rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": self.size,
            "LOCAL_WORLD_SIZE": self.here, "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": self.nodes,
        }  # fmt: skip
        if port is not None:
            found |= {
                "MASTER_ADDR": HOST, "MASTER_PORT": port,
                "TORCHELASTIC_USE_AGENT_STORE": True,
            }  # fmt: skip
        return {name: str(value) for name, value in found.items()}


def lay_out(nodes: int) -> None:
    """Let the environment say that the ranks of this machine are on several nodes.

    Raises:
        ValueError: if the ranks cannot be shared equally, if there are none, or if they
            are on several machines already.
    """
    environ = os.environ
    if "LOCAL_WORLD_SIZE" not in environ:
        raise ValueError("--nodes is for ranks; start them with torchrun")
    size = int(environ["WORLD_SIZE"])
    if size != int(environ["LOCAL_WORLD_SIZE"]):
        raise ValueError("--nodes: these ranks are on several machines already")
    if nodes < 1 or size % nodes:
        raise ValueError(f"{size} ranks cannot be shared equally by {nodes} nodes")
    environ.update(Place(int(environ["RANK"]), size, nodes).environ())
    if LOOPBACK:  # it is one machine all the same
        environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
