"""Explorers: sliders that redraw a picture, for a lesson's what-if questions.

Core ipywidgets only, so that they work in JupyterLab, on Binder and in Colab, with
versions 7 and 8. A reader without a kernel sees the picture of the first setting.
"""

import ipywidgets
import torch
from IPython.display import display

from helpers import draw
from helpers.simgpu.cards import MIB
from helpers.simgpu.clock import COPY_LATENCY
from helpers.simgpu.memory import Memory


class Explorer(ipywidgets.VBox):
    """Controls above a picture that follows them.

    Args:
        picture: function of the controls' values, by name, to a `draw.Picture`.
        controls: name=widget with a value.
    """

    def __init__(self, picture, **controls):
        self._picture = picture
        self.controls = controls
        self.html = ipywidgets.HTML()
        for control in controls.values():
            control.continuous_update = False
            control.observe(lambda _: self.render(), "value")
        super().__init__([*controls.values(), self.html])
        self.render()

    @property
    def values(self) -> dict:
        """What the controls say now."""
        return {name: control.value for name, control in self.controls.items()}

    def render(self) -> None:
        """Draw the picture anew."""
        self.html.value = self._picture(**self.values)._repr_svg_()

    def _ipython_display_(self, **_) -> None:
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        settings = ", ".join(f"{name}={value!r}" for name, value in self.values.items())
        bundle = {
            "application/vnd.jupyter.widget-view+json": view,
            "image/svg+xml": self.html.value,
            "text/plain": f"Explorer({settings})",
        }
        display(bundle, raw=True)


def _slider(text: str, value: int, least: int, most: int) -> ipywidgets.IntSlider:
    return ipywidgets.IntSlider(
        value,
        least,
        most,
        description=text,
        style={"description_width": "160px"},
        layout={"width": "420px"},
    )


# -- memory ----------------------------------------------------------------------------

CARD = 64 * MIB  # of the allocator explorer
_FREE = ("none", "every second", "first half", "all")


def allocator() -> Explorer:
    """Tensors come, some go, one more is asked for: where does it find room?

    A GPU of 64 MiB of its own; the simulated GPUs of the notebook are not touched.

    Taught in 03-count-memory.
    """
    return Explorer(
        allocator_picture,
        tensors=_slider("tensors", 9, 1, 24),
        size=_slider("MiB of each", 6, 1, 24),
        free=ipywidgets.Dropdown(
            options=_FREE, value="every second", description="then free",
            style={"description_width": "160px"}, layout={"width": "420px"},
        ),
        more=_slider("MiB of one more", 12, 1, 48),
    )  # fmt: skip


def allocator_picture(tensors: int, size: int, free: str, more: int) -> draw.Picture:
    """The segments after the story, and how it ended."""
    memory, blocks = Memory(0, CARD), []
    ending = ""
    try:
        for _ in range(tensors):
            blocks.append(memory.allocate(size * MIB))
    except torch.OutOfMemoryError:
        ending = f"out of memory at tensor {len(blocks) + 1} of {tensors}"
    goes = {
        "none": [], "every second": blocks[1::2], "all": blocks,
        "first half": blocks[: len(blocks) // 2],
    }[free]  # fmt: skip
    for block in goes:
        memory.free(block)
    before = memory.reserved
    unused = CARD - memory.allocated
    if not ending:
        try:
            memory.allocate(more * MIB)
            found = "in the cache" if memory.reserved == before else "in a new segment"
            ending = f"{more} MiB more: found {found}"
        except torch.OutOfMemoryError:
            ending = (
                f"{more} MiB more: out of memory with {unused // MIB} MiB not taken"
            )
    whose = "64 MiB of memory (simulated)"
    picture = draw.segment_picture(memory.snapshot(), whose, "cuda:0")
    picture.title += f". {ending}"
    picture.height += 24
    picture.text(8, picture.height - 10, ending, 14, weight="bold")
    return picture


# -- streams ---------------------------------------------------------------------------


def overlap() -> Explorer:
    """Copy and compute in chunks, on one stream and on two.

    Taught in 04-overlap-with-streams.
    """
    return Explorer(
        overlap_picture,
        chunks=_slider("chunks", 4, 1, 16),
        megabytes=_slider("MB to copy", 64, 1, 256),
        speed=_slider("GB/s of the link", 12, 1, 64),
        compute=_slider("ms to compute", 6, 1, 30),
    )


def overlap_times(
    chunks: int, megabytes: int, speed: int, compute: int
) -> list[tuple[float, float, float]]:
    """When each chunk's copy ends, its computing starts and ends, in seconds.

    The copies follow each other; a chunk is computed once it is there and the one
    before it is done.
    """
    copy = COPY_LATENCY + megabytes * 1e6 / chunks / (speed * 1e9)
    work = compute * 1e-3 / chunks
    times, free = [], 0.0
    for i in range(chunks):
        there = (i + 1) * copy
        start = max(there, free)
        free = start + work
        times.append((there, start, free))
    return times


def overlap_picture(
    chunks: int, megabytes: int, speed: int, compute: int
) -> draw.Picture:
    """Both schedules on one time axis, with their seconds."""
    times = overlap_times(chunks, megabytes, speed, compute)
    copy, work = times[0][0], times[0][2] - times[0][1]
    one, two = chunks * (copy + work), times[-1][2]
    title = (
        f"One stream {one * 1e3:.2f} ms, two streams {two * 1e3:.2f} ms (simulated): "
        f"{one / two:.2f} times as fast"
    )
    picture = draw.Picture(draw.WIDEST, 156, title)
    picture.text(8, 20, title, 14, weight="bold")
    scale = (draw.WIDEST - 120) / one

    def box(row, start, seconds, fill):
        x, y = 108 + start * scale, 34 + 38 * row
        picture.box(x, y, max(seconds * scale, 0.5), 30, fill)

    for row, words in enumerate(("one stream", "copy stream", "compute")):
        picture.text(8, 54 + 38 * row, words)
    for i, (there, start, _) in enumerate(times):
        box(0, i * (copy + work), copy, draw.HOST)
        box(0, i * (copy + work) + copy, work, draw.colour("cuda:0"))
        box(1, there - copy, copy, draw.HOST)
        box(2, start, work, draw.colour("cuda:0"))
    return picture


# -- ranks -----------------------------------------------------------------------------


def ring() -> Explorer:
    """A ring all-reduce, one step after the other.

    Taught in 12-talk-between-ranks.
    """
    return Explorer(
        ring_picture, ranks=_slider("ranks", 4, 2, 6), step=_slider("step", 2, 0, 10)
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
            words = "all" if whole else " + ".join(map(str, sorted(summed)))
            picture.text(x + (wide - 12) / 2, y + 19, words, 13, "middle")
    for chunk in range(ranks):
        picture.text(8, 71 + tall * chunk, f"chunk {chunk}", 13)
    return picture
