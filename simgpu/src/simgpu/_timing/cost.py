"""What work costs: seconds of a copy and of a call on the host.

Kernels are in `kernel_cost.py`, collectives in `collective_cost.py`.

Models: a copy takes its bytes over the slowest link on its way. Leaves out: what the
first use of CUDA, of each kernel and of each segment costs, and what the host computes
itself (the CPU's own operations cost nothing here), but in a dry run.

The constants are assumed, not measured, unless a source is given. A card that was
measured (`simgpu measure`) brings some of its own, as `Card.host`.
"""

from typing import NamedTuple

from simgpu._device.cards import Card, Host


class Launches(NamedTuple):
    """What a program's launches take of its host, in seconds.

    Attributes:
        launch: of a kernel or a copy: Python, autograd, the driver.
        call: of a collective, launch included.
    """

    launch: float
    call: float


# What the host spends on a launch (Python, autograd, the driver), and how long after it
# the kernel starts on an idle GPU. Their sum is fitted: a small operation between two
# events takes 24 to 33 microseconds on T4, V100, A100 and H100, with the hosts of 2023
# (tests/recordings, host_floor). How it divides is assumed
LAUNCH = 10e-6  # seconds
START = 15e-6  # seconds
EVENT = 1e-6  # seconds of the host to record, query or wait for an event
OPEN_HANDLE = 100e-6  # seconds of the host to map memory of another process
COPY_LATENCY = 10e-6  # seconds before the first byte of a copy moves
OF_PEAK_BYTES = 0.8  # of a link's bandwidth: pinned and peer copies
# "bare" has what a small operation alone takes. Trainers take longer, for their own
# Python, modules, hooks and autograd functions: "fast" is fitted to half of the runs
# of Megatron-LM on A100 (tests/recordings, vtrain_node), "slow" to those of a model of
# 1B in nanotron on H100 (ultrascale). They differ in collectives alone: a job without
# any takes as long with both
HOSTS = {
    "bare": Launches(LAUNCH, LAUNCH),
    "fast": Launches(36e-6, 79e-6),
    "slow": Launches(36e-6, 256e-6),
}
_A_CALL = HOSTS["fast"].call / HOSTS["fast"].launch  # in launches, of a host between
CHANNELS = 16  # multiprocessors that a collective takes (NCCL starts 8 to 32 blocks)
HOST_COPY = 10e9  # bytes a second that the host copies in its own memory
# Bytes a second that operations of a rank's host move, such as those of an optimizer
# whose state is offloaded; by one thread, which torchrun gives a rank. On a machine of
# 8 H100, PyTorch's loop over 537e6 parameters took a rank 1.93 s (ISEEKYAN/Megatron-LM,
# issue 188), if it moves the 84 bytes for each that AdamW does in float32. With more
# threads and older hosts it is 17e9 to 40e9: 11.6e9 parameters in 56 s, or in 8.2 s by
# DeepSpeed's one kernel, which moves 28 bytes (DeepSpeed's pull request 735)
HOST_COMPUTE = 23e9
# Pinning: chosen so that x.pin_memory().to(gpu) takes twice as long as x.to(gpu), the
# worst that PyTorch's tutorial "A guide on good usage of non_blocking and pin_memory"
# measured
PIN_LATENCY = 20e-6  # seconds
PIN = 16e9  # bytes a second that the host pins

ASSUMED = Host(LAUNCH, START, COPY_LATENCY, HOST_COPY)


def host_of(card: Card | None) -> Host:
    """What the machine around a card takes."""
    return (card and card.host) or ASSUMED


def launches(host: str) -> Launches:
    """What launches take of a host.

    Args:
        host: a key of `HOSTS`, or microseconds of a launch as text: "20". A collective
            then takes as many launches as with "fast".

    Raises:
        ValueError: for anything else.
    """
    if host in HOSTS:
        return HOSTS[host]
    try:
        launch = float(host.removesuffix("us").removesuffix("µs")) * 1e-6
    except ValueError:
        launch = 0.0
    if not 0 < launch < 1:
        raise ValueError(
            f"host={host!r}; use one of {', '.join(HOSTS)}, or microseconds of a "
            'launch: "20"'
        )
    return Launches(launch, launch * _A_CALL)


def launch_times(host: str, card: Card | None) -> tuple[float, float, float]:
    """Seconds of a launch, of a collective's call, and until a kernel starts.

    Args:
        host: as `launches` takes it; "bare" is the machine around the card.
        card: None where there is none.
    """
    machine = host_of(card)
    if host == "bare":
        return machine.launch, machine.launch, machine.start
    return *launches(host), machine.start


def copy_seconds(source, target, nbytes: int, pinned: bool) -> float:
    """Seconds of a copy between two GPUs, or a GPU and the host (None)."""
    latency = host_of((source or target).card).copy
    return latency + nbytes / copy_bandwidth(source, target, pinned)


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
    if pinned or len(ends) == 2:
        return link
    return min(link, host_of(ends[0].card).copy_bandwidth)


def host_seconds(nbytes: int) -> float:
    """Seconds in which the host reads and writes so much with operations of its own."""
    return nbytes / HOST_COMPUTE


def pin_seconds(nbytes: int) -> float:
    """Seconds in which the host pins new memory and copies `nbytes` into it."""
    return PIN_LATENCY + nbytes / PIN + nbytes / HOST_COPY
