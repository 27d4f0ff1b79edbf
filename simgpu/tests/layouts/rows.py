"""Recorded steps of whole layouts beside what is composed for them.

ultrascale     nanotron, every layout of a sweep on 1 to 64 nodes of H100
vtrain_node, vtrain_nodes    Megatron-LM of 2022 on A100
simumax_b200   Megatron-LM of 2025, Llama 3 70B cut to 12 layers, on 8 B200

Memory of the sweep is what PyTorch's allocator has reserved in a replay, `replay.py`;
of SimuMax's rows what tensors take. Fitted in it to the 1B model: what `_KeptSum` has,
and that a boundary of two stages lies before a layer, not behind it, where costs are
equal.

Which rows say nothing is decided by the recording alone: see `broken`. The host is
fitted to the sweep's 1B model and to vTrain's rows of width 1024; others judge. But the
form of all rules, `LATE` and those of memory were chosen with the 8B model in sight.
"""

import re
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from layouts import sweep
from layouts.machines import card_of
from layouts.shapes import Layout
from recorded.comparison import OF_TIME, Comparison, Omission
from recorded.files import Recording
from simgpu._timing.cost import HOSTS

KINDS = ("ultrascale", "vtrain_node", "vtrain_nodes", "simumax_b200")
MOST_NODES = 32  # of the rows that are summed up
SECONDS = 1.0  # of a micro-batch: more says nothing, ...
SLOW = 0.1  # ... if it reaches less of the card's peak; as a rate below ...
OF_TWINS = 1 / 3  # ... that of a layout whose micro-batches are alike
OF_MEMORY = 1.1
ALIKE = 1.02  # times of steps that a choice does not tell apart
GB = 2**30  # what the sources call so


class Step(NamedTuple):
    """A row: what was recorded, and what is predicted."""

    kind: str
    model: str
    layout: Layout
    fitted: bool
    ran: bool
    why_broken: str
    seconds: float  # recorded, of a step
    peak: float  # recorded bytes; 0 where none are
    predicted: sweep.Predicted

    @property
    def nodes(self) -> int:
        return max(1, self.layout.gpus // self.layout.node)

    @property
    def is_healthy(self) -> bool:
        return self.ran and not self.why_broken

    @property
    def ratio(self) -> float:
        return self.predicted.seconds / self.seconds


class Recorded(NamedTuple):
    """A row as it is read."""

    model: str
    layout: Layout
    fitted: bool
    seconds: float | None  # None: it did not run
    peak: float = 0.0


def of_sweep(row: list) -> Recorded:
    (model, layers, hidden, heads, intermediate, tied, vocab, nodes, micro, accumulate,
     dp, pp, tp, zero, status, rate, memory) = row  # fmt: skip
    of = Layout(layers, hidden, heads, intermediate, vocab, 4096, micro, accumulate,
                dp, pp, tp, zero, tied)  # fmt: skip
    if nodes * of.node != of.gpus:
        raise ValueError(f"{of.gpus} ranks on {nodes} nodes")
    seconds = of.step_tokens / (rate * of.gpus) if status == "ran" else None
    return Recorded(model, of, model == "1B", seconds, (memory or 0.0) * GB)


def of_vtrain(row: list) -> Recorded:
    gpus, batch, micro, hidden, heads, layers, tokens, tp, dp, pp, ms = row[-11:]
    if dp * tp * pp != gpus or batch % (micro * dp) or layers % pp:
        raise ValueError("the layout does not divide")
    of = Layout(layers, hidden, heads, 4 * hidden, 51_200, tokens, micro,
                batch // (micro * dp), dp, pp, tp, 0, True, "A100", 8,
                "800 Gbit/s", "megatron")  # fmt: skip
    return Recorded(f"{hidden} x {layers}", of, hidden == 1024, ms / 1e3)


def of_simumax(row: list) -> Recorded:
    case, ms, memory = row
    found = dict(re.findall(r"(tp|pp|dp|cp|mbc|seq|l)(\d+)", case))
    if not case.startswith("llama3_70b"):
        raise ValueError("no program for " + case.split("_")[0])
    if "cp" in found:
        raise ValueError("no program for sequences cut by cp")
    tp, pp, dp = (int(found[name]) for name in ("tp", "pp", "dp"))
    of = Layout(int(found["l"]), 8192, 64, 28_672, 128_256, int(found.get("seq", 4096)),
                1, int(found["mbc"]), dp, pp, tp, 1, False, "B200 of SimuMax",
                trainer="megatron 2025", kv_heads=8)  # fmt: skip
    return Recorded("Llama 3 70B", of, False, ms / 1e3, memory * 2**30)


READ: dict[str, Callable[[list], Recorded]] = {
    "ultrascale": of_sweep, "vtrain_node": of_vtrain, "vtrain_nodes": of_vtrain,
    "simumax_b200": of_simumax,
}  # fmt: skip
# launches of 2022 and the sweep's: see `HOSTS`
HOST_OF = {"nanotron": "slow", "megatron": "fast", "megatron 2025": "fast"}


def broken(rows: list[Recorded]) -> list[str]:
    """Why each row says nothing about its layout; "" if it does.

    It looks at recorded figures alone. Its limits were set with the rows, and what was
    composed for them before the host was fitted, in sight. A row is left out in which a
    micro-batch takes more than a second while the card reaches less than a tenth of its
    peak; or three times as long as in the fastest layout with the same model,
    micro-batch, pp and tp, if a step has at least 4 micro-batches: the two differ in
    what is done once a step.
    """
    fastest: dict = defaultdict(lambda: float("inf"))

    def key(its: Recorded):
        of = its.layout
        return its.model, of.micro, of.pp, of.tp

    def each(its: Recorded) -> float:
        return its.seconds / its.layout.accumulate

    for its in rows:
        if its.seconds:
            fastest[key(its)] = min(fastest[key(its)], each(its))
    found = []
    for its in rows:
        why, of = "", its.layout
        if its.seconds:
            flops = 6 * size_of(of) * of.step_tokens
            peak = card_of(of.card).flops["bfloat16"]
            if each(its) > SECONDS and flops / its.seconds / of.gpus < SLOW * peak:
                why = "broken: more than a second for a micro-batch"
            elif of.accumulate >= 4 and fastest[key(its)] / each(its) < OF_TWINS:
                why = "broken: a third of the rate of a layout that is alike"
        found.append(why)
    return found


def size_of(of: Layout) -> int:
    """Parameters of the whole model."""
    width = of.hidden
    gates = 3 if of.trainer != "megatron" else 2
    layer = 4 * width**2 + gates * of.intermediate * width
    return of.layers * layer + (1 if of.tied else 2) * of.vocab * width


def steps(recording: Recording) -> tuple[list[Step], list[Omission]]:
    """All rows of a recording, and those that cannot be read."""
    read, omitted = [], []
    for row in recording.data["rows"]:
        try:
            its = READ[recording.kind](row)
            card_of(its.layout.card)
            if its.seconds is not None and not its.seconds > 0:
                raise ValueError("nothing was measured")
            read.append(its)
        except (TypeError, ValueError, KeyError, ArithmeticError) as error:
            omitted.append(Omission(recording.kind, str(row), str(error)))
    parts = sweep.parts_of([its.layout for its in read])
    made = []
    for its, why in zip(read, broken(read), strict=True):
        of = its.layout
        if why:
            omitted.append(Omission(recording.kind, f"{its.model} {of}", why))
        elif its.seconds is None:
            omitted.append(Omission(recording.kind, f"{its.model} {of}", "did not run"))
        predicted = sweep.Predicted(of, parts[sweep.shape_of(of)],
                                    HOSTS[HOST_OF[of.trainer]])  # fmt: skip
        made.append(Step(recording.kind, its.model, of, its.fitted,
                         its.seconds is not None, why, its.seconds or 0.0, its.peak,
                         predicted))  # fmt: skip
    return made, omitted


def comparisons(found: list[Step]) -> list[tuple[Step, Comparison]]:
    """The healthy rows up to 32 nodes, in seconds of a step."""
    return [
        (its, Comparison(
            f"step, {its.kind}", _where(its), describe(its),
            its.predicted.seconds, its.seconds, its.fitted,
        ))
        for its in found if its.is_healthy and counts(its)
    ]  # fmt: skip


def _where(its: Step) -> str:
    """Its card and its model, in short."""
    return its.layout.card.partition(" of ")[0] + ", " + its.model.partition(" x")[0]


def counts(its: Step) -> bool:
    """Whether a row is summed up: the sweep's largest jobs are mostly broken."""
    return its.kind != "ultrascale" or its.nodes <= MOST_NODES


def describe(its: Step) -> str:
    of = its.layout
    return (f"{its.model}, {of.accumulate} x {of.micro} sequences, dp {of.dp}, "
            f"tp {of.tp}, pp {of.pp}, zero {of.zero}")  # fmt: skip


def choices(found: list[Step]) -> dict[tuple[str, int], tuple[float, Step]]:
    """(model, nodes) -> rate of our pick over the best one's, and the pick.

    Of the sweep's rows that ran and are not broken. Ours is the fastest that fits, and
    of those that are as fast within `ALIKE` the one that needs least memory: which of
    them is faster, nobody can predict. (Chosen with all models in sight.)
    """
    groups = defaultdict(list)
    for its in found:
        if its.kind == "ultrascale" and its.is_healthy and its.nodes <= MOST_NODES:
            groups[its.model, its.nodes].append(its)
    made = {}
    for group, rows in sorted(groups.items()):
        fitting = [its for its in rows if its.predicted.fits] or rows
        # of tokens, since steps of some rows have fewer
        each = [s.predicted.seconds / s.layout.step_tokens for s in fitting]
        alike = [s for s, its in zip(fitting, each, strict=True)
                 if its <= ALIKE * min(each)]  # fmt: skip
        pick = min(alike, key=lambda s: s.predicted.peak)
        best = max(s.layout.step_tokens / s.seconds for s in rows)
        made[group] = pick.layout.step_tokens / pick.seconds / best, pick
    return made


def lines_of(found: list[Step]) -> list[str]:
    """What rows that were not fitted come to; the last two lines sum it up."""
    judged = [its for its in found if not its.fitted and counts(its)] or [
        its for its in found if counts(its)
    ]
    healthy = [its for its in judged if its.is_healthy]
    lines = []
    for kind in KINDS:
        its = [one for one in found if one.kind == kind and one.ran and one.peak]
        for fitted in (True, False):
            peaks = [one.predicted.peak / one.peak for one in its
                     if one.fitted == fitted and one.is_healthy]  # fmt: skip
            if peaks:
                near = sum(1 / OF_MEMORY <= r <= OF_MEMORY for r in peaks)
                lines.append(
                    f"memory, {kind}, {'fitted' if fitted else 'not fitted'}: median "
                    f"{statistics.median(peaks):.2f}, within 10 %: "
                    f"{100 * near / len(peaks):.0f} % of {len(peaks)} rows"
                )
    picks = choices(found)
    for (model, nodes), (share, pick) in picks.items():
        lines.append(f"choice, {model} on {nodes} nodes: {share:.0%}, {describe(pick)}")
    ratios = [its.ratio for its in healthy]
    near = sum(1 / OF_TIME <= ratio <= OF_TIME for ratio in ratios)
    peaks = [its.predicted.peak / its.peak for its in healthy if its.peak]
    right = sum(1 / OF_MEMORY <= ratio <= OF_MEMORY for ratio in peaks)
    ran = [its for its in judged if its.ran and its.peak]
    fits = sum(its.predicted.fits for its in ran)
    lines.append(
        f"steps: median {statistics.median(ratios) if ratios else 0:.2f}, "
        f"within {OF_TIME}: {_percent(near, ratios)} of {len(ratios)} healthy rows; "
        f"memory within 10 %: {_percent(right, peaks)}; "
        f"fits: {_percent(fits, ran)} right"
    )
    shares = [share for share, _ in picks.values()]
    lines.append(
        f"choice: median {100 * statistics.median(shares or [0]):.0f} %, "
        f"worst {100 * min(shares, default=0):.0f} % of {len(shares)} groups"
    )
    return lines


def _percent(count: int, of: list) -> str:
    return f"{100 * count / len(of) if of else 0:.0f} %"
