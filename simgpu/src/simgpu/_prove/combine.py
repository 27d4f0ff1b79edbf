"""What the ranks have noted, put together: one step as if one process had done it.

What every rank has whole is taken once, what was cut by hand is put together, and what
is a part of the batch is added up. `Whole` says as well where ranks disagree that
should not.
"""

from dataclasses import dataclass, field

import numpy as np

from simgpu._prove.inputs import Part
from simgpu._prove.record import Moments, RankRecord, Step


@dataclass
class Whole:
    """One step of all ranks, together.

    Attributes:
        inputs: what all ranks have given to the model, by name.
        outputs: per module, of all ranks.
        losses: of each rank, over its micro-batches.
        norms: of each rank; empty if nothing was clipped.
        arrays: of each of `KINDS`, by name: the mean over ranks, or put together.
        apart: (kind, name) -> how far ranks are from one another (a norm).
        sizes: (kind, name) -> the largest norm of a rank's own array.
        settings: of rank 0.
    """

    inputs: dict[str, list[Part]]
    outputs: dict[str, list[Moments]]
    losses: list[float]
    norms: list[float]
    settings: dict[tuple[str, str], float]
    arrays: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    apart: dict[tuple[str, str], float] = field(default_factory=dict)
    sizes: dict[tuple[str, str], float] = field(default_factory=dict)


KINDS = "before", "raw", "used", "after", "later", "buffers"


def combine(records: list[RankRecord], wholes: dict[str, np.ndarray]) -> list[Whole]:
    """Each step of all ranks as one.

    Args:
        records: of every rank.
        wholes: the arrays at the start of one rank, by name; what has another shape is
            put together, in the order in which the ranks' slices are in them.
    """
    steps = list(zip(*(record.steps for record in records), strict=False))
    orders: dict[str, np.ndarray] = {}
    for name, whole in wholes.items() if steps else ():
        arrays = [s.before[name] for s in steps[0] if name in s.before]
        if (dim := _cut(arrays, whole.shape)) is not None:
            order = _order(np.concatenate(arrays, axis=dim), whole, dim)
            orders |= {} if order is None else {name: order}
    return [_combine(list(of_all), wholes, orders) for of_all in steps]


def _combine(
    steps: list[Step], wholes: dict[str, np.ndarray], orders: dict[str, np.ndarray]
) -> Whole:
    names = dict.fromkeys(name for step in steps for name in step.outputs)
    given = dict.fromkeys(name for step in steps for name in step.inputs)
    whole = Whole(
        inputs={n: [p for s in steps for p in s.inputs.get(n, [])] for n in given},
        outputs={n: [s.outputs[n] for s in steps if n in s.outputs] for n in names},
        losses=[sum(step.losses) for step in steps],
        norms=[step.norm for step in steps if step.norm is not None],
        settings=steps[0].settings,
    )
    for kind in KINDS:
        found = [getattr(step, kind) for step in steps]
        whole.arrays[kind] = {}
        for name in dict.fromkeys(name for arrays in found for name in arrays):
            arrays = [some[name] for some in found if name in some]
            wanted = wholes.get(name, arrays[0]).shape
            together = _together(arrays, wanted, orders.get(name))
            whole.arrays[kind][name] = together
            if all(array.shape == wanted for array in arrays):
                mean = whole.arrays[kind][name]
                apart = max(_norm(array - mean) for array in arrays)
                whole.apart[kind, name] = apart
            whole.sizes[kind, name] = max(map(_norm, arrays))
    return whole


def _together(
    arrays: list[np.ndarray], wanted: tuple[int, ...], order: np.ndarray | None
) -> np.ndarray:
    """The mean of whole arrays; slices one after the other along the cut dimension."""
    if all(array.shape == wanted for array in arrays):
        return np.mean(arrays, axis=0)
    dim = _cut(arrays, wanted)
    if dim is None:
        return arrays[0]
    joined = np.concatenate(arrays, axis=dim)
    return joined if order is None else joined.take(order, axis=dim)


def _cut(arrays: list[np.ndarray], wanted: tuple[int, ...]) -> int | None:
    """The dimension along which ranks have slices of the whole."""
    if {array.ndim for array in arrays} != {len(wanted)}:
        return None
    for dim, size in enumerate(wanted):
        rests = {a.shape[:dim] + a.shape[dim + 1 :] for a in arrays}
        if rests == {wanted[:dim] + wanted[dim + 1 :]}:
            if sum(array.shape[dim] for array in arrays) == size:
                return dim
    return None


def _order(joined: np.ndarray, whole: np.ndarray, dim: int) -> np.ndarray | None:
    """Where the slices of the whole are, if ranks have them in another order.

    So it is where a rank has its heads of queries, keys and values in one weight.
    """
    ours, its = (
        [row.tobytes() for row in np.moveaxis(array, dim, 0)]
        for array in (joined, whole)
    )
    where = {row: number for number, row in enumerate(ours)}
    if ours == its or len(where) < len(ours) or where.keys() != set(its):
        return None
    return np.array([where[row] for row in its])


def together(moments: list[Moments], count: int) -> Moments | None:
    """The outputs of all ranks as those of one process, which had `count` elements.

    Ranks have parts of the batch (their counts add up to it), copies of the whole, or,
    on a mesh, copies of parts. None: neither, so nothing can be said.
    """
    total = sum(m.count for m in moments)
    copies, rest = divmod(total, count) if count else (0, 1)
    if copies == 0 or rest:
        return None
    return Moments(
        count,
        sum(m.total for m in moments) / copies,
        sum(m.squares for m in moments) / copies,
        sum(m.cubes for m in moments) / copies,
        sum(m.size for m in moments) / copies,
    )


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array))
