"""Every lesson as a learner uses it: JupyterLab, a browser, menus and keys.

Skipped where Playwright or Chromium is missing; README.md says how to get them. With
`BROWSER_SHOTS=FOLDER` in the environment, pictures of every lesson are saved there: in
the light theme, in the dark one, and at 125 %. A zoom is a smaller window: 1280 x 800
pixels show what 1024 x 640 of them do without it.

Run from the first cell to the last are the lessons with explorers, and with
`BROWSER_RUN=all` in the environment all lessons: half an hour more. The others show
their stored outputs, which nbval compares with those of a run, and are `long`.
What is left out: whether outputs are the stored ones (nbval compares them), real GPUs,
and how a picture looks to a human eye.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

pytest.importorskip("playwright", reason="Playwright is not installed")
pytest.importorskip("pytest_timeout", reason="pytest-timeout is not installed")

from playwright.sync_api import BrowserContext, sync_playwright  # noqa: E402

from support.limits import JOB, LESSON  # noqa: E402
from tests.browser import looks  # noqa: E402
from tests.browser.lab import (  # noqa: E402
    DARK,
    EXPLORER,
    LIGHT,
    ROOT,
    SVG,
    Lab,
    Notebook,
)
from tests.lessons import lessons

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SHOTS = os.environ.get("BROWSER_SHOTS")
LESSONS = [path.name for path in lessons()]
RUN_ALL = os.environ.get("BROWSER_RUN") == "all"
LAPTOP, ZOOMED = {"width": 1280, "height": 800}, {"width": 1024, "height": 640}
LOOKS = {"light": (LIGHT, LAPTOP), "dark": (DARK, LAPTOP), "125": (LIGHT, ZOOMED)}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"),
    pytest.mark.timeout(JOB + LESSON),
]


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(ROOT / "notebooks" / name, as_version=4)


def marks_of(name: str) -> tuple:
    """A lesson without explorers is opened each week."""
    explores = any(EXPLORER.search(cell.source) for cell in read(name).cells)
    return () if explores else (pytest.mark.long,)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The one JupyterLab of these tests."""
    with Lab(tmp_path_factory.mktemp("lab")).running() as lab:
        yield lab


@pytest.fixture(scope="module")
def browser(lab: Lab) -> Iterator[BrowserContext]:
    """The one browser of these tests."""
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM) as chromium,
        chromium.new_context(viewport=LAPTOP) as browser,
    ):
        yield browser


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks_of(name)) for name in LESSONS]
)
def test_lesson(lab: Lab, browser: BrowserContext, name: str):
    with lab.opened(browser, name) as lesson:
        explorers = lesson.explorers()
        for number in explorers:
            lesson.cell(number).locator(".jp-RenderedSVG img").last.wait_for()
        assert lab.kernels() == [], "there is a kernel already"
        lesson.start_kernel()
        if explorers or RUN_ALL:
            for cell in lesson.run_all():
                assert cell["count"] and not cell["running"], cell
                assert bool(cell["errors"]) == cell["mayRaise"], cell
        else:
            stored = stored_pictures(name)
            shown = lesson.page.locator(".jp-RenderedSVG img")
            lesson.wait(lambda: shown.count() == stored, f"{stored} stored pictures")
        assert lesson.page.locator(".widget-vbox").count() == len(explorers)
        for number in explorers:
            move_every_control(lesson, number)
        complaints = []
        for look, (theme, size) in LOOKS.items():
            lesson.show(theme, size)
            found = looks.complaints(lesson, whole=size == LAPTOP)
            complaints += [f"{look}: {words}" for words in found]
            if SHOTS:
                looks.shoot(lesson, Path(SHOTS), f"{name[:2]}-{look}")
        lesson.show(LIGHT, LAPTOP)
        assert not complaints, "\n".join(complaints)


def stored_pictures(name: str) -> int:
    outputs = [
        output for cell in read(name).cells for output in cell.get("outputs", ())
    ]
    return sum(SVG in output.get("data", {}) for output in outputs)


def move_every_control(lesson: Notebook, number: int) -> None:
    """A step forth and back: each has to change the explorer's picture, and again."""
    cell = lesson.cell(number)
    picture = cell.locator(".widget-html svg")
    sliders = cell.locator(".widget-hslider [role=slider]").all()
    lists = cell.locator(".widget-dropdown select").all()
    controls = cell.locator(".widget-inline-hbox:not(.widget-html)").count()
    assert len(sliders) + len(lists) == controls > 0, f"{controls} in cell {number}"
    first = picture.inner_html()
    for i, slider in enumerate(sliders):
        keys = ["ArrowRight", "ArrowLeft"]
        if slider.get_attribute("aria-valuenow") == slider.get_attribute(
            "aria-valuemax"
        ):
            keys.reverse()
        for key, moved in zip(keys, (True, False), strict=True):
            slider.press(key)
            what = f"the picture of cell {number} after {key} on slider {i}"
            lesson.wait(lambda m=moved: (picture.inner_html() != first) == m, what)
    for i, choices in enumerate(lists):
        chosen = choices.evaluate("e => e.selectedIndex")
        for index, moved in ((1 if chosen == 0 else 0, True), (chosen, False)):
            choices.select_option(index=index)  # JupyterLab has the arrow keys
            what = f"the picture of cell {number} after choice {index} in list {i}"
            lesson.wait(lambda m=moved: (picture.inner_html() != first) == m, what)


def test_ranks_print_in_order_and_nothing_outlives_a_restart(
    lab: Lab, browser: BrowserContext
):
    (name,) = [name for name in LESSONS if name.startswith("15")]
    with lab.opened(browser, name) as lesson:
        lesson.start_kernel()
        only_kernel = lab.processes()
        numbers = [c["number"] for c in lesson.cells() if "%%ranks" in c["source"]]
        set_up, ranks_cell = numbers[0] - 2, numbers[0]
        lesson.run(set_up)
        words = lesson.output(set_up)
        assert words.startswith("4 ranks"), words
        lesson.run(ranks_cell)
        lines = lesson.output(ranks_cell).splitlines()
        assert [line[:3] for line in lines] == ["[0]", "[1]", "[2]", "[3]"], lines
        assert len(lab.processes() - only_kernel) >= 4
        lesson.write(ranks_cell, "%%ranks\nimport time\ntime.sleep(1000)")
        lesson.run(ranks_cell)
        lesson.page.get_by_text("Python 3 (ipykernel) | Busy").wait_for()
        lesson.page.get_by_title("Interrupt the kernel").click()
        assert "KeyboardInterrupt" in lesson.output(ranks_cell)
        lesson.restart()
        lesson.write(ranks_cell, "6 * 7")
        lesson.run(ranks_cell)
        assert lesson.output(ranks_cell).endswith("42")
        lesson.wait(
            lambda: len(lab.processes() - only_kernel) == 1,  # the new kernel
            "the end of the ranks, after a restart of the kernel",
        )
