"""One step of `nn.DataParallel`: what each GPU does when, and in which phase."""

from collections.abc import Sequence

from simgpu.pictures import COLOURS, HOST, INK, WIDEST, Picture

_LEFT, _RIGHT, _TOP, _LANE = 62, 12, 66, 44  # pixels


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
    scale = (WIDEST - _LEFT - _RIGHT) / (end - begin)
    said = {gpu: _words(gpu, events, end - begin) for gpu in gpus}
    spoken = "; ".join(f"{gpu}: {words}" for gpu, words in said.items())
    height = _TOP + _LANE * len(gpus) + 48
    picture = Picture(WIDEST, height, f"{title}. {spoken}")
    picture.text(8, 20, title, 14, weight="bold")
    picture.text(8, 44, "cuda:0:", 12)
    for words, start, stop in _phases(events, end):
        left, right = (_LEFT + (t - begin) * scale for t in (start, stop))
        picture.line(left, 50, right - 2, 50)
        picture.text((left + right) / 2, 44, words, 12, "middle")
    for row, gpu in enumerate(gpus):
        y = _TOP + _LANE * row
        picture.text(8, y + 16, gpu, 13)
        picture.box(_LEFT, y, (end - begin) * scale, 22, "white", stroke=HOST)
        for event in events:
            if gpu not in _gpus(event):
                continue
            fill = HOST if event.kind == "copy" else COLOURS[int(gpu[5:])]
            long = max((event.end - event.start) * scale, 1)
            x = _LEFT + (event.start - begin) * scale
            picture.box(x, y, long, 22, fill, stroke="none")
        picture.text(_LEFT, y + 36, said[gpu], 12)
    y = height - 42
    picture.line(_LEFT, y, WIDEST - _RIGHT, y, INK)
    for mark in range(int(1e3 * (end - begin)) + 1):
        x = _LEFT + mark / 1e3 * scale
        picture.line(x, y, x, y + 4, INK)
        picture.text(x, y + 17, f"{mark} ms", 12, "middle")
    picture.text(_LEFT, y + 36, "in colour: kernels, grey: copies, white: idle", 12)
    picture.text(WIDEST - 8, y + 36, "simulated", 12, "end")
    return picture


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
