"""What a kernel costs: seconds from its bytes, its FLOPs and the shape of its product.

Models: kernels limited by memory (a "pass"), by arithmetic, and by both at once; matrix
products that compute whole tiles, whose last wave leaves multiprocessors idle; and
kernels that move more bytes than their tensors have. Leaves out: the L2 cache (small
tensors come from it at up to twice the speed), the clock that falls under long load,
and which of cuBLAS's or cuDNN's kernels is chosen (such as Winograd's convolutions).

Every kernel takes a time of its own, and beside it

    hypot(FLOPs / the card's rate, bytes / the card's bandwidth)

Constants are fitted to the recordings in `tests/recordings` unless another source is
given; `tests/recorded` and its tests hold how near that comes.
"""

import math
from typing import NamedTuple

from simgpu._device.cards import Card

FLOOR = 1.5e-6  # seconds of a kernel besides its work
PRODUCT_FLOOR = 5e-6  # the same of a matrix product, a convolution, fused attention
OF_BANDWIDTH = 0.86  # of the memory's bandwidth that a pass reaches
PRODUCT_OF_BANDWIDTH = 0.92  # the same of a product
# Rows and columns of a product that one block of threads computes. A product that has
# fewer is computed by smaller blocks, of a power of two: assumed
TILE = 64
LAST_WAVE = 0.65  # of the multiprocessors that a product uses at least, on average
# Convolutions: the blocks that cuDNN's implicit products compute
CONVOLUTION_TILE = (128, 32)  # places in the output, channels
FEWEST = 0.2  # of the multiprocessors that a convolution uses at least
# Of the peak that convolutions reach: without tensor cores, in TF32, in half precision
CONVOLUTION = 0.7
TF32_CONVOLUTION = 0.27
HALF_CONVOLUTION = 0.42
FILLS = 16384  # elements of output for which a kernel takes up a multiprocessor

# How many times the bytes of its tensors a kernel moves, where that is not once
TRAFFIC = {
    "native_layer_norm": 1.33,  # long rows are read twice
    "native_layer_norm_backward": 1.67,  # two kernels read both inputs: assumed
    "_fused_rms_norm": 1.33,  # the same kernels
    "_fused_rms_norm_backward": 1.67,
    "_softmax": 1.2,
    "_log_softmax": 1.2,
    "_softmax_backward_data": 1.2,  # as forward
    "_log_softmax_backward_data": 1.2,
    "native_batch_norm": 1.55,  # its input is read twice
    "cudnn_batch_norm": 1.55,
    "native_batch_norm_backward": 1.85,  # both inputs are read twice
    "cudnn_batch_norm_backward": 1.85,
}


class Product(NamedTuple):
    """The matrix products of a kernel: `batch` of (rows, inner) by (inner, columns)."""

    batch: int
    rows: int
    columns: int
    inner: int
    convolution: bool = False


class Work(NamedTuple):
    """What a kernel does."""

    nbytes: int  # of the tensors that it reads and writes
    flops: int = 0
    elements: int = 1  # of the largest output
    dtype: str = ""  # in which it computes: "float32", "tf32", ...
    product: Product | None = None
    traffic: float = 1.0  # how many times its bytes move
    attention: bool = False  # fused


def kernel_seconds(card: Card, work: Work) -> float:
    """Seconds of a kernel on a card."""
    if not work.flops:
        moved = work.nbytes * work.traffic
        return FLOOR + moved / (card.memory_bandwidth * OF_BANDWIDTH)
    bandwidth = card.memory_bandwidth * PRODUCT_OF_BANDWIDTH
    busy = work.flops / _rate(card, work)
    if work.product is not None:
        busy *= _of_whole_tiles(card, work.product)
    return PRODUCT_FLOOR + math.hypot(busy, work.nbytes / bandwidth)


def product_seconds(card: Card, product: Product, dtype: str, nbytes: int) -> float:
    """Seconds of matrix products.

    Args:
        card: on which they run.
        product: their shape.
        dtype: in which they compute: "float32", "tf32", "bfloat16", ...
        nbytes: of both factors and the result.
    """
    flops = 2 * math.prod(product[:4])
    return kernel_seconds(card, Work(nbytes, flops, dtype=dtype, product=product))


def _rate(card, work: Work) -> float:
    """FLOPs a second that kernels of this kind reach."""
    dtype = work.dtype if work.dtype in card.flops else "float32"
    peak = card.flops[dtype]
    if work.product is not None and work.product.convolution:
        if peak < 2 * card.flops["float32"]:  # the card has no tensor cores for it
            return peak * CONVOLUTION
        return peak * (TF32_CONVOLUTION if dtype == "tf32" else HALF_CONVOLUTION)
    share = card.reached[dtype]
    return peak * share * (card.reached["attention"] if work.attention else 1.0)


def _of_whole_tiles(card, product: Product) -> float:
    """How much longer a product takes since it computes whole tiles, in waves."""
    batch, rows, columns, _, convolution = product
    if not batch * rows * columns:
        return 1.0
    high, wide = CONVOLUTION_TILE
    if not convolution:
        high, wide = (min(TILE, _power_of_two(side)) for side in (rows, columns))
    tiles = batch * -(-rows // high) * -(-columns // wide)
    padded = tiles * high * wide / (batch * rows * columns)
    waves = tiles / card.multi_processors
    if waves >= 1:
        return padded / max(waves / math.ceil(waves), LAST_WAVE)
    # of a small product, several multiprocessors share the inner dimension of a tile
    return padded / max(waves, FEWEST) if convolution else padded


def _power_of_two(number: int) -> int:
    """The first that is not smaller."""
    return 1 << (number - 1).bit_length()


def kernel_share(card, elements: int) -> float:
    """The share of the multiprocessors that a kernel with so many outputs fills."""
    if elements <= FILLS:
        return 1 / card.multi_processors
    return min(1.0, elements / FILLS / card.multi_processors)
