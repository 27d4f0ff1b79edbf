"""Pictures of collectives."""

from helpers.draw.picture import COLOURS, Picture


def collective(before: list, after: list, title: str) -> Picture:
    """What each rank holds before and after a collective.

    Args:
        before: item r is what rank r holds: a list of numbers or words, or one of them.
        after: the same, afterwards.
        title: what happened, such as "all-reduce (sum)".

    Taught in 15-talk-between-ranks.
    """

    def cells(value) -> list:
        value = value.tolist() if hasattr(value, "tolist") else value
        return value if isinstance(value, (list, tuple)) else [value]

    columns = [(cells(a), cells(b)) for a, b in zip(before, after, strict=True)]
    widest = max(len(words) for column in columns for words in column)
    wide, gap = max(56, 34 * widest), 14
    spoken = "; ".join(
        f"rank {r}: {', '.join(map(str, a))} becomes {', '.join(map(str, b))}"
        for r, (a, b) in enumerate(columns)
    )
    width = 70 + len(columns) * (wide + gap)
    picture = Picture(width, 150, f"{title}. {spoken}")
    picture.text(8, 20, title, 14, weight="bold")
    picture.text(8, 72, "before", 13)
    picture.text(8, 128, "after", 13)
    for rank, column in enumerate(columns):
        x = 70 + rank * (wide + gap)
        fill = COLOURS[rank % len(COLOURS)]
        picture.text(x + wide / 2, 42, f"rank {rank}", 13, "middle")
        for y, words in zip((52, 108), column, strict=True):
            each = wide / max(len(words), 1)
            for i, word in enumerate(words):
                picture.box(x + i * each, y, each, 30, fill)
                word = f"{word:g}" if isinstance(word, float) else word
                picture.text(x + (i + 0.5) * each, y + 20, word, 13, "middle")
        picture.line(x + wide / 2, 84, x + wide / 2, 104, arrow=True)
    return picture
