"""Claims and their cases: which case holds, which fails, which is open, the verdict."""

import textwrap
from collections.abc import Callable, Mapping

from simgpu.pictures import COLOURS, HOST, WIDEST, Picture

_LEFT, _RIGHT, _LINE, _TOP = 186, 122, 14, 34  # pixels
_LETTER = 6.2  # pixels of a letter of size 10, with what is free beside a word
_LOOKS = {
    True: ("holds", COLOURS[2], False),
    False: ("fails", "white", True),
    None: ("open", HOST, False),
}


def verdicts(
    judged: Mapping[str, Mapping[str, bool | None]],
    verdict: Callable[[Mapping[str, bool | None]], str],
) -> Picture:
    """A row for each claim: a box for each case, and what follows from them.

    A case that holds is filled, one that fails is dashed, an open one is gray.

    Args:
        judged: claim -> case -> whether it holds; None: open.
        verdict: the words for the cases of a claim; "true when …" is cut there.

    Taught in 30-an-hour-on-real-gpus.
    """
    said = {claim: _short(verdict(cases)) for claim, cases in judged.items()}
    spoken = "; ".join(
        f"{claim}: {said[claim]} ({_count(cases)})" for claim, cases in judged.items()
    )
    most = max(map(len, judged.values()), default=1) or 1
    width = (WIDEST - _LEFT - _RIGHT) / most
    wrapped = {
        claim: [
            textwrap.wrap(case, max(8, int((width - 8) / _LETTER))) for case in cases
        ]
        for claim, cases in judged.items()
    }
    lines = [2, *(len(words) for cases in wrapped.values() for words in cases)]
    row = _LINE * max(lines) + 16
    picture = Picture(WIDEST, _TOP + row * len(judged) + 4, f"Claims. {spoken}")
    for place, (word, fill, dashed) in enumerate(_LOOKS.values()):
        x = _LEFT + 110 * place
        picture.box(x, 8, 22, 14, fill, dashed)
        picture.text(x + 28, 20, word, 12)
    for place, (claim, cases) in enumerate(judged.items()):
        y = _TOP + row * place
        middle = y + (row - 8) / 2
        _lines(picture, 8, middle, textwrap.wrap(claim, 25), 12, "start")
        for column, holds in enumerate(cases.values()):
            _, fill, dashed = _LOOKS[holds]
            x = _LEFT + column * width
            picture.box(x + 2, y, width - 4, row - 8, fill, dashed)
            words = wrapped[claim][column]
            _lines(picture, x + width / 2, middle, words, 10, "middle")
        words = textwrap.wrap(said[claim], 14)
        x = WIDEST - _RIGHT + 8
        _lines(picture, x, middle, words, 12, "start", weight="bold")
    return picture


def _lines(picture: Picture, x, y, words: list[str], size: int, anchor, **look) -> None:
    """Lines of text around the height y."""
    for place, line in enumerate(words):
        lower = _LINE * (place - (len(words) - 1) / 2)
        picture.text(x, y + lower + 4, line, size, anchor, **look)


def _short(words: str) -> str:
    return "true when …" if words.startswith("true when") else words


def _count(cases: Mapping[str, bool | None]) -> str:
    found = list(cases.values())
    return ", ".join(
        f"{found.count(holds)} {word}"
        for holds, (word, *_) in _LOOKS.items()
        if found.count(holds)
    )
