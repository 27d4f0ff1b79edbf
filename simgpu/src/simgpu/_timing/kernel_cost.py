"""What a kernel costs: seconds from its bytes, its FLOPs and the shape of its product.

Models: kernels limited by memory (a "pass"), by arithmetic, and by both at once; matrix
products in blocks of whole tiles, which share the inner dimension where there are fewer
blocks than multiprocessors; an L2 cache that holds what a product works on; fused
attention, which skips what a causal mask hides; and kernels that move more bytes than
their tensors have. Leaves out: the L2 cache in passes (small tensors come from it at up
to twice the speed), the clock that falls under long load, and which of cuBLAS's or
cuDNN's kernels is chosen (such as Winograd's convolutions).

Every kernel takes a time of its own, and beside it

    hypot(FLOPs / the card's rate, bytes / the card's bandwidth)

Constants are fitted to the recordings in `tests/recordings` unless another source is
given; `tests/recorded` and its tests hold how near that comes.
"""

import functools
import math
from typing import NamedTuple

from simgpu._device.cards import Card

FLOOR = 1.5e-6  # seconds of a kernel besides its work
PRODUCT_FLOOR = 5e-6  # the same of a convolution and of fused attention
PRODUCT_CLOCKS = 4900  # the same of a matrix product, in clocks of the card
OF_BANDWIDTH = 0.86  # of the memory's bandwidth that a pass reaches
PRODUCT_OF_BANDWIDTH = 0.87  # the same of a product
# Matrix products. A block of threads computes one of these tiles, the one that takes
# least; where there are fewer rows or columns, one of the next power of two
SIDES = (64, 128)  # rows and columns of a tile
# Without tensor cores, where those leave multiprocessors idle, smaller ones too, which
# reach the root of their share of the arithmetic of 64 by 64: assumed, as no recorded
# product is so small
SMALL_SIDES = (16, 32, *SIDES)
# Up to so many rows or columns, any tile reaches all of the arithmetic: cuBLAS has
# kernels of their own for them, gemv and gemmSN; assumed as well
SKINNY = 8
LOADS = 200  # bytes of both factors that a multiprocessor takes in, a clock
# A block on tensor cores takes as long as if the inner dimension were so much longer;
# others overlap, since several are on a multiprocessor
FILL = 100
# Of the inner dimension for each block at least, where several share it: on tensor
# cores, and without them, where no recorded product decides it: assumed
SPLIT, PLAIN_SPLIT = 600, 128
# What was computed just before, and the result, lie in the L2 cache while they take up
# no more than this share of it, and move so many bytes a clock and multiprocessor. That
# is more than the memory's bandwidth on cards with GDDR memory only
OF_CACHE = 0.5
CACHE = 7
LAST_WAVE = 0.65  # of the multiprocessors that a convolution uses, on average
# Convolutions: the blocks that cuDNN's implicit products compute
CONVOLUTION_TILE = (128, 32)  # places in the output, channels
FEWEST = 0.2  # of the multiprocessors that a convolution uses at least
# Of the peak that convolutions reach: without tensor cores, in TF32, in half precision
CONVOLUTION = 0.7
TF32_CONVOLUTION = 0.27
HALF_CONVOLUTION = 0.42
# Fused attention: as if each query saw so many keys more, which is what it takes to
# start and end a block and to compute those on the diagonal whole; fitted to version 3
MORE_KEYS = 450
FLASH_FLOOR = 12.5e-6  # of FlashAttention 3, with the kernel that plans its blocks
EXPONENTIALS = 16  # a clock and multiprocessor: NVIDIA's CUDA C++ Programming Guide
FILLS = 16384  # elements of output for which a kernel takes up a multiprocessor

_BYTES = {"float64": 8, "float16": 2, "bfloat16": 2}  # of a number; 4 of others

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


class Attention(NamedTuple):
    """Fused attention: `heads` times `queries` by `keys`, heads of all samples."""

    heads: int
    queries: int
    keys: int
    width: int  # of a head
    causal: bool = False  # the last query sees all keys, each before it one less
    speed: float = 1.0  # times the rate of FlashAttention 2


class Work(NamedTuple):
    """What a kernel does."""

    nbytes: int  # of the tensors that it reads and writes
    flops: int = 0
    elements: int = 1  # of the largest output
    dtype: str = ""  # in which it computes: "float32", "tf32", ...
    product: Product | None = None
    traffic: float = 1.0  # how many times its bytes move
    attention: bool = False  # fused
    shape: Attention | None = None  # of fused attention, where it is known


def kernel_seconds(card: Card, work: Work) -> float:
    """Seconds of a kernel on a card."""
    if not work.flops:
        moved = work.nbytes * work.traffic
        return FLOOR + moved / (card.memory_bandwidth * OF_BANDWIDTH)
    product = work.product
    if product is not None and not product.convolution:
        return _product_seconds(card, work)
    busy = work.flops / _rate(card, work)
    if product is not None:
        busy *= _of_whole_tiles(card, product)
    elif work.shape is not None:
        busy *= _of_mask(work.shape)
    bandwidth = card.memory_bandwidth * PRODUCT_OF_BANDWIDTH
    return PRODUCT_FLOOR + math.hypot(busy, work.nbytes / bandwidth)


def attention_seconds(card: Card, shape: Attention, dtype: str, nbytes: int) -> float:
    """Seconds of the forward pass of FlashAttention 3, or of cuDNN's like it.

    `kernel_seconds` counts FlashAttention 2, which is PyTorch's own. The third is
    faster on Hopper: products and exponentials overlap, and what takes longer decides.

    Args:
        card: on which it runs.
        shape: of the queries and keys.
        dtype: in which it computes: "bfloat16", "float16".
        nbytes: of queries, keys, values and the result.
    """
    seen = shape.heads * shape.queries * shape.keys * _of_mask(shape)
    rate = card.flops[dtype] * card.reached["flash 3"]
    products = 4 * shape.width * seen / rate
    exponentials = seen / (EXPONENTIALS * card.multi_processors * card.clock * 1e3)
    moved = nbytes / (card.memory_bandwidth * PRODUCT_OF_BANDWIDTH)
    return FLASH_FLOOR + math.hypot(products, exponentials, moved)


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
    dtype = "float8" if work.dtype.startswith("float8") else work.dtype
    dtype = dtype if dtype in card.flops else "float32"
    peak = card.flops[dtype]
    if work.product is not None and work.product.convolution:
        if not _has_tensor_cores(card, dtype):
            return peak * CONVOLUTION
        return peak * (TF32_CONVOLUTION if dtype == "tf32" else HALF_CONVOLUTION)
    rate = peak * card.reached[dtype]
    if work.attention:
        rate *= card.reached["attention"]
    return rate if work.shape is None else rate * work.shape.speed


def _has_tensor_cores(card, dtype: str) -> bool:
    """Whether a card has them for a type of float32's size or less."""
    return card.flops.get(dtype, 0.0) >= 2 * card.flops["float32"]


def _product_seconds(card, work: Work) -> float:
    """Seconds of matrix products."""
    product, dtype = work.product, work.dtype
    clock = card.clock * 1e3
    flops = _rate(card, work) / (card.multi_processors * clock)
    size = _BYTES.get(dtype, 4)
    way = (FILL, SPLIT) if _has_tensor_cores(card, dtype) else (0, PLAIN_SPLIT)
    busy = _product_clocks(product, card.multi_processors, flops, size, *way) / clock
    batch, rows, columns, inner = product[:4]
    near = batch * rows * (inner + columns) * size  # all but the second factor
    near = min(near, work.nbytes, OF_CACHE * card.l2_cache)
    bandwidth = card.memory_bandwidth * PRODUCT_OF_BANDWIDTH
    cache = max(bandwidth, CACHE * card.multi_processors * clock)
    moved = (work.nbytes - near) / bandwidth + near / cache
    return PRODUCT_CLOCKS / clock + math.hypot(busy, moved)


@functools.lru_cache(maxsize=100_000)
def _product_clocks(
    product: Product, multi_processors: int, flops: float, size: int, fill: int,
    split: int,
) -> float:  # fmt: skip
    """Clocks of matrix products in the blocks that take least.

    Args:
        product: their shape.
        multi_processors: of the card.
        flops: that a multiprocessor computes in a clock.
        size: of a number, in bytes.
        fill: by how much longer the inner dimension seems.
        split: of the inner dimension for each block at least, where several share it.
    """
    batch, rows, columns, inner, _ = product
    if not batch * rows * columns:
        return 0.0
    least, small = math.inf, SIDES[0]
    few = not fill and batch * -(-rows // small) * -(-columns // small)
    sides = SMALL_SIDES if few and few < multi_processors else SIDES
    tall = min(small, _power_of_two(rows))
    broad = min(small, _power_of_two(columns))
    for high in {min(side, _power_of_two(rows)) for side in sides}:
        for wide in {min(side, _power_of_two(columns)) for side in sides}:
            reached = 1.0
            if sides is SMALL_SIDES and min(rows, columns) > SKINNY:
                reached = math.sqrt(min(1.0, high / tall) * min(1.0, wide / broad))
            computes = 2 * high * wide / (flops * reached)
            step = math.hypot(computes, (high + wide) * size / LOADS)
            blocks = batch * -(-rows // high) * -(-columns // wide)
            even = multi_processors / blocks  # one block on each multiprocessor
            for wanted in {int(even), math.ceil(even)}:
                shares = max(1, min(wanted, inner // split))
                waves = max(1.0, blocks * shares / multi_processors)
                clocks = waves * (inner / shares + fill) * step
                if shares > 1:  # their sums are added up by another kernel
                    clocks += PRODUCT_CLOCKS
                least = min(least, clocks)
    return least


def _of_mask(shape: Attention) -> float:
    """How many of all its FLOPs attention takes the time of."""
    if not shape.keys:
        return 1.0
    seen = shape.keys
    if shape.causal:  # each query sees one key more than the one before it
        seen -= min(shape.queries, shape.keys) / 2
    return (seen + MORE_KEYS) / shape.keys


def _of_whole_tiles(card, product: Product) -> float:
    """How much longer a convolution takes since it computes whole tiles, in waves."""
    batch, rows, columns, _, _ = product
    if not batch * rows * columns:
        return 1.0
    high, wide = CONVOLUTION_TILE
    tiles = batch * -(-rows // high) * -(-columns // wide)
    padded = tiles * high * wide / (batch * rows * columns)
    waves = tiles / card.multi_processors
    if waves >= 1:
        return padded / max(waves / math.ceil(waves), LAST_WAVE)
    # of a small product, several multiprocessors share the inner dimension of a tile
    return padded / max(waves, FEWEST)


def _power_of_two(number: int) -> int:
    """The first that is not smaller."""
    return 1 << (number - 1).bit_length()


def kernel_share(card, elements: int) -> float:
    """The share of the multiprocessors that a kernel with so many outputs fills."""
    if elements <= FILLS:
        return 1 / card.multi_processors
    return min(1.0, elements / FILLS / card.multi_processors)
