"""The script of each lesson, started unmodified on simulated GPUs: five tables.

What a script must print that is started by its lesson's own command; ways to start it
that must all have the losses of one process; wrong arguments, with the sentence that
refuses them; a reader's own parts that are refused; and its functions that a lesson
shows. Tests that calculate more are in
`test_scripts_of_one_process.py`, `test_scripts_in_ranks.py`, `test_plan_run.py` and
`test_whole_trainer.py`.
"""

import re
from typing import NamedTuple

import pytest
import torch
from torch import nn

from tests import take_home
from tests.launching import load, prose_of, shown, text_of
from tests.take_home import OWN

pytestmark = pytest.mark.slow

# -- what a lesson's own command prints ------------------------------------------------

LESSONS = {  # lesson -> lines (regular expressions), and how often each one is printed
    "00": {r"^20,000 samples scored": 1, r"A100": 4, r"^cuda:\d .* samples": 4},
    "01": {r"\Atraining on cuda:1, NVIDIA A100": 1, r"^epoch \d: mean loss ": 3},
    "02": {r"^step \d+: loss \d\.\d{4}, mean of 8: \d\.\d{4}": 6},
    "03": {rf"^epoch {epoch}: loss \d\.\d{{4}}": 1 for epoch in range(3)},
    "04": {r"^\w[\w ,]+? +[\d.]+ MiB$": 11},
    "05": {
        r"^a copy takes [\d.]+ ms, a step [\d.]+ ms$": 1,
        r"^with(out)? prefetching: [\d.]+ ms, losses:$": 2,
    },
    "06": {r"^largest difference of a loss: 0\.0000": 1},
    "07": {r"\ANVIDIA A100-SXM4-80GB \(simulated\), torch ": 1},
    "08": {
        r"^\w+ +\d+ x": 8,
        r"^relu .* rest$": 1,
        r"^addmm .* FLOPs$": 1,
        r"launch-bound, or the host waits.*\n\Z": 1,
    },
    "09": {r"float16: \d+ of 48 steps skipped": 1},
    "10": {r"loss [\d.]+, gradient [\d.]+, [\d.]+ ms": 5, r"peak [\d.]+ MiB": 1},
    "11": {r"epoch \d: loss \d\.\d{4}, waited [\d.]+ ms a step, on the GPU ": 3},
    "12": {r"4 gradients agree": 1, r"^epoch \d: loss \d\.\d{4}": 3},
    "13": {r"^step \d: loss [\d.]+, on one GPU [\d.]+": 5},
    "14": {rf"^cuda:{rank}: 5,000 samples, peak ": 1 for rank in range(4)},
    "15": {r"on 4 x NVIDIA A100": 1, r"^ *[\d,]+ +[\d.]+ +[\d.]+ +[\d.]+  right$": 5},
    "16": {r"loss \d\.\d{4}": 3, r"rank \d: peak memory \d+\.\d MiB": 4},
    "17": {
        r"9 tensors are equal on 4 ranks": 4,
        r"256 samples a rank; 2 left out": 2,
        r"IS OUT OF STEP|SHARE": 0,
        r"(\d+\.\d[,\]].*){4}\n\Z": 1,  # peaks
    },
    "18": {r"4 ranks, step \d+: loss \d\.\d{4}": 10},
    "19": {rf"rank {rank} of 4: weights [\d,]+, peak": 1 for rank in range(4)},
    "20": {
        rf"rank {rank}: [\d,]+ parameters, peak \d+\.\d MiB": 1 for rank in range(4)
    },
    "21": {r"loss \d\.\d{4}": 3, r"peak [\d,]+": 4},
    "22": {rf"^step {step}: loss [\d.]+, balance": 1 for step in (3, 6, 9, 12)},
    "23": {r"mesh \(1, 2, 2\), step 0": 1, r"loss \d\.\d{4}": 8},
    "24": {rf"step {step}: loss \d\.\d{{4}}": 1 for step in (5, 10, 15, 20, 24)},
    "25": {rf"rank {rank}: node {rank // 2}, GPU {rank % 2}": 1 for rank in range(4)},
    "26": {r"70,553,706,496 parameters on 64 H100": 1},
    "27": {r"^70B on 64 GPUs ": 1, r"^FSDP": 4},
    "28": {},  # test_whole_trainer.py runs it, which needs a text
    "29": {r"\A3 steps agree; the largest .* is \d+% of .*\n\Z": 1},
    "30": {
        r"holds  your model": 1,
        r"refused  a planted mistake": 4,
        r"^5\. .*cannot be judged": 1,
        r"at 2\.50 an hour each: [\d.]+$": 1,
        r"== to look into\nnothing$": 1,
    },
}
BEFORE = {"29": "1 ranks --save=one.pt"}  # what a lesson's command goes on from


@pytest.mark.parametrize("number", [n for n, lines in LESSONS.items() if lines])
def test_the_lessons_own_command_prints(ran, number):
    text = ran(number, after=BEFORE.get(number, "")).text
    lines = LESSONS[number]
    found = {line: len(re.findall(line, text, re.M)) for line in lines}
    assert found == lines, text


# -- the losses of one process ---------------------------------------------------------


class Same(NamedTuple):
    """Ways to start a lesson's script that all have the losses of `one`."""

    one: str
    ways: tuple[str, ...]
    apart: float  # that rounding may bring a printed loss
    falls: float = 1.0  # the last loss is less than this share of the first
    steady: bool = False  # and none is larger than the one before
    many: int = 3  # losses


SAME = {
    "01": Same(OWN, ("4 gpus --device cpu",), 1e-3, steady=True),
    "09": Same(
        "1 gpus --dtype float32",
        ("1 gpus --dtype float16", "1 gpus --dtype bfloat16"),
        0.01,
    ),
    "10": Same(
        "1 gpus",
        (
            OWN,
            "1 gpus --offload",
            "1 gpus --checkpoint --offload",
            "1 gpus --accumulate 4 --checkpoint --offload",
        ),
        2e-4,
        many=5,
    ),
    "11": Same(
        "1 gpus --workers 0 --load-ms 0.2", (OWN,), 0, steady=True
    ),  # whoever loads
    "12": Same("1 gpus", (OWN, "2 gpus"), 2e-4, steady=True),  # 24 steps of Adam
    "19": Same("1 ranks --plain", (OWN, "1 ranks", "2 ranks"), 2e-4, 0.9),
    "21": Same("1 ranks", (OWN, "2 ranks"), 2e-4, 0.9),
    "22": Same("1 ranks", (OWN, "2 ranks"), 5e-4, steady=True, many=4),
    "23": Same("1 ranks", (OWN, "2 ranks", "4 ranks --replicate 2"), 2e-4, 0.9, many=8),
    "25": Same("1 ranks", (OWN, "2 ranks"), 2e-4, 0.6, many=4),
}


def losses(text: str) -> list[float]:
    found = re.findall(r"(?:step|epoch) \d+: (?:mean )?loss ([\d.]+)", text)
    return [float(loss) for loss in found]


@pytest.mark.parametrize("number", SAME)
def test_the_losses_of_one_process_fall(ran, number):
    same = SAME[number]
    one = losses(ran(number, same.one).text)
    assert len(one) == same.many and one[-1] < same.falls * one[0]
    assert not same.steady or one == sorted(one, reverse=True)


@pytest.mark.parametrize(
    "number, way", [(number, way) for number, same in SAME.items() for way in same.ways]
)
def test_each_way_has_the_losses_of_one_process(ran, number, way):
    one = losses(ran(number, SAME[number].one).text)
    assert losses(ran(number, way).text) == pytest.approx(one, abs=SAME[number].apart)


def layers_of_16() -> nn.Sequential:
    layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(512, 10))


def plain_losses_of_16() -> list[float]:
    """Those of plain PyTorch on the CPU, with the full batch at once."""
    torch.manual_seed(0)
    model = layers_of_16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for step in range(12):
        images = torch.randn(512, 64, generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(images), images[:, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found[3::4]


def plain_losses_of_20() -> list[float]:
    script = load("pipeline_layers.py")
    torch.manual_seed(0)
    model = nn.Sequential(*script.make_layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(12):
        images, labels, _ = script.batch_of(step)
        loss = script.loss_of(model(images), labels) / len(labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found[3::4]


@pytest.mark.parametrize(
    "number, plain, falls, ways",
    [
        # bfloat16, of which the lesson's own command sends gradients, keeps 8 bits
        ("16", plain_losses_of_16, 1.0, {OWN: 2e-3, "2 ranks --accumulate 2": 2e-4}),
        (
            "20",
            plain_losses_of_20,
            0.7,
            {
                OWN: 2e-4,
                "2 ranks --schedule gpipe": 2e-4,
                "4 ranks --schedule interleaved": 2e-4,
                "2 ranks --schedule zero-bubble": 2e-4,
            },
        ),
    ],
)
def test_each_way_has_the_losses_of_plain_pytorch(ran, number, plain, falls, ways):
    alone = plain()
    assert alone == sorted(alone, reverse=True) and alone[-1] < falls * alone[0]
    for way, apart in ways.items():
        found = re.findall(r"loss (\d\.\d{4})", ran(number, way).text)
        assert [*map(float, found)] == pytest.approx(alone, abs=apart), way


# -- what is refused -------------------------------------------------------------------

PLAN = "python plan_run.py 7B "
SMALL = "python -m simgpu --gpus 1 --memory 64MB "
ANYWHERE = "python -m simgpu --gpus 4 train_anywhere.py --device "
REFUSED = [  # GPUs that CUDA sees, command, exit status, words of the last lines
    ("2", ANYWHERE + "cuda:1", 2, "there is no cuda:1: this process sees cpu, cuda:0."),
    ("", ANYWHERE + "cuda", 2, "there is no cuda: this process sees cpu."),
    ("0", ANYWHERE + "gpu", 2, "'gpu' is not cpu, cuda or cuda:N"),
    (None, "03 3 ranks", 1, "ranks cannot share 128 samples equally; change BATCH"),
    (None, "09 1 gpus --clip=0", 2, "must be above 0"),
    (None, "09 1 gpus --clip=nan", 2, "must be above 0"),
    (None, "09 1 gpus --width=-1", 2, "must be above 0"),
    (None, "11 1 gpus --workers=-1", 2, "--workers is 0 or more, not -1"),
    (None, "13 2 gpus --parts 9", 2, "--parts 9: a batch has 8 rows"),
    (None, "13 2 gpus --load nowhere.pt", 2, "nowhere.pt: there is no such file"),
    (None, "04 1 gpus many", 1, "BATCH_SIZE, a whole number above 0"),
    (None, SMALL + "memory_table.py 8000", 1, "a batch of 8000 does not fit, try a"),
    (None, "24 1 ranks --batch=2000", 1, "2000 is more than the 1440 samples"),
    (None, "25 3 ranks", 1, "3 ranks cannot share BATCH = 512 samples equally"),
    (None, "21 2 ranks --length=50", 1, "128 does not divide 50 tokens"),
    (None, "23 2 ranks --tp 4", 1, "1 x 4 does not divide 2 ranks"),
    (None, PLAN + "--gpus=16 --shard=3", 1, "16 cannot be divided by 3"),
    (None, PLAN + "--gpus=12 --shard=12", 1, "12 cannot be divided by 8"),
    (None, PLAN + "--gpus=64 --shard=8 --tp=3", 1, "64 cannot be divided by 24"),
    (None, PLAN + "--gpus=8 --shard=4 --cp=8", 1, "4 cannot be divided by 8"),
    (None, PLAN + "--gpus=8 --microbatches=0", 1, "--microbatches must be 1 or more"),
]


@pytest.mark.parametrize("visible, command, status, why", REFUSED)
def test_wrong_arguments_are_refused(
    visible, command, status, why, tmp_path, monkeypatch
):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if not command.startswith("python"):
        number, _, way = command.partition(" ")
        command = take_home.command_for(number, way)
    done = take_home.start_command(command, tmp_path)
    assert done.returncode == status and why in done.stderr
    if status == 2:  # argparse's, in its last line and without a traceback
        assert "Traceback" not in done.stderr
        assert why in done.stderr.splitlines()[-1]


def added(line: str, more: str) -> dict[str, str]:
    """An edit: this line, and more behind it."""
    return {line: f"{line}{more}\n"}


LOSS = "nn.functional.cross_entropy(model(x), y)"
BATCHES = "return list(zip(images.split(8192), labels.split(8192), strict=True))"
PARTS = 'return [{"images": x, "labels": y} for x, y in parts]'
GENERATOR = PARTS.replace("[", "(", 1)[:-1] + ")"
LAST = '"labels": images[:, :10].argmax(1)})\n'
NAMES = '    batches[-1]["names"] = ["a"] * 8192'
MASK = '    batches[-1]["mask"] = torch.ones(4)'
ITEM = '"labels": self.labels[index]}'
FACTOR = ITEM[:-1] + ', "factor": torch.tensor(0.5)}'
PICK = "checked(next(iter(loader)))"
ONE_ROW = 'checked({**next(iter(loader)), "factor": torch.ones(1)})'
LOADER, SUM = "batch_size=8)\n", 'labels, reduction="sum")\n'
TOKENS = 'return self.embedding(batch["tokens"])'
MASKED = SUM.replace("\n", ' * batch["mask"].sum()\n')
ALL = "loader = [{**b, 'all': torch.ones(64)} for b in loader]"
SCORE = '    return model(batch["image"])'
SCORED = '    scores = model(batch["image"])\n    return '
NORM = "        self.norm = nn.LayerNorm(width)\n"
SCALE = "        self.scale = nn.Parameter(torch.ones(1))"
BUFFER = "        self.register_buffer"
PAIR = "tokens[:, :-1], tokens[:, 1:]"
PLANNED = '    "norm": SequenceParallel(),\n'
ALONE = "layer 0 fails alone on cuda:0: it must fit, and its tensors must be"
NO_SCALE = "no scale helps: the model overflows in float16; use bfloat16"
NO_BATCH = "no batch: give a list or a DataLoader, not a generator"
OWN_PARTS = [  # script, a reader's own text in places, way, words of the last lines
    ("train_anywhere.py", {LOSS: "{'out': model(x)}"}, "1 gpus", "returned a dict; r"),
    ("train_anywhere.py", {LOSS: "float(model(x).sum())"}, "1 gpus", "a float; return"),
    ("prefetch.py", {BATCHES: "return zip([images], [labels])"}, "1 gpus",
     "return a list or a DataLoader"),
    # inf in float16, whatever the scale
    ("mixed_precision.py", {'model(batch["images"])': 'model(1e5 * batch["images"])'},
     "1 gpus", NO_SCALE),
    ("mixed_precision.py", {PARTS: GENERATOR}, "1 gpus", NO_BATCH),
    ("less_memory.py", added(LAST, MASK), "1 gpus --accumulate 2",
     "'labels': 8192, 'mask': 4} rows: all need as many"),
    ("less_memory.py", added(LAST, NAMES), "1 gpus",
     "not tensors, leave them out of the batches: ['names']"),
    ("split_batch.py", {ITEM: FACTOR, PICK: ONE_ROW}, "2 gpus",
     "{'images': 128, 'labels': 128, 'factor': 1}; all need as"),
    ("split_model.py", added(LOADER, ALL), "2 gpus", "'all' of a batch does not"),
    ("split_model.py", {SUM: MASKED}, "2 gpus", "in 4 parts"),
    ("split_model.py", {SUM: "labels)\n"}, "2 gpus", "is sum_of_losses a mean"),
    ("split_model.py", added(LOADER, "loader = [[*b.values()] for b in loader]"),
     "2 gpus", "a batch is no dictionary"),
    ("split_model.py", {TOKENS: f"{TOKENS} * torch.ones(WIDTH)"}, "2 gpus", ALONE),
    ("score_workers.py", {SCORE: f"{SCORED}scores[:, :9]"}, "1 gpus",
     "(1000, 9), not (samples, 10)"),
    ("score_workers.py", {SCORE: f"{SCORED}scores[0]"}, "1 gpus",
     "(10,), not (samples, 10): change WIDTH, or score()"),
    ("bus_bandwidth.py", {"DTYPE = torch.float32": "DTYPE = torch.int32"}, "1 ranks",
     "gradients have fractions, and torch.int32 has none"),
    ("sharded_training.py", added(NORM, SCALE), "1 ranks --steps=1",
     "fill blocks.0.scale in first_values()"),
    ("sharded_training.py", added(NORM, f'{BUFFER}("mask", torch.ones(2) > 0)'),
     "1 ranks --steps=1", "fill blocks.0.mask in first_values()"),
    ("sharded_training.py", added(NORM, f'{BUFFER}("count", torch.tensor(3))'),
     "1 ranks --steps=1", "fill blocks.0.count in first_values()"),
    ("sharded_training.py", {"\nfill(model)": "\npass"}, "1 ranks --steps=1",
     "parameter enter.weight has no value"),
    ("slice_layers.py", {"(-1, WIDTH // HEADS)": "(HEADS, WIDTH // HEADS)"}, "2 ranks",
     "of the heads"),
    ("slice_layers.py", {PLANNED: ""}, "2 ranks", "no style for norm.weight"),
    ("slice_layers.py", {'    "norm": Seq': '    "nrom": Seq'}, "2 ranks",
     "Parallelize plan key 'nrom'"),
    ("slice_layers.py", {"seed(step)": "seed(step + dist.get_rank())"}, "2 ranks",
     "rank 1 has other tokens"),
    ("slice_layers.py", {"BLOCKS = 64, 64,": "BLOCKS = 64, 63,"}, "2 ranks",
     "63 tokens: pad to a multiple of 2"),
    ("stretch_sequence.py", {PAIR: "tokens[:, :-4], tokens[:, 1:-3]"}, "2 ranks",
     "128 does not divide 253 tokens; pad sequences"),
]  # fmt: skip


@pytest.mark.parametrize("name, edits, way, why", OWN_PARTS)
def test_a_readers_own_part_is_refused_if_it_cannot_be(own, name, edits, way, why):
    assert why in own(name, edits, way, code=None)


# -- what a lesson shows of its script -------------------------------------------------


def part(name: str, first: str, behind: str) -> str:
    """The text of a script from `first` on, up to `behind`."""
    text = text_of(name)
    return text[text.index(first) :].partition(behind)[0]


@pytest.mark.parametrize(
    "number, name, first, behind",
    [
        ("14", "hogwild.py", "def train(", "def judge("),
    ],
)
def test_a_lesson_shows_functions_as_they_are(number, name, first, behind):
    prose = prose_of(take_home.lesson_of(number))
    assert shown(prose, part(name, first, behind))


@pytest.mark.parametrize(
    "number, name",
    [("03", "one_gpu.py"), ("14", "share_one.py"), ("28", "little_llama.py")],
)
def test_a_lesson_shows_a_script_as_it_is(number, name):
    code = text_of(name).partition('"""\n\n')[2]
    assert shown(prose_of(take_home.lesson_of(number)), code)


def test_lesson_14_shows_the_sender_of_share_count():
    sender = part("share_count.py", "    x = torch.zeros", "    worker.join")
    assert sender.strip("\n") in prose_of(take_home.lesson_of("14"))
