"""What every lesson keeps to: one function for each rule, all in the table RULES.

A rule takes a notebook and its path. For each violation it yields the number of the
cell (from 1, prose included; None for the file as a whole) and what is wrong there and
how to fix it. Not here is what cannot be judged from text, such as whether a title is a
verb phrase.
"""

import base64
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from urllib.parse import unquote

import nbformat
from nbformat import NotebookNode

from support import checkout
from tests import glossary, reading_time, take_home

Found = Iterator[tuple[int | None, str]]
Rule = Callable[[NotebookNode, Path], Found]

TAGS = {
    "colab-setup",
    "floating-point",
    "nbval-ignore-output",
    "raises-exception",
    "exercise",
}
CELL_METADATA = {"tags", "jupyter", "cellView"}
METADATA = {
    "kernelspec": {
        "display_name": "Python 3", "language": "python", "name": "python3"
    },
    "language_info": {"name": "python"},
}  # fmt: skip
SECTIONS = (
    "Exercises",
    "In practice",
    "Take it home",
    "Remember",
    "Further reading",
)
NAMES = {"Adam", "Binder", "Colab", "Jupyter", "Python"}  # capitals inside a title
KILOBYTES = 150
REGENERATE = "run `python -m tests.tools.regenerate`"

# What tells this machine or this moment from another, by name.
TRACES = {
    "an absolute path": re.compile(
        r"(?<![\w.:/<)~…])~?/(?!dev/|proc/|sys/)[\w.+-]+/[\w.+-]+|file://|\b[A-Z]:\\\w"
    ),
    "a timestamp": re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d|\b\d?\d:\d\d:\d\d\b"),
    "an ANSI colour code": re.compile(r"\x1b\["),
    "a memory address": re.compile(r"\b0x[0-9a-fA-F]{6,16}\b"),
}
FORBIDDEN_CODE = {
    r"^%%writefile\b": "%%writefile; put the script into notebooks/scripts",
    r"^\s*[!%]\s*pip\b": "installs a package; requirements.txt is for that",
    r"^\s*from\s+\S+\s+import\s+\*": "a star import; name what is used",
}
FENCE = re.compile(r"^(```|~~~).*?^\1[`~]*\s*$", re.M | re.S)
INLINE_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.S)
IMAGE = re.compile(r"!\[([^\]]*)\]\(\s*<?([^\s)>]*)")
HTML_IMAGE = re.compile(r"<img\b[^>]*>", re.I)
HTML_ALT = re.compile(r"""\balt\s*=\s*(["'])\s*\S.*?\1""", re.I | re.S)
TARGETS = (
    re.compile(r"\]\(\s*<?([^\s)>]+)"),
    re.compile(r"""\b(?:href|src)\s*=\s*["']([^"']+)["']""", re.I),
    re.compile(r"^\[[^\]]+\]:\s*<?([^\s>]+)", re.M),
)
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def read(path: Path) -> NotebookNode:
    """Returns the notebook in the current format, as nbval reads it."""
    return nbformat.read(path, as_version=4)


def complaints(rule: Rule, nb: NotebookNode, path: Path) -> list[str]:
    """Returns the violations of a rule, each with the file and the cell."""
    found = []
    for number, what in rule(nb, path):
        where = path.name if number is None else f"{path.name}, cell {number}"
        found.append(f"{where}: {what}")
    return found


# -- parts of a notebook ---------------------------------------------------------------


def tags(cell: NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


def code(nb: NotebookNode) -> list[tuple[int, NotebookNode]]:
    return [(i, c) for i, c in enumerate(nb.cells, 1) if c.cell_type == "code"]


def lesson_code(nb: NotebookNode) -> list[tuple[int, NotebookNode]]:
    """Returns the code that teaches: all but the Colab set-up."""
    return [(i, c) for i, c in code(nb) if "colab-setup" not in tags(c)]


def prose(nb: NotebookNode) -> list[tuple[int, str]]:
    """Returns every markdown cell's number and text, with no code inside the text."""
    return [
        (i, INLINE_CODE.sub("code", FENCE.sub("", cell.source)))
        for i, cell in enumerate(nb.cells, 1)
        if cell.cell_type == "markdown"
    ]


def headings(nb: NotebookNode) -> list[tuple[int, str]]:
    """Returns every heading's level and text, with its inline code."""
    return [
        (len(marks), text.strip())
        for cell in nb.cells
        if cell.cell_type == "markdown"
        for marks, text in re.findall(
            r"^(#{1,6})\s+(.+)$", FENCE.sub("", cell.source), re.M
        )
    ]


def outputs(nb: NotebookNode) -> Iterator[tuple[int, NotebookNode, NotebookNode]]:
    """Yields every stored output with the number of its cell and its cell."""
    for i, cell in code(nb):
        for output in cell.outputs:
            yield i, cell, output


def texts(output: NotebookNode) -> list[str]:
    """Returns all that a stored output says in text, markup included."""
    found = [output.get("text", ""), output.get("evalue", "")]
    found += output.get("traceback", [])
    for mime, value in output.get("data", {}).items():
        if isinstance(value, str) and (mime.startswith("text/") or "svg" in mime):
            found.append(value)
    return found


# -- stored files ----------------------------------------------------------------------


def counts_run_from_one(nb: NotebookNode, path: Path) -> Found:
    for n, (i, cell) in enumerate(code(nb), 1):
        if cell.execution_count != n:
            yield i, f"execution count {cell.execution_count}, not {n}; {REGENERATE}"


def metadata_is_canonical(nb: NotebookNode, path: Path) -> Found:
    if nb.metadata != METADATA:
        yield None, f"notebook metadata {dict(nb.metadata)}; {REGENERATE}"
    if (nb.nbformat, nb.nbformat_minor) != (4, 5):
        yield None, f"format {nb.nbformat}.{nb.nbformat_minor}, not 4.5; {REGENERATE}"
    ids = [cell.get("id") for cell in nb.cells]
    for i, cell in enumerate(nb.cells, 1):
        if extra := sorted(set(cell.metadata) - CELL_METADATA):
            yield i, f"cell metadata {extra}; {REGENERATE}"
        if extra := sorted(set(tags(cell)) - TAGS):
            yield i, f"tags {extra}; only {sorted(TAGS)} mean anything here"
        if ids.count(cell.get("id")) > 1:
            yield i, f"its id is not unique; {REGENERATE}"


def file_is_as_written(nb: NotebookNode, path: Path) -> Found:
    """A file in another layout makes every later diff unreadable."""
    if path.read_text(encoding="utf-8") != nbformat.writes(nb).rstrip("\n") + "\n":
        yield None, f"not laid out as nbformat writes it; {REGENERATE}"


def no_stderr(nb: NotebookNode, path: Path) -> Found:
    for i, _, output in outputs(nb):
        if output.get("name") == "stderr":
            yield i, "writes to stderr; fix the cause or catch the warning"


def no_traces(nb: NotebookNode, path: Path) -> Found:
    for i, _, output in outputs(nb):
        for what, pattern in TRACES.items():
            hits = [hit for text in texts(output) if (hit := pattern.search(text))]
            if hits:
                yield i, f"{what} in its output, {hits[0][0]!r}; print less"


def errors_are_tagged(nb: NotebookNode, path: Path) -> Found:
    for i, cell, output in outputs(nb):
        if output.output_type == "error" and "raises-exception" not in tags(cell):
            yield i, "stores an error; fix it or tag it raises-exception"


# -- code ------------------------------------------------------------------------------


def cells_are_short(nb: NotebookNode, path: Path) -> Found:
    sizes = []
    for i, cell in lesson_code(nb):
        lines = cell.source.splitlines()
        if len(lines) > 25:
            yield i, f"{len(lines)} lines of code; split it, 25 is the most"
        if not cell.metadata.get("jupyter", {}).get("source_hidden"):
            sizes.append(sum(1 for line in lines if line.strip()))
    middle, most = median(sizes or [0]), 10
    if middle > most:
        what = f"the median code cell has {middle:g} lines"
        yield None, f"{what}; split some, {most} is the most"


def no_semicolons(nb: NotebookNode, path: Path) -> Found:
    for i, cell in code(nb):
        if re.search(r"^[^#\n]*;[ \t]*(#.*)?$", cell.source, re.M):
            yield i, "ends with `;`; end with plt.show() or a value instead"


def nothing_installs_or_hides(nb: NotebookNode, path: Path) -> Found:
    for i, cell in lesson_code(nb):
        for pattern, what in FORBIDDEN_CODE.items():
            if re.search(pattern, cell.source, re.M):
                yield i, what


# -- pictures and links ----------------------------------------------------------------


def images_are_small(nb: NotebookNode, path: Path) -> Found:
    sizes = []
    for i, _, output in outputs(nb):
        for mime, value in output.get("data", {}).items():
            if mime == "image/svg+xml":
                sizes.append((i, len(value.encode())))
            elif mime.startswith("image/"):
                sizes.append((i, len(base64.b64decode(value))))
    for i, cell in enumerate(nb.cells, 1):
        for bundle in cell.get("attachments", {}).values():
            sizes += [(i, len(base64.b64decode(value))) for value in bundle.values()]
    for i, text in prose(nb):
        for _, target in IMAGE.findall(text):
            file = path.parent / unquote(target)
            if "://" not in target and file.is_file():
                sizes.append((i, file.stat().st_size))
    for i, size in sizes:
        if size > KILOBYTES * 1000:
            yield i, f"a picture of {size // 1000} kB; {KILOBYTES} is the most"


def images_have_alt_text(nb: NotebookNode, path: Path) -> Found:
    """A picture says in words what it shows: PNG in a comment, SVG in its title."""
    for i, text in prose(nb):
        if any(not alt.strip() for alt, _ in IMAGE.findall(text)):
            yield i, "`![](…)` says nothing; add alt text"
        if not all(map(HTML_ALT.search, HTML_IMAGE.findall(text))):
            yield i, '<img> without text; add alt="…"'
    for i, cell, output in outputs(nb):
        data = output.get("data", {})
        html = data.get("text/html", "")
        svg = data.get("image/svg+xml", "") + html
        if len(re.findall(r"<svg\b", svg)) > len(re.findall(r"<title>\s*[^\s<]", svg)):
            yield i, "an SVG without a <title>; give it one"
        if not all(map(HTML_ALT.search, HTML_IMAGE.findall(html))):
            yield i, '<img> without text; add alt="…"'
        if {"image/png", "image/jpeg"} & set(data):
            if not re.search(r"^# alt: \S", cell.source, re.M):
                yield i, "a picture without alt text; add a comment `# alt: …`"


def anchors(nb: NotebookNode) -> set[str]:
    """Returns what `#…` may follow a link: headings as JupyterLab and GitHub do."""
    found = set()
    for _, text in headings(nb):
        plain = re.sub(r"[`*]", "", text)
        found.add(plain.replace(" ", "-"))
        found.add(re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-"))
    return found


def links_resolve(nb: NotebookNode, path: Path) -> Found:
    """A file, a heading of this lesson, or an entry of the glossary is there."""
    terms = {each.anchor for each in glossary.of(path)}
    for i, text in prose(nb):
        for target in (t for pattern in TARGETS for t in pattern.findall(text)):
            if re.match(r"[a-z][a-z+.-]*:", target):
                continue
            file, _, anchor = unquote(target).partition("#")
            if file.startswith("/"):
                yield i, f"{target} is not a relative link; begin it at this folder"
            elif file and not (path.parent / file).exists():
                yield i, f"{target} leads nowhere; there is no such file"
            elif anchor and file in ("", path.name) and anchor not in anchors(nb):
                yield i, f"{target} leads nowhere; no heading has that name"
            elif anchor and file == "glossary.md" and anchor not in terms:
                yield i, f"{target} leads nowhere; the glossary has no such entry"


def terms_are_linked(nb: NotebookNode, path: Path) -> Found:
    """The first use of a term of the glossary in a lesson is a link to its entry.

    Prose counts, without headings, the line with the minutes, tables' first rows, code
    and formulas. Plurals and the names of `tests/glossary.py` count as well, and of two
    names at one place the longer one. Everyday words that are also terms, `COMMON`
    there, are linked only in the lessons that their entries name.
    """
    cells = [
        (i, cell.source)
        for i, cell in enumerate(nb.cells, 1)
        if cell.cell_type == "markdown"
    ]
    texts = dict(cells)
    for i, use in glossary.first_uses(cells, path.name[:2], glossary.of(path)):
        if not use.linked:
            words = texts[i][use.start : use.end]
            what = f"first use of {words!r}, without a link"
            yield i, f"{what}; write [{words}](glossary.md#{use.anchor})"


# -- the parts of a lesson -------------------------------------------------------------


def name_sorts(nb: NotebookNode, path: Path) -> Found:
    if not re.fullmatch(r"\d\d(-[a-z0-9]+){2,}\.ipynb", path.name):
        yield None, "the name is not like 05-overlap-with-streams.ipynb"


def opens_well(nb: NotebookNode, path: Path) -> Found:
    first = nb.cells[0] if nb.cells else nbformat.v4.new_raw_cell()
    heading, *_ = first.source.splitlines() or [""]
    if first.cell_type != "markdown" or not re.match(r"# [A-Z]", heading):
        yield 1, "does not open with `# Verb phrase`"
        return
    title = re.findall(r"[\w'’]+", heading)[1:]
    wrong = [w for w in title if re.fullmatch("[A-Z][a-z]+", w) and w not in NAMES]
    if wrong:
        yield 1, f"capitals in the title, {wrong}; use sentence case"
    italic = re.findall(r"^([*_])(?![*_])(.+?)\1", first.source, re.M)
    if not any(
        re.search(r"\d+ min", text) and re.search("CPU|GPU|process|rank", text)
        for _, text in italic
    ):
        what = "no italic line with the minutes and the hardware"
        yield 1, f"{what}; `*25 minutes. Simulated GPUs.*`"
    targets = [unquote(t) for t in re.findall(r"\]\(([^)\s]+)\)", first.source)]
    for site in ("mybinder.org/v2/gh/", "colab.research.google.com/github/"):
        if not any(site in t and t.endswith(f"notebooks/{path.name}") for t in targets):
            yield 1, f"no badge that opens this lesson at {site}; add one"


def minutes_are_true(nb: NotebookNode, path: Path) -> Found:
    """Exercises are apart: `*25 minutes and 20 for the exercises. …*`."""
    said = re.search(r"^[*_](\d+) min", nb.cells[0].source, re.M)
    time = reading_time.of(nb)
    if said is None or int(said[1]) % 5 or abs(int(said[1]) - time.minutes) > 3:
        what = f"there are {time.minutes:.1f} minutes to read ({time})"
        yield 1, f"{what}; begin the italic line with `*{time.stated} minutes`"


def says_what_is_ahead(nb: NotebookNode, path: Path) -> Found:
    wanted = [rf"\*\*What you['’]ll {word}\b" for word in ("do", "learn", "need")]
    if not any(all(re.search(w, text) for w in wanted) for _, text in prose(nb)):
        what = "**What you'll do**, **What you'll learn**, **What you'll need**"
        yield None, f"no cell with {what}"


def sets_up(nb: NotebookNode, path: Path) -> Found:
    cells = code(nb)
    if not cells or "colab-setup" not in tags(cells[0][1]):
        yield None, "the first code cell is not tagged colab-setup"
        return
    for i, cell in cells[1:]:
        if "colab-setup" in tags(cell):
            yield i, "a second cell tagged colab-setup; one is enough"
    if len(cells) < 2 or not re.search(r"\b(need_gpus|Ranks)\(", cells[1][1].source):
        yield None, "the second code cell calls neither need_gpus( nor Ranks("


def sections_in_order(nb: NotebookNode, path: Path) -> Found:
    """Other headings may stand between; they say what their section is about."""
    found: list[str] = []
    for level, text in headings(nb):
        name = text.partition(":")[0].strip()
        if level == 2 and name in SECTIONS and name not in found[-1:]:
            found.append(name)
    if found != list(SECTIONS):
        yield None, f"the `##` sections are {found}; they should be {list(SECTIONS)}"


def takes_a_script_home(nb: NotebookNode, path: Path) -> Found:
    """One script without the course, and two commands for it."""
    sections = [
        (i, cell.source)
        for i, cell in enumerate(nb.cells, 1)
        if "## Take it home" in cell.source.splitlines()
    ]
    if len(sections) != 1:
        yield None, f"{len(sections)} sections `## Take it home`; one is right"
        return
    i, text = sections[0]
    found = take_home.commands(text)
    if len(found) != 2 or any("\n" in command for command in found):
        yield i, f"{len(found)} blocks of bash; two with a line each are right"
        return
    real, simulated = found
    prefix = take_home.SIMULATED.match(simulated)
    if prefix is None or simulated[prefix.end() :] != real.removeprefix("python "):
        what = "is not `python -m simgpu --gpus N` and the command for real GPUs"
        yield i, f"{simulated!r} {what}, {real!r}"
    names = [word for word in real.split() if word.endswith(".py")]
    script = path.parent / "scripts" / "".join(names)
    if len(names) != 1 or not script.is_file():
        yield i, f"{real!r} names no script of the folder scripts"
        return
    code_of_script = script.read_text(encoding="utf-8")
    ours = re.search(
        r"^\s*(from|import) (helpers|simgpu|scripts)", code_of_script, re.M
    )
    if ours:
        yield i, f"{script.name} imports {ours[2]}; it must run without the course"


def breaks_something(nb: NotebookNode, path: Path) -> Found:
    if not any("raises-exception" in tags(cell) for _, cell in code(nb)):
        yield None, "breaks nothing; tag one cell raises-exception"


def has_exercises(nb: NotebookNode, path: Path) -> Found:
    exercises = [(i, cell) for i, cell in code(nb) if "exercise" in tags(cell)]
    if not 2 <= len(exercises) <= 3:
        what = f"{len(exercises)} cells are tagged exercise; two or three should be"
        yield None, what
    for i, cell in exercises:
        if "check." not in cell.source:
            yield i, "an exercise that nothing checks; check.…"
        said = "".join(text for output in cell.outputs for text in texts(output))
        if "not yet" not in said:
            yield i, "an exercise whose output is not `not yet`; store it unsolved"


def closes_with_links(nb: NotebookNode, path: Path) -> Found:
    lessons = [other.name for other in checkout.here(path.parent, "[0-9][0-9]-*.ipynb")]
    lessons = [None, *lessons, None]
    here = lessons.index(path.name)
    wanted = {
        "previous": lessons[here - 1],
        "index": "../README.md",
        "glossary": "glossary.md",
        "next": lessons[here + 1],
    }
    last = nb.cells[-1].source if nb.cells else ""
    for word, target in wanted.items():
        links = [link for text, link in LINK.findall(last) if word in text.lower()]
        if links != ([target] if target else []):
            what = f"links for {word!r} in the last cell: {links}"
            yield len(nb.cells), f"{what}; it should be {target}"


def has_its_length(nb: NotebookNode, path: Path) -> Found:
    if not 24 <= len(nb.cells) <= 45:
        yield None, f"{len(nb.cells)} cells; 24 to 45 are right"
    share = 100 * len(prose(nb)) / max(1, len(nb.cells))
    if share < 45:
        yield None, f"{share:.0f} % of the cells are prose; 45 is the least"


def code_is_explained(nb: NotebookNode, path: Path) -> Found:
    row = 0
    for i, cell in enumerate(nb.cells, 1):
        row = row + 1 if cell.cell_type == "code" else 0
        if row == 4:
            yield i, "the fourth code cell in a row; say something before it"


RULES: tuple[Rule, ...] = (
    counts_run_from_one,
    metadata_is_canonical,
    file_is_as_written,
    no_stderr,
    no_traces,
    errors_are_tagged,
    cells_are_short,
    no_semicolons,
    nothing_installs_or_hides,
    images_are_small,
    images_have_alt_text,
    links_resolve,
    terms_are_linked,
    name_sorts,
    opens_well,
    minutes_are_true,
    says_what_is_ahead,
    sets_up,
    sections_in_order,
    takes_a_script_home,
    breaks_something,
    has_exercises,
    closes_with_links,
    has_its_length,
    code_is_explained,
)


# -- over several lessons --------------------------------------------------------------


def compared(nb: NotebookNode) -> tuple[int, int]:
    """Returns how many cells with an output nbval compares, and of how many."""
    shown = [cell for _, cell in code(nb) if cell.outputs]
    unseen = re.compile(r"^\s*#+\s*(NBVAL_IGNORE_OUTPUT|NBVAL_SKIP)\s*$", re.M)
    ignored = [
        cell
        for cell in shown
        if {"nbval-ignore-output", "nbval-skip"} & set(tags(cell))
        or unseen.search(cell.source)
    ]
    return len(shown) - len(ignored), len(shown)


def colab_cells(notebooks: dict[Path, NotebookNode]) -> dict[str, list[str]]:
    """Returns each distinct Colab set-up cell with the lessons that have it."""
    found: dict[str, list[str]] = {}
    for path, nb in notebooks.items():
        for _, cell in code(nb):
            if "colab-setup" in tags(cell):
                found.setdefault(cell.source, []).append(path.name)
    return found
