"""Pages about simgpu: its README in parts, the pages beside it, and its API.

The README of a package is one long page, which the site cuts at its headings. The API
is read off the source (signatures, types and docstrings), without importing it, so
that the site needs no PyTorch.
"""

import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "simgpu" / "src"
README = "simgpu/README.md"
FIRST, API = "simgpu", "simgpu-api"  # pages

# A heading of the README -> the page that begins there. Other headings stay on `FIRST`.
CUTS = {
    "One rank of a thousand: will it fit?": "simgpu-dry-run",
    "Which layout, of a thousand?": "simgpu-plan",
    "In tests": "simgpu-in-tests",
    "The same on any number of ranks?": "simgpu-prove",
    "Measure your own machine": "simgpu-measure",
    "How close is it?": "simgpu-how-close",
}
BESIDE = {
    "simgpu/WHAT-RUNS.md": "simgpu-what-runs",
    "simgpu/HOW-IT-WORKS.md": "simgpu-how-it-works",
    "simgpu/ADD-A-CARD.md": "simgpu-add-a-card",
    "simgpu/FIGURES.md": "simgpu-figures",
    "simgpu/CHANGELOG.md": "simgpu-changes",
}
PAGES = [FIRST, *CUTS.values(), *BESIDE.values()]
PAGES.insert(PAGES.index("simgpu-changes"), API)

# The public names, as the page of the API groups them; tests/test_site.py has all.
GROUPS = {
    "GPUs of this process": [
        "start", "stop", "is_running", "count", "request", "Request", "check_request",
        "real_gpus", "installed", "host_busy", "cap_memory",
    ],
    "Ranks": [
        "Ranks", "run_ranks", "current_ranks", "close_ranks", "Messages", "Message",
    ],
    "What ran": [
        "timeline", "Timeline", "Event", "Wait", "Totals", "JobTimeline", "Lane",
        "RankLog",
    ],
    "Before you run it": [
        "dry_run", "DryReport", "estimate", "Estimate", "Kernels",
        "estimate_collective", "plan", "Plan", "PlannedLayout", "prove", "Report",
        "Finding", "assert_same_on_worlds",
    ],
    "Cards and networks": [
        "CARDS", "Card", "find_card", "Network", "CachingAllocator", "parse_memory",
        "show_bytes",
    ],
    "Errors": [
        "NotSimulated", "RaceError", "RankError", "RanksFailed", "DryRunFailed",
        "hide_frames", "is_program_code",
    ],
}  # fmt: skip
MODULES = ["costs", "pictures", "pytest_plugin"]


# --- The README -------------------------------------------------------------------


def chapters(readme: str) -> dict[str, str]:
    """Cut the README into pages.

    Returns:
        Page -> its Markdown. A heading that begins a page is the page's title.

    Raises:
        ValueError: if a heading of `CUTS` is missing.
    """
    pages = {FIRST: ""}
    page = FIRST
    for piece in re.split(r"^(?=## )", readme, flags=re.MULTILINE):
        title = re.match(r"## (.+)", piece)
        page = CUTS.get(title[1], FIRST) if title else FIRST
        if page != FIRST:
            piece = piece[1:]  # "## In tests" becomes "# In tests"
        pages[page] = pages.get(page, "") + piece
    if lost := set(CUTS.values()) - set(pages):
        raise ValueError(f"{README} has no heading for {sorted(lost)}")
    return pages


def page_of(place: str, anchor: str) -> str | None:
    """The page with this place of a file, None if the site does not have the file."""
    if place == README:
        return {slug(title): page for title, page in CUTS.items()}.get(anchor, FIRST)
    return BESIDE.get(place)


def slug(title: str) -> str:
    """The anchor of a heading."""
    return "#" + re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


# --- The API ----------------------------------------------------------------------


def api() -> str:
    """Write the page of the API, as Markdown."""
    import griffe

    package = griffe.load(
        "simgpu", search_paths=[SOURCES], allow_inspection=False,
        docstring_parser="google",
        docstring_options={
            "warnings": False, "returns_multiple_items": False,
            "returns_named_value": False,
        },
    )  # fmt: skip
    lines = ["# API", "", *text_of(package)]
    for title, names in GROUPS.items():
        lines += ["", f"## {title}"]
        for name in names:
            lines += entry(f"simgpu.{name}", package.members[name], 3)
    for name in MODULES:
        module = package.members[name]
        lines += ["", f"## simgpu.{name}", "", *text_of(module)]
        for member, found in public(module):
            lines += entry(f"{name}.{member}", found, 3)
    return "\n".join(lines) + "\n"


def public(module: Any) -> Iterator[tuple[str, Any]]:
    """The public names of a module that say something of themselves."""
    own = [name for name, found in module.members.items() if not found.is_alias]
    for name in map(str, module.exports or own):
        found = target(module.members[name])
        if not name.startswith(("_", "pytest_")) and found.docstring:
            yield name, found


def target(found: Any) -> Any:
    """What an imported name means."""
    return found.final_target if found.is_alias else found


def entry(name: str, found: Any, level: int) -> Iterator[str]:
    """Lines about a function, a class with its methods, or a constant."""
    found = target(found)
    yield from ("", f"{'#' * level} `{name}`", "", "```python")
    yield from signature(name.rpartition(".")[2], found)
    yield from ("```", "", *text_of(found))
    if found.is_class:
        for member, method in found.members.items():
            documented = not method.is_alias and method.docstring
            if documented and not member.startswith("_") and not method.is_class:
                yield from entry(f"{found.name}.{member}", method, level + 1)


def signature(name: str, found: Any) -> list[str]:
    """How it is called, or what it is, over as many lines as it needs."""
    if found.is_attribute:
        return [declared(name, found)]
    if not found.is_class:
        returns = f" -> {found.returns}" if found.returns else ""
        return call(name, arguments(found), returns)
    if "__init__" in found.members:
        return call(f"class {name}", arguments(found.members["__init__"]))
    bases = ", ".join(map(str, found.bases))
    fields = [
        "    " + declared(field, attribute)
        for field, attribute in found.members.items()
        if attribute.is_attribute and attribute.annotation
        if not field.startswith("_") and "property" not in attribute.labels
    ]
    head = f"class {name}({bases})" if bases else f"class {name}"
    return [f"{head}:", *fields] if fields else [head]


def declared(name: str, attribute: Any) -> str:
    """A constant or a field with its type, and a default that is short."""
    text = f"{name}: {attribute.annotation}" if attribute.annotation else name
    value = str(attribute.value) if attribute.value is not None else ""
    return f"{text} = {value}" if 0 < len(value) <= 24 else text


def call(head: str, parameters: list[str], returns: str = "") -> list[str]:
    """A call in one line, or with a line for each parameter."""
    line = f"{head}({', '.join(parameters)}){returns}"
    if len(line) <= 88:
        return [line]
    return [f"{head}(", *(f"    {each}," for each in parameters), f"){returns}"]


def arguments(function: Any) -> list[str]:
    """The parameters as they are written, without `self`."""
    written, stars = [], {"variadic positional": "*", "variadic keyword": "**"}
    named_only = False
    for each in function.parameters:
        kind = each.kind.value
        if each.name in ("self", "cls") and not written:
            continue
        if kind == "keyword-only" and not named_only:
            written.append("*")
        named_only |= kind in ("keyword-only", "variadic positional")
        text = stars.get(kind, "") + each.name.lstrip("*")
        if each.annotation:
            text += f": {each.annotation}"
        if each.default is not None and kind not in stars:
            text += f" = {each.default}" if each.annotation else f"={each.default}"
        written.append(text)
    return written


def text_of(found: Any) -> list[str]:
    """The docstring as Markdown."""
    if not found.docstring:
        return []
    lines: list[str] = []
    for section in found.docstring.parsed:
        write: Callable[[Any], list[str]] = WRITERS.get(section.kind.value, _list)
        lines += [*write(section), ""]
    return lines


def _text(section: Any) -> list[str]:
    return [section.value]


def _list(section: Any) -> list[str]:
    """Parameters, attributes, what is returned or raised."""
    title = {"parameters": "Arguments"}.get(
        section.kind.value, section.kind.value.capitalize()
    )
    lines = [f"**{title}**", ""]
    for item in section.value:
        said = textwrap.indent(item.description.strip(), "  ").strip()
        if section.kind.value in ("returns", "yields"):  # the type is in the signature
            lines.append(item.description.strip())
        elif section.kind.value == "raises":
            lines.append(f"* `{item.annotation}`: {said}")
        else:
            lines.append(f"* `{item.name}`: {said}")
    return lines


def _admonition(section: Any) -> list[str]:
    return [f"**{section.title or section.value.kind}** {section.value.description}"]


WRITERS = {"text": _text, "admonition": _admonition}
