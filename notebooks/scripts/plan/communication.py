"""What GPUs send each other in one step of training: by arithmetic.

`collectives` lists what a strategy calls, and in which part of the step. `traffic` adds
up the bytes, as rings send them; `step_time.py` asks the simulator for the seconds.
"""

from typing import NamedTuple

from scripts.plan.model import Model
from scripts.plan.run import MACHINE, Run, make_run


class Collective(NamedTuple):
    """Collectives of one kind in a step."""

    phase: str  # "forward", "backward": while the GPU computes; "waiting": it does not
    name: str  # as `simgpu.timing.collective_cost` names them
    nbytes: float  # of each: what is gathered, scattered or reduced
    times: float  # in a step
    members: str  # "all" GPUs, those of a "machine", or one "across" each machine


def traffic(
    model: "str | Model",
    gpus: int,
    strategy: str = "fsdp",
    batch: int = 1,
    tokens: int = 4096,
    checkpointing: float = True,
    microbatches: int = 1,
) -> dict[str, int]:
    """Bytes that each GPU sends in one step, inside its machine and to others.

    Collectives are rings: to gather or to scatter S bytes over n GPUs, each sends
    S (n - 1) / n, and an all-reduce is both. A ring through machines of 8 leaves each
    once; there are 8 rings, one for each GPU's network card. So an eighth of what a GPU
    sends goes to other machines.

    FSDP gathers bfloat16 weights in forward, once more those of the blocks in backward,
    and scatters float32 gradients: 8 bytes a parameter, for each micro-batch. DDP's
    all-reduce of float32 gradients, and ZeRO's scatter of gradients and gather of
    float32 weights, are 8 as well. "hsdp" does this inside a machine, and reduces each
    shard of the gradients across machines. "tensor 8" gathers and scatters each token
    twice in each block, forward and backward, inside the machine.

    Returns:
        "inside" and "between": bytes for each GPU and step.
    """
    run = make_run(model, gpus, strategy, batch, tokens, checkpointing, microbatches)
    inside = between = 0.0
    for one in collectives(run):
        ranks = len(members(run, one.members))
        passes = 2 if one.name == "all_reduce" else 1
        sent = one.times * passes * one.nbytes * (ranks - 1) / ranks
        share = {"machine": 0, "across": 1, "all": 1 / MACHINE if _several(run) else 0}
        between += sent * share[one.members]
        inside += sent * (1 - share[one.members])
    return {"inside": round(inside), "between": round(between)}


def collectives(run: Run) -> list[Collective]:
    """All that a step calls, apart from what is too small to count.

    What FSDP keeps for itself outside the blocks is gathered before the first block and
    scattered after the last, when there is nothing left to compute. DDP's and ZeRO's
    last bucket waits as well, and ZeRO's gather of new weights. DDP and ZeRO-1 keep
    their gradients until the last micro-batch; the others reduce them each time.
    """
    if run.sharded:
        return _of_fsdp(run) + _of_tensors(run)
    every = run.microbatches if run.strategy == "zero2" else 1
    reduce = "all_reduce" if run.strategy == "ddp" else "reduce_scatter"
    block, root, layers = 4 * run.block, 4 * run.root, run.model.layers
    found = [
        Collective("backward", reduce, block, every * layers, "all"),
        Collective("waiting", reduce, root, every, "all"),
    ]
    if run.strategy != "ddp":
        whole = layers * block + root
        found.append(Collective("waiting", "all_gather", whole, 1, "all"))
    return found


def members(run: Run, which: str) -> range:
    """The ranks of a collective, as the first of them see it."""
    return {
        "all": range(run.gpus),
        "machine": range(min(run.gpus, MACHINE)),
        "across": range(0, run.gpus, MACHINE),
    }[which]


def _several(run: Run) -> bool:
    return run.gpus > MACHINE


def _of_fsdp(run: Run) -> list[Collective]:
    """Weights and gradients, for each micro-batch."""
    sharded = "machine" if run.strategy == "hsdp" else "all"
    if run.tensor > 1:  # each GPU of a machine has its own part of the matrices
        sharded = "across"
    again = 0 if run.strategy == "fsdp gathered once" else 1
    once, blocks = run.microbatches, run.microbatches * run.model.layers
    found = [
        Collective("forward", "all_gather", 2 * run.block, blocks, sharded),
        Collective("backward", "all_gather", 2 * run.block, again * blocks, sharded),
        Collective("backward", "reduce_scatter", 4 * run.block, blocks, sharded),
        Collective("waiting", "all_gather", 2 * run.root, once, sharded),
        Collective("waiting", "reduce_scatter", 4 * run.root, once, sharded),
    ]
    if run.strategy == "hsdp":
        block, root = 4 * run.block / run.shards, 4 * run.root / run.shards
        found.append(Collective("backward", "all_reduce", block, blocks, "across"))
        found.append(Collective("waiting", "all_reduce", root, once, "across"))
    return found


def _of_tensors(run: Run) -> list[Collective]:
    """Tokens, for products that are split over a machine."""
    if run.tensor == 1:
        return []
    passes = 2 + run.checkpointing  # forward, backward, forward again
    times = 2 * passes * run.model.layers * run.microbatches
    nbytes = 2 * run.model.dim * run.rows
    return [
        Collective("waiting", name, nbytes, times, "machine")
        for name in ("all_gather", "reduce_scatter")
    ]
