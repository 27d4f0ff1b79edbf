"""The ring explorer: an all-reduce over a ring of ranks, step by step."""

from helpers import draw
from helpers.explore.explorer import Explorer, slider

_LEFT, _WIDE, _ROW = 64, 49, 34  # pixels: of a picture's margin, a chunk, a rank


def ring() -> Explorer:
    """A ring all-reduce, one step after the other.

    Taught in 15-talk-between-ranks.
    """
    ranks, step = slider("ranks", 4, 2, 4), slider("step", 6, 1, 6)
    return Explorer(ring_picture, ranks=ranks, step=step)


def ring_states(ranks: int) -> list[list[list[frozenset[int]]]]:
    """Whose numbers are summed in each chunk of each rank, after every step.

    Returns:
        states[step][rank][chunk]: 2 (ranks - 1) steps after the start, which is step 0.
        First each rank adds what it gets from its left neighbour; once every chunk is
        complete in one rank, the complete chunks go round.
    """
    state = [[frozenset({rank})] * ranks for rank in range(ranks)]
    states = [[list(row) for row in state]]
    for step in range(2 * (ranks - 1)):
        before = states[-1]
        state = [list(row) for row in before]
        for rank in range(ranks):
            chunk = ring_chunk(ranks, rank, step)
            mine = before[(rank + 1) % ranks][chunk]
            state[(rank + 1) % ranks][chunk] = mine | before[rank][chunk]
        states.append(state)
    return states


def ring_chunk(ranks: int, rank: int, step: int) -> int:
    """The chunk that a rank sends to its right neighbour in a step (0 is the first)."""
    first = rank if step < ranks - 1 else rank + 1
    return (first - step % (ranks - 1)) % ranks


def ring_picture(ranks: int, step: int) -> draw.Picture:
    """The steps up to one: what has just come is framed, what is complete coloured.

    A chunk has one colour in all ranks. A step after the last shows the last.
    """
    states = ring_states(ranks)
    last, tall = len(states) - 1, 52 + _ROW * ranks
    step, parts = min(step, last), ("reduce-scatter", "all-gather")
    part = "all done" if step == last else parts[step >= ranks]
    title = f"After step {step} of {last}: {part}"
    picture = draw.Picture(draw.WIDEST, 2 * tall, title)
    for number in range(1, step + 1):
        row, column = divmod(number - 1, ranks - 1)
        x, y = _LEFT + column * (ranks * _WIDE + 12), row * tall + 46
        picture.text(x, y - 20, f"step {number}: {parts[row]}", 12, weight="bold")
        for rank, chunks in enumerate(states[number]):
            top = y + rank * _ROW
            if column == 0:
                picture.text(8, top + 16, f"rank {rank}", 12)
            came = ring_chunk(ranks, (rank - 1) % ranks, number - 1)
            for chunk, summed in enumerate(chunks):
                left, whole = x + chunk * _WIDE, len(summed) == ranks
                fill = draw.COLOURS[chunk] if whole else "white"
                stroke = draw.INK if chunk == came else draw.HOST
                picture.box(left, top, _WIDE - 3, _ROW - 12, fill, stroke=stroke)
                words = "all" if whole else "+".join(map(str, sorted(summed)))
                picture.text(left + _WIDE / 2 - 1, top + 16, words, 12, "middle")
            x_in = x + (came + 0.5) * _WIDE - 1
            picture.line(x_in, top - 12, x_in, top - 1, arrow=True)
    return picture
