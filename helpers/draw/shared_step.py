"""One step of `nn.DataParallel`: what each GPU does when, and in which phase."""

from collections.abc import Sequence

from simgpu.pictures import COLOURS, HOST, Lanes, Picture

_LEFT, _TOP, _LANE = 62, 66, 44  # pixels


def shared_step(events: Sequence, title: str = "One step on four GPUs") -> Picture:
    """A lane for each GPU: kernels in its colour, copies grey; above, cuda:0's phases.

    A copy between two GPUs is drawn on both. Below each lane stands for how long the
    GPU computes, copies, and is idle.

    Args:
        events: of `simgpu.timeline()`, of one step of a model of linear layers.
        title: above the picture.

    Taught in 12-split-the-batch.
    """
    events = sorted(events, key=lambda event: event.start)
    begin, end = events[0].start, max(event.end for event in events)
    gpus = sorted({event.device for event in events})
    said = {gpu: _words(gpu, events, end - begin) for gpu in gpus}
    spoken = "; ".join(f"{gpu}: {words}" for gpu, words in said.items())
    height = _TOP + _LANE * len(gpus) + 48
    spoken = f"{title}. {spoken}"
    axis = Lanes(spoken, height, end - begin, _LEFT, begin=begin, least=1)
    axis.text(8, 20, title, 14, weight="bold")
    axis.text(8, 44, "cuda:0:", 12)
    for words, start, stop in _phases(events, end):
        axis.line(axis.at(start), 50, axis.at(stop) - 2, 50)
        axis.text(axis.at((start + stop) / 2), 44, words, 12, "middle")
    for row, gpu in enumerate(gpus):
        y = _TOP + _LANE * row
        axis.text(8, y + 16, gpu, 13)
        axis.bar(y, 22, begin, end, "white", stroke=HOST)
        for event in events:
            if gpu not in _gpus(event):
                continue
            fill = HOST if event.kind == "copy" else COLOURS[int(gpu[5:])]
            axis.bar(y, 22, event.start, event.end, fill)
        axis.text(_LEFT, y + 36, said[gpu], 12)
    axis.ticks(height - 42, "ms")
    words = "in colour: kernels, grey: copies, white: idle"
    axis.text(_LEFT, height - 6, words, 12)
    axis.simulated(height - 6)
    return axis


def _gpus(event) -> tuple[str, ...]:
    """The GPUs that an event keeps busy."""
    both = event.kind == "copy"
    return (event.source, event.target) if both else (event.device,)


def _words(gpu: str, events: Sequence, total: float) -> str:
    """How long a GPU computes, copies, and does neither, in milliseconds."""
    mine = [event for event in events if gpu in _gpus(event)]
    copies = sum(e.end - e.start for e in mine if e.kind == "copy")
    kernels = sum(e.end - e.start for e in mine if e.kind != "copy")
    parts = (kernels, copies, total - kernels - copies)
    computing, copying, idle = (f"{1e3 * part:.1f}" for part in parts)
    return f"computing {computing} ms, copying {copying} ms, idle {idle} ms"


def _phases(events: Sequence, end: float) -> list[tuple[str, float, float]]:
    """(words, start, end) of what cuda:0 does, by its large copies and last matmuls."""
    large = max(e.nbytes for e in events if e.kind == "copy") / 2
    moves = [e for e in events if e.kind == "copy" and e.nbytes > large]
    out = max(e.end for e in moves if e.source == "cuda:0")
    home = [e for e in moves if e.target == "cuda:0"]
    forward = max(e.end for e in events if e.name == "addmm")
    backward = min(e.start for e in events if e.name == "mm")
    return [
        ("weights out", events[0].start, out),
        ("forward", out, forward),
        ("backward", backward, home[0].start),
        ("gradients in", home[0].start, home[-1].end),
        ("Adam", home[-1].end, end),
    ]
