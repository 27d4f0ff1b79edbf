"""`helpers.draw`: what no lesson's data show.

What a lesson's picture looks like is stored with the lesson and compared there, sign by
sign.
"""

import re
import struct
from types import SimpleNamespace

import pytest
import torch

import simgpu
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


def sent(start: float, end: float) -> Event:
    return event("collective", "send", start, end)


def of_rank(*events: Event) -> SimpleNamespace:
    return SimpleNamespace(events=lambda rank: list(events), ranks=(0, 1))


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

COPY_AND_READ = {  # when the first kernel reads -> events
    start: [
        event("copy", "cpu to cuda:0", 0, 90, stream=1),
        event("kernel", "addmm", start, start + 30),
    ]
    for start in (20, 90)
}


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
    "early_read": (
        lambda: draw.early_read(
            {"no wait": COPY_AND_READ[20], "wait": COPY_AND_READ[90]}
        ),
        "no wait: addmm begins 70 µs before the copy is done; wait: addmm begins after",
    ),
    "fed_gpu": (
        lambda: draw.fed_gpu(load=1e-3, step=0.4e-3, workers=(1, 2, 3)),
        "1 worker: the GPU computes 40% of the time; 2 workers: the GPU computes 80% "
        "of the time; 3 workers: the GPU computes 100% of the time",
    ),
    "overlap": (
        lambda: draw.overlap(
            job(
                [
                    event("kernel", "ones_like", 0, 2),
                    event("kernel", "threshold_backward", 2, 10),
                    event("kernel", "threshold_backward", 10, 40),
                    event("collective", "all_reduce", 10, 30),
                    event("collective", "all_reduce", 40, 60),
                ],
                microseconds=60,
            )
        ),
        "20 of 40 µs of all-reduce; bucket 1, layer 2: hidden; bucket 2, layer 1: not",
    ),
    "devices": (
        lambda: draw.devices(
            {"model": [torch.nn.Linear(499, 500)] * 2, "x": [torch.ones(125_000)] * 2},
            {"y": [torch.ones(250_000)] * 2},
        ),
        "cpu and 2 GPUs. model, 1.00 MB: all of it to each, 1.00 MB; x, 1.00 MB: a "
        "part to each, 0.50 MB; y, 2.00 MB: back from each, 1.00 MB",
    ),
    "dealt_samples": (
        lambda: draw.dealt_samples([[3, 0, 5], [4, 1, 2]], batch=2),
        "rank 0: 3, 0, 5; rank 1: 4, 1, 2. Step 0 has the samples 3, 4, 0, 1",
    ),
    "exposed": (
        lambda: draw.exposed(
            {
                "a": of_rank(event("kernel", "mm", 5, 25), sent(25, 45)),
                "b": of_rank(event("kernel", "mm", 0, 50), sent(10, 30)),
                "c": of_rank(event("kernel", "mm", 0, 50), sent(40, 60)),
            }
        ),
        "Rank 0, simulated: a 40 µs, of which it waits 20 µs; b 50 µs, of which it "
        "waits 0 µs; c 60 µs, of which it waits 10 µs",
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


def test_only_a_read_behind_the_copy_has_an_arrow_from_it():
    for start, said in (
        (20, "reads x: nothing orders the two"),
        (90, "happens before"),
    ):
        assert said in words(draw.early_read({"run": COPY_AND_READ[start]}))


def test_stopwatches_read_what_the_timeline_says():
    simgpu.start(1)
    try:
        x = torch.ones(1024, 1024, device="cuda")
        torch.cuda.synchronize()
        log = simgpu.timeline()
        log.clear()
        for _ in range(5):
            x @ x
        torch.cuda.synchronize()
        picture = draw.stopwatches(log)
        kernels = 1e6 * sum(e.end - e.start for e in log.events)
    finally:
        simgpu.stop()
    read = dict(re.findall(r">([a-zA-Z ]+): ([\d,]+) µs<", picture._repr_svg_()))
    found = {name: float(number.replace(",", "")) for name, number in read.items()}
    assert found["the launches only"] == 50
    assert found["until the GPU is done"] == found["from mark to mark"]
    assert found["until the GPU is done"] == pytest.approx(25 + kernels, abs=1)
    assert found["the kernels"] == pytest.approx(kernels, abs=1)
    said = "One step, simulated: launched in 50 µs, done after "
    assert picture.title.startswith(said)
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


def test_each_batch_in_flight_is_drawn_once():
    picture = draw.batch_path(workers=2, factor=3)
    assert sorted(w for w in words(picture) if w.isdigit()) == [*"0123456"]
    assert "prefetch_factor 3 = 6" in picture.title


@pytest.fixture
def pipeline() -> tuple[JobTimeline, list]:
    """Two ranks, one micro-batch: a forward task of 1 ms each, and 2 ms backward."""
    rows = [
        [(1, 5, 6), (2, 9, 11)],
        [(1, 6, 7), (2, 7, 8), (3, 8, 9)],
    ]
    message = event("collective", "send to 1", 0, 1e6)
    logs = [
        [
            *(
                event("kernel", "addmm", 1e3 * start, 1e3 * end, launched=launched)
                for launched, start, end in rank
            ),
            message,
        ]
        for rank in rows
    ]
    marks = [[(1, "F", 7, 0), (2, "B", 7, 0)], [(1, "F", 7, 1), (2, "B", 7, 1)]]
    return job(*logs, microseconds=11_000), marks


def test_a_bubble_is_the_idle_share_and_messages_do_not_count_as_work(pipeline):
    log, marks = pipeline
    assert draw.bubble(log) == pytest.approx(1 - 6 / 12)
    picture = draw.pipelines({"GPipe": pipeline}, "One step")
    assert picture.title == "One step. GPipe: 6.0 ms, bubble 50.0%"
    lines = picture._repr_svg_().count("<line")
    marks[1][1] = (2, "W", 7, 3)  # of a second stage, which a line marks
    again = draw.pipelines({"v": (log, marks)}, "One")._repr_svg_()
    assert again.count("<line") == lines + 1


def test_at_the_same_time_a_gradient_changes_other_weights_than_it_belongs_to():
    said = words(draw.old_gradient())
    assert [each for each in said if each.startswith("gradient")] == [
        *("gradient at w0", "gradient at w1"),  # in turn
        *("gradient at w0", "gradient at w0"),
    ]
    assert said.count("w2 = w1 − g") == 2


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
