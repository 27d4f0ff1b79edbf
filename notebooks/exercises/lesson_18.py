"""The exercises of lesson 18: what makes room, a norm in parts, what to shard.

Two of them run the learner's function in two real ranks, which end the ranks that were
open before.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from exercises.counted import counted, number, word
from exercises.exercise import (
    NotYet,
    Wrong,
    call,
    exercise,
    must_be_callable,
    run,
    solution,
)
from exercises.in_ranks import device, in_ranks
from exercises.learning import flat, weights
from exercises.results import near

TWO = 2  # ranks


_GB = 10**9
_RUNS = (  # parameters, those of a block, GPUs, bytes of activations
    (8 * _GB, 220_000_000, 64, 30 * _GB),
    (8 * _GB, 220_000_000, 4, 26 * _GB),
    (10 * _GB, _GB, 32, 12 * _GB),
    (4 * _GB, 600_000_000, 8, 5 * _GB),
    (70 * _GB, 860_000_000, 32, 20 * _GB),
)
_HALVES = {"gpus": "the shards", "tokens": "activations", "groups": "the four blocks"}


@exercise(
    "18.1",
    hints=(
        "Three things fill a GPU. Which of them does each change make half as large, "
        "and which does it leave as they are?",
        "Shards take 16 bytes for each parameter, divided by the GPUs. Four blocks "
        "with 4 bytes for each parameter are on every GPU, and so are activations.",
    ),
)
def make_room(function) -> None:
    """Each change halves one term; the largest term differs from run to run."""
    for parameters, block, gpus, activations in _RUNS:
        answer = call(function, parameters, block, gpus, activations)
        terms = {
            "gpus": 16 * parameters / gpus,
            "tokens": activations,
            "groups": 16 * block,
        }
        if (said := word(answer)) not in terms:
            raise Wrong(f'return "GPUs", "tokens" or "groups", not {answer!r}')
        if said != max(terms, key=terms.get):
            filled = ", ".join(f"{_HALVES[w]} {terms[w] / _GB:.1f}" for w in terms)
            raise Wrong(
                f"of {parameters / _GB:g} billion parameters, {block / _GB:g} billion "
                f"in a block, on {gpus} GPUs, a GPU has in GB: {filled}; "
                f'"{answer}" makes only {_HALVES[said]} half as large'
            )


@solution("18.1")
def solution_1():
    """Each change makes one of three terms half as large, so look for the largest.

    Shards are the only term that the number of GPUs divides. Every GPU has activations
    of its own tokens, and four blocks in full, however many GPUs there are. With 64
    GPUs, shards are mostly small, and twice as many GPUs change next to nothing.
    """

    def make_room(parameters, block, gpus, activations):
        halved = {
            "GPUs": 16 * parameters / gpus,
            "tokens": activations,
            "groups": 4 * 4 * block,
        }
        return max(halved, key=halved.get)

    return make_room


# -- two real ranks --------------------------------------------------------------------


def _gradient() -> torch.Tensor:
    """The whole gradient: its norm is 13, that of its halves 5 and 12.

    Rank 0 has numbers in both of its parts, [3, 0] and [4].
    """
    return torch.tensor([3.0, 0.0, 4.0, 0.0, 0.0, 12.0])


def _clip(function, most: float) -> tuple[float, torch.Tensor]:
    """What this rank's function returned, and this rank's parts afterwards."""
    half = _gradient().chunk(TWO)[dist.get_rank()].to(device())
    parts = [half[:2].clone(), half[2:].clone()]
    given = list(parts)
    norm = number(call(function, parts, most), "the norm")
    return norm, flat(given)


@exercise(
    "18.2",
    hints=(
        "The norm is the root of a sum over all numbers of the whole gradient. Which "
        "part of this sum can a rank compute alone, and which collective brings the "
        "total to all ranks?",
        "Norms of parts cannot be added, and neither can they be compared with `most`. "
        "All ranks must decide with the same number whether to scale, and scaling must "
        "change the tensors that they were given.",
    ),
)
def clip(function) -> None:
    """The norm of a gradient of which each rank has parts."""
    must_be_callable(function)
    (norm, low), (other, high) = in_ranks(TWO, _clip, function, 1.0)
    if abs(norm - other) > 1e-4:
        raise Wrong(
            f"the ranks disagree on the norm ({norm:g} and {other:g}), and would "
            "scale differently: ask all ranks"
        )
    mistakes = {
        193**0.5: "norms of a rank's parts cannot be added; add up their squares",
        17.0: "norms cannot be added; add up the squares, then take the root",
        12.0: "the whole norm is not the larger of the ranks' norms",
        169.0: "that is the sum of squares; the root is missing",
        119.0: "add up the squares of all parts, then take one root",
        (169 / 2) ** 0.5: "squares are added up over the ranks, not averaged",
        1.0: "return the norm before the clipping",
    }
    why = f"the whole norm is 13, yours is {norm:g}"
    counted(norm, 13, mistakes, why, near=1e-4)
    after = torch.cat([low, high])
    if torch.equal(after, _gradient()):
        raise Wrong("the parts are unchanged: scale them in place, as with `mul_`")
    if not near(after, _gradient() / 13, rtol=0, atol=1e-4):
        raise Wrong(
            f"with most=1 the whole gradient's norm is {after.norm():g} afterwards"
        )
    (_, low), (_, high) = in_ranks(TWO, _clip, function, 6.5)
    if not near(torch.cat([low, high]), _gradient() / 2, rtol=0, atol=1e-4):
        raise Wrong(
            "with most=6.5 one rank scaled and the other did not: decide by the whole "
            "norm, not by the rank's own"
        )
    (_, low), (_, high) = in_ranks(TWO, _clip, function, 20.0)
    if not torch.equal(torch.cat([low, high]), _gradient()):
        raise Wrong("with most=20 there is nothing to scale: 13 is less")


@solution("18.2")
def solution_2():
    """Squares can be added over the ranks, norms cannot.

    Each rank adds up the squares of its own parts. One all-reduce of a single number
    makes the sum over all ranks, and its root is the norm of the whole gradient.

    All ranks have the same norm now, so all make the same decision and scale by the
    same factor. A rank that asked its own norm would leave its parts alone while
    another one scales, and the gradient would change its direction.

    `mul_` works in place. `part = part * factor` would make a new tensor, and the
    gradient would stay as it was.
    """

    def clip(parts, most):
        squares = sum(part.square().sum() for part in parts)
        dist.all_reduce(squares)
        norm = squares.sqrt()
        if norm > most:
            for part in parts:
                part.mul_(most / norm)
        return norm

    return clip


# -- 18.3 ------------------------------------------------------------------------------

WIDTH, BLOCKS, WORDS = 32, 6, 20
MOST_GATHERS = 2 + BLOCKS


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class _Model(nn.Module):
    """The model of the exercise, always with the same weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _steps(model: nn.Module, rank: int, size: int, where: str, messages=None) -> None:
    """Three steps on this rank's rows; `messages` notes the last one."""
    generator = torch.Generator().manual_seed(15)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        x = torch.randint(0, WORDS, (32,), generator=generator)[rank::size].to(where)
        with messages if messages and step == 2 else contextlib.nullcontext():
            cross_entropy(model(x), (x + 1) % WORDS).backward()
        optimizer.step()
        optimizer.zero_grad()


def _train(function):
    """Names of parameters that are not sharded, messages, whole weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    from helpers import Messages

    mesh = init_device_mesh(device(), (TWO,))
    model = run(function, _Model(), mesh)
    if not isinstance(model, nn.Module):
        return None
    plain = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
    if plain:
        return plain, [], None
    messages = Messages()
    run(_steps, model, dist.get_rank(), TWO, device(), messages)
    log = [
        (m.name, m.nbytes * (m.ranks if "gather" in m.name else 1))
        for m in messages.log
    ]
    return plain, log, flat(p.full_tensor() for p in model.parameters())


_MEANINGS = {
    "Invariant encountered": (
        "call fully_shard for the inner modules first and for the whole model last"
    )
}


@exercise(
    "18.3",
    hints=(
        "Look at the timeline of `fully_shard`. How many "
        "all-gathers does a module with its own `fully_shard` cost in a step, and how "
        "many does the root cost?",
        "One call for each block makes too many all-gathers, and one call for the "
        "whole model makes a message that is too large. Look for groups in between. "
        "Which call takes the embedding and the head, and does it come first or last?",
    ),
)
def shard_it(function) -> None:
    """Which modules are gathered together, counted; and trained as one process does."""
    must_be_callable(function)
    result = in_ranks(TWO, _train, function, meanings=_MEANINGS)[0]
    if result is None:
        raise NotYet("your function returns no model so far")
    plain, log, found = result
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
    model = _Model()
    _steps(model, 0, 1, "cpu")
    if not near(found, weights(model), rtol=0, atol=1e-4):
        raise Wrong("the weights are not those of one process after three steps")


@solution("18.3")
def solution_3():
    """What one `fully_shard` takes is gathered in one message.

    Each such group costs two all-gathers in a step, one in the forward pass and one in
    the backward pass. The root costs one, because it stays whole in between.

        all-gathers = 2 · groups + 1

    Six groups of one block make 13, which is too many. Three groups of two blocks make
    7, and no message is larger than two blocks. The list tells `fully_shard` to treat
    two modules as one group.

    The last call is for the whole model. The root takes what no other call has taken,
    here the embedding and the head. Without this call nobody would average their
    gradients.

    Another answer is one call for each block with `reshard_after_forward=False`: then
    no block is gathered again, and 6 + 1 all-gathers remain. A rank pays with memory,
    because the whole model is there at the end of the forward pass.
    """

    def shard_it(model, mesh):
        for first in range(0, len(model.blocks), 2):
            pair = [model.blocks[first], model.blocks[first + 1]]
            fully_shard(pair, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    return shard_it
