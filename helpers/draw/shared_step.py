"""One step of `nn.DataParallel`: what each GPU does when, and in which phase."""

from collections.abc import Sequence

from simgpu.pictures import COLOURS, HOST, Lanes, Picture

_LEFT, _TOP, _LANE = 62, 66, 44  # pixels


def shared_step(events: Sequence, title: str = "One step on four GPUs") -> Picture:
    """A lane for each GPU: kernels in its colour, messages grey; above, the phases.

    Messages are NCCL's collectives, named in their bars, and copies, which are drawn
    on both GPUs. Below each lane stands for how long the GPU computes, sends or
    receives, and is idle.

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
    axis = Lanes(f"{title}. {spoken}", height, end - begin, _LEFT, begin=begin, least=1)
    axis.text(8, 20, title, 14, weight="bold")
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
            if event.kind == "kernel":
                axis.bar(y, 22, event.start, event.end, COLOURS[int(gpu[5:])])
            else:
                words = event.name if event.kind == "collective" else ""
                axis.bar(y, 22, _begins(event), event.end, HOST, words)
        ends = [e.end for e in events if gpu in _gpus(e)]
        axis.between(y + 16, max(ends), end, "idle")
        axis.text(_LEFT, y + 36, said[gpu], 12)
    axis.ticks(height - 42, "ms")
    axis.text(_LEFT, height - 6, "in colour: kernels, grey: messages, white: idle", 12)
    axis.simulated(height - 6)
    return axis


def _gpus(event) -> tuple[str, ...]:
    """The GPUs that an event keeps busy."""
    both = event.kind == "copy"
    return (event.source, event.target) if both else (event.device,)


def _begins(event) -> float:
    """When a message moves: a collective waits for its last GPU first."""
    return event.start + event.waited


def _words(gpu: str, events: Sequence, total: float) -> str:
    """How long a GPU computes, sends or receives, and does neither."""
    mine = [event for event in events if gpu in _gpus(event)]
    kernels = sum(e.end - e.start for e in mine if e.kind == "kernel")
    messages = sum(e.end - _begins(e) for e in mine if e.kind != "kernel")
    parts = (kernels, messages, total - kernels - messages)
    computing, moving, idle = (f"{1e3 * part:.1f}" for part in parts)
    return f"computing {computing} ms, messages {moving} ms, idle {idle} ms"


def _phases(events: Sequence, end: float) -> list[tuple[str, float, float]]:
    """(words, start, end) of what the GPUs do, by two collectives and the matmuls."""
    out = [e for e in events if e.name == "broadcast"]
    home = [e for e in events if e.name == "reduce"]
    forward = max(e.end for e in events if e.name == "addmm")
    backward = min(e.start for e in events if e.name == "mm")
    first, last = max(map(_begins, home)), max(e.end for e in home)
    arrived = max(e.end for e in out)
    return [
        ("weights out", events[0].start, arrived),
        ("forward", arrived, forward),
        ("loss", forward, backward),
        ("backward", backward, first),
        ("gradients in", first, last),
        ("Adam", last, end),
    ]
