"""How tensors get to another process, and an update that two of them lose."""

from typing import NamedTuple

from simgpu.pictures import COLOURS, HOST, INK, WIDEST, Lanes, Picture, colour

_SENDER, _WORKER, _WIDE = 120, 432, 90  # pixels: where the processes' boxes are
_UNTIL = 616  # the middle of the last column
_MEMORY = "#DDDDDD"


class Sent(NamedTuple):
    """One thing that goes through a queue.

    Attributes:
        name: of the thing, "array".
        travels: through the queue, in words.
        place: of the memory that both use, "on the GPU"; "": each has its own.
        until: how long the sender must live.
    """

    name: str
    travels: str
    place: str
    until: str


SENT = (
    Sent("NumPy array", "all values", "", "it is sent"),
    Sent("CPU tensor", "a handle", "in /dev/shm", "it is fetched"),
    Sent("GPU tensor", "a handle", "on the GPU", "the worker lets go"),
)


def sent_through_a_queue(size: str) -> Picture:
    """A row for each thing that is sent: the message, the memory, the sender's life.

    Args:
        size: of its values, in words.

    Taught in 14-share-tensors-between-processes.
    """
    told = "; ".join(
        f"{one.name}: {one.travels} in the queue, "
        f"{f'{size} once, {one.place}' if one.place else f'{size} in each process'}"
        f", the sender must live until {one.until}"
        for one in SENT
    )
    picture = Picture(WIDEST, 36 + sum(map(_height, SENT)), told)
    for x, words in ((_SENDER, "sender"), (_WORKER, "worker")):
        picture.text(x + _WIDE / 2, 18, words, 13, "middle", "bold")
    picture.text((_SENDER + _WORKER + _WIDE) / 2, 18, "queue", 13, "middle", "bold")
    picture.text(_UNTIL, 18, "sender must live until", 13, "middle", "bold")
    top = 30
    for one in SENT:
        _draw_row(picture, top, one, size)
        top += _height(one)
    return picture


def _height(one: Sent) -> int:
    return 92 if one.place else 56


def _draw_row(picture: Picture, top: float, one: Sent, size: str) -> None:
    picture.text(8, top + 24, one.name, 14, weight="bold")
    for x in (_SENDER, _WORKER):
        picture.box(x, top, _WIDE, 38)
    right, end = _SENDER + _WIDE, _WORKER - 4
    picture.line(right, top + 19, end, top + 19, arrow=True)
    picture.text((right + end) / 2, top + 12, one.travels, 13, "middle")
    picture.text(_UNTIL, top + 24, one.until, 13, "middle")
    if not one.place:
        for x in (_SENDER, _WORKER):
            picture.box(x + 14, top + 9, _WIDE - 28, 20, fill=_MEMORY)
            picture.text(x + _WIDE / 2, top + 24, size, 13, "middle")
        return
    fill = colour("cuda:0") if "GPU" in one.place else HOST
    for x, to in ((_SENDER, 226), (_WORKER, 416)):
        picture.line(x + _WIDE / 2, top + 38, to, top + 52, arrow=True)
    picture.box(222, top + 54, 198, 26, fill=fill)
    picture.text(321, top + 72, f"{size} {one.place}", 13, "middle")


# when two processes begin to read, in any unit of time: in turn, and at once
_TURNS = {"in turn": (0.1, 4.1), "at the same time": (0.1, 1.6)}
_PARTS = (1.1, 1.6, 1.3)  # how long they read, compute and write


def old_gradient() -> Lanes:
    """Two processes that train one weight: in turn, and at once.

    Taught in 14-share-tensors-between-processes.
    """
    title = (
        "In turn, process 1 reads w1, which process 0 has written. At the same time, "
        "it reads w0: its gradient belongs to w0, but changes w1"
    )
    axis = Lanes(title, 316, 8.6, 92)
    for row, (name, begins) in enumerate(_TURNS.items()):
        y, since = 164 * row, 0.0
        axis.text(8, y + 18, name, 14, weight="bold")
        axis.text(8, y + 122, "shared w", 13)
        for process, start in enumerate(begins):
            lane, seen = y + 32 + 36 * process, 0 if row else process
            axis.text(8, lane + 18, f"process {process}", 13)
            writes = f"w{process + 1} = w{process} − g"
            words = (f"reads w{seen}", f"gradient at w{seen}", writes)
            for said, long in zip(words, _PARTS, strict=True):
                fill = COLOURS[process] if said == writes else "white"
                axis.bar(lane, 28, start, start + long, fill, said, stroke=INK)
                start += long
            axis.bar(y + 106, 26, since, start, HOST, f"w{process}", stroke=INK)
            since = start
        axis.bar(y + 106, 26, since, 8.6, HOST, "w2", stroke=INK)
    axis.text(axis.at(4.3), 311, "g belongs to w0, but changes w1", 12)
    return axis
