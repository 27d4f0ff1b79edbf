"""1,632 layouts that others tried on H100, beside what `plan_run.py` says of them.

    python -m scripts.real_sweep

prints what the planner's choices would have cost. The figures are those of a sweep of
nanotron by Hugging Face, `ultrascale.json` in `simgpu/tests/recordings`: a 1B and an 8B
model on 8 to 512 GPUs. Used in lesson 27.
"""

import json
import statistics
from collections import defaultdict
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from helpers import draw
from scripts.plan_run import (
    CARDS,
    USABLE,
    Model,
    Plan,
    matrices,
    peak_bytes,
    step_seconds,
)

RECORDED = Path(__file__).resolve().parents[2] / "simgpu" / "tests" / "recordings"
MOST = 256  # GPUs: larger jobs of the sweep are mostly broken
TRIES = 5  # plans that one measures, if one measures some
SLOW = 0.1 * 989.4e12  # FLOP/s of a GPU


class Tried:
    """A layout of the sweep. `rate` is in tokens/s of a GPU, 0 where it did not run."""

    def __init__(self, row: list):
        (self.name, layers, dim, heads, hidden, tied, vocab, machines, sequences, turns,
         copies, pp, tp, self.zero, _, rate, _) = row  # fmt: skip
        self.rate = rate or 0.0
        self.copies = copies
        self.model = Model(layers, dim, heads, heads, hidden, vocab, tied=tied)
        self.plan = Plan(
            8 * machines, tp=tp, pp=pp, sequences=sequences, microbatches=turns,
            again=0.0, network=400, host="slow",
        )  # fmt: skip
        self.step_tokens = sequences * turns * copies * self.plan.tokens

    @property
    def group(self) -> tuple[str, int]:
        """Its model, and how many GPUs it has."""
        return self.name, self.plan.gpus

    @property
    def seconds(self) -> float:
        """Of a step, as recorded."""
        return self.step_tokens / (self.rate * self.plan.gpus)

    @cached_property
    def planned(self) -> float:
        """Seconds of a step, by the planner."""
        return sum(step_seconds(self.model, self.plan).values())

    @property
    def planned_rate(self) -> float:
        return self.step_tokens / self.planned / self.plan.gpus

    @property
    def fits(self) -> bool:
        """By the planner. ZeRO-1 has weights and gradients in full, states in parts."""
        shard = self.copies if self.zero else 1
        plan = replace(self.plan, shard=shard, reshard=False)
        memory = sum(peak_bytes(self.model, plan).values())
        return memory < USABLE * CARDS[plan.card][3]

    @property
    def words(self) -> str:
        plan = self.plan
        split = f"{self.copies} copies x tp {plan.tp} x pp {plan.pp}"
        return f"{split}, {plan.microbatches} x {plan.sequences}"


class Choice(NamedTuple):
    """A model on so many GPUs. Rates are shares of the best recorded one."""

    name: str
    gpus: int
    best: Tried
    rates: list[float]  # of all that ran and are not broken
    pick: Tried
    share: float  # of the pick
    tries: list[str]  # what became of the planner's first plans: shares, or why not
    best_try: float
    by_rule: float  # the share of what `rule` picks


def read() -> list[Tried]:
    text = (RECORDED / "ultrascale.json").read_text("utf-8")
    return [Tried(row) for row in json.loads(text)["rows"]]


def broken(rows: list[Tried]) -> set[Tried]:
    """Those that ran and say nothing about their layout.

    A micro-batch takes more than a second while the card reaches less than a tenth of
    its peak; or, with four micro-batches and more, three times as long as with another
    number of copies. `broken` in `simgpu/tests/layouts/rows.py` says more.
    """

    def kind(one: Tried) -> tuple:
        return one.name, one.plan.sequences, one.plan.pp, one.plan.tp

    def each(one: Tried) -> float:
        return one.seconds / one.plan.microbatches

    ran = [one for one in rows if one.rate]
    fastest: dict = defaultdict(lambda: float("inf"))
    for one in ran:
        fastest[kind(one)] = min(fastest[kind(one)], each(one))
    found = set()
    for one in ran:
        model = one.model
        size = model.layers * sum(matrices(model))
        size += (1 if model.tied else 2) * model.vocab * model.dim
        is_slow = 6 * size * one.rate < SLOW and each(one) > 1
        is_alone = one.plan.microbatches >= 4 and each(one) > 3 * fastest[kind(one)]
        if is_slow or is_alone:
            found.add(one)
    return found


def rule(one: Tried) -> tuple:
    """A yardstick without any formula of time: the least goes first.

    As few GPUs for a copy as fit; slices before stages; the largest micro-batch.
    """
    plan = one.plan
    return plan.tp * plan.pp, plan.pp, -plan.sequences


def choices() -> list[Choice]:
    """What the planner would have chosen, for each model and number of GPUs.

    `pick` is the plan with the best predicted rate, of those that fit, by the planner,
    and ran. `tries` are its first plans of all in the sweep, whatever became of them.
    """
    rows, groups = read(), defaultdict(list)
    useless = broken(rows)
    for one in rows:
        if one.plan.gpus <= MOST:
            groups[one.group].append(one)
    found = []
    for (name, gpus), tried in sorted(groups.items()):
        good = [one for one in tried if one.rate and one not in useless]
        best = max(good, key=lambda one: one.rate)
        fitting = [one for one in tried if one.fits]
        fitting.sort(key=lambda one: -one.planned_rate)
        pick = next(one for one in fitting if one in good)
        simple = next(one for one in sorted(fitting, key=rule) if one in good)
        tries, reached = [], [0.0]
        for one in fitting[:TRIES]:
            if one in good:
                reached.append(one.rate / best.rate)
                tries.append(f"{reached[-1]:.0%}")
            else:
                tries.append("broken" if one.rate else "crashed")
        rates = [one.rate / best.rate for one in good]
        found.append(Choice(name, gpus, best, rates, pick, pick.rate / best.rate, tries,
                            max(reached), simple.rate / best.rate))  # fmt: skip
    return found


_TOP, _ROW, _LEFT, _AXIS = 64, 25, 100, 330


def picture(found: list[Choice]) -> draw.Picture:
    """All layouts of a group on one line, with the planner's choice among them."""
    shares, rules = [one.share for one in found], [one.by_rule for one in found]
    said = (
        f"Real rates of {sum(len(one.rates) for one in found)} layouts as shares of "
        "the best with the same model and GPUs. The planner's choices reach "
        + ", ".join(f"{one.name} on {one.gpus} {one.share:.0%}" for one in found)
        + f"; median {statistics.median(shares):.0%}, worst {min(shares):.0%}. "
        f"The rule: median {statistics.median(rules):.0%}, worst {min(rules):.0%}"
    )
    drawn = draw.Picture(draw.WIDEST, _TOP + _ROW * len(found) + 8, said)
    title = "Recorded tokens/s as a share of the best layout on as many H100"
    drawn.text(8, 18, title, 13, weight="bold")
    _legend(drawn)
    bottom = _TOP + _ROW * len(found)
    for share in (0, 0.25, 0.5, 0.75, 1):
        x = _LEFT + share * _AXIS
        drawn.line(x, _TOP, x, bottom, draw.HOST)
        drawn.text(x, _TOP - 5, f"{share:.0%}", 10, "middle")
    drawn.text(_LEFT + _AXIS + 24, _TOP - 5, "chosen", 10)
    drawn.text(_LEFT + _AXIS + 74, _TOP - 5, "the chosen layout", 10)
    for number, one in enumerate(found):
        y = _TOP + _ROW * number + _ROW / 2
        drawn.text(8, y + 4, f"{one.name}, {one.gpus} GPUs", 12)
        for share in one.rates:
            x = _LEFT + share * _AXIS
            drawn.line(x, y - 6, x, y + 6, draw.COLOURS[0])
        middle = _LEFT + statistics.median(one.rates) * _AXIS
        drawn.box(middle - 2.5, y - 9, 5, 18, draw.INK)
        x = _LEFT + one.share * _AXIS
        drawn.box(x - 6, y - 6, 12, 12, draw.COLOURS[5])
        x = _LEFT + one.by_rule * _AXIS
        drawn.box(x - 3, y - 3, 6, 6, draw.COLOURS[1])
        drawn.text(_LEFT + _AXIS + 24, y + 4, f"{one.share:.0%}", 12)
        drawn.text(_LEFT + _AXIS + 74, y + 4, one.pick.words, 10)
    return drawn


def _legend(drawn: draw.Picture) -> None:
    drawn.line(14, 30, 14, 42, draw.COLOURS[0])
    drawn.text(22, 40, "a layout that ran", 11)
    drawn.box(134, 27, 5, 18, draw.INK)
    drawn.text(146, 40, "their median", 11)
    drawn.box(232, 30, 12, 12, draw.COLOURS[5])
    drawn.text(250, 40, "the planner's choice", 11)
    drawn.box(372, 33, 6, 6, draw.COLOURS[1])
    drawn.text(384, 40, "the rule: as few GPUs for a copy as fit", 11)


def table(found: list[Choice]) -> None:
    """Print what became of the planner's first plans in each group."""
    print("model, GPUs  the first five plans of the planner           best")
    for one in found:
        tries = " ".join(f"{said:>8}" for said in one.tries)
        print(f"{one.name} {one.gpus:4}  {tries} {one.best_try:8.0%}")


if __name__ == "__main__":
    table(choices())
