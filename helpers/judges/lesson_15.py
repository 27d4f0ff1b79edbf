"""Judges of the exercises of lesson 15.

Two of them run the learner's function in two real ranks, which end the ranks that were
open before.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from helpers.check import NotYet, Wrong, exercise
from helpers.judges.real_ranks import in_ranks

TWO = 2  # ranks


# -- 15.1 ------------------------------------------------------------------------------

_FEWEST = {"ZeRO-1": 20, "ZeRO-2": 6, "ZeRO-3": 4}
_MISTAKES = {
    ("ZeRO-1", 19): "19 GPUs need 60.2 GB each: round up",
    ("ZeRO-2", 5): "5 GPUs need 62.4 GB each: round up",
    ("ZeRO-3", 3): "3 GPUs need 69.3 GB each: 16 bytes a parameter, 60 GB, rounded up",
    ("ZeRO-1", 13): "the float32 copy of the weights belongs to the optimizer's bytes",
    ("ZeRO-2", 4): "the float32 copy of the weights counts, and of 80 GB 60 are left",
    ("ZeRO-1", 6): "60 GB are left for this, not 80",
    ("ZeRO-3", 6): "at this stage the weights are divided as well",
    ("ZeRO-2", 20): "at this stage the gradients are divided as well",
    ("ZeRO-1", 4): "at this stage weights and gradients are whole on each GPU",
}


@exercise("15.1")
def fewest_gpus(zero_1, zero_2, zero_3) -> None:
    """13 billion parameters, 2 + 2 + 12 bytes each, 60 GB."""
    for (stage, right), answer in zip(
        _FEWEST.items(), (zero_1, zero_2, zero_3), strict=True
    ):
        if not isinstance(answer, (int, float)):
            raise Wrong(
                f"{stage}: give a number of GPUs, not a {type(answer).__name__}"
            )
        if answer == right:
            continue
        if why := _MISTAKES.get((stage, answer)):
            raise Wrong(f"{stage}: {why}")
        whole = {"ZeRO-1": 4, "ZeRO-2": 2, "ZeRO-3": 0}[stage]
        raise Wrong(
            f"{stage}: of each parameter's 16 bytes every GPU holds {whole} whole, and "
            "a part of the others"
        )


# -- two real ranks --------------------------------------------------------------------


def _device() -> str:
    return "cuda" if "nccl" in dist.get_backend() else "cpu"


# -- 15.2 ------------------------------------------------------------------------------


def _gradient() -> torch.Tensor:
    """The whole gradient: its norm is 13, that of its halves 5 and 12."""
    return torch.tensor([3.0, 4.0, 0.0, 0.0, 0.0, 12.0])


def _clip(function, most: float):
    """What this rank's function returned, and this rank's parts afterwards."""
    half = _gradient().chunk(TWO)[dist.get_rank()].to(_device())
    parts = [half[:2].clone(), half[2:].clone()]
    given = list(parts)
    norm = function(parts, most)
    norm = None if norm is None else float(norm)
    return norm, torch.cat([p.cpu() for p in given])


@exercise("15.2")
def clip(function) -> None:
    """The norm of a gradient of which each rank has parts."""
    (norm, low), (other, high) = in_ranks(TWO, _clip, function, 1.0)
    if norm is None or other is None:
        raise NotYet("your function returns nothing so far")
    if abs(norm - other) > 1e-4:
        raise Wrong(
            f"the ranks disagree on the norm ({norm:g} and {other:g}), and would "
            "scale differently: ask all ranks"
        )
    reasons = {
        17.0: "norms cannot be added; add up the squares, then take the root",
        12.0: "the whole norm is not the larger of the ranks' norms",
        169.0: "that is the sum of squares; the root is missing",
        119.0: "add up the squares of all parts, then take one root",
        (169 / 2) ** 0.5: "squares are added up over the ranks, not averaged",
        1.0: "return the norm before the clipping",
    }
    for value, why in reasons.items():
        if abs(norm - value) < 1e-3:
            raise Wrong(why)
    if abs(norm - 13) > 1e-3:
        raise Wrong(f"the whole norm is 13, yours is {norm:g}")
    after = torch.cat([low, high])
    if torch.equal(after, _gradient()):
        raise Wrong("the parts are unchanged: scale them in place, as with `mul_`")
    if (after - _gradient() / 13).abs().max() > 1e-4:
        raise Wrong(
            f"with most=1 the whole gradient's norm is {after.norm():g} afterwards"
        )
    (_, low), (_, high) = in_ranks(TWO, _clip, function, 6.5)
    if (torch.cat([low, high]) - _gradient() / 2).abs().max() > 1e-4:
        raise Wrong(
            "with most=6.5 one rank scaled and the other did not: decide by the whole "
            "norm, not by the rank's own"
        )
    (norm, low), (_, high) = in_ranks(TWO, _clip, function, 20.0)
    if not torch.equal(torch.cat([low, high]), _gradient()):
        raise Wrong("with most=20 there is nothing to scale: 13 is less")


# -- 15.3 ------------------------------------------------------------------------------

WIDTH, BLOCKS, WORDS = 32, 6, 20
MOST_GATHERS = 2 + BLOCKS


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _steps(model: nn.Module, rank: int, size: int, device: str, messages=None) -> None:
    """Three steps on this rank's rows; `messages` notes the last one."""
    generator = torch.Generator().manual_seed(15)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        x = torch.randint(0, WORDS, (32,), generator=generator)[rank::size].to(device)
        with messages if messages and step == 2 else contextlib.nullcontext():
            cross_entropy(model(x), (x + 1) % WORDS).backward()
        optimizer.step()
        optimizer.zero_grad()


def _train(function):
    """Names of parameters that are not sharded, messages, whole weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    from helpers import Messages

    torch.manual_seed(0)
    model = function(_Model(), init_device_mesh(_device(), (dist.get_world_size(),)))
    if not isinstance(model, nn.Module):
        return None
    plain = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
    if plain:
        return plain, [], []
    messages = Messages()
    _steps(model, dist.get_rank(), dist.get_world_size(), _device(), messages)
    weights = [p.detach().full_tensor().cpu() for p in model.parameters()]
    log = [
        (m.name, m.nbytes * (m.ranks if "gather" in m.name else 1))
        for m in messages.log
    ]
    return plain, log, weights


_MEANINGS = {
    "Invariant encountered": (
        "call fully_shard for the inner modules first and for the whole model last"
    )
}


@exercise("15.3")
def shard_it(function) -> None:
    """Which modules are gathered together, counted; and trained as one process does."""
    result = in_ranks(TWO, _train, function, meanings=_MEANINGS)[0]
    if result is None:
        raise NotYet("your function returns no model so far")
    plain, log, weights = result
    if len(plain) == len(list(_Model().parameters())):
        raise Wrong("no parameter is sharded")
    if plain:
        raise Wrong(
            f"{plain[0]} is not sharded, so nobody averages its gradient: call "
            "fully_shard for the whole model as well, at last"
        )
    block = sum(p.nbytes for p in _Block().parameters())
    largest = max(nbytes for _, nbytes in log)
    gathers = sum(name == "all_gather" for name, _ in log)
    if largest > 2 * block:
        raise Wrong(
            f"a message carries {largest:,} bytes, which is {largest / block:.1f} "
            "blocks: what one fully_shard takes is gathered at once"
        )
    if gathers > MOST_GATHERS:
        raise Wrong(
            f"{gathers} all-gathers in a step, at most {MOST_GATHERS}: each module "
            "with a fully_shard of its own that is not kept whole costs two, one "
            "forward and one backward; the root costs one"
        )
    torch.manual_seed(0)
    model = _Model()
    _steps(model, 0, 1, "cpu")
    for own, other in zip(weights, model.parameters(), strict=True):
        if own.shape != other.shape or (own - other).abs().max() > 1e-4:
            raise Wrong("the weights are not those of one process after three steps")
