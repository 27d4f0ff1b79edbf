"""One tensor in two processes: who holds what, and how an update is lost."""

from simgpu.pictures import COLOURS, WIDEST, Picture, colour


def shared_tensor(nbytes: int) -> Picture:
    """A sender and a worker, the handle between them, and the memory of the GPU.

    Args:
        nbytes: of the tensor's values.

    Taught in 14-share-tensors-between-processes.
    """
    size = f"{nbytes / 1e6:.0f} MB"
    title = (
        f"A handle goes through the queue; the {size} stay where they are on the GPU"
    )
    picture = Picture(WIDEST, 206, title)
    for x, name, first, second in (
        (8, "sender", "queue.put(x)", "allocated the memory"),
        (492, "worker", "x = queue.get()", "allocated nothing"),
    ):
        picture.box(x, 8, 200, 84)
        picture.text(x + 100, 30, name, 15, "middle", "bold")
        picture.text(x + 100, 54, first, 14, "middle")
        picture.text(x + 100, 76, second, 13, "middle")
    picture.line(208, 50, 488, 50, arrow=True)
    picture.text(350, 40, "queue: a handle, under 1 kB", 14, "middle")
    picture.box(8, 136, 684, 62, fill="#F7F7F7")
    picture.text(22, 172, "memory of the GPU", 14)
    picture.box(220, 146, 260, 42, fill=colour("cuda:0"))
    picture.text(350, 172, f"values of x, {size}", 14, "middle")
    picture.line(150, 92, 250, 142, arrow=True)
    picture.line(550, 92, 450, 142, arrow=True)
    return picture


def lost_update() -> Picture:
    """Two workers read, then both write: one of the two updates is gone.

    Taught in 14-share-tensors-between-processes.
    """
    title = "A lost update: both workers read 0, and both write 1"
    picture = Picture(WIDEST, 176, title)
    for row, (name, memory) in enumerate((("worker 0", 0), ("worker 1", 1))):
        y = 14 + 44 * row
        picture.text(8, y + 22, name, 14, weight="bold")
        for place, words in ((0, "reads 0"), (2 + memory, "writes 0 + 1")):
            fill = COLOURS[row]
            picture.box(110 + 146 * place, y, 130, 34, fill=fill)
            picture.text(175 + 146 * place, y + 22, words, 14, "middle")
    picture.text(8, 126, "total", 14, weight="bold")
    for place, words in enumerate(("0", "0", "1", "1, not 2")):
        picture.text(175 + 146 * place, 126, words, 14, "middle")
    picture.line(110, 142, 680, 142, arrow=True)
    picture.text(680, 164, "time", 13, "end")
    return picture
