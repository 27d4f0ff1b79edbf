"""Published training runs beside their dry runs: FIGURES.md says what is stored."""

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
