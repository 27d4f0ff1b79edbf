"""Lesson 30's script, first_hour.py: what each part finds, and what it survives.

Faults of machines (a slow GPU, a slow link, a power limit) are planted into what the
ranks have measured: the reports are functions of that. Mistakes in programs, ranks that
fail and ranks that hang run under the simulator. The figures of real cards in the
lesson's text are those of the recordings.
"""

import json
import re
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests import take_home
from tests.launching import ROOT, edited, load, prose_of

A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"
SCRIPT, QUICK = "first_hour.py", "--quick "


@pytest.fixture
def hour(monkeypatch):
    """The script as a module that believes it runs on some ranks of some nodes."""

    def on(ranks: int = 4, nodes: int = 1):
        script = load(SCRIPT)
        for name, value in {
            "RANKS": ranks, "LOCAL_RANKS": ranks // nodes, "NODES": nodes,
        }.items():  # fmt: skip
            monkeypatch.setattr(script, name, value)
        return script

    return on


def gpu(rank: int, **more) -> dict:
    found = {"name": A100, "uuid": f"u{rank}", "node": 0, "total GiB": 79.25}
    found |= {"taken GiB": 0.5, "torch": "2.13", "CUDA": "13.0", "NCCL": "2.28"}
    return found | {"watts": 400.0} | more


# -- machines --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault, said",
    [
        ({}, None),
        ({"watts": None}, None),
        ({"watts": 300.0}, "rank 2: limited to 300 of 400 W"),
        ({"taken GiB": 9.0}, "rank 2: 9.0 GiB are in use"),
        ({"uuid": "u1"}, "node 0: 2 ranks share the GPU u1"),
        ({"NCCL": "2.20"}, "NCCL differs"),
        ({"name": "NVIDIA A100-SXM4-40GB"}, "name differs"),
    ],
)
def test_a_gpu_that_is_not_like_the_others_is_named(hour, fault, said):
    script = hour()
    ranks = [gpu(rank, **(fault if rank == 2 else {})) for rank in range(4)]
    lines, wrong, _ = script.report_gpus(ranks, script.options([]))
    assert len(lines) == 5
    assert wrong == [] if said is None else len(wrong) == 1 and said in wrong[0]


def test_the_same_number_on_another_node_is_another_gpu(hour):
    script = hour(2, 2)
    ranks = [gpu(0), gpu(0, node=1)]
    assert script.report_gpus(ranks, script.options([]))[1] == []


def test_a_node_that_has_lost_a_gpu_is_named(hour):
    script = hour(7, 1)
    ranks = [gpu(rank, node=rank // 4) for rank in range(7)]
    assert script.report_gpus(ranks, script.options([]))[1] == [
        "node 1: 3 ranks, others 4"
    ]


@pytest.mark.parametrize("words, found", [("400.00", 400.0), ("[N/A]", None)])
def test_nvidia_smis_line_of_this_gpu_is_read(hour, monkeypatch, words, found):
    script = hour()
    monkeypatch.setattr(script, "own_uuid", lambda: "u1")
    said = SimpleNamespace(stdout=f"GPU-u0, 300.00\nGPU-u1, {words}\n")
    monkeypatch.setattr(script.subprocess, "run", lambda *args, **more: said)
    assert script.as_number(script.smi("power.limit")) == found


def test_a_card_that_slows_down_under_load_is_named_with_the_reason(hour):
    script = hour(2)
    smi = ["1335", "1980", "71", "0x0000000000000004"]
    slow = {"first": 700.0, "last": 560.0, "smi": smi}
    steady = {"first": 700.0, "last": 690.0, "smi": []}
    ranks = [good_speed() | {"load": load} for load in (steady, slow)]
    lines, wrong, _ = script.report_speed(ranks, script.options([]))
    assert wrong == ["rank 1: 80% of its speed under load"]
    said = "at the end 560.0 TFLOP/s, 1335 of 1980 MHz, 71 °C, power cap"
    assert lines[-1].endswith(said)


def test_an_unknown_card_is_a_clear_line(hour):
    script = hour(1)
    lines, wrong, _ = script.report_gpus([gpu(0, name="New")], script.options([]))
    assert lines[-1] == "New is not in CARDS: compare with its datasheet" and not wrong
    speed = {"bfloat16": 1, "tf32": 1, "float32": 1, "memory": 1, "pcie": 1}
    lines, wrong, _ = script.report_speed([speed | {"name": "New"}], script.options([]))
    assert not wrong and "datasheet" not in "".join(lines)


def test_a_simulated_card_has_the_datasheet_of_the_real_one(hour):
    from simgpu import CARDS

    script = hour()
    for card in CARDS.values():
        known = script.card_of(f"{card.name} (simulated)")
        assert known, f"add {card.name} to CARDS in notebooks/scripts/first_hour.py"
        assert known.memory * 1e9 == pytest.approx(card.memory_bandwidth, rel=0.01)
        assert known.nvlink * 1e9 == card.nvlink_bandwidth
        for name in ("bfloat16", "tf32", "float32"):
            peak = getattr(known, name) * 1e12
            assert peak == pytest.approx(card.flops[name], rel=0.01), card.name


def good_speed() -> dict:
    return {"bfloat16": 250.0, "tf32": 125.0, "float32": 17.0, "memory": 1700.0,
            "pcie": 25.0, "name": A100}  # fmt: skip


def test_a_slow_gpu_is_named(hour):
    script = hour()
    ranks = [good_speed() for _ in range(4)]
    assert script.report_speed(ranks, script.options([]))[1] == []
    ranks[3] |= {"bfloat16": 170.0, "tf32": 115.0}
    _, wrong, figures = script.report_speed(ranks, script.options([]))
    assert wrong == ["rank 3: bfloat16 at 68% of the fastest GPU"]
    assert figures["bfloat16 TFLOP/s"] == 170.0


def test_gpus_that_are_all_slow_are_named_by_the_datasheet(hour):
    script = hour(2)
    ranks = [good_speed() | {"memory": 700.0} for _ in range(2)]
    _, wrong, _ = script.report_speed(ranks, script.options([]))
    assert wrong == ["memory: 34% of the datasheet on all GPUs"]
    assert script.report_speed(ranks, script.options(["--quick"]))[1] == []


def test_what_is_lower_than_on_most_cards_is_remarked_and_is_no_fault(hour):
    script = hour(2)
    ranks = [good_speed() | {"bfloat16": 170.0} for _ in range(2)]
    lines, wrong, _ = script.report_speed(ranks, script.options([]))
    assert lines[-1] == "low: bfloat16 at 54%; most cards reach 60%" and wrong == []


def links(ranks: int, per_node: int, speed=200.0, slow=()) -> list[dict]:
    """What ranks measured: every pair of a node, and the same place elsewhere."""
    found = []
    for one in range(ranks):
        pairs = {}
        for two in range(ranks):
            near = one // per_node == two // per_node
            if one != two and (near or (one - two) % per_node == 0):
                is_slow = {one, two} == set(slow)
                pairs[str(two)] = 40.0 if is_slow else speed if near else 45.0
        where = f"all {ranks}" if ranks == per_node else f"{per_node} of a node"
        found.append({f"all_reduce, {where}": speed, "pairs": pairs, "name": A100,
                      "node": one // per_node})  # fmt: skip
    return found


def test_a_slow_pair_is_named(hour):
    script = hour(8)
    args = script.options([])
    assert script.report_links(links(8, 8), args)[1] == []
    _, wrong, _ = script.report_links(links(8, 8, slow=(2, 5)), args)
    assert wrong == ["ranks 2 and 5: 40.0 of 200.0 GB/s"]


def test_links_that_are_all_slow_are_named_by_the_datasheet(hour):
    script = hour(8)
    _, wrong, _ = script.report_links(links(8, 8, speed=25.0), script.options([]))
    assert wrong == ["all-reduce inside a node: 8% of NVLink"]


def test_a_network_is_compared_with_what_was_promised(hour):
    script = hour(16, 2)
    lines, wrong, figures = script.report_links(
        links(16, 8), script.options(["--network", "3200"])
    )
    assert wrong == [] and figures["between nodes GB/s"] == 8 * 45.0
    assert "2880 Gbit/s" in lines[-1]
    slow = [
        found | {"pairs": {p: min(s, 1.0) for p, s in found["pairs"].items()}}
        for found in links(16, 8)
    ]
    _, wrong, _ = script.report_links(slow, script.options(["--network", "3200"]))
    assert wrong == ["node 0 to 1: 2% of 3200 Gbit/s"]


def test_a_slow_node_of_four_is_in_each_slow_pair(hour):
    script = hour(8, 4)
    ranks = links(8, 2)
    for one, found in enumerate(ranks):
        far = {two for two in found["pairs"] if int(two) // 2 != one // 2}
        for two in far:
            gap = abs(int(two) // 2 - one // 2)
            if gap > 1:  # only each node and the next were measured
                del found["pairs"][two]
            elif 2 in (int(two) // 2, one // 2):
                found["pairs"][two] = 5.0
    _, wrong, figures = script.report_links(ranks, script.options([]))
    slow = ["node 1 to 2: 10.0 of 90.0 GB/s", "node 2 to 3: 10.0 of 90.0 GB/s"]
    assert wrong == slow and figures["between nodes GB/s"] == 10.0


def test_a_prediction_that_is_far_off_is_marked(hour):
    script = hour()
    near, far, unknown, known = script.compare(
        {"ddp ms": 100.0, "fsdp ms": 100.0, "x": 1.0}, {"ddp ms": 120.0, "fsdp ms": 140}
    )
    assert "1.20" in near and "look" not in near
    assert "1.40" in far and "look into it" in far and "not measured" in unknown
    assert known == "figures that were measured: ddp ms, fsdp ms"


def test_a_bill(hour):
    script = hour(16)
    lines = script.bill({"gpus": 60.0, "speed": 120.0}, script.options(["--price=2.5"]))
    assert lines[-1] == "180 s on 16 GPUs at 2.50 an hour each: 2.00"


# -- the criterion ---------------------------------------------------------------------


def test_times_are_judged_only_if_they_differ_in_nearly_all_rounds(hour):
    script = hour()
    assert script.is_faster([1.1] * 10, 1.02) is True
    assert script.is_faster([1.1] * 9 + [0.9], 1.02) is True
    assert script.is_faster([1.1] * 8 + [0.9] * 2, 1.02) is None
    assert script.is_faster([0.9] * 9 + [1.1], 1.02) is False
    assert script.is_faster([1.01] * 10, 1.02) is None
    assert script.is_faster([1.6] * 10, 1.69) is None


def test_a_claim_is_true_only_under_a_condition_once_a_case_fails(hour):
    verdict = hour().verdict
    assert verdict({"a": True, "b": True}) == "true"
    assert verdict({"a": False}) == "false"
    assert verdict({"a": True, "b": False, "c": None}) == "true when a"
    assert verdict({"a": True, "b": None}) == "cannot be judged here"


def test_a_gradient_that_is_rounding_alone_is_not_compared_with_itself(hour):
    script = hour(1)
    right = {"weight": torch.tensor([1.0, 0.5]), "key.bias": torch.tensor([1e-11])}
    found = {"weight": torch.tensor([1.0, 0.5]), "key.bias": torch.tensor([-3e-11])}
    assert script.off_by(found, right)[1] == "key.bias"
    assert script.is_same(script.off_by(found, right, script.LEAST * 1.0)[0])
    found["weight"] = torch.tensor([1.0, 0.501])
    share, name = script.off_by(found, right, script.LEAST * 1.0)
    assert not script.is_same(share) and name == "weight"


def test_any_container_of_tensors_is_a_batch(hour):
    each = hour().each
    x = torch.arange(4)
    found = each(lambda t: t[:2], {"a": x, "b": [x, (x, "text")]})
    assert found["a"].tolist() == found["b"][1][0].tolist() == [0, 1]
    assert found["b"][1][1] == "text"


def test_a_ring_sends_a_gathered_tensor_once_and_a_reduced_one_twice(hour):
    script = hour(4)
    shape = {"input_sizes": [[10]], "output_sizes": [[40]]}
    types = {"input_dtypes": ["Float"], "output_dtypes": ["Float"]}

    def sent(name):
        return script.sent_bytes([{"profiling_name": f"nccl:{name}", **shape, **types}])

    assert sent("_all_gather_base") == 160 * 3 / 4
    assert sent("all_reduce") == 2 * 40 * 3 / 4
    assert sent("_reduce_scatter_base") == 40 * 3 / 4


# -- figures of real cards in the lesson -----------------------------------------------


def recording(name: str) -> list:
    file = ROOT / "simgpu" / "tests" / "recordings" / name
    return json.loads(file.read_text(encoding="utf-8"))["rows"]


def test_the_lessons_bus_bandwidths_are_the_recorded_ones():
    prose = prose_of(take_home.lesson_of("30"))
    rows = {tuple(row[:4]): row[4] for row in recording("nccl_tests.json")}
    table = re.findall(r"^\| (\d) (\w+).*? \| (\d+) \|(.*)\|$", prose, re.M)
    assert len(table) == 4
    for count, card, _, cells in table:
        ranks, found = int(count), []
        for kind in ("all_reduce", "all_gather", "all_to_all"):
            microseconds = rows[card, kind, ranks, 2**29]
            passes = 2 if kind == "all_reduce" else 1
            bus = passes * (ranks - 1) / ranks * 2**29 / microseconds / 1e3
            found.append(round(bus))
        assert found == [int(cell) for cell in cells.split("|")]


@pytest.mark.parametrize("card, name", [("A100", A100), ("H100", H100)])
def test_the_lessons_matmuls_are_the_recorded_ones(card, name):
    large = [
        2 * m * n * k / microseconds / 1e6
        for _, m, n, k, microseconds in recording(f"gemm_bf16_{card}.json")
        if m * n * k > 3e11
    ]
    peak = load(SCRIPT).CARDS[name].bfloat16
    said = f"{statistics.median(large):.0f} TFLOP/s of {peak:.0f}"
    assert said in prose_of(take_home.lesson_of("30"))


def test_the_limits_of_the_datasheet_are_those_of_recorded_matmuls():
    script, least = load(SCRIPT), {}
    for name, card in {
        "A100": A100, "H100": H100, "H200": "NVIDIA H200", "B200": "NVIDIA B200",
        "L40S": "NVIDIA L40S",
    }.items():  # fmt: skip
        least[name] = min(
            2 * m * n * k / microseconds / 1e6 / script.CARDS[card].bfloat16
            for _, m, n, k, microseconds in recording(f"gemm_bf16_{name}.json")
            if min(m, n, k) >= 4096
        )
    assert script.LOW < least.pop("L40S") == pytest.approx(0.475, abs=0.005)
    assert script.USUAL < min(least.values()) == pytest.approx(0.622, abs=0.005)
    said = "all are above 62 % on A100, H100, H200 and B200, and above 47 % on L40S"
    assert said in prose_of(take_home.lesson_of("30"))


# -- programs --------------------------------------------------------------------------


def started(ranks: int, folder: Path, options: str, script=None, before=""):
    """Exit status and report."""
    command = f"python -m simgpu --gpus {ranks} {before} torchrun --standalone "
    command += f"--nproc-per-node={ranks} {script or SCRIPT} {options}"
    done = take_home.start_command(command, folder)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_planted_mistake_in_your_model_fails_the_command(tmp_path):
    status, report, _ = started(2, tmp_path, QUICK + "--parts claims --plant")
    assert status == 1 and "fails  your model" in report
    assert re.search(r"^your model: [\w.]+ is \d\.\d+ away from one", report, re.M)


@pytest.mark.slow
def test_rows_that_are_alike_cannot_judge_your_model(tmp_path):
    rows = "torch.randint(SIZES[size].vocabulary, (rows, SIZES[size].tokens + 1))"
    alike = "torch.ones((rows, SIZES[size].tokens + 1), dtype=torch.int64)"
    script = edited(SCRIPT, {rows: alike}, tmp_path)
    status, report, _ = started(2, tmp_path, QUICK + "--parts claims", script)
    assert status == 1 and "holds  your model" in report
    assert "your model: claim 1 holds even if nothing is averaged" in report


@pytest.mark.slow
def test_your_model_is_right_on_three_ranks_and_every_planted_mistake_is_refused(
    tmp_path,
):
    status, report, _ = started(3, tmp_path, QUICK + "--parts claims --json r.json")
    assert status == 0 and "holds  your model" in report
    assert report.count("refused  a planted mistake") == 4
    found = json.loads((tmp_path / "r.json").read_text())
    cases = found["parts"]["claims"]["ranks"][0]["1. N ranks compute what one does"]
    assert cases["cases"]["summed loss"][0] == pytest.approx(1 - 1 / 3, abs=1e-3)


@pytest.mark.slow
def test_where_nothing_can_be_forked_the_parts_run_one_after_the_other(tmp_path):
    script = edited(SCRIPT, {'hasattr(os, "fork")': "False"}, tmp_path)
    options = QUICK + "--parts gpus links fsdp ddp"
    status, report, _ = started(2, tmp_path, options, script)
    assert status == 0 and "== to look into\nnothing" in report
    assert "all_to_all, all 2" in report and report.count("a step takes") == 2


@pytest.mark.slow
def test_one_gpu_has_a_report_without_torchrun(tmp_path):
    command = "python -m simgpu --gpus 1 first_hour.py --quick --price 1"
    done = take_home.start_command(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "one GPU has no links" in done.stdout
    assert "the claims are about several GPUs" in done.stdout
    assert re.search(r"== fsdp\n[\d,]+ parameters", done.stdout)


@pytest.mark.slow
def test_a_part_that_fails_says_what_to_do_and_the_others_run(tmp_path):
    fails = "    nbytes, found = 2**24 if args.quick else 2**29, {}\n"
    raises = "    if RANK == 1:\n        raise RuntimeError('NCCL: no such link')\n"
    script = edited(SCRIPT, {fails: raises + fails}, tmp_path)
    options = QUICK + "--parts gpus links speed"
    status, report, _ = started(2, tmp_path, options, script)
    assert status == 1
    assert "rank 1: RuntimeError: NCCL: no such link" in report
    assert "links failed: the ranks cannot talk" in report
    assert re.search(r"== speed\nrank .*\n.*\nmatrix .*\n0 ", report)


@pytest.mark.slow
def test_a_part_that_hangs_is_ended_at_its_time_limit(tmp_path):
    fails = "    nbytes, found = 2**24 if args.quick else 2**29, {}\n"
    hangs = "    time.sleep(1000)\n"
    script = edited(SCRIPT, {fails: hangs + fails}, tmp_path)
    options = QUICK + "--parts links gpus --limit 20"
    status, report, errors = started(2, tmp_path, options, script)
    assert status == 1 and "links failed: somebody waited too long" in report
    assert "time.sleep(1000)" not in report and "in measure_links" in errors
    assert re.search(r"== gpus\nrank .*\n +0 ", report)


@pytest.mark.slow
def test_two_nodes_on_a_slow_network_are_told_from_their_links_inside(tmp_path):
    options = QUICK + "--parts gpus links --network 100 --json r.json"
    before = "--nodes 2 --network 10Gbit/s"
    status, report, _ = started(4, tmp_path, options, before=before)
    assert status == 1 and "node 0 to 1: 9% of 100 Gbit/s" in report
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["look"] == ["node 0 to 1: 9% of 100 Gbit/s"]
    assert found["nodes"] == 2 and found["figures"]["all_reduce, 2 of a node"] > 100


@pytest.mark.slow
def test_a_dry_run_predicts_what_the_script_measures(tmp_path):
    command = "python -m simgpu dry-run --world 2 --card A100 --json d.json "
    command += "first_hour.py --quick --parts ddp"
    done = take_home.start_command(command, tmp_path)
    assert done.returncode == 0, done.stderr
    planned = json.loads((tmp_path / "d.json").read_text())
    (tmp_path / "p.json").write_text(
        json.dumps({"ddp ms": 1e3 * planned["step_seconds"]})
    )
    options = QUICK + "--parts ddp --predicted p.json"
    _, report, _ = started(2, tmp_path, options)
    assert re.search(r"ddp ms +[\d.]+ +[\d.]+ +(0\.9\d|1\.0\d)\n", report), report
