"""Where a run on many ranks leaves the run on one, and what that looks like.

An alarm is raised by what trains the model: the parameters, the gradients that the
optimizer is given, its settings, what it does with them, buffers, and the norm by which
gradients are clipped. Once there is one, the place is looked for in the order in which
a step computes: samples, parameters, outputs of modules, loss, gradients, norm, update.
The loss and the raw gradients may be scaled in a right program (a sum that is averaged
later), so they raise no alarm, but tell where to look. So do the samples: a right
program may pad a batch with some that do not count.
"""

from dataclasses import dataclass

import numpy as np

from simgpu._prove.combine import Whole, together
from simgpu._prove.inputs import difference
from simgpu._prove.rounding import Allowed


@dataclass(frozen=True)
class Finding:
    """Something that should not be.

    Attributes:
        ranks: of the run in which it was seen.
        step: its number, from 0; None if it concerns the whole run.
        stage: "samples", "parameters", "output", "loss", "gradient", "norm",
            "settings", "update", "buffer", "dropout", "epoch", "device", "optimizer" or
            "error".
        place: the module or parameter; "" for all of them.
        text: a sentence: what was seen.
        hint: where such a thing often comes from; may be empty.
    """

    ranks: int
    step: int | None
    stage: str
    place: str
    text: str
    hint: str = ""

    def __str__(self) -> str:
        when = "" if self.step is None else f", step {self.step}"
        where = f" of {self.place}" if self.place else ""
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        lines = [f"{ranks}{when}, {self.stage}{where}: {self.text}"]
        return "\n    ".join([*lines, *filter(None, [self.hint])])


def first_difference(
    ranks: int, steps: list[Whole], reference: list[Whole], allowed: Allowed
) -> Finding | None:
    """The first step and place where the ranks leave the run on one rank."""
    moving = _moving(reference)
    both = min(len(steps), len(reference))
    for number in range(both):
        many, one = steps[number], reference[number]
        names = [n for n in moving if not _added_up(many, one, n, ranks)]
        for step in (many, one):
            buffers = step.arrays["buffers"]
            step.arrays["buffers"] = {n: buffers[n] for n in names if n in buffers}
        found = _Step(ranks, number, many, one, allowed).look()
        if found is not None:
            return found
    if len(steps) != len(reference):
        text = f"{len(steps)} steps were taken, and {len(reference)} on one rank"
        return Finding(ranks, both, "samples", "", text)
    return None


def unaligned(steps: list[Whole], reference: list[Whole], ranks: int) -> str:
    """Why samples could not be compared, in the first step where it is so; or ""."""
    if not any(step.inputs for step in reference):
        return "could not align the samples (no model was given a tensor)"
    for number, (many, one) in enumerate(zip(steps, reference, strict=False)):
        found = difference(many.inputs, one.inputs, ranks)
        if found is not None:
            why = f"{ranks} ranks, step {number}: {found.text}"
            return f"could not align the samples ({why}); compared everything else"
    return ""


def _moving(steps: list[Whole]) -> list[str]:
    """Buffers that training changes; others, such as masks, may belong to a rank."""
    first, *rest = (step.arrays["buffers"] for step in steps)
    return [n for n in first if any((first[n] != later[n]).any() for later in rest)]


def _added_up(many: Whole, one: Whole, name: str, ranks: int) -> bool:
    """Whether a buffer counts what a rank has seen: the sum over ranks is right."""
    its, whole = (step.arrays["buffers"].get(name) for step in (many, one))
    if its is None or whole is None or its.shape != whole.shape:
        return False
    return bool(np.allclose(its * ranks, whole, rtol=1e-6, atol=0.0))


class _Step:
    """One step, on many ranks and on one."""

    def __init__(
        self, ranks: int, number: int, many: Whole, one: Whole, allowed: Allowed
    ):
        self.ranks, self.number = ranks, number
        self.many, self.one = many, one
        self._allowed = allowed

    def look(self) -> Finding | None:
        """The first place that differs, if one of those differs that matter."""
        hard = (self.parameters, self.norm, self.gradients, self.settings,
                self.updates, self.buffers)  # fmt: skip
        if not any(check() for check in hard):
            return None
        in_order = (self.samples, self.parameters, self.outputs, self.loss, self.raw,
                    self.norm, self.gradients, self.settings, self.updates,
                    self.buffers)  # fmt: skip
        return next(filter(None, (check() for check in in_order)))

    def _say(self, stage: str, place: str, text: str, hint: str = "") -> Finding:
        return Finding(self.ranks, self.number, stage, place, text, hint)

    def _allow(self, kind: str, name: str = "", part: float = 0.0) -> float:
        return self._allowed(self.number, kind, name, self.ranks, part)

    # -- in the order of a step --------------------------------------------------------

    def samples(self) -> Finding | None:
        """Whether the model was given the same samples, each as often."""
        found = difference(self.many.inputs, self.one.inputs, self.ranks)
        if found is None or not found.certain:
            return None
        return self._say("samples", "", found.text, found.hint)

    def parameters(self) -> Finding | None:
        """Whether the step begins with the same parameters, on all ranks."""
        return self._apart("before", "parameters", _FROM_THE_START) or self._compare(
            "before", "parameters", _LOADED if self.number else _FROM_THE_START
        )

    def outputs(self) -> Finding | None:
        """The first module that was given the same and says something else."""
        for name, (one,) in self.one.outputs.items():
            many = self.many.outputs.get(name)
            many = many and together(many, one.count)
            if many is None:
                continue
            if one.distance(many) > self._allow("outputs", name):
                text = f"rms {_rms(many):.6g}, on one rank {_rms(one):.6g}"
                if abs(_rms(many) - _rms(one)) < 1e-5 * _rms(one):
                    text = f"{one.distance(many):.2%} away from one rank"
                return self._say("output", name or "the model", text)
        return None

    def loss(self) -> Finding | None:
        """The loss, as a mean over ranks or as a sum: a program may take either."""
        one, many = self.one.losses[0], self.many.losses
        mean, allow = (
            float(np.mean(many)),
            self._allow("loss", part=max(map(abs, many))),
        )
        if min(abs(mean - one), abs(sum(many) - one)) <= max(allow, 1e-7 * abs(one)):
            return None
        text = f"mean over ranks {mean:.6g}, on one rank {one:.6g}"
        return self._say("loss", "", text, _LOSS)

    def raw(self) -> Finding | None:
        """Gradients after backward: averaged, or parts of which the mean is right."""
        scale = self._scale("raw")
        if scale is not None:
            return self._say_scale(scale)
        apart = self._apart("raw", "", "")
        if apart and (used := self._apart("used", "gradient", _NOT_AVERAGED)):
            return used
        return self._compare("raw", "gradient", "", sums=apart)

    def norm(self) -> Finding | None:
        """What gradients are clipped by."""
        many, one = self.many.norms, self.one.norms
        if not one or not many:
            return None
        allow = self._allow("norm", part=max(many))
        worst = max(many, key=lambda norm: abs(norm - one[0]))
        if abs(worst - one[0]) <= allow:
            return None
        text = f"{worst:.6g} on a rank, on one rank {one[0]:.6g}"
        ratio = worst / one[0] if one[0] else np.inf
        sums = np.isclose(ratio, [self.ranks, 1 / self.ranks], rtol=1e-3).any()
        return self._say(
            "norm", "", text, _scaled(ratio, self.ranks) if sums else _NORM
        )

    def gradients(self) -> Finding | None:
        """What the optimizer is given."""
        scale = self._scale("used")
        if scale is not None:
            return self._say_scale(scale)
        return self._apart("used", "gradient", _NOT_AVERAGED) or self._compare(
            "used", "gradient", _BETWEEN
        )

    def _say_scale(self, scale: float) -> Finding:
        text = f"every gradient is {scale:.4g} times that of one rank"
        return self._say("gradient", "", text, _scaled(scale, self.ranks))

    def settings(self) -> Finding | None:
        """The optimizer's numbers, such as the learning rate."""
        for (group, name), value in self.one.settings.items():
            other = self.many.settings.get((group, name), value)
            if not np.isclose(other, value, rtol=1e-9):
                text = f"{other:.6g}, on one rank {value:.6g}"
                return self._say("settings", f"{group}, {name}", text, _SETTINGS)
        return None

    def updates(self) -> Finding | None:
        """What the optimizer has made of the parameters.

        It may have updated a part of them on each rank, which is sent later.
        """
        found = self._apart("after", "update", "") or self._compare(
            "after", "update", ""
        )
        if found is None or not self._moved():
            return found
        return self._apart("later", "update", "") or self._compare(
            "later", "update", ""
        )

    def _moved(self) -> bool:
        """Whether parameters change between the optimizer's step and the next one."""
        after, later = self.many.arrays["after"], self.many.arrays["later"]
        return any((after[name] != later[name]).any() for name in after)

    def buffers(self) -> Finding | None:
        """Buffers, such as running means."""
        return self._apart("buffers", "buffer", _BUFFERS) or self._compare(
            "buffers", "buffer", _BUFFERS
        )

    # -- how ---------------------------------------------------------------------------

    def _compare(
        self, kind: str, stage: str, hint: str, sums: object = None
    ) -> Finding | None:
        """The first parameter that differs; gradients in the order of backward."""
        many, one = self.many.arrays[kind], self.one.arrays[kind]
        if missing := (one.keys() ^ many.keys()):
            name = min(missing)
            where = "on one rank only" if name in one else "on many ranks only"
            hint = "Is it tied to another one, and was it cut apart?" * (
                stage != "buffer"
            )
            return self._say(stage, name, f"it is there {where}", hint)
        names = reversed(one) if stage == "gradient" else iter(one)
        for name in names:
            if many[name].shape != one[name].shape:
                text = f"shape {many[name].shape}, on one rank {one[name].shape}"
                return self._say(stage, name, text)
            distance = float(np.linalg.norm(many[name] - one[name]))
            if sums:
                total = float(np.linalg.norm(many[name] * self.ranks - one[name]))
                distance = min(distance, total)
            allow = self._allow(kind, name, self.many.sizes[kind, name])
            if distance > allow:
                size = max(float(np.linalg.norm(one[name])), 1e-30)
                text = f"{_percent(distance / size)} away from one rank; rounding "
                text += f"allows {_percent(allow / size)}"
                return self._say(stage, name, text, hint)
        return None

    def _apart(self, kind: str, stage: str, hint: str) -> Finding | None:
        """The first parameter that ranks have in different versions."""
        arrays = self.many.arrays[kind]
        for name in reversed(arrays) if kind == "used" else arrays:
            array = arrays[name]
            apart = self.many.apart.get((kind, name), 0.0)
            if apart > self._allow_apart(kind, name):
                size = max(float(np.linalg.norm(array)), 1e-30)
                text = f"the ranks differ from their mean by {_percent(apart / size)}"
                return self._say(stage, name, text, hint)
        return None

    def _allow_apart(self, kind: str, name: str) -> float:
        size = self.many.sizes[kind, name]
        if name not in self.one.arrays[kind]:
            return 1e-6 * size
        return self._allow(kind, name, size)

    def _scale(self, kind: str) -> float | None:
        """One factor between all gradients of many ranks and of one, if there is."""
        many, one = self.many.arrays[kind], self.one.arrays[kind]
        if not one or one.keys() != many.keys():
            return None
        if any(many[name].shape != one[name].shape for name in one):
            return None
        if self._apart(kind, "", ""):
            return None
        squares = sum(float(np.sum(a * a)) for a in one.values())
        product = sum(float(np.sum(one[name] * many[name])) for name in one)
        scale = product / squares if squares else 0.0
        if scale <= 0:
            return None
        away = {n: np.linalg.norm(many[n] / scale - one[n]) for n in one}
        allow = {n: self._allow(kind, n, self.many.sizes[kind, n] / scale) for n in one}
        right = all(away[name] <= 2 * allow[name] for name in one)
        return scale if right and self._compare(kind, "", "") else None


def _rms(moments) -> float:
    return float(np.sqrt(moments.squares / moments.count))


def _percent(part: float) -> str:
    return f"{part:.2%}" if part >= 1e-4 else f"{part:.1e}"


def _scaled(scale: float, ranks: int) -> str:
    if np.isclose(scale, 1 / ranks, rtol=1e-3):
        return (
            "Divided by the number of ranks twice? DDP and FSDP average by themselves."
        )
    if np.isclose(scale, ranks, rtol=1e-3):
        return "Added up over the ranks and not divided by their number?"
    return (
        "A factor that depends on the number of ranks: a loss scale, a clip, a count?"
    )


_FROM_THE_START = (
    "Was the model made from the same seed, or sent by rank 0? Weights that are drawn "
    "after they were sharded depend on the number of ranks."
)
_LOADED = "Was something loaded, or changed between two steps?"
_LOSS = (
    "Samples, parameters and outputs agree, so look at how the loss is averaged: over "
    "all tokens of all ranks, or over means of ranks with unequal counts?"
)
_NORM = "The norm of all gradients, or of this rank's part? Before or after averaging?"
_NOT_AVERAGED = (
    "Not averaged over the ranks? Backward must run through what DDP returns."
)
_BETWEEN = "Right after backward, so look at what is done before the optimizer's step."
_SETTINGS = "It depends on the number of ranks or of micro-batches."
_BUFFERS = (
    "Each rank computes its own; DDP sends rank 0's if broadcast_buffers is True."
)
