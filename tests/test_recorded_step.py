"""A recorded training step, repeated: how often it allocates, and how much."""

import json
from pathlib import Path

import pytest

from tests.recorded.step import Figures, predict

RECORDING = Path(__file__).parent / "recordings" / "training_memory.json"
# kind -> (tokens, recorded figures, recorded peak)
ROWS = {
    row[1]: (row[0], Figures(row[2], row[3], row[4]))
    for row in json.loads(RECORDING.read_text())["rows"]
}


@pytest.mark.parametrize("kind", ["inference float32", "training float32"])
def test_a_step_in_float32_takes_what_was_recorded_to_the_byte(kind):
    tokens, recorded = ROWS[kind]
    assert predict(kind, tokens) == recorded


def test_a_step_in_bfloat16_allocates_what_was_recorded():
    kind = "training, bf16 autocast"
    tokens, recorded = ROWS[kind]
    ours = predict(kind, tokens)
    assert ours.allocations == recorded.allocations
    assert ours.rise == recorded.rise
    # large blocks differ by what is too little to be split off: that depends on the
    # steps before
    assert ours.peak == pytest.approx(recorded.peak, rel=2e-4)
