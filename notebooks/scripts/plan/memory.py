"""The most bytes on each GPU in one step of training: by arithmetic.

`bytes_per_gpu` is what to ask. `moments` has the formulas, moment by moment in the
step. FSDP's come within 1 % of what PyTorch's own tracker counts (`tracker.py`).
"""

from scripts.plan.model import Model, check_gated, parameters
from scripts.plan.run import Run, make_run

PARTS = ("weights", "gradients", "optimizer", "activations", "other")


class Bytes(dict):
    """Bytes by what they are for, at the instant when they are most.

    `weights`, `gradients` and `optimizer` are what a GPU holds for good (its shard).
    `activations` is what is computed: kept by forward, or on its way in backward, with
    the gradients of a block before they are scattered. `other` is gathered weights and
    the buffers of collectives.
    """

    moment = ""  # when that is, in words

    @property
    def total(self) -> int:
        """All together."""
        return sum(self.values())


def largest(moments: "dict[str, Bytes]") -> Bytes:
    """The moment with the most bytes, named."""
    name = max(moments, key=lambda moment: moments[moment].total)
    peak = moments[name]
    peak.moment = name
    return peak


def bytes_per_gpu(
    model: "str | Model",
    gpus: int,
    strategy: str = "fsdp",
    batch: int = 1,
    tokens: int = 4096,
    checkpointing: float = True,
) -> Bytes:
    """The most bytes on each GPU in one step: the largest of `moments`.

    Args:
        model: a name in `MODELS`, or a `Model`.
        gpus: 1 to 8, or a multiple of 8.
        strategy: one of `STRATEGIES`.
        batch: sequences on each GPU ("fsdp + tensor 8": on each 8 GPUs).
        tokens: of each sequence.
        checkpointing: whether blocks keep only their input for backward, or for which
            share of them this holds.

    Raises:
        ValueError: for what is unknown or does not divide, and for blocks without a
            gate, whose activations are others.
    """
    return largest(moments(model, gpus, strategy, batch, tokens, checkpointing))


def moments(
    model: "str | Model",
    gpus: int,
    strategy: str = "fsdp",
    batch: int = 1,
    tokens: int = 4096,
    checkpointing: float = True,
) -> "dict[str, Bytes]":
    """The peak of each moment in a step, with the names of `tracked_moments`.

    For good: 4 bytes a parameter for the weights, 4 for gradients, 8 for AdamW; over
    the GPUs if sharded. Gradients appear block by block in backward; DDP's buckets are
    there all the time.

    A block keeps for backward, for each token (d = dim, f = hidden, k = kv_dim; 2 bytes
    are bfloat16): two norms 2 x 8 d (input in float32, result before and after the
    weight), queries and the output of attention 2 x 2 d, keys and values 2 x 2 k, a
    float32 for each head and norm, and 4 x 2 f between the matrices of the feed-forward
    network: 20 d + 4 k + 8 f + 4 heads + 8. With checkpointing it keeps its input, 2 d,
    and one block at a time has the rest again.
    The loss has 12 bytes for each logit: float32 logarithms, their gradient, and the
    gradient of the float32 logits.

    `_backward_activations` has what backward of a block needs on top. FSDP then has
    gathered, at 2 bytes a parameter, what is outside the blocks, this block, and the
    block before it; and the float32 buffer (4 bytes) of the block after it, which is
    on its way to its shards.

    "ddp", "zero1" and "zero2" hold the weights in bfloat16 once more (autocast keeps
    them). "fsdp offload" leaves weights, gradients and AdamW in the memory of the host.
    "fsdp gathered once" has all blocks gathered until backward is through with them.
    "hsdp" has the shards of one machine. "fsdp + tensor 8" also splits tokens between
    the matmuls (sequence parallel). The tracker has checked "fsdp" only
    (`tests/test_plan.py`). Left out: what this package leaves out, padding of shards,
    cosines and token numbers, and gradients that are kept from one micro-batch to the
    next (4 bytes a parameter, over the GPUs if sharded).
    """
    run = make_run(model, gpus, strategy, batch, tokens, checkpointing)
    check_gated(run.model)
    if not run.sharded:
        return _moments_replicated(run)
    last = run.model.layers
    head = _saved_activations(run, last) + _loss_activations(run)
    found = {
        "head": _fsdp_bytes(run, 0, head, 2 * run.root + _kept(run, last)),
        "last block": _last_block(run),
        "last block but one": _fsdp_block(run, last - 1),
        "second block": _fsdp_block(run, 2),
        "first block": _first_block(run),
        "update": _fsdp_bytes(run, last, 0, 0),
    }
    found["update"]["gradients"] += _shard(run, 4 * run.model.root)
    return found


def _shard(run: Run, nbytes: int) -> int:
    """A GPU's share of bytes that it holds for good."""
    return 0 if run.strategy == "fsdp offload" else -(-nbytes // run.shards)


def _kept(run: Run, blocks: int) -> int:
    """Bytes of so many gathered blocks, if they are gathered once."""
    return 2 * blocks * run.block if run.strategy == "fsdp gathered once" else 0


def _fsdp_bytes(run: Run, done: int, activations: float, other: float) -> Bytes:
    """FSDP's bytes when backward has finished `done` blocks."""
    whole = parameters(run.model)
    return Bytes(
        weights=_shard(run, 4 * whole),
        gradients=_shard(run, 4 * done * run.model.block),
        optimizer=_shard(run, 8 * whole),
        activations=round(activations),
        other=round(other),
    )


def _block_activations(run: Run) -> float:
    """Bytes that a block keeps for backward, without checkpointing."""
    m, rows = run.model, run.rows
    # the inputs of its matrices, whole on each GPU even if heads are split
    inputs = 4 * rows * m.dim
    rest = rows * (16 * m.dim + 4 * m.kv_dim + 8 * m.hidden + 4 * m.heads + 8)
    return inputs + rest / run.tensor


def _saved_activations(run: Run, blocks: int) -> float:
    """Bytes that so many blocks keep between forward and backward."""
    inputs = 2 * run.rows * run.model.dim / run.tensor
    share = run.checkpointing
    return blocks * (share * inputs + (1 - share) * _block_activations(run))


def _loss_activations(run: Run) -> float:
    """Bytes of the last norm, and of the loss while its gradient is computed."""
    m, rows = run.model, run.rows
    return rows * (2 * m.dim + (6 * m.dim + 4 + 12 * m.vocab) / run.tensor)


def _backward_activations(run: Run) -> float:
    """Bytes on top of what is kept, when backward of a block is at its most.

    The largest of three instants. At the gate of SwiGLU: all that the block kept but
    gate times up, four gradients in its place, that of the output, and the gradient of
    the last matrix. At the second norm: what attention and the norms kept, 18 d for
    each token for gradients of activations, and the gradients of three matrices. At the
    first norm: 26 d for each token, and the gradients of the whole block. Only FSDP
    keeps gradients of matrices together until the block is done.
    """
    m, rows = run.model, run.rows
    row, wide = rows * m.dim / run.tensor, rows * m.hidden / run.tensor
    matrix, again = m.dim * m.hidden / run.tensor, _block_activations(run)
    most = max(
        again + 4 * wide + 2 * row + 2 * matrix,
        again - 8 * wide + 18 * row + run.sharded * 6 * matrix,
        26 * row + run.sharded * 2 * run.block,
    )
    return most if run.checkpointing else most - again


def _fsdp_block(run: Run, i: int) -> Bytes:
    """In backward of block i, counted from 1, but not the last."""
    head = 2 * run.model.vocab * run.model.dim / run.tensor  # gradient of its matrix
    activations = _saved_activations(run, i) + head + _backward_activations(run)
    gathered = _kept(run, i) or 2 * min(i, 2) * run.block
    other = 2 * run.root + gathered + 4 * run.block
    return _fsdp_bytes(run, run.model.layers - i, activations, other)


def _last_block(run: Run) -> Bytes:
    """No block after it is on its way; its own float32 buffer may be the most."""
    most = _fsdp_block(run, run.model.layers)
    most["other"] -= 4 * run.block
    row = 2 * run.rows * run.model.dim / run.tensor  # its input
    head = 2 * run.model.vocab * run.model.dim / run.tensor
    scatter = _saved_activations(run, run.model.layers - 1) + row + head + 4 * run.block
    most["activations"] = max(most["activations"], round(scatter))
    return most


def _first_block(run: Run) -> Bytes:
    """It is gathered alone; then what is outside the blocks is scattered."""
    layers, root = run.model.layers, run.root
    block = _fsdp_block(run, 1)
    # a tied matrix has a gradient from either end, and then their sum
    gradients = (3 if run.model.tied else 1) * 2 * root
    added = _fsdp_bytes(run, layers - 1, gradients, 2 * root + 4 * run.block)
    scattered = _fsdp_bytes(run, layers, 4 * root, 2 * root)
    return max(block, added, scattered, key=lambda moment: moment.total)


def _moments_replicated(run: Run) -> "dict[str, Bytes]":
    """The same for strategies that have all weights on each GPU."""
    whole, layers = parameters(run.model), run.model.layers
    shards = {
        "ddp": (1, 1), "zero1": (1, run.gpus), "zero2": (run.gpus, run.gpus),
    }[run.strategy]  # fmt: skip
    always = {
        "weights": 4 * whole,
        "gradients": -(-4 * whole // shards[0]),
        "optimizer": -(-8 * whole // shards[1]),
    }
    # ZeRO-2: a block's gradients fill one bucket while another is on its way
    buckets = 2 * 4 * run.model.block if run.strategy == "zero2" else 0
    last = round(_saved_activations(run, layers) + _backward_activations(run))
    head = round(_saved_activations(run, layers) + _loss_activations(run))
    return {
        "head": Bytes(always, activations=head, other=2 * whole),
        "last block": Bytes(always, activations=last, other=2 * whole + buckets),
        "update": Bytes(always, activations=0, other=0),
    }
