"""What one rank notes in each step: plain arrays and numbers that can be sent.

A step ends where the forward pass after an optimizer step begins. Everything that can
be larger than a sentence is a numpy array in float64, on the host.
"""

from dataclasses import dataclass, field

import numpy as np

from simgpu._prove.inputs import Part


@dataclass
class Moments:
    """What is left of the outputs of a module: enough to add them up over ranks.

    Attributes:
        count: elements.
        total: their sum.
        squares: the sum of their squares.
        cubes: the sum of their cubes: batch norm makes the two before always the same.
        size: the sum of the absolute values of the cubes.
    """

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    cubes: float = 0.0
    size: float = 0.0

    def add(self, values: np.ndarray) -> None:
        """Count these values as well."""
        self.count += values.size
        self.total += float(values.sum())
        self.squares += float(np.square(values).sum())
        self.cubes += float((values**3).sum())
        self.size += float(np.abs(values**3).sum())

    def distance(self, other: "Moments") -> float:
        """How far other outputs are, as a part of the size of these."""
        if not self.squares:
            return float(other.squares > 0)
        return max(
            abs(self.total - other.total) / np.sqrt(self.count * self.squares),
            abs(self.squares - other.squares) / self.squares,
            abs(self.cubes - other.cubes) / self.size,
        )


@dataclass
class Mask:
    """One call of dropout: where, on what, and which elements it would drop.

    Attributes:
        module: before it.
        shape, on: of what it was given.
        dropped: a hash of the elements.
        chance: that two generators would drop the same ones.
    """

    module: str
    shape: tuple[int, ...]
    on: Moments
    dropped: int
    chance: float


@dataclass
class Step:
    """One step of one rank; dictionaries are by the name of the module or parameter.

    Attributes:
        inputs: what the model was given, by name; one part for each call.
        outputs: of each module in the order of the first calls, without recomputation.
        losses: on which backward was called, one for each micro-batch.
        masks: what dropout would have dropped.
        before: the parameters when the step begins.
        buffers: of the modules, when the step ends.
        raw: gradients when the last backward has ended.
        norm: what `clip_grad_norm_` has returned; None if it was not called.
        used: gradients that the optimizer was given.
        settings: numbers of the optimizer's groups: ("group 0", "lr") -> 0.1.
        after: the parameters when the optimizer has updated them.
        later: those when the next step begins, or the program ends.
        without_optimizer: parameters that have a gradient and no optimizer.
    """

    inputs: dict[str, list[Part]] = field(default_factory=dict)
    outputs: dict[str, Moments] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    before: dict[str, np.ndarray] = field(default_factory=dict)
    buffers: dict[str, np.ndarray] = field(default_factory=dict)
    raw: dict[str, np.ndarray] = field(default_factory=dict)
    norm: float | None = None
    used: dict[str, np.ndarray] = field(default_factory=dict)
    settings: dict[tuple[str, str], float] = field(default_factory=dict)
    after: dict[str, np.ndarray] = field(default_factory=dict)
    later: dict[str, np.ndarray] = field(default_factory=dict)
    without_optimizer: list[str] = field(default_factory=list)


@dataclass
class RankRecord:
    """All that one rank has noted in a run.

    Attributes:
        rank: its number.
        steps: in their order, at most as many as were asked for.
        repeated_epochs: epochs that a `DistributedSampler` has shuffled twice.
        elsewhere: GPU -> bytes that the rank has on it, of GPUs that are not its own.
        untied: two parameters that were one when the model was made.
    """

    rank: int
    steps: list[Step] = field(default_factory=list)
    repeated_epochs: list[int] = field(default_factory=list)
    elsewhere: dict[int, int] = field(default_factory=dict)
    untied: tuple[str, str] | None = None
