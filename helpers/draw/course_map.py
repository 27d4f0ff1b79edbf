"""The map of the course, with the titles that stand in the lessons."""

from pathlib import Path

from helpers.solved import Lesson, progress
from simgpu.pictures import INK, Picture

FAST_TRACK = {0, 3, 4, 16, 18, 24, 25, 28}
ON_RANKS = {3, *range(14, 31)}  # lessons; the others: on simulated GPUs
# the first lesson of each part, its name, and the question that it answers
PARTS = (
    (0, "I. First contact", "Where does a tensor live? How do four GPUs train?"),
    (4, "II. Know one GPU", "What fills its memory, and what takes its time?"),
    (12, "III. Many GPUs, one process", "How far does one Python process get?"),
    (
        14,
        "IV. One process for each GPU",
        "How do ranks divide batches, weights, layers, sequences?",
    ),
    (24, "V. The real world", "What fails, what fits, and what does it cost?"),
)
# the lessons that one builds on, without those that these build on themselves
NEEDS = {
    1: (0,), 2: (1,), 3: (0,), 4: (3,), 5: (4,), 6: (5,), 7: (5,), 8: (7,), 9: (8,),
    10: (4,), 11: (5,), 12: (4,), 13: (5,), 14: (3,), 15: (5, 14), 16: (3,), 17: (16,),
    18: (16,), 19: (15,), 20: (13, 19), 21: (15,), 22: (15, 16), 23: (18, 20),
    24: (16,), 25: (18,), 26: (18,), 27: (23, 26), 28: (18, 24), 29: (17,),
    30: (18, 25),
}  # fmt: skip
_SIMULATED, _RANKS = "#D7EEFA", "#FBE5BF"
_ROW, _WIDE, _HIGH, _GAP, _HEADER = 6, 106, 66, 10, 32  # boxes a row; pixels


def course_map(folder: Path | str = ".") -> Picture:
    """The lessons of the course by parts, each with those that it builds on.

    Lessons of the fast track have a frame.

    Args:
        folder: of the notebooks.

    Taught in 00-start-here.
    """
    parts = _parts(progress(folder))
    rows = sum(-(-len(lessons) // _ROW) for _, _, lessons in parts)
    height = len(parts) * _HEADER + rows * (_HIGH + _GAP) + 34
    picture = Picture(_ROW * (_WIDE + _GAP) + _GAP, height, _say(parts))
    y = 0
    for name, question, lessons in parts:
        picture.text(_GAP, y + 22, name, 14, weight="bold")
        picture.text(picture.width - _GAP, y + 22, question, 13, "end")
        y += _HEADER
        for place, lesson in enumerate(lessons):
            x = _GAP + place % _ROW * (_WIDE + _GAP)
            _box(picture, x, y + place // _ROW * (_HIGH + _GAP), lesson)
        y += -(-len(lessons) // _ROW) * (_HIGH + _GAP)
    _legend(picture, y + 6)
    return picture


def _parts(lessons: list[Lesson]) -> list[tuple[str, str, list[Lesson]]]:
    """Of each part, its name, its question and its lessons."""
    firsts = [first for first, _, _ in PARTS[1:]] + [len(lessons)]
    return [
        (name, question, lessons[first:end])
        for (first, name, question), end in zip(PARTS, firsts, strict=True)
    ]


def _say(parts: list[tuple[str, str, list[Lesson]]]) -> str:
    """The map in words, for those who do not see it."""
    said = [
        f"{name}, lessons {lessons[0].number} to {lessons[-1].number}"
        for name, _, lessons in parts
        if lessons
    ]
    fast = ", ".join(f"{number:02d}" for number in sorted(FAST_TRACK))
    return f"The course in parts: {'; '.join(said)}. The fast track: {fast}"


def _box(picture: Picture, x: float, y: float, lesson: Lesson) -> None:
    number = int(lesson.number)
    if number in FAST_TRACK:
        picture.box(x - 3, y - 3, _WIDE + 6, _HIGH + 6, INK)
    fill = _RANKS if number in ON_RANKS else _SIMULATED
    picture.box(x, y, _WIDE, _HIGH, fill)
    picture.text(x + 7, y + 18, lesson.number, 15, weight="bold")
    if needed := NEEDS.get(number):
        after = ", ".join(f"{each:02d}" for each in needed)
        picture.text(x + _WIDE - 7, y + 17, f"after {after}", 11, "end")
    for row, words in enumerate(_wrap(lesson.title, 12)):
        picture.text(x + 7, y + 34 + 13 * row, words, 12)


def _legend(picture: Picture, y: float) -> None:
    for x, words, fill, frame in (
        (_GAP, "simulated GPUs, one process", _SIMULATED, False),
        (_GAP + 230, "ranks: one process for each GPU", _RANKS, False),
        (_GAP + 490, "fast track", "white", True),
    ):
        if frame:
            picture.box(x - 3, y - 3, 24, 22, INK)
        picture.box(x, y, 18, 16, fill)
        picture.text(x + 28, y + 13, words, 13)


def _wrap(words: str, width: int) -> list[str]:
    lines = [""]
    for word in words.split():
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
