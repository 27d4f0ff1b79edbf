"""Bytes that each GPU sends in one step of training: by arithmetic.

Collectives are rings. `traffic` adds up what `traffic_by_phase` has for each part of
the step, which `step_time.py` needs to know what computing hides.
"""

from scripts.plan.model import Model
from scripts.plan.run import MACHINE, Run, make_run


def traffic(
    model: "str | Model",
    gpus: int,
    strategy: str = "fsdp",
    batch: int = 1,
    tokens: int = 4096,
    checkpointing: float = True,
) -> dict[str, int]:
    """Bytes that each GPU sends in one step, inside its machine and to others.

    Collectives are rings: to gather or to scatter S bytes over n GPUs, each sends
    S (n - 1) / n, and an all-reduce is both. A ring through machines of 8 leaves each
    once; there are 8 rings, one for each GPU's network card. So an eighth of what a GPU
    sends goes to other machines.

    FSDP gathers bfloat16 weights in forward, once more those of the blocks in backward,
    and scatters float32 gradients: 8 bytes a parameter. DDP's all-reduce of float32
    gradients, and ZeRO's scatter of gradients and gather of float32 weights, are 8 as
    well. "tensor 8" gathers and scatters each token twice in each block, forward and
    backward, inside the machine.

    Returns:
        "inside" and "between": bytes for each GPU and step.
    """
    run = make_run(model, gpus, strategy, batch, tokens, checkpointing)
    phases = traffic_by_phase(run).values()
    return {where: round(sum(p[where] for p in phases)) for where in _PLACES}


_PLACES = ("inside", "between")


def traffic_by_phase(run: Run) -> dict[str, dict[str, float]]:
    """Bytes that each GPU sends in forward and in backward, and while it waits.

    What is sent in "forward" and "backward" goes on while the GPU computes.
    """
    blocks, root = run.model.layers * run.block, run.root
    if run.strategy.startswith("fsdp"):
        amounts = {
            "forward": 2 * blocks,
            "backward": (2 + 4) * blocks,
            "waiting": (2 + 4) * root,  # before the first block and after the last
        }
    else:
        # the embedding is a bucket that nothing is left to hide
        late = {"ddp": 8 * root, "zero1": 4 * root, "zero2": 4 * root}[run.strategy]
        after = 0 if run.strategy == "ddp" else 4 * (blocks + root)
        rest = {"ddp": 8, "zero1": 4, "zero2": 4}[run.strategy] * blocks
        amounts = {"forward": 0, "backward": rest, "waiting": late + after}
    phases = {name: _ring(run, nbytes) for name, nbytes in amounts.items()}
    phases["waiting"]["inside"] += _tensor_traffic(run)
    return phases


def _ring(run: Run, nbytes: float) -> dict[str, float]:
    """What each GPU sends when that much is gathered or scattered over replicas."""
    sent = nbytes * (run.replicas - 1) / run.replicas
    if run.tensor > 1:  # the members of a ring are in different machines
        between = sent
    else:
        between = sent / MACHINE if run.gpus > MACHINE else 0.0
    return {"inside": sent - between, "between": between}


def _tensor_traffic(run: Run) -> float:
    """What each GPU sends for products that are split over its machine."""
    passes = 2 + run.checkpointing  # forward, backward, forward again
    token = 4 * 2 * run.model.dim * (run.tensor - 1) / run.tensor
    return passes * run.rows * run.model.layers * token
