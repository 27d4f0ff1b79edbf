"""Turns the course's README, pages and notebooks into the sources of the site.

Text in, text out, standard library only: nothing is executed, and no file of the
course changes. A notebook keeps its cells and stored outputs. What changes is how the
site shows them:

    fold        a cell that JupyterLab shows collapsed becomes a fold
    describe    a stored picture gets the text that screen readers say for it
    note        an explorer gets a note, since its sliders need a kernel
    number      the title of a lesson begins with the lesson's number
    relink      links lead to pages of the site, or to the file on GitHub
    launchers   badges, which are pictures from other hosts, become plain links
    leave       the line of the lesson before and after goes: the site has its own

The table of contents is the README's table of lessons. The pages about simgpu are those
of simulator.py.
"""

import json
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import simulator

from tests.tools.badges import BRANCH, REPOSITORY

ROOT = Path(__file__).resolve().parents[2]
GITHUB = f"https://github.com/{REPOSITORY}"

# The pages beside the lessons, in the order of the table of contents.
FRONT_PAGE = "README.md"
BESIDE = ["notebooks/glossary.md", "notebooks/cheat-sheet.md"]
IMAGES = "notebooks/images"

PART = re.compile(r"\| \| \*\*(?P<title>.+?)\*\* \|")
LESSON = re.compile(
    r"\| (?P<number>\d\d) \| \[(?P<title>.+?)\]\((?P<path>notebooks/.+?\.ipynb)\)"
    r"(?P<star> ★)? \| (?P<minutes>\d+) \| (?P<proof>.+?) \|"
)
CODE = re.compile(r"(```.*?```|`[^`\n]+`)", re.DOTALL)
LINK = re.compile(r"\]\((?![a-z]+:)(?P<path>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)")
BADGES = re.compile(
    r"\[!\[[^\]]*\]\([^)]*\)\]\((?P<binder>https://mybinder\.org/[^)]*)\)\s*"
    r"\[!\[[^\]]*\]\([^)]*\)\]\((?P<colab>https://colab\.research[^)]*)\)"
)

# the last line of a lesson
NEIGHBOURS = re.compile(
    r"\s*^(\[Previous: .+ · )?\[Index\]\(\S+\) · .+\Z", re.MULTILINE
)

STANDS_STILL = """\
```{note}
On this page the picture stands still. In JupyterLab, Binder or Colab it has sliders.
```"""


class Lesson(NamedTuple):
    """A row of the README's table."""

    number: str
    title: str
    path: str  # from the root of the repository
    star: str  # " ★" on the fast track, else ""
    minutes: str
    proof: str

    @property
    def page(self) -> str:
        """Its name on the site, without an ending."""
        return Path(self.path).stem


class Part(NamedTuple):
    """A part of the course."""

    title: str
    lessons: list[Lesson]


# --- Table of contents ------------------------------------------------------------


def parts_of(readme: str) -> list[Part]:
    """Read the parts and their lessons off the README's table.

    Raises:
        ValueError: if a lesson stands before the first part.
    """
    parts: list[Part] = []
    for line in readme.splitlines():
        if part := PART.match(line):
            parts.append(Part(part["title"], []))
        elif row := LESSON.match(line):
            if not parts:
                raise ValueError(f"README.md: {row['title']} is in no part")
            found = row.groupdict(default="")
            parts[-1].lessons.append(Lesson(**found))
    return parts


def contents(parts: list[Part]) -> str:
    """Write the table of contents for Sphinx: a list for each part, then the rest."""
    lists = []
    for part in parts:
        lists.append((part.title, [lesson.page for lesson in part.lessons]))
    lists.append(("Beside the lessons", [Path(path).stem for path in BESIDE]))
    lists.append(("The simulator", simulator.PAGES))
    blocks = []
    for caption, entries in lists:
        head = ["```{toctree}", ":hidden:", f":caption: {caption}", ""]
        blocks.append("\n".join([*head, *entries, "```"]))
    return "\n\n".join(blocks) + "\n"


def front_page(readme: str) -> str:
    """Make the front page: the README, its table of lessons as lists by part.

    The table has five columns, too many for a telephone.
    """
    lines = []
    for line in readme.splitlines():
        if part := PART.match(line):
            lines += ["", f"### {part['title']}", ""]
        elif row := LESSON.match(line):
            lesson = Lesson(**row.groupdict(default=""))
            lines.append(
                f"* {lesson.number} [{lesson.title}]({lesson.path}){lesson.star}, "
                f"{lesson.minutes} minutes: {lesson.proof}"
            )
        elif not re.match(r"\| \| lesson \||\|---\|---\|---\|---\|---\|", line):
            lines.append(line)
    page = markdown("\n".join(lines), FRONT_PAGE)
    return f"{page}\n\n{contents(parts_of(readme))}"


# --- Markdown ---------------------------------------------------------------------


def markdown(text: str, path: str) -> str:
    """Prepare the text of a page or of a notebook's cell.

    Args:
        text: Markdown.
        path: the file it stands in, from the root of the repository.
    """
    return relink(launchers(text, path), path)


def launchers(text: str, path: str) -> str:
    """Turn the badges for Binder and Colab into links of text, and add GitHub."""
    if path == FRONT_PAGE:
        on_github = f"[Repository on GitHub]({GITHUB})"
    else:
        on_github = f"[Notebook on GitHub]({GITHUB}/blob/{BRANCH}/{path})"

    def links(found: re.Match[str]) -> str:
        binder = f"[Open in Binder]({found['binder']})"
        colab = f"[Open in Colab]({found['colab']})"
        return f"{binder}\n{colab}\n{on_github}"

    return BADGES.sub(links, text)


def relink(text: str, path: str) -> str:
    """Let each relative link lead to a page of the site, or to the file on GitHub.

    Code stays as it is.

    Raises:
        ValueError: if a link leads nowhere.
    """

    def moved(found: re.Match[str]) -> str:
        target, anchor = found["path"], found["anchor"] or ""
        if not target and path != simulator.README:
            return f"]({anchor.lower()})"  # as in `destination`
        folder = posixpath.dirname(path)
        place = posixpath.normpath(posixpath.join(folder, target)) if target else path
        if not (ROOT / place).exists():
            raise ValueError(f"{path}: the link to {target} leads nowhere")
        return f"]({destination(place, anchor)})"

    return outside_code(text, lambda prose: LINK.sub(moved, prose))


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Change a Markdown text, but not its code."""
    pieces = CODE.split(text)
    pieces[::2] = map(change, pieces[::2])
    return "".join(pieces)


def destination(place: str, anchor: str) -> str:
    """Say where a link to a file of the repository leads on the site."""
    name = posixpath.basename(place)
    if place == FRONT_PAGE:
        return "index.md" + anchor.lower()
    is_lesson = posixpath.dirname(place) == "notebooks" and name.endswith(".ipynb")
    if is_lesson or place in BESIDE:
        return name + anchor.lower()  # Jupyter's anchors have capitals, Sphinx's none
    if page := simulator.page_of(place, anchor):
        return f"{page}.md{anchor}"
    if posixpath.dirname(place) == IMAGES:
        return f"images/{name}"
    kind = "tree" if (ROOT / place).is_dir() else "blob"
    return f"{GITHUB}/{kind}/{BRANCH}/{place}{anchor}"


# --- Notebooks --------------------------------------------------------------------


def notebook(text: str, path: str) -> str:
    """Prepare a notebook.

    Args:
        text: the notebook's file.
        path: where it is, from the root of the repository.

    Returns:
        The file for the site, with every stored output.
    """
    content = json.loads(text)
    cells = []
    for cell in content["cells"]:
        if cell["cell_type"] == "markdown":
            text = leave("".join(cell["source"]))
            if not text:
                continue
            cell["source"] = number(markdown(text, path), Path(path).name[:2])
        fold(cell)
        describe(cell)
        cells.append(cell)
        if has_sliders(cell):
            cells.append(note(cell))
    content["cells"] = cells
    return json.dumps(content, ensure_ascii=False, indent=1)


def number(text: str, lesson: str) -> str:
    """Let a title begin with the lesson's number; other text stays as it is."""
    return re.sub(r"^# ", f"# {lesson} ", text)


def leave(text: str) -> str:
    """Drop the links to the lesson before and the one after."""
    return NEIGHBOURS.sub("", text)


def fold(cell: dict) -> None:
    """Fold the code of a cell that JupyterLab shows collapsed."""
    metadata = cell["metadata"]
    if not metadata.get("jupyter", {}).get("source_hidden"):
        return
    first_line = "".join(cell["source"]).partition("\n")[0]
    title = re.match(r"# @title (.+)", first_line)
    prompt = title[1] if title else "Show the code of this cell"
    metadata["tags"] = [*metadata.get("tags", []), "hide-input"]
    settings = {"code_prompt_show": prompt, "code_prompt_hide": "Hide the code"}
    metadata.setdefault("mystnb", {}).update(settings)


def describe(cell: dict) -> None:
    """Give a stored picture its alternative text.

    That is the title of an SVG, or what the cell says in a comment `# alt: …`.
    """
    said = re.match(r"# alt: (.+)", "".join(cell["source"]))
    titles = [said[1]] if said else []
    for output in cell.get("outputs", []):
        picture = "".join(output.get("data", {}).get("image/svg+xml", ""))
        if picture:
            titles.append(svg_title(picture))
    text = " ".join(filter(None, titles))
    if text:
        cell["metadata"].setdefault("mystnb", {})["image"] = {"alt": text}


def svg_title(picture: str) -> str:
    """The title of an SVG, empty if it has none."""
    title = ElementTree.fromstring(picture).find("{http://www.w3.org/2000/svg}title")
    return "" if title is None else title.text or ""


def has_sliders(cell: dict) -> bool:
    """Whether a cell shows an explorer, of which only the picture is stored."""
    for output in cell.get("outputs", []):
        plain = "".join(output.get("data", {}).get("text/plain", ""))
        if plain.startswith("Explorer("):
            return True
    return False


def note(cell: dict) -> dict:
    """A cell of text that goes below an explorer."""
    return {
        "cell_type": "markdown",
        "id": cell["id"] + "-note",
        "metadata": {},
        "source": STANDS_STILL,
    }
