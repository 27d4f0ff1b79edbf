"""A roofline: what a card can reach, by FLOPs for each byte, and kernels below it.

Both axes are logarithmic. The roof rises with the bandwidth of the card's memory up to
the ridge, and is flat from there at the card's peak.
"""

import math

from simgpu.pictures import COLOURS, HOST, INK, WIDEST, Picture

_LEFT, _TOP, _WIDTH, _HEIGHT = 64, 50, WIDEST - 96, 250
_X, _Y = (-2, 4), (-2, 3.5)  # powers of ten: FLOPs for each byte, TFLOP/s


def roofline(
    title: str,
    roofs: list[tuple[str, float, float]],
    points: list[tuple[str, float, float]],
) -> Picture:
    """Roofs of cards, and dots with their names.

    Args:
        title: above the picture; it says whether the dots are simulated or recorded.
        roofs: of each its name, FLOPs a second and bytes a second.
        points: of each its name, FLOPs for each byte and FLOPs a second. A name may end
            with "@" and the number of a roof, whose colour it has; before that it may
            be empty.

    Taught in 08-find-what-binds.
    """
    said = [_said(roofs, *point) for point in points]
    picture = Picture(WIDEST, _TOP + _HEIGHT + 64, "; ".join([title, *said]))
    picture.text(8, 20, title, 14, weight="bold")
    _axes(picture)
    for number, (name, peak, bandwidth) in enumerate(roofs):
        ridge = peak / bandwidth
        stroke = INK if len(roofs) == 1 else COLOURS[number]
        x, y = _x(ridge), _y(peak)
        low = max(10 ** _X[0], 10 ** _Y[0] * 1e12 / bandwidth)
        picture.line(_x(low), _y(bandwidth * low), x, y, stroke)
        picture.line(x, y, _LEFT + _WIDTH, y, stroke)
        about = f"{name}: {peak / 1e12:g} TFLOP/s"
        if len(roofs) > 1:
            middle = _TOP + _HEIGHT - 24 - 20 * number
            picture.line(_LEFT + 400, middle, _LEFT + 430, middle, stroke)
            picture.text(_LEFT + 438, middle + 4, about, 11)
        else:
            picture.text(_LEFT + _WIDTH - 4, y - 6, about, 11, "end")
            picture.line(x, y, x, _TOP + _HEIGHT, HOST)
            y = _TOP + _HEIGHT - 8
            picture.text(x - 6, y, "memory-bound", 12, "end")
            picture.text(x + 6, y, "compute-bound", 12)
            picture.text(x, _TOP + _HEIGHT + 32, f"ridge {ridge:.1f}", 11, "middle")
    _dots(picture, points)
    return picture


def _said(roofs: list, name: str, intensity: float, rate: float) -> str:
    """A dot in words, for who cannot see it."""
    words, _, roof = name.partition("@")
    if roof:
        words = f"{words} {roofs[int(roof)][0]}".strip()
    return f"{words} at {_short(intensity)} FLOPs a byte, {_short(rate / 1e12)} TFLOP/s"


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _dots(picture: Picture, points: list[tuple[str, float, float]]) -> None:
    """Dots, and below each on its right its name; names that would meet go lower."""
    lowest = -math.inf
    for name, intensity, rate in sorted(points, key=lambda point: -point[2]):
        words, _, roof = name.partition("@")
        x, y = _x(intensity), _y(rate)
        if words:
            lowest = max(y + 20, lowest + 15)
            fits = x + 20 + 7 * len(words) < _LEFT + _WIDTH
            side, anchor = (12, "start") if fits else (-12, "end")
            picture.line(x, y, x + 0.75 * side, lowest - 4, HOST)
            picture.text(x + side, lowest, words, 12, anchor)
        picture.parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{COLOURS[int(roof or 0)]}" '
            f'stroke="{INK}"/>'
        )


def _axes(picture: Picture) -> None:
    picture.box(_LEFT, _TOP, _WIDTH, _HEIGHT)
    for power in range(_X[0], _X[1] + 1):
        x = _x(10**power)
        picture.text(x, _TOP + _HEIGHT + 16, f"{10.0**power:g}", 11, "middle")
    for power in range(_Y[0], int(_Y[1]) + 1):
        y = _y(10**power * 1e12)
        picture.text(_LEFT - 6, y + 4, f"{10.0**power:g}", 11, "end")
    picture.text(_LEFT + _WIDTH / 2, _TOP + _HEIGHT + 50, "FLOPs a byte", 12, "middle")
    picture.text(8, _TOP - 8, "TFLOP/s", 12)


def _x(intensity: float) -> float:
    return _place(math.log10(intensity), *_X, _LEFT, _LEFT + _WIDTH)


def _y(rate: float) -> float:
    return _place(math.log10(rate / 1e12), *_Y, _TOP + _HEIGHT, _TOP)


def _place(power: float, least: float, most: float, start: float, end: float) -> float:
    """Where a power of ten stands between two pixels; what is outside, at the edge."""
    share = (power - least) / (most - least)
    return start + (end - start) * min(max(share, 0.0), 1.0)
