"""Losses of a right and of a wrong training, and beside them their gradient norms."""

import math

from simgpu.pictures import COLOURS, WIDEST, Picture

TOP, HIGH = 62, 170  # pixels: the panels begin, their height
LEFT, GAP = 44, 70  # the first panel's axis, and what is between the two
WIDE = (WIDEST - 2 * LEFT - GAP) // 2
NAMES = "right", "wrong"

Log = list[dict]  # a line for each step, with "step", "loss" and "norm"


def loss_curves(right: Log, wrong: Log, title: str) -> Picture:
    """Two panels: the losses of both trainings, and their gradient norms.

    The wrong one is a thin line upon the thick one of the right one, so that both are
    seen where they are the same.

    Args:
        right: what a right trainer has logged.
        wrong: the same of a wrong one.
        title: above the picture.

    Taught in 28-train-it-all.
    """
    apart = max(abs(a["loss"] - b["loss"]) for a, b in zip(right, wrong, strict=True))
    ratio = right[0]["norm"] / wrong[0]["norm"]
    spoken = (
        f"{title}. The losses differ by less than {_above(apart):g}; the gradient norm "
        f"of step 0 is {right[0]['norm']:.2f} in the right one, and {ratio:.2f} times "
        "as large as in the wrong one"
    )
    picture = Picture(WIDEST, TOP + HIGH + 44, spoken)
    picture.text(8, 20, title, 14, weight="bold")
    second = LEFT + WIDE + GAP
    _panel(picture, LEFT, "loss, nats a token", "loss", right, wrong)
    _panel(picture, second, "norm of the gradient", "norm", right, wrong)
    return picture


def _above(number: float) -> float:
    """The power of ten above a number; of rounding errors, 0.01."""
    return 10.0 ** math.ceil(math.log10(max(number, 0.009)))


def _panel(
    picture: Picture, left: int, title: str, name: str, right: Log, wrong: Log
) -> None:
    """The axes of one column of the logs, and both its lines."""
    bottom, last = TOP + HIGH, right[-1]["step"]
    high = math.ceil(max(line[name] for line in [*right, *wrong]))

    def at(line: dict) -> tuple[int, int]:
        x = left + line["step"] / last * (WIDE - 40)
        return round(x), round(bottom - line[name] / high * HIGH)

    picture.text(left, TOP - 16, title, 12)
    picture.line(left, TOP, left, bottom)
    picture.line(left, bottom, left + WIDE - 40, bottom)
    for mark in range(0, high + 1, max(1, high // 4)):
        y = round(bottom - mark / high * HIGH)
        picture.line(left - 4, y, left, y)
        picture.text(left - 8, y + 4, mark, 12, "end")
    for line in right:
        picture.text(at(line)[0], bottom + 16, line["step"], 12, "middle")
    picture.text(left + (WIDE - 40) / 2, bottom + 34, "step", 12, "middle")
    ends = [at(log[-1]) for log in (right, wrong)]
    same = abs(ends[0][1] - ends[1][1]) < 8
    for i, (log, thick) in enumerate(((right, 7), (wrong, 3))):
        path = " ".join(f"{x},{y}" for x, y in map(at, log))
        picture.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{COLOURS[i]}" '
            f'stroke-width="{thick}" stroke-linejoin="round"/>'
        )
        x, y = ends[i]
        if not same:
            picture.text(x + 8, y + 4, NAMES[i], 12)
    if same:
        picture.text(ends[0][0] + 8, ends[0][1] + 4, "both", 12)
