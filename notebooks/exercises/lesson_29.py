"""The exercises of lesson 29: four incidents, each with its cause and its cure.

A cause is one of the names in the lesson's table. Cures are functions, and are run: in
two ranks with a GPU each, which end the ranks that were open before, or here.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from exercises.exercise import (
    NotYet,
    Wrong,
    call,
    exercise,
    must_be_callable,
    run,
    solution,
)
from exercises.in_ranks import in_ranks
from exercises.learning import flat, off, weights

TWO = 2  # ranks
CAUSES = (
    "own count", "not all call", "stuck rank", "bad batch", "uneven work", "slow link",
    "device not set", "loaded on GPU 0", "graph kept", "cache", "no optimizer state",
    "one shard", "data restarted",
)  # fmt: skip


def _must_be(cause, incident: str, right: str, refuted: dict[str, str]) -> None:
    """The cause of an incident.

    Args:
        cause: the learner's.
        incident: "E".
        right: the cause.
        refuted: other causes -> what was seen that speaks against them.

    Raises:
        Wrong: for another one, with what speaks against it.
    """
    if cause not in CAUSES:
        names = ", ".join(CAUSES)
        raise Wrong(f"incident {incident}: {cause!r} is not in the table: {names}")
    if cause != right:
        why = refuted.get(cause, "nothing that you see points to it")
        raise Wrong(f'incident {incident}: not "{cause}": {why}')


def _start() -> torch.device:
    """In a rank: its GPU."""
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _elsewhere() -> int:
    """In a rank: the most bytes that it had on GPUs of others."""
    own = torch.cuda.current_device()
    others = (gpu for gpu in range(torch.cuda.device_count()) if gpu != own)
    return sum(torch.cuda.max_memory_allocated(gpu) for gpu in others)


def _wait() -> None:
    dist.barrier(device_ids=[torch.cuda.current_device()])


# -- E and F: memory -------------------------------------------------------------------

_NOT_E = {
    "device not set": "then cuda:1 to cuda:3 would have nothing, and they are in use",
    "graph kept": "nobody has computed a loss",
    "uneven work": "ranks 1 to 3 have something on a GPU that is not theirs",
    "one shard": "each copy is a full model",
    "cache": "the bytes are allocated: tensors hold them",
}
_NOT_F = {
    "cache": "the bytes are allocated, not only reserved: tensors hold them",
    "loaded on GPU 0": "nothing was loaded from a file",
    "device not set": "a job of one rank would grow as well",
    "no optimizer state": "an optimizer's state is made once, and does not grow",
    "uneven work": "memory grows, and the work of an epoch is always the same",
}


def _load(function, folder: str) -> tuple[int, bool]:
    """Bytes on GPUs of others, and whether the values are those that were saved."""
    here = _start()
    torch.manual_seed(5)
    saved = nn.Linear(64, 64).state_dict()
    path = os.path.join(folder, "start.pt")
    if dist.get_rank() == 0:
        torch.save({name: value.to(here) for name, value in saved.items()}, path)
    _wait()
    state = call(function, path, when="load:")
    if not isinstance(state, dict) or state.keys() != saved.keys():
        raise Wrong("load returns the dictionary of the file")
    return _elsewhere(), all(torch.equal(state[n].cpu(), saved[n]) for n in saved)


def _validate(function) -> tuple[int, float, float]:
    """Bytes that stay after a validation, its result, and what is right."""
    here = _start()
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(here)
    batches = [
        (torch.randn(32, 64, device=here), torch.arange(32, device=here) % 10)
        for _ in range(2)
    ]
    with torch.no_grad():
        right = sum(cross_entropy(model(x), y).item() for x, y in batches) / 2
    history = [run(function, model, batches, when="validate:")]  # a warm-up
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    history.append(call(function, model, batches, when="validate:"))
    torch.cuda.synchronize()
    try:
        found = float(history[-1])
    except (TypeError, ValueError):
        raise Wrong("validate returns a number, or a tensor with one") from None
    return torch.cuda.memory_allocated() - before, found, right


@exercise(
    "29.1",
    hints=(
        "E: which of the GPUs does a rank use beside its own, and which word in the "
        "file says where its tensors were? F: which tensors does `history` keep alive, "
        "and through what?",
        "E: `torch.load` takes an argument that says where to put tensors. F: a loss "
        "that autograd made points to its graph, and the graph to the activations. "
        "Either there is no graph, or what you return does not point to it.",
    ),
)
def memory_incidents(cause_e, load, cause_f, validate) -> None:
    """Incidents E and F: a cause and a function for each."""
    must_be_callable(load)
    must_be_callable(validate)
    _must_be(cause_e, "E", "loaded on GPU 0", _NOT_E)
    with tempfile.TemporaryDirectory() as folder:
        found = in_ranks(TWO, _both, load, validate, folder, on="cuda")
    (_, own), (elsewhere, others) = (part for part, _ in found)
    if elsewhere:
        raise Wrong(f"load: rank 1 still puts {elsewhere:,} bytes on another GPU")
    if not (own and others):
        raise Wrong("load: the values are not those of the file")
    if cause_f == "later":
        raise NotYet("incident E is right; now name the cause of F")
    _must_be(cause_f, "F", "graph kept", _NOT_F)
    if isinstance(found[0][1], Exception):
        raise found[0][1]
    kept, result, right = found[0][1]
    if abs(result - right) > 1e-4:
        raise Wrong(f"validate: the mean loss is {right:.4f}, yours is {result:.4f}")
    if kept > 1024:
        raise Wrong(f"validate: {kept:,} bytes stay after each call")


def _both(load, validate, folder: str):
    """What they leave; a `validate` that is not written yet must not hide `load`."""
    own = _load(load, folder)
    try:
        return own, _validate(validate)
    except (NotYet, Wrong) as reason:
        return own, reason


@solution("29.1")
def solution_1():
    """E: A file remembers that its tensors were on `cuda:0`. `torch.load` puts them
    there again, on every rank. `map_location` says where they should be: on the CPU,
    or on the rank's own GPU.

    F: Each loss points to its autograd graph, and the graph keeps the activations for a
    `backward()` that never comes. `history` keeps the loss, so everything stays. Under
    `no_grad` there is no graph. (`.item()` in the loop would do, too: a Python number
    points to nothing.)
    """
    cause_e, cause_f = "loaded on GPU 0", "graph kept"

    def load(path):
        return torch.load(path, map_location="cpu")

    @torch.no_grad()
    def validate(model, batches):
        losses = [cross_entropy(model(x), y) for x, y in batches]
        return torch.stack(losses).mean()

    return cause_e, load, cause_f, validate


# -- G: a slow rank --------------------------------------------------------------------

MOST_UNEVEN = 1.1
_NOT_G = {
    "slow link": "the other messages are short; these are long because they wait",
    "not all call": "the step comes to its end",
    "stuck rank": "the step comes to its end, and each later one is as slow",
    "own count": "that changes values, not times",
    "device not set": "each rank computes on a GPU of its own",
    "loaded on GPU 0": "that takes memory, and no time in a step",
    "data restarted": "that changes values, not times",
}


@exercise(
    "29.2",
    hints=(
        "Who computes while the others wait, and how many tokens does this rank have?",
        "The list is sorted. How can the ranks take turns, so that each gets some long "
        "and some short sequences?",
    ),
)
def slow_rank(cause_g, share) -> None:
    """Incident G: the cause, and a function that divides sequences."""
    must_be_callable(share)
    _must_be(cause_g, "G", "uneven work", _NOT_G)
    generator = torch.Generator().manual_seed(28)
    short = torch.randint(16, 65, (32,), generator=generator)
    long_ones = short.clone()
    long_ones[::8] = torch.tensor([500, 510, 490, 505])  # all are rank 0's, or of r::4
    for lengths, ranks in (
        (torch.arange(16, 528, 16), 4),
        (long_ones, 4),
        (short.sort(descending=True).values, 2),
    ):
        _must_be_even(lengths, _shares(share, lengths, ranks))


def _shares(function, lengths: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """The positions of each rank."""
    found = []
    for rank in range(ranks):
        mine = call(function, lengths.clone(), rank, ranks)
        try:
            found.append(torch.as_tensor(mine).flatten().long())
        except (TypeError, ValueError, RuntimeError):
            raise Wrong("share returns the positions of sequences") from None
    return found


def _must_be_even(lengths: torch.Tensor, shares: list[torch.Tensor]) -> None:
    every = torch.cat(shares).sort().values
    if not torch.equal(every, torch.arange(len(lengths))):
        raise Wrong("together, the ranks must have each sequence once")
    if len({len(share) for share in shares}) > 1:
        counts = ", ".join(str(len(share)) for share in shares)
        raise Wrong(f"the ranks have {counts} sequences: give each equally many")
    work = [lengths[share].sum().item() for share in shares]
    if max(work) > MOST_UNEVEN * sum(work) / len(work):
        tokens = ", ".join(f"{tokens:,}" for tokens in work)
        raise Wrong(f"the ranks have {tokens} tokens, so some must wait")


@solution("29.2")
def solution_2():
    """The last rank has the longest sequences, and all others wait for its gradients.

    `chunk` cuts the sorted list into pieces: all short sequences, then all long ones.
    Take turns instead: the longest four sequences go to four ranks, and so on. In the
    timeline, ranks have 2,272 tokens on average, and the slowest has 3,808. So the step
    could take about 2272/3808 = 60 % of its time.

    Where sequences are padded to the longest of a batch, padding counts as work. Then
    sort over many batches, and let all ranks take short sequences in one step and long
    ones in another.
    """
    cause_g = "uneven work"

    def share(lengths, rank, ranks):
        return torch.argsort(lengths)[rank::ranks]

    return cause_g, share


# -- H: a checkpoint -------------------------------------------------------------------

STEPS = 4
_NOT_H = {
    "one shard": "then the parameters would differ right after loading",
    "data restarted": "then the gradients of the first step would differ",
    "own count": "then the gradients of the first step would differ",
    "bad batch": "the job that was not stopped has had the same batch",
    "loaded on GPU 0": "that takes memory, and changes no value",
    "graph kept": "that takes memory, and changes no value",
}


def _rate(step: int) -> float:
    return 0.7**step


def _objects(here: torch.device):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(here)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _rate)
    return model, optimizer, scheduler


def _steps(objects, first: int, here: torch.device) -> None:
    model, optimizer, scheduler = objects
    for step in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 16, generator=generator).to(here)
        optimizer.zero_grad()
        cross_entropy(model(x), torch.arange(8, device=here) % 4).backward()
        optimizer.step()
        scheduler.step()


def _resume(save, load, folder: str):
    """What is left of a run that was cut: see the keys of the dictionary."""
    here = _start()
    path = os.path.join(folder, "checkpoint.pt")
    without = _objects(here)
    _steps(without, 0, here)
    if dist.get_rank() == 0:
        run(save, path, *without, when="save:")
    _wait()
    if not os.path.exists(path):
        raise NotYet("your save writes no file so far")
    resumed = _objects(here)
    run(load, path, *resumed, when="load:")
    found = {
        "parameters": off(weights(resumed[0]), weights(without[0])),
        "moments": _moments(resumed[1]) - _moments(without[1]),
        "rate": resumed[1].param_groups[0]["lr"] / without[1].param_groups[0]["lr"],
        "elsewhere": _elsewhere(),
    }
    if resumed[0][0].weight.device != here:
        raise Wrong("load moves the model to another GPU")
    for objects in (without, resumed):
        _steps(objects, STEPS, here)
    found["end"] = off(weights(resumed[0]), weights(without[0]))
    return found


def _moments(optimizer) -> float:
    """Their size, 0 if there are none."""
    states = [s["exp_avg"] for s in optimizer.state.values() if "exp_avg" in s]
    return flat(states).norm().item() if states else 0.0


@exercise(
    "29.3",
    hints=(
        "The first gradient after loading is right, and the first update is not. Which "
        "objects stand between a gradient and an update?",
        "Each of the three objects has `state_dict` and `load_state_dict`. And "
        "incident E may happen again: where does `torch.load` put tensors?",
    ),
)
def resume_incident(cause_h, save, load) -> None:
    """Incident H: the cause, and two functions."""
    must_be_callable(save)
    must_be_callable(load)
    _must_be(cause_h, "H", "no optimizer state", _NOT_H)
    with tempfile.TemporaryDirectory() as folder:
        found = in_ranks(TWO, _resume, save, load, folder, on="cuda")
    for rank, one in enumerate(found):
        if one["parameters"] > 1e-6:
            raise Wrong(f"on rank {rank} the parameters are not those of the file")
        if abs(one["moments"]) > 1e-6:
            raise Wrong(f"on rank {rank} AdamW's moments are not those of before")
        if abs(one["rate"] - 1) > 1e-6:
            times = one["rate"]
            raise Wrong(f"the learning rate is {times:.1f} times that of before")
        if one["end"] > 1e-5:
            raise Wrong(
                "at first all is right, and some steps later it is not: which of the "
                "three objects still thinks that it is at step 0?"
            )
        if one["elsewhere"]:
            raise Wrong(
                f"the values are right, but rank {rank} puts {one['elsewhere']:,} "
                "bytes on another GPU: incident E again"
            )


@solution("29.3")
def solution_3():
    """The next step depends on the model, on AdamW's two moments and its step count,
    and on the learning rate. All three objects belong into the file, and `load` gives
    each its own part.

    `map_location` keeps the tensors away from GPU 0. `load_state_dict` of the optimizer
    then moves the moments to the GPU of their parameters by itself.
    """
    cause_h = "no optimizer state"

    def save(path, model, optimizer, scheduler):
        objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        torch.save({name: o.state_dict() for name, o in objects.items()}, path)

    def load(path, model, optimizer, scheduler):
        states = torch.load(path, map_location="cpu")
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])
        scheduler.load_state_dict(states["scheduler"])

    return cause_h, save, load
