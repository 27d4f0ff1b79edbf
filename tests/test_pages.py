"""The pages beside the lessons: their links, figures and titles are right."""

import re

import nbformat
import pytest

from helpers import progress
from helpers.draw.course_map import NEEDS, ON_RANKS, PARTS
from support import checkout
from tests import glossary
from tests.launching import NOTEBOOKS, ROOT, prose_of
from tests.lessons import lessons

PAGES = [ROOT / "README.md", *checkout.here(NOTEBOOKS, "*.md")]
FOR_MAINTAINERS = (
    "CONTRIBUTING.md", "tests/README.md", "simgpu/README.md",
    "simgpu/HOW-IT-WORKS.md", "simgpu/WHAT-RUNS.md", "simgpu/ADD-A-CARD.md",
    "simgpu/FIGURES.md",
)  # fmt: skip
LINK = re.compile(r"\]\(([^)#]+)(?:#[\w-]+)?\)")
WEB = re.compile(r"https?://")
TITLES = {  # of the lessons, by the names of their files
    path.name: lesson.title
    for path, lesson in zip(lessons(), progress(NOTEBOOKS), strict=True)
}
CODE = re.compile(r"[=(/]|^--|^torch\.")


def outputs_of(name: str) -> str:
    """All that a lesson has stored as text."""
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            found.append(output.get("text") or data.get("text/plain", ""))
    return "\n".join(found)


def lines() -> list[str]:
    page = (NOTEBOOKS / "cheat-sheet.md").read_text(encoding="utf-8")
    return [line for line in page.splitlines() if line.startswith("* ")]


@pytest.mark.parametrize(
    "page, least",
    [
        *((page, 21) for page in PAGES),
        *((ROOT / name, 1) for name in FOR_MAINTAINERS),
    ],
    ids=lambda it: it if isinstance(it, int) else str(it.relative_to(ROOT)),
)
def test_links_lead_somewhere(page, least):
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    targets = [target for target in targets if not WEB.match(target)]
    assert len(targets) >= least
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_the_readme_has_each_lesson_by_its_title():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d\d) \| \[(.+?)\]\(notebooks/(.+?)\)", page, re.M)
    assert rows == [(name[:2], title, name) for name, title in TITLES.items()]


def test_the_readme_has_the_minutes_that_each_lesson_asks_for():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| \d\d \| \[.+?\]\(notebooks/(.+?)\).*? \| (\d+) \|", page, re.M
    )
    asked = {
        name: re.search(r"^\*(\d+) minutes", prose_of(name), re.M)[1] for name in TITLES
    }
    assert dict(rows) == asked


def test_the_map_says_which_lessons_start_ranks():
    """From lesson 14 on; earlier ones may show some ranks in passing."""
    starts = {
        int(path.name[:2])
        for path in lessons()
        if re.search(r"\bRanks\(|%%ranks", path.read_text(encoding="utf-8"))
    }
    assert {number for number in starts if number >= 14} <= ON_RANKS


def test_the_map_has_the_parts_of_the_readme():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"\*\*([IV]+\. .+?)\*\* .*\n\| (\d\d) ", page)
    assert rows == [(name, f"{first:02d}") for first, name, _ in PARTS]


@pytest.mark.parametrize("lesson", list(TITLES)[1:])
def test_a_lesson_asks_for_the_lessons_that_the_map_puts_before_it(lesson: str):
    asks = re.search(r"\*\*What you'll need\.\*\*.*", prose_of(lesson))[0]
    needed = {f"{number:02d}" for number in NEEDS[int(lesson[:2])]}
    assert needed <= set(re.findall(r"\((\d\d)-", asks))


@pytest.mark.parametrize("lesson", TITLES)
def test_a_lesson_names_its_neighbours_by_their_titles(lesson: str):
    links = re.findall(r"\[(Previous|Next): (.+?)\]\((.+?)\)", prose_of(lesson))
    assert links
    for _, words, name in links:
        assert words == TITLES[name][0].lower() + TITLES[name][1:]


@pytest.mark.parametrize("line", lines(), ids=lambda line: line[4:24])
def test_figures_are_stored_outputs_of_the_lesson(line: str):
    (lesson,) = LINK.findall(line)
    stored = outputs_of(lesson)
    words = re.findall("`([^`]+)`", line)
    figures = [
        w for w in words if re.search(r"\d|^[A-Z]\w+ ", w) and not CODE.search(w)
    ]
    assert figures
    missing = [
        figure for figure in figures
        if not re.search(rf"(?<![\d.,]){re.escape(figure)}(?!\d)", stored)
    ]  # fmt: skip
    assert not missing


def test_the_glossary_is_sorted_and_has_each_term_once():
    page = (NOTEBOOKS / "glossary.md").read_text(encoding="utf-8")
    anchors, names = [], []
    for part in page.split("\n## ")[1:]:
        found = glossary.ENTRY.findall(part)
        assert len(found) == part.count("\n* ") > 4
        words = [head.replace("`", "") for _, head, _ in found]
        assert words == sorted(words, key=str.lower)
        assert all(re.search(r"\[\d\d\]\(\d\d-", text) for _, _, text in found)
    for entry in glossary.entries(page):
        anchors.append(entry.anchor)
        names += entry.names
    assert len(anchors) == len(set(anchors)) > 100
    assert len(names) == len(set(names))


def test_what_is_said_of_the_glossarys_entries_is_said_of_one_that_exists():
    page = (NOTEBOOKS / "glossary.md").read_text(encoding="utf-8")
    anchors = {entry.anchor for entry in glossary.entries(page)}
    assert glossary.ALSO.keys() | glossary.COMMON <= anchors
