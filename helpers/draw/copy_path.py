"""The way of a batch: pageable memory, pinned memory, the GPU's own memory."""

from simgpu.pictures import HOST, WIDEST, Picture, colour

# what each place is: its name, and two lines about it
_PLACES = (
    ("pageable", "ordinary memory", "pages may move"),
    ("pinned", "CPU memory", "pages stay put"),
    ("GPU memory", "on the card", "kernels read it"),
)
# what happens on each arrow: who works, and whether Python waits
_ARROWS = (
    (".pin_memory()", "the CPU copies", "Python waits"),
    ("non_blocking=True", "the GPU copies", "Python goes on"),
)
_AROUND = ".cuda() from pageable memory: CPU and driver copy in pieces, Python waits"


def copy_path() -> Picture:
    """Pageable to pinned to GPU, with who copies and whether Python waits.

    Taught in 05-overlap-with-streams.
    """
    title = "CPU memory to the GPU: " + "; ".join(
        f"{call}, {who}, {python}" for call, who, python in _ARROWS
    )
    picture = Picture(WIDEST, 166, f"{title}; {_AROUND}")
    width, gap, y = 124, 156, 14
    for place, (name, what, more) in enumerate(_PLACES):
        x = 8 + place * (width + gap)
        fill = colour("cuda:0") if place == 2 else "white" if place == 0 else HOST
        picture.box(x, y, width, 76, fill)
        picture.text(x + width / 2, y + 22, name, 14, "middle", weight="bold")
        picture.text(x + width / 2, y + 44, what, 11, "middle")
        picture.text(x + width / 2, y + 62, more, 11, "middle")
    for place, (call, who, python) in enumerate(_ARROWS):
        start = 8 + place * (width + gap) + width
        middle = start + gap / 2
        picture.line(start + 6, y + 38, start + gap - 4, y + 38, arrow=True)
        picture.text(middle, y + 28, call, 12, "middle", weight="bold")
        picture.text(middle, y + 56, who, 12, "middle")
        picture.text(middle, y + 72, python, 12, "middle")
    left, right, low = 8 + width / 2, 8 + 2 * (width + gap) + width / 2, y + 112
    picture.line(left, y + 76, left, low)
    picture.line(left, low, right, low)
    picture.line(right, low, right, y + 80, arrow=True)
    picture.text((left + right) / 2, low + 20, _AROUND, 12, "middle")
    return picture
