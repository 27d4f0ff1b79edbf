"""Pictures that draw themselves in a notebook, as SVG of our own.

The same device has the same colour in every lesson. Every picture has a title, which
screen readers speak, and looks the same on every machine, so that tests compare it.
"""

from html import escape
from pathlib import Path

# Okabe and Ito's palette, which colour-blind readers can tell apart
COLOURS = (
    "#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00", "#0072B2",
)  # fmt: skip
HOST = "#BBBBBB"
INK = "#222222"
WIDEST = 700  # pixels: what a notebook shows beside its file browser on a laptop


def colour(device: str) -> str:
    """The colour of "cpu" or "cuda:N"."""
    if device == "cpu":
        return HOST
    return COLOURS[int(device.removeprefix("cuda:")) % len(COLOURS)]


class Picture:
    """An SVG under construction; as the last value of a cell it shows itself."""

    def __init__(self, width: int, height: int, title: str):
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(self, x, y, width, height, fill="white", dashed=False, stroke=INK):
        """A rectangle with its top left corner at (x, y)."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
            f'fill="{fill}" stroke="{stroke}"{dash}/>'
        )

    def text(self, x, y, words, size=14, anchor="start", weight="normal"):
        """Words on the base line y, at x."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" '
            f'font-weight="{weight}">{escape(str(words))}</text>'
        )

    def line(self, x1, y1, x2, y2, stroke=INK, arrow=False):
        """A straight line; with `arrow`, a head at its end."""
        head = ' marker-end="url(#head)"' if arrow else ""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" '
            f'stroke="{stroke}" stroke-width="1.5"{head}/>'
        )

    def _repr_svg_(self) -> str:
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" '
            'markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>'
        )
        inside = "".join(self.parts)
        scale = min(1, WIDEST / self.width)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width * scale:g}" '
            f'height="{self.height * scale:g}" '
            f'viewBox="0 0 {self.width} {self.height}" '
            f'role="img" font-family="sans-serif" fill="{INK}">'
            f"<title>{escape(self.title)}</title>{head}"
            f'<rect width="{self.width}" height="{self.height}" fill="white"/>'
            f"{inside}</svg>"
        )

    def __repr__(self) -> str:
        return f"Picture({self.title!r})"


def devices(**tensors) -> Picture:
    """Each tensor in the box of the device on which it lives.

    Args:
        tensors: name=tensor.

    Taught in 01-choose-a-device.
    """
    import torch

    names = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    inside = {name: [] for name in names}
    for name, tensor in tensors.items():
        inside[str(tensor.device)].append((name, tensor))
    rows = max(1, *(len(found) for found in inside.values()))
    longest = max((len(_about(t)) for t in tensors.values()), default=0)
    width, height = max(130, 34 + 7 * longest), 40 + 46 * rows
    title = "; ".join(
        f"{device}: {', '.join(name for name, _ in found) or 'empty'}"
        for device, found in inside.items()
    )
    picture = Picture(len(names) * (width + 8) + 8, height + 16, f"Devices. {title}")
    for i, (device, found) in enumerate(inside.items()):
        x = 8 + i * (width + 8)
        picture.box(x, 8, width, height, fill="#F7F7F7")
        picture.box(x, 8, width, 28, fill=colour(device))
        picture.text(x + width / 2, 28, device, 15, "middle", "bold")
        for row, (name, tensor) in enumerate(found):
            y = 44 + 46 * row
            picture.box(x + 8, y, width - 16, 40)
            picture.text(x + 16, y + 17, name, 14, weight="bold")
            picture.text(x + 16, y + 34, _about(tensor), 12)
    return picture


def _about(tensor) -> str:
    """Shape and dtype of a tensor in a few letters."""
    shape = " x ".join(map(str, tensor.shape)) or "scalar"
    return f"{shape}  {str(tensor.dtype).removeprefix('torch.')}"


def timeline(log, width: int = WIDEST) -> Picture:
    """The log of `simgpu.timeline()`: lanes for the host and each stream of each GPU.

    Time goes from left to right. Kernels have their GPU's colour, copies are grey. The
    host's lane is dark where it launches and light where it waits. A copy between two
    GPUs is drawn on both.

    Taught in 00-start-here and 04-overlap-with-streams.
    """
    from helpers.simgpu.clock import LAUNCH

    lanes, waits = log.lanes(), log.waits
    total = max(log.seconds, 1e-6)
    left, lane_height, host_height = 84, 34, 26
    height = host_height + len(lanes) * lane_height + 44
    title = (
        f"Timeline of {_count(len(log.events), 'event')} on "
        f"{_count(len(log.devices), 'GPU')}, simulated time"
    )
    picture = Picture(width, height, title)
    scale = (width - left - 12) / total

    def span(start, end, y, tall, fill, words):
        long = max((end - start) * scale, 0.5)
        x = left + start * scale
        picture.box(x, y, long, tall, fill, stroke="none")
        words = words if len(words) * 7 + 8 < long else words.split()[0]
        if len(words) * 7 + 8 < long:
            picture.text(x + long / 2, y + tall / 2 + 4, words, 12, "middle")

    picture.text(8, 24, "host", 14)
    for event in log.events:
        picture.box(
            left + event.launched * scale, 10, max(LAUNCH * scale, 0.5),
            host_height - 8, INK, stroke="none",
        )  # fmt: skip
    for wait in waits:
        span(wait.start, wait.end, 10, host_height - 8, "#EEEEEE", wait.name)
    for row, ((device, stream), events) in enumerate(lanes.items()):
        y = 8 + host_height + row * lane_height
        picture.text(8, y + 20, f"{device} s{stream}" if stream else device, 14)
        picture.line(left, y + lane_height - 4, width - 12, y + lane_height - 4, HOST)
        drawn = 0.0  # up to where slivers are there already
        for event in events:
            if event.end * scale < drawn:
                continue
            drawn = event.start * scale + 0.5
            fill = HOST if event.kind == "copy" else colour(device)
            words = f"copy {event.name}" if event.kind == "copy" else event.name
            span(event.start, event.end, y + 2, lane_height - 8, fill, words)
    picture.text(left, height - 10, "0", 12)
    words = f"{total * 1e6:,.0f} µs (simulated)"
    picture.text(width - 12, height - 10, words, 12, "end")
    return picture


def segments(device: int = 0) -> Picture:
    """The segments that the allocator holds on a GPU, and the blocks in them.

    Blocks in use have the GPU's colour; grey ones wait for another stream, white ones
    are free. Works on real GPUs as well: the figures are `torch.cuda`'s own snapshot.

    Taught in 03-count-memory.
    """
    import torch

    found = [
        segment
        for segment in torch.cuda.memory._snapshot()["segments"]
        if segment["device"] == device
    ]
    return segment_picture(found, f"cuda:{device} ({_whose()})", f"cuda:{device}")


def segment_picture(found: list[dict], whose: str, device: str) -> Picture:
    """The same for segments of a snapshot: the picture of `device`'s colour."""
    reserved = sum(segment["total_size"] for segment in found)
    used = sum(segment["allocated_size"] for segment in found)
    count = _count(len(found), "segment")
    title = f"{whose}: {count}, {_size(reserved)} reserved, {_size(used)} allocated"
    picture = Picture(WIDEST, 34 + 42 * max(1, len(found)), title)
    picture.text(8, 20, title, 14, weight="bold")
    longest = max((segment["total_size"] for segment in found), default=1)
    left = 190
    scale = (WIDEST - left - 12) / longest
    fills = {
        "active_allocated": colour(device),
        "active_pending_free": HOST,
        "inactive": "white",
    }
    for row, segment in enumerate(found):
        y = 34 + 42 * row
        kind = f"{_size(segment['total_size'])} {segment['segment_type']}"
        stream = ", other stream" if segment["stream"] else ""
        picture.text(8, y + 20, kind + stream, 13)
        for block in segment["blocks"]:
            x = left + (block["address"] - segment["address"]) * scale
            long = max(block["size"] * scale, 1)
            picture.box(x, y, long, 32, fills[block["state"]])
            words = _size(block["size"])
            if long > 7 * len(words) + 6:
                picture.text(x + long / 2, y + 20, words, 12, "middle")
    return picture


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _whose() -> str:
    """Whether figures of GPUs are simulated, or of which card."""
    import torch

    from helpers import simgpu

    return "simulated" if simgpu.count() else torch.cuda.get_device_name()


def _size(nbytes: float) -> str:
    """A number of bytes for a picture: "2 MiB", "1.5 KiB"."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes:.0f} B"


def parts(title: str = "", **sizes: float) -> Picture:
    """What a memory is made of: one bar, cut into named parts in proportion.

    Args:
        title: what the bar is.
        sizes: name=bytes.

    Taught in 03-count-memory.
    """
    total = sum(sizes.values())
    words = f"{title}: {_size(total)}" if title else _size(total)
    spoken = "; ".join(f"{name} {_size(size)}" for name, size in sizes.items())
    picture = Picture(WIDEST, 62 + 20 * len(sizes), f"{words}. {spoken}")
    picture.text(8, 20, words, 14, weight="bold")
    x, scale = 8.0, (WIDEST - 16) / (total or 1)
    for row, (name, size) in enumerate(sizes.items()):
        fill = COLOURS[row % len(COLOURS)]
        picture.box(x, 30, size * scale, 26, fill)
        y = 64 + 20 * row
        picture.box(8, y, 14, 14, fill)
        picture.text(30, y + 12, f"{name}: {_size(size)}", 13)
        x += size * scale
    return picture


def history(device: int = 0) -> Picture:
    """The bytes in use on a GPU, event by event, since recording began.

    Needs `torch.cuda.memory._record_memory_history()` before the program.

    Raises:
        ValueError: if nothing was recorded.

    Taught in 03-count-memory.
    """
    import torch

    steps = {"alloc": 1, "free_completed": -1}
    snapshot = torch.cuda.memory._snapshot()
    live = sum(
        s["requested_size"] for s in snapshot["segments"] if s["device"] == device
    )
    curve = [live]  # from its end back to its beginning
    for event in reversed(snapshot["device_traces"][device]):
        if event["action"] in steps:
            live -= steps[event["action"]] * event["size"]
            curve.append(live)
    curve.reverse()
    if len(curve) == 1:
        raise ValueError(
            "nothing was recorded; call torch.cuda.memory._record_memory_history() "
            "before the program"
        )
    most = max(curve)
    title = f"Bytes in use on cuda:{device} ({_whose()}), at most "
    picture = Picture(WIDEST, 200, title + _size(most))
    left, bottom, tall, wide = 84, 160, 130, WIDEST - 104
    picture.text(8, 20, title + _size(most), 14, weight="bold")
    step = wide / len(curve)
    for i, nbytes in enumerate(curve):
        height = tall * nbytes / (most or 1)
        x, fill = left + i * step, colour(f"cuda:{device}")
        picture.box(x, bottom - height, step, height, fill, stroke="none")
    for share in (0, 0.5, 1):
        y = bottom - tall * share
        picture.line(left - 4, y, left + wide, y, HOST)
        picture.text(left - 8, y + 4, _size(most * share), 12, "end")
    picture.text(left, bottom + 20, "first event", 12)
    picture.text(left + wide, bottom + 20, "last event", 12, "end")
    return picture


def collective(before: list, after: list, title: str) -> Picture:
    """What each rank holds before and after a collective.

    Args:
        before: item r is what rank r holds: a list of numbers or words, or one of them.
        after: the same, afterwards.
        title: what happened, such as "all-reduce (sum)".

    Taught in 12-talk-between-ranks.
    """

    def cells(value) -> list:
        value = value.tolist() if hasattr(value, "tolist") else value
        return value if isinstance(value, (list, tuple)) else [value]

    columns = [(cells(a), cells(b)) for a, b in zip(before, after, strict=True)]
    widest = max(len(words) for column in columns for words in column)
    wide, gap = max(56, 34 * widest), 14
    spoken = "; ".join(
        f"rank {r}: {', '.join(map(str, a))} becomes {', '.join(map(str, b))}"
        for r, (a, b) in enumerate(columns)
    )
    width = 70 + len(columns) * (wide + gap)
    picture = Picture(width, 150, f"{title}. {spoken}")
    picture.text(8, 20, title, 14, weight="bold")
    picture.text(8, 72, "before", 13)
    picture.text(8, 128, "after", 13)
    for rank, column in enumerate(columns):
        x = 70 + rank * (wide + gap)
        fill = COLOURS[rank % len(COLOURS)]
        picture.text(x + wide / 2, 42, f"rank {rank}", 13, "middle")
        for y, words in zip((52, 108), column, strict=True):
            each = wide / max(len(words), 1)
            for i, word in enumerate(words):
                picture.box(x + i * each, y, each, 30, fill)
                word = f"{word:g}" if isinstance(word, float) else word
                picture.text(x + (i + 0.5) * each, y + 20, word, 13, "middle")
        picture.line(x + wide / 2, 84, x + wide / 2, 104, arrow=True)
    return picture


# number, title, what it runs on
COURSE = (
    (0, "Start here", "simulated"),
    (1, "Choose a device", "simulated"),
    (2, "Create tensors where you need them", "simulated"),
    (3, "Count memory", "simulated"),
    (4, "Overlap with streams", "simulated"),
    (5, "Time it right", "simulated"),
    (6, "Mix precision", "simulated"),
    (7, "Fit a bigger model", "simulated"),
    (8, "Feed the GPU", "simulated"),
    (9, "Share tensors between processes", "ranks"),
    (10, "Split the batch", "simulated"),
    (11, "Split the model", "simulated"),
    (12, "Talk between ranks", "ranks"),
    (13, "Average gradients", "ranks"),
    (14, "Pipeline and slice", "ranks"),
    (15, "Shard everything", "ranks"),
    (16, "Survive failures", "ranks"),
    (17, "Leave one machine", "ranks"),
    (18, "Train it all", "ranks"),
    (19, "Test the claims", "simulated"),
)


def schedule(stages: list[list[tuple[str, int, float, float]]], title: str) -> Picture:
    """What each stage of a pipeline does when: forward and backward, micro-batch.

    Args:
        stages: for each, (kind, micro-batch, start, end); kind is "F" or "B".
        title: above the picture.

    Taught in 11-split-the-model.
    """
    end = max((task[3] for row in stages for task in row), default=0) or 1
    left, row_height = 76, 34
    picture = Picture(WIDEST, 60 + row_height * len(stages), title)
    picture.text(8, 20, title, 14, weight="bold")
    scale = (WIDEST - left - 12) / end
    for stage, row in enumerate(stages):
        y = 34 + row_height * stage
        picture.text(8, y + 19, f"stage {stage}", 13)
        for kind, micro_batch, start, stop in row:
            x, width = left + start * scale, (stop - start) * scale
            fill = COLOURS[0] if kind == "F" else COLOURS[1]
            picture.box(x, y, width, row_height - 6, fill)
            if width >= 9 * len(str(micro_batch)):
                picture.text(x + width / 2, y + 19, micro_batch, 12, "middle")
    y = picture.height - 20
    for i, (words, fill) in enumerate(
        (("forward", COLOURS[0]), ("backward", COLOURS[1]), ("idle", "white"))
    ):
        picture.box(left + 110 * i, y, 14, 14, fill)
        picture.text(left + 110 * i + 20, y + 12, words, 12)
    return picture


def course_map() -> Picture:
    """The lessons of the course, five a row; those still to be written are dashed.

    Taught in 00-start-here.
    """
    fills = {"simulated": "#D7EEFA", "ranks": "#FBE5BF"}
    width, height, gap = 130, 80, 8
    written = {int(path.name[:2]) for path in Path.cwd().glob("[0-9][0-9]-*.ipynb")}
    title = "The course: 20 lessons, on simulated GPUs (blue) or real ranks (orange)"
    picture = Picture(5 * (width + gap) + gap, 4 * (height + gap) + 44, title)
    for number, name, runs_on in COURSE:
        x = gap + (number % 5) * (width + gap)
        y = gap + (number // 5) * (height + gap)
        picture.box(x, y, width, height, fills[runs_on], dashed=number not in written)
        picture.text(x + 8, y + 19, f"{number:02d}", 15, weight="bold")
        for row, words in enumerate(_wrap(name, 14)):
            picture.text(x + 8, y + 38 + 17 * row, words, 14)
    y = 4 * (height + gap) + 14
    for x, words, key in (
        (gap, "on simulated GPUs", "simulated"),
        (gap + 180, "on real ranks (processes)", "ranks"),
    ):
        picture.box(x, y, 18, 16, fills[key])
        picture.text(x + 26, y + 13, words)
    if len(written) < len(COURSE):
        picture.box(gap + 400, y, 18, 16, dashed=True)
        picture.text(gap + 426, y + 13, "dashed: being written")
    return picture


def _wrap(words: str, width: int) -> list[str]:
    lines = [""]
    for word in words.split():
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
