"""The layouts of a sweep: a command with braces, and what stands in them.

    --tp {1,2,4}              an axis called "tp", of three values
    --kinds pp={pp} --pp {1,2,4}    the second brace makes the axis, the first uses it
    {size:8B,70B} {size:32,80}      one axis, whose values stand at two places
    {--fp8,}                  a word, or none
    {1..8}                    whole numbers
    {{literal}}               braces that are the program's own

Nothing here needs PyTorch.
"""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

MOST = 10_000
_BRACE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_KEY = re.compile(r"([A-Za-z][\w.-]*)=[^=]*$")
_OPTION = re.compile(r"--?[A-Za-z]")
_UNITS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}
_QUOTES = (
    "put the command, or each word with braces, in single quotes: a shell makes "
    "several words of {1,2} otherwise"
)


class Values(NamedTuple):
    """What a brace stands for: values, or the axis of another brace."""

    axis: str
    values: tuple[str, ...] = ()


class Layout(NamedTuple):
    """One command of a sweep, with a value of each axis."""

    number: int
    values: dict[str, str]
    words: list[str]


Part = str | Values


class Sweep:
    """All layouts of a command.

    Args:
        words: of the command, with braces.

    Attributes:
        axes: name -> values as they are written, in the order of the command.

    Raises:
        ValueError: with what to write instead.
    """

    def __init__(self, words: Sequence[str]):
        self._parts = _parse(words)
        braces = [p for word in self._parts for p in word if isinstance(p, Values)]
        if not braces:
            raise ValueError(
                "there are no braces in the command, so there is nothing to choose "
                f"from; write --batch {{1,2,4}} and {_QUOTES}"
            )
        self.axes: dict[str, tuple[str, ...]] = {}
        for brace in braces:
            if not brace.values:
                continue
            first = self.axes.setdefault(brace.axis, brace.values)
            if len(first) != len(brace.values):
                raise ValueError(
                    f"{_written(brace)}: the axis {brace.axis} has {len(first)} values "
                    f"elsewhere ({','.join(first)}); give as many at each place"
                )
        for brace in braces:
            if brace.axis not in self.axes:
                raise ValueError(_unknown(brace.axis, self.axes))
        count = math.prod(map(len, self.axes.values()))
        if count > MOST:
            sizes = " x ".join(str(len(values)) for values in self.axes.values())
            raise ValueError(
                f"{sizes} are {count:,} layouts, and at most {MOST:,} are run; leave "
                "some values out"
            )

    def layouts(self) -> Iterator[Layout]:
        """All of them, the last axis varying fastest."""
        ranges = [range(len(values)) for values in self.axes.values()]
        for number, places in enumerate(itertools.product(*ranges)):
            at = dict(zip(self.axes, places, strict=True))
            values = {axis: self.axes[axis][place] for axis, place in at.items()}
            yield Layout(number, values, list(self._words(at)))

    def _words(self, at: dict[str, int]) -> Iterator[str]:
        for parts in self._parts:
            text = ""
            for part in parts:
                if isinstance(part, Values):
                    part = (part.values or self.axes[part.axis])[at[part.axis]]
                text += part
            if text or not any(isinstance(part, Values) for part in parts):
                yield text


def amount(value: str, values: Sequence[str]) -> float:
    """How large a value of an axis is: its number, or its place where not all are."""
    numbers = [_number(its) for its in values]
    if None in numbers:
        return values.index(value)
    return numbers[values.index(value)]


def _number(value: str) -> float | None:
    unit = value[-1:].lower()
    digits = value[:-1] if unit in _UNITS and unit else value
    try:
        return float(digits) * _UNITS.get(unit, 1)
    except ValueError:
        return None


def _parse(words: Sequence[str]) -> list[list[Part]]:
    """Each word as its parts, text and braces."""
    found: list[list[Part]] = []
    texts = [_pieces(word) for word in words]
    named = {name for pieces in texts for p in pieces if (name := _own_name(p))}
    taken: set[str] = set()
    for place, pieces in enumerate(texts):
        parts: list[Part] = []
        for piece in pieces:
            if isinstance(piece, str):
                parts.append(piece)
                continue
            (inside,) = piece
            name = _own_name(piece)
            listed = inside[len(name) + 1 :] if name else inside
            values = _values(listed, f"{{{inside}}}")
            if len(values) == 1 and not name and _NAME.fullmatch(listed):
                parts.append(Values(listed))  # the axis of that name
                continue
            if not name:
                name = _name_of(words, place, parts, values)
                if name not in named:
                    name = _free(name, taken)
            taken.add(name)
            parts.append(Values(name, values))
        found.append(parts)
    return found


def _pieces(word: str) -> list[str | tuple[str]]:
    """A word cut at its braces, of which each is a tuple of what stands in it."""
    pieces: list[str | tuple[str]] = []
    text, last = "", 0
    for match in _BRACE.finditer(word):
        text += word[last : match.start()]
        last = match.end()
        whole = match.group()
        if whole in ("{{", "}}"):
            text += whole[0]
        elif match.group(1) is None:
            raise ValueError(
                f"{word}: a brace has no other end; braces of the program's own are "
                "written twice, {{ and }}"
            )
        else:
            pieces += [text, (match.group(1),)]
            text = ""
    return [*pieces, text + word[last:]]


def _own_name(piece: str | tuple[str]) -> str:
    """ "size" of {size:8B,70B}; else ""."""
    if isinstance(piece, str):
        return ""
    name, colon, _ = piece[0].partition(":")
    return name if colon and _NAME.fullmatch(name) else ""


def _values(listed: str, written: str) -> tuple[str, ...]:
    if match := _RANGE.fullmatch(listed):
        first, last = map(int, match.groups())
        if not first <= last < first + MOST:
            raise ValueError(f"{written}: write a range such as {{1..8}}, upwards")
        return tuple(map(str, range(first, last + 1)))
    values = tuple(value.strip() for value in listed.split(","))
    if not any(values):
        raise ValueError(
            f"{written}: nothing stands between the braces; write {{1,2,4}}, or "
            "{{}} for braces of the program's own"
        )
    twice = [value for value in values if values.count(value) > 1]
    if twice:
        raise ValueError(f"{written}: {twice[0] or 'nothing'} stands there twice")
    return values


def _name_of(words: Sequence[str], place: int, parts: list, values) -> str:
    """How an axis is called: after the option whose value it is, or that it is."""
    before = "".join(part for part in parts if isinstance(part, str))
    if key := _KEY.search(before):
        return key.group(1)
    options = [value for value in values if _OPTION.match(value)]
    last = words[place - 1] if place else ""
    if not options and _OPTION.match(last) and "=" not in last:
        options = [last]
    return options[0].strip("-") if options else f"word {place + 1}"


def _free(name: str, taken: set[str]) -> str:
    """A name that no other axis has."""
    more = (f"{name}-{number}" for number in itertools.count(2))
    return next(its for its in itertools.chain([name], more) if its not in taken)


def _written(brace: Values) -> str:
    return f"{{{','.join(brace.values)}}}"


def _unknown(name: str, axes) -> str:
    there = f"there are {', '.join(axes)}" if axes else "there is none"
    return (
        f"{{{name}}}: no axis is called {name} ({there}); write several values, "
        f"{{{name},...}}, or {{{{{name}}}}} for braces of the program's own"
    )
