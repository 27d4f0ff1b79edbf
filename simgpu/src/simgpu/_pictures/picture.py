"""A picture under construction, its colours, and the words that pictures share."""

from html import escape

# Okabe and Ito's palette, which colour-blind readers can tell apart
COLOURS = (
    "#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00", "#0072B2",
)  # fmt: skip
HOST = "#BBBBBB"
INK = "#222222"
WIDEST = 700  # pixels: what a notebook shows beside its file browser on a laptop


def colour(device: str) -> str:
    """The colour of "cpu" or "cuda:N"."""
    if device == "cpu":
        return HOST
    return COLOURS[int(device.removeprefix("cuda:")) % len(COLOURS)]


class Picture:
    """An SVG under construction; as the last value of a cell it shows itself."""

    def __init__(self, width: int, height: int, title: str):
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, fill: str = "white",
        dashed: bool = False, stroke: str = INK,
    ) -> None:  # fmt: skip
        """A rectangle with its top left corner at (x, y)."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
            f'fill="{fill}" stroke="{stroke}"{dash}/>'
        )

    def area(self, points: list[tuple[float, float]], fill: str) -> None:
        """What lines between these points enclose."""
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polygon points="{corners}" fill="{fill}"/>')

    def text(
        self, x: float, y: float, words: object, size: float = 14,
        anchor: str = "start", weight: str = "normal",
    ) -> None:  # fmt: skip
        """Words on the base line y, at x."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" '
            f'font-weight="{weight}">{escape(str(words))}</text>'
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, stroke: str = INK,
        arrow: bool = False,
    ) -> None:  # fmt: skip
        """A straight line; with `arrow`, a head at its end."""
        head = ' marker-end="url(#head)"' if arrow else ""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" '
            f'stroke="{stroke}" stroke-width="1.5"{head}/>'
        )

    def _repr_svg_(self) -> str:
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" '
            'markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>'
        )
        inside = "".join(self.parts)
        scale = min(1, WIDEST / self.width)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width * scale:g}" '
            f'height="{self.height * scale:g}" '
            f'viewBox="0 0 {self.width} {self.height}" '
            f'role="img" font-family="sans-serif" fill="{INK}">'
            f"<title>{escape(self.title)}</title>{head}"
            f'<rect width="{self.width}" height="{self.height}" fill="white"/>'
            f"{inside}</svg>"
        )

    def __repr__(self) -> str:
        return f"Picture({self.title!r})"


def plural(number: int, thing: str) -> str:
    """A number of things for a picture: "1 GPU", "2 GPUs"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def size_text(nbytes: float) -> str:
    """A number of bytes for a picture: "2 MiB", "1.5 KiB"."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes:.0f} B"
