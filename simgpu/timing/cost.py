"""What work costs: seconds of a kernel, a copy, a call on the host.

Collectives are in `collective_cost.py`.

Models: a kernel takes the larger of its FLOPs over the card's rate and its bytes over
the card's bandwidth; a copy its bytes over the slowest link on its way. Leaves out:
that a kernel with few outputs does not reach the rate of the whole card (it only leaves
room for others), caches, what the first use of CUDA, of each kernel and of each segment
costs, and what the host computes itself (the CPU's own operations cost nothing here).

The constants are assumed, not measured, unless a source is given.
"""

LAUNCH = 5e-6  # seconds of the host for each launch
EVENT = 1e-6  # seconds of the host to record, query or wait for an event
OPEN_HANDLE = 100e-6  # seconds of the host to map memory of another process
KERNEL = 2e-6  # seconds that the smallest kernel takes
COPY_LATENCY = 10e-6  # seconds before the first byte of a copy moves
OF_PEAK_FLOPS = 0.7  # a good matrix product reaches this share of the peak
OF_PEAK_BYTES = 0.8  # of a bandwidth: element-wise kernels, pinned and peer copies
FILLS = 16384  # elements of output for which a kernel takes up a multiprocessor
CHANNELS = 16  # multiprocessors that a collective takes (NCCL starts 8 to 32 blocks)
HOST_COPY = 10e9  # bytes a second that the host copies in its own memory
# Pinning: chosen so that x.pin_memory().to(gpu) takes twice as long as x.to(gpu), the
# worst that PyTorch's tutorial "A guide on good usage of non_blocking and pin_memory"
# measured
PIN_LATENCY = 20e-6  # seconds
PIN = 16e9  # bytes a second that the host pins


def kernel_seconds(card, flops: int, nbytes: int, dtype: str = "float32") -> float:
    """Seconds of a kernel: the larger of its arithmetic and its traffic.

    Args:
        card: on which it runs.
        flops: floating-point operations.
        nbytes: read and written.
        dtype: in which it computes: "float32", "tf32", "bfloat16", ...
    """
    seconds = nbytes / (card.memory_bandwidth * OF_PEAK_BYTES)
    if flops:
        rate = card.flops.get(dtype, card.flops["float32"]) * OF_PEAK_FLOPS
        seconds = max(seconds, flops / rate)
    return seconds if seconds > KERNEL else KERNEL


def kernel_share(card, elements: int) -> float:
    """The share of the multiprocessors that a kernel with so many outputs fills."""
    if elements <= FILLS:
        return 1 / card.multi_processors
    return min(1.0, elements / FILLS / card.multi_processors)


def copy_seconds(source, target, nbytes: int, pinned: bool) -> float:
    """Seconds of a copy between two GPUs, or a GPU and the host (None)."""
    return COPY_LATENCY + nbytes / copy_bandwidth(source, target, pinned)


def copy_bandwidth(source, target, pinned: bool) -> float:
    """Bytes a second of a copy between two GPUs, or a GPU and the host (None).

    Args:
        source: a GPU, or None.
        target: the same; one of them is a GPU. Two use NVLink if both have it.
        pinned: whether the host's end is pinned memory; of no account between GPUs.
    """
    ends = [gpu for gpu in (source, target) if gpu is not None]
    if len(ends) == 2 and all(gpu.card.nvlink_bandwidth for gpu in ends):
        return min(gpu.card.nvlink_bandwidth for gpu in ends) * OF_PEAK_BYTES
    link = min(gpu.card.pcie_bandwidth for gpu in ends) * OF_PEAK_BYTES
    return link if pinned or len(ends) == 2 else min(link, HOST_COPY)


def pin_seconds(nbytes: int) -> float:
    """Seconds in which the host pins new memory and copies `nbytes` into it."""
    return PIN_LATENCY + nbytes / PIN + nbytes / HOST_COPY
