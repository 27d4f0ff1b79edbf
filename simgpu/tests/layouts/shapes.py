"""What a row of a recording says about a run."""

from typing import NamedTuple


class Layout(NamedTuple):
    """A model, and how it is spread over the ranks. Sizes are numbers of elements."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocab: int
    tokens: int  # of a sequence
    micro: int  # sequences of a micro-batch
    accumulate: int  # micro-batches of a step
    dp: int
    pp: int
    tp: int
    zero: int = 0  # 1: the optimizer's states are spread over the ranks of dp
    tied: bool = False  # the head has the embedding's weights
    card: str = "H100"
    node: int = 8  # ranks of a node
    network: str = "3200 Gbit/s"  # of a node
    trainer: str = "nanotron"
    kv_heads: int = 0  # 0: as many as heads

    @property
    def gpus(self) -> int:
        return self.dp * self.pp * self.tp

    @property
    def step_tokens(self) -> int:
        return self.tokens * self.micro * self.accumulate * self.dp
