"""The cards of a machine, and what programs with CUDA_VISIBLE_DEVICES call them."""

from simgpu.pictures import HOST, WIDEST, Picture, colour, plural

_LEFT, _HIGH, _GAP = 236, 34, 8  # pixels: of the words, of a row, between boxes


def visible_cards(cards: int, **programs: str) -> Picture:
    """A row for the machine's cards, and one for each program, under each other.

    A program has a box under each card that it sees, with the name that the card has
    there.

    Args:
        cards: of the machine.
        programs: name=what CUDA_VISIBLE_DEVICES lists for it, such as "2,3"; "" hides
            all cards.

    Taught in 01-choose-a-device.
    """
    seen = {name: _cards(listed) for name, listed in programs.items()}
    width = (WIDEST - _LEFT) / cards
    height = 2 * _GAP + (_HIGH + _GAP) * (1 + len(seen))
    says = "; ".join(_say(name, found) for name, found in seen.items())
    picture = Picture(WIDEST, height, f"{plural(cards, 'card')}. {says}")
    picture.text(8, _GAP + 23, "the machine's cards", weight="bold")
    for card in range(cards):
        _box(picture, _LEFT + card * width, _GAP, width, f"card {card}", HOST)
    for row, (name, found) in enumerate(seen.items(), 1):
        y = _GAP + row * (_HIGH + _GAP)
        picture.text(8, y + 15, f"program {name}", weight="bold")
        picture.text(8, y + 31, f"CUDA_VISIBLE_DEVICES={programs[name]}", 12)
        for index, card in enumerate(found):
            here = f"cuda:{index}"
            _box(picture, _LEFT + card * width, y, width, here, colour(here))
        if not found:
            picture.text(_LEFT, y + 22, "sees no card and runs on the CPU")
    return picture


def _cards(listed: str) -> list[int]:
    return [int(card) for card in listed.split(",") if card.strip()]


def _say(name: str, found: list[int]) -> str:
    """A program's row in words, for those who do not see it."""
    names = [f"card {card} as cuda:{index}" for index, card in enumerate(found)]
    return f"Program {name} sees {', '.join(names) or 'none'}"


def _box(picture: Picture, x: float, y: float, width: float, words: str, fill: str):
    picture.box(x, y, width - _GAP, _HIGH, fill)
    picture.text(x + (width - _GAP) / 2, y + 22, words, 14, "middle")
