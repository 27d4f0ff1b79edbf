"""Lessons 16 to 23 at real size: their tables are the recordings' and the formulas'."""

import json
import re
from statistics import median
from typing import NamedTuple

import pytest

from tests.launching import NOTEBOOKS, ROOT, prose_of
from tests.take_home import lesson_of

RECORDED = ROOT / "simgpu" / "tests" / "recordings" / "ultrascale.json"
ALL_REDUCE = "A100", "all_reduce"
SEQUENCES, TOKENS = 256, 4096  # of a step, of a sequence


class Layout(NamedTuple):
    """A run of the sweep: the size of each axis, tokens/s of a GPU."""

    model: str
    nodes: int
    micro_batch: int
    dp: int
    pp: int
    tp: int
    zero: int
    rate: float


def rows_of(name: str) -> list[list]:
    return json.loads(RECORDED.with_name(f"{name}.json").read_text())["rows"]


def layouts(model: str, **fixed: int) -> list[Layout]:
    """The layouts that ran, the fastest first."""
    found = [
        Layout(r[0], r[7], r[8], *r[10:14], r[15])
        for r in rows_of("ultrascale")
        if r[14] == "ran" and r[0] == model
    ]
    fits = (one for one in found if fixed.items() <= one._asdict().items())
    return sorted(fits, key=lambda one: -one.rate)


def numbers(text: str) -> list[float]:
    return [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*\.?\d*", text)]


def section(number: str) -> str:
    """What a lesson says at real size."""
    found = re.search(
        r"^## At real size\n(.*?)(?=^## |\Z)", prose_of(lesson_of(number)), re.M | re.S
    )
    assert found, f"lesson {number} has no section of this name"
    return found[1]


def table(number: str) -> list[list[str]]:
    """The rows of the section's first table, without its head."""
    lines = [line for line in section(number).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_gradients_of_the_sweep():
    """Lesson 16: a step is its tokens at the rate of one machine, and the messages."""

    def rate(gpus: int) -> float:  # with 4,096 tokens at a time
        runs = layouts("1B", dp=gpus, pp=1, tp=1, zero=0)
        (run,) = [run for run in runs if run.micro_batch == 1]
        return run.rate

    alone, rest = rate(8), {}
    for gpus, tokens, said, step, left in table("16"):
        (gpus,) = numbers(gpus)[:1]
        assert numbers(tokens) == [SEQUENCES * TOKENS / gpus]
        assert numbers(said) == [round(rate(gpus))]
        assert numbers(step) == [round(1e3 * numbers(tokens)[0] / rate(gpus))]
        rest[gpus] = 1e3 * numbers(tokens)[0] * (1 / rate(gpus) - 1 / alone)
        assert numbers(left) == [round(rest[gpus])] * (gpus != 8)
    words = section("16")
    assert f"these are {round(65_536 / alone * 1e3):,} ms, and 74 ms are left" in words
    assert [round(rest[2 * n] - rest[n]) for n in (16, 32)] in ([18, 17], [17, 18])
    for gpus, predicted, measured in ((128, 24_500, "24,494"), (256, 16_600, "15,700")):
        tokens, doubled = SEQUENCES * TOKENS / gpus, {128: 1, 256: 2}[gpus]
        ms = round(tokens / alone * 1e3) + round(rest[64]) + 17 * doubled
        assert 1e3 * tokens / ms == pytest.approx(predicted, rel=0.005)
        assert f"{rate(gpus):,.0f}" == measured and measured in words
        assert f"{predicted:,}" in words
    assert "= 209$ ms" in words and round(8_192 / alone * 1e3) == 209
    parameters = 16 * (4 * 2048**2 + 3 * 2048 * 8192) + 131_072 * 2048
    assert f"{parameters / 1e9:.2f} billion" in words
    assert 6 * parameters * alone == pytest.approx(316e12, rel=0.005)


def test_buckets_on_real_links():
    """Lesson 16: bus bandwidths of a bucket, and the tokens that hide it."""
    us = {tuple(row[:-1]): row[-1] for name in ("nccl_tests", "nccl_nodes")
          for row in rows_of(name)}  # fmt: skip
    inside = us["H100", "all_reduce", 8, 2**25]
    between = "A100", "all_reduce", 2, 16, "EFA 4 x 100 Gbit/s per node"
    words = section("16")
    for ranks, nbytes, took, said in (
        (8, 2**25, inside, 294),
        (16, 2**25, us[(*between, 2**25)], 41),
        (16, 2**30, us[(*between, 2**30)], 77),
    ):
        assert round(2 * (ranks - 1) / ranks * nbytes / took / 1e3) == said
        assert f"{said} GB/s" in words
    assert 2 * 316e3 / 294 == pytest.approx(2_150, rel=0.005) and "2,150" in words
    assert 2 * 316e3 / 41 == pytest.approx(15_400, rel=0.005) and "15,400" in words
    assert round(us[(*between, 64)]) == 161 and "161 µs" in words


def test_bus_bandwidths_of_large_messages():
    """Lesson 15: a table of recordings, and what 16 GB of gradients take by it."""
    us = {tuple(row[:4]): row[4] for row in rows_of("nccl_tests")}
    words = prose_of(lesson_of("15"))
    for mib in 32, 512:
        cells = [
            2 * (n - 1) / n * mib * 2**20 / us[card, "all_reduce", n, mib * 2**20] / 1e3
            for card, n in (("A100", 4), ("H100", 8))
        ]
        assert f"message of {mib} MiB | {cells[0]:.0f} | {cells[1]:.0f} |" in words
    assert f"1.75 · 16 / 294 = {2 * 7 / 8 * 16 / 294:.3f} s" in words
    one, eight = (2 * 15 / 16 * 16 / rate for rate in (25, 8 * 50))  # network cards
    assert f"in each, $t$ is {one:.1f} s. With eight" in words
    assert f"beside eight H100, it is {eight:.3f} s" in words
    assert f"once, which takes {16 / 25:.2f} s or {16 / 400:.2f} s" in words


def test_messages_of_batch_norm():
    """Lesson 17: what two messages of each of 53 layers take, at recorded latencies."""
    words = prose_of(lesson_of("17"))
    one = {r[3]: r[4] for r in rows_of("nccl_tests") if r[:3] == [*ALL_REDUCE, 4]}
    two = {r[5]: r[6] for r in rows_of("nccl_nodes") if r[:3] == [*ALL_REDUCE, 2]}
    assert round(one[1024]) == 14 and round(two[64]) == 161
    assert "1.5 ms at the recorded 14 µs" in words and round(0.014 * 106, 1) == 1.5
    assert "17 ms at the 161 µs" in words and round(0.161 * 106) == 17


def test_shards_of_8_and_of_128_ranks():
    """Lesson 18: what 120 ranks more leave out of each rank's memory."""
    gib = 16 * 8.03e9 * (1 / 8 - 1 / 128) / 2**30
    assert f"or {gib:.1f} GiB" in section("18")
    small, large = (numbers(row[2])[0] for row in table("18"))
    assert f"differ by {small - large:.1f} GiB" in section("18")
    rest = [had - 16 * 8.03e9 / n / 2**30 for had, n in ((small, 8), (large, 128))]
    assert "What remains, {1:.0f} to {0:.0f} GiB".format(*rest) in section("18")
    scores = 16_384 * 128_256 * 4 / 2**30
    assert f"each token, {scores:.1f} GiB in float32" in section("18")
    ends, full = 2 * 128_256 * 4096 * 2 / 2**30, 4 * 8.03e9 / 2**30
    text = prose_of(lesson_of("18"))
    assert f"{ends:.1f} GiB in bfloat16" in text and f"bytes: {full:.0f} GiB" in text
    rates = [numbers(row[1])[0] for row in table("18")]
    assert f"only {100 * (1 - rates[1] / rates[0]):.0f} % slower" in section("18")


def share_of_messages(ranks: int, sequences: int) -> float:
    """Of computing, at the bus bandwidth that was measured for such messages."""
    measured = json.loads((RECORDED.parent / "nccl_nodes.json").read_text())["rows"]
    size = sequences * TOKENS * 4096 * 2
    card = ["H100", "all_reduce", 1, 8]
    (us,) = (row[6] for row in measured if row[:4] == card and row[5] == size)
    bandwidth = size / us * 1e6 * 2 * 7 / 8
    assert f"{bandwidth / 1e9:.0f} GB/s for" in section("19")
    return 16 * (ranks - 1) * 400e12 / (87 * 4096 * bandwidth)


def test_slices_of_the_sweep():
    """Lesson 19: messages beside computing, and the fastest layouts."""
    said = re.search(
        r"take (\d+) % with \$t\$ = 2 and (\d+) % with 4.*take (\d+) % with \$t\$ = 8",
        section("19"),
    )
    shares = [share_of_messages(*row) for row in ((2, 1), (4, 1), (8, 8))]
    assert [int(n) for n in said.groups()] == [round(100 * n) for n in shares]
    rows = [[numbers(cell) for cell in row] for row in table("19")]
    first = rows[0][3][0] * (1 + share_of_messages(2, 1))
    for place, ((ranks,), gpus, (sequences,), (rate,), guess) in enumerate(rows):
        fixed = {"nodes": gpus[0] / 8, "pp": 1, "tp": ranks}
        if place == 3:  # the only row that is not the fastest
            fixed["micro_batch"] = sequences
        best = layouts("8B", **fixed)[0]
        assert (best.micro_batch, round(best.rate)) == (sequences, rate)
        if guess:
            right = first / (1 + share_of_messages(ranks, sequences))
            assert guess[0] == pytest.approx(right, rel=0.01)
            assert place == 3 or right == pytest.approx(rate, rel=0.03)
    best = layouts("8B", nodes=2, pp=1, tp=2)[0].rate
    assert f"reaches {best:,.0f}" in section("19")


def test_stages_of_the_sweep():
    """Lesson 20: bubbles, and where the slowest stage decides instead."""
    rates = {}
    for stages, parts, bubble, measured in table("20"):
        (p,), (m,) = numbers(stages), numbers(parts)
        assert m == SEQUENCES / (64 / p)
        assert numbers(bubble) == [round(100 * (p - 1) / (m + p - 1))]
        wanted = {"nodes": 8, "pp": p, "tp": 1, "zero": 1, "micro_batch": 1}
        rates[p] = layouts("8B", **wanted)[0].rate
        assert numbers(measured) == [round(rates[p])]
    busy = {p: 4 * p / (5 * p - 1) for p in rates}
    less = [round(100 * (1 - busy[p] / busy[2])) for p in (4, 8, 16, 32)]
    assert "predicts {}, {}, {} and {} % less".format(*less) in section("20")
    less = [round(100 * (1 - rates[p] / rates[2])) for p in (4, 8, 16, 32)]
    assert "Measured are {}, {}, {} and {} %".format(*less) in section("20")
    scoring = 131_072 * 4096 / 243e6  # in blocks of the model
    mean = [(32 + scoring) / p for p in (8, 32)]
    assert 4 < mean[0] < 5 and 1 < mean[1] < 1.1 and 2 < scoring
    assert "four blocks and a bit" in section("20")


def test_a_long_sequence_is_mostly_attention():
    """Lesson 21: FLOPs of attention beside those of the weights."""
    shares = [6 * 32 * 4096 * tokens / (6 * 8.03e9) for tokens in (32_768, 262_144)]
    assert "half as many as" in section("21") and 0.45 < shares[0] < 0.55
    assert "four times as many" in section("21") and 3.8 < shares[1] < 4.4
    tokens = 2 / 4 * 400e12 / 50e9
    assert f"these are {tokens:,.0f} tokens" in section("21")
    rows = [[numbers(cell)[0] for cell in row] for row in table("21")]
    work = [3 * 8.03e9 + 6 * 32 * 4096 * length for _, length, _, _ in rows]  # in FP8
    for (*_, expected), flops in zip(rows, work, strict=True):
        assert expected == round(rows[0][2] * work[0] / flops)
    assert all(0.6 < rate / flops < 0.75 for _, _, rate, flops in rows[2:])  # a third


def test_with_few_heads_for_keys_a_ring_sends_less():
    """Lesson 21: a quarter of the heads have keys, four ranks."""
    g, n = 1 / 4, 4
    ring, heads = 2 * g * (n - 1) / n, (2 + 2 * g) * (n - 1) / n / n
    said = f"the ring sends {ring:.3f} a, and heads {heads:.2f} a"
    assert said in prose_of(lesson_of("21"))


def test_the_best_layouts_of_the_sweep():
    """Lesson 23: the best layout of each size, the median, and what copies share."""
    of_two, fastest = {}, {}
    for gpus, best, rate, middle in table("23"):
        found = layouts("8B", nodes=numbers(gpus)[0] / 8)
        assert numbers(rate) == [round(found[0].rate)]
        assert numbers(middle) == [round(median(one.rate for one in found))]
        axes = re.match(r"(\d+) copies of (?:(\d+) stages|slices in (\d+))", best)
        copies, stages, slices = (int(size or 1) for size in axes.groups())
        assert (copies, stages, slices) == (found[0].dp, found[0].pp, found[0].tp)
        assert best.endswith(", shared") == (found[0].zero == 1)
        size = int(numbers(gpus)[0])
        fastest[size] = found[0].rate
        of_two[size] = next(one.rate for one in found if one.pp * one.tp == 2)
    assert [n for n in fastest if fastest[n] == of_two[n]] == [32, 64]
    more = {n: round(100 * (fastest[n] / of_two[n] - 1)) for n in (8, 256)}
    words = f"On 8, four stages are {more[8]} % faster, and on 256, slices in eight are"
    assert f"{words} {more[256]} % faster." in section("23")
    assert f"{100 * fastest[512] / fastest[8]:.0f} % of its rate on 8" in section("23")
    many = layouts("8B", nodes=32)
    across, inside = (
        median(one.rate for one in many if (one.tp > 8) == crosses)
        for crosses in (True, False)
    )
    said = f"is {across:,.0f} tokens/s, and of the others {inside:,.0f}"
    assert said in section("23")
    eight = {
        (one.pp, one.micro_batch): one.rate
        for one in reversed(layouts("8B", nodes=32, dp=32, zero=0))
        if one.pp * one.tp == 8 and 1 in (one.pp, one.tp)
    }
    small, staged, large = (eight[which] for which in ((1, 1), (8, 1), (1, 8)))
    assert f"sequence reach {small:,.0f} tokens/s" in section("23")
    assert f"than eight stages ({staged:,.0f})" in section("23")
    assert f"*eight* sequences reaches {large:,.0f}." in section("23")


def test_narrow_experts_need_fast_links():
    """Lesson 22: messages beside computing, by the hidden width of an expert."""
    hidden = [numbers(h)[0] for h in re.findall(r"\$h\$ = ([\d,]+\d)", section("22"))]
    near, far = (numbers(b)[0] for b in re.findall(r"(\d+) GB/s", section("22")))
    shares = [
        100 * 4 * 400e12 / (9 * h * gb * 1e9)
        for h, gb in ((hidden[0], near), (hidden[0], far), (hidden[1], far))
    ]
    stored = (NOTEBOOKS / lesson_of("22")).read_text("utf-8")
    found = re.findall(r'"(?:Mixtral|DeepSeek-V3), .*? (\d+)%\\n"', stored)
    assert found == [f"{share:.0f}" for share in shares]
    assert f"halves the bytes, so the formula says {shares[-1] / 2:.0f} %" in section(
        "22"
    )
