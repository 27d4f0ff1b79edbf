"""What loader workers and the GPU do when, for a model of a `DataLoader`."""

from simgpu.pictures import COLOURS, HOST, INK, Lanes, Picture, plural

_LEFT, _LANE, _HEAD = 84, 26, 46  # pixels


def loaders(
    load: float, step: float, workers: list[int], batches: int = 7, factor: int = 2
) -> Picture:
    """Loaders with different numbers of workers, one under the other, on one axis.

    A model of the schedule, not a run: every batch takes the same time. Worker
    `i % workers` loads batch i, once it has done its last one and the loop has taken
    batch `i - workers * factor`. A batch keeps its number from worker to GPU.

    Args:
        load: seconds in which a worker loads a batch.
        step: seconds in which the GPU trains on it.
        workers: numbers of workers to compare.
        batches: drawn for each.
        factor: `prefetch_factor`.

    Taught in 11-feed-the-gpu.
    """
    plans = {count: plan(load, step, count, batches, factor) for count in workers}
    ends = {count: used[-1][1] for count, (_, used) in plans.items()}
    waits = {
        count: ends[count] - used[0][0] - batches * step
        for count, (_, used) in plans.items()
    }
    said = {
        count: f"{plural(count, 'worker')}: {batches} batches in "
        f"{1e3 * ends[count]:.1f} ms; after its first batch the GPU waits "
        f"{1e3 * max(0.0, waits[count]):.1f} ms"
        for count in workers
    }
    height = sum(_HEAD + _LANE * (count + 1) for count in workers) + 34
    title = f"Loading and training. {'; '.join(said.values())}"
    axis = Lanes(title, height, max(ends.values()), _LEFT, letter=7, drop=5)
    y = 8

    def lane(name: str, spans: list, fill: str) -> None:
        axis.text(8, y + 15, name, 12)
        for number, (start, end) in spans:
            axis.bar(y, _LANE - 6, start, end, fill, number, stroke=INK)

    for count, (loaded, used) in plans.items():
        axis.text(8, y + 14, said[count], 13, weight="bold")
        y += 26
        for worker in range(count):
            lane(f"worker {worker}", list(enumerate(loaded))[worker::count], HOST)
            y += _LANE
        for (_, end), (start, _) in zip(used, used[1:], strict=False):
            axis.between(y + 15, end, start, "waits")
        lane("GPU", list(enumerate(used)), COLOURS[0])
        y += _LANE + _HEAD - 26
    axis.rule(height - 24, INK)
    last = f"{1e3 * max(ends.values()):.1f} ms"
    axis.footer(height - 9, f"{last} (a model: all batches take equally long)")
    return axis


def plan(
    load: float, step: float, workers: int, batches: int, factor: int = 2
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """When each batch is loaded, and when the GPU trains on it: starts and ends."""
    loaded: list[tuple[float, float]] = []
    used: list[tuple[float, float]] = []
    for number in range(batches):
        free = loaded[number - workers][1] if number >= workers else 0.0
        ahead = number - workers * factor
        begin = max(free, used[ahead][0]) if ahead >= 0 else free
        loaded.append((begin, begin + load))
        start = max(begin + load, used[-1][1] if used else 0.0)
        used.append((start, start + step))
    return loaded, used
