"""The map of the course, with the titles that stand in the lessons."""

from pathlib import Path

from helpers.solved import progress
from simgpu.pictures import Picture

FAST_TRACK = {0, 3, 4, 16, 18, 24, 25, 27}
ON_RANKS = {3, *range(14, 29)}  # lessons; the others: on simulated GPUs


def course_map(folder: Path | str = ".") -> Picture:
    """The lessons of the course, five a row, with the titles that stand in them.

    Lessons of the fast track say so.

    Args:
        folder: of the notebooks.

    Taught in 00-start-here.
    """
    lessons = progress(folder)
    rows = -(-len(lessons) // 5)
    simulated, ranks = "#D7EEFA", "#FBE5BF"
    width, height, gap = 130, 80, 8
    title = (
        f"The course: {len(lessons)} lessons, on simulated GPUs (blue) or real ranks "
        "(orange)"
    )
    picture = Picture(5 * (width + gap) + gap, rows * (height + gap) + 44, title)
    for place, lesson in enumerate(lessons):
        x = gap + (place % 5) * (width + gap)
        y = gap + (place // 5) * (height + gap)
        fill = ranks if int(lesson.number) in ON_RANKS else simulated
        picture.box(x, y, width, height, fill)
        picture.text(x + 8, y + 19, lesson.number, 15, weight="bold")
        if int(lesson.number) in FAST_TRACK:
            picture.text(x + width - 8, y + 18, "fast track", 12, "end")
        for row, words in enumerate(_wrap(lesson.title, 14)):
            picture.text(x + 8, y + 38 + 17 * row, words, 14)
    y = rows * (height + gap) + 14
    for x, words, fill in (
        (gap, "on simulated GPUs", simulated),
        (gap + 180, "on real ranks (processes)", ranks),
    ):
        picture.box(x, y, 18, 16, fill)
        picture.text(x + 26, y + 13, words)
    return picture


def _wrap(words: str, width: int) -> list[str]:
    lines = [""]
    for word in words.split():
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
