"""The pictures of attention over ranks, read from their SVG."""

from math import log

import pytest

from helpers import draw
from simgpu import Event

TAIL = [[0, 7], [1, 6], [2, 5], [3, 4]]


def event(kind: str, start: float, end: float) -> Event:
    return Event(kind, kind, "cuda:0", start * 1e-6, end * 1e-6, 8, 0)


class Log:
    """What `ranks.timeline()` returns, of two ranks."""

    ranks = (0, 1)

    def events(self, rank: int) -> list[Event]:
        late = 50 * rank
        sent = event("collective", 80 + late, 140 + late)
        return [event("kernel", 0, 100 + late), sent, event("copy", 0, 999)]


def test_contiguous_chunks_give_the_last_rank_most_and_pairs_give_all_the_same():
    contiguous = [[0], [1], [2], [3]]
    picture = draw.attention_squares({"contiguous": contiguous, "head and tail": TAIL})
    assert "rank 0 6%, rank 1 19%, rank 2 31%, rank 3 44%" in picture.title
    assert "rank 0 25%, rank 1 25%, rank 2 25%, rank 3 25%" in picture.title


def test_a_square_says_in_which_hop_its_keys_arrive():
    svg = draw.attention_squares({"contiguous": [[0], [1], [2]]})._repr_svg_()
    assert [svg.count(f">{hop}</text>") for hop in range(4)] == [3, 2, 1, 0]
    assert "masked" in svg


def test_the_joined_softmax_is_the_softmax_of_all_scores():
    # weights 1, 2, 8 and 4 of 15
    scores = [[0, log(2)], [log(8), log(4)]]
    picture = draw.online_softmax(scores, [[10, 20], [30, 40]])
    assert picture.title.endswith("joined: 30")
    svg = picture._repr_svg_()
    assert "exp(0.693 − 2.08) = 0.25" in svg
    assert "0.25 · 25 + 50 = 56.25" in svg
    swapped = draw.online_softmax(scores[::-1], [[30, 40], [10, 20]])._repr_svg_()
    assert "block 2 shrinks by" in swapped and "50 + 0.25 · 25 = 56.25" in swapped


def test_times_say_what_each_rank_computes_and_show_hidden_messages():
    picture = draw.attention_times({"a ring": Log()})
    assert picture.title.endswith("a ring: 190 µs, the ranks compute 100, 150")
    svg = picture._repr_svg_()
    assert svg.count("computes 100 µs") == svg.count("computes 150 µs") == 1
    assert svg.count('fill="white" stroke="#222222"') == 2  # a wait on each rank


@pytest.mark.parametrize("function", [draw.attention_squares, draw.attention_times])
def test_the_title_is_spoken(function):
    given = {"x": TAIL} if function is draw.attention_squares else {"x": Log()}
    assert "<title>" in function(given)._repr_svg_()
