"""Which bytes of memory a tensor covers, and memory cut into pieces by who uses it.

The sanitizer knows tensors by one number each. Tensors overlap: two views of a storage,
or a new tensor where an old one was. So memory is cut into intervals such that each
access covers some of them exactly, and each interval is one number for the sanitizer.
"""

from bisect import bisect_left

_RUNS = 1024  # a strided tensor is watched as at most so many runs of memory


def runs(tensor, base: int) -> list[tuple[int, int]]:
    """The runs of memory that a tensor covers: (first address, end)."""
    if tensor.numel() == 0:
        return []
    size = tensor.element_size()
    start = base + tensor.storage_offset() * size
    if tensor.is_contiguous():
        return [(start, start + tensor.numel() * size)]
    dims = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    length = 1  # elements that lie together
    while dims and (dims[0][0] <= length or dims[0][1] == 1):
        stride, count = dims.pop(0)
        if stride and count > 1:
            length += stride * (count - 1)
    offsets = [0]
    for stride, count in dims:
        count = min(count, _RUNS // len(offsets))
        offsets = [o + i * stride for i in range(count) for o in offsets]
    return [(start + o * size, start + (o + length) * size) for o in offsets]


class IntervalMap:
    """Memory cut into the largest pieces that are always accessed as a whole."""

    def __init__(self):
        self.lows: list[int] = []
        self.ends: dict[int, int] = {}  # first address -> end

    def cover(self, low: int, high: int) -> tuple[list[int], list[tuple[int, int]]]:
        """The pieces that cover [low, high) exactly, by their first addresses.

        Returns:
            The pieces, and those cut off just now: (new piece, piece it was part of).
        """
        if self.ends.get(low) == high:
            return [low], []
        cuts = [cut for cut in (self._cut(low), self._cut(high)) if cut]
        pieces = []
        while low < high:
            i = bisect_left(self.lows, low)
            following = self.lows[i] if i < len(self.lows) else high
            if following > low:
                self._add(low, min(following, high))
            pieces.append(low)
            low = self.ends[low]
        return pieces, cuts

    def join(self, low: int, high: int) -> list[int]:
        """Make one piece of those that cover [low, high) exactly; the rest of them."""
        if self.ends.get(low) == high:
            return []
        first = bisect_left(self.lows, low)
        last = bisect_left(self.lows, high)
        gone = self.lows[first + 1 : last]
        if gone:
            del self.lows[first + 1 : last]
            for piece in gone:
                del self.ends[piece]
            self.ends[low] = high
        return gone

    def _cut(self, point: int) -> tuple[int, int] | None:
        """Cut the piece within which `point` lies, if there is one."""
        i = bisect_left(self.lows, point) - 1
        if i < 0 or self.ends[self.lows[i]] <= point:
            return None
        part_of = self.lows[i]
        self._add(point, self.ends[part_of])
        self.ends[part_of] = point
        return point, part_of

    def _add(self, low: int, end: int) -> None:
        self.lows.insert(bisect_left(self.lows, low), low)
        self.ends[low] = end
