"""A training run that is planned: which model, on how many GPUs, split in which way.

`Run` checks what is asked. The other files calculate bytes, traffic and seconds of it.
"""

from dataclasses import dataclass

from scripts.plan.model import Model, find_model

MACHINE = 8  # GPUs in one machine, joined by NVLink
# How the work is split. "gathered once" keeps gathered weights until backward has used
# them (PyTorch's SHARD_GRAD_OP); "hsdp" shards over a machine, and every machine has
# all shards; "tensor 8" splits each matrix over the GPUs of a machine.
STRATEGIES = (
    "ddp", "zero1", "zero2", "fsdp", "fsdp gathered once", "hsdp", "fsdp offload",
    "fsdp + tensor 8",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A model, and how it is trained.

    Raises:
        ValueError: for what is unknown or does not divide.
    """

    model: Model
    gpus: int
    strategy: str = "fsdp"
    batch: int = 1  # sequences for each replica of the model at once
    tokens: int = 4096  # of a sequence
    checkpointing: float = 1.0  # share of the blocks that are computed twice
    microbatches: int = 1  # of `batch` sequences each, before the optimizer's step

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
        if self.microbatches < 1:
            raise ValueError("a step has at least one micro-batch")
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
    def shards(self) -> int:
        """Parts into which FSDP cuts weights, gradients and the optimizer's state."""
        return min(self.gpus, MACHINE) if self.strategy == "hsdp" else self.gpus

    @property
    def sharded(self) -> bool:
        """Whether this is FSDP, of whichever kind."""
        return self.strategy == "hsdp" or self.strategy.startswith("fsdp")

    @property
    def rows(self) -> int:
        """Tokens that a replica computes at once, in one micro-batch."""
        return self.batch * self.tokens

    @property
    def block(self) -> int:
        """Parameters of a block on one GPU, when gathered."""
        return self.model.block // self.tensor

    @property
    def root(self) -> int:
        """Parameters outside the blocks on one GPU, when gathered."""
        return self.model.root // self.tensor


def make_run(
    model: "str | Model",
    gpus: int,
    strategy: str = "fsdp",
    batch: int = 1,
    tokens: int = 4096,
    checkpointing: float = True,
    microbatches: int = 1,
) -> Run:
    """A `Run` of a model that may be given by its name."""
    model = find_model(model)
    share = float(checkpointing)
    return Run(model, gpus, strategy, batch, tokens, share, microbatches)
