"""On which GPU a step of backward works.

Backward on the CPU runs in the calling thread, so that the dispatch mode sees it too.
What C++ makes inside a backward node, it makes on the CPU; the graph tells which GPU
is meant.
"""

from collections import deque

from torch.autograd.function import BackwardCFunction

from simgpu._compat import current_autograd_node
from simgpu._device.gpu import Gpu
from simgpu._dispatch.placement import gpu_of


def gpu_of_node(node) -> tuple[bool, Gpu | None]:
    """Whether it can be known where a backward node works, and where.

    A node's gradients live where its inputs do, and the way back along the graph
    ends at tensors whose GPU is known. A CPU scalar may join any operation, so it
    decides only where nothing else does.
    """
    if node is None or isinstance(node, BackwardCFunction):
        return False, None  # Python code: `_api/autograd.py` looks after its gradients
    scalar, seen, queue = False, {node}, deque([node])
    while queue:
        for following, index in queue.popleft().next_functions:
            places = getattr(following, "_simgpu_outputs", None)
            leaf = getattr(following, "variable", None)
            if places is not None:
                return True, places[index]
            if leaf is None:
                if following is not None and following not in seen:
                    seen.add(following)
                    queue.append(following)
            elif leaf.dim() or gpu_of(leaf):
                return True, gpu_of(leaf)
            else:
                scalar = True
    return scalar, None


def gpu_of_backward(chosen_in=None) -> Gpu | None:
    """The GPU on which the backward node that runs in this thread works.

    Args:
        chosen_in: the node whose own code has chosen the current GPU; there the choice
            counts.
    """
    node = current_autograd_node()
    if node is None or node is chosen_in:
        return None
    if isinstance(node, BackwardCFunction):
        return next(filter(None, getattr(node, "_simgpu_outputs", ())), None)
    return gpu_of_node(node)[1]
