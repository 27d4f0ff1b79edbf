"""How long a lesson takes to read, by one rule: `python -m tests.reading_time [NN …]`.

A hundred words a minute, 8 s for each visible line of code, 3 s for each line of output
(of 15 lines a cell at most), 45 s for each picture. Exercises, link targets, badges and
the set-up for Colab do not count. The rule is what readers of the second edition took.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from tests.lessons import lessons

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
BADGE = re.compile(r"\[!\[[^\]]*\]\([^)]*\)\]\([^)]*\)")
TARGET = re.compile(r"\]\([^)]*\)")
EXERCISES = re.compile(r"^## Exercises\b")
SECTION = re.compile(r"^## ", re.M)
PICTURES = {"image/svg+xml", "image/png", "text/html"}
ANSI = re.compile(r"\x1b\[[\d;]*m")


@dataclass(frozen=True)
class ReadingTime:
    """What there is to read in a lesson, without its exercises."""

    words: int
    code_lines: int
    output_lines: int
    pictures: int

    @property
    def minutes(self) -> float:
        seconds = 8 * self.code_lines + 3 * self.output_lines + 45 * self.pictures
        return self.words / 100 + seconds / 60

    @property
    def stated(self) -> int:
        """The minutes as a lesson's first line says them: to the nearest five."""
        return 5 * round(self.minutes / 5)


def is_exercise(cells: list[NotebookNode]) -> list[bool]:
    """Says of each cell whether it is in the section `## Exercises`."""
    inside, found = False, []
    for cell in cells:
        if cell.cell_type == "markdown" and SECTION.search(cell.source):
            inside = EXERCISES.match(cell.source) is not None
        found.append(inside)
    return found


def lines(text: str) -> int:
    return sum(bool(line.strip()) for line in text.splitlines())


def output_of(cell: NotebookNode) -> tuple[int, int]:
    """Returns how many lines a cell prints, and how many pictures it shows."""
    printed, pictures = 0, 0
    for output in cell.outputs:
        data = output.get("data", {})
        if PICTURES & set(data):
            pictures += 1
        else:
            text = output.get("text", "") or data.get("text/plain", "")
            printed += lines(
                ANSI.sub("", text + "\n".join(output.get("traceback", [])))
            )
    return min(printed, 15), pictures


def of(nb: NotebookNode) -> ReadingTime:
    words = code_lines = output_lines = pictures = 0
    for cell, exercise in zip(nb.cells, is_exercise(nb.cells), strict=True):
        if exercise or "colab-setup" in cell.metadata.get("tags", []):
            continue
        if cell.cell_type == "markdown":
            fenced = "".join(FENCE.findall(cell.source))
            code_lines += lines(fenced) - 2 * len(FENCE.findall(cell.source))
            text = TARGET.sub("]", BADGE.sub("", FENCE.sub("", cell.source)))
            words += sum(bool(re.search(r"\w", word)) for word in text.split())
        elif cell.cell_type == "code":
            if not cell.metadata.get("jupyter", {}).get("source_hidden"):
                code_lines += lines(cell.source)
            printed, shown = output_of(cell)
            output_lines += printed
            pictures += shown
    return ReadingTime(words, code_lines, output_lines, pictures)


def main(numbers: list[str]) -> None:
    print("words, lines of code, lines of output, pictures, minutes")
    for path in lessons():
        if not numbers or path.name[:2] in numbers:
            time = of(nbformat.read(path, as_version=4))
            counts = f"{time.words:5} {time.code_lines:4} {time.output_lines:4}"
            print(f"{path.stem:38} {counts} {time.pictures:3} {time.minutes:6.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])
