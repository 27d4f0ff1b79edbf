"""Random numbers of each GPU.

As on CUDA, what is drawn depends on the generator's seed and offset alone, and each
draw moves the offset on as far as there (`philox_offsets.py`). The numbers have the
right distribution, but are not those that a real card draws.
"""

import contextlib
from collections.abc import Iterator

import torch

from simgpu._compat import Generator
from simgpu._dispatch.philox_offsets import increment

_MASK = 2**64 - 1


def draw(call, generator):
    """Compute `call` with the numbers of a GPU's generator."""
    with call.runtime.random_lock:
        own = call.generator is not None
        with numbers(generator, generator.offset, own):
            out = call.func(*call.args, **call.kwargs)
        drawn = out[0] if isinstance(out, (tuple, list)) else out
        generator.offset += increment(call, drawn, generator.gpu.card)
    return out


@contextlib.contextmanager
def numbers(generator, offset: int, own: bool) -> Iterator[None]:
    """Who draws here gets the numbers of a GPU's generator at an offset.

    Args:
        generator: of the GPU.
        offset: at which it draws.
        own: whether it is given this generator, and does not take the host's.
    """
    seed = _mixed(generator.key, offset)
    if own:
        Generator.manual_seed(generator, seed)
        yield
        return
    host = torch.default_generator
    before = host.get_state()
    host.manual_seed(seed)
    try:
        yield
    finally:
        host.set_state(before)


def _mixed(seed: int, offset: int) -> int:
    """A seed for the draw at an offset; at the first, the generator's own.

    The steps are those of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    if not offset:
        return seed
    mixed = (seed + (offset + 1) * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def check_generator(runtime, generator, gpu) -> None:
    """Refuse a generator of the wrong kind of device, in PyTorch's words."""
    if generator is None:
        return
    its = runtime.gpu_generators.get(generator._cdata, generator).device.type
    wanted = "cuda" if gpu else "cpu"
    if its != wanted:
        raise RuntimeError(
            f"Expected a '{wanted}' device type for generator but found '{its}'"
        )
