"""The pipeline explorer: who idles under GPipe and 1F1B, and what stages must keep."""

from helpers import draw
from helpers.explore.explorer import Explorer, choice, slider


def pipeline() -> Explorer:
    """Stages that pass micro-batches on: who idles, and what each must keep.

    Taught in 13-split-the-model.
    """
    return Explorer(
        pipeline_picture,
        stages=slider("stages", 4, 1, 6),
        micro_batches=slider("micro-batches", 8, 1, 12),
        schedule=choice("schedule", ("GPipe", "1F1B")),
        slowest=slider("% of time, last stage", 100, 50, 300),
    )


def pipeline_order(
    schedule: str, stages: int, stage: int, micro_batches: int
) -> list[tuple[str, int]]:
    """What a stage does, in order: ("F", micro-batch) and ("B", micro-batch).

    GPipe: all forward, then all backward. 1F1B: as many forward as there are stages
    from here to the end, then backward and forward in turn.
    """
    ahead = min(stages - stage, micro_batches)
    if schedule == "GPipe":
        ahead = micro_batches
    order = [("F", m) for m in range(ahead)]
    for m in range(micro_batches):
        order.append(("B", m))
        if ahead + m < micro_batches:
            order.append(("F", ahead + m))
    return order


def pipeline_times(
    orders: list[list[tuple[str, int]]], seconds: list[float]
) -> list[list[tuple[str, int, float, float]]]:
    """When each stage does what: (kind, micro-batch, start, end).

    Forward waits for the stage before, backward for the stage after. Copies take no
    time.

    Args:
        orders: of each stage, from `pipeline_order`.
        seconds: of a forward pass of each stage; backward takes twice as long.

    Raises:
        ValueError: if the stages wait for each other for ever.
    """
    last, done = len(orders) - 1, {}
    rows: list[list] = [[] for _ in orders]
    while any(len(row) < len(order) for row, order in zip(rows, orders, strict=True)):
        before = len(done)
        for stage, (row, order) in enumerate(zip(rows, orders, strict=True)):
            while len(row) < len(order):
                kind, m = order[len(row)]
                needs = {("F", stage, m)} if kind == "B" else set()
                if stage != (0 if kind == "F" else last):
                    needs.add((kind, stage + (-1 if kind == "F" else 1), m))
                if not needs <= done.keys():
                    break
                free = row[-1][3] if row else 0.0
                start = max([free, *(done[need] for need in needs)])
                end = start + seconds[stage] * (1 if kind == "F" else 2)
                row.append((kind, m, start, end))
                done[kind, stage, m] = end
        if len(done) == before:
            raise ValueError("the stages wait for each other for ever")
    return rows


def most_held(row: list[tuple[str, int, float, float]]) -> int:
    """Micro-batches of which a stage keeps the activations, at most."""
    held = most = 0
    for kind, *_ in row:
        held += 1 if kind == "F" else -1
        most = max(most, held)
    return most


def pipeline_picture(
    stages: int, micro_batches: int, schedule: str, slowest: int
) -> draw.Picture:
    """The schedule, its bubble and the formula's, and what the stages keep."""
    seconds = [1.0] * (stages - 1) + [slowest / 100]
    orders = [
        pipeline_order(schedule, stages, stage, micro_batches)
        for stage in range(stages)
    ]
    rows = pipeline_times(orders, seconds)
    total = max(row[-1][3] for row in rows)
    bubble = 1 - 3 * micro_batches * sum(seconds) / (stages * total)
    formula = (stages - 1) / (micro_batches + stages - 1)
    title = (
        f"{schedule}: idle {bubble:.0%}, (p - 1) / (m + p - 1) = {formula:.0%}; "
        f"stages keep at most {', '.join(str(most_held(row)) for row in rows)}"
    )
    return draw.schedule(rows, title)
