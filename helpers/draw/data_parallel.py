"""`nn.DataParallel`: its four functions, and how weights reach the other GPUs."""

from simgpu.pictures import COLOURS, HOST, WIDEST, Picture

_LEFT, _WIDE = 132, 141  # pixels: where the first GPU's column begins, and its width


def four_functions(
    samples: int, weights: str, gpus: int = 4, classes: int = 10
) -> Picture:
    """Scatter, replicate, parallel_apply and gather, a row for each.

    Args:
        samples: in the batch.
        weights: how large they are, such as "8.3 MiB".
        gpus: how many share the batch, at most 4.
        classes: scores for each sample.

    Taught in 12-split-the-batch.
    """
    part = samples // gpus
    title = (
        f"scatter {part} images to each of {gpus} GPUs, replicate {weights} of weights,"
        f" parallel_apply, and gather {samples} x {classes} scores on cuda:0"
    )
    picture = Picture(WIDEST, 296, title)
    for row, name in enumerate(("scatter", "replicate", "parallel_apply", "gather")):
        picture.text(8, 59 + 66 * row, name, 14, weight="bold")
    for gpu in range(gpus):
        left, fill = _LEFT + _WIDE * gpu, COLOURS[gpu]
        middle = left + 65
        picture.text(middle, 22, f"cuda:{gpu}", 14, "middle")
        picture.box(left, 36, 130, 36, fill)
        picture.text(middle, 59, f"{part} images", 13, "middle")
        picture.box(left, 102, 130, 36, fill)
        words = "the weights" if gpu == 0 else "a copy of them"
        picture.text(middle, 125, words, 13, "middle")
        picture.box(left, 168, 130, 36, fill)
        picture.text(middle, 191, f"{part} x {classes} scores", 13, "middle")
        picture.line(middle, 138, middle, 165, arrow=True)
        picture.line(middle, 204, min(middle, _LEFT + 200) + 8 * gpu, 231, arrow=True)
    picture.text(_LEFT, 92, f"in each step: {weights} from cuda:0 to each other", 12)
    picture.box(_LEFT, 234, 2 * _WIDE - 11, 36, COLOURS[0])
    words = f"{samples} x {classes} scores, then the loss"
    picture.text(_LEFT + _WIDE - 5, 257, words, 13, "middle")
    picture.text(_LEFT + 2 * _WIDE, 257, "on cuda:0", 13)
    picture.text(WIDEST - 8, 290, "colour: the GPU", 12, "end")
    return picture


def star_and_chain(copies_us: float, nccl_us: float) -> Picture:
    """Four GPUs get the weights: by three copies of GPU 0, and by NCCL's chain.

    Args:
        copies_us: microseconds of the three copies, one after another.
        nccl_us: microseconds of one broadcast by NCCL.

    Taught in 12-split-the-batch.
    """
    star, chain = f"{copies_us:,.0f} µs", f"{nccl_us:,.0f} µs"
    title = (
        f"Weights W reach three GPUs. Copies: cuda:0 sends W three times, {star}. "
        f"NCCL: each GPU passes pieces of W on, {chain}"
    )
    picture = Picture(WIDEST, 248, title)
    picture.text(8, 22, f"Copies, one after another: {star}", 14, weight="bold")
    picture.text(364, 22, f"NCCL, in pieces along a chain: {chain}", 14, weight="bold")
    _gpu(picture, 20, 108, 0)
    for gpu in (1, 2, 3):
        y = 108 + 62 * (gpu - 2)
        _gpu(picture, 220, y, gpu)
        picture.line(104, 126, 216, y + 18, arrow=True)
        picture.text(224, y - 6, f"copy {gpu} of W", 12)
    for gpu in range(4):
        x = 364 + 86 * gpu
        picture.box(x, 98, 66, 36, COLOURS[gpu])
        picture.text(x + 33, 121, f"cuda:{gpu}", 13, "middle")
        if gpu:
            picture.line(x - 20, 116, x - 3, 116, arrow=True)
    for gpu in range(3):
        for piece in range(3):
            x = 436 + 86 * gpu - 12 * piece
            picture.box(x, 78, 9, 9, HOST)
    picture.text(436, 72, "pieces of W", 12)
    picture.text(364, 162, "cuda:0 sends W once. While a piece goes from", 12)
    picture.text(364, 180, "cuda:1 to cuda:2, the next one reaches cuda:1.", 12)
    picture.text(20, 238, "cuda:0 sends W three times.", 12)
    picture.text(WIDEST - 8, 238, "simulated", 12, "end")
    return picture


def _gpu(picture: Picture, x: float, y: float, gpu: int) -> None:
    picture.box(x, y, 84, 36, COLOURS[gpu])
    picture.text(x + 42, y + 23, f"cuda:{gpu}", 13, "middle")
