"""Seconds that one GPU computes in forward and in backward: kernel by kernel.

Models: each matrix product by its shape and fused attention by its operations, both as
the simulator prices them (`simgpu.timing.kernel_cost`); and all other kernels by the
bytes that they move, of a network that is not compiled. Leaves out: launches (at the
sizes of such runs the host keeps ahead), biases, dropout, and what data costs.
"""

from scripts.plan.run import Run
from simgpu.device.cards import Card
from simgpu.timing.kernel_cost import OF_BANDWIDTH, Product, product_seconds

# Of the speed that kernels reach alone, what is left while a model trains for hours:
# the clock falls at a card's limit of power, and kernels leave gaps. Fitted to the
# published runs of the models in `published.FITTED`. H200: as H100.
SUSTAINED = {"A100": 0.94, "H100": 0.78, "H200": 0.78}
# Speed of the kernels of attention, as a share of FlashAttention-2's, which is the
# simulator's. 1: FlashAttention-1 and its like in Triton, as used in 2023; fitted as
# above, both cards together
FLASH = {1: 0.6, 2: 1.0}
ATTENTION_BACKWARD = 2.5  # times forward: five products for two; FlashAttention-2, 2023
PASSES_BACKWARD = 2  # times the bytes of forward: two gradients to read or to write
# Bytes of a token for each element, forward, bfloat16 unless another type is named.
# Llama: norms in float32 of several kernels 2 x 36, residual sums 2 x 6, rotation in
# float32 20 for queries and for keys; between the matrices SiLU 4 and its product 6.
LLAMA = {"dim": 72 + 12 + 20, "keys": 20, "hidden": 4 + 6}
# GPT: norms of one kernel 2 x 4, residual sums 2 x 6; GELU 4
GPT = {"dim": 8 + 12, "keys": 0, "hidden": 4}
LOSS = 36  # bytes of each logit: to float32 6, its logarithm 8, gradients 16 + 6
# Bytes of each parameter, for each micro-batch: gathered weights copied out of the
# buffer 4, for forward and for backward; gradients into the float32 buffer 6, divided 8
COPIES = {"forward": 4, "backward": 4 + 6 + 8}


def kernel_seconds(run: Run, card: Card, flash: int) -> dict[str, float]:
    """Seconds of "forward" and "backward" of one micro-batch, if kernels run alone.

    Args:
        run: what is trained.
        card: on which.
        flash: version of FlashAttention; a key of `FLASH`.
    """
    m, rows, parts = run.model, run.rows, run.tensor
    forward, backward = _block(run, card, flash)
    last = card, rows, m.dim, m.vocab // parts
    whole = m.layers * run.block + run.root
    loss = LOSS * rows * m.vocab / parts
    forward = m.layers * forward + _product(*last)
    backward = m.layers * backward + _product_backward(*last)
    return {
        "forward": forward + _pass(card, COPIES["forward"] * whole),
        "backward": backward + _pass(card, COPIES["backward"] * whole + loss),
    }


def _block(run: Run, card: Card, flash: int) -> tuple[float, float]:
    """Seconds of one block, forward and backward.

    Checkpointed blocks are computed again in backward, but for the last matrix: PyTorch
    stops when it has all that backward needs.
    """
    m, rows, parts = run.model, run.rows, run.tensor
    inner = m.hidden // parts
    shapes = [(m.dim, (m.dim + 2 * m.kv_dim) // parts), (m.dim // parts, m.dim)]
    shapes += [(m.dim, inner)] * (2 if m.gated else 1) + [(inner, m.dim)]
    forward = sum(_product(card, rows, *shape) for shape in shapes)
    backward = sum(_product_backward(card, rows, *shape) for shape in shapes)
    last = _product(card, rows, *shapes[-1])
    attention = _attention(run, card) / FLASH[flash]
    each = LLAMA if m.gated else GPT
    moved = each["dim"] * m.dim + each["keys"] * m.kv_dim + each["hidden"] * m.hidden
    passes = _pass(card, rows * moved / parts)
    forward += attention + passes
    backward += ATTENTION_BACKWARD * attention + PASSES_BACKWARD * passes
    return forward, backward + run.checkpointing * (forward - last)


def _product(card: Card, rows: int, inputs: int, outputs: int) -> float:
    """Seconds of (rows, inputs) by (inputs, outputs) in bfloat16."""
    nbytes = 2 * (rows * inputs + inputs * outputs + rows * outputs)
    return product_seconds(card, Product(1, rows, outputs, inputs), "bfloat16", nbytes)


def _product_backward(card: Card, rows: int, inputs: int, outputs: int) -> float:
    """The gradient of the input, and that of the matrix."""
    return _product(card, rows, outputs, inputs) + _product(card, inputs, rows, outputs)


def _attention(run: Run, card: Card) -> float:
    """Seconds of forward of one block: of each pair of tokens that the mask leaves."""
    flops = 2 * run.rows * run.tokens * run.model.dim / run.tensor
    share = card.reached["bfloat16"] * card.reached["attention"]
    return flops / (card.flops["bfloat16"] * share)


def _pass(card: Card, nbytes: float) -> float:
    """Seconds of kernels that memory limits."""
    return nbytes / (card.memory_bandwidth * OF_BANDWIDTH)
