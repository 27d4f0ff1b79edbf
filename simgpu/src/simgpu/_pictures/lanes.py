"""Bars on one axis of time: the base of every picture of what runs when.

An axis has a beginning, an end and pixels for a second. A lane is a height that the
picture itself chooses; `bar` draws into it, with words where they fit. `ticks` or
`footer` says what the axis means. Times are seconds. Leaves out: where lanes begin
and how tall they are, which is what the pictures differ in.
"""

from simgpu._pictures.picture import HOST, INK, WIDEST, Picture

_STEPS = (1, 2, 5)  # ticks are these times a power of ten apart
_MOST_TICKS = 8
_UNITS = {"µs": 1e-6, "ms": 1e-3}


class Lanes(Picture):
    """A picture of lanes that share one axis of time.

    Args:
        title: what the picture shows, for who cannot see it.
        height: in pixels.
        seconds: from one end of the axis to the other.
        left: pixels to the beginning of the axis.
        right: pixels from its end to the edge.
        begin: the second at which it begins.
        width: in pixels.
        size: of the words in bars.
        letter: pixels that one of them may be wide.
        room: pixels that words need beside their letters.
        drop: pixels from the middle of a bar to the base line of its words.
        least: pixels that a bar has at least.
    """

    def __init__(self, title: str, height: int, seconds: float, left: float, *,
                 right: float = 12, begin: float = 0.0, width: int = WIDEST,
                 size: int = 12, letter: float = 7.2, room: float = 6.0,
                 drop: float = 4.0, least: float = 0.5) -> None:  # fmt: skip
        super().__init__(width, height, title)
        self.seconds, self.begin = seconds, begin
        self.left, self.right = left, width - right
        self.scale = (self.right - left) / seconds
        self.size, self.letter, self.room = size, letter, room
        self.drop, self.least = drop, least

    def at(self, time: float) -> float:
        """Where a time is, in pixels from the left edge."""
        return self.left + (time - self.begin) * self.scale

    def bar(self, y: float, tall: float, start: float, end: float, fill: str,
            *words: object, stroke: str = "none", dashed: bool = False
            ) -> None:  # fmt: skip
        """A bar from one time to another, with the first of these words that fit in.

        In a bar of ten pixels or less, words are one size smaller.
        """
        long = max((end - start) * self.scale, self.least)
        self.box(self.at(start), y, long, tall, fill, dashed, stroke)
        size = self.size - (tall <= 10)
        for some in self._fitting(long, words):
            base = y + tall / 2 + self.drop
            self.text(self.at(start) + long / 2, base, some, size, "middle")

    def between(self, y: float, start: float, end: float, *words: object) -> None:
        """The first of these words that fit between two times, on a base line."""
        for some in self._fitting((end - start) * self.scale, words):
            self.text(self.at((start + end) / 2), y, some, self.size, "middle")

    def _fitting(self, long: float, words: tuple) -> list:
        """The first of these words that fit into so many pixels, or nothing."""
        needs = (len(str(some)) * self.letter + self.room for some in words)
        fits = zip(words, needs, strict=True)
        return [some for some, need in fits if need < long][:1]

    def rule(self, y: float, stroke: str = HOST) -> None:
        """A line from one end of the axis to the other."""
        self.line(self.left, y, self.right, y, stroke)

    def note(self, y: float, time: float, words: str) -> None:
        """Words at a time, with an arrow from them to what is below."""
        self.text(self.at(time), y, words, 12, "middle")
        self.line(self.at(time), y + 3, self.at(time), y + 11, INK, arrow=True)

    def footer(self, y: float, words: str | None = None) -> None:
        """The two ends of the axis: 0, and how many simulated seconds that is."""
        self.text(self.left, y, "0", 12)
        words = f"{self.seconds * 1e6:,.0f} µs (simulated)" if words is None else words
        self.text(self.right, y, words, 12, "end")

    def ticks(self, y: float, unit: str) -> None:
        """A line with at most eight marks beside the 0, at round times.

        Args:
            y: of the line; the numbers are below it.
            unit: "µs" or "ms".
        """
        self.rule(y, INK)
        each = _UNITS[unit]
        count = int(self.seconds / each + 1e-6)
        for mark in range(0, count + 1, _distance(count)):
            x = self.at(self.begin + mark * each)
            self.line(x, y, x, y + 4, INK)
            words = f"{mark:,} {unit}" if mark else "0"
            over = x + 3.6 * len(words) > self.width
            self.text(x, y + 17, words, 12, "end" if over else "middle")

    def legend(self, y: float, fills: dict[str, str]) -> float:
        """What fills mean, in a row from the left end of the axis.

        Returns:
            Where the row goes on.
        """
        x = self.left
        for words, fill in fills.items():
            self.box(x, y, 12, 12, fill, stroke=HOST)
            self.text(x + 18, y + 11, words, 12)
            x += 36 + 6.6 * len(words)
        return x

    def simulated(self, y: float) -> None:
        """That the times are a model's, at the right end."""
        self.text(self.right, y, "simulated", 12, "end")


def _distance(count: int) -> int:
    """How many units apart ticks are, when there are so many units."""
    power = 1
    while True:
        for step in _STEPS:
            if count <= _MOST_TICKS * step * power:
                return step * power
        power *= 10
