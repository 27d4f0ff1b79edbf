"""Lesson 26: its formulas, its script, and the figures that its prose quotes."""

import json
import re
import sys
from dataclasses import replace

import pytest

from scripts import fit_run, plan_run, published_runs
from scripts.fit_run import GIB, MODELS, peak_bytes
from tests import take_home
from tests.launching import (
    SCRIPTS,
    environment,
    functions_in,
    functions_of,
    prose_of,
    text_of,
)
from tests.take_home import lesson_of

SIZES = [8, 64, 1024]


def prose() -> str:
    """The lesson's, without what stands between words."""
    return " ".join(prose_of(lesson_of("26")).split())


def peak(model: str, gpus: int, tokens: int, recompute: bool = True) -> float:
    return sum(peak_bytes(MODELS[model], gpus, tokens, recompute).values()) / GIB


def row(words: str) -> list[str]:
    """The cells of the row of a table that begins so."""
    lines = prose_of(lesson_of("26")).splitlines()
    (line,) = (line for line in lines if line.startswith(f"| {words}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


# -- the formulas ----------------------------------------------------------------------


def test_the_lesson_has_the_functions_of_the_script():
    script = functions_of(text_of("fit_run.py"))
    found = functions_in(lesson_of("26"))
    shared = script.keys() & found.keys()
    assert script.keys() - shared == {"widths", "from_file", "model_of", "main"}
    for name in shared:
        assert found[name] == script[name], name


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("recompute", [False, True])
def test_the_formulas_are_the_planners_for_fsdp(model, recompute):
    """But for the parameters of norms, which the planner leaves out."""
    for gpus in SIZES:
        for tokens in (4096, 32768):
            plan = plan_run.Plan(gpus, gpus, tokens=tokens, again=float(recompute))
            wanted = plan_run.peak_bytes(plan_run.MODELS[model], plan)
            found = peak_bytes(MODELS[model], gpus, tokens, recompute)
            assert found == pytest.approx(wanted, rel=2e-3)


@pytest.mark.parametrize("recompute", [False, True])
def test_heads_that_are_wider_than_the_model_are_the_planners(recompute):
    """Sizes of Qwen3 32B: 64 heads of 128 numbers, and 5,120 between two blocks."""
    sizes = 64, 5120, 64, 8, 25600, 151936
    ours, theirs = fit_run.Model(*sizes, head=128), plan_run.Model(*sizes, head=128)
    assert fit_run.parameters(ours) == pytest.approx(32.76e9, rel=1e-3)
    assert plan_run.parameters(theirs) == fit_run.parameters(ours)
    plan = plan_run.Plan(8, 8, tokens=4096, again=float(recompute))
    found = peak_bytes(ours, 8, 4096, recompute)
    assert found == pytest.approx(plan_run.peak_bytes(theirs, plan), rel=2e-3)
    _, scores = plan_run.flops(theirs, plan)
    assert scores == 2 * 64 * 4096 * 64 * 128


def test_a_gpt_has_no_gate():
    sizes = MODELS["7B"]
    gpt = replace(sizes, gated=False)
    wanted = replace(plan_run.MODELS["7B"], gated=False)
    assert fit_run.parameters(gpt) == plan_run.parameters(wanted)
    plan = plan_run.Plan(8, 8, tokens=4096, again=0.0)
    found = sum(peak_bytes(gpt, 8, 4096, False).values())
    assert found == pytest.approx(
        sum(plan_run.peak_bytes(wanted, plan).values()), rel=2e-3
    )


def test_the_models_are_the_planners():
    for name, sizes in MODELS.items():
        assert vars(sizes).items() <= vars(plan_run.MODELS[name]).items()
        assert fit_run.parameters(sizes) == plan_run.parameters(plan_run.MODELS[name])


# -- the script ------------------------------------------------------------------------

CONFIG = {  # of Llama 3 8B, as it stands beside the model
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}


@pytest.mark.slow
def test_the_script_prints_what_its_functions_return(tmp_path):
    printed = take_home.run("26", tmp_path)
    assert "70,553,706,496 parameters on 64 H100" in printed
    for name, nbytes in peak_bytes(MODELS["70B"], 64, 8192, True).items():
        assert re.search(rf"^{name} +{nbytes / GIB:.2f} GiB$", printed, re.M)
    assert re.search(
        rf"^in all +{peak('70B', 64, 8192):.2f} GiB.*: fits$", printed, re.M
    )


def run(capsys, monkeypatch, *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["fit_run.py", *words])
    fit_run.main()
    return capsys.readouterr().out


def test_a_model_of_hugging_face_is_read(capsys, monkeypatch, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    assert fit_run.from_file(file) == MODELS["8B"]
    words = "--gpus=8", "--tokens=4096"
    said = [run(capsys, monkeypatch, name, *words) for name in (str(file), "8B")]
    assert said[0] == said[1] and ": fits\n" in said[0]
    assert "does not fit" in run(
        capsys, monkeypatch, "8B", "--gpus=8", "--tokens=16384"
    )
    assert "is close: dry-run it" in run(capsys, monkeypatch, "8B", "--gpus=8")


@pytest.mark.parametrize(
    "change, parameters",
    [
        ({"num_key_value_heads": None}, 8_835_567_616),  # as many as heads
        ({"head_dim": 128}, 8_030_261_248),
        ({"head_dim": 256}, 9_372_438_528),
        ({"tie_word_embeddings": None, "model_type": "gemma2"}, 7_504_924_672),
    ],
)
def test_sizes_that_are_no_llamas_are_counted(change, parameters, tmp_path):
    given = {key: its for key, its in (CONFIG | change).items() if its != ""}
    if given["tie_word_embeddings"] is None:
        del given["tie_word_embeddings"]
    file = tmp_path / "config.json"
    for config in (given, {"model_type": "gemma3", "text_config": given}):
        file.write_text(json.dumps(config))
        if config is given or "model_type" in change:
            assert fit_run.parameters(fit_run.from_file(file)) == parameters


@pytest.mark.parametrize(
    "change, said",
    [
        ({"num_local_experts": 8}, "has experts: write them into plan_run.py"),
        ({"hidden_size": None}, "has no hidden_size, so it is not like Llama"),
        ({"text_config": {"vocab_size": 0}}, "has no vocab_size"),
        ({"hidden_act": "gelu_new"}, "gelu_new, so perhaps no gate: --plain"),
        ({"kv_lora_rank": 256}, "has kv_lora_rank, which no formula here knows"),
        ({"mamba_d_ssm": 3072}, "has mamba_d_ssm"),
        ({"cross_attention_layers": [3]}, "has cross_attention_layers"),
    ],
)
def test_models_of_which_it_knows_nothing_are_refused(change, said, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG | change))
    with pytest.raises(SystemExit, match=said):
        fit_run.from_file(file)


def test_a_model_without_a_gate_is_read_if_one_says_so(capsys, monkeypatch, tmp_path):
    """Else phi-2, with 2.8 billion parameters, would silently have 3.6."""
    file = tmp_path / "config.json"
    sizes = dict(hidden_size=2560, intermediate_size=10240, num_attention_heads=32)
    sizes |= dict(vocab_size=51200, num_key_value_heads=None, hidden_act="gelu_new")
    file.write_text(json.dumps(CONFIG | sizes))
    words = str(file), "--gpus=8", "--plain"
    counted = re.search("([0-9,]+) parameters", run(capsys, monkeypatch, *words))
    assert int(counted[1].replace(",", "")) == pytest.approx(2.78e9, rel=2e-3)


def test_eyes_are_not_counted_and_it_says_so(capsys, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"text_config": CONFIG, "vision_config": {}}))
    assert fit_run.from_file(file) == MODELS["8B"]
    assert "only the text model" in capsys.readouterr().err


def test_its_first_line_is_a_model_for_the_planner(capsys, monkeypatch):
    line = run(capsys, monkeypatch, "70B", "--gpus=64").splitlines()[0]
    assert eval(line, {"Model": plan_run.Model}) == plan_run.MODELS["70B"]


def test_what_is_no_model_says_so(capsys, monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("[1]")
    for name in ("9B", str(tmp_path / "config.json")):
        with pytest.raises(SystemExit, match="is none of 1B, .*, and no config.json"):
            run(capsys, monkeypatch, name, "--gpus=8")
    with pytest.raises(SystemExit, match="at least 1"):
        run(capsys, monkeypatch, "8B", "--gpus=0")


# -- figures of the prose --------------------------------------------------------------


def test_what_the_usual_plan_leaves_out():
    states = fit_run.state_bytes(MODELS["70B"], 64) / GIB
    assert f"The plan said {states:.1f}. Where do {39.9 - states:.1f} GiB" in prose()
    formula = peak("70B", 64, 8192)
    gradients = states / 4
    assert (
        f"the gradients are {gradients:.1f} of the {formula - 39.9:.1f} GiB" in prose()
    )
    assert f"In all {formula:.1f} GiB." in prose()
    assert f"dry run 39.9: {formula - 39.9:.1f} too many" in prose()


def test_8b_peaks_in_the_loss_and_70b_in_a_block():
    largest = {}
    for name in ("8B", "70B"):
        found = fit_run.moments(MODELS[name], 8192, True)
        largest[name] = max(found, key=found.__getitem__)
    assert largest == {"8B": "in the loss", "70B": "in a block"}
    assert (
        "For 8B, the loss is the largest moment. **For 70B it is a block**" in prose()
    )


def test_the_margin_for_gaps_holds_the_runs_of_the_lesson():
    formula = peak("8B", 8, 16384)
    gaps = 54.1 / formula
    assert f"formula says {formula:.1f}: a factor of {gaps:.2f}." in prose()
    assert f"take 90 % / {gaps:.2f}, or about **75 %**" in prose()
    assert fit_run.USABLE == pytest.approx(0.9 / gaps, rel=0.02)
    assert gaps > 83.9 / peak("8B", 8, 32768)
    few, many = (fit_run.most_tokens(MODELS["8B"], gpus, True, 0.75 * 79.19 * GIB)
                 for gpus in (8, 1024))  # fmt: skip
    assert f"a GPU computes {100 * (many / few - 1):.0f} % more tokens" in prose()


def test_published_runs_that_formulas_refuse():
    refused = [
        run.name
        for run in published_runs.runs()
        if sum(plan_run.peak_bytes(run.model, run.plan).values())
        > 0.9 * (96 * GIB if "96 GB" in run.note else plan_run.CARDS[run.plan.card][3])
    ]
    assert f"{len(refused)} of the {len(published_runs.runs())} published" in prose()
    assert sum(name.startswith("MPT") for name in refused) == 11
    assert "Eleven are MPT" in prose() and refused.count("Llama 3 405B") == 2


def test_figures_of_8b_and_405b():
    eighth = 4 * fit_run.parameters(MODELS["8B"]) / 8 / GIB
    full = 8 * eighth
    assert f"another {eighth:.2f}, are not there yet" in prose()
    assert f"and all in all {peak('8B', 8, 16384):.1f}" in prose()
    assert f"8.03 · 10⁹ = {full:.1f} GiB" in prose()
    assert "the loss takes 1.5 MB for each token" in prose()
    assert 12 * MODELS["8B"].vocab == pytest.approx(1.5e6, rel=0.03)
    blocks = 10 * fit_run.block_parameters(MODELS["405B"]) / GIB
    assert "take 30 GiB" in prose() and 29.5 < blocks < 30.5


def test_published_memory_beside_the_formula():
    half = {
        run.plan.gpus: run for run in published_runs.runs() if run.memory is not None
    }
    assert half.keys() == {8, 128}
    for gpus, run in half.items():
        published = run.memory / GIB
        predicted = sum(plan_run.peak_bytes(run.model, run.plan).values()) / GIB
        assert row(f"{gpus} | 2 × 8,192")[3:] == [
            f"{predicted:.1f}",
            f"{published:.1f}",
        ]
        assert f"{100 * (predicted / published - 1):.0f} %" in prose()
    long = peak("8B", 8, 32768)
    assert row("8, compiled, Float8")[3:] == [f"{long:.1f}", "83.9"]
    assert f"and in the last {100 * (1 - long / 83.9):.0f} % too low" in prose()


# -- dry runs of the trainer -----------------------------------------------------------

TEXT = "A dry run reads no values. " * 480_000
DRY = {  # GPUs, options -> figures in GiB, and what the lesson says of them
    (64, "--size=70b --context=8192 --batch=64"): (39.9, None, "at the peak 39.9 GiB"),
    (8, "--size=8b --context=8192 --batch=32 --accumulate=2"): (
        71.3,
        None,
        "**71.3 GiB**",
    ),
    (8, "--size=8b --context=32768 --batch=8"): (
        69.1,
        78.5,
        "69.1 GiB in tensors and 78.5 reserved",
    ),
}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("job", DRY)
def test_dry_runs_need_what_the_lesson_says(job, tmp_path):
    import simgpu

    gpus, options = job
    tensors, reserved, said = DRY[job]
    assert said in prose()
    book = tmp_path / "book.txt"
    book.write_text(TEXT)
    script = SCRIPTS / "trainer" / "fsdp.py"
    words = [f"--data={book}", *options.split(), "--recompute", "--workers=0"]
    with environment():
        report = simgpu.dry_run(script, *words, world=gpus, card="H100", steps=2)
    assert report.fits
    assert report.peak_bytes / GIB == pytest.approx(tensors, abs=0.06)
    if reserved is not None:
        assert report.reserved_bytes / GIB == pytest.approx(reserved, abs=0.1)
