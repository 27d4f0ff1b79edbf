"""Plan a training run on GPUs that are not there: bytes, traffic, seconds.

Models: a Llama-shaped network, mixed precision (weights, gradients and AdamW's two
moments in float32, computing in bfloat16), and one step of training. Its bytes are
found twice: `tracked` runs the step on tensors without memory and lets PyTorch's own
FSDPMemTracker count; `bytes_per_gpu` does the same by arithmetic, which says why.
`traffic` and `step_seconds` are arithmetic alone.
Leaves out: what the caching allocator wastes, CUDA's own memory (0.5 to 1 GB), NCCL's
buffers, AdamW's temporaries (there are none if it is fused), data loading, pipeline and
context parallelism, torch.compile, float8, and GPUs or links that differ in speed.

Taught in 17-leave-one-machine.
"""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.simgpu.cards import find_card

MACHINE = 8  # GPUs in one machine, joined by NVLink
# how the work is split; "tensor 8" splits each matrix over the GPUs of a machine
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "fsdp offload", "fsdp + tensor 8")


# -- models ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """The shape of a Llama.

    Taught in 17-leave-one-machine.
    """

    name: str
    layers: int
    dim: int  # numbers for a token between two blocks
    heads: int
    kv_heads: int  # heads of keys and values, each shared by several of queries
    hidden: int  # numbers for a token inside the feed-forward network
    vocab: int
    tied: bool = False  # the last matrix is the embedding's

    @property
    def kv_dim(self) -> int:
        """Numbers for a token in keys, and in values."""
        return self.dim // self.heads * self.kv_heads

    @property
    def block(self) -> int:
        """Parameters of one block."""
        attention = 2 * self.dim * (self.dim + self.kv_dim)
        return attention + 3 * self.dim * self.hidden + 2 * self.dim

    @property
    def root(self) -> int:
        """Parameters outside the blocks: embedding, last norm, last matrix."""
        return (1 if self.tied else 2) * self.vocab * self.dim + self.dim


# Source: config.json of meta-llama/Llama-3.2-1B, Llama-2-7b-hf, Meta-Llama-3-8B,
# Meta-Llama-3-70B and Llama-3.1-405B on huggingface.co
MODELS = {
    "1B": Model("Llama 3.2 1B", 16, 2048, 32, 8, 8192, 128256, tied=True),
    "7B": Model("Llama 2 7B", 32, 4096, 32, 32, 11008, 32000),
    "8B": Model("Llama 3 8B", 32, 4096, 32, 8, 14336, 128256),
    "70B": Model("Llama 3 70B", 80, 8192, 64, 8, 28672, 128256),
    "405B": Model("Llama 3.1 405B", 126, 16384, 128, 8, 53248, 128256),
}


def find_model(model: "str | Model") -> Model:
    """The model of that name, or the one given.

    Raises:
        ValueError: for a name that is not in `MODELS`; the message lists them.
    """
    if isinstance(model, Model):
        return model
    if str(model).upper() not in MODELS:
        raise ValueError(f"unknown model {model!r}; choose one of {', '.join(MODELS)}")
    return MODELS[str(model).upper()]


def parameters(model: "str | Model") -> int:
    """How many numbers the model learns: exact.

    Taught in 17-leave-one-machine.
    """
    model = find_model(model)
    return model.layers * model.block + model.root


class Norm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):  # (batch, tokens, dim), and so it returns
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return y.to(x.dtype) * self.weight


def rotate(x, cos, sin):
    """Turn pairs of a head's numbers by the token's place: rotary embedding.

    Args:
        x: (batch, tokens, heads, size).
        cos: (tokens, 1, size / 2) float32.
        sin: the same.
    """
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention in which several heads share keys and values."""

    def __init__(self, model: Model):
        super().__init__()
        self.size = model.dim // model.heads
        self.q = nn.Linear(model.dim, model.dim, bias=False)
        self.k = nn.Linear(model.dim, model.kv_dim, bias=False)
        self.v = nn.Linear(model.dim, model.kv_dim, bias=False)
        self.out = nn.Linear(model.dim, model.dim, bias=False)

    def forward(self, x, cos, sin):  # (batch, tokens, dim), and so it returns
        batch, tokens, _ = x.shape
        q, k, v = (
            matrix(x).view(batch, tokens, -1, self.size)
            for matrix in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # (batch, heads, tokens, size)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, -1))


class FeedForward(nn.Module):
    """SwiGLU: one product gates the other."""

    def __init__(self, model: Model):
        super().__init__()
        self.gate = nn.Linear(model.dim, model.hidden, bias=False)
        self.up = nn.Linear(model.dim, model.hidden, bias=False)
        self.down = nn.Linear(model.hidden, model.dim, bias=False)

    def forward(self, x):  # (batch, tokens, dim), and so it returns
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer. With checkpointing it keeps its input only, and computes twice."""

    def __init__(self, model: Model, checkpointing: bool):
        super().__init__()
        self.checkpointing = checkpointing
        self.norm1, self.norm2 = Norm(model.dim), Norm(model.dim)
        self.attention, self.feed_forward = Attention(model), FeedForward(model)

    def inside(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.feed_forward(self.norm2(x))

    def forward(self, x, cos, sin):  # (batch, tokens, dim), and so it returns
        if self.checkpointing:
            return checkpoint(self.inside, x, cos, sin, use_reentrant=False)
        return self.inside(x, cos, sin)


class Llama(nn.Module):
    """Token numbers (batch, tokens) to logits (batch, tokens, vocab)."""

    def __init__(self, model: Model, layers: int, checkpointing: bool):
        super().__init__()
        self.size = model.dim // model.heads
        self.embedding = nn.Embedding(model.vocab, model.dim)
        self.blocks = nn.ModuleList(Block(model, checkpointing) for _ in range(layers))
        self.norm = Norm(model.dim)
        self.out = nn.Linear(model.dim, model.vocab, bias=False)
        if model.tied:
            self.out.weight = self.embedding.weight

    def forward(self, tokens):
        place = torch.arange(tokens.shape[1], device=tokens.device)
        pair = torch.arange(0, self.size, 2, device=tokens.device) / self.size
        angle = place[:, None, None] * 10_000.0**-pair  # (tokens, 1, size / 2)
        cos, sin = angle.cos(), angle.sin()
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.out(self.norm(x))


def build(
    model: "str | Model", layers: int | None = None, checkpointing: bool = False
) -> Llama:
    """The model as an `nn.Module`, on the default device.

    Under `torch.device("meta")` it needs no memory, however large it is.

    Args:
        model: a name in `MODELS`, or a `Model`.
        layers: blocks, if not all.
        checkpointing: whether blocks keep only their input for backward.

    Taught in 17-leave-one-machine.
    """
    model = find_model(model)
    return Llama(model, layers or model.layers, checkpointing)


# -- what is asked ---------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A model, and how it is trained: checked, and counted in useful units."""

    model: Model
    gpus: int
    strategy: str = "fsdp"
    batch: int = 1  # sequences for each replica of the model at once
    tokens: int = 4096  # of a sequence
    checkpointing: float = 1.0  # share of the blocks that are computed twice

    def __post_init__(self):
        if self.strategy not in STRATEGIES:
            raise ValueError(
                f"unknown strategy {self.strategy!r}; choose one of "
                + ", ".join(map(repr, STRATEGIES))
            )
        if self.gpus < 1 or (self.gpus > MACHINE and self.gpus % MACHINE):
            raise ValueError(
                f"{self.gpus} GPUs are not whole machines of {MACHINE}; "
                f"ask for 1 to {MACHINE}, or a multiple of {MACHINE}"
            )
        if self.gpus % self.tensor or self.model.kv_heads % self.tensor:
            raise ValueError(
                f"{self.strategy!r} splits heads over {self.tensor} GPUs: it takes a "
                f"multiple of {self.tensor} GPUs and of heads of keys; there are "
                f"{self.gpus} and {self.model.kv_heads}"
            )
        if self.batch < 1 or self.tokens < 1:
            raise ValueError("batch and tokens must be at least 1")
        if not 0 <= self.checkpointing <= 1:
            raise ValueError("checkpointing is True, False, or a share of the blocks")

    @property
    def tensor(self) -> int:
        """GPUs that share one matrix."""
        return 8 if self.strategy.endswith("tensor 8") else 1

    @property
    def replicas(self) -> int:
        """Groups of GPUs that have different data."""
        return self.gpus // self.tensor

    @property
    def rows(self) -> int:
        """Tokens that a replica computes in one step."""
        return self.batch * self.tokens


def _run(model, gpus, strategy, batch, tokens, checkpointing) -> Run:
    model = find_model(model)
    return Run(model, gpus, strategy, batch, tokens, float(checkpointing))


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


PARTS = ("weights", "gradients", "optimizer", "activations", "other")


def _largest(moments: "dict[str, Bytes]") -> Bytes:
    """The moment with the most bytes, named."""
    name = max(moments, key=lambda moment: moments[moment].total)
    peak = moments[name]
    peak.moment = name
    return peak


# -- counted by PyTorch's own tracker --------------------------------------------------

SMALL = (4, 5)  # blocks that are tracked; the others are like these
SECONDS = 60  # that tracking one job may take
_PART = {  # FSDPMemTracker's kind -> ours
    "SHARDED_PARAM": "weights",
    "SHARDED_GRAD": "gradients",
    "OPT": "optimizer",
    "ACT": "activations",
    "TEMP": "activations",
    "INP": "activations",
    "BUFFER": "activations",
    "UNSHARDED_PARAM": "other",
    "UNSHARDED_GRAD": "other",
    "ALL_GATHER": "other",
    "REDUCE_SCATTER": "other",
}


def tracked(
    model: "str | Model",
    gpus: int,
    batch: int = 1,
    tokens: int = 4096,
    checkpointing: bool = True,
    strategy: str = "fsdp",
    layers: int | None = None,
) -> Bytes:
    """The most bytes on each GPU in one step: counted, with tensors without memory.

    Builds the model as fake tensors, shards it with `fully_shard` over a process group
    of which only this rank exists, trains one step, and reads PyTorch's
    FSDPMemTracker. It does so with 4 and with 5 blocks and goes on along a straight
    line, separately for each moment in the step (see `tracked_moments`).

    Args:
        model: a name in `MODELS`, or a `Model`.
        gpus: 1 to 8, or a multiple of 8.
        batch: sequences on each GPU.
        tokens: of each sequence.
        checkpointing: whether blocks keep only their input for backward.
        strategy: "fsdp"; the tracker knows no other.
        layers: blocks of the model, if not all.

    Raises:
        ValueError: for an unknown model, or what cannot be tracked.
        RuntimeError: if tracking fails or takes longer than `SECONDS`.

    Source: `torch.distributed._tools.fsdp2_mem_tracker`.

    Taught in 17-leave-one-machine.
    """
    job = dict(model=model, gpus=gpus, batch=batch, tokens=tokens)
    job |= dict(checkpointing=checkpointing, strategy=strategy, layers=layers)
    return tracked_all([job])[0]


def tracked_all(jobs: "list[dict]") -> list[Bytes]:
    """Several jobs in one process, which is quicker: dicts of `tracked`'s arguments.

    Taught in 17-leave-one-machine.
    """
    return [_largest(moments) for moments in tracked_moments(jobs)]


def tracked_moments(jobs: "list[dict]") -> "list[dict[str, Bytes]]":
    """For each job the peak of each moment in the step, in its order.

    Moments: the loss ("head"), backward of the last block, of the one before, of the
    second and of the first block (with what is outside the blocks), and the update.
    What lies between two of them lies on a straight line between their bytes.

    Taught in 17-leave-one-machine.
    """
    plans = [_tracking(**job) for job in jobs]
    runs = [asdict(run) | {"layers": n} for run, _, small in plans for n in small]
    found = iter(_elsewhere(runs))
    results = []
    for _, layers, small in plans:
        points = [next(found) for _ in small]
        results.append(_along(small, points, layers))
    return results


def _tracking(
    model, gpus, batch=1, tokens=4096, checkpointing=True, strategy="fsdp", layers=None
) -> "tuple[Run, int, tuple[int, ...]]":
    """What to run, for how many blocks, and the numbers of blocks to run it with."""
    run = _run(model, gpus, strategy, batch, tokens, bool(checkpointing))
    if strategy != "fsdp":
        raise ValueError(
            f'strategy {strategy!r} cannot be tracked, only "fsdp"; '
            "plan.bytes_per_gpu has them all"
        )
    layers = layers or run.model.layers
    if layers < min(SMALL):
        raise ValueError(f"tracking needs at least {min(SMALL)} blocks, not {layers}")
    return run, layers, SMALL if layers not in SMALL else (layers,)


def _along(small, points: "list[dict]", layers: int) -> "dict[str, Bytes]":
    """The straight line through one or two points, at that many layers."""
    if len(points) == 1:
        return {name: Bytes(parts) for name, parts in points[0].items()}
    (a, b), (low, high) = small, points
    steps = (layers - a) / (b - a)
    return {
        name: Bytes(
            (part, round(low[name][part] + steps * (high[name][part] - nbytes)))
            for part, nbytes in low[name].items()
        )
        for name in low
    }


def _elsewhere(runs: "list[dict]") -> "list[dict]":
    """`_moments` of each run, in a process of its own: nothing of it stays here.

    Raises:
        RuntimeError: with the last words of the process, or if it took too long.
    """
    home = str(Path(__file__).resolve().parents[1])
    paths = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-W", "ignore", "-m", "helpers.plan", str(os.getpid())]
    process = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": paths}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        limit = SECONDS * max(1, len(runs))
        answer, errors = process.communicate(json.dumps(runs), timeout=limit)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"tracking took more than {limit} seconds") from None
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        words = errors.strip().splitlines() or [f"exit status {process.returncode}"]
        raise RuntimeError(f"tracking failed: {words[-1].removeprefix('[rank0]: ')}")
    return json.loads(answer)


def _serve() -> None:
    """The other process: runs from standard input, moments to standard output."""
    threading.Thread(target=_end_with, args=[int(sys.argv[1])], daemon=True).start()
    runs = json.load(sys.stdin)
    print(json.dumps([_moments(run) for run in runs]), flush=True)
    os._exit(0)  # nothing to tidy up, and a fake process group to stumble over


def _end_with(parent: int) -> None:
    """End this process when the one that started it is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _moments(run: dict) -> "dict[str, dict[str, int]]":
    """Bytes by part at the peak of each moment of one step, in this process."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from helpers import torch_private

    layers = run.pop("layers")
    run = Run(**run | {"model": Model(**run["model"])})
    torch_private.fake_group(run.gpus)
    try:
        with torch.device("meta"):
            model = build(run.model, layers, bool(run.checkpointing))
        _shard(model, init_device_mesh("cpu", (run.gpus,)))
        with torch_private.fake_tensors():
            # on "cpu": a build without CUDA cannot differentiate fakes on "cuda"
            model.to_empty(device="cpu")
            optimizer = _LocalAdamW(model.parameters())
            x, y = torch.randint(0, 2, (2, run.batch, run.tokens))
            peaks = torch_private.Peaks(model, optimizer, (x, y))
            _mark_blocks(model.blocks, peaks.mark)
            with peaks:
                _step(model, optimizer, x, y, peaks.mark)
    finally:
        dist.destroy_process_group()
    moments = {name: _parts(kinds) for name, kinds in peaks.moments.items()}
    # never the largest: the last block's forward comes on top; lie between neighbours
    for name in ("start", "blocks between"):
        moments.pop(name, None)
    return moments


def _shard(model: Llama, mesh) -> None:
    """Each block by itself, then the rest."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # cos and sin stay float32
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


class _LocalAdamW(torch.optim.Optimizer):
    """AdamW's bytes on the local shards: two moments, no temporaries, as if fused.

    PyTorch's own on sharded parameters works out shapes with whole, fake matrices,
    which the tracker would count.
    """

    def __init__(self, parameters):
        super().__init__(parameters, {})
        for p in self.param_groups[0]["params"]:
            for name in ("exp_avg", "exp_avg_sq"):
                self.state[p][name] = torch.zeros_like(p.to_local())

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            weight, gradient, state = p.to_local(), p.grad.to_local(), self.state[p]
            state["exp_avg"].lerp_(gradient, 0.1)
            state["exp_avg_sq"].addcmul_(gradient, gradient, value=0.05)
            weight.addcdiv_(state["exp_avg"], state["exp_avg_sq"], value=-1e-3)


def _mark_blocks(blocks, mark) -> None:
    """Mark when backward reaches a block's output: what came after it has ended."""
    between = ["blocks between"] * (len(blocks) - 4)
    names = ["second block", *between, "last block but one", "last block", "head"]
    blocks[-1].register_forward_pre_hook(lambda block, args: mark("start"))
    for block, name in zip(blocks, names, strict=True):

        def reached(block, args, output, name=name):
            output.register_hook(lambda gradient: mark(name))

        block.register_forward_hook(reached)


def _step(model, optimizer, x, y, mark) -> None:
    """One step of training."""
    logits = model(x).flatten(0, 1).float()
    loss = F.cross_entropy(logits, y.flatten())
    del logits
    loss.backward()
    mark("first block")
    optimizer.step()
    mark("update")
    optimizer.zero_grad()


def _parts(kinds: "dict[str, int]") -> dict[str, int]:
    parts = dict.fromkeys(PARTS, 0)
    for kind, nbytes in kinds.items():
        if kind != "Total":
            parts[_PART[kind]] += nbytes
    return parts


# -- bytes by arithmetic ---------------------------------------------------------------


def bytes_per_gpu(
    model: "str | Model",
    gpus: int,
    strategy: str = "fsdp",
    batch: int = 1,
    tokens: int = 4096,
    checkpointing: float = True,
) -> Bytes:
    """The most bytes on each GPU in one step: by arithmetic.

    The largest of `moments`, which has the formulas.

    Args:
        model: a name in `MODELS`, or a `Model`.
        gpus: 1 to 8, or a multiple of 8.
        strategy: one of `STRATEGIES`.
        batch: sequences on each GPU ("fsdp + tensor 8": on each 8 GPUs).
        tokens: of each sequence.
        checkpointing: whether blocks keep only their input for backward, or for which
            share of them this holds.

    Raises:
        ValueError: for what is unknown or does not divide.

    Taught in 17-leave-one-machine.
    """
    return _largest(moments(model, gpus, strategy, batch, tokens, checkpointing))


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

    In backward a block is at its most at one of three instants (`_working`). FSDP then
    has gathered, at 2 bytes a parameter, what is outside the blocks, this block, and
    the block before it; and the float32 buffer (4 bytes) of the block after it, which
    is on its way to its shards.

    FSDP's come within 1 % of the tracker's (`tests/test_plan.py`). Left out: what
    this module leaves out, padding of shards, cosines and token numbers. "ddp",
    "zero1" and "zero2" hold the weights in bfloat16 once more (autocast keeps them).
    "fsdp offload" leaves weights, gradients and AdamW in the memory of the host.
    "fsdp + tensor 8" also splits tokens between the products (sequence parallel). The
    tracker has checked "fsdp" only.

    Taught in 17-leave-one-machine.
    """
    run = _run(model, gpus, strategy, batch, tokens, checkpointing)
    if not strategy.startswith("fsdp"):
        return _moments_whole(run)
    last = run.model.layers
    found = {
        "head": _bytes(run, 0, _kept(run, last) + _head(run), 2 * _root(run)),
        "last block": _last_block(run),
        "last block but one": _fsdp_block(run, last - 1),
        "second block": _fsdp_block(run, 2),
        "first block": _first_block(run),
        "update": _bytes(run, last, 0, 0),
    }
    found["update"]["gradients"] += _shard_of(run, 4 * run.model.root)
    return found


def _block(run: Run) -> int:
    """Parameters of a block on one GPU, when gathered."""
    return run.model.block // run.tensor


def _root(run: Run) -> int:
    """Parameters outside the blocks on one GPU, when gathered."""
    return run.model.root // run.tensor


def _shard_of(run: Run, nbytes: int) -> int:
    """A GPU's share of what is for good."""
    return 0 if run.strategy == "fsdp offload" else -(-nbytes // run.gpus)


def _bytes(run: Run, done: int, activations: float, other: float) -> Bytes:
    """FSDP's bytes when backward has done with `done` blocks."""
    whole = parameters(run.model)
    return Bytes(
        weights=_shard_of(run, 4 * whole),
        gradients=_shard_of(run, 4 * done * run.model.block),
        optimizer=_shard_of(run, 8 * whole),
        activations=round(activations),
        other=round(other),
    )


def _of_block(run: Run) -> float:
    """Bytes that a block keeps without checkpointing."""
    m, rows = run.model, run.rows
    # the inputs of its matrices, whole on each GPU even if heads are split
    inputs = 4 * rows * m.dim
    rest = rows * (16 * m.dim + 4 * m.kv_dim + 8 * m.hidden + 4 * m.heads + 8)
    return inputs + rest / run.tensor


def _kept(run: Run, blocks: int) -> float:
    """Bytes that so many blocks keep between forward and backward."""
    inputs = 2 * run.rows * run.model.dim / run.tensor
    share = run.checkpointing
    return blocks * (share * inputs + (1 - share) * _of_block(run))


def _head(run: Run) -> float:
    """Bytes of the last norm, and of the loss while its gradient is computed."""
    m, rows = run.model, run.rows
    return rows * (2 * m.dim + (6 * m.dim + 4 + 12 * m.vocab) / run.tensor)


def _working(run: Run) -> float:
    """Bytes on top of what is kept, when backward of a block is at its most.

    At the gate: all that the block kept but the product, four gradients in its place,
    that of the output, and the gradient of the last matrix. At the second norm: what
    attention and the norms kept, 18 d for each token on the way, the gradients of three
    matrices. At the first norm: 26 d for each token, and the gradients of the whole
    block. Only FSDP keeps gradients of matrices together until the block is done.
    """
    m, rows = run.model, run.rows
    row, wide = rows * m.dim / run.tensor, rows * m.hidden / run.tensor
    matrix, again = m.dim * m.hidden / run.tensor, _of_block(run)
    fsdp = run.strategy.startswith("fsdp")
    most = max(
        again + 4 * wide + 2 * row + 2 * matrix,
        again - 8 * wide + 18 * row + fsdp * 6 * matrix,
        26 * row + fsdp * 2 * _block(run),
    )
    return most if run.checkpointing else most - again


def _fsdp_block(run: Run, i: int) -> Bytes:
    """In backward of block i, counted from 1, neither the first nor the last."""
    head = 2 * run.model.vocab * run.model.dim / run.tensor  # gradient of its matrix
    activations = _kept(run, i) + head + _working(run)
    other = 2 * _root(run) + (2 + 2 + 4) * _block(run)
    return _bytes(run, run.model.layers - i, activations, other)


def _last_block(run: Run) -> Bytes:
    """No block after it is on its way; its own float32 buffer may be the most."""
    most = _fsdp_block(run, run.model.layers)
    most["other"] -= 4 * _block(run)
    row = 2 * run.rows * run.model.dim / run.tensor  # its input
    head = 2 * run.model.vocab * run.model.dim / run.tensor
    scatter = _kept(run, run.model.layers - 1) + row + head + 4 * _block(run)
    most["activations"] = max(most["activations"], round(scatter))
    return most


def _first_block(run: Run) -> Bytes:
    """No block before it is gathered; then what is outside the blocks is scattered."""
    layers, root = run.model.layers, _root(run)
    block = _fsdp_block(run, 1)
    block["other"] -= 2 * _block(run)
    # a tied matrix has a gradient from either end, and then their sum
    gradients = (3 if run.model.tied else 1) * 2 * root
    added = _bytes(run, layers - 1, gradients, 2 * root + 4 * _block(run))
    scattered = _bytes(run, layers, 4 * root, 2 * root)
    return max(block, added, scattered, key=lambda moment: moment.total)


def _moments_whole(run: Run) -> "dict[str, Bytes]":
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
    last = round(_kept(run, layers) + _working(run))
    head = round(_kept(run, layers) + _head(run))
    return {
        "head": Bytes(always, activations=head, other=2 * whole),
        "last block": Bytes(always, activations=last, other=2 * whole + buckets),
        "update": Bytes(always, activations=0, other=0),
    }


# -- FLOPs, traffic and seconds --------------------------------------------------------


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

    Taught in 17-leave-one-machine.
    """
    model = find_model(model)
    block = 2 * (model.block - 2 * model.dim) + 4 * model.dim * tokens
    forward = model.layers * block + 2 * model.vocab * model.dim
    again = model.layers * (block - 2 * model.hidden * model.dim)
    return round(tokens * (3 * forward + checkpointing * again))


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
OF_LINK = 0.8  # of a link's bandwidth that a collective reaches: assumed
OF_MEMORY = 0.8  # of a memory's bandwidth that the optimizer reaches: assumed
HOST_MEMORY = 614e9  # bytes/s of a machine, 2 x 8 channels DDR5-4800: assumed
UPDATE = 28  # bytes that AdamW reads and writes for each parameter, in float32


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

    Taught in 17-leave-one-machine.
    """
    run = _run(model, gpus, strategy, batch, tokens, checkpointing)
    phases = _phases(run).values()
    return {where: round(sum(p[where] for p in phases)) for where in _SIDES}


_SIDES = ("inside", "between")


def _phases(run: Run) -> dict[str, dict[str, float]]:
    """Bytes that each GPU sends in forward and in backward, and while it waits.

    What is sent in "forward" and "backward" goes on while the GPU computes.
    """
    blocks, root = run.model.layers * _block(run), _root(run)
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

    Taught in 17-leave-one-machine.
    """
    run = _run(model, gpus, strategy, batch, tokens, checkpointing)
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
        for name, nbytes in _phases(run).items()
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
    return max(inside, nbytes["between"] / (gbits * 1e9 / 8)) / OF_LINK


def _offload_seconds(run: Run, card: str) -> float:
    """Weights twice to the GPU, gradients back once: over PCIe, in float32."""
    if run.strategy != "fsdp offload":
        return 0.0
    moved = 3 * 4 * parameters(run.model) / run.gpus
    return moved / find_card(card).pcie_bandwidth / OF_LINK


def _update_seconds(run: Run, card: str) -> float:
    """AdamW on a GPU's share: limited by memory."""
    sharded = run.strategy != "ddp"
    nbytes = UPDATE * parameters(run.model) / (run.gpus if sharded else 1)
    bandwidth = find_card(card).memory_bandwidth
    if run.strategy == "fsdp offload":
        bandwidth = HOST_MEMORY / min(run.gpus, MACHINE)
    return nbytes / bandwidth / OF_MEMORY


# -- against what others measured ------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """A training run that somebody measured, and where it is published."""

    name: str
    run: dict  # arguments of `step_seconds`, most of `bytes_per_gpu` as well
    source: str
    tokens_per_second: float | None = None  # of each GPU
    mfu: float | None = None
    memory: float | None = None  # bytes
    note: str = ""


_TITAN = "https://github.com/pytorch/torchtitan/"
# the page as it was in 2024
_TITAN_A100 = (
    f"{_TITAN}blob/041336434916bdc0f88c1f89fda176fd3c2092e4/docs/performance.md"
)
_TITAN_2D = f"{_TITAN}commits/main/docs/performance.md"  # November 2024
_TITAN_H100 = f"{_TITAN}blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
_IBM = "https://pytorch.org/blog/maximizing-training/"
_LAMBDA = (
    "https://github.com/LambdaLabsML/distributed-training-guide/tree/"
    "059cf08cb61ed64d4337980b6b6bf83514a9619c/06-training-llama-405b"
)
_LLAMA2_70B = replace(MODELS["70B"], name="Llama 2 70B", vocab=32000)
_SLOW = "H100 with 96 GB, 2.4 TB/s and at most 500 W, slower than the one assumed"
_IBM_NOTE = "Gbit/s between machines taken as those of 8 GPUs together"
PUBLISHED = (
    Published(
        "torchtitan 8B, 64 A100",
        dict(model="8B", gpus=64, card="A100", tokens=8192, checkpointing=0.5),
        _TITAN_A100, 2904, 0.568,
        note="every second block computed twice; the network is not published",
    ),
    Published(
        "torchtitan 70B, 64 A100",
        dict(model="70B", gpus=64, card="A100", tokens=8192),
        _TITAN_A100, 331, 0.517,
        note="the network is not published",
    ),
    Published(
        "torchtitan 8B, 8 H100",
        dict(model="8B", gpus=8, batch=2, tokens=8192, checkpointing=0.5),
        _TITAN_H100, 5762, memory=82.4 * 2**30,
        note=f"{_SLOW}; chosen operations computed twice, here half the blocks; "
        "memory reserved, not allocated",
    ),
    Published(
        "torchtitan 8B, 128 H100",
        dict(model="8B", gpus=128, batch=2, tokens=8192, checkpointing=0.5),
        _TITAN_H100, 5605, memory=67.0 * 2**30,
        note="as with 8",
    ),
    Published(
        "torchtitan 405B, 128 H100",
        dict(
            model="405B", gpus=128, strategy="fsdp + tensor 8", batch=2, tokens=8192
        ),
        _TITAN_2D, 109, 0.29,
        note="H100 of 94 GB; the network is not published",
    ),
    Published(
        "IBM 7B, 128 A100",
        dict(
            model="7B", gpus=128, card="A100", batch=2, checkpointing=False, network=50
        ),
        _IBM, 3700, 0.57, note=_IBM_NOTE,
    ),
    Published(
        "IBM 7B, 96 H100",
        dict(model="7B", gpus=96, batch=2, checkpointing=False, network=100),
        _IBM, 7500, 0.37, note=_IBM_NOTE,
    ),
    Published(
        "IBM 70B, 128 A100",
        dict(model=_LLAMA2_70B, gpus=128, card="A100", batch=2, network=50),
        _IBM, 370, 0.50, note=_IBM_NOTE,
    ),
    Published(
        "IBM 70B, 96 H100",
        dict(model=_LLAMA2_70B, gpus=96, batch=2, network=100),
        _IBM, 800, 0.34, note=_IBM_NOTE,
    ),
    Published(
        "Lambda 405B, 64 H100",
        dict(model="405B", gpus=64, strategy="fsdp offload"),
        _LAMBDA, 4096 / 30, memory=52.9e9,
        note="gradients scattered in bfloat16 (6.4 GB less), embedding sharded by "
        "itself (4.2 GB less); about 30 s a step",
    ),
)  # fmt: skip


def compare() -> list[dict]:
    """Each published figure beside ours: one set of assumptions for all.

    Returns:
        dicts with "name", "figure" ("tokens/s", "MFU" or "GB"), "published",
        "predicted" and "error", which is predicted over published, less 1.

    Taught in 17-leave-one-machine.
    """
    rows = []
    for row in PUBLISHED:
        step = step_seconds(**row.run)
        asked = {k: v for k, v in row.run.items() if k not in ("card", "network")}
        figures = (
            ("tokens/s", row.tokens_per_second, step.tokens_per_second),
            ("MFU", row.mfu, step.mfu),
            ("GB", row.memory and row.memory / 1e9, bytes_per_gpu(**asked).total / 1e9),
        )
        for figure, published, predicted in figures:
            if published is not None:
                rows.append({
                    "name": row.name, "figure": figure, "published": published,
                    "predicted": predicted, "error": predicted / published - 1,
                })  # fmt: skip
    return rows


if __name__ == "__main__":
    _serve()
