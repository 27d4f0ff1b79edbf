"""A program with some of its lines changed."""

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("programs")


@dataclass(frozen=True)
class Variant:
    """A right program, some lines of which are written in another way.

    Attributes:
        name: of the variant.
        program: the file in `programs/`, without ".py".
        changes: lines that begin with "-" are replaced by the lines after them that
            begin with "+"; one that begins with a space stays. An empty line is
            between changes. Each group of old lines is in the program exactly once.
    """

    name: str
    program: str
    changes: str

    @property
    def text(self) -> str:
        """The whole program.

        Raises:
            ValueError: if old lines are not there exactly once.
        """
        text = "\n" + (FOLDER / f"{self.program}.py").read_text(encoding="utf-8")
        places = []
        for change in filter(None, self.changes.split("\n\n")):
            old, new = (_lines(change, kept) for kept in (" -", " +"))
            if (count := text.count(old)) != 1:
                raise ValueError(f"{self.name}: {old!r} is there {count} times")
            places.append((text.index(old), len(old), new))
        for start, length, new in sorted(places, reverse=True):
            text = text[:start] + new + text[start + length :]
        return text[1:]


def _lines(change: str, kept: str) -> str:
    """The whole lines of a change that begin with one of two characters."""
    lines = change.strip("\n").split("\n")
    return "\n" + "".join(f"{line[1:]}\n" for line in lines if line[:1] in kept)


@dataclass(frozen=True)
class Incident(Variant):
    """A program that is wrong, after a public report.

    Attributes:
        source: where something of the kind was reported or is documented.
        found: what `prove` must say first on two ranks: (step, stage, place); a place
            that ends in "…" need only begin so.
    """

    source: str
    found: tuple[int | None, str, str]


def write(variant: Variant, folder: str | Path) -> Path:
    """Write a program to a folder, under its own name; returns its path."""
    path = Path(folder) / f"{variant.name.replace('-', '_')}.py"
    path.write_text(variant.text, encoding="utf-8")
    return path
