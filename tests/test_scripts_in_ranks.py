"""Scripts of lessons 15 to 25, 28 and 29: what `test_take_home.py` has no table for.

Each lesson's part says what its ranks measure, keep, save or find wrong.
"""

import os
import re
import shlex
from pathlib import Path

import pytest
import torch

import simgpu
from tests import take_home
from tests.launching import SCRIPTS, load, prose_of
from tests.take_home import OWN

pytestmark = pytest.mark.slow

RANKS = {1: "1 ranks", 2: "2 ranks", 4: OWN}  # how so many ranks start most scripts


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d\.\d{4})", text)]


def by_step(text: str) -> dict[int, float]:
    """Step -> the loss that was printed for it."""
    found = re.findall(r"step (\d+): loss (\d\.\d{4})", text)
    return {int(step): float(loss) for step, loss in found}


def counts(pattern: str, text: str) -> list[int]:
    """What the pattern's only group finds."""
    return [int(count.replace(",", "")) for count in re.findall(pattern, text)]


# -- 15, bus_bandwidth.py --------------------------------------------------------------


@pytest.mark.parametrize("ranks", [4, 2])
def test_bandwidths_follow_from_the_time(ran, ranks):
    printed = ran("15", RANKS[ranks]).text
    assert f"on {ranks} x NVIDIA A100" in printed
    row = r"^ *([\d,]+) +([\d.]+) +([\d.]+) +([\d.]+)  (.+)$"
    rows = re.findall(row, printed, re.M)
    assert [values for *_, values in rows] == ["right"] * 4
    for size, *numbers, _ in rows:
        nbytes = int(size.replace(",", ""))
        microseconds, algorithm, bus = map(float, numbers)
        assert algorithm == pytest.approx(
            nbytes / microseconds / 1e3, rel=0.01, abs=0.01
        )
        factor = 2 * (ranks - 1) / ranks
        assert bus == pytest.approx(algorithm * factor, rel=0.01, abs=0.01)
        if nbytes == 2**24 and ranks == 4:  # a large one takes the simulator's time
            chosen = simgpu.estimate_collective("all_reduce", nbytes, 4, "A100")
            assert microseconds == pytest.approx(chosen.seconds * 1e6, rel=0.03)
            assert bus == pytest.approx(chosen.bus_bandwidth / 1e9, rel=0.03)
    assert 2**24 in [int(size.replace(",", "")) for size, *_ in rows]


# -- 16, train_ddp.py ------------------------------------------------------------------


@pytest.mark.parametrize("way, width", [(OWN, 2), ("2 ranks --accumulate 2", 4)])
def test_ddp_sends_each_gradient_once_a_step(ran, way, width):
    numbers = 64 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10  # parameters
    printed = ran("16", way).text
    assert counts(r"in a step: (\d+) messages", printed) == [2]
    assert counts(r"([\d,]+) bytes of gradients", printed) == [width * numbers]


# -- 17, check_ranks.py ----------------------------------------------------------------

SPOILT = "4 ranks --epochs 3 --spoil 2"


def test_ranks_have_the_losses_of_one_also_after_a_second_start(ran):
    one = losses(ran("17", "1 ranks --epochs 3").text)
    assert len(one) == 3
    assert losses(ran("17").text) == pytest.approx(one[:2], abs=1e-4)
    again = ran("17", SPOILT, after=OWN).text
    assert "checkpoint.pt: go on with epoch 2" in again
    assert losses(again) == pytest.approx(one[2:], abs=1e-4)
    two = losses(ran("17", "2 ranks --epochs 1 --spoil 1").text)
    assert two == pytest.approx(one[:1], abs=1e-4)


def test_a_rank_that_differs_is_named_with_the_tensor(ran):
    printed = ran("17", SPOILT, after=OWN).text
    assert "step 3: 9 tensors are equal on 4 ranks" in printed
    assert "step 7: rank 2 IS OUT OF STEP in 0.weight" in printed
    assert printed.count("IS OUT OF STEP") == 1


def test_of_two_ranks_neither_is_blamed_alone(ran):
    printed = ran("17", "2 ranks --epochs 1 --spoil 1").text
    for rank in range(2):
        assert f"step 7: rank {rank} IS OUT OF STEP in 0.weight" in printed


# -- 18, sharded_training.py -----------------------------------------------------------


def test_four_ranks_and_then_two_have_the_losses_of_one_process(ran):
    one = by_step(ran("18", "1 ranks --steps=20").text)
    four = by_step(ran("18").text)
    two = by_step(ran("18", "2 ranks --load=checkpoint", after=OWN).text)
    assert list(one) == list(range(20)) and one[19] < 0.6 * one[0]
    assert [*four, *two] == list(one)
    assert {**four, **two} == pytest.approx(one, abs=2e-4)  # sums in another order


def test_a_rank_of_four_needs_less_memory_than_one_process(ran):
    four, alone = (
        [float(mib) for mib in run.text.partition("each rank: ")[2].split(", ")]
        for run in (ran("18"), ran("18", "1 ranks --steps=20"))
    )
    assert len(four) == 4 and max(four) < 0.75 * alone[0] and len(alone) == 1


# -- 19, slice_layers.py; 20, pipeline_layers.py; 21, stretch_sequence.py; 22 and 23 ---


@pytest.mark.parametrize("ranks", RANKS)
def test_a_rank_keeps_its_share_of_the_weights_and_says_so(ran, ranks):
    printed = ran("19", RANKS[ranks]).text
    rows = re.findall(r"rank (\d) of (\d): weights ([\d,]+), peak", printed)
    assert [(int(a), int(b)) for a, b, _ in rows] == [(r, ranks) for r in range(ranks)]
    for kept in counts(r"weights ([\d,]+), peak", printed):
        share = 1_685_760 / ranks  # bytes of the model, on one rank
        assert share <= kept < 1.02 * share  # norms are not cut


def test_a_stage_has_about_a_quarter_of_the_parameters(ran):
    kept = counts(r"rank \d: ([\d,]+) parameters", ran("20").text)
    assert len(kept) == 4
    assert sum(kept) == 1_065_354 and max(kept) < 0.26 * 1_065_354


def test_the_cut_balances_parameters():
    script = load("pipeline_layers.py")
    layers = [torch.nn.Linear(4, n, bias=False) for n in (8, 1, 1, 2, 4)]
    parts = script.cut(layers, 2)
    assert [len(part) for part in parts] == [1, 4]
    assert sum(map(list, parts), []) == layers
    with pytest.raises(SystemExit, match="2 layers are too few for 4 stages"):
        script.cut([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)], 4)


@pytest.mark.parametrize(
    "number, pattern, each",
    [
        ("19", r"peak ([\d,]+)", True),
        ("21", r"peak ([\d,]+)", True),
        ("22", r"ranks: peak (\d+)\.", False),  # MiB of the largest rank
    ],
)
def test_every_rank_says_its_peak_and_more_ranks_need_less(ran, number, pattern, each):
    found = [counts(pattern, ran(number, way).text) for way in RANKS.values()]
    assert [len(peaks) for peaks in found] == ([*RANKS] if each else [1, 1, 1])
    one, two, four = map(max, found)
    assert four < two < one


@pytest.mark.parametrize("way", ["2 ranks", OWN])
def test_experts_on_more_ranks_are_as_balanced(ran, way):
    def balances(way: str) -> list[float]:
        return [float(b) for b in re.findall(r"balance ([\d.]+)", ran("22", way).text)]

    assert len(balances(way)) == 4
    assert balances(way) == pytest.approx(balances("1 ranks"), abs=0.011)


def test_the_model_with_experts_learns(ran):
    first, *_, last = losses(ran("22").text)
    assert last < 3.7 < first


@pytest.mark.parametrize(
    "way, mesh",  # copies, shards and slices of the model
    [("2 ranks", (1, 2, 1)), (OWN, (1, 2, 2)), ("4 ranks --replicate 2", (2, 2, 1))],
)
def test_copies_do_not_divide_what_a_rank_stores(ran, way, mesh):
    printed = ran("23", way).text
    assert f"mesh {mesh}, step 0" in printed
    (one,) = counts(r"stores ([\d,]+) bytes", ran("23", "1 ranks").text)
    share = one / mesh[1] / mesh[2]
    (stored,) = counts(r"stores ([\d,]+) bytes", printed)
    assert share <= stored < 1.02 * share


# -- 24, train_elastic.py --------------------------------------------------------------


def test_ranks_of_an_elastic_job_have_the_losses_of_one_process(ran):
    one = by_step(ran("24", "1 ranks --steps 36").text)
    two = by_step(ran("24").text)
    for step in (5, 10, 15, 20):
        assert two[step] == pytest.approx(one[step], abs=2e-4)
    assert list(two) == [5, 10, 15, 20, 24] and two[24] < 0.7 * two[5]
    more = "4 ranks --folder checkpoints --steps 36"
    again = by_step(ran("24", more, after=OWN).text)
    assert list(again) == [25, 30, 35, 36]  # four ranks go on where two have ended
    for step in again:
        assert again[step] == pytest.approx(one[step], abs=2e-4)


def test_a_killed_rank_is_started_again_by_the_lessons_command(ran, tmp_path):
    """What the first start has left in the store of torchrun must not be read."""
    loop = "    while step < args.steps:\n"
    dies = '        if (step, rank, os.environ["TORCHELASTIC_RESTART_COUNT"]) == '
    dies += '(12, 1, "0"):\n            os.kill(os.getpid(), 9)\n'
    text = (SCRIPTS / "train_elastic.py").read_text(encoding="utf-8")
    assert text.count(loop) == 1
    mortal = tmp_path / "train_elastic.py"
    mortal.write_text(text.replace(loop, loop + dies))
    _, command = take_home.commands(prose_of(take_home.lesson_of("24")))
    command = command.replace("train_elastic.py", str(mortal))
    found = by_step(take_home.run_command(command, tmp_path))
    assert list(found) == [5, 10, 15, 20, 24]
    one = by_step(ran("24", "1 ranks --steps 36").text)
    assert found[20] == pytest.approx(one[20], abs=2e-4)


def test_steps_of_an_epoch_have_different_samples():
    script = load("train_elastic.py")
    steps = script.SAMPLES // 120
    rows = [script.rows_of_step(step, 120, script.SAMPLES) for step in range(2 * steps)]
    first, second = torch.cat(rows[:steps]), torch.cat(rows[steps:])
    assert len(first.unique()) == len(second.unique()) == script.SAMPLES
    assert not torch.equal(first, second)


def test_checkpoints_are_whole_or_not_there(tmp_path: Path):
    script = load("train_elastic.py")
    assert script.newest(tmp_path) == (None, [])
    for step in (5, 10, 15):
        script.save(tmp_path, step, {"step": step})
    names = ["step-000010.pt", "step-000015.pt"]
    assert [path.name for path in sorted(tmp_path.iterdir())] == names
    assert script.newest(tmp_path) == ({"step": 15}, [])
    whole = (tmp_path / names[1]).read_bytes()
    for wrong in (b"", whole[:40], whole[:-1], whole[:-1] + b"?"):
        (tmp_path / names[1]).write_bytes(wrong)
        assert script.newest(tmp_path) == ({"step": 10}, [names[1]])


# -- 25, train_on_nodes.py -------------------------------------------------------------


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory) -> str:
    """What the lesson's other command prints: two nodes of one `simgpu`."""
    lesson = prose_of(take_home.lesson_of("25"))
    (shown,) = re.findall(r"```sh\npython (.*)\n```", lesson)
    return take_home.run_command(f"python {shown}", tmp_path_factory.mktemp("nodes"))


def test_two_nodes_of_one_command_have_the_losses_of_one_process(ran, two_nodes):
    one = losses(ran("25", "1 ranks").text)
    assert losses(two_nodes) == pytest.approx(one, abs=2e-4)  # sums in another order


def test_each_rank_takes_a_gpu_of_its_node(ran, two_nodes):
    for printed in (two_nodes, ran("25").text):
        found = re.findall(r"rank (\d): node (\d), GPU (\d)", printed)
        assert found == [tuple(place) for place in ("000", "101", "210", "311")]


def test_the_network_is_slower_than_the_links_inside(ran, two_nodes):
    def speed(where: str) -> float:
        return float(re.search(rf"{where}: ([\d.]+) GB/s", two_nodes)[1])

    # 10 Gbit/s for two GPUs, of which NCCL is assumed to reach 90 %
    assert speed("between nodes") == pytest.approx(0.6, abs=0.06)
    assert speed("inside a node") > 50
    assert "between nodes" not in ran("25", "2 ranks").text
    assert "GB/s" not in ran("25", "1 ranks").text


def test_a_job_that_is_started_again_goes_on(ran, tmp_path):
    for steps in (10, 20):
        more = shlex.join(["--folder", str(tmp_path), f"--steps={steps}"])
        command = take_home.command_for("25", f"2 ranks {more}")
        text = take_home.run_command(command, tmp_path)
    one = losses(ran("25", "1 ranks").text)
    assert losses(text) == pytest.approx(one[2:], abs=2e-4)
    assert os.listdir(tmp_path) == ["checkpoint.pt"]


# -- 28, compare_ranks.py --------------------------------------------------------------

SAVE = "1 ranks --save=one.pt"
OWN_COUNT = ("    dist.all_reduce(count)  # tokens of all ranks\n", "")
OWN_SHARE = ("/ count * dist.get_world_size()", "/ count")


def test_a_right_program_on_two_ranks_agrees(ran):
    assert ran("28", SAVE).text == "3 steps of 1 rank are in one.pt\n"
    said = ran("28", "2 ranks --compare=one.pt", after=SAVE).text
    assert said.startswith("3 steps agree")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("edits", [[OWN_COUNT, OWN_SHARE], [OWN_SHARE]])
def test_a_wrong_program_is_named_at_its_first_step(ran, ranks, edits, tmp_path):
    text = (SCRIPTS / "compare_ranks.py").read_text(encoding="utf-8")
    for old, new in edits:
        assert text.count(old) == 1
        text = text.replace(old, new)
    wrong = tmp_path / "compare_ranks.py"
    wrong.write_text(text, encoding="utf-8")
    command = take_home.command_for("28", f"{ranks} ranks --compare=one.pt")
    command = command.replace("compare_ranks.py", str(wrong))
    said = take_home.run_command(command, ran("28", SAVE).folder)
    assert re.match(r"step 0, loss: .* away from one rank", said), said


# -- 29, judge_claim.py ----------------------------------------------------------------


def judged(ranks: int, folder: Path, options: str = "") -> tuple[int, str]:
    """The exit status, and what rank 0 printed."""
    command = take_home.command_for("29", f"{ranks} ranks {options}".strip())
    done = take_home.start_command(command, folder)
    return done.returncode, done.stdout


def test_the_claim_is_true_and_its_losses_are_those_of_one(ran):
    found = {}
    for way in (OWN, "2 ranks", "1 ranks"):
        printed = ran("29", way).text
        assert "the claim: true" in printed
        line = r"loss ([\d.]+), of one process ([\d.]+)"
        found[way], one = map(float, re.search(line, printed).groups())
        if way == OWN:
            assert found[way] == pytest.approx(one, abs=1e-4)
            assert float(re.search(r"off by ([\d.]+)", printed)[1]) < 1e-4
    assert found["2 ranks"] == pytest.approx(found["1 ranks"], abs=1e-4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_planted_mistake_is_found_and_the_command_fails(ranks, tmp_path):
    status, printed = judged(ranks, tmp_path, "--plant")
    assert status != 0 and "the claim: false" in printed
    assert float(re.search(r"off by ([\d.]+)", printed)[1]) > 0.1


def test_shares_that_are_not_equal_are_found(tmp_path):
    status, printed = judged(3, tmp_path)  # 128 samples: 43, 43 and 42
    assert status != 0 and "the claim: false" in printed


@pytest.mark.parametrize(
    "caps, word",
    [("0.01 25", "true"), ("25 0.01", "false"), ("25 100", "cannot be judged")],
)
def test_buckets_are_judged_only_if_the_times_differ(caps, word, tmp_path):
    status, printed = judged(2, tmp_path, f"--buckets {caps}")
    assert f"the claim: {word}\n" in printed and (status == 0) == (word == "true")
    assert re.search(r"faster in \d+ of 10 rounds", printed)
