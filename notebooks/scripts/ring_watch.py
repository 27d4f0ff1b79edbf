"""What lesson 21 measures in its ranks: times of attention, bytes sent and kept.

The functions run in a rank, and use what the cells of the lesson have defined there.
"""

import torch
from torch.distributed.tensor.experimental import context_parallel

import __main__ as cells
import simgpu
from simgpu import Messages

LENGTH = 3072


def draw_tokens() -> None:
    """Queries, keys and values of this rank: a quarter of one sequence, four heads."""
    shape = 3, 1, 4, LENGTH // cells.world_size, 64
    cells.q, cells.k, cells.v = torch.randn(shape, device="cuda")


@torch.no_grad()
def measure() -> dict[str, float]:
    """Simulated µs of the parts of attention, by the letters of the lesson."""
    draw_tokens()
    q, k, v = cells.q, cells.k, cells.v
    half = slice(k.shape[2] // 2)
    big, small = cells.Running(q), cells.Running(q[:, :, half])
    few = k[:, :, half], v[:, :, half]
    keys, values = cells.Gather.apply(k), cells.Gather.apply(v)
    later = torch.arange(LENGTH, device="cuda") > cells.places_of(LENGTH)[:, None]
    pieces = {
        "g": (cells.Gather.apply, k),
        "A": (cells.masked_attention, q, keys, values, later),
        "d": (big.add, k, v, True),
        "c": (big.add, k, v),
        "d'": (small.add, *few, True),
        "c'": (small.add, *few),
    }
    return {name: _microseconds(*piece) for name, piece in pieces.items()}


def _microseconds(function, *given) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the first warms up
        begin.record()
        function(*given)
        end.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end)


@torch.no_grad()
def attend(way: str, cut: list[list[int]]) -> None:
    """Attention by the function of this name, alone on the timeline."""
    cells.cut = cut
    cells.places = cells.places_of(LENGTH)
    torch.cuda.synchronize()
    simgpu.timeline().clear()
    getattr(cells, way)(cells.q, cells.k, cells.v)


def count(attention) -> tuple[int, int, int]:
    """Bytes that the blocks send on a ring, bytes that they keep, and their sends.

    Args:
        attention: for the blocks of the GPT; None is `context_parallel`.
    """
    blocks = cells.make_gpt().blocks
    x = torch.randn(8, 16, 128, device="cuda", requires_grad=True)
    if attention is None:
        numbers = [torch.arange(64, device="cuda")]
        way = context_parallel(cells.mesh, buffers=numbers, buffer_seq_dims=[0])
    else:
        way = cells.patch.object(
            cells.functional, "scaled_dot_product_attention", attention
        )
    with way, Messages() as messages:
        before = torch.cuda.memory_allocated()
        for block in blocks:
            x = block(x)
        kept = torch.cuda.memory_allocated() - before
        x.sum().backward()
    # a hop of context_parallel is an all-to-all in which all goes to one rank
    hops = sum(m.nbytes - m.sent for m in messages.log if m.name == "all_to_all")
    sends, _ = messages.by_name().get("send", (0, 0))
    return messages.sent() + hops, kept, sends
