"""The steps whose memory was recorded, repeated: to the byte, and to the allocation."""

import json
from pathlib import Path

import pytest

from tests.recorded.step import predict

RECORDING = Path(__file__).parent / "recordings" / "training_memory.json"
ROWS = {row[1]: row for row in json.loads(RECORDING.read_text("utf-8"))["rows"]}
# what blocks are too large depends on the steps before; here the figures of float32 are
# the same from this number on
WARM_UPS = {
    "inference float32": 1,
    "training float32": 2,
    "training, bf16 autocast": 5,
}


@pytest.mark.parametrize("kind", WARM_UPS)
def test_a_step_takes_the_recorded_bytes_in_as_many_allocations(kind):
    tokens, _, allocations, rise, peak, reserved, _ = ROWS[kind]
    found = predict(kind, tokens, WARM_UPS[kind])
    assert found[:3] == (allocations, rise, peak)
    # segments keep the history of all steps before
    assert found.reserved == pytest.approx(reserved, rel=5e-3)


def test_every_recorded_step_is_repeated():
    assert WARM_UPS.keys() == ROWS.keys()


def test_a_step_that_was_not_recorded_is_refused():
    with pytest.raises(ValueError, match="unknown kind 'training float64'"):
        predict("training float64", 128)
