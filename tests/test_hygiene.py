"""Every lesson keeps every rule of hygiene.py, and every rule sees its violation."""

import base64
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import (
    new_code_cell,
    new_markdown_cell,
    new_notebook,
    new_output,
)

from tests import hygiene

LESSONS = {
    path: hygiene.read(path)
    for path in sorted(
        (Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb")
    )
}
by_lesson = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
by_rule = pytest.mark.parametrize("rule", hygiene.RULES, ids=lambda rule: rule.__name__)

# The lessons


def test_there_are_lessons():
    assert LESSONS, "notebooks/ has no .ipynb: there is nothing to test"


@by_rule
@by_lesson
def test_rule(rule, path):
    complaints = rule(LESSONS[path], path)
    assert not complaints, "\n" + "\n".join(complaints)


@by_lesson
def test_outputs_are_compared(path):
    some, of = hygiene.compared(LESSONS[path])
    print(f"{path.name}: {some} of {of} outputs compared")
    assert some >= 0.85 * of, f"{path.name}: only {some} of {of} outputs are compared"


def test_outputs_are_compared_over_all():
    counts = [hygiene.compared(nb) for nb in LESSONS.values()]
    some, of = (sum(column) for column in zip((0, 0), *counts, strict=True))
    print(f"all lessons: {some} of {of} outputs compared")
    assert some >= 0.85 * of, f"only {some} of {of} outputs are compared"


def test_one_colab_cell():
    different = hygiene.colab_cells(LESSONS)
    assert len(different) <= 1, f"colab-setup cells differ: {list(different.values())}"


# The rules. A made-up lesson keeps them all; each entry of PLANTED breaks one.

NAME = "01-place-a-tensor.ipynb"
OPENING = f"""# Place a tensor on Adam's GPUs

*20 minutes. Simulated GPUs.*
[![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/o/r/main?urlpath=lab/tree/notebooks/{NAME})
[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/o/r/blob/main/notebooks/{NAME})
"""
AHEAD = "**What you'll do** a. **What you’ll learn:** b. **What you'll need** c."
CLOSING = (
    "[← previous: begin](00-begin-here.ipynb) · [index](../README.md) · "
    "[glossary](glossary.md) · [next: copy →](02-copy-a-tensor.ipynb)"
)
PIXEL = base64.b64encode(b"png").decode()
SVG = "<svg xmlns='http://www.w3.org/2000/svg'><title>two devices</title></svg>"


def code(source, *tags, outputs=()):
    metadata = {"tags": list(tags)} if tags else {}
    return new_code_cell(source, metadata=metadata, outputs=list(outputs))


def says(text):
    return new_output("stream", name="stdout", text=text)


def shows(**data):
    mimes = {"png": "image/png", "svg": "image/svg+xml", "html": "text/html"}
    return new_output("display_data", {mimes[key]: data[key] for key in data})


def good_lesson():
    """The cells of a lesson without a fault, by name; the prose between has none."""
    error = new_output("error", ename="E", evalue="rank 2: no", traceback=["torch/a"])
    cells = {
        "opening": new_markdown_cell(OPENING),
        "ahead": new_markdown_cell(AHEAD),
        "colab": code("\n" * 30 + "!pip install x\nfrom os import *", "colab-setup"),
        "setup": code("need_gpus(2)", outputs=[says("2 GPUs, 3.0 ms/step, 1/2")]),
        "question": new_markdown_cell("## How many bytes?\nSee [cost](#cost-bytes)."),
        "figure": new_markdown_cell("![two devices](two.svg) `![](x)`"),
        "plot": code("plot()\n# alt: a line", outputs=[shows(png=PIXEL)]),
        "diagram": code("draw()", outputs=[shows(svg=SVG)]),
        "fenced": new_markdown_cell("```python\n# not a heading [x](y)\n```"),
    }
    for section in hygiene.SECTIONS:
        tail = ": bytes" if section == "Cost" else ""
        cells[section] = new_markdown_cell(f"## {section}{tail}")
        if section == "Break it":
            cells["error"] = code("1 / 0", "raises-exception", outputs=[error])
        if section == "On your own":
            for name in ("exercise", "another"):
                unsolved = says("not yet: replace the None")
                cells[name] = code("check.it(None)", "exercise", outputs=[unsolved])
    for number in range(30 - len(cells) - 1):
        cells[f"filler {number}"] = new_markdown_cell("A paragraph.")
    cells["closing"] = new_markdown_cell(CLOSING)
    return cells


def write(folder, cells, change=lambda nb: None):
    """Stores the cells as lesson 01, with the files it links to, and reads it."""
    notebooks = folder / "notebooks"
    notebooks.mkdir()
    nb = new_notebook(
        cells=list(cells.values()),
        metadata={
            "kernelspec": {
                "name": "python3",
                "display_name": "Python 3",
                "language": "python",
            },
            "language_info": {"name": "python"},
        },
    )
    numbers = iter(range(1, 100))
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.execution_count = next(numbers)
    change(nb)
    others = ("00-begin-here.ipynb", "02-copy-a-tensor.ipynb")
    for name in (*others, "two.svg", "glossary.md"):
        (notebooks / name).touch()
    (folder / "README.md").touch()
    path = notebooks / NAME
    path.write_text(nbformat.writes(nb) + "\n", encoding="utf-8")
    return path, hygiene.read(path)


@by_rule
def test_good_lesson(rule, tmp_path):
    path, nb = write(tmp_path, good_lesson())
    assert rule(nb, path) == []


def source(name, text):
    """A violation: one cell says something else."""

    def plant(cells):
        cells[name].source = text

    return plant


def output(name, *outputs):
    """A violation: one cell shows something else."""

    def plant(cells):
        cells[name].outputs = list(outputs)

    return plant


def tagged(name, *tags):
    """A violation: one cell has other tags."""

    def plant(cells):
        cells[name].metadata = nbformat.from_dict({"tags": list(tags)})

    return plant


def without(name):
    """A violation: one cell is not there."""

    def plant(cells):
        del cells[name]

    return plant


def attached(cells):
    cells["figure"].attachments = nbformat.from_dict({"a.png": {"image/png": BIG}})


def long_code(cells):
    for number in range(20):
        cells[f"long {number}"] = code("a = 1\n\n" * 6)


def more_code(cells):
    for number in range(4):
        cells[f"more {number}"] = code("a = 1")


def little_prose(cells):
    for name in cells:
        if name in ("figure", "fenced") or name.startswith("filler"):
            cells[name] = code("a = 1")


BIG = base64.b64encode(bytes(151_000)).decode()
PLANTED = [
    (hygiene.no_stderr, output("plot", new_output("stream", name="stderr", text="w"))),
    *(
        (hygiene.no_traces, output("setup", says(text)))
        for text in (
            "saved to /home/me/x.pt",
            "saved to '/tmp/x'",
            "saved to ~/course/x",
            r"C:\Users",
            "2026-08-19 12:00",
            "at 12:34:56",
            "\x1b[31mred",
            "<f at 0x7f2a10b3c0>",
        )
    ),
    (
        hygiene.no_traces,
        output("error", new_output("error", ename="E", evalue="/usr/lib/x")),
    ),
    (hygiene.no_traces, output("diagram", shows(svg="<svg>/usr/share/x</svg>"))),
    (hygiene.errors_are_tagged, tagged("error")),
    (hygiene.cells_are_short, source("setup", "a = 1\n" * 26)),
    (hygiene.cells_are_short, long_code),
    (hygiene.no_semicolons, source("plot", "plot();\n# alt: a line")),
    (hygiene.no_semicolons, source("plot", "plot();  # quiet")),
    (hygiene.nothing_installs_or_hides, source("setup", "%%writefile a.py\na = 1")),
    (hygiene.nothing_installs_or_hides, source("setup", "!pip install x")),
    (hygiene.nothing_installs_or_hides, source("setup", "from os import *")),
    (hygiene.images_are_small, output("plot", shows(png=BIG))),
    (hygiene.images_are_small, output("diagram", shows(svg=SVG + " " * 150_000))),
    (hygiene.images_are_small, attached),
    (hygiene.images_have_alt_text, source("figure", "![](two.svg)")),
    (hygiene.images_have_alt_text, source("figure", "<img src='two.svg'>")),
    (hygiene.images_have_alt_text, source("figure", "<img src='two.svg' alt=''>")),
    (hygiene.images_have_alt_text, source("plot", "plot()")),
    (hygiene.images_have_alt_text, output("diagram", shows(svg="<svg></svg>"))),
    (
        hygiene.images_have_alt_text,
        output("diagram", shows(html="<svg><title> </title></svg>")),
    ),
    (hygiene.images_have_alt_text, output("diagram", shows(html="<img src='x'>"))),
    (hygiene.links_resolve, source("figure", "[there](03-not-there.ipynb)")),
    (hygiene.links_resolve, source("figure", "![a](three.svg)")),
    (hygiene.links_resolve, source("figure", "<img src='three.svg' alt='a'>")),
    (hygiene.links_resolve, source("figure", "[a]\n\n[a]: three.svg")),
    (hygiene.links_resolve, source("figure", "[there](/README.md)")),
    (hygiene.links_resolve, source("figure", "[there](#not-a-heading)")),
    (hygiene.opens_well, source("opening", "Place a tensor")),
    (hygiene.opens_well, source("opening", OPENING.replace("a tensor", "A Tensor"))),
    (hygiene.opens_well, source("opening", OPENING.replace("20 minutes", "Long"))),
    (hygiene.opens_well, source("opening", OPENING.replace("mybinder.org/v2", "x"))),
    (hygiene.opens_well, source("opening", OPENING.replace(NAME, "02-other.ipynb"))),
    (hygiene.says_what_is_ahead, source("ahead", "**What you'll do** a.")),
    (hygiene.sets_up, tagged("colab")),
    (hygiene.sets_up, tagged("setup", "colab-setup")),
    (hygiene.sets_up, source("setup", "import torch")),
    (hygiene.sections_in_order, without("Oracle")),
    (hygiene.sections_in_order, source("Concise", "## Cost")),
    (hygiene.sections_in_order, source("Concise", "### Concise")),
    (hygiene.breaks_something, tagged("error")),
    (hygiene.has_exercises, without("another")),
    (hygiene.has_exercises, source("exercise", "assert False")),
    (hygiene.has_exercises, output("exercise", says("right"))),
    (hygiene.closes_with_links, without("closing")),
    (
        hygiene.closes_with_links,
        source("closing", CLOSING.replace("02-copy", "00-begin")),
    ),
    (hygiene.has_its_length, without("ahead")),
    (hygiene.has_its_length, little_prose),
    (hygiene.code_is_explained, more_code),
]


@pytest.mark.parametrize("rule, plant", PLANTED)
def test_planted(rule, plant, tmp_path):
    cells = good_lesson()
    plant(cells)
    path, nb = write(tmp_path, cells)
    complaints = rule(nb, path)
    assert complaints
    assert all(complaint.startswith(NAME) for complaint in complaints)


# Violations of the file rather than of a cell.


def no_count(nb):
    nb.cells[2].execution_count = None


def wrong_count(nb):
    nb.cells[2].execution_count = 2


def kernel(nb):
    nb.metadata.kernelspec.name = "conda-env"


def version(nb):
    nb.metadata.language_info.version = "3.11"


def widgets(nb):
    nb.metadata.widgets = {}


def old_format(nb):
    nb.nbformat_minor = 4
    for cell in nb.cells:
        del cell["id"]


def timing(nb):
    nb.cells[2].metadata.execution = {}


def unknown_tag(nb):
    nb.cells[2].metadata.tags.append("nbval-skip")


CHANGED = [
    (hygiene.counts_run_from_one, no_count),
    (hygiene.counts_run_from_one, wrong_count),
    (hygiene.metadata_is_canonical, kernel),
    (hygiene.metadata_is_canonical, version),
    (hygiene.metadata_is_canonical, widgets),
    (hygiene.metadata_is_canonical, old_format),
    (hygiene.metadata_is_canonical, timing),
    (hygiene.metadata_is_canonical, unknown_tag),
]


@pytest.mark.parametrize("rule, change", CHANGED)
def test_changed(rule, change, tmp_path):
    path, nb = write(tmp_path, good_lesson(), change)
    assert rule(nb, path)


def test_other_layout(tmp_path):
    path, nb = write(tmp_path, good_lesson())
    path.write_text(path.read_text(encoding="utf-8").replace("\n ", "\n  "))
    assert hygiene.file_is_as_written(nb, path)


@pytest.mark.parametrize("name", ["1-place-a-tensor", "01-place", "01_Place_it"])
def test_names(name, tmp_path):
    assert hygiene.name_sorts(new_notebook(), tmp_path / f"{name}.ipynb")


def test_first_and_last_lesson(tmp_path):
    path, nb = write(tmp_path, good_lesson())
    for other in ("00-begin-here.ipynb", "02-copy-a-tensor.ipynb"):
        (path.parent / other).unlink()
        assert hygiene.closes_with_links(nb, path)
    nb.cells[-1].source = "[index](../README.md) · [glossary](glossary.md)"
    assert hygiene.closes_with_links(nb, path) == []


def test_every_rule_is_planted():
    planted = {rule for rule, _ in PLANTED + CHANGED}
    planted |= {hygiene.file_is_as_written, hygiene.name_sorts}
    assert planted == set(hygiene.RULES)


def test_share_and_colab_cells(tmp_path):
    cells = good_lesson()
    assert hygiene.compared(new_notebook(cells=list(cells.values()))) == (6, 6)
    tagged("plot", "nbval-ignore-output")(cells)
    cells["setup"].source += "\n# NBVAL_IGNORE_OUTPUT"
    path, nb = write(tmp_path, cells)
    assert hygiene.compared(nb) == (4, 6)
    other = hygiene.read(path)
    other.cells[2].source += " "
    assert len(hygiene.colab_cells({path: nb, tmp_path: nb})) == 1
    assert len(hygiene.colab_cells({path: nb, tmp_path: other})) == 2
