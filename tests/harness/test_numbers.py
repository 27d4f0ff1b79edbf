"""What may differ from one processor to another is the last printed place, no more."""

import pytest
from nbformat.v4 import new_output

from tests.harness.numbers import as_stored, outputs_as_stored


@pytest.mark.parametrize(
    "fresh, stored",
    [
        ("loss 1.4977, right 84.6%", "loss 1.4978, right 84.5%"),
        ("off by 1.39e-06", "off by 1.40e-06"),
        ("[-0.411, 2.000]", "[-0.412, 1.999]"),
    ],
)
def test_the_last_place_may_differ_by_one(fresh, stored):
    assert as_stored(fresh, stored) == stored
    assert as_stored(stored, fresh) == fresh


@pytest.mark.parametrize(
    "fresh, stored",
    [
        ("loss 1.4976", "loss 1.4978"),  # by two
        ("loss 1.5978", "loss 1.4978"),  # the second digit
        ("loss 1.4", "loss 1.5"),  # no digits to give away
        ("1e-06", "2e-06"),
        ("0.03", "0.04"),
        ("4,297,728 bytes", "4,297,729 bytes"),
        ("7 ranks", "8 ranks"),
        ("141.7 MiB", "141.8 MiB"),
        ("5.20 ms", "5.21 ms"),
        ("1.23e-05 s", "1.24e-05 s"),
        ("loss 1.4978 falls", "loss 1.4978 rises"),
        ("loss 1.498", "loss 1.4978"),  # other places
        ("1.23e-05", "1.23e-06"),
        ("1.2.345", "1.2.346"),  # a version
        ("loss nan", "loss 1.4978"),
    ],
)
def test_all_else_is_compared_exactly(fresh, stored):
    assert as_stored(fresh, stored) == fresh


def test_outputs_are_told_apart_by_their_kind():
    stored = [new_output("stream", name="stdout", text="1.4978\n")]
    fresh = [
        new_output("stream", name="stderr", text="a warning 1.4977"),
        new_output("stream", name="stdout", text="1.4977\n"),
        new_output("display_data", {"text/plain": "1.4977"}),
    ]
    texts = [fresh[0].text, stored[0].text, "1.4977"]
    as_then = outputs_as_stored(fresh, stored)
    assert [as_then[0].text, as_then[1].text, as_then[2].data["text/plain"]] == texts
    assert fresh[1].text == "1.4977\n"
