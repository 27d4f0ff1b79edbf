"""Lesson 27: what its prose says is what its planner and the recordings say."""

import functools
import itertools
import json
import re
import shlex
import statistics
import subprocess
import sys

import pytest

from layouts import rows
from layouts import sweep as composed
from layouts.shapes import Layout
from scripts import plan_run, published_runs, real_sweep
from scripts.plan_run import LAUNCHES, MODELS, Plan, peak_bytes
from support.limits import LONG
from tests import planned, take_home
from tests.launching import ROOT, SCRIPTS, functions_in, functions_of, prose_of, text_of

RECORDED = ROOT / "simgpu" / "tests" / "recordings"
LESSON = take_home.lesson_of("27")
PROSE = prose_of(LESSON)
COMMAND = dict(total=2e12, price=3.99)


def said(pattern: str) -> list[float]:
    """The numbers that the lesson's prose has in the place of each group."""
    found = re.search(pattern, PROSE)
    assert found, f"the lesson does not say {pattern!r}"
    return [float(number.replace(",", "")) for number in found.groups()]


def kinds(name: str, gpus: int, **options) -> dict[str, tuple]:
    """Kind -> rate and plan, the fastest that fits."""
    found: dict = {}
    for (rate, _), plan in plan_run.choices(MODELS[name], gpus, 1024, **options):
        found.setdefault(plan_run.kind_of(plan), (rate, plan))
    return found


ALL = "FSDP + slices + stages"


# -- the script ------------------------------------------------------------------------


def test_the_lesson_has_the_functions_of_the_script():
    script, found = functions_of(text_of("plan_run.py")), functions_in(LESSON)
    shared = script.keys() & found.keys()
    assert shared == {
        "flops", "compute_seconds", "ring", "weight_messages", "message_seconds",
        "bubble", "host_seconds", "step_seconds",
    }  # fmt: skip
    for name in shared:
        assert found[name] == script[name], name


@pytest.mark.slow
def test_the_command_prints_the_lessons_table(tmp_path):
    printed = take_home.run("27", tmp_path)
    lines = printed.splitlines()
    assert len(lines) == 6 and lines[0].startswith("70B on 64 GPUs")
    found = kinds("70B", 64, network=400)
    order = "FSDP", "HSDP", "FSDP + slices", "FSDP + stages", ALL
    for line, kind in zip(lines[1:], order, strict=True):
        rate, plan = found[kind]
        assert line.startswith(f"{kind:25}")
        days, dollars = plan_run.bill(64, rate, **COMMAND)
        assert f"{rate:,.0f} " in line and f" {dollars:,.0f} " in line
        assert f" {days:,.0f} " in line
        assert f"{plan.shard} x tp {plan.tp} x pp {plan.pp}" in line


def test_a_bill_is_gpu_hours_times_their_price():
    days, dollars = plan_run.bill(10, 100.0, 86_400_000, 2.0)
    assert (days, dollars) == (1.0, 480.0)


def test_days_and_dollars_of_the_first_table():
    found = kinds("70B", 64, network=400)
    rates = [rate for rate, _ in found.values()]
    (apart,) = said(r"and the kinds lie within (\d+)%")
    assert apart == pytest.approx(100 * (max(rates) / min(rates) - 1), abs=0.6)
    days, dollars = plan_run.bill(64, found["FSDP"][0], **COMMAND)
    months, millions = said(r"about (\d+) months and (\d+) million dollars")
    assert months == round(days / 30.4) and millions == round(dollars / 1e6)
    assert max(found, key=lambda kind: found[kind][0]) == ALL
    (ahead,) = said(r"with slices and stages is (\d+)% ahead")
    ratio = found[ALL][0] / found["FSDP"][0]
    assert ahead == round(100 * (ratio - 1))


# -- a step ----------------------------------------------------------------------------


def test_the_70b_model_at_the_peak():
    matmuls, scores = plan_run.flops(MODELS["70B"], Plan(64))
    (rate,) = said(r"would train the 70B model with ([\d,]+) tokens/s")
    assert rate == round(plan_run.CARDS["H100"][0] / 4 / (matmuls + scores))


def test_shares_are_those_of_the_script():
    assert "matmuls | 75% | 60% |" in PROSE and "attention | 32% | 17% |" in PROSE
    assert plan_run.REACHED == {"A100": (0.75, 0.32), "H100": (0.60, 0.17)}
    assert "all else | 58% | 58% |" in PROSE and plan_run.OF_MEMORY == 0.58
    table = "57% of [NVLink]", "15 µs, and 0.8 µs", "27 µs", "90% of the network's"
    assert all(words in PROSE for words in table)
    assert (plan_run.NVLINK, plan_run.NETWORK) == (0.57, 0.9)
    latencies = plan_run.START, plan_run.HOP, plan_run.CABLE
    assert latencies == (15e-6, 0.8e-6, 27e-6)


def test_gathers_were_recorded_and_not_fitted():
    from recorded.files import is_fitted

    recorded = {2**20: 17.13, 2**24: 68.86, 2**29: 1401.5}
    text = (RECORDED / "nccl_tests.json").read_text("utf-8")
    found = [
        row
        for row in json.loads(text)["rows"]
        if row[:3] == ["H100", "all_gather", 8] and row[3] in recorded
    ]
    assert {row[3]: row[4] for row in found} == recorded
    assert not any(map(is_fitted, found))
    slower = [
        plan_run.message_seconds(Plan(8), plan_run.ring(row[3], 8), 1, 8, 1)
        / row[4]
        * 1e6
        for row in found
    ]
    least, most = said(r"the formula is (\d+)% to (\d+)% too slow")
    assert round(100 * (min(slower) - 1)) == least
    assert round(100 * (max(slower) - 1)) == most


def test_latency_of_1024_gpus_is_six_times_their_bytes():
    plan = Plan(1024, 1024, network=400)
    sent = plan_run.weight_messages(MODELS["1B"], plan)[:2]
    both, latency = 0.0, 0.0
    for _, nbytes, *rest, _ in sent:
        both += plan_run.message_seconds(plan, nbytes, *rest)
        latency += plan_run.message_seconds(plan, 0, *rest)
    assert latency / (both - latency) == pytest.approx(6, abs=0.2)
    assert "six times the time for bytes" in PROSE


def test_latency_would_be_twice_with_a_shorter_cable(monkeypatch):
    monkeypatch.setattr(plan_run, "CABLE", 5e-6)
    plan = Plan(1024, 1024, network=400)
    both, latency = 0.0, 0.0
    for _, nbytes, *rest, _ in plan_run.weight_messages(MODELS["1B"], plan)[:2]:
        both += plan_run.message_seconds(plan, nbytes, *rest)
        latency += plan_run.message_seconds(plan, 0, *rest)
    assert latency / (both - latency) == pytest.approx(2, abs=0.3)
    assert "with 5 µs in its place, it would be twice" in PROSE


def test_what_compiled_kernels_and_float8_gain_was_published():
    published = 5762, 6667, 8532  # tokens/s, table 1 of torchtitan's page
    plain = {run.rate for run in published_runs.runs() if run.plan.gpus == 8}
    assert published[0] in plain
    gains = [round(100 * (rate / published[0] - 1)) for rate in published[1:]]
    assert said(r"`torch.compile` gains (\d+)%, with Float8 (\d+)%") == gains


def test_launches_of_a_block_are_those_of_its_dry_run():
    of = Layout(1, 2048, 32, 8192, 131072, 4096, 1, 1, 1, 1, 2)
    block = composed.parts_of([of])[composed.shape_of(of)]["block"]
    assert block.forward.launches == block.backward.back_launches == LAUNCHES


# -- published runs --------------------------------------------------------------------


def test_the_error_grows_with_the_number_of_gpus():
    errors: dict[str, list[float]] = {}
    missing: dict[str, list[float]] = {}
    latencies: dict[str, list[float]] = {}
    for run, ratio in sorted(published_runs.ratios(), key=lambda r: r[0].plan.gpus):
        plan = run.plan
        if not run.name.startswith("MPT") or plan.gpus < 128:
            continue
        tokens = plan.sequences * plan.microbatches * plan.tokens
        found = plan_run.messages(run.model, plan)
        latency = sum(
            plan_run.message_seconds(plan, 0, *rest) for _, _, *rest, _ in found
        )
        errors.setdefault(run.name, []).append(round(100 * (ratio - 1)))
        missing.setdefault(run.name, []).append(tokens / run.rate * (1 - 1 / ratio))
        latencies.setdefault(run.name, []).append(latency)
    assert errors == {"MPT 1b": [4, 8, 16], "MPT 7b": [3, 7, 12],
                      "MPT 30b": [-7, -5, -3]}  # fmt: skip
    assert "from +4% to +16%, from +3% to +12%, and from −7% to −3%" in PROSE
    for name in ("MPT 1b", "MPT 7b"):
        for times in (missing[name], latencies[name]):
            for less, more in itertools.pairwise(times):
                assert 1.7 < more / less < 2.4


def test_torchtitans_cards_are_said_to_be_others(capsys):
    off = [
        round(100 * (ratio - 1))
        for run, ratio in published_runs.ratios()
        if run.name == "torchtitan 8B" and run.plan.card == "H100"
    ]
    less, more = said(r"being (\d)% and (\d)% off is partly luck")
    assert sorted(off) == [-more, -less]


# -- the sweep -------------------------------------------------------------------------


@functools.cache
def sweep() -> list[tuple[rows.Recorded, str]]:
    """The rows, and why each says nothing."""
    recording = json.loads((RECORDED / "ultrascale.json").read_text("utf-8"))
    read = [rows.of_sweep(row) for row in recording["rows"]]
    return list(zip(read, rows.broken(read), strict=True))


@functools.cache
def healthy() -> list[tuple[rows.Recorded, float]]:
    """The healthy rows up to 32 nodes, and planned / recorded seconds."""
    return [
        (its, planned.seconds(its.layout) / its.seconds)
        for its, why in sweep()
        if its.seconds and not why and its.layout.gpus <= 8 * rows.MOST_NODES
    ]


def in_lesson() -> dict[str, list[str]]:
    """The lesson's table: of each group the runs, then median and share twice."""
    found = {}
    for line in PROSE.splitlines():
        name, *figures = line.strip("| ").split(" | ")
        if name in planned.GROUPS and line.startswith("|"):
            found[name] = figures
    return found


def test_the_sweep_has_as_many_rows_as_the_lesson_says():
    ran = [its for its, _ in sweep() if its.seconds]
    useless = [why for _, why in sweep() if why]
    assert said(r"## ([\d,]+) layouts") == [len(sweep())]
    counts = said(r"H100: ([\d,]+) ran, and (\d+) crashed")
    assert counts == [len(ran), len(sweep()) - len(ran)]
    assert said(r"Without (\d+) runs that are slow") == [len(useless)]
    assert said(r"table has the (\d+) runs of 8B") == [
        sum(its.model == "8B" for its, _ in healthy())
    ]
    assert max(its.layout.gpus for its, _ in sweep()) == 8 * 64


@pytest.mark.parametrize("group", planned.GROUPS)
def test_a_sweep_is_predicted_as_the_lesson_says(group):
    is_in = planned.GROUPS[group]
    ratios = [ratio for its, ratio in healthy()
              if its.model == "8B" and is_in(its.layout)]  # fmt: skip
    count, *figures = in_lesson()[group]
    assert int(count) == len(ratios)
    assert figures[:2] == planned.as_in_lesson(ratios)


def test_slices_and_stages_on_several_machines_wait_as_the_lesson_says():
    of = Layout(32, 4096, 32, 14336, 131072, 4096, 1, 32, 8, 2, 8, 1)
    found = {its.layout: (its.seconds, ratio * its.seconds) for its, ratio in healthy()}
    assert found[of] == pytest.approx((12.5, 2.1), abs=0.05)
    other = of._replace(micro=8, accumulate=4)
    assert found[other] == pytest.approx((2.1, 2.15), abs=0.05)


def test_the_host_alone_is_near_a_small_micro_batch_of_the_sweep():
    of = Layout(32, 4096, 32, 14336, 131072, 4096, 1, 256, 1, 1, 8, 0)
    ((its, ratio),) = [row for row in healthy() if row[0].layout == of]
    assert its.seconds / 256 == pytest.approx(0.142, abs=5e-4)
    assert 0.8 < ratio < 1
    model = plan_run.Model(32, 4096, 32, 32, 14336, 131072)
    plan = Plan(8, tp=8, microbatches=256, again=0, host="slow")
    host = plan_run.host_seconds(model, plan) / 256
    (less,) = said(r"the planner is (\d+)% too fast")
    assert less == round(100 * (1 - host / 0.142))
    card = plan_run.compute_seconds(model, plan)
    assert card + plan_run.exposed_seconds(model, plan, 0) / 256 < host


def test_averages_that_hide_would_make_the_sweep_worse(monkeypatch):
    def near() -> int:
        ratios = (
            planned.seconds(its.layout) / its.seconds for its, _ in healthy()[::3]
        )
        return sum(1 / 1.3 <= ratio <= 1.3 for ratio in ratios)

    before, plain = near(), plan_run.weight_messages

    def hidden(model, plan):
        return [(*message[:-1], True) for message in plain(model, plan)]

    monkeypatch.setattr(plan_run, "weight_messages", hidden)
    assert near() < before and "would come out worse" in PROSE


def test_the_lessons_script_reads_the_sweep_as_the_simulators_tests_do():
    mine = real_sweep.read()
    useless = real_sweep.broken(mine)
    for one, (its, why) in zip(mine, sweep(), strict=True):
        assert (one in useless) == bool(why)
        assert one.step_tokens == its.layout.step_tokens
        assert bool(one.rate) == (its.seconds is not None)
        if its.seconds:
            assert one.seconds == pytest.approx(its.seconds)
    for one, (its, _) in list(zip(mine, sweep(), strict=True))[::37]:
        assert one.planned == pytest.approx(planned.seconds(its.layout))


@functools.cache
def choices() -> list[real_sweep.Choice]:
    return real_sweep.choices()


def test_what_the_choice_would_have_cost():
    shares = [one.share for one in choices()]
    assert len(shares) == 12
    middle, worst = said(r"median of the choices is (\d+)%, the worst (\d+)%")
    assert round(100 * statistics.median(shares)) == middle
    assert round(100 * min(shares)) == worst
    last = choices()[-1]
    assert (last.name, last.gpus, last.share) == ("8B", 256, min(shares))
    assert said(r"8B on 256 GPUs reach less than (\d+)%") == [50]
    assert 0.48 < statistics.median(last.rates) < 0.5
    pick, best = last.pick, last.best
    assert (pick.copies, pick.plan.tp, best.copies, best.plan.tp) == (128, 2, 32, 8)
    times = said(
        r"slices in 2: planned ([\d.]+) s, real ([\d.]+) s.*"
        r"slices in 8: planned ([\d.]+) s, real ([\d.]+) s"
    )
    found = pick.planned, pick.seconds, best.planned, best.seconds
    assert times == [round(seconds, 2) for seconds in found]


def test_a_rule_without_formulas_of_time_is_nearly_as_good():
    shares = [one.by_rule for one in choices()]
    middle, worst = said(r"The rule reaches (\d+)% in the median and (\d+)% at worst")
    assert round(100 * statistics.median(shares)) == middle
    assert round(100 * min(shares)) == worst
    few = real_sweep.read()[0]
    assert real_sweep.rule(few)[0] == few.plan.tp * few.plan.pp


def test_the_best_of_the_first_five_plans():
    reached = {(one.name, one.gpus): one.best_try for one in choices()}
    more = said(r"8B on 128 and 256 GPUs: (\d+)% and (\d+)%")
    last = [reached.pop(("8B", gpus)) for gpus in (128, 256)]
    assert more == [round(100 * share) for share in last]
    assert "best of five reaches 99% and more" in PROSE
    assert min(reached.values()) >= 0.985


def test_a_choice_is_drawn_where_its_rate_is():
    picture = real_sweep.picture(choices())
    assert "8B on 256 69%" in picture.title and "median 97%" in picture.title
    boxes = [part for part in picture.parts if 'width="12" height="12"' in part]
    places = [float(re.search('x="([^"]*)"', box)[1]) for box in boxes[1:]]
    assert len(places) == 12 and min(places) == places[-1]


# -- days and dollars ------------------------------------------------------------------


def test_real_trainings_took_what_the_lesson_says(capsys):
    published_runs.table_of_hours()
    lines = capsys.readouterr().out.splitlines()[1:]
    times = {line[:12]: float(line.split()[-1]) for line in lines}
    low, high = said(r"Five of six trainings took ([\d.]+) to ([\d.]+) times the plan")
    most = times.pop("Llama 3 8B, ")
    assert most > 2 and "more than twice as many hours" in PROSE
    assert (round(min(times.values()), 1), round(max(times.values()), 1)) == (low, high)


def test_hsdp_is_ahead_of_fsdp_on_1024_gpus():
    found = kinds("8B", 1024, network=400)
    hsdp, plan = found["HSDP"]
    (ahead,) = said(r"HSDP.\*\* Planned, it is (\d+)% faster than FSDP")
    assert ahead == round(100 * (hsdp / found["FSDP"][0] - 1)) and plan.shard == 64
    (slices,) = said(r"The plan with slices is (\d+)% ahead")
    assert slices == round(100 * (found["FSDP + slices"][0] / hsdp - 1))


def test_405b_is_not_decided_by_formulas():
    found = kinds("405B", 1024, network=400)
    slices, every = found["FSDP + slices"], found[ALL]
    (ahead,) = said(r"FSDP with `tp` 2 is (\d+)% ahead of stages")
    assert slices[1].tp == 2
    most = max(every[0], found["FSDP + stages"][0])
    assert ahead == round(100 * (slices[0] / most - 1))
    theirs = Plan(1024, 8, tp=8, pp=16, chunks=8, microbatches=128, again=0.0,
                  reshard=False, network=400)  # fmt: skip
    rate, _ = plan_run.rate(MODELS["405B"], theirs)
    needs = sum(peak_bytes(MODELS["405B"], theirs).values()) / plan_run.GIB
    assert said(r"says (\d+) tokens/s for that.* and (\d+) GiB") == [
        round(rate), round(needs)
    ]  # fmt: skip
    assert rate > max(rate for rate, _ in found.values())
    slow = kinds("405B", 1024, network=50)
    _, kept = slow[ALL]
    assert (kept.tp, kept.pp, kept.reshard) == (4, 16, False)
    assert slow[ALL][0] > 2 * slow["FSDP"][0]


def test_7b_on_one_machine_needs_fsdp_only():
    _, seven = max(kinds("7B", 8).values(), key=lambda found: found[0])
    assert (seven.tp, seven.pp) == (1, 1)
    used, sure = said(r"of a card's memory, (\d+) GiB. Above (\d+) GiB")
    card = plan_run.CARDS["H100"][3] / plan_run.GIB
    assert (used, sure) == (int(plan_run.USABLE * card), int(0.75 * card))


# -- a sweep of a script ---------------------------------------------------------------


def test_formulas_have_the_order_of_the_sweep():
    swept = re.findall(r"^\d  \d    yes .*?([\d,]+) +[\d.]+% +computing", PROSE, re.M)
    rates = [float(rate.replace(",", "")) for rate in swept]
    plans = [
        Plan(64, 64 // tp, tp=tp, sequences=4 * tp, network=400) for tp in (1, 2, 4)
    ]
    found = [64 * plan_run.rate(MODELS["8B"], plan)[0] for plan in plans]
    said_ = said(r"Formulas say ([\d,]+), ([\d,]+) and ([\d,]+) tokens/s")
    assert said_ == [round(rate) for rate in found]
    assert rates == sorted(rates, reverse=True) and len(rates) == 3
    apart = [swept / formula for swept, formula in zip(rates, found, strict=True)]
    least, most = said(r"lower by a factor of (\d\.\d) to (\d\.\d)")
    assert (round(min(apart), 1), round(max(apart), 1)) == (least, most)
    assert found == sorted(found, reverse=True)


@pytest.mark.long
@pytest.mark.slow
def test_the_first_line_of_the_sweep_is_that_of_a_dry_run(tmp_path):
    (tmp_path / "tokens").write_bytes(bytes(range(1, 251)) * 86_000)
    options = "--data=tokens --size=8b --context=4096 --batch=256 --recompute --tp=1"
    simulated = "-m simgpu dry-run --world 64 --card H100 --json report.json --network"
    script = str(SCRIPTS / "trainer" / "meshes.py")
    words = [sys.executable, *simulated.split(), "400 GB/s", script, *options.split()]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=LONG)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((tmp_path / "report.json").read_text())
    (line,) = re.findall(r"^1  1    yes.*$", PROSE, re.M)
    assert f" {report['tokens_per_second']:,.0f} " in line


@pytest.mark.slow
def test_the_plan_prints_what_the_lesson_shows():
    found = re.search(r"\$ simgpu (plan .*?)\n(llama2.*?)\n```", PROSE, re.S)
    words = shlex.split(found[1].replace("\\\n", ""))
    done = subprocess.run(
        [sys.executable, "-m", "simgpu", *words],
        capture_output=True, text=True, timeout=LONG,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = found[2].splitlines()
    assert done.stdout.splitlines()[: len(shown)] == shown


def test_formulas_and_the_plan_agree_on_the_layout():
    shards, tp = said(r"all: replicas 1, shards (\d+), tp (\d+), .* recompute full")
    row = r"^1 +(\d+) +(\d+) .*? ([\d,]+) +[\d.]+% "
    micro, count, tokens = re.search(row, PROSE, re.M).groups()
    rate, plan = kinds("70B", 64, network=400)["FSDP"]
    assert (plan.shard, plan.tp, plan.again) == (shards, tp, 1)
    assert (plan.sequences, plan.microbatches) == (int(micro), int(count))
    formula, planned = said(
        r"not on its rate\*\*: ([\d,]+) tokens/s of a GPU, or ([\d,]+)"
    )
    assert formula == round(rate)
    assert planned == round(int(tokens.replace(",", "")) / 64)
