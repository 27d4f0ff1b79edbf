"""What the model was given, noted so that it does not matter how it was cut.

A sample need not be a row. Ranks may have parts of every sequence, in any order, or the
batch may be the second dimension, so values are counted wherever they lie. Slices along
each dimension are noted as well: they say what is missing.

Leaves out: what is no data, such as masks (two values) and numbers of a batch (lengths,
`cu_seqlens`); they may be others on each rank.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

_BITS = 2**64
_MASK = 2  # values that a mask has


@dataclass(frozen=True)
class Part:
    """A tensor that a rank has given to the model in one call.

    Attributes:
        shape: of the tensor.
        total: the hashes of its elements, added up: equal wherever they lie.
        slices: the hashes of the slices along each dimension.
        data: whether it may be data, and is no mask.
    """

    shape: tuple[int, ...]
    total: int
    slices: tuple[tuple[int, ...], ...]
    data: bool

    @property
    def count(self) -> int:
        """Its elements."""
        return int(np.prod(self.shape))


@dataclass(frozen=True)
class Difference:
    """Of what the model was given.

    Attributes:
        text: a sentence.
        hint: where such a thing often comes from.
        certain: samples differ; otherwise they could not be compared.
    """

    text: str
    hint: str
    certain: bool


def tensors_in(value: object, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor in dictionaries and lists, as a batch often is, with its name."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tensors_in(inner, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from tensors_in(inner, f"{name}.{number}")


def part_of(values: np.ndarray) -> Part:
    """Note a tensor.

    Args:
        values: in any type; float32 is compared, as a rank may have rounded them since.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    hashes = _mixed(bits.astype(np.uint64))
    slices = []
    for dim, size in enumerate(values.shape):
        rows = np.moveaxis(hashes, dim, 0).reshape(size, hashes.size // max(size, 1))
        places = _mixed(np.arange(rows.shape[1], dtype=np.uint64))
        slices.append(tuple((rows * (places | 1)).sum(1).tolist()))
    data = len(np.unique(values)) > _MASK
    return Part(values.shape, int(hashes.sum()), tuple(slices), data)


def _mixed(bits: np.ndarray) -> np.ndarray:
    """Numbers that look random: the end of splitmix64, by Sebastiano Vigna."""
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def difference(
    many: dict[str, list[Part]], one: dict[str, list[Part]], ranks: int
) -> Difference | None:
    """What many ranks were given and one was not, or the other way round.

    Args:
        many: the parts of all ranks, by name.
        one: those of one rank.
        ranks: their number.
    """
    unclear = None
    names = _data(one)
    for name in names:
        its, whole = many.get(name, []), one[name]
        if _equal(its, whole):
            continue
        dim = _cut(its, whole)
        if dim is not None:
            where = f", in {name}" * (len(names) > 1)
            return _missing(its, whole, dim, ranks, where)
        text = f"{name} has {_shapes(its)}, on one rank {_shapes(whole)}"
        unclear = unclear or Difference(text, "", certain=False)
    return unclear


def _data(given: dict[str, list[Part]]) -> list[str]:
    """The names of what may be samples: batches of rows, and whatever is largest."""
    data = {n: parts for n, parts in given.items() if any(p.data for p in parts)}
    data = data or given
    if not data:
        return []
    largest = max(data, key=lambda name: _count(data[name]))
    return [n for n, parts in data.items() if n == largest or len(parts[0].shape) > 1]


def _count(parts: list[Part]) -> int:
    return sum(part.count for part in parts)


def _equal(many: list[Part], one: list[Part]) -> bool:
    """Whether each value is there equally often in both, or in whole copies."""
    copies, rest = divmod(_count(many), _count(one))
    total = sum(part.total for part in one) * copies
    return not rest and copies > 0 and not (sum(p.total for p in many) - total) % _BITS


def _cut(many: list[Part], one: list[Part]) -> int | None:
    """The dimension along which ranks have slices like those of one rank."""
    found = []
    for dim in range(len(one[0].shape)):
        shapes = {part.shape[:dim] + part.shape[dim + 1 :] for part in one + many}
        if many and len(shapes) == 1 and len({len(p.shape) for p in one + many}) == 1:
            found.append(dim)
    same = (d for d in found if _size(many, d) == _size(one, d))
    return next(same, found[0] if found else None)


def _size(parts: list[Part], dim: int) -> int:
    return sum(part.shape[dim] for part in parts)


def _missing(
    its: list[Part], whole: list[Part], dim: int, ranks: int, where: str
) -> Difference:
    many, one = (
        Counter(s for part in parts for s in part.slices[dim]) for parts in (its, whole)
    )
    missing, more = (one - many).total(), (many - one).total()
    what = "samples" if dim == 0 else f"slices along dimension {dim}"
    hint = "The global batch must not depend on the number of ranks."
    if set(many.values()) == {ranks} and len(many) < len(one):
        text = f"all ranks were given the same {len(many)} {what}"
        hint = "A DistributedSampler gives each rank its own."
    elif more and not missing:
        text = f"{more} {what} more than on one rank"
        hint = (
            "A DistributedSampler repeats samples until all ranks have equally many; "
            "drop_last=True leaves out the rest instead."
        )
    else:
        text = f"{missing} of {one.total()} {what} of one rank are missing"
        text += f", {more} others are there" * bool(more)
    return Difference(text + where, hint, certain=True)


def _shapes(parts: list[Part]) -> str:
    shapes = dict.fromkeys(part.shape for part in parts)
    word = "the shapes" if len(shapes) > 1 else "the shape"
    return f"{word} {', '.join(map(str, shapes))}" if shapes else "nothing"
