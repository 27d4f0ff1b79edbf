"""The picture of published runs, read from its SVG."""

from helpers import draw

ROWS = [("one", 1.1, True), ("two", 0.8, False), ("three", 1.2, False)]


def test_each_run_has_its_name_and_its_error():
    svg = draw.published_runs(ROWS)._repr_svg_()
    for words in ("one", "two", "three", "+10%", "-20%", "+20%"):
        assert f">{words}</text>" in svg
    assert "1 runs fitted" in svg and "2 runs judged" in svg


def test_it_says_how_many_are_near():
    title = draw.published_runs(ROWS).title
    assert "fitted: 1 within a factor of 1.15, 1 within 1.3" in title
    assert "judged: 0 within a factor of 1.15, 2 within 1.3" in title


def test_too_fast_lies_to_the_right_and_far_away_stays_inside():
    rows = [("slow", 0.9, False), ("fast", 1.1, False), ("far", 9.0, False)]
    picture = draw.published_runs(rows)
    dots = [part for part in picture.parts if 'width="7"' in part]
    places = [float(dot.split('x="')[1].split('"')[0]) for dot in dots]
    assert places[0] < places[1] < places[2] < picture.width
