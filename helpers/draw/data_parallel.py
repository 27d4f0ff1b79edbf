"""`nn.DataParallel`: its four functions, and what backward adds to them."""

from simgpu.pictures import COLOURS, WIDEST, Picture

_LEFT, _WIDE = 132, 141  # pixels: where the first GPU's column begins, and its width


def four_functions(
    samples: int, weights: str, gpus: int = 4, classes: int = 10
) -> Picture:
    """What leaves cuda:0 in a step of nn.DataParallel, and what comes back to it.

    Args:
        samples: in the batch.
        weights: how large they are, such as "8.3 MiB".
        gpus: how many share the batch, at most 4.
        classes: scores for each sample.

    Taught in 12-split-the-batch.
    """
    part, right = samples // gpus, _LEFT + 2 * _WIDE
    title = (
        f"scatter {part} images to each of {gpus} GPUs, replicate {weights} of weights,"
        f" parallel_apply, and gather {samples} x {classes} scores on cuda:0, where "
        "backward adds up the gradients"
    )
    picture = Picture(WIDEST, 310, title)
    rows = ("scatter,", "replicate", "parallel_apply", "gather,", "backward")
    for y, name in zip((79, 97, 207, 247, 265), rows, strict=True):
        picture.text(8, y, name, 14, weight="bold")
    for gpu in range(gpus):
        left, fill = _LEFT + _WIDE * gpu, COLOURS[gpu]
        for x, middle, words in ((_LEFT, 32, f"{part} images"), (right, 98, "weights")):
            picture.line(x + 135, 44, left + middle, 116, arrow=True)
            picture.line(left + middle, 220, x + 90 + 30 * gpu, 256, arrow=True)
            picture.box(left + middle - 32, 120, 64, 36, fill)
            picture.text(left + middle, 142, words, 10, "middle")
        picture.line(left + 65, 156, left + 65, 181, arrow=True)
        picture.text(left + 74, 174, f"cuda:{gpu}", 12)
        picture.box(left, 184, 130, 36, fill)
        picture.text(left + 65, 207, f"{part} x {classes} scores", 13, "middle")
    for x, y, words in (
        (_LEFT, 8, f"the batch: {samples} images"),
        (right, 8, f"the weights: {weights}"),
        (_LEFT, 260, f"{samples} x {classes} scores, then the loss"),
        (right, 260, f"the sum of {gpus} replicas' gradients"),
    ):
        picture.box(x, y, 2 * _WIDE - 11, 36, COLOURS[0])
        picture.text(x + _WIDE - 5, y + 23, words, 13, "middle")
    picture.text(8, 31, "blue: on cuda:0", 12)
    return picture
