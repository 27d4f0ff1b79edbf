"""The ring explorer: an all-reduce over a ring of ranks, step by step."""

from helpers import draw
from helpers.explore.explorer import Explorer, slider


def ring() -> Explorer:
    """A ring all-reduce, one step after the other.

    Taught in 15-talk-between-ranks.
    """
    return Explorer(
        ring_picture, ranks=slider("ranks", 4, 2, 6), step=slider("step", 2, 0, 10)
    )


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
    """The chunks of every rank after some steps: orange is new, green complete.

    A step after the last shows the last.
    """
    states = ring_states(ranks)
    step = min(step, len(states) - 1)
    part = "all done" if step == len(states) - 1 else "reduce-scatter"
    if ranks - 1 <= step < len(states) - 1:
        part = "all-gather"
    title = f"After step {step} of {len(states) - 1}: {part if step else 'the start'}"
    wide, tall = (draw.WIDEST - 84) // ranks, 34
    plus = " + " if ranks < 6 else "+"  # five numbers have to fit into a sixth
    picture = draw.Picture(draw.WIDEST, 64 + tall * ranks, title)
    picture.text(8, 20, title, 14, weight="bold")
    for rank, row in enumerate(states[step]):
        x = 76 + rank * wide
        picture.text(x + (wide - 12) / 2, 44, f"rank {rank}", 13, "middle")
        for chunk, summed in enumerate(row):
            y = 52 + tall * chunk
            whole = len(summed) == ranks
            fill = draw.COLOURS[2] if whole else "white"
            came = step > 0 and chunk == ring_chunk(ranks, (rank - 1) % ranks, step - 1)
            picture.box(x, y, wide - 12, tall - 6, draw.COLOURS[1] if came else fill)
            words = "all" if whole else plus.join(map(str, sorted(summed)))
            picture.text(x + (wide - 12) / 2, y + 19, words, 13, "middle")
    for chunk in range(ranks):
        picture.text(8, 71 + tall * chunk, f"chunk {chunk}", 13)
    return picture
