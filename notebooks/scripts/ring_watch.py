"""What lesson 21 draws from its ranks: attention alone on the timeline.

The functions run in a rank, and use what the cells of the lesson have defined there.
"""

import torch

import __main__ as cells
import simgpu

LENGTH = 3072


def draw_tokens() -> None:
    """Queries, keys and values of this rank: a quarter of one sequence, four heads."""
    shape = 3, 1, 4, LENGTH // cells.world_size, 64
    cells.q, cells.k, cells.v = torch.randn(shape, device="cuda")


@torch.no_grad()
def attend(way: str, cut: list[list[int]]) -> None:
    """Attention by the function of this name, alone on the timeline."""
    cells.cut = cut
    cells.places = cells.places_of(LENGTH)
    torch.cuda.synchronize()
    simgpu.timeline().clear()
    getattr(cells, way)(cells.q, cells.k, cells.v)
