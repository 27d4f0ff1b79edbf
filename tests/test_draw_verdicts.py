"""`draw.verdicts`: a box for each case, and the verdict, which the title says too."""

import re

from helpers import draw

JUDGED = {
    "1. always": {"one rank": True, "two ranks": True},
    "2. sometimes": {"small": False, "large": True, "larger": None},
    "3. nobody knows": {"here": None},
}
SAID = {2: "true", 3: "true when large", 1: "cannot be judged without a card"}


def svg() -> str:
    return draw.verdicts(JUDGED, lambda cases: SAID[len(cases)])._repr_svg_()


def test_the_title_says_every_verdict_with_its_cases():
    title = re.search("<title>(.*?)</title>", svg())[1]
    assert title == (
        "Claims. 1. always: true (2 holds); 2. sometimes: true when … "
        "(1 holds, 1 fails, 1 open); 3. nobody knows: cannot be judged without a card "
        "(1 open)"
    )


def test_a_case_that_fails_is_dashed_and_others_are_not():
    boxes = [box for box in re.findall("<rect [^>]*>", svg()) if "stroke=" in box]
    key, cases = boxes[:3], boxes[3:]
    dashed = ["dasharray" in box for box in cases]
    assert dashed == [False, False, True, False, False, False]
    fills = [re.search('fill="(.*?)"', box)[1] for box in key + cases]
    assert fills[3] == fills[4] == fills[6] == fills[0]
    assert fills[7] == fills[8] == fills[2] != fills[0]


def test_words_stay_inside_their_box():
    case = "a case that needs many lines, because its name is so very long"
    found = draw.verdicts({"1. one": {case: True, "b": False}}, lambda cases: "true")
    text = found._repr_svg_()
    box = re.findall('<rect x="[^"]*" y="([^"]*)" width="[^"]*" height="([^"]*)"', text)
    top, height = map(float, box[-2])
    lines = re.findall('<text x="[^"]*" y="([^"]*)" font-size="10"', text)
    assert len(lines) > 2
    assert all(top + 8 < float(y) < top + height for y in lines)


def test_no_claims_draw_nothing_but_the_key():
    assert draw.verdicts({}, str)._repr_svg_().count(">holds<") == 1
