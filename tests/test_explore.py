"""Explorers: the picture follows the controls, and readers without a kernel see one."""

import asyncio
import re
import threading
from xml.etree import ElementTree

import pytest
import torch

import simgpu
from helpers import draw, explore
from helpers.explore import explorer as base
from scripts import plan_explorer
from scripts.plan_run import MODELS, peak_bytes, rate
from simgpu.costs import COPY_LATENCY

ALL = [
    explore.allocator, explore.overlap, explore.ring, explore.pipeline, explore.shards,
    explore.loss_scale, explore.roofline, plan_explorer.plan,
]  # fmt: skip
ALLOCATOR = dict(tensors=9, size=6, free="every second", more=12)
OVERLAP = dict(chunks=4, megabytes=64, speed=12, compute=6)


@pytest.mark.parametrize("make", ALL)
def test_the_picture_follows_the_controls(make):
    explorer = make()
    first = explorer.html.value
    ElementTree.fromstring(first)
    name, control = next(iter(explorer.controls.items()))
    before = control.value
    other = before - 1 if before == getattr(control, "max", None) else before + 1
    control.value = other
    assert explorer.values[name] == other
    assert explorer.html.value != first
    control.value = before
    assert explorer.html.value == first


@pytest.mark.parametrize("make", ALL)
def test_each_list_changes_the_picture(make):
    explorer = make()
    first = explorer.html.value
    for name, control in explorer.controls.items():
        if options := getattr(control, "options", ()):
            before = control.value
            control.value = next(value for value in options if value != before)
            assert explorer.html.value != first, name
            control.value = before


def test_a_control_moved_in_another_thread_draws_in_the_main_one():
    drawn_in = []

    class Picture:
        def _repr_svg_(self):
            drawn_in.append(threading.current_thread())
            return "<svg ></svg>"

    async def notebook():
        control = base.slider("size", 1, 0, 9)
        base.Explorer(lambda size: Picture(), size=control)
        await asyncio.to_thread(setattr, control, "value", 2)
        await asyncio.sleep(0)  # one round of the notebook's loop

    asyncio.run(notebook())
    assert drawn_in == [threading.main_thread()] * 2


@pytest.mark.parametrize("make", ALL)
def test_a_reader_without_a_kernel_sees_the_picture(make, monkeypatch):
    shown = []
    monkeypatch.setattr(base, "display", lambda bundle, raw: shown.append(bundle))
    explorer = make()
    explorer._ipython_display_()
    (bundle,) = shown
    stored = bundle["image/svg+xml"]
    assert stored.startswith("<svg xmlns")
    assert explorer.html.value.endswith(stored.removeprefix("<svg"))
    assert bundle["text/plain"].startswith("Explorer(")
    assert explorer.model_id not in bundle["text/plain"]
    view = bundle["application/vnd.jupyter.widget-view+json"]
    assert view["model_id"] == explorer.model_id


@pytest.mark.parametrize(
    "change, ending",
    [
        (
            {},
            "12 MiB more: out of memory. Free: 30 MiB in segments, "
            "largest piece 8; 4 outside",
        ),
        ({"more": 8}, "8 MiB more: found in the cache"),
        ({"more": 2}, "2 MiB more: found in the cache"),
        ({"tensors": 3}, "12 MiB more: found in a new segment"),
        ({"free": "all", "more": 48}, "48 MiB more: found in a new segment"),
        ({"size": 24}, "out of memory at tensor 3 of 9"),
    ],
)
def test_allocator_tells_how_the_story_ends(change, ending):
    picture = explore.allocator_picture(**{**ALLOCATOR, **change})
    assert picture.title.endswith(f". {ending}")


def test_allocator_draws_every_setting():
    explorer = explore.allocator()
    for free in explorer.controls["free"].options:
        for tensors in (1, 24):
            for size in (1, 24):
                explore.allocator_picture(tensors, size, free, more=48)


def test_overlap_hides_the_shorter_of_copying_and_computing():
    copy = COPY_LATENCY + 64e6 / 4 / 12e9
    times = explore.overlap_times(**OVERLAP)
    assert times[0][0] == pytest.approx(copy)
    assert times[-1][2] == pytest.approx(copy + 6e-3)  # computing is the longer here
    slow = explore.overlap_times(**{**OVERLAP, "speed": 1})
    assert slow[-1][2] == pytest.approx(4 * (COPY_LATENCY + 16e-3) + 6e-3 / 4)
    (alone,) = explore.overlap_times(**{**OVERLAP, "chunks": 1})
    assert alone[2] == pytest.approx(COPY_LATENCY + 64e6 / 12e9 + 6e-3)


def test_overlap_says_one_and_two_streams_are_the_same_for_one_chunk():
    picture = explore.overlap_picture(**{**OVERLAP, "chunks": 1})
    assert picture.title.endswith("1.00 times as fast")


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_ring_sums_every_chunk_in_every_rank(ranks):
    states = explore.ring_states(ranks)
    assert len(states) == 2 * (ranks - 1) + 1
    everyone = frozenset(range(ranks))
    assert states[-1] == [[everyone] * ranks] * ranks
    after_half = states[ranks - 1]
    complete = [row.index(everyone) for row in after_half]
    assert sorted(complete) == list(range(ranks))  # one complete chunk in each rank
    assert all(row.count(everyone) == 1 for row in after_half)
    for before, after in zip(states, states[1:], strict=False):
        changed = [sum(a != b for a, b in zip(x, y, strict=True))
                   for x, y in zip(before, after, strict=True)]  # fmt: skip
        assert changed == [1] * ranks  # each rank receives one chunk in each step


def test_ring_draws_every_step():
    pictures = [explore.ring_picture(4, step) for step in range(1, 8)]
    titles = [picture.title for picture in pictures]
    assert titles[0] == "After step 1 of 6: reduce-scatter"
    assert titles[2].endswith("reduce-scatter") and titles[3].endswith("all-gather")
    assert titles[5].endswith("all done") and titles[6] == titles[5]
    for step, picture in enumerate(pictures[:6], 1):  # four messages in each step
        assert picture._repr_svg_().count("marker-end") == 4 * step


def test_a_complete_chunk_keeps_its_colour_in_all_ranks():
    boxes = re.findall(r'<rect.* rx.*fill="(.*?)"', "\n".join(
        explore.ring_picture(4, 6).parts))  # fmt: skip
    assert boxes[-16:] == list(draw.COLOURS[:4]) * 4
    after_step_3 = boxes[32:48]
    assert [fill for fill in after_step_3 if fill != "white"] == [
        *draw.COLOURS[1:4], draw.COLOURS[0]
    ]  # fmt: skip


# -- pipelines -------------------------------------------------------------------------


def rows(schedule, stages, micro_batches, seconds=None):
    orders = [
        explore.pipeline_order(schedule, stages, stage, micro_batches)
        for stage in range(stages)
    ]
    return explore.pipeline_times(orders, seconds or [1.0] * stages)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize(
    "stages, micro_batches", [(1, 3), (2, 1), (4, 6), (4, 2), (6, 12)]
)
def test_bubbles_of_even_stages_are_the_formula(schedule, stages, micro_batches):
    found = rows(schedule, stages, micro_batches)
    assert max(row[-1][3] for row in found) == 3 * (micro_batches + stages - 1)
    for stage, row in enumerate(found):
        assert sorted(task[:2] for task in row) == sorted(
            (kind, m) for kind in "FB" for m in range(micro_batches)
        )
        for before, after in zip(row, row[1:], strict=False):
            assert after[2] >= before[3]
        held = explore.most_held(row)
        ahead = min(stages - stage, micro_batches)
        assert held == (micro_batches if schedule == "GPipe" else ahead)
    for upper, lower in zip(found, found[1:], strict=False):
        up, low = ({task[:2]: task[2:] for task in row} for row in (upper, lower))
        for m in range(micro_batches):
            assert low["F", m][0] >= up["F", m][1] and up["B", m][0] >= low["B", m][1]


def test_one_slow_stage_makes_the_others_wait():
    even, uneven = rows("1F1B", 4, 8), rows("1F1B", 4, 8, [1.0, 1.0, 1.0, 2.0])
    assert uneven[3][-1][3] >= 2 * 3 * 8 > even[3][-1][3]
    assert "idle 56%" in explore.pipeline_picture(4, 8, "1F1B", 300).title


def test_stages_that_wait_for_each_other_are_refused():
    with pytest.raises(ValueError, match="for ever"):
        explore.pipeline_times([[("B", 0), ("F", 0)]], [1.0])


# -- shards ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stage, gigabytes",  # of ZeRO's figure 1: 7.5 billion parameters on 64 GPUs
    [("DDP", 120), ("ZeRO-1", 31.4), ("ZeRO-2", 16.6), ("ZeRO-3", 1.9)],
)
def test_shards_agree_with_the_published_figure(stage, gigabytes):
    sizes = explore.shards_bytes(7_500_000_000, 64, stage, "bfloat16 mixed", "Adam")
    assert sum(sizes.values()) / 1e9 == pytest.approx(gigabytes, abs=0.06)


def test_shards_of_float32():
    sizes = explore.shards_bytes(10, 4, "ZeRO-3", "float32", "SGD with momentum")
    assert sizes == {"weights": 10, "gradients": 10, "optimizer state": 10}
    sizes = explore.shards_bytes(10, 1, "DDP", "float32", "SGD")
    assert sizes == {"weights": 40, "gradients": 40, "optimizer state": 0}


# -- a loss scale ----------------------------------------------------------------------


def test_a_loss_scale_moves_gradients_between_zero_and_infinity():
    gradients = torch.tensor([0.0, 2.0**-30, -(2.0**-20), 1.0, 2.0])
    assert explore.loss_scale_shares(gradients, 0) == (0.25, 0.0)  # 0 cannot be lost
    assert explore.loss_scale_shares(gradients, 10) == (0.0, 0.0)
    assert explore.loss_scale_shares(gradients, 15) == (0.0, 0.25)
    title = explore.loss_scale_picture(gradients, 16).title
    assert title == "Gradients in float16, scale 2^16: 0% become 0, 50% become inf"


@pytest.mark.parametrize("power", [0, 8, 16, 40])
def test_the_zones_of_the_picture_are_those_of_float16(power):
    picture = explore.loss_scale_picture(2.0 ** torch.arange(-48, 24), power)
    text = picture._repr_svg_()
    for words in ("becomes 0", "loses digits", "all digits", "becomes inf"):
        assert words in text


def test_the_classifier_loses_its_gradients_without_a_scale():
    explorer = explore.loss_scale()
    assert re.search(r"(8|9)\d% become 0, 0% become inf", explorer.html.value)
    explorer.controls["power"].value = 16
    assert "scale 2^16: 0% become 0, 0% become inf" in explorer.html.value


# -- plans -----------------------------------------------------------------------------

PLAN = dict(
    model="70B", gpus=64, network=400, shard="all", tp=1, pp=1, cp=1, sequences=1,
    twice="all blocks",
)  # fmt: skip


def test_plan_says_what_fits_and_how_fast_it_is():
    title = plan_explorer.plan_picture(**PLAN).title
    asked = {name: value for name, value in PLAN.items() if name != "model"}
    plan = plan_explorer.plan_of(**asked)
    total = sum(peak_bytes(MODELS["70B"], plan).values())
    tokens, _ = rate(MODELS["70B"], plan)
    assert title.startswith(f"70B on 64 H100: {total / 2**30:.1f} GiB each, fits")
    assert f"{tokens:,.0f} tokens/s of each GPU" in title
    title = plan_explorer.plan_picture(**PLAN | dict(shard=1)).title
    assert "does not fit" in title and "if it did: " in title


def test_plan_says_what_it_does_not_know_and_what_does_not_divide():
    title = plan_explorer.plan_picture(**PLAN | dict(network=0)).title
    assert "not known: the network between machines" in title
    title = plan_explorer.plan_picture(**PLAN | dict(gpus=8, tp=4, pp=4)).title
    assert "does not divide 8 GPUs" in title
    title = plan_explorer.plan_picture(**PLAN | dict(tp=4, pp=8, shard=8)).title
    assert "not 8, but 2 of 64 GPUs have the same part" in title


def test_plan_draws_every_choice():
    explorer = plan_explorer.plan()
    for name, control in explorer.controls.items():
        for value in getattr(control, "options", (1, 2, 3, 4)):
            picture = plan_explorer.plan_picture(**PLAN | {name: value})
            ElementTree.fromstring(picture._repr_svg_())


def test_the_kernels_of_a_step_are_those_of_the_log():
    first, second = 2 * 512 * 64 * 512, 2 * 512 * 512 * 10
    kernels = explore.step_kernels(512)
    matmuls = [kernel for kernel in kernels if kernel.name.endswith("mm")]
    assert sum(kernel.flops for kernel in matmuls) == 2 * first + 3 * second
    relu = next(kernel for kernel in kernels if kernel.name == "relu")
    assert (relu.flops, relu.nbytes) == (512 * 512, 2 * 4 * 512 * 512)
    assert relu.intensity == 1 / 8


def test_lower_precision_moves_fewer_bytes_or_computes_faster():
    plain, tf32, half = (
        explore.step_kernels(4096, 1024, 2, "A100", numbers)
        for numbers in ("float32", "tf32", "bfloat16")
    )

    def total(kernels, what: str) -> float:
        return sum(getattr(kernel, what) for kernel in kernels)

    assert total(tf32, "nbytes") == total(plain, "nbytes") > total(half, "nbytes") * 1.9
    assert total(plain, "seconds") > total(tf32, "seconds") > total(half, "seconds")
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_roofline_says_what_launches_and_kernels_take():
    title = explore.roofline_picture(512).title
    said = "A100, float32, batch 512, simulated: kernels 56 µs, launches 150 µs; "
    assert title.startswith(said) and "mm 30% at 26 FLOPs a byte" in title
    assert "mm" in explore.roofline_picture(32768)._repr_svg_()


def test_kernels_are_simulated_in_another_process_where_gpus_are_real(monkeypatch):
    expected = explore.step_kernels(512)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not simgpu.is_running()
    assert explore.step_kernels(512) == expected
