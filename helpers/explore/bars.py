"""Bars of bytes beside the memory of a card, for explorers of memory."""

from helpers import draw


def bars_against_limit(
    title: str, bars: dict, limit: int, card: str, words
) -> draw.Picture:
    """Bars of named parts, one for each setting, and the line of a card's memory.

    Args:
        title: above it, and what a screen reader says.
        bars: name of a setting -> part -> bytes; all have the same parts.
        limit: bytes of the card.
        card: its name, below the line.
        words: of a number of bytes, where a part is wide enough.
    """
    picture = draw.Picture(draw.WIDEST, 84 + 44 * len(bars), title)
    picture.text(8, 20, title, 14, weight="bold")
    most = max(limit, *(sum(sizes.values()) for sizes in bars.values()))
    left, scale = 76, (draw.WIDEST - 88) / most
    bottom, edge = 40 + 44 * len(bars), left + limit * scale
    for row, (kind, sizes) in enumerate(bars.items()):
        x, y = left, 40 + 44 * row
        picture.text(8, y + 20, kind)
        for nbytes, fill in zip(sizes.values(), draw.COLOURS, strict=False):
            if nbytes:
                picture.box(x, y, nbytes * scale, 32, fill)
            if nbytes * scale > 60:
                middle = x + nbytes * scale / 2
                picture.text(middle, y + 21, words(nbytes), 12, "middle")
            x += nbytes * scale
    picture.line(edge, 32, edge, bottom)
    end = "end" if edge - left > 60 else "start"
    picture.text(edge - 4, bottom + 14, card, 12, end)
    for i, (part, fill) in enumerate(zip(sizes, draw.COLOURS, strict=False)):
        picture.box(left + 130 * i, bottom + 20, 14, 14, fill)
        picture.text(left + 130 * i + 20, bottom + 32, part, 12)
    return picture
