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


def devices(**tensors: "torch.Tensor") -> Picture:
    """Each tensor in the box of the device on which it lives.

    Args:
        tensors: name=tensor.
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
        kind = f"{size_text(segment['total_size'])} {segment['segment_type']}"
        stream = ", other stream" if segment["stream"] else ""
        picture.text(8, y + 20, kind + stream, 13)
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
