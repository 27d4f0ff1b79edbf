"""The reading site: its contents, what it shows of a notebook, and its workflows.

Most of this needs none of the site's packages. The last tests build the site, where
`python3 -m helpers site` has once made its environment; else they are skipped. What
GitHub does with the workflows is not tested.
"""

import base64
import hashlib
import importlib.util
import json
import posixpath
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import simgpu
from helpers import __main__ as commands
from support import checkout
from support.limits import JOB
from tests.lessons import as_parameters, lessons
from tests.tools import badges

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / ".github" / "site"
NOTEBOOKS = lessons()
README = (ROOT / "README.md").read_text(encoding="utf-8")
LESSON = "notebooks/05-overlap-with-streams.ipynb"
GITHUB = f"https://github.com/{badges.REPOSITORY}"
ON_GITHUB = f"{GITHUB}/blob/{badges.BRANCH}"

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(SITE))
    prepare = importlib.import_module("prepare")
    simulator = importlib.import_module("simulator")


# --- Table of contents ------------------------------------------------------------


def test_the_contents_have_all_lessons_in_order_and_the_pages_beside_them():
    text = prepare.contents(prepare.parts_of(README))
    captions = re.findall(r"^:caption: (.+)", text, re.M)
    numerals = [caption.partition(".")[0] for caption in captions]
    others = ["Beside the lessons", "The simulator"]
    assert numerals == ["I", "II", "III", "IV", "V", *others]
    entries = re.findall(r"^[\w-]+$", text, re.M)
    lessons = [path.stem for path in NOTEBOOKS]
    assert entries == [*lessons, "glossary", "cheat-sheet", *simulator.PAGES]


def test_the_front_page_has_each_lesson_once_and_no_table_of_five_columns():
    page = prepare.front_page(README)
    assert re.findall(r"^\* (\d\d) \[.+?\]\(\1-", page, re.M) == [
        path.name[:2] for path in NOTEBOOKS
    ]
    assert "| lesson |" not in page
    assert page.count("\n### ") == 5


def test_a_lesson_in_no_part_is_an_error():
    row = "| 00 | [Start](notebooks/00-start.ipynb) | 30 | a proof | |"
    with pytest.raises(ValueError, match="Start is in no part"):
        prepare.parts_of(row)


# --- Text -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("link", "leads_to"),
    [
        ("08-find-what-binds.ipynb", "08-find-what-binds.ipynb"),
        ("13-split-the-model.ipynb#The-bubble", "13-split-the-model.ipynb#the-bubble"),
        ("glossary.md", "glossary.md"),
        ("../README.md", "index.md"),
        ("images/lab.png", "images/lab.png"),
        ("scripts/small_gpt.py", f"{ON_GITHUB}/notebooks/scripts/small_gpt.py"),
        ("../tests/README.md#Commands", f"{ON_GITHUB}/tests/README.md#Commands"),
        ("scripts", f"{GITHUB}/tree/{badges.BRANCH}/notebooks/scripts"),
        ("https://pytorch.org", "https://pytorch.org"),
        ("#remember", "#remember"),
        ("#How-often-to-save", "#how-often-to-save"),
        ("../simgpu/README.md", "simgpu.md"),
        ("../simgpu/README.md#in-tests", "simgpu-in-tests.md#in-tests"),
        ("../simgpu/WHAT-RUNS.md", "simgpu-what-runs.md"),
    ],
)
def test_links_lead_to_a_page_or_to_github(link, leads_to):
    text = f"See [it]({link}) and [`this`]({link})."
    assert prepare.relink(text, LESSON) == text.replace(link, leads_to)


def test_a_link_to_nowhere_is_an_error():
    with pytest.raises(ValueError, match="streams.ipynb: the link to lost.py leads"):
        prepare.relink("[lost](lost.py)", LESSON)


def test_code_in_text_stays_as_it_is():
    text = "`table[0](lost.py)`\n\n```python\ntable[0](lost.py)\n```\n"
    assert prepare.relink(text, LESSON) == text


def test_a_place_in_the_readme_of_simgpu_leads_to_the_page_that_it_is_on():
    text = "[below](#how-close-is-it), [above](#one-process-several-gpus)"
    assert prepare.relink(text, simulator.README) == (
        "[below](simgpu-how-close.md#how-close-is-it), "
        "[above](simgpu.md#one-process-several-gpus)"
    )


def test_badges_become_links_to_the_same_places():
    (badge_lines,) = re.findall(r"\[!\[.+\n\[!\[.+", README)
    links = prepare.launchers(badge_lines, prepare.FRONT_PAGE)
    assert "![" not in links and "badge" not in links
    targets = re.findall(r"\]\((.+?)\)", links)
    assert targets[:2] == re.findall(r"\)\]\((.+?)\)", badge_lines)
    assert targets[2] == GITHUB


@pytest.mark.parametrize("path", as_parameters())
def test_a_lesson_keeps_its_code_and_stored_outputs(path: Path):
    text = path.read_text(encoding="utf-8")
    before = json.loads(text)["cells"]
    after = json.loads(prepare.notebook(text, f"notebooks/{path.name}"))["cells"]
    assert code_of(after) == code_of(before)
    first = after[0]["source"]
    assert first.startswith(f"# {path.name[:2]} ")
    for words in ("Binder", "Colab"):
        assert first.count(f"[Open in {words}](") == 1
    assert lines_of(before)[-1].count("[Index](../README.md) · [Glossary]") == 1
    assert "[Index]" not in lines_of(after)[-1]
    # that line has gone, and a link to GitHub come
    assert len(lines_of(after)) == len(lines_of(before))


def lines_of(cells: list[dict]) -> list[str]:
    """The lines of its text that are not empty, but for notes below explorers."""
    texts = [
        "".join(cell["source"]).replace(prepare.STANDS_STILL, "")
        for cell in cells
        if cell["cell_type"] == "markdown"
    ]
    return [line for text in texts for line in text.splitlines() if line]


def code_of(cells: list[dict]) -> list[tuple]:
    """What the cells of code contain and have stored."""
    return [
        (cell["source"], cell["outputs"])
        for cell in cells
        if cell["cell_type"] == "code"
    ]


# --- The simulator ----------------------------------------------------------------


def test_the_pages_of_simgpu_have_all_of_its_readme():
    readme = (ROOT / simulator.README).read_text(encoding="utf-8")
    pages = simulator.chapters(readme)
    assert set(pages) == {simulator.FIRST, *simulator.CUTS.values()}
    for text in pages.values():
        titles = re.findall(r"^# (?![\w.]+\.py$)", text, re.MULTILINE)
        assert text.startswith("# ") and len(titles) == 1
    assert sum(map(len, pages.values())) == len(readme) - len(simulator.CUTS)


def test_a_heading_that_has_gone_from_the_readme_is_an_error():
    with pytest.raises(ValueError, match="no heading for .*simgpu-in-tests"):
        simulator.chapters("# simgpu\n\n## Measure your own machine\n")


def test_the_api_has_every_public_name_once():
    grouped = [name for names in simulator.GROUPS.values() for name in names]
    assert sorted([*grouped, "__version__"]) == sorted(simgpu.__all__)


# --- Cells ------------------------------------------------------------------------


def cell(source: str, *outputs: dict, **metadata) -> dict:
    """A cell of code with stored results."""
    stored = [{"output_type": "execute_result", "data": data} for data in outputs]
    return {
        "cell_type": "code",
        "id": "it",
        "metadata": metadata,
        "source": source,
        "outputs": stored,
    }


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        ("draw()\n", "Show the code of this cell"),
        ("# @title Set-up for Colab\nx = 1\n", "Set-up for Colab"),
    ],
)
def test_a_collapsed_cell_becomes_a_fold(source, prompt):
    collapsed = cell(source, jupyter={"source_hidden": True}, tags=["mine"])
    prepare.fold(collapsed)
    assert collapsed["metadata"]["tags"] == ["mine", "hide-input"]
    assert collapsed["metadata"]["mystnb"]["code_prompt_show"] == prompt


def test_an_open_cell_stays_open():
    opened = cell("x = 1\n", tags=["exercise"])
    prepare.fold(opened)
    assert opened["metadata"] == {"tags": ["exercise"]}


def test_a_picture_gets_its_title_or_its_comment_as_text():
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><title>Four lanes</title></svg>'
    drawn = cell("draw()", {"image/svg+xml": [svg]})
    plotted = cell("# alt: a falling curve\nplot()", {"image/png": "…"})
    for picture, text in ((drawn, "Four lanes"), (plotted, "a falling curve")):
        prepare.describe(picture)
        assert picture["metadata"]["mystnb"]["image"]["alt"] == text


def test_an_explorer_is_followed_by_a_note():
    explorer = cell("explore.ring()", {"text/plain": ["Explorer(ranks=4)"]})
    content = {"cells": [explorer, cell("1", {"text/plain": "1"})]}
    cells = json.loads(prepare.notebook(json.dumps(content), LESSON))["cells"]
    assert [cell["cell_type"] for cell in cells] == ["code", "markdown", "code"]
    assert "sliders" in cells[1]["source"]


# --- Workflows --------------------------------------------------------------------


def workflow(name: str) -> dict:
    """A workflow, read as YAML; `on` is True there, as YAML has it."""
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8")
    return yaml.safe_load(text)


def steps_of(job: dict, key: str) -> list[str]:
    """What the steps of a job run or use."""
    return [step[key] for step in job["steps"] if key in step]


def test_the_tests_run_on_each_system_by_the_command_of_the_readme():
    job = workflow("tests.yml")["jobs"]["course"]
    each, windows, weekly = steps_of(job, "run")
    assert [each, windows] == ["python3 -m helpers test", "python -m helpers test"]
    # also what .ci/run leaves out
    assert weekly.splitlines()[-1] == "python3 -m helpers test -n 3 -m slow"
    assert "tests/browser/requirements.txt" in weekly
    assert "python3 -m helpers test" in README
    matrix = job["strategy"]["matrix"]
    assert matrix["os"] == ["ubuntu-latest"]
    assert matrix["python"] == ["3.11", "3.12", "3.13"]
    others = {entry["os"] for entry in matrix["include"]}
    assert others == {"macos-latest", "windows-latest"}
    assert not job["strategy"]["fail-fast"]


def test_the_site_is_published_from_main_by_the_one_command():
    publication = workflow("site.yml")
    assert publication[True]["push"] == {"branches": ["main"]}
    build, publish = publication["jobs"].values()
    assert steps_of(build, "run") == ["python3 -m helpers site"]
    (folder,) = [step["with"]["path"] for step in build["steps"][-1:]]
    assert f"/{folder}/" in (ROOT / ".gitignore").read_text().splitlines()
    assert steps_of(publish, "uses")[0].startswith("actions/deploy-pages@")


@pytest.mark.parametrize("name", ["tests.yml", "site.yml"])
def test_workflows_may_only_read_end_in_time_and_pin_their_actions(name):
    content = workflow(name)
    assert content["permissions"] == {"contents": "read"}
    assert "group" in content["concurrency"]
    for job in content["jobs"].values():
        assert job["timeout-minutes"] <= 90
        for action in steps_of(job, "uses"):
            assert re.fullmatch(r"actions/[\w-]+@v\d+", action)


# --- The built site ---------------------------------------------------------------


class Page(HTMLParser):
    """A page of the site: its anchors, its links, and what it loads."""

    def __init__(self, path: Path):
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple]) -> None:
        found = dict(attributes)
        self.anchors.add(found.get("id", ""))
        if tag == "a":
            self.links.append(found.get("href", ""))
        elif tag in ("img", "script", "link", "iframe"):
            self.loaded.append(found.get("src") or found.get("href") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built here; every file of the course is the same afterwards."""
    venv = commands.SITE_VENV
    if commands.built_from(venv) != commands.wanted(venv):
        pytest.skip("`python3 -m helpers site` was not run here")
    before = fingerprints()
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [str(venv.python), str(SITE / "build.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=JOB)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(f"open {folder / 'index.html'}\n")
    assert fingerprints() == before
    return folder


def fingerprints() -> dict[str, str]:
    """A sum of each file that the site is made from."""
    files = [ROOT / "README.md", *checkout.here(ROOT / "notebooks", "*.*")]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture(scope="module")
def pages(site) -> dict[str, Page]:
    """All pages of the built site."""
    return {path.name: Page(path) for path in sorted(site.glob("*.html"))}


def test_every_page_is_there(pages):
    lessons = {f"{path.stem}.html" for path in NOTEBOOKS}
    others = {"index.html", "glossary.html", "cheat-sheet.html", "search.html"}
    assert set(pages) == lessons | others | {f"{page}.html" for page in simulator.PAGES}


def test_every_stored_picture_is_on_its_page(site, pages):
    for path in NOTEBOOKS:
        page = pages[f"{path.stem}.html"]
        sources = [source for source in page.loaded if source.startswith("_images/")]
        shown = [(site / source).read_bytes().strip() for source in sources]
        stored = pictures_of(path)
        assert set(stored) <= set(shown)


def pictures_of(path: Path) -> list[bytes]:
    """The pictures that a notebook has stored, as files have them."""
    pictures = []
    for stored in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        for output in stored.get("outputs", []):
            data = output.get("data", {})
            if "image/svg+xml" in data:
                pictures.append("".join(data["image/svg+xml"]).strip().encode())
            elif "image/png" in data:
                pictures.append(base64.b64decode("".join(data["image/png"])).strip())
    return pictures


def test_stored_errors_folds_and_formulas_are_shown(site):
    text = (site / "00-start-here.html").read_text(encoding="utf-8")
    assert "Expected all tensors to be on the same device" in text
    assert "<details" in text and "Set-up for Colab and Kaggle" in text
    texts = [path.read_text(encoding="utf-8") for path in site.glob("*.html")]
    formulas = re.findall(r'class="formula">\s*(.{5})', "".join(texts))
    assert len(formulas) > 100 and set(formulas) == {"<math"}


def test_search_knows_the_words_of_the_lessons(site):
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    assert re.search(r'\bbucket"?:', index)


def test_links_between_pages_lead_to_a_page_and_a_place_on_it(site, pages):
    lost = []
    for name, page in pages.items():
        for link in page.links:
            path, _, anchor = link.partition("#")
            if re.match("[a-z]+:", link):
                continue
            target = posixpath.normpath(unquote(path)) if path else name
            if target not in pages:
                lost += [] if (site / target).is_file() else [(name, link)]
            elif anchor and unquote(anchor) not in pages[target].anchors:
                lost.append((name, link))
    assert lost == []


def test_pages_load_nothing_from_other_hosts(site, pages):
    for name, page in pages.items():
        for source in page.loaded:
            here = source.partition("?")[0].partition("#")[0]
            assert not here or (site / here).is_file(), f"{name} loads {source}"
    for style in site.rglob("*.css"):
        assert not re.search(
            r"(url\(|@import)\s*[\"']?https?:", style.read_text("utf-8")
        )


def test_a_folder_of_the_readers_is_not_overwritten(tmp_path):
    spec = importlib.util.spec_from_file_location("build", SITE / "build.py")
    build = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SITE))
        spec.loader.exec_module(build)
    pages, folder = tmp_path / "pages", tmp_path / "folder"
    for place in (pages, folder):
        place.mkdir()
    (pages / "searchindex.js").touch()
    (folder / "mine").touch()
    with pytest.raises(SystemExit, match="has other files"):
        build.put(pages, folder)
    (folder / "mine").unlink()
    build.put(pages, folder)
    (folder / "old.html").touch()
    build.put(pages, folder)
    assert [path.name for path in folder.iterdir()] == ["searchindex.js"]
