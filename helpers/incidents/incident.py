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
        edits: (old, new); each old text is there exactly once.
    """

    name: str
    program: str
    edits: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """The whole program.

        Raises:
            ValueError: if an old text is not there exactly once.
        """
        text = (FOLDER / f"{self.program}.py").read_text(encoding="utf-8")
        for old, new in self.edits:
            if text.count(old) != 1:
                raise ValueError(
                    f"{self.name}: {old!r} is there {text.count(old)} times"
                )
            text = text.replace(old, new)
        return text


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
