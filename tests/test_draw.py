"""`helpers.draw`: what no lesson's data show.

What a lesson's picture looks like is stored with the lesson and compared there, sign by
sign.
"""

import re
import struct
from types import SimpleNamespace

import pytest

from helpers import draw
from helpers.draw.precision import FORMATS, bits_of
from simgpu import Event, JobTimeline, RankLog, Wait

MIB = 2**20
US = 1e-6

# -- what the pictures are made of -----------------------------------------------------


def event(kind: str, name: str, start: float, end: float, **more) -> Event:
    """In microseconds; a copy is one to the GPU."""
    if kind == "copy":
        more = {"source": "cpu", "target": "cuda:0", **more}
    fields = {"device": "cuda:0", "nbytes": 8, "flops": 0, **more}
    return Event(kind=kind, name=name, start=start * US, end=end * US, **fields)


def job(*ranks: list[Event], microseconds: float) -> JobTimeline:
    logs = [RankLog(r, each, [], microseconds * US) for r, each in enumerate(ranks)]
    return JobTimeline(logs)


def words(picture) -> list[str]:
    """What stands in a picture."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", picture._repr_svg_())


def ddp_step(message: float, *more: Event) -> JobTimeline:
    """Forward to 10 µs, backward to 60, a message of 40, a step of 5."""
    last = max(message + 40, 60)
    events = [
        event("kernel", "addmm", 0, 10),
        event("kernel", "ones_like", 10, 12),
        event("kernel", "mm", 12, 60),
        event("collective", "all_reduce", message, message + 40),
        event("kernel", "_foreach_add_", last, last + 5),
    ]
    return job([*events, *more], microseconds=last + 5)


MEMORY = {
    "forward": {"parameters": 4 * MIB, "temporary": 2 * MIB},
    "step": {"parameters": 4 * MIB, "gradients": 4 * MIB, "temporary": 0},
}
CARD = ("A100, float32", 19.5e12, 2039e9)


# -- what the alternative text says ----------------------------------------------------

TITLES = {
    "averaging, hidden": (
        lambda: draw.averaging({"hidden": ddp_step(15)}, ranks=[0]),
        "hidden: 1 messages, the GPU waits 0 of 65 µs",
    ),
    "hidden_copies, of a real GPU": (
        lambda: draw.hidden_copies({"in turns": []}, 2),
        "simulated GPUs",
    ),
}


@pytest.mark.parametrize("name", TITLES)
def test_the_title_says_what_the_data_say(name):
    make, said = TITLES[name]
    assert said in make().title


def run_of(losses: list[float], norms: list[float]) -> list[dict]:
    """What a trainer logs."""
    pairs = enumerate(zip(losses, norms, strict=True))
    return [{"step": n, "loss": loss, "norm": norm} for n, (loss, norm) in pairs]


@pytest.mark.parametrize(
    "off, below", [(0.0, "0.01"), (4e-4, "0.01"), (4e-2, "0.1"), (0.4, "1")]
)
def test_loss_curves_say_how_far_the_losses_are_and_the_norms(off, below):
    right = run_of([5.5, 5.0, 4.25], [2.0, 1.5, 1.0])
    wrong = run_of([5.5, 5.0 - off, 4.25], [0.5, 0.4, 0.3])
    title = draw.loss_curves(right, wrong, "A training").title
    assert f"The losses differ by less than {below};" in title
    assert "is 2.00 in the right one, and 4.00 times as large as in the wrong" in title


def test_stopwatches_of_real_gpus_are_what_the_timeline_says():
    assert draw.stopwatches("no timeline here") == "no timeline here"


# -- where things are ------------------------------------------------------------------


def test_an_axis_has_few_marks_however_long_the_step():
    for seconds in (50e-6, 4e-3, 2.0):
        events = [event("kernel", "mm", 0, 1e6 * seconds)]
        marks = words(draw.steps({"run": (0.0, events, [])}))
        assert sum(bool(re.fullmatch(r"\d+ µs", mark)) for mark in marks) <= 11
    assert "lesson 07" in draw.steps({})


def test_a_step_shows_where_python_waits_and_what_it_launches_then():
    events = [
        event("copy", "cpu to cuda:0", 10, 20),
        event("kernel", "mm", 45, 50, launched=20 * US),
    ]
    waits = [Wait("before", -9 * US, 0.0), Wait("wait for cuda:0", 10 * US, 20 * US)]
    svg = draw.steps({"run": (0.0, events, waits)})._repr_svg_()
    in_legend = 1
    assert svg.count("#E5E5E5") == 1 + in_legend
    assert svg.count("url(#head)") == 1  # from the launch to its kernel


def test_a_kernel_that_reaches_both_limits_lies_on_the_ridge():
    points = [("at the ridge", 19.5e12 / 2039e9, 19.5e12), ("tiny", 1e-6, 1.0)]
    svg = draw.roofline("title", [CARD], points)._repr_svg_()
    (x, y), outside = (
        tuple(map(float, place))
        for place in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', svg)
    )
    assert outside == (64.0, 300.0)  # at the edge
    start, end = re.findall(r'<line x1="\S+" y1="\S+" x2="(\S+)" y2="(\S+)"', svg)[:2]
    assert abs(float(start[0]) - x) < 0.1 and abs(float(start[1]) - y) < 0.1
    assert float(end[1]) == float(start[1])  # flat from there


def test_a_run_that_is_too_fast_lies_to_the_right_and_far_away_stays_inside():
    rows = [("slow", 0.9, False), ("fast", 1.1, False), ("far", 9.0, False)]
    picture = draw.published_runs(rows)
    dots = [part for part in picture.parts if 'width="7"' in part]
    places = [float(dot.split('x="')[1].split('"')[0]) for dot in dots]
    assert places[0] < places[1] < places[2] < picture.width


def test_words_of_a_verdict_stay_inside_their_box():
    case = "a case that needs many lines, because its name is so very long"
    found = draw.verdicts({"1. one": {case: True, "b": False}}, lambda cases: "true")
    text = found._repr_svg_()
    box = re.findall('<rect x="[^"]*" y="([^"]*)" width="[^"]*" height="([^"]*)"', text)
    top, height = map(float, box[-2])
    lines = re.findall('<text x="[^"]*" y="([^"]*)" font-size="10"', text)
    assert len(lines) > 2
    assert all(top + 8 < float(y) < top + height for y in lines)


# -- what must not change a picture ----------------------------------------------------


def test_a_later_copy_is_no_part_of_the_step():
    """A notebook compares the values of a step before it asks for its timeline."""
    late = event("copy", "", 80, 99, source="cuda:0", target="cpu")
    plain, with_copy = ddp_step(30), ddp_step(30, late)
    titles = [draw.averaging({"step": log}, ranks=[0]).title
              for log in (plain, with_copy)]  # fmt: skip
    assert titles[0] == titles[1]


def test_a_rounding_error_does_not_change_loss_curves():
    right = run_of([5.5, 5.0, 4.25], [2.0, 1.5, 1.0])
    pictures = {
        draw.loss_curves(
            right, run_of([5.5 - off, 5.0, 4.25], [0.5, 0.4, 0.3]), "A"
        )._repr_svg_()
        for off in (1e-6, 4e-6)
    }
    assert len(pictures) == 1


def started(agents: dict[int, int], first: int, end: int) -> list[dict]:
    """Ranks with their agents that do some steps."""
    who = [
        {"rank": rank, "ranks": len(agents), "agent": agent, "pid": 10 * agent + first}
        for rank, agent in agents.items()
    ]
    log = [{**w, "event": "loaded", "step": first} for w in who]
    for step in range(first, end):
        log += [{**w, "event": "step", "step": step, "rows": []} for w in who]
    return log


def test_which_rank_a_node_has_and_who_notes_first_change_nothing():
    """torchrun numbers the nodes of one address by their process: by chance."""
    nodes = [SimpleNamespace(pid=100 + n, number=n) for n in (0, 1)]
    rest = [{"event": "kill node", "node": 1}, *started({0: 100}, 5, 8)]
    logs = [
        [*started(agents, 0, 7), *rest]
        for agents in ({0: 100, 1: 101}, {1: 100, 0: 101}, {1: 101, 0: 100})
    ]
    svg, *others = (draw.elastic_job(x, nodes, every=5)._repr_svg_() for x in logs)
    assert others == [svg, svg]
    assert "2 ranks from step 0 to 6; 1 rank from step 5 to 7" in svg
    # steps in vain are dashed, two of both ranks; and the key
    assert svg.count("stroke-dasharray") == 2 * 2 + 1
    bars = [
        draw.elastic_job(logs[0], nodes, every=every)._repr_svg_().count('width="2"')
        for every in (5, 2)
    ]
    # checkpoints of two ranks and of one, where the other run begins, at the end; key
    assert bars == [2 + 1 + 1, 3 * 2 + 2 + 2 + 1]


# -- what is calculated ----------------------------------------------------------------


@pytest.mark.parametrize("value", [0.1, 1.0, -2.5, 300.0])
def test_bits_are_those_of_the_number(value):
    (whole,) = struct.unpack(">I", struct.pack(">f", value))
    assert bits_of(value, "float32") == f"{whole:032b}"
    for name, (exponent, fraction) in FORMATS.items():
        bits = bits_of(value, name)
        assert len(bits) == 1 + exponent + fraction
        power = int(bits[1 : 1 + exponent], 2) - (2 ** (exponent - 1) - 1)
        found = (1 + int(bits[1 + exponent :], 2) / 2**fraction) * 2.0**power
        assert found == pytest.approx(abs(value), rel=2.0 ** -(fraction + 1))
        assert bits[0] == ("1" if value < 0 else "0")


# -- bad input -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, why",
    [
        (
            lambda: draw.hidden_copies({"in turns": [event("kernel", "mm", 0, 9)]}, 3),
            "not those of 3 batches",
        ),
        (
            lambda: draw.memory_bars("Peaks", MEMORY, {"forward": MIB}),
            "but counted",
        ),
        (
            lambda: draw.memory_bars(
                "Peaks", {"a": {str(i): MIB for i in range(8)}}, {"a": 8 * MIB}
            ),
            "8 parts, but 7 colours",
        ),
        (
            lambda: draw.two_matmuls(4, tokens=8, width=4, hidden=10),
            "10 columns cannot be cut over 4",
        ),
        (
            lambda: draw.dealt_samples([[0, 1], [2]], batch=1),
            "the shares have 2, 1 samples",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused(make, why):
    with pytest.raises(ValueError, match=why):
        make()
