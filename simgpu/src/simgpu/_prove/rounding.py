"""How far two right runs may differ: measured on runs that only round differently.

The program runs on one rank as it is, and some times more with `noise.Rounding`. Their
distances are what rounding does to each gradient and each parameter in each step of
this program, amplified as this program amplifies it. `Allowed` takes the largest of
them so far, and ten times that, because few runs are a small sample of the noise. What
is really wrong is further away by some powers of ten.
"""

import numpy as np

from simgpu._prove.combine import KINDS, Whole

RUNS = 3
FACTOR = 10
_FLOAT32 = np.finfo(np.float32).eps / 2


class Allowed:
    """What a quantity of a step may differ by.

    Args:
        reference: the steps of one rank.
        noisy: the same steps with noise, of each run.
    """

    def __init__(self, reference: list[Whole], noisy: list[list[Whole]]):
        self._reference = reference
        self._noise: list[dict] = []  # step -> quantity -> distance
        self._usual: list[dict] = []  # step -> kind -> distance / size
        so_far: dict = {}
        for number, step in enumerate(reference):
            for run in noisy:
                for key, distance in _distances(step, run[number]).items():
                    so_far[key] = max(so_far.get(key, 0.0), distance)
            self._noise.append(dict(so_far))
            self._usual.append(_usual(so_far, step))

    def __call__(
        self, step: int, kind: str, name: str, ranks: int, part: float
    ) -> float:
        """The distance (a norm) that rounding allows.

        Args:
            step: its number.
            kind: of `KINDS`, or "outputs", "loss", "norm".
            name: of the parameter or module.
            ranks: whose parts were added up.
            part: the largest size of a part; the sum rounds as its parts do.
        """
        reference = self._reference[step]
        size = _size(reference, kind, name)
        noise = self._noise[step].get((kind, name), 0.0)
        # one quantity may have had luck in all runs
        noise = max(noise, self._usual[step].get(kind, 0.0) * size)
        return FACTOR * (noise + _FLOAT32 * ranks * max(size, part))


def _distances(one: Whole, other: Whole) -> dict[tuple[str, str], float]:
    """How far each quantity of a step is from that of another run."""
    found = {}
    for kind in KINDS:
        for name, array in one.arrays[kind].items():
            found[kind, name] = float(np.linalg.norm(array - other.arrays[kind][name]))
    for name, (moments,) in one.outputs.items():
        (others,) = other.outputs[name]
        found["outputs", name] = moments.distance(others)
    found["loss", ""] = abs(one.losses[0] - other.losses[0])
    if one.norms:
        found["norm", ""] = abs(one.norms[0] - other.norms[0])
    return found


def _usual(distances: dict, step: Whole) -> dict[str, float]:
    """The median of distance / size over the quantities of each kind."""
    parts: dict[str, list[float]] = {}
    for (kind, name), distance in distances.items():
        if size := _size(step, kind, name):
            parts.setdefault(kind, []).append(distance / size)
    return {kind: float(np.median(found)) for kind, found in parts.items()}


def _size(step: Whole, kind: str, name: str) -> float:
    if kind == "outputs":
        return 1.0  # their distance is a part already
    if kind == "loss":
        return abs(step.losses[0])
    if kind == "norm":
        return step.norms[0] if step.norms else 0.0
    if name not in step.arrays[kind]:  # two players have their steps in turn
        return 0.0
    return float(np.linalg.norm(step.arrays[kind][name]))
