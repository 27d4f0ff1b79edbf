"""Loss curves of one training in several ways, and how far each is from one process."""

import math

from simgpu.pictures import COLOURS, HOST, INK, WIDEST, Picture

TOP, HIGH, BAR = 44, 190, 19  # pixels: the panels begin, their height, a row at right
LEFT, SPLIT, NAMES = 44, 330, 478  # the left panel, the right one, where bars begin
LOWEST, HIGHEST = -7, 0  # powers of ten on the axis of distances
ENDS = (-5, -4, -2, 0)  # powers of ten at which a bar may end


def loss_curves(
    curves: dict[str, dict[int, float]],
    reference: dict[int, float],
    title: str,
    marks: dict[str, float] | None = None,
    notes: dict[int, str] | None = None,
) -> Picture:
    """All curves on one axis, and beside them the largest distance of each.

    A line is thinner than the one below it, so that all of them are seen. A bar ends at
    0.00001, 0.0001, 0.01 or 1, whichever is just above the largest distance: the digits
    of a rounding error depend on the processor, and a picture should not.

    Args:
        curves: way -> step -> loss.
        reference: step -> loss of one process.
        title: above the picture.
        marks: words -> a distance to mark with a line.
        notes: step -> what happened after it.

    Taught in 27-train-it-all.
    """
    powers = {way: _power(curve, reference) for way, curve in curves.items()}
    spoken = "; ".join(f"{way}: below {_words(p)}" for way, p in powers.items())
    height = TOP + max(HIGH, BAR * len(curves)) + 40
    picture = Picture(WIDEST, height, f"{title}. Largest distances. {spoken}")
    picture.text(8, 20, title, 14, weight="bold")
    _panel_of_curves(picture, curves, reference, notes or {})
    _panel_of_distances(picture, powers, marks or {})
    return picture


def _power(curve: dict[int, float], reference: dict[int, float]) -> int:
    """The power of ten at which a curve's bar ends."""
    most = max(abs(loss - reference[step]) for step, loss in curve.items())
    return next((power for power in ENDS if most < 10.0**power), ENDS[-1])


def _words(power: int) -> str:
    return f"{10.0**power:.{-power}f}"


def _panel_of_curves(
    picture: Picture, curves: dict, reference: dict, notes: dict
) -> None:
    width = SPLIT - LEFT - 20
    bottom, last = TOP + HIGH, max(reference)
    high = math.ceil(max(reference.values()))
    low = math.floor(min(reference.values()))

    def at(step: int, loss: float) -> tuple[float, float]:
        y = bottom - (loss - low) / (high - low) * HIGH
        return round(LEFT + step / last * width), round(y)

    for mark in range(low, high + 1):
        _, y = at(0, mark)
        picture.line(LEFT - 4, y, LEFT, y)
        picture.text(LEFT - 8, y + 4, mark, 12, "end")
    picture.line(LEFT, TOP, LEFT, bottom)
    picture.line(LEFT, bottom, LEFT + width, bottom)
    picture.text(LEFT + 6, TOP + 4, "loss, nats per byte", 12)
    for step in range(0, last + 1, max(1, last // 5)):
        x, _ = at(step, low)
        picture.text(x, bottom + 16, step, 12, "middle")
    picture.text(LEFT + width / 2, bottom + 32, "step", 12, "middle")
    thick = 3 + 2 * len(curves)
    for fill, curve in zip(COLOURS, curves.values(), strict=False):
        points = [at(step, loss) for step, loss in sorted(curve.items())]
        path = " ".join(f"{x},{y}" for x, y in points)
        picture.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{fill}" '
            f'stroke-width="{thick}" stroke-linejoin="round"/>'
        )
        thick -= 2
    for step, words in notes.items():
        x, y = at(step, reference[step])
        picture.line(x, y - 34, x, y, arrow=True)
        picture.text(x, y - 40, words, 12, "middle")


def _panel_of_distances(picture: Picture, powers: dict, marks: dict) -> None:
    scale = (WIDEST - NAMES - 16) / (HIGHEST - LOWEST)
    bottom = TOP + BAR * len(powers) + 8
    picture.text(WIDEST - 8, 20, "largest distance from one process", 12, "end")
    for row, (fill, (way, power)) in enumerate(
        zip(COLOURS, powers.items(), strict=False)
    ):
        y = TOP + BAR * row
        picture.text(NAMES - 8, y + 12, way, 12, "end")
        picture.box(NAMES, y, (power - LOWEST) * scale, BAR - 4, fill, stroke="none")
        end = NAMES + (power - LOWEST) * scale
        picture.text(end + 6, y + 12, f"below {_words(power)}", 11)
    picture.line(NAMES, bottom, WIDEST - 12, bottom)
    for power in range(LOWEST + 1, HIGHEST + 1, 2):
        x = NAMES + (power - LOWEST) * scale
        picture.line(x, bottom, x, bottom + 4)
        picture.text(x, bottom + 17, f"1e{power}", 12, "middle")
    for row, (words, distance) in enumerate(marks.items()):
        x = NAMES + (math.log10(distance) - LOWEST) * scale
        y = bottom + 38 + 20 * row
        picture.line(x, TOP - 4, x, y - 4, INK if row else HOST)
        anchor = "end" if x > (NAMES + WIDEST) / 2 else "start"
        picture.text(x + (-4 if anchor == "end" else 4), y, words, 12, anchor)
