"""Which exercises are solved.

JupyterLab saves a notebook with its outputs, and what an exercise says of an answer is
one of them. So `progress` reads the notebooks as they were last saved, and nothing is
noted anywhere else: a lesson that is fetched anew is unsolved again.
`python3 -m helpers check NN` runs a lesson from its top, changes nothing, and prints
what its exercises say.
"""

import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

from helpers.beside import NOTEBOOKS

SECONDS = 300  # that a cell may take
_SAID = re.compile(r"exercise \d\d\.\d: (right|wrong|not yet|not checked)(: .*)?")
_MARKS = {"right": "●", "wrong": "✗", "not yet": "○", "not checked": "?"}


class Lesson(NamedTuple):
    """A notebook and what its exercises said when it was saved."""

    number: str
    title: str
    said: list[str]  # "right", "wrong", "not yet" or "not checked", in order

    @property
    def solved(self) -> int:
        """How many are right."""
        return self.said.count("right")


class Progress(list):
    """Lessons; a notebook shows a line for each."""

    def __repr__(self) -> str:
        if not self:
            return "There are no lessons in this folder."
        wide = max(len(lesson.title) for lesson in self)
        lines = [
            f"{lesson.number} {lesson.title:{wide}}  "
            + " ".join(_MARKS[said] for said in lesson.said)
            for lesson in self
        ]
        solved = sum(lesson.solved for lesson in self)
        total = sum(len(lesson.said) for lesson in self)
        return "\n".join([*lines, f"solved: {solved} of {total} exercises"])


def progress(folder: "str | Path | None" = None) -> Progress:
    """Which exercises of all lessons are solved, as the notebooks were last saved.

    Args:
        folder: of the notebooks; the current one if None.

    Taught in 00-start-here.
    """
    lessons = Progress()
    for path, cells in _lessons(Path(folder or ".")):
        title = "".join(cells[0]["source"]).splitlines()[0].lstrip("# ")
        said = [_verdict(cell) for cell in cells if _is_exercise(cell)]
        lessons.append(Lesson(path.name[:2], title, said))
    return lessons


def _lessons(folder: Path) -> "list[tuple[Path, list[dict]]]":
    """Each lesson with its cells; of copies, which have longer names, the lesson."""
    found = {}
    for path in sorted(folder.glob("[0-9][0-9]-*.ipynb"), key=lambda p: len(p.name)):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        if any(map(_is_exercise, cells)):  # else it is a reader's own
            found.setdefault(path.name[:2], (path, cells))
    return [found[number] for number in sorted(found)]


def _is_exercise(cell: dict) -> bool:
    return "exercise" in cell["metadata"].get("tags", ())


def _line(cell: dict) -> "re.Match | None":
    """What an exercise's output says."""
    for output in cell.get("outputs", ()):
        text = output.get("data", {}).get("text/plain", output.get("text", ""))
        if found := _SAID.search("".join(text)):
            return found
    return None


def _verdict(cell: dict) -> str:
    found = _line(cell)
    return found[1] if found else "not yet"


# -- from the shell --------------------------------------------------------------------


def run(path: Path) -> bool:
    """Run a lesson in a kernel of its own and print what its exercises say.

    Returns:
        Whether all of them are right.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    # a cell may fail, as in every lesson's "Break it"; the next ones run all the same
    client = NotebookClient(
        notebook, timeout=SECONDS, allow_errors=True, kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(path.parent)}},
    )  # fmt: skip
    client.execute()
    exercises = [cell for cell in notebook.cells if _is_exercise(cell)]
    for number, cell in enumerate(exercises, 1):
        found = _line(cell)
        failed = [o for o in cell.outputs if o.output_type == "error"]
        why = f"{failed[0].ename}: {failed[0].evalue}" if failed else "it says nothing"
        name = f"exercise {path.name[:2]}.{number}"
        print(found[0] if found else f"{name}: wrong: {why}", flush=True)
    return all(_verdict(cell) == "right" for cell in exercises)


def find(number: str) -> Path:
    """The notebook of a lesson.

    Raises:
        SystemExit: if there is none; the message says which there are.
    """
    lessons = [path for path, _ in _lessons(NOTEBOOKS)]
    found = [path for path in lessons if number and path.name[:2] == number.zfill(2)]
    if not found:
        numbers = ", ".join(path.name[:2] for path in lessons)
        raise SystemExit(f"There is no lesson {number!r}; there are {numbers}.")
    return found[0]


if __name__ == "__main__":
    sys.exit(not run(find(sys.argv[1])))
