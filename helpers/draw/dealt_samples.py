"""Which rank gets which samples of an epoch, and what a step has of all ranks."""

from collections.abc import Sequence

from simgpu.pictures import COLOURS, WIDEST, Picture

LEFT, SIDE, GAP = 116, 30, 4  # pixels: names of rows, a sample, between two
TOP, ROW = 44, 40


def dealt_samples(shares: Sequence[Sequence[int]], batch: int) -> Picture:
    """The shuffled order of an epoch, dealt out to ranks, and the batches of each.

    The order is read back from the shares: rank r of n has its places r, r + n, …

    Args:
        shares: indices of samples, one sequence for each rank, all equally long.
        batch: samples of a rank in a step.

    Raises:
        ValueError: if the shares differ in length.

    Taught in 03-train-on-four-gpus.
    """
    if len({len(share) for share in shares}) != 1:
        lengths = ", ".join(str(len(share)) for share in shares)
        raise ValueError(f"the shares have {lengths} samples: one length is needed")
    ranks = len(shares)
    order = [share[place] for place in range(len(shares[0])) for share in shares]
    told = "; ".join(
        f"rank {rank}: {', '.join(map(str, share))}"
        for rank, share in enumerate(shares)
    )
    first = ", ".join(map(str, order[: ranks * batch]))
    title = (
        f"The shuffled order, dealt out to {ranks} ranks. {told}. "
        f"Step 0 has the samples {first}"
    )
    picture = Picture(WIDEST, TOP + ROW * (ranks + 1) + 16, title)
    picture.text(8, TOP + 20, "shuffled order", 13)
    for place, sample in enumerate(order):
        step, inside = divmod(place, ranks * batch)
        x = LEFT + _step_left(step, ranks, batch) + inside * (SIDE + GAP)
        _sample(picture, x, TOP, sample, place % ranks)
    for rank, share in enumerate(shares):
        y = TOP + ROW * (rank + 1) + 16
        picture.text(8, y + 20, f"rank {rank}", 13)
        for place, sample in enumerate(share):
            x = LEFT + _step_left(place // batch, ranks, batch)
            _sample(picture, x + place % batch * (SIDE + GAP), y, sample, rank)
    for step in range(-(-len(shares[0]) // batch)):
        x = LEFT + _step_left(step, ranks, batch)
        wide = ranks * batch * (SIDE + GAP) - GAP
        picture.line(x, TOP - 8, x + wide, TOP - 8)
        words = f"step {step}: {ranks} ranks x {batch} samples"
        picture.text(x, TOP - 16, words, 13, weight="bold")
    return picture


def _step_left(step: int, ranks: int, batch: int) -> int:
    """Pixels from the first sample to the first one of a step."""
    return step * (ranks * batch * (SIDE + GAP) + 2 * GAP)


def _sample(picture: Picture, x: float, y: float, number: int, rank: int) -> None:
    picture.box(x, y, SIDE, SIDE, COLOURS[rank])
    picture.text(x + SIDE / 2, y + 20, number, 12, "middle")
