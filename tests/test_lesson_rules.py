"""Every lesson keeps every rule of lesson_rules.py; every rule finds its violation."""

import base64
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell, new_notebook, new_output

from tests import glossary, test_take_home
from tests import lesson_rules as rules
from tests.harness.small_course import cell, result, stream
from tests.lesson_rules import complaints
from tests.lessons import as_parameters, lessons

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
LESSONS = {path: rules.read(path) for path in lessons()}
by_lesson = pytest.mark.parametrize("path", as_parameters())

# -- the lessons -----------------------------------------------------------------------


def test_there_are_lessons():
    assert LESSONS, "notebooks/ has no .ipynb: there is nothing to test"


@by_lesson
def test_lesson_keeps_the_rules(path):
    nb = LESSONS[path]
    found = [words for rule in rules.RULES for words in complaints(rule, nb, path)]
    assert not found, "\n" + "\n".join(found)


@by_lesson
def test_outputs_are_compared(path):
    some, of = rules.compared(LESSONS[path])
    assert some >= 0.85 * of, f"{path.name}: only {some} of {of} outputs are compared"


def test_one_colab_cell():
    different = rules.colab_cells(LESSONS)
    assert len(different) <= 1, f"colab-setup cells differ: {list(different.values())}"


def test_the_script_that_each_lesson_takes_home_is_run_by_a_test():
    assert {path.name[:2] for path in LESSONS} == set(test_take_home.LESSONS)


# -- a lesson without a fault ----------------------------------------------------------

NAME = "01-place-a-tensor.ipynb"
OPENING = f"""# Place a tensor on Adam's GPUs

*5 minutes. Simulated GPUs.*
[![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/o/r/main?urlpath=lab/tree/notebooks/{NAME})
[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/o/r/blob/main/notebooks/{NAME})
"""
AHEAD = "**What you'll do** a. **What you’ll learn:** b. **What you'll need** c."
CLOSING = (
    "[← previous: begin](00-begin-here.ipynb) · [index](../README.md) · "
    "[glossary](glossary.md) · [next: copy →](02-copy-a-tensor.ipynb)"
)
HOME = """## Take it home

```bash
torchrun --nproc-per-node=4 train.py
```

```bash
python -m simgpu --gpus 4 torchrun --nproc-per-node=4 train.py
```"""
GLOSSARY = """\
* <a id="device-mesh"></a>**Device mesh**: a grid. [02](02-copy-a-tensor.ipynb)
* <a id="event"></a>**CUDA event**: a mark. [02](02-copy-a-tensor.ipynb)
* <a id="mfu"></a>**Model FLOPs utilization (MFU)**: part. [01](01-place-a-tensor.ipynb)
* <a id="race"></a>**Race**: no order. [01](01-place-a-tensor.ipynb)
* <a id="torchrun"></a>**`torchrun`**: a launcher. [01](01-place-a-tensor.ipynb)
"""
PIXEL = base64.b64encode(b"png").decode()
BIG = base64.b64encode(bytes(151_000)).decode()
SVG = "<svg xmlns='http://www.w3.org/2000/svg'><title>two devices</title></svg>"
Cells = dict[str, NotebookNode]


def good_cells() -> Cells:
    """The cells of a lesson without a fault, by name."""
    error = new_output("error", ename="E", evalue="rank 2: no", traceback=["torch/a"])
    cells = {
        "opening": new_markdown_cell(OPENING),
        "ahead": new_markdown_cell(AHEAD),
        "colab": cell(
            "\n" * 30 + "!pip install x\nfrom os import *", tag="colab-setup"
        ),
        "setup": cell("need_gpus(2)", stream("2 GPUs, 3.0 ms/step, 1/2")),
        "question": new_markdown_cell("## How many bytes?\nSee [cost](#cost-bytes)."),
        "figure": new_markdown_cell("![two devices](two.svg) `![](x)`"),
        "plot": cell("plot()\n# alt: a line", result(png=PIXEL)),
        "diagram": cell("draw()", result(svg=SVG)),
        "fenced": new_markdown_cell("```python\n# not a heading [x](y)\n```"),
    }
    cells["cost"] = new_markdown_cell("## Cost: bytes")
    cells["error"] = cell("1 / 0", error, tag="raises-exception")
    for section in rules.SECTIONS:
        home = section == "Take it home"
        cells[section] = new_markdown_cell(HOME if home else f"## {section}")
        if section == "Exercises":
            for name in ("exercise", "another"):
                unsolved = stream("not yet: replace the None")
                cells[name] = cell("check.it(None)", unsolved, tag="exercise")
    for number in range(24 - len(cells) - 1):
        cells[f"filler {number}"] = new_markdown_cell("A paragraph.")
    cells["closing"] = new_markdown_cell(CLOSING)
    count = 0
    for each in cells.values():
        if each.cell_type == "code":
            count += 1
            each.execution_count = count
    return cells


def good_file() -> NotebookNode:
    """What a notebook without a fault has beside its cells."""
    return new_notebook(metadata=rules.METADATA)


def store(folder: Path, cells: Cells, nb: NotebookNode) -> tuple[NotebookNode, Path]:
    """Stores the cells as lesson 01, with the files that it links to, and reads it."""
    nb.cells = list(cells.values())
    notebooks = folder / "notebooks"
    notebooks.mkdir()
    others = ("00-begin-here.ipynb", "02-copy-a-tensor.ipynb")
    for name in (*others, "two.svg"):
        (notebooks / name).touch()
    (notebooks / "glossary.md").write_text(GLOSSARY)
    (folder / "README.md").touch()
    (notebooks / "scripts").mkdir()
    (notebooks / "scripts" / "train.py").write_text("import torch\n")
    path = notebooks / NAME
    path.write_text(nbformat.writes(nb) + "\n", encoding="utf-8")
    return rules.read(path), path


def test_good_lesson(tmp_path):
    nb, path = store(tmp_path, good_cells(), good_file())
    assert [w for rule in rules.RULES for w in complaints(rule, nb, path)] == []


# -- the rules: each entry of PLANTED is a violation of one ----------------------------

Plant = Callable[[Cells, NotebookNode], None]


def changed(name: str, **changes) -> Plant:
    """One cell has another source, other outputs, tags or so."""

    def plant(cells: Cells, nb: NotebookNode) -> None:
        cells[name].update(nbformat.from_dict(changes))

    return plant


def tagged(name: str, *tags: str) -> Plant:
    """One cell has other tags."""
    return changed(name, metadata={"tags": list(tags)})


def metadata(**changes) -> Plant:
    """The notebook has other metadata."""

    def plant(cells: Cells, nb: NotebookNode) -> None:
        nb.metadata.update(nbformat.from_dict(changes))

    return plant


def without(name: str) -> Plant:
    """One cell is not there."""

    def plant(cells: Cells, nb: NotebookNode) -> None:
        del cells[name]

    return plant


def long_code(cells, nb):
    for number in range(20):
        cells[f"long {number}"] = cell("a = 1\n\n" * 11)


def more_code(cells, nb):
    for number in range(4):
        cells[f"more {number}"] = cell("a = 1")


def little_prose(cells, nb):
    for name in cells:
        if name in ("figure", "fenced") or name.startswith("filler"):
            cells[name] = cell("a = 1")


def old_format(cells, nb):
    nb.nbformat_minor = 4
    for each in cells.values():
        del each["id"]


PLANTED: dict[rules.Rule, list[Plant]] = {
    rules.counts_run_from_one: [
        changed("colab", execution_count=None),
        changed("colab", execution_count=2),
    ],
    rules.metadata_is_canonical: [
        metadata(kernelspec=rules.METADATA["kernelspec"] | {"name": "conda-env"}),
        metadata(language_info={"name": "python", "version": "3.11"}),
        metadata(widgets={}),
        old_format,
        changed("setup", metadata={"execution": {}}),
        tagged("colab", "colab-setup", "nbval-skip"),
    ],
    rules.no_stderr: [changed("plot", outputs=[stream("w", "stderr")])],
    rules.no_traces: [
        changed("setup", outputs=[stream("saved to /home/me/x.pt")]),
        changed("setup", outputs=[stream("saved to '/tmp/x'")]),
        changed("setup", outputs=[stream("saved to ~/course/x")]),
        changed("setup", outputs=[stream(r"C:\Users")]),
        changed("setup", outputs=[stream("2026-08-19 12:00")]),
        changed("setup", outputs=[stream("at 12:34:56")]),
        changed("setup", outputs=[stream("\x1b[31mred")]),
        changed("setup", outputs=[stream("<f at 0x7f2a10b3c0>")]),
        changed("error", outputs=[new_output("error", ename="E", evalue="/usr/lib/x")]),
        changed("diagram", outputs=[result(svg="<svg>/usr/share/x</svg>")]),
    ],
    rules.errors_are_tagged: [tagged("error")],
    rules.cells_are_short: [changed("setup", source="a = 1\n" * 26), long_code],
    rules.no_semicolons: [
        changed("plot", source="plot();\n# alt: a line"),
        changed("plot", source="plot();  # quiet"),
    ],
    rules.nothing_installs_or_hides: [
        changed("setup", source="%%writefile a.py\na = 1"),
        changed("setup", source="!pip install x"),
        changed("setup", source="from os import *"),
    ],
    rules.images_are_small: [
        changed("plot", outputs=[result(png=BIG)]),
        changed("diagram", outputs=[result(svg=SVG + " " * 150_000)]),
        changed("figure", attachments={"a.png": {"image/png": BIG}}),
    ],
    rules.images_have_alt_text: [
        changed("figure", source="![](two.svg)"),
        changed("figure", source="<img src='two.svg'>"),
        changed("figure", source="<img src='two.svg' alt=''>"),
        changed("plot", source="plot()"),
        changed("diagram", outputs=[result(svg="<svg></svg>")]),
        changed("diagram", outputs=[result(html="<svg><title> </title></svg>")]),
        changed("diagram", outputs=[result(html="<img src='x'>")]),
    ],
    rules.links_resolve: [
        changed("figure", source="[there](03-not-there.ipynb)"),
        changed("figure", source="![a](three.svg)"),
        changed("figure", source="<img src='three.svg' alt='a'>"),
        changed("figure", source="[a]\n\n[a]: three.svg"),
        changed("figure", source="[there](/README.md)"),
        changed("figure", source="[there](#not-a-heading)"),
        changed("figure", source="[there](glossary.md#not-a-term)"),
    ],
    rules.terms_are_linked: [
        changed("figure", source="Build a device mesh."),
        changed("figure", source="Two Device\nmeshes, by `torchrun()`."),
        changed("figure", source="Its MFU, and its [MFU](glossary.md#mfu)."),
        changed("figure", source="Start it with `torchrun`."),
        changed("figure", source="**Two races**, in this lesson explained."),
    ],
    rules.opens_well: [
        changed("opening", source="Place a tensor"),
        changed("opening", source=OPENING.replace("a tensor", "A Tensor")),
        changed("opening", source=OPENING.replace("5 minutes", "Long")),
        changed("opening", source=OPENING.replace("mybinder.org/v2", "x")),
        changed("opening", source=OPENING.replace(NAME, "02-other.ipynb")),
    ],
    rules.minutes_are_true: [
        changed("opening", source=OPENING.replace("5 minutes", "20 minutes")),
        changed("opening", source=OPENING.replace("5 minutes", "4 minutes")),
        changed("ahead", source=AHEAD + " word" * 1000),
    ],
    rules.says_what_is_ahead: [changed("ahead", source="**What you'll do** a.")],
    rules.sets_up: [
        tagged("colab"),
        tagged("setup", "colab-setup"),
        changed("setup", source="import torch"),
    ],
    rules.sections_in_order: [
        without("Remember"),
        changed("Remember", source="## Further reading"),
        changed("Remember", source="### Remember"),
    ],
    rules.breaks_something: [tagged("error")],
    rules.has_exercises: [
        without("another"),
        changed("exercise", source="assert False"),
        changed("exercise", outputs=[stream("right")]),
    ],
    rules.closes_with_links: [
        without("closing"),
        changed("closing", source=CLOSING.replace("02-copy", "00-begin")),
    ],
    rules.has_its_length: [without("ahead"), little_prose],
    rules.code_is_explained: [more_code],
}


@pytest.mark.parametrize(
    "rule, plant", [(rule, plant) for rule in PLANTED for plant in PLANTED[rule]]
)
def test_planted(rule, plant, tmp_path):
    cells, nb = good_cells(), good_file()
    plant(cells, nb)
    found = complaints(rule, *store(tmp_path, cells, nb))
    assert found and all(words.startswith(NAME) for words in found)


def test_other_layout(tmp_path):
    nb, path = store(tmp_path, good_cells(), good_file())
    path.write_text(path.read_text(encoding="utf-8").replace("\n ", "\n  "))
    assert complaints(rules.file_is_as_written, nb, path)


@pytest.mark.parametrize("name", ["1-place-a-tensor", "01-place", "01_Place_it"])
def test_names(name):
    assert complaints(rules.name_sorts, new_notebook(), Path(f"{name}.ipynb"))


@pytest.mark.parametrize(
    "section, script, complaint",
    [
        (HOME, "import torch\n", None),
        (HOME.replace("torchrun --nproc-per-node=4", "python", 1)
         .replace("torchrun --nproc-per-node=4 ", ""), "import torch\n", None),
        (HOME, None, "names no script"),
        (HOME, "import torch\nfrom helpers import check\n", "imports helpers"),
        (HOME.replace("gpus 4 torchrun", "gpus 4"), "import torch\n", "is not"),
        (HOME.replace("-m simgpu --gpus 4", ""), "import torch\n", "is not"),
        (HOME[: HOME.rindex("```bash")], "import torch\n", "1 blocks"),
        ("A paragraph.", "import torch\n", "0 sections"),
        (HOME.replace("torchrun", "cd\ntorchrun", 1), "import torch\n", "a line each"),
    ],
)  # fmt: skip
def test_a_script_to_take_home(tmp_path, section, script, complaint):
    cells = good_cells()
    cells["Take it home"] = new_markdown_cell(section)
    nb, path = store(tmp_path, cells, good_file())
    stored = path.parent / "scripts" / "train.py"
    if script is None:
        stored.unlink()
    else:
        stored.write_text(script)
    found = complaints(rules.takes_a_script_home, nb, path)
    assert bool(found) == bool(complaint) and (complaint or "") in "".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "Build a [device mesh](glossary.md#device-mesh). A device mesh is a grid.",
        "Two [device meshes](glossary.md#device-mesh).",
        "[Its grid](glossary.md#device-mesh), a device mesh.",
        "# A device mesh\n\n`a device mesh`, $MFU$, [MFU](two.svg), <b id='MFU'>",
        "```\nMFU\n```\n\n| MFU |\n|---|\n| 1 |",
        "An mfu, a meta-device mesh-like thing, `torchrun --nnodes=2`.",
        "An event is linked only in lesson 02.",
    ],
)
def test_what_needs_no_link_to_the_glossary(tmp_path, source):
    cells = good_cells()
    cells["figure"].source = source
    nb, path = store(tmp_path, cells, good_file())
    assert complaints(rules.terms_are_linked, nb, path) == []


def test_the_longer_of_two_terms_is_linked():
    terms = glossary.entries(
        '* <a id="reduce"></a>**Reduce**: a sum. [12](12-split-the-batch.ipynb)\n'
        '* <a id="ring"></a>**Ring algorithm**: a circle. [15](15-talk.ipynb)\n'
        '* <a id="all-reduce"></a>**All-reduce**: a sum for all. [15](15-talk.ipynb)\n'
    )
    found = glossary.uses("A ring all-reduce, reduces, all-reduce.", terms)
    assert [use.anchor for use in found] == ["ring", "reduce", "all-reduce"]


def test_collapsed_code_may_be_longer(tmp_path):
    cells = good_cells()
    for number in range(20):
        cells[f"long {number}"] = cell("a = 1\n" * 6)
        cells[f"long {number}"].metadata["jupyter"] = {"source_hidden": True}
    nb, path = store(tmp_path, cells, good_file())
    assert complaints(rules.cells_are_short, nb, path) == []


def test_first_and_last_lesson(tmp_path):
    nb, path = store(tmp_path, good_cells(), good_file())
    for other in ("00-begin-here.ipynb", "02-copy-a-tensor.ipynb"):
        (path.parent / other).unlink()
        assert complaints(rules.closes_with_links, nb, path)
    nb.cells[-1].source = "[index](../README.md) · [glossary](glossary.md)"
    assert complaints(rules.closes_with_links, nb, path) == []


def test_every_rule_is_planted():
    elsewhere = {
        rules.file_is_as_written, rules.name_sorts, rules.takes_a_script_home
    }  # fmt: skip
    assert PLANTED.keys() | elsewhere == set(rules.RULES)


def test_share_and_colab_cells(tmp_path):
    cells, nb = good_cells(), good_file()
    assert rules.compared(new_notebook(cells=list(cells.values()))) == (6, 6)
    tagged("plot", "nbval-ignore-output")(cells, nb)
    cells["setup"].source += "\n# NBVAL_IGNORE_OUTPUT"
    nb, path = store(tmp_path, cells, nb)
    assert rules.compared(nb) == (4, 6)
    other = rules.read(path)
    other.cells[2].source += " "
    assert len(rules.colab_cells({path: nb, tmp_path: nb})) == 1
    assert len(rules.colab_cells({path: nb, tmp_path: other})) == 2
