"""Published training runs beside their dry runs: FIGURES.md says what is stored."""

import ast

import pytest
from tools import figures

DATA = figures.read()
ROWS = {row["id"]: row for row in DATA["rows"]}
RUN = {name: row for name, row in ROWS.items() if "ours" in row}
# short ones
REPEATED = ["rl-0.6b-16k", "llama-8b"]


def test_the_page_is_what_the_stored_rows_say():
    text = figures.PAGE.read_text(encoding="utf-8")
    assert figures.page(DATA, text) == text, "tests/tools/figures.py --page writes it"


def test_each_row_has_a_source_and_a_name_of_its_own():
    assert len(ROWS) == len(DATA["rows"])
    assert {row["source"] for row in ROWS.values()} == set(DATA["sources"])


def shapes() -> dict:
    """The table of models in decoder.py, which trains when it is imported."""
    tree = ast.parse((figures.PROGRAMS / "decoder.py").read_text(encoding="utf-8"))
    tables = [node for node in tree.body if isinstance(node, ast.Assign)]
    return next(
        ast.literal_eval(node.value)
        for node in tables
        if node.targets[0].id == "MODELS"
    )


@pytest.mark.parametrize(
    ("name", "parameters"),  # as Hugging Face counts them
    [
        ("llama3.1-8b", 8_030_261_248),
        ("llama3.2-3b", 3_212_749_824),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-32b", 32_762_123_264),
    ],
)
def test_a_model_has_as_many_parameters_as_the_published_one(name, parameters):
    width, layers, heads, kv, ffn, words, tied, normed = shapes()[name]
    attention = 128 * width * (2 * heads + 2 * kv) + 256 * normed
    block = attention + 3 * width * ffn + 2 * width
    assert words * width * (2 - tied) + layers * block + width == parameters


@pytest.mark.parametrize("row", RUN.values(), ids=RUN)
def test_what_is_far_off_has_a_remark(row):
    memory, seconds = figures.memory_of(row), figures.seconds_of(row)
    far = row["published"]["fits"] != row["ours"]["fits"]
    far |= memory is not None and not 1 / 1.1 <= memory[1] / memory[0] <= 1.1
    far |= seconds is not None and not 1 / 1.3 <= seconds[1] / seconds[0] <= 1.3
    assert not far or row.get("remark")


@pytest.mark.slow
@pytest.mark.parametrize("name", REPEATED)
def test_a_row_can_be_repeated(name):
    row = ROWS[name]
    found = figures.repeated(row)
    assert found["fits"] == row["ours"]["fits"]
    for kind in ("reserved", "allocated", "seconds"):
        assert found[kind] == pytest.approx(row["ours"][kind], rel=0.02)
