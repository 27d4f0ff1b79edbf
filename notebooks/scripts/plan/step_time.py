"""Seconds of one step of training: by arithmetic and the assumptions named below.

`flops` counts operations. `step_seconds` adds up the kernels of a step (`kernels.py`),
the update, and the communication that computing does not hide.
"""

from dataclasses import dataclass

from scripts.plan.communication import collectives, members
from scripts.plan.kernels import FLASH, SUSTAINED, kernel_seconds
from scripts.plan.model import Model, find_model, parameters
from scripts.plan.run import MACHINE, Run, make_run
from simgpu.device.cards import Card, find_card
from simgpu.timing.collective_cost import collective_seconds
from simgpu.timing.kernel_cost import OF_BANDWIDTH
from simgpu.timing.topology import Topology

# Gbit/s of network for each GPU: what NVIDIA's DGX of that card has (datasheets)
NETWORK = {"A100": 200, "H100": 400, "H200": 400}
PCIE_EFFICIENCY = 0.8  # of the bandwidth that copies to the host reach: assumed
HOST_BANDWIDTH = 614e9  # bytes/s of a machine, 2 x 8 channels DDR5-4800: assumed
UPDATE_BYTES = 28  # bytes that AdamW reads and writes for each parameter, in float32


def flops(model: "str | Model", tokens: int, checkpointing: float = 0.0) -> int:
    """Floating-point operations of one step for one sequence.

    6 for each token and each number of a matrix (2 forward, 4 backward), and 12 x dim
    x tokens in each block for attention, which counts the half that the mask removes as
    well (as PaLM and torchtitan do). Checkpointing adds the forward of its blocks, but
    for the last matrix: PyTorch stops when it has all that backward needs.
    The embedding is looked up, not multiplied; norms are left out.

    Args:
        model: a name in `MODELS`, or a `Model`.
        tokens: of the sequence.
        checkpointing: share of the blocks that are computed twice; 0 for what the
            share of the peak (MFU) is counted with.

    Source: Chowdhery and others, PaLM, 2022, appendix B.
    """
    model = find_model(model)
    block = 2 * (model.block - 2 * model.dim) + 4 * model.dim * tokens
    forward = model.layers * block + 2 * model.vocab * model.dim
    again = model.layers * (block - 2 * model.hidden * model.dim)
    return round(tokens * (3 * forward + checkpointing * again))


@dataclass(frozen=True)
class Step:
    """Seconds of one step, and what they are worth."""

    compute: float  # forward and backward
    update: float  # of the optimizer
    communication: float  # if nothing else went on
    exposed: float  # the part of it that computing does not hide
    tokens_per_second: float  # of each GPU
    mfu: float  # share of the card's peak, by the operations that the model needs

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.compute + self.update + self.exposed


def step_seconds(
    model: "str | Model",
    gpus: int,
    card: str = "H100",
    strategy: str = "fsdp",
    batch: int = 1,
    tokens: int = 4096,
    checkpointing: float = True,
    network: float | None = None,
    microbatches: int = 1,
    flash: int = 2,
) -> Step:
    """How long a step takes: by arithmetic and the assumptions above.

    Computing: see `kernels.py`. Communication: the simulator's model of NCCL, hidden
    behind computing as far as there is enough of it, in forward and in backward
    separately. The update: its bytes over the bandwidth of the memory that holds them.

    Args:
        model, gpus, strategy, batch, tokens, checkpointing: as in `bytes_per_gpu`.
        card: "A100", "H100" or "H200".
        network: Gbit/s for each GPU to other machines; None for `NETWORK`.
        microbatches: of `batch` sequences each, before the optimizer's step.
        flash: version of the kernels of attention: 2, or 1 for those of 2023.

    Raises:
        ValueError: for what is unknown or does not divide.
    """
    run = make_run(model, gpus, strategy, batch, tokens, checkpointing, microbatches)
    name = str(card).upper()
    if name not in SUSTAINED:
        raise ValueError(f"unknown card {name!r}; choose one of {', '.join(SUSTAINED)}")
    if network is not None and network <= 0:
        raise ValueError("the network needs more than 0 Gbit/s")
    if flash not in FLASH:
        raise ValueError(f"FlashAttention {flash!r} is not known; choose 1 or 2")
    card = find_card(name)
    kernels = kernel_seconds(run, card, flash)
    whole = run.microbatches / SUSTAINED[name]
    compute = {phase: whole * seconds for phase, seconds in kernels.items()}
    sent = _sending(run, card, NETWORK[name] if network is None else network)
    exposed = sent["waiting"] + sum(max(0, sent[i] - compute[i]) for i in compute)
    update = _update_seconds(run, card)
    seconds = sum(compute.values()) + update + exposed
    sequences = run.batch * run.microbatches
    needed = sequences * flops(run.model, run.tokens) / run.tensor
    return Step(
        compute=sum(compute.values()),
        update=update,
        communication=sum(sent.values()),
        exposed=exposed,
        tokens_per_second=sequences * run.tokens / run.tensor / seconds,
        mfu=needed / seconds / card.flops["bfloat16"],
    )


def _sending(run: Run, card: Card, gbits: float) -> dict[str, float]:
    """Seconds of communication in each part of the step."""
    each = min(run.gpus, MACHINE)
    network = each * gbits * 1e9 / 8  # of a machine
    topology = Topology(card, each, run.gpus // each, network)
    sent = {"forward": 0.0, "backward": _offload_seconds(run, card), "waiting": 0.0}
    for one in collectives(run):
        ranks = members(run, one.members)
        if len(ranks) > 1:
            nbytes = round(one.nbytes)
            once = collective_seconds(one.name, nbytes, ranks, topology)
            sent[one.phase] += one.times * once
    return sent


def _offload_seconds(run: Run, card: Card) -> float:
    """Weights twice to the GPU, gradients back once: over PCIe, in float32."""
    if run.strategy != "fsdp offload":
        return 0.0
    moved = run.microbatches * 3 * 4 * parameters(run.model) / run.gpus
    return moved / card.pcie_bandwidth / PCIE_EFFICIENCY


def _update_seconds(run: Run, card: Card) -> float:
    """AdamW on a GPU's share: limited by memory."""
    parts = run.shards if run.strategy != "ddp" else 1
    nbytes = UPDATE_BYTES * parameters(run.model) / parts
    bandwidth = card.memory_bandwidth
    if run.strategy == "fsdp offload":
        bandwidth = HOST_BANDWIDTH / min(run.gpus, MACHINE)
    return nbytes / bandwidth / OF_BANDWIDTH
