"""Runs lessons again and stores their outputs, with the smallest possible diff.

    python -m tests.tools.regenerate             every lesson
    python -m tests.tools.regenerate 01 02       these lessons
    python -m tests.tools.regenerate --check     write nothing; exit 1 if one is stale

Each lesson runs in a fresh kernel, in the environment of the tests, with simulated
GPUs. An old output stays when the new one equals it after sanitize.cfg, a picture stays
unless it visibly changed, the output of a cell tagged nbval-ignore-output stays while
it has the same shape, and numbers of one tagged floating-point while they differ in
their last place only. When a cell raises without the tag raises-exception,
nothing at all is written. stderr is stored like any other output: the rules for lessons
forbid it, and hiding it here would hide its cause.
"""

import argparse
import base64
import io
import itertools
import re
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from nbval.plugin import get_sanitize_patterns
from PIL import Image, ImageChops

from support import checkout
from tests.harness import numbers
from tests.harness.kernels import kernel_settings
from tests.harness.notebooks import SANITIZER
from tests.harness.processes import end_processes, fix_environment, kernel_environment
from tests.lesson_rules import CELL_METADATA, METADATA

ROOT = Path(__file__).resolve().parents[2]
SECONDS_PER_CELL = 180
WIDGET = "application/vnd.jupyter.widget-view+json"
PATTERNS = get_sanitize_patterns(SANITIZER.read_text(encoding="utf-8"))
ANSI = re.compile(r"\x1b\[[0-9;]*m")
LIBRARY = re.compile(r"[~/][^\s:'\"]*/(?:site-packages|dist-packages|python3\.\d+)/")
RANDOM_ID = re.compile(r"[0-9a-f]{8}(-?[0-9a-f]{4}){0,3}(-?[0-9a-f]{12})?")


# -- run -------------------------------------------------------------------------------


def execute(nb: NotebookNode, folder: Path) -> None:
    """Runs all cells in a fresh kernel, which leaves no process behind."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="kernel-") as sockets:
        client = NotebookClient(
            nb,
            km=AsyncKernelManager(**kernel_settings(Path(sockets))),
            timeout=SECONDS_PER_CELL,
            record_timing=False,
            resources={"metadata": {"path": str(folder)}},
        )
        try:
            client.execute(env=kernel_environment(mark), cleanup_kc=True)
        finally:
            end_processes(mark)


# -- tidy ------------------------------------------------------------------------------


def name_cells(cells: list[NotebookNode], lesson: str) -> None:
    """Gives `NN-07` to the eighth cell, unless it has a name already.

    A name that is there stays, wherever its cell moves; missing, repeated and random
    ones are replaced. A number in use is skipped, so inserting a cell renames none.
    """
    used: set[str] = set()
    for cell in cells:
        if RANDOM_ID.fullmatch(cell.get("id", "")) or cell.get("id") in used:
            cell["id"] = ""
        used.add(cell.setdefault("id", ""))
    for number, cell in enumerate(cells):
        if not cell["id"]:
            names = (f"{lesson}-{n:02d}" for n in itertools.count(number))
            cell["id"] = next(name for name in names if name not in used)
            used.add(cell["id"])


def tidy_traceback(line: str) -> str:
    """Drops colours and the folders of this machine."""
    line = LIBRARY.sub("", ANSI.sub("", line))
    for root in (str(ROOT), str(ROOT).replace(str(Path.home()), "~", 1)):
        line = line.replace(f"{root}/", "")
    return line


def tidy_outputs(outputs: list[NotebookNode], count: int) -> list[NotebookNode]:
    """Returns the outputs of a cell as they are stored."""
    tidy: list[NotebookNode] = []
    for output in outputs:
        output.get("data", {}).pop(WIDGET, None)  # its random id means nothing later
        if "execution_count" in output:
            output["execution_count"] = count
        if "traceback" in output:
            output["traceback"] = [tidy_traceback(line) for line in output.traceback]
        last = tidy[-1] if tidy else None
        if last and output.output_type == "stream" and last.get("name") == output.name:
            last["text"] += output.text  # where a stream is split is chance
        else:
            tidy.append(output)
    return tidy


# -- compare with the old outputs ------------------------------------------------------


def sanitized(text: str) -> str:
    """Returns the text as nbval compares it."""
    for pattern, replacement in PATTERNS:
        text = re.sub(pattern, replacement, text)
    return text


def shape(text: str) -> str:
    """Returns the text without what may change from one measurement to the next."""
    text = re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "0", text)
    text = re.sub(r"(nano|micro|milli)?seconds \([num]?s\)", "seconds", text)
    return re.sub(r"-+", "-", re.sub(r"\s+", " ", text))


def same_picture(old: str, new: str) -> bool:
    """Whether a reader would see the same in two PNGs in base64."""
    one, two = (
        Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
        for png in (old, new)
    )
    if one.size != two.size:
        return False
    return all(high <= 32 for _, high in ImageChops.difference(one, two).getextrema())


def compared(output: NotebookNode, view: Callable[[str], str]) -> dict[str, object]:
    """Returns all that is compared of an output, but for its picture."""
    texts = {name: output.get(name, "") for name in ("text", "evalue")}
    texts |= output.get("data", {})
    found = {
        name: view(value) if isinstance(value, str) else value
        for name, value in texts.items()
        if name != "image/png"
    }
    for name in ("output_type", "name", "ename", "metadata"):
        found[name] = output.get(name)
    return found


def same_output(old: NotebookNode, new: NotebookNode, ignored: bool) -> bool:
    """Whether a reader, and nbval, would take the two for the same output."""
    view = shape if ignored else sanitized
    before, after = (o.get("data", {}).get("image/png") for o in (old, new))
    if compared(old, view) != compared(new, view) or bool(before) != bool(after):
        return False
    return ignored or not before or same_picture(before, after)


def keep_old(old: list, new: list, ignored: bool) -> list[NotebookNode]:
    """Returns the new outputs, with the old one wherever nothing has changed."""
    if len(old) != len(new):
        return new
    pairs = list(zip(old, new, strict=True))
    equal = [same_output(a, b, ignored) for a, b in pairs]
    if ignored and not all(equal):
        return new  # parts of two measurements do not belong together
    return [a if keep else b for (a, b), keep in zip(pairs, equal, strict=True)]


# -- the command -----------------------------------------------------------------------


def regenerate(path: Path) -> str:
    """Returns what the file should contain."""
    nb = nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)
    old = [nbformat.from_dict(cell.get("outputs", [])) for cell in nb.cells]
    nb.nbformat_minor = 5
    name_cells(nb.cells, path.name[:2])
    execute(nb, path.parent)
    nb.metadata = nbformat.from_dict(METADATA)
    count = 0
    for cell, before in zip(nb.cells, old, strict=True):
        kept = CELL_METADATA & set(cell.metadata)
        cell.metadata = nbformat.from_dict({key: cell.metadata[key] for key in kept})
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        fresh, before = tidy_outputs(cell.outputs, count), tidy_outputs(before, count)
        tags = cell.metadata.get("tags", [])
        if numbers.TAG in tags:
            fresh = numbers.outputs_as_stored(fresh, before)
        cell.outputs = keep_old(before, fresh, "nbval-ignore-output" in tags)
    return nbformat.writes(nb).rstrip("\n") + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.regenerate",
        description="Runs lessons again and stores their outputs.",
    )
    parser.add_argument("lessons", nargs="*", metavar="NN", help="numbers; none: all")
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(arguments)
    paths = checkout.here(ROOT / "notebooks", "[0-9][0-9]*.ipynb")
    if unknown := set(args.lessons) - {path.name[:2] for path in paths}:
        parser.error(f"no lesson has the number {', '.join(sorted(unknown))}")
    if args.lessons:
        paths = [path for path in paths if path.name[:2] in args.lessons]

    fix_environment()
    changed: dict[Path, str] = {}
    for path in paths:
        try:
            text = regenerate(path)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            print(f"{path.name}: stopped, nothing was written")
            print(ANSI.sub("", str(error)))
            return 1
        if text != path.read_text(encoding="utf-8"):
            changed[path] = text
        print(f"{path.name}: {'changed' if path in changed else 'as stored'}")
    if args.check:
        return int(bool(changed))
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
