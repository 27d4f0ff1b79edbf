"""Pictures of memory: tensors on devices, and what a GPU's allocator holds."""

from typing import TYPE_CHECKING

from simgpu._compat import memory_segments
from simgpu._pictures.picture import (
    COLOURS,
    HOST,
    WIDEST,
    Picture,
    colour,
    plural,
    size_text,
)

if TYPE_CHECKING:
    import torch


def devices(sent: dict[str, list], returned: dict[str, list]) -> Picture:
    """What the host sends to each GPU, what comes back, and how many bytes each has.

    A module is sent as a whole to each GPU, and of a tensor each gets a part. A part
    has the colour of its GPU, also where it is in the full tensor on the host.

    Args:
        sent: name on the host -> for each GPU its module, or its part of a tensor.
        returned: name -> for each GPU its part of a tensor.
    """
    import torch

    rows = [*sent.items(), *returned.items()]
    gpus = max((len(things) for _, things in rows), default=0)
    left, wide, tall = 204, (WIDEST - 204) / max(gpus, 1), 76
    picture = Picture(WIDEST, 54 + tall * len(rows), "")
    columns = [("cpu", 8.0, 148.0)]
    columns += [(f"cuda:{i}", left + wide * i, wide - 8) for i in range(gpus)]
    for device, x, width in columns:
        picture.box(x, 8, width, picture.height - 16, "#F7F7F7")
        picture.box(x, 8, width, 28, colour(device))
        picture.text(x + width / 2, 28, device, 15, "middle", "bold")
    said = []
    for row, (name, things) in enumerate(rows):
        y, end = 44 + tall * row, left + wide * (gpus - 0.5) - 4
        whole, back = isinstance(things[0], torch.nn.Module), name in returned
        sizes = [_nbytes(thing) for thing in things]
        total = sizes[0] if whole else sum(sizes)
        fills = [HOST if whole else colour(f"cuda:{i}") for i in range(gpus)]
        way = "back from each" if back else "a part to each"
        way = "all of it to each" if whole else way
        its = "replica" if whole else name if back else "part"
        _thing(picture, 16, y + 10, 132, name, total, fills[: 1 if whole else None])
        picture.text(left + 6, y + 11, way, 12)
        ends = (end, 150) if back else (148, end)
        picture.line(ends[0], y + 16, ends[1], y + 16, arrow=back)
        for index, (size, fill) in enumerate(zip(sizes, fills, strict=True)):
            x = left + wide * index
            middle, ends = x + wide / 2 - 4, (y + 16, y + 29)
            picture.line(middle, ends[0], middle, ends[1], arrow=not back)
            _thing(picture, x + 6, y + 30, wide - 20, f"{its} {index}", size, [fill])
        said.append(f"{name}, {_megabytes(total)}: {way}, {_megabytes(sizes[0])}")
    picture.title = f"cpu and {plural(gpus, 'GPU')}. {'; '.join(said)}"
    return picture


def _thing(picture: Picture, x: float, y: float, wide: float, name: str, size: int,
           fills: list[str]) -> None:  # fmt: skip
    """A box: what it is, its bytes, and a strip of the colours of its parts."""
    picture.box(x, y, wide, 40)
    picture.text(x + 8, y + 15, name, 13, weight="bold")
    picture.text(x + 8, y + 29, _megabytes(size), 12)
    for index, fill in enumerate(fills):
        part = (wide - 2) / len(fills)
        picture.box(x + 1 + part * index, y + 33, part, 6, fill, stroke="none")


def _nbytes(thing: "torch.nn.Module | torch.Tensor") -> int:
    """Bytes of a tensor, or of a module's parameters and buffers."""
    tensors = thing.state_dict().values() if hasattr(thing, "state_dict") else [thing]
    return sum(tensor.nbytes for tensor in tensors)


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.2f} MB"


def segments(device: int = 0) -> Picture:
    """The segments that the allocator holds on a GPU, and the blocks in them.

    Blocks in use have the GPU's colour; grey ones wait for another stream, white ones
    are free. Works on real GPUs as well: the figures are `torch.cuda`'s own snapshot.
    """
    found = [segment for segment in memory_segments() if segment["device"] == device]
    return segment_picture(found, f"cuda:{device} ({_whose()})", f"cuda:{device}")


def segment_picture(segments: list[dict], whose: str, device: str) -> Picture:
    """The same for segments of a snapshot: the picture of `device`'s colour."""
    reserved = sum(segment["total_size"] for segment in segments)
    used = sum(segment["allocated_size"] for segment in segments)
    number = plural(len(segments), "segment")
    sizes = f"{size_text(reserved)} reserved, {size_text(used)} allocated"
    title = f"{whose}: {number}, {sizes}"
    picture = Picture(WIDEST, 34 + 42 * max(1, len(segments)), title)
    picture.text(8, 20, title, 14, weight="bold")
    longest = max((segment["total_size"] for segment in segments), default=1)
    left = 190
    scale = (WIDEST - left - 12) / longest
    fills = {
        "active_allocated": colour(device),
        "active_pending_free": HOST,
        "inactive": "white",
    }
    for row, segment in enumerate(segments):
        y = 34 + 42 * row
        kind = f"{size_text(segment['total_size'])}, {segment['segment_type']} pool"
        picture.text(8, y + 20, kind, 13)
        if segment["stream"]:
            picture.text(8, y + 34, "of another stream", 11)
        for block in segment["blocks"]:
            x = left + (block["address"] - segment["address"]) * scale
            long = max(block["size"] * scale, 1)
            picture.box(x, y, long, 32, fills[block["state"]])
            words = size_text(block["size"])
            if long > 7 * len(words) + 6:
                picture.text(x + long / 2, y + 20, words, 12, "middle")
    return picture


def parts(title: str = "", **sizes: float) -> Picture:
    """What a memory is made of: one bar, cut into named parts in proportion.

    Args:
        title: what the bar is.
        sizes: name=bytes.
    """
    total = sum(sizes.values())
    words = f"{title}: {size_text(total)}" if title else size_text(total)
    spoken = "; ".join(f"{name} {size_text(size)}" for name, size in sizes.items())
    picture = Picture(WIDEST, 62 + 20 * len(sizes), f"{words}. {spoken}")
    picture.text(8, 20, words, 14, weight="bold")
    x, scale = 8.0, (WIDEST - 16) / (total or 1)
    for row, (name, size) in enumerate(sizes.items()):
        fill = COLOURS[row % len(COLOURS)]
        picture.box(x, 30, size * scale, 26, fill)
        y = 64 + 20 * row
        picture.box(8, y, 14, 14, fill)
        picture.text(30, y + 12, f"{name}: {size_text(size)}", 13)
        x += size * scale
    return picture


def _whose() -> str:
    """Whether figures of GPUs are simulated, or of which card."""
    import torch

    import simgpu

    return "simulated" if simgpu.is_running() else torch.cuda.get_device_name()
