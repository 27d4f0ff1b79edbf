"""`helpers.draw`: words that a picture takes from its data, colours, and bad input.

What a lesson's picture looks like is stored with the lesson and compared there, sign by
sign. Here are rules that hold for other data than a lesson's.
"""

import re
import struct
from math import log as ln
from types import SimpleNamespace

import pytest
import torch

import simgpu
from helpers import draw
from helpers.draw.loaders import plan
from helpers.draw.meshes import shares
from helpers.draw.precision import FORMATS, bits_of
from simgpu import Event, JobTimeline, RankLog
from simgpu.pictures import COLOURS, HOST

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


def boxes(picture) -> list[tuple[str, str]]:
    """The fill and the words of each box that has words."""
    found = r'<rect [^>]*fill="([#\w]+)"[^>]*/><text[^>]*>([^<]+)<'
    return re.findall(found, picture._repr_svg_())


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


SHARED_STEP = [
    event("copy", "", 0, 1000, source="cuda:0", target="cuda:1", device="cuda:1"),
    event("kernel", "addmm", 1000, 2000, device="cuda:1"),
    event("kernel", "addmm", 1000, 2000),
    event("copy", "", 2000, 2100, source="cuda:1", target="cuda:0"),
    event("kernel", "mm", 2500, 3500),
    event("kernel", "mm", 2500, 3500, device="cuda:1"),
    event("copy", "", 3500, 4500, source="cuda:1", target="cuda:0"),
    event("kernel", "_foreach_add_", 4500, 5000),
]
BEFORE = [[10 * rank + i for i in range(2)] for rank in range(2)]
COLLECTIVES = {
    "broadcast": [(before, BEFORE[1]) for before in BEFORE],
    "all-reduce": [(before, [10, 12]) for before in BEFORE],
}
LATE = {"waited": 40 * US, "waited_for": 1}
ONE_WAY = job(
    [event("collective", "recv from 1", 0, 100, **LATE)],
    [event("collective", "send to 0", 40, 100)],
    microseconds=100,
)
BOTH_WAYS = job(
    [
        event("collective", "send to 1", 0, 100),
        event("collective", "recv from 1", 0, 100),
        event("kernel", "add_", 100, 200),
    ],
    [],
    microseconds=200,
)
LOOPS = {
    "in turns": [
        event("copy", "", 0, 20),
        event("copy", "", 70, 90),
        event("kernel", "mm", 20, 70),
        event("kernel", "mm", 90, 140),
    ],
    "overlapped": [
        event("copy", "", 0, 20),
        event("copy", "", 20, 40),
        event("kernel", "mm", 20, 70),
        event("kernel", "mm", 70, 120),
    ],
}
STEPS = {
    "as written": (
        100 * US,
        [event("copy", "", 110, 120), event("kernel", "mm", 150, 200)],
    ),
    "lean": (0.0, [event("kernel", "mm", 10, 50)]),
}
SHARDED = [
    event("collective", "all_gather blocks.7", 100, 150),
    event("kernel", "addmm", 150, 200),
    event("kernel", "mm", 260, 300),
    event("collective", "reduce_scatter blocks.7", 300, 340),
]
NODES = [
    event("kernel", "mm", 100, 200),
    event("collective", "all_gather blocks.0", 200, 400, group="ranks 2, 3"),
    event("collective", "all_reduce blocks.0", 300, 700, group="ranks 0, 2"),
    event("collective", "all_reduce bucket 1", 700, 1100, group="all ranks"),
    event("kernel", "mm", 1000, 1100),
]
RING = job(
    *(
        [
            event("kernel", "mm", 0, 100 + late),
            event("collective", "send", 80 + late, 140 + late),
            event("copy", "", 0, 999),
        ]
        for late in (0, 50)
    ),
    microseconds=999,
)
CHUNKS = {
    "contiguous": [[0], [1], [2], [3]],
    "head and tail": [[0, 7], [1, 6], [2, 5], [3, 4]],
}
MEMORY = {
    "forward": {"parameters": 4 * MIB, "temporary": 2 * MIB},
    "step": {"parameters": 4 * MIB, "gradients": 4 * MIB, "temporary": 0},
}
BUDGETS = {
    "plain": draw.Budget({"activations": 64 * MIB, "gradients": 8 * MIB}, 72 * MIB, 5),
    "2 parts": draw.Budget({"activations": 32 * MIB, "gradients": 0}, 36 * MIB, 6.25),
}
MESH = {"replicate": [[0, 4], [1, 5]], "shard": [[0, 1], [4, 5]]}
FULL, HALF = (0, 0, 1, 1), (0, 0, 0.5, 1)
SHARES = {"FSDP": [(FULL, HALF, "0-3"), (FULL, (0.5, 0, 0.5, 1), "4-7")]}
JUDGED = {
    "1. always": {"one rank": True, "two ranks": True},
    "2. sometimes": {"small": False, "large": True, "larger": None},
    "3. nobody knows": {"here": None},
}
SAID = {2: "true", 3: "true when large", 1: "cannot be judged without a card"}
HALF_FULL = [torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)]
RUNS = [("one", 1.1, True), ("two", 0.8, False), ("three", 1.2, False)]
CARD = ("A100, float32", 19.5e12, 2039e9)


def exposed() -> draw.Picture:
    return draw.exposed(
        {
            name: of_rank(event("kernel", "mm", *k), event("collective", "send", *c))
            for name, k, c in (
                ("a", (5, 25), (25, 45)),
                ("b", (0, 50), (10, 30)),
                ("c", (0, 50), (40, 60)),
            )
        }
    )


def network(*events: Event) -> draw.Picture:
    return draw.network_steps({"HSDP": of_rank(*events)}, "One step", per_node=2)


# -- what the alternative text says ----------------------------------------------------

TITLES = {
    "averaging": (
        lambda: draw.averaging(
            {name: ddp_step(at) for name, at in (("after", 60), ("during", 30))},
            ranks=[0],
        ),
        "after: 1 messages, the GPU waits 40 of 105 µs",
        "during: 1 messages, the GPU waits 10 of 75 µs",
    ),
    "averaging, hidden": (
        lambda: draw.averaging({"hidden": ddp_step(15)}, ranks=[0]),
        "hidden: 1 messages, the GPU waits 0 of 65 µs",
    ),
    "before_after": (
        lambda: draw.before_after(COLLECTIVES),
        "broadcast: rank 0 has 0 1, then 10 11; rank 1",
        "all-reduce: rank 0 has 0 1, then 10 12",
    ),
    "budgets": (
        lambda: draw.budgets(BUDGETS, card=48 * MIB, kind="simulated"),
        "plain 72 MiB, 5.0 ms",
        "simulated",
    ),
    "conversations": (
        lambda: draw.conversations({"one way": ONE_WAY, "both ways": BOTH_WAYS}),
        "one way: 100 µs; both ways: 200 µs",
    ),
    "hidden_copies": (
        lambda: draw.hidden_copies(LOOPS, 2),
        "2 batches, simulated: in turns 140 µs, 0 hidden; overlapped 120 µs, 20 hidden",
    ),
    "hidden_copies, of a real GPU": (
        lambda: draw.hidden_copies({"in turns": []}, 2),
        "simulated GPUs",
    ),
    "shared_step": (
        lambda: draw.shared_step(SHARED_STEP),
        "computing 2.5 ms, copying 2.1 ms, idle 0.4 ms",  # a copy is on both GPUs
        "computing 2.0 ms, copying 2.1 ms, idle 0.9 ms",
    ),
    "equal_ranks": (
        lambda: draw.equal_ranks({"weights": [1.5] * 3, "mean": [0.25, 0.5, 0.25]}, {}),
        "Values on 3 ranks. weights: equal; mean: 2 different values",
    ),
    "tokens_to_experts": (
        lambda: draw.tokens_to_experts([[1, 0], [0, 0]]),
        "rank 1: tokens for 0, 0, then tokens of ranks 0",
    ),
    "loaders": (
        lambda: draw.loaders(1e-3, 0.4e-3, [1, 3], batches=3),
        "1 worker: 3 batches in 3.4 ms; after its first batch the GPU waits 1.2 ms",
        "3 workers: 3 batches in 2.2 ms; after its first batch the GPU waits 0.0 ms",
    ),
    "memory_bars": (
        lambda: draw.memory_bars("Peaks", MEMORY, {"forward": 6.5 * MIB, "step": 8}),
        "Peaks, simulated. forward: predicted 6 MiB, counted 6.5 MiB;",
    ),
    "mesh": (
        lambda: draw.mesh(MESH, per_node=4),
        "replicate: 0-4, 1-5, over the network",
        "shard: 0-1, 4-5, inside a node, NVLink",
    ),
    "shares": (
        lambda: shares(SHARES, per_node=2),
        "FSDP: rank 0 computes 100 %, stores 50 %, samples 0-3",
    ),
    "mesh_ways": (
        draw.mesh_ways,
        "HSDP: rank 0 computes 100 %, stores 25 %, samples 0–3",
        "FSDP x TP: rank 0 computes 25 %, stores 12.5 %, samples 0–15",
        "TP x PP: rank 0 computes 12.5 %, stores 12.5 %, samples 0–31",
    ),
    "network_steps": (
        lambda: network(*NODES),
        "computes 200 and the network is busy 800",
    ),
    "network_steps, two messages at once": (
        lambda: network(
            event("kernel", "mm", 0, 10),
            event("collective", "all_gather", 10, 50, group="all ranks"),
            event("collective", "reduce_scatter", 30, 80, group="all ranks"),
        ),
        "the network is busy 70",
    ),
    "number_formats": (
        lambda: draw.number_formats(0.1),
        "0.1 as float32, TF32, float16, bfloat16, bit by bit",
    ),
    "mixed_step": (
        lambda: draw.mixed_step(*(HALF_FULL[i] for i in (0, 1, 1, 0, 1, 0))),
        "One step of mixed precision: weights float32, copies bfloat16, matmuls bf",
    ),
    "published_runs": (
        lambda: draw.published_runs(RUNS),
        "fitted: 1 within a factor of 1.15, 1 within 1.3",
        "judged: 0 within a factor of 1.15, 2 within 1.3",
    ),
    "attention_squares": (
        lambda: draw.attention_squares(CHUNKS),
        "rank 0 6%, rank 1 19%, rank 2 31%, rank 3 44%",
        "rank 0 25%, rank 1 25%, rank 2 25%, rank 3 25%",
    ),
    "online_softmax": (  # weights 1, 2, 8 and 4 of 15
        lambda: draw.online_softmax([[0, ln(2)], [ln(8), ln(4)]], [[10, 20], [30, 40]]),
        "joined: 30",
    ),
    "attention_times": (
        lambda: draw.attention_times({"a ring": RING}),
        "a ring: 190 µs, the ranks compute 100, 150",
    ),
    "sharded_steps": (
        lambda: draw.sharded_steps({"by hand": (100 * US, 220 * US, SHARDED)}, "A"),
        "by hand: 200 µs, of which the GPU waits 110",
    ),
    "shared_tensor": (
        lambda: draw.shared_tensor(50_000_000),
        "A handle goes through the queue",
    ),
    "two_matmuls": (
        lambda: draw.two_matmuls(4, tokens=512, width=128, hidden=512),
        "128 of 512 columns",
        "adds 4 terms",
    ),
    "exposed": (
        exposed,
        "Rank 0, simulated: a 40 µs, of which it waits 20 µs; b 50 µs, of which it "
        "waits 0 µs; c 60 µs, of which it waits 10 µs",
    ),
    "steps": (
        lambda: draw.steps(STEPS),
        "as written: 100 µs = 10 copying + 50 computing + 40 idle",
        "lean: 50 µs = 0 copying + 40 computing + 10 idle",
    ),
    "verdicts": (
        lambda: draw.verdicts(JUDGED, lambda cases: SAID[len(cases)]),
        "Claims. 1. always: true (2 holds); 2. sometimes: true when … "
        "(1 holds, 1 fails, 1 open); 3. nobody knows: cannot be judged without a card "
        "(1 open)",
    ),
}


@pytest.mark.parametrize("name", TITLES)
def test_the_title_says_what_the_data_say(name):
    make, *said = TITLES[name]
    picture = make()
    (title,) = re.findall("<title>(.*?)</title>", picture._repr_svg_())
    assert title == picture.title
    for each in said:
        assert each in title


@pytest.mark.parametrize(
    "off, below",
    [
        (0.0, "0.00001"),
        (2e-6, "0.00001"),
        (9e-6, "0.00001"),
        (4e-5, "0.0001"),
        (4e-4, "0.01"),
        (4e-2, "1"),
    ],
)
def test_loss_curves_say_the_bound_above_the_largest_distance(off, below):
    one = {0: 5.5, 1: 5.0, 2: 4.25}
    other = one | {1: 5.0 - off}
    picture = draw.loss_curves({"DDP": other}, one, "A training")
    assert f"DDP: below {below}" in picture.title
    assert f"below {below}" in words(picture)


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


# -- colours ---------------------------------------------------------------------------


def test_a_number_keeps_the_colour_of_its_rank_and_a_sum_is_grey():
    broadcast = boxes(draw.before_after({"broadcast": COLLECTIVES["broadcast"]}))
    assert broadcast.count((COLOURS[1], "11")) == 3  # before, and after on both
    assert broadcast.count((COLOURS[0], "1")) == 1
    reduced = boxes(draw.before_after({"all-reduce": COLLECTIVES["all-reduce"]}))
    assert reduced.count(("#DDDDDD", "12")) == 2


def test_a_message_has_the_colour_of_its_sender_and_computing_is_grey():
    found = boxes(draw.conversations({"one way": ONE_WAY}))
    assert {(COLOURS[1], "from 1"), (COLOURS[1], "to 0")} <= set(found)
    assert ("white", "waits for rank 1") in found
    found = boxes(draw.conversations({"both ways": BOTH_WAYS}, ranks=[0]))
    assert (COLOURS[0], "to 1, from 1") in found and (HOST, "add") in found


def test_equal_values_have_one_colour_and_others_their_own():
    values = {"weights": [1.5, 1.5, 1.5], "mean": [0.25, 0.5, 0.25]}
    svg = draw.equal_ranks(values, {"mean": "nobody"})._repr_svg_()
    fills = re.findall(r'fill="(#\w+)" stroke', svg)
    assert len(set(fills[:3])) == 1
    assert fills[3] == fills[5] != fills[4]


def test_a_token_goes_to_its_expert_and_keeps_its_colour():
    svg = draw.tokens_to_experts([[1, 0], [0, 0]])._repr_svg_()
    found = re.findall(r'<rect x="([\d.]+)" y="(\d+)"[^>]*fill="(#\w+)"', svg)
    first, second = COLOURS[:2]
    assert [c for _, y, c in found if y == "52"] == [first, first, second, second]
    assert [c for _, y, c in found if y == "108"] == [first, second, second, first]


def test_a_part_of_memory_has_one_colour_in_every_row():
    counted = {"forward": 6.5 * MIB, "step": 8 * MIB}
    svg = draw.memory_bars("Peaks", MEMORY, counted)._repr_svg_()
    for colour, times in zip(draw.COLOURS[:2], (3, 2), strict=True):
        assert svg.count(f'fill="{colour}"') == times  # with the legend; no empty box


def test_a_group_of_a_mesh_a_slice_and_a_type_have_one_colour_each():
    mesh = draw.mesh({"tp": [[0, 2], [1, 3]]}, per_node=4)._repr_svg_()
    assert [mesh.count(draw.COLOURS[i]) for i in range(2)] == [2, 2]
    slices = draw.two_matmuls(2, tokens=8, width=4, hidden=16)._repr_svg_()
    # legend, A, hidden, hidden again, B, term
    assert [slices.count(f'fill="{colour}"') for colour in COLOURS[:3]] == [6, 6, 0]
    step = TITLES["mixed_step"][0]()._repr_svg_()
    assert step.count(draw.COLOURS[1]) == 3 and step.count(draw.COLOURS[0]) == 4


def test_dots_have_the_colour_of_their_roof():
    roofs = [CARD, ("H100, float32", 67e12, 3350e9)]
    points = [("first@0", 1.0, 1e11), ("second@1", 1.0, 2e11)]
    svg = draw.roofline("title", roofs, points)._repr_svg_()
    for colour in draw.COLOURS[:2]:
        assert re.search(rf'<circle [^>]*fill="{colour}"', svg)
    assert "memory-bound" not in svg  # which side is bound by what: of one roof


def test_a_case_that_fails_is_dashed_and_others_are_not():
    svg = draw.verdicts(JUDGED, lambda cases: SAID[len(cases)])._repr_svg_()
    found = [box for box in re.findall("<rect [^>]*>", svg) if "stroke=" in box]
    key, cases = found[:3], found[3:]
    assert ["dasharray" in box for box in cases] == [i == 2 for i in range(6)]
    fills = [re.search('fill="(.*?)"', box)[1] for box in key + cases]
    assert fills[3] == fills[4] == fills[6] == fills[0]
    assert fills[7] == fills[8] == fills[2] != fills[0]


# -- where things are ------------------------------------------------------------------


@pytest.mark.parametrize(
    "picture, height",
    [
        (lambda: draw.steps(STEPS), 24),
        (lambda: draw.budgets(BUDGETS, card=48 * MIB, kind="simulated"), 24),
    ],
)
def test_rows_share_one_axis(picture, height):
    svg = picture()._repr_svg_()
    row = rf'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="{height}"'
    found = [(float(x), float(width)) for x, width in re.findall(row, svg)]
    widths = [width for x, width in found if x == found[0][0]]
    assert widths[0] == pytest.approx(2 * widths[1], rel=1e-4)


def test_two_pictures_can_share_an_axis():
    alone = draw.averaging({"during": ddp_step(30)}, ranks=[0])
    shared = draw.averaging({"during": ddp_step(30)}, ranks=[0], until=ddp_step(60))
    assert "75 µs (simulated)" in words(alone)
    assert "105 µs (simulated)" in words(shared)


def test_an_axis_has_few_marks_however_long_the_step():
    for seconds in (50e-6, 4e-3, 2.0):
        events = [event("kernel", "mm", 0, 1e6 * seconds)]
        marks = words(draw.steps({"run": (0.0, events)}))
        assert sum(bool(re.fullmatch(r"\d+ µs", mark)) for mark in marks) <= 11
    assert draw.steps({})._repr_svg_()


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


def test_names_of_collectives_stay_left_of_the_numbers():
    picture = draw.before_after({"reduce-scatter": COLLECTIVES["broadcast"]})
    first = min(map(float, re.findall(r'<rect x="([\d.]+)"', picture._repr_svg_())))
    assert first >= 8 + len("reduce-scatter") * 7.5


# -- what must not change a picture ----------------------------------------------------


def test_a_later_copy_is_no_part_of_the_step():
    """A notebook compares the values of a step before it asks for its timeline."""
    late = event("copy", "", 80, 99, source="cuda:0", target="cpu")
    plain, with_copy = ddp_step(30), ddp_step(30, late)
    titles = [draw.averaging({"step": log}, ranks=[0]).title
              for log in (plain, with_copy)]  # fmt: skip
    assert titles[0] == titles[1]


def test_a_rounding_error_does_not_change_loss_curves():
    one = {0: 5.5, 1: 5.0, 2: 4.25}
    pictures = {
        draw.loss_curves(
            {"DDP": {step: loss + off for step, loss in one.items()}}, one, "A"
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
        for every in (5, 100)
    ]
    assert bars == [2 + 1, 1]  # a checkpoint of two ranks; the key has one


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


@pytest.mark.parametrize(("workers", "interval"), [(1, 10), (2, 5), (3, 4), (8, 4)])
def test_the_slower_of_loading_and_training_sets_the_pace(workers, interval):
    _, used = plan(load=10, step=4, workers=workers, batches=49)
    begin, end = used[0][0], used[48][0]
    assert (end - begin) / 48 == pytest.approx(interval)


def test_a_worker_runs_ahead_by_its_prefetch_factor_and_no_more():
    loaded, used = plan(load=1, step=100, workers=1, batches=4, factor=2)
    assert loaded[2][0] == loaded[1][1]  # asked for as the loop takes batch 0
    assert loaded[3][0] == used[1][0] == 101


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


def test_messages_without_names_get_the_numbers_of_their_blocks():
    names = ["all_gather"] * 4 + ["reduce_scatter"] * 2
    sent = [event("collective", n, i, i + 1, nbytes=64) for i, n in enumerate(names)]
    small = event("collective", "all_gather", 20, 21)
    run = (0.0, 3e-6, [small, *sent])
    said = words(draw.sharded_steps({"by hand": run}, "A step", blocks=2))
    assert said.count("1") == 3
    assert said.count("0") == 3 + 1  # and where the axis begins


def test_a_message_between_nodes_is_on_the_lane_of_the_network():
    said = words(network(*NODES))
    assert said.count("NVLink") == 1 and said.count("network") == 1
    assert said.count("all-reduce") == 2 and said.count("waits") == 1
    assert not {"NVLink", "network"} & set(words(network(NODES[0])))


# -- bad input -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, why",
    [
        (
            lambda: draw.hidden_copies({"in turns": LOOPS["in turns"]}, 3),
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
    ],
)
def test_what_cannot_be_drawn_is_refused(make, why):
    with pytest.raises(ValueError, match=why):
        make()
