"""What can be seen in one run alone, because in training it is not right.

Equal dropout on different data, a sampler that shuffles an epoch twice, gradients that
no optimizer uses, memory on another rank's GPU.
"""

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from simgpu._prove.compare import Finding
from simgpu._prove.record import Mask, RankRecord, Step

_CHANCE = 1e-9  # that dropout takes the same elements without a cause


def look(records: list[RankRecord]) -> Iterator[Finding]:
    """Everything of this kind in a run.

    Args:
        records: of every rank.
    """
    for check in (_ties, _dropout, _epochs, _optimizers, _devices):
        if (found := check(records)) is not None:
            yield found


def _ties(records: list[RankRecord]) -> Finding | None:
    if records[0].untied is not None:
        first, second = records[0].untied
        text = f"it was one parameter with {first} when the model was made"
        hint = (
            "Something has replaced one of them, such as load_state_dict(assign=True): "
            "tie them again, before the model is sharded."
        )
        return Finding(len(records), 0, "parameters", second, text, hint)
    return None


def _dropout(records: list[RankRecord]) -> Finding | None:
    for number in range(min(len(record.steps) for record in records)):
        for one, other in combinations(records, 2):
            given = one.steps[number].inputs, other.steps[number].inputs
            pairs = zip(
                one.steps[number].masks, other.steps[number].masks, strict=False
            )
            for mask, its in pairs:
                if mask.shape != its.shape:
                    continue
                same = mask.dropped == its.dropped
                if same == _same_input(mask, its):
                    continue
                # few elements may be dropped alike; ranks with other samples may drop
                # others of what does not depend on samples, such as positions
                if mask.chance > _CHANCE if same else given[0] != given[1]:
                    continue
                who = f"ranks {one.rank} and {other.rank}"
                text = f"{who} drop the same elements of different activations"
                hint = "Equal seeds: add the rank to the seed after the model is made."
                if not same:
                    text = f"{who} drop different elements of the same activations"
                    hint = "Copies of one activation need one seed."
                return Finding(len(records), number, "dropout", mask.module, text, hint)
    return None


def _same_input(mask: Mask, its: Mask) -> bool:
    return bool(
        np.isclose(mask.on.total, its.on.total, rtol=1e-4)
        and np.isclose(mask.on.squares, its.on.squares, rtol=1e-4)
    )


def _epochs(records: list[RankRecord]) -> Finding | None:
    if repeated := records[0].repeated_epochs:
        text = f"a DistributedSampler has shuffled epoch {repeated[0]} more than once"
        hint = "Call sampler.set_epoch(epoch) before each epoch."
        return Finding(len(records), None, "epoch", "", text, hint)
    return None


def _optimizers(records: list[RankRecord]) -> Finding | None:
    for number, step in enumerate(records[0].steps):
        for name in step.without_optimizer:
            steps = records[0].steps  # of two players, each has an optimizer
            if any(name in other.used for other in steps) or _changed(steps, name):
                continue
            text = "it has a gradient, and the optimizer does not have it"
            hint = "Make the optimizer after the model is sharded, moved or wrapped."
            return Finding(len(records), number, "optimizer", name, text, hint)
    return None


def _changed(steps: list[Step], name: str) -> bool:
    """Whether something else updates it, such as a master copy."""
    known = [step.before.get(name) for step in steps]
    known = [a for a in [*known, *(s.later.get(name) for s in steps)] if a is not None]
    return any((array != known[0]).any() for array in known)


def _devices(records: list[RankRecord]) -> Finding | None:
    for record in records:
        for gpu, used in record.elsewhere.items():
            text = f"rank {record.rank} has {used:,} bytes on cuda:{gpu}"
            hint = (
                "torch.cuda.set_device(LOCAL_RANK) before anything is made, and "
                "map_location where something is loaded."
            )
            return Finding(len(records), None, "device", f"cuda:{gpu}", text, hint)
    return None
