"""Scripts of lessons 15 to 25 and 29: what `test_take_home.py` has no table for.

Each lesson's part says what its ranks measure, keep, save or find wrong.
"""

import os
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import simgpu
from tests import take_home
from tests.launching import SCRIPTS, WarmRanks, edited, load, prose_of, text_of
from tests.take_home import OWN

pytestmark = pytest.mark.slow

RANKS = {1: "1 ranks", 2: "2 ranks", 4: OWN}  # how so many ranks start most scripts


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d\.\d{4})", text)]


def norms(text: str) -> list[float]:
    return [float(norm) for norm in re.findall(r"norm (\d+\.\d{4})", text)]


def by_step(text: str) -> dict[int, float]:
    """Step -> the loss that was printed for it."""
    found = re.findall(r"step (\d+): loss (\d\.\d{4})", text)
    return {int(step): float(loss) for step, loss in found}


def counts(pattern: str, text: str) -> list[int]:
    """What the pattern's only group finds."""
    return [int(count.replace(",", "")) for count in re.findall(pattern, text)]


def with_own(name: str, own: str, folder: Path) -> Path:
    """The script with another text between its two lines of dashes."""
    before, rest = re.split(r"^# -- yours.*\n", text_of(name), flags=re.M)
    _, after = re.split(r"^# -{80,}\n", rest, flags=re.M)
    script = folder / name
    script.write_text(before + own + after)
    return script


def in_warm_ranks(script: Path, words: list[str], folder: Path, ranks: int = 4) -> str:
    return WARM.run(script, ranks, words, folder)


WARM = WarmRanks()


@pytest.fixture(scope="module", autouse=True)
def end_of_the_ranks():
    yield
    WARM.close()


# -- 15, bus_bandwidth.py --------------------------------------------------------------


@pytest.mark.parametrize("ranks", [4, 2])
def test_bandwidths_follow_from_the_time(ran, ranks):
    printed = ran("15", RANKS[ranks]).text
    assert f"on {ranks} x NVIDIA A100" in printed
    row = r"^ *([\d,]+) +([\d.]+) +([\d.]+) +([\d.]+)  (.+)$"
    rows = re.findall(row, printed, re.M)
    assert [values for *_, values in rows] == ["right"] * 5
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
    ((nbytes, ms),) = re.findall(
        r"^gradients: ([\d,]+) bytes, ([\d.]+) ms", printed, re.M
    )
    assert int(nbytes.replace(",", "")) == 4 * 2 * (4096 * 4096 + 4096)
    in_a_ms = algorithm * 1e6  # bytes, at the rate of the last row
    assert float(ms) == pytest.approx(4 * 2 * 4096 * 4097 / in_a_ms, rel=0.01)


def test_small_gradients_are_one_message(own):
    layers = "nn.Linear(4096, 4096), nn.Linear(4096, 4096)"
    printed = own("bus_bandwidth.py", {layers: "nn.Linear(9, 9)"}, "2 ranks")
    microseconds = float(re.search(r"^ +4,096 +([\d.]+)", printed, re.M)[1])
    how = f"360 bytes, {microseconds / 1e3:.2f} ms as messages of 360 bytes"
    assert printed.endswith(f"gradients: {how}\n")


# -- 16, train_ddp.py ------------------------------------------------------------------


@pytest.mark.parametrize("way, width", [(OWN, 2), ("2 ranks --accumulate 2", 4)])
def test_ddp_sends_each_gradient_once_a_step(ran, way, width):
    numbers = 64 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10  # parameters
    printed = ran("16", way).text
    assert counts(r"in a step: (\d+) messages", printed) == [2]
    assert counts(r"([\d,]+) bytes of gradients", printed) == [width * numbers]
    times = re.findall(r"backward: ([\d.]+) ms, without messages ([\d.]+)", printed)
    ((sending, silent),) = times
    assert float(sending) > float(silent) > 0


OF_16 = """
model = nn.Sequential(nn.Embedding(97, 32), nn.Linear(32, 97, bias=False)).cuda()
model[1].weight = nn.Parameter(model[0].weight.detach() / 10)
model[0].weight = model[1].weight
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)


def batch_of(step, part):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 97, (64, 33), generator=generator)
    lengths = torch.randint(1, 33, (64, 1), generator=generator)
    labels = (ids[:, 1:] + ids[:, :1]).remainder(97)
    labels[torch.arange(32) >= lengths] = -100
    own = torch.arange(64)[rank::world_size].chunk(options.accumulate)[part]
    return {"ids": ids[own, :-1], "labels": labels[own]}  # on the CPU


def loss_of(model, part):
    scores, labels = model(part["ids"].cuda()).flatten(0, 1), part["labels"].flatten()
    return nn.functional.cross_entropy(scores, labels.cuda(), reduction="sum")


def count_of(part):
    return (part["labels"] != -100).sum()
"""


def test_padded_sequences_count_by_their_tokens_in_parts_and_ranks(tmp_path):
    script = with_own("train_ddp.py", OF_16, tmp_path)
    one, four = (
        losses(in_warm_ranks(script, ["--batch=64", *words], tmp_path, ranks))
        for ranks, words in ((1, ["--steps=8"]), (4, ["--steps=8", "--accumulate=2"]))
    )
    assert len(one) == 2 and four == pytest.approx(one, abs=2e-4)


# -- 17, check_ranks.py ----------------------------------------------------------------

SPOILT = "4 ranks --epochs 3 --spoil 2"


def test_ranks_have_the_losses_of_one_also_after_a_second_start(ran):
    one = losses(ran("17", "1 ranks --epochs 3").text)
    assert len(one) == 3
    assert losses(ran("17").text) == pytest.approx(one[:2], abs=1e-4)
    again = ran("17", SPOILT, after=OWN, code=1).text
    assert "checkpoint.pt: go on with epoch 2" in again
    assert losses(again) == pytest.approx(one[2:], abs=1e-4)
    two = losses(ran("17", "2 ranks --epochs 1 --spoil 1", code=1).text)
    assert two == pytest.approx(one[:1], abs=1e-4)


def test_a_rank_that_differs_is_named_with_the_tensor_and_nothing_is_saved(ran):
    printed, folder = ran("17", SPOILT, after=OWN, code=1)
    assert "step 20: 9 tensors are equal on 4 ranks" in printed
    assert "step 24: rank 2 IS OUT OF STEP in 0.weight" in printed
    assert printed.count("IS OUT OF STEP") == 1
    assert printed.endswith(
        "epoch 2 is not saved: ranks differ in what would be saved\n"
    )
    assert torch.load(folder / "checkpoint.pt", map_location="cpu")["epoch"] == 1


def test_of_two_ranks_neither_is_blamed_alone(ran):
    printed = ran("17", "2 ranks --epochs 1 --spoil 1", code=1).text
    assert "step 8: RANKS DIFFER, and no value has a majority, in 0.weight" in printed
    assert "IS OUT OF STEP" not in printed


OF_17 = """
BATCH = 64
DDP_OPTIONS = {"find_unused_parameters": True}


class Rotated(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.register_buffer("turn", torch.polar(torch.ones(16), torch.arange(16.0)))
        self.register_buffer("seen", torch.zeros(50), persistent=False)
        self.unused = nn.Linear(32, 2)
        self.calls = 0

    def forward(self, ids):
        self.seen += torch.bincount(ids.flatten(), minlength=50)
        pairs = self.embed(ids).unflatten(-1, (16, 2)).contiguous()
        turned = torch.view_as_complex(pairs) * self.turn.clone()
        self.calls += 1
        if dist.get_rank() == 2 and self.calls > 7:
            self.turn.imag[3] += 0.5
        return torch.view_as_real(turned).flatten(-2) @ self.embed.weight.T


def make():
    ids = torch.randint(0, 50, (500, 16))
    data = [{"ids": some, "labels": some.flip(0)} for some in ids]
    model = Rotated()
    return data, model, torch.optim.AdamW(model.parameters())


def loss_of(model, batch):
    scores = model(batch["ids"].cuda()).flatten(0, 1)
    return nn.functional.cross_entropy(scores, batch["labels"].cuda().flatten())
"""


def test_a_model_with_complex_and_counting_buffers_is_checked_after_each_epoch(
    tmp_path,
):
    """What is saved must be equal; layers that no step uses are among DDP's options."""
    script = with_own("check_ranks.py", OF_17, tmp_path)
    with pytest.raises(AssertionError, match="SystemExit: 1") as error:
        in_warm_ranks(script, ["--every=100", "--epochs=3"], tmp_path)
    printed = str(error.value)
    assert "epoch 0: 112 samples a rank; 52 left out" in printed
    assert "step 7: RANKS DIFFER, and no value has a majority, in seen" in printed
    assert "step 14: rank 2 IS OUT OF STEP in turn" in printed
    assert "step 21" not in printed
    saved = torch.load(tmp_path / "checkpoint.pt", map_location="cpu")
    assert saved["epoch"] == 0


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


def test_a_file_of_full_weights_is_where_all_ranks_start(tmp_path):
    before, yours, _ = re.split("(?m)^# --.*\n", text_of("sharded_training.py"))
    known: dict = {}
    exec(before + yours, known)
    torch.manual_seed(5)
    model = known["Model"]()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    images = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    expected = known["loss_of"](model, {
        "images": images, "labels": images[:, :10].argmax(1)}).item()  # fmt: skip
    words = ["--weights=weights.pt", "--steps=1"]
    printed = in_warm_ranks(SCRIPTS / "sharded_training.py", words, tmp_path, 2)
    assert losses(printed) == pytest.approx([expected], abs=2e-4)


def test_ranks_share_what_batch_norms_see_and_zeros_are_values(own):
    edits = {
        "self.norm = nn.LayerNorm(width)\n": "self.norm = nn.BatchNorm1d(width)\n"
        '        self.register_buffer("types", torch.zeros(2, dtype=torch.long))\n',
        "    if isinstance(module, nn.Linear):": "    if isinstance(module, Block):\n"
        "        module.types.zero_()\n    if isinstance(module, nn.Linear):",
        "    loss = loss.detach()\n": "    loss = loss.detach()\n"
        "    print(f'mean {model.blocks[0].norm.running_mean.norm().item():.6f};')\n",
    }
    printed = own("sharded_training.py", edits, "2 ranks --steps=1")
    means = re.findall(r"mean ([\d.]+);", printed)
    assert len(means) == 2 and means[0] == means[1] and float(means[0]) > 0


def test_bfloat16_takes_tables_in_float32(own):
    edits = {
        "super().__init__()\n        self.norm": "super().__init__()\n"
        '        self.register_buffer("table", torch.ones(width), False)\n'
        "        self.norm",
        "gelu(self.up(self.norm(x)))": "gelu(self.up(self.norm(x) * self.table))",
        "    if isinstance(module, nn.Linear):": "    if isinstance(module, Block):\n"
        "        module.table.fill_(1)\n    if isinstance(module, nn.Linear):",
    }
    printed = own("sharded_training.py", edits, "2 ranks --steps=2 --bf16")
    assert list(by_step(printed)) == [0, 1]


# -- 19, slice_layers.py; 20, pipeline_layers.py; 21, stretch_sequence.py; 22 and 23 ---


@pytest.mark.parametrize("ranks", RANKS)
def test_a_rank_keeps_its_share_of_the_weights_and_says_so(ran, ranks):
    printed = ran("19", RANKS[ranks]).text
    rows = re.findall(r"rank (\d) of (\d): weights ([\d,]+), peak", printed)
    assert [(int(a), int(b)) for a, b, _ in rows] == [(r, ranks) for r in range(ranks)]
    for kept in counts(r"weights ([\d,]+), peak", printed):
        share = 1_685_760 / ranks  # bytes of the model, on one rank
        assert share <= kept < 1.02 * share  # norms are not cut


HEAD = "nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)\n"
TIED = f"{HEAD}        self.token.weight = self.head.weight\n"


def test_tied_weights_stay_tied(own):
    """`parallelize_module` alone makes two parameters of one, silently."""
    one, two = (
        by_step(own("slice_layers.py", {HEAD: TIED}, way))
        for way in ("1 ranks --plain", "2 ranks")
    )
    assert len(one) == 3 and two == pytest.approx(one, abs=2e-4)


def test_frozen_parameters_stay_frozen(own):
    """`SequenceParallel` alone lets those of a norm train, silently."""
    old = "Linear(WIDTH, VOCABULARY)\n\n    def forward(self, tokens):\n"
    freeze = "\n        self.norm.requires_grad_(False)\n"
    tell = "        print('norm trains:', self.norm.weight.requires_grad)\n"
    printed = own(
        "slice_layers.py", {old: old.replace("\n", freeze, 1) + tell}, "1 ranks"
    )
    assert "norm trains: False" in printed and "norm trains: True" not in printed


def test_tied_weights_that_are_cut_in_two_ways_are_refused(tmp_path):
    tied = TIED.replace("VOCABULARY)", "VOCABULARY, bias=False)")
    edits = {'"head": Colwise': '"head": Rowwise', HEAD: tied}
    script = edited("slice_layers.py", edits, tmp_path)
    with pytest.raises(AssertionError, match="are tied: cut both in one way"):
        in_warm_ranks(script, [], tmp_path, 2)


def test_lengths_of_patches_are_divided_and_those_of_images_are_not():
    check_batch = load("slice_layers.py").check_batch
    check_batch({"images": torch.ones(8, 3, 4, 4), "names": ["a"] * 8}, 1, 0, 2)
    with pytest.raises(SystemExit, match="patches has 63 tokens: pad"):
        check_batch({"patches": torch.ones(8, 63, 4)}, 1, 0, 2)


def test_a_stage_has_about_a_quarter_of_the_parameters(ran):
    kept = counts(r"rank \d: ([\d,]+) parameters", ran("20").text)
    assert len(kept) == 4
    assert sum(kept) == 1_065_354 and max(kept) < 0.26 * 1_065_354


def test_the_cut_balances_work():
    """By parameters, but for an embedding: it looks rows up and multiplies nothing."""
    script = load("pipeline_layers.py")
    blocks = [torch.nn.Linear(4, 4) for _ in range(4)]
    parts = script.cut([torch.nn.Embedding(1000, 4), *blocks], 2)
    assert [len(part) for part in parts] == [3, 2]
    layers = [torch.nn.Linear(4, n, bias=False) for n in (8, 1, 1, 2, 4)]
    parts = script.cut(layers, 2)
    assert [len(part) for part in parts] == [1, 4]
    assert sum(map(list, parts), []) == layers
    with pytest.raises(
        SystemExit, match="2 layers leave stage 0 of 4 empty: use fewer"
    ):
        script.cut([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)], 4)


def test_a_weight_of_two_stages_is_refused():
    script = load("pipeline_layers.py")
    layers = [torch.nn.Linear(4, 4) for _ in range(4)]
    layers[3].weight = layers[0].weight
    assert len(script.cut(layers, 1)) == 1
    with pytest.raises(SystemExit, match="stages 0 and 1 share a weight: copy it"):
        script.cut(layers, 2)


def test_a_stage_takes_masks_by_name_and_sends_one_tensor(monkeypatch):
    script = load("pipeline_layers.py")
    turned = script.Stage(torch.nn.Flatten(0, 1), torch.nn.Identity())
    x = torch.arange(24.0).view(2, 3, 4).mT
    assert (
        turned(x.mT).is_contiguous()
        and script.Stage(torch.nn.Identity())(x).is_contiguous()
    )
    monkeypatch.setattr(
        script, "call", lambda layer, x, **others: layer(x) * others["mask"]
    )
    assert script.Stage(torch.nn.Identity())(x, mask=torch.tensor(0)).sum() == 0
    monkeypatch.setattr(script, "call", lambda layer, x, **others: (x, x))
    with pytest.raises(SystemExit, match="a layer returns one tensor, not tuple"):
        turned(x)


NOTED = """
class Noted(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(64), nn.Linear(64, 64)

    def forward(self, x):
        x = self.norm(x)
        ones = nn.functional.dropout(torch.ones_like(x[0]))
        kept = "".join("01"[p > 0] for p in ones)
        mean = self.norm.running_mean.sum().item()
        print(f"rank {dist.get_rank()}: mean {mean:.4f}, kept {kept}", flush=True)
        return self.linear(x)

def make_layers():
    return [Noted(), Noted()]

def call(layer, x):
    return layer(x)

def loss_of(scores, labels):
    return cross_entropy(scores, labels, reduction="sum")

def count(labels):
    return len(labels)

def batch_of(step):
    images = torch.randn(256, 64, generator=torch.Generator().manual_seed(step))
    return images, images[:, :10].argmax(1), {}

"""


def test_running_means_and_dropout_of_stages(tmp_path):
    """PyTorch learns shapes from uninitialized tensors; one seed is not for all."""
    script = with_own("pipeline_layers.py", NOTED, tmp_path)
    printed = in_warm_ranks(script, [], tmp_path, 2)
    rows = re.findall(r"rank (\d): mean (\S+), kept (\d+)", printed)
    norm = torch.nn.BatchNorm1d(64)
    for step in range(12):
        generator = torch.Generator().manual_seed(step)
        for part in torch.randn(256, 64, generator=generator).chunk(8):
            norm(part)
    last = [float(mean) for rank, mean, _ in rows if rank == "0"][-1]
    assert last == pytest.approx(norm.running_mean.sum().item(), abs=1e-3)
    kept = [{kept for r, _, kept in rows if r == rank} for rank in "01"]
    assert min(map(len, kept)) >= 12 * 8 and not kept[0] & kept[1]


def test_padded_targets_do_not_count():
    script = load("pipeline_layers.py")
    scores, labels = torch.randn(8, 5), torch.tensor([0, 1, 2, 3, 4, -100, -100, -100])
    halves = zip(scores.chunk(2), labels.chunk(2), strict=True)
    found = sum(script.loss_of(*half) / script.count(labels) for half in halves)
    assert torch.allclose(found, torch.nn.functional.cross_entropy(scores, labels))


def test_padded_targets_of_a_part_do_not_count():
    script = load("stretch_sequence.py")
    scores, targets = torch.randn(2, 8, 5), torch.randint(5, (2, 8))
    targets[:, 5:] = -100
    parts = zip(scores.chunk(4, 1), targets.chunk(4, 1), strict=True)
    found = sum(script.loss_of(*part) for part in parts) / 10
    whole = torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
    assert torch.allclose(found, whole)


def test_a_table_among_the_buffers_is_not_copied_from_rank_0(tmp_path):
    edits = {
        "self.place = nn.Embedding(length, width)": 'self.register_buffer("table", '
        "torch.randn(length, width))",
        "self.place(places)": "self.table",
        "buffers=[tokens,": "buffers=[model.module.table, tokens,",
        "buffer_seq_dims=[1,": "buffer_seq_dims=[0, 1,",
    }
    script = edited("stretch_sequence.py", edits, tmp_path)
    words = ["--length=128"]
    one, two = (by_step(in_warm_ranks(script, words, tmp_path, n)) for n in (1, 2))
    assert len(one) == 3 and two == pytest.approx(one, abs=2e-4)


def test_places_that_each_rank_counts_itself_are_found(tmp_path):
    wrong = "self.place(torch.arange(len(places)).cuda())"
    words, found = ["--length=128", "--compare"], []
    for edits in ({}, {"self.place(places)": wrong}):
        script = edited("stretch_sequence.py", edits, tmp_path)
        printed = in_warm_ranks(script, words, tmp_path, 2)
        found += re.findall(r"from one process by (\S+) %", printed)
    assert found[0] == "0.00" and float(found[1]) > 10


@pytest.mark.parametrize(
    "number, pattern, each",
    [
        ("19", r"peak ([\d,]+)", True),
        pytest.param("21", r"peak ([\d,]+)", True, marks=pytest.mark.long),
        pytest.param(  # MiB of the largest rank
            "22", r"ranks: peak (\d+)\.", False, marks=pytest.mark.long
        ),
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


def own_edited(name: str, edits: dict[str, str], folder: Path) -> Path:
    """The script with other text in places between its two lines of dashes."""
    own = re.split(r"^# -{2,}.*-{40,}\n", text_of(name), flags=re.M)[1]
    assert all(old in own for old in edits)
    return edited(name, edits, folder)


HIDDEN = """    targets = sequences[:, 1:].masked_fill(
        torch.arange(LENGTH) >= torch.arange(4, 4 + BATCH)[:, None], -100
    )
    nested = __import__("collections").UserDict(more=[targets])  # as BatchEncoding is
    return {"tokens": sequences[:, :-1], "targets": targets, "nested": nested}
"""


DREW = '    print("drew", torch.rand(1).item())  # as a dropout would\n'


def drawn(text: str) -> list[str]:
    return re.findall(r"drew ([\d.e-]+)", text)


def test_experts_with_padding_frozen_parameters_and_bfloat16(tmp_path):
    """Ranks with unequally many targets have the loss of one; autocast runs.

    Copied blocks lose what was written on their parameters, and all ranks clip alike.
    """
    place = "nn.Embedding(LENGTH, WIDTH)\n"
    frozen = "nn.Embedding(LENGTH, WIDTH).requires_grad_(False)\n"
    last = '    return {"tokens": sequences[:, :-1], "targets": sequences[:, 1:]}\n'
    copies = "(__import__('copy').deepcopy(Block()) for _ in range(2))"
    cloned = {"nn.Sequential(Block(), Block())": f"nn.Sequential(*{copies})"}
    routed = "        return x + self.experts(self.norm2(x))\n"
    masked = """        real = x[..., 0] > 0
        y = self.experts(self.norm2(x), real)
        assert y[real].any() and not y[~real].any()
        return x + y
"""
    padded = {last: HIDDEN, place: frozen, routed: masked, **cloned}
    script = own_edited("expert_parallel.py", padded, tmp_path)
    one, four = (
        in_warm_ranks(script, ["--steps=6", "--clip=0.1"], tmp_path, ranks)
        for ranks in (1, 4)
    )
    for found in losses, norms:
        assert len(found(one)) == 2
        assert found(four) == pytest.approx(found(one), abs=2e-4)
    assert min(norms(one)) > 0.2
    lower = {
        "    scores, targets = model(": DREW + "    model = torch.autocast"
        '("cuda", torch.bfloat16)(model.forward)\n    scores, targets = model('
    }
    script = own_edited("expert_parallel.py", lower, tmp_path)
    printed = in_warm_ranks(script, ["--steps=3"], tmp_path, 2)
    assert losses(printed) == pytest.approx([4.3], abs=0.1)
    assert len(set(drawn(printed))) == 3 * 2  # other numbers on each rank


def test_no_two_ranks_have_an_expert_of_one_name(monkeypatch):
    """A distributed checkpoint would take them for copies, and keep one."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    names = []
    for rank in range(2):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        names.append({*load("expert_parallel.py").Experts().experts.state_dict()})
    assert names[0] and names[0].isdisjoint(names[1])


def test_experts_and_sequences_that_ranks_cannot_share_are_told_apart(tmp_path):
    """Each in its own words."""
    for old, why in {
        "64, 64, 32, 16": "4 ranks cannot share 18 sequences equally",
        "BATCH = 4, ": "EXPERTS is a multiple of 4 ranks, not 6",
    }.items():
        new = "64, 64, 32, 18" if old.startswith("64") else "BATCH = 6, "
        script = own_edited("expert_parallel.py", {old: new}, tmp_path)
        with pytest.raises(AssertionError, match=why):
            in_warm_ranks(script, ["--steps=1"], tmp_path)


@pytest.mark.long
def test_the_balance_loss_keeps_a_favoured_expert_from_taking_all(tmp_path):
    """The largest shares in the lesson's table: factor, in step 3 and in step 12."""
    prose = prose_of(take_home.lesson_of("22"))
    said = re.findall(r"^\| (none|0\.\d+) \| (0\.\d+) \| (0\.\d+) \|$", prose, re.M)
    assert [factor for factor, *_ in said] == ["none", "0.01", "0.1"]
    for factor, *shares in said:
        words = ["--favour=1", f"--balance={factor.replace('none', '0')}"]
        printed = in_warm_ranks(SCRIPTS / "expert_parallel.py", words, tmp_path)
        found = dict(re.findall(r"step +(\d+).*largest share ([\d.]+)", printed))
        assert [found["3"], found["12"]] == shares


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


OWN_OF_23 = {
    "nn.Linear(WIDTH, WORDS)\n": "nn.Linear(WIDTH, WORDS, bias=False)\n"
    "        self.head.weight = self.token.weight\n"
    "        nn.init.normal_(self.token.weight, std=0.02)\n"
    "        self.norm.requires_grad_(False)\n",
    "    scores, targets = model(": DREW + "    scores, targets = model(",
    '"targets": tokens[:, 1:]}': '"targets": tokens[:, 1:].masked_fill('
    "torch.arange(16)[:, None] > torch.arange(LENGTH), -100), "
    '"nested": __import__("collections").UserDict(more=[tokens])}',
}


def test_tied_and_frozen_weights_and_padding_on_meshes_have_the_losses_of_one_process(
    tmp_path,
):
    script = own_edited("combine_meshes.py", OWN_OF_23, tmp_path)
    script.write_text(script.read_text().replace("range(8)", "range(3)"))
    one = in_warm_ranks(script, ["--clip=0.1"], tmp_path, 1)
    two = in_warm_ranks(script, ["--tp=2", "--clip=0.1"], tmp_path, 4)
    for found in losses, norms:
        assert len(found(one)) == 3
        assert found(two) == pytest.approx(found(one), abs=2e-4)
    assert min(norms(one)) > 0.2
    assert len(set(drawn(two))) == 3 * 2  # a layer's ranks draw the same numbers


@pytest.mark.parametrize(
    "edits, way, why",
    [
        (
            {"manual_seed(step)": 'manual_seed(step + int(os.environ["RANK"]))'},
            ["--tp=2"],
            "shares a layer, but has other samples",
        ),
        ({"= 64, 32, 128": "= 64, 33, 128"}, ["--tp=2"], "4 heads and 33 tokens"),
        (
            {"arange(LENGTH + 1)) %": "arange(LENGTH + 1))[:14] %"},
            [],
            "14 sequences by 4",
        ),
        (
            {**OWN_OF_23, '"head": Colwise': '"head": Rowwise'},
            ["--tp=2"],
            "token.weight and head.weight are tied: cut both in one way",
        ),
    ],
)
def test_what_slices_cannot_divide_and_other_ties_are_refused(
    edits, way, why, tmp_path
):
    script = own_edited("combine_meshes.py", edits, tmp_path)
    with pytest.raises(AssertionError, match=why):
        in_warm_ranks(script, way, tmp_path)


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
    loop = "    for step, batch in enumerate(loader, start=first):\n"
    dies = '        if (step, rank, os.environ["TORCHELASTIC_RESTART_COUNT"]) == '
    dies += '(12, 1, "0"):\n            os.kill(os.getpid(), 9)\n'
    mortal = edited("train_elastic.py", {loop: loop + dies}, tmp_path)
    _, command = take_home.commands(prose_of(take_home.lesson_of("24")))
    command = command.replace("train_elastic.py", str(mortal))
    found = by_step(take_home.run_command(command, tmp_path))
    assert list(found) == [5, 10, 15, 20, 24]
    one = by_step(ran("24", "1 ranks --steps 36").text)
    assert found[20] == pytest.approx(one[20], abs=2e-4)


def test_steps_of_an_epoch_have_different_samples():
    script = load("train_elastic.py")
    rows = [script.rows_of_step(step, 120, 1440) for step in range(2 * 12)]
    first, second = torch.cat(rows[:12]), torch.cat(rows[12:])
    assert len(first.unique()) == len(second.unique()) == 1440
    assert not torch.equal(first, second)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_within_an_epoch(workers):
    """Whatever its processes have fetched in advance before the job was ended."""
    script = load("train_elastic.py")
    for first in (0, 10):
        found = torch.utils.data.DataLoader(
            torch.arange(1440), num_workers=workers,
            batch_sampler=script.Samples(first, 14, 120, 1440, rank=1, ranks=3),
        )  # fmt: skip
        assert len(found) == 14 - first
        for step, rows in enumerate(found, start=first):
            assert torch.equal(rows, script.rows_of_step(step, 120, 1440)[1::3])


def test_checkpoints_are_whole_or_not_there(tmp_path: Path):
    script = load("train_elastic.py")
    assert script.newest(tmp_path) == 0
    for step in (5, 10, 15):
        script.save(tmp_path, step, {"step": step, "weights": torch.ones(1000)})
    names = ["step-000010.pt", "step-000015.pt"]
    assert [path.name for path in sorted(tmp_path.iterdir())] == names
    assert script.newest(tmp_path) == 15
    last = tmp_path / names[1]
    whole = last.read_bytes()
    spot = whole.index(torch.ones(10).numpy().tobytes()) + 400
    flipped = whole[:spot] + b"?" + whole[spot + 1 :]
    for wrong in (b"", whole[:40], whole[:-1], flipped):
        last.write_bytes(wrong)
        assert script.newest(tmp_path) == 10
    assert torch.load(last)["step"] == 15  # torch.load does not see the flipped byte


def test_a_save_spares_itself_beside_damaged_checkpoints_of_later_steps(tmp_path):
    """Both were damaged, so the job began with step 0."""
    script = load("train_elastic.py")
    for step in (10, 15):
        (tmp_path / f"step-{step:06}.pt").write_bytes(b"damaged")
    script.save(tmp_path, 5, {"step": 5})
    assert script.newest(tmp_path) == 5


@pytest.fixture
def on_cpu(monkeypatch):
    """This process has no GPU: what makes a tensor on one makes it here."""
    for name in ("zeros", "tensor"):
        real = getattr(torch, name)
        here = lambda *words, real=real, device=None, **more: real(*words, **more)  # noqa: E731
        monkeypatch.setattr(torch, name, here)


def test_another_batch_is_refused_and_any_part_comes_back(tmp_path: Path, on_cpu):
    """A restart with `--batch=60` would go on at another place in the data."""
    script = load("train_elastic.py")
    script.dist = SimpleNamespace(get_rank=lambda: 0, broadcast=lambda step, rank: None)
    before, data = script.make_optimizers(model := script.make_model()), {"batch": 120}
    before["optimizer"].param_groups[0]["lr"] = 0.5
    state = {"model": model.state_dict(), "optimizer": before["optimizer"].state_dict()}
    script.save(tmp_path, 5, {**state, "data": data})
    after = script.make_optimizers(model)
    assert script.load(tmp_path, {"model": model, **after}, data) == 5
    assert after["optimizer"].param_groups[0]["lr"] == 0.5
    with pytest.raises(ValueError, match="'batch': 120.*'batch': 60.*a new --folder"):
        script.load(tmp_path, {"model": model}, {"batch": 60})


def test_a_mean_of_the_losses_is_refused(tmp_path):
    """Divided by the batch once more, it would train at a 120th of the rate."""
    mean = {'reduction="none"': 'reduction="mean"'}
    script = edited("train_elastic.py", mean, tmp_path)
    with pytest.raises(Exception, match="not a loss a sample"):
        in_warm_ranks(script, ["--steps=1"], tmp_path, 2)


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
    """From its last step, which is saved whatever its number, in a folder it makes."""
    folder = tmp_path / "a" / "folder"
    for steps in (11, 20):
        more = shlex.join(["--folder", str(folder), f"--steps={steps}"])
        command = take_home.command_for("25", f"2 ranks {more}")
        text = take_home.run_command(command, tmp_path)
        saved = torch.load(folder / "checkpoint.pt", map_location="cpu")
        assert saved["step"] == steps
    one = losses(ran("25", "1 ranks").text)
    assert losses(text) == pytest.approx(one[2:], abs=2e-4)
    assert os.listdir(folder) == ["checkpoint.pt"]


@pytest.mark.parametrize("slow, end", [(True, ", not level: .* too long"), (False, "")])
def test_a_bandwidth_says_when_it_is_not_level(slow, end, monkeypatch, on_cpu):
    script = load("train_on_nodes.py")
    alone = SimpleNamespace(MAX=0)
    script.dist = SimpleNamespace(
        all_reduce=lambda *_, **__: None, get_world_size=lambda group: 2, ReduceOp=alone
    )
    monkeypatch.setattr(script, "PATIENCE", -1.0 if slow else 1e9)
    monkeypatch.setattr(
        script, "seconds_of_all_reduce", lambda x, group: x.nbytes / 1e9
    )
    size = 16 if slow else 32
    words = rf"1\.0 GB/s, all-reduce of {size} MiB{end}"
    assert re.fullmatch(words, script.bandwidth(None))


# -- 29, compare_ranks.py --------------------------------------------------------------

SAVE = "1 ranks --save=one.pt"
OWN_COUNT = {"    dist.all_reduce(count)  # tokens of all ranks\n": ""}
OWN_SHARE = {"/ count * dist.get_world_size()": "/ count"}


def test_a_right_program_on_two_ranks_agrees(ran):
    assert ran("29", SAVE).text == "3 steps of 1 rank are in one.pt\n"
    said = ran("29", "2 ranks --compare=one.pt", after=SAVE).text
    assert said.startswith("3 steps agree")


@pytest.mark.parametrize("options", ["", "--save=one.pt"])
def test_a_file_is_written_by_one_rank_and_the_options_exclude_each_other(
    options, monkeypatch, capsys
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("sys.argv", ["compare_ranks.py", *options.split()])
    with pytest.raises(SystemExit):
        load("compare_ranks.py").main()
    said = capsys.readouterr().err
    assert ("is for one rank" if options else "one of the arguments") in said


def test_dropout_would_let_every_program_pass_so_nothing_is_saved(own, tmp_path):
    words = "nn.Embedding(WORDS, 32), "
    dropout = {words: f"{words}nn.Dropout(0.1), "}
    assert "away from itself" in own("compare_ranks.py", dropout, SAVE, 1)
    assert not (tmp_path / "one.pt").exists()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("edits", [{**OWN_COUNT, **OWN_SHARE}, OWN_SHARE])
def test_a_wrong_program_is_named_at_its_first_step(ran, ranks, edits, tmp_path):
    wrong = edited("compare_ranks.py", edits, tmp_path)
    command = take_home.command_of(wrong, f"{ranks} ranks --compare=one.pt")
    said = take_home.run_command(command, ran("29", SAVE).folder)
    assert re.match(r"step 0, loss: .* away from one rank", said), said
