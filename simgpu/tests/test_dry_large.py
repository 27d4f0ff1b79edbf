"""Dry runs of the largest open models: what they need, and what that takes here."""

import json
from pathlib import Path

import pytest

from support import programs

SCRIPT = Path(__file__).parent / "scripts" / "large" / "llama.py"
VOCABULARY, KV_HEADS, LORA = 128_256, 8, 16
WIDTHS = {"70B": (8192, 64, 28672), "405B": (16384, 128, 53248)}
LAYERS = {"70B": 80, "405B": 126}
GIB = 2**30
MOST = 2.0  # GiB of this machine, for any of them
JOBS = {
    "LoRA on one machine": ("70B", 8, ["--lora", LORA, "--length", 2048]),
    "FSDP2": ("405B", 1024, []),
    "FSDP2 and tensor parallelism": ("405B", 1024, ["--tp", 8]),
    "FSDP1, with flat units of GiBs": ("70B", 64, ["--flat"]),
}


def block_of(model: str) -> int:
    """Parameters of a block."""
    width, heads, hidden = WIDTHS[model]
    keys = KV_HEADS * (width // heads)
    return 2 * width * (width + keys) + 3 * width * hidden + 2 * width


def lora_of(model: str) -> int:
    """Those of its narrow layers."""
    width, heads, hidden = WIDTHS[model]
    keys = KV_HEADS * (width // heads)
    return LORA * (2 * 2 * width + 2 * (width + keys) + 3 * (width + hidden))


def dry_run(folder: Path, name: str, layers: int) -> tuple[dict, float]:
    """The report of a job, and GiB that it took here."""
    model, world, words = JOBS[name]
    done = programs.simulated(
        folder, "dry-run", "--world", world, "--network", "400 GB/s", "--json",
        "report.json", SCRIPT, "--model", model, "--layers", layers, *words,
    )  # fmt: skip
    assert done.status in (0, 3), done.stderr
    used = [float(line) for line in done.stdout.splitlines() if line[:1].isdigit()]
    return json.loads((folder / "report.json").read_text()), max(used)


def check(report: dict, name: str, layers: int) -> None:
    """What each rank has of the parameters, and what is gathered of them."""
    model, world, words = JOBS[name]
    width = WIDTHS[model][0]
    block, tables = block_of(model), 2 * VOCABULARY * width
    whole = layers * block + tables + width
    each = 2 if "--lora" in words else 4  # bytes
    if "--lora" in words:
        whole += layers * lora_of(model)
    found = report["memory_by_kind"]
    assert found["parameters"] == pytest.approx(whole * each / world, rel=5e-3)
    if "--lora" not in words:  # AdamW's two numbers for each
        assert found["optimizer"] == pytest.approx(2 * 4 * whole / world, rel=5e-3)
    else:
        assert found["optimizer"] < 0.02 * found["parameters"]
    if name == "FSDP2":  # at the end of backward: this block's, perhaps the next one's
        assert 2 * block <= found["gathered"] <= 1.01 * 4 * block
    if "--flat" in words:  # in the loss: the tables, of the outermost unit
        assert found["gathered"] >= 2 * tables
    assert found.get("communication", 0) <= 6.1 * max(block, tables) + GIB


@pytest.mark.parametrize("name", JOBS)
def test_large_models_of_few_layers(tmp_path, name):
    report, used = dry_run(tmp_path, name, 2)
    assert report["fits"]
    check(report, name, 2)
    assert used < MOST


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_large_models(tmp_path, name):
    layers = LAYERS[JOBS[name][0]]
    report, used = dry_run(tmp_path, name, layers)
    assert report["fits"], report["error"]
    check(report, name, layers)
    assert used < MOST
