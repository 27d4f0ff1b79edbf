"""Re-runs lessons and stores their fresh outputs, with the smallest possible diff.

    python tests/regenerate.py             every lesson
    python tests/regenerate.py 01 02       these lessons
    python tests/regenerate.py --check     write nothing; exit 1 if a file is stale

Each lesson runs in a fresh kernel, in the environment of the tests, with simulated
GPUs. An old output stays when the new one equals it after tests/sanitize.cfg, a
picture stays unless it visibly changed, and the output of a cell tagged
nbval-ignore-output stays while it has the same shape. When a cell raises without the
tag raises-exception, nothing at all is written. stderr is stored like any other
output: the hygiene tests complain of it, and hiding it here would hide its cause.
"""

import argparse
import base64
import io
import re
import sys
import uuid
from pathlib import Path

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import (
    CellExecutionError,
    CellTimeoutError,
    DeadKernelError,
)
from nbformat import NotebookNode
from nbplus import SANITIZER, kernel_environment, reap, settle_environment
from nbval.kernel import CURRENT_ENV_KERNEL_NAME, NbvalKernelspecManager
from nbval.plugin import get_sanitize_patterns
from PIL import Image, ImageChops

ROOT = Path(__file__).resolve().parents[1]
SECONDS_PER_CELL = 180
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
WIDGET = "application/vnd.jupyter.widget-view+json"
PATTERNS = get_sanitize_patterns(SANITIZER.read_text(encoding="utf-8"))
ANSI = re.compile(r"\x1b\[[0-9;]*m")
LIBRARY = re.compile(r"[~/][^\s:'\"]*/(?:site-packages|dist-packages|python3\.\d+)/")
RANDOM_ID = re.compile(r"[0-9a-f]{8}(-?[0-9a-f]{4}){0,3}(-?[0-9a-f]{12})?")


def execute(nb: NotebookNode, folder: Path) -> None:
    """Runs all cells in a fresh kernel, which leaves no process behind."""
    mark = uuid.uuid4().hex
    client = NotebookClient(
        nb,
        km=AsyncKernelManager(
            kernel_name=CURRENT_ENV_KERNEL_NAME,
            kernel_spec_manager=NbvalKernelspecManager(),
        ),
        timeout=SECONDS_PER_CELL,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    try:
        client.execute(env=kernel_environment(mark), cleanup_kc=True)
    finally:
        reap(mark)


def name_cells(cells: list[NotebookNode], lesson: str) -> None:
    """Gives `NN-07` to the eighth cell, unless it has a name already.

    A name that is there stays, wherever its cell moves; missing, repeated and random
    ones are replaced. A number in use is skipped, so inserting a cell renames none.
    """
    used: set[str] = set()
    for cell in cells:
        name = cell.get("id", "")
        if RANDOM_ID.fullmatch(name) or name in used:
            name = ""
        cell["id"] = name
        used.add(name)
    for number, cell in enumerate(cells):
        while not cell["id"]:
            name = f"{lesson}-{number:02d}"
            if name not in used:
                cell["id"] = name
                used.add(name)
            number += 1


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
    """Would a reader see the same? Both are PNGs in base64."""
    one, two = (
        Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
        for png in (old, new)
    )
    if one.size != two.size:
        return False
    return all(high <= 32 for _, high in ImageChops.difference(one, two).getextrema())


def same_output(old: NotebookNode, new: NotebookNode, ignored: bool) -> bool:
    """Would a reader, and nbval, take the two for the same output?"""
    view = shape if ignored else sanitized
    kind = ("output_type", "name", "ename")
    if any(old.get(key) != new.get(key) for key in kind):
        return False
    if view(old.get("text", "")) != view(new.get("text", "")):
        return False
    if view(old.get("evalue", "")) != view(new.get("evalue", "")):
        return False
    before, after = old.get("data", {}), new.get("data", {})
    if set(before) != set(after) or old.get("metadata") != new.get("metadata"):
        return False
    for mime in before:
        if mime == "image/png":
            equal = ignored or same_picture(before[mime], after[mime])
        elif isinstance(before[mime], str):
            equal = view(before[mime]) == view(after[mime])
        else:
            equal = before[mime] == after[mime]
        if not equal:
            return False
    return True


def keep_old(old: list, new: list, ignored: bool) -> list[NotebookNode]:
    """Returns the new outputs, with the old one wherever nothing has changed."""
    if len(old) != len(new):
        return new
    pairs = list(zip(old, new, strict=True))
    equal = [same_output(a, b, ignored) for a, b in pairs]
    if ignored and not all(equal):
        return new  # parts of two measurements do not belong together
    return [a if keep else b for (a, b), keep in zip(pairs, equal, strict=True)]


def regenerate(path: Path) -> str:
    """Returns what the file should contain."""
    nb = nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)
    old = [nbformat.from_dict(cell.get("outputs", [])) for cell in nb.cells]
    nb.nbformat_minor = 5
    name_cells(nb.cells, path.name[:2])
    execute(nb, path.parent)
    nb.metadata = nbformat.from_dict(
        {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    )
    count = 0
    for cell, before in zip(nb.cells, old, strict=True):
        kept = {"tags", "jupyter", "cellView"} & set(cell.metadata)
        cell.metadata = nbformat.from_dict({key: cell.metadata[key] for key in kept})
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        fresh = tidy_outputs(cell.outputs, count)
        ignored = "nbval-ignore-output" in cell.metadata.get("tags", [])
        cell.outputs = keep_old(tidy_outputs(before, count), fresh, ignored)
    return nbformat.writes(nb).rstrip("\n") + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Re-run lessons, store their outputs.")
    parser.add_argument("lessons", nargs="*", metavar="NN", help="numbers; none: all")
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    paths = sorted((ROOT / "notebooks").glob("*.ipynb"))
    if unknown := set(args.lessons) - {path.name[:2] for path in paths}:
        parser.error(f"no lesson has the number {', '.join(sorted(unknown))}")
    if args.lessons:
        paths = [path for path in paths if path.name[:2] in args.lessons]

    settle_environment()
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
