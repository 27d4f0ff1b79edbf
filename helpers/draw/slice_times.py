"""What cutting a block over four GPUs costs: a table of predicted and counted times.

The prediction is the time of the slices alone plus four all-reduces, one after the
other; all from the simulator.
"""

RANKS, CARD = 4, "A100"
SIZES = ((1024, 512, "float32"), (4096, 4096, "bfloat16"))
NEAR = 0.07  # by how much the counted time may be longer than the predicted one


def slice_times(block: type, logs: dict, network: str) -> str:
    """Rows for a block that was run, and for a larger one that was not.

    Args:
        block: the class of a transformer's block: width, heads -> module.
        logs: of the smaller block: name of the place -> `ranks.timeline()`; first on
            one machine, then on two.
        network: between the two machines, such as "100 Gbit/s".

    Taught in 19-slice-a-layer.

    Raises:
        AssertionError: if a counted time is not near the predicted one.
    """
    import torch

    import simgpu

    links = {"NVLink": {}, network: {"nodes": 2, "network": network}}
    rows = [
        "width  tokens  links       one GPU  a quarter  message  predicted  counted"
    ]
    for width, tokens, name_of_type in SIZES:
        dtype = getattr(torch, name_of_type)
        alone = _computing(block, width, tokens, 1, dtype)
        quarter = _computing(block, width, tokens, RANKS, dtype)
        nbytes = tokens * width * dtype.itemsize
        for (name, where), log in zip(links.items(), logs.values(), strict=True):
            message = simgpu.estimate_collective(
                "all_reduce", nbytes, ranks=RANKS, card=CARD, **where
            ).seconds
            total, counted = quarter + 4 * message, "-"
            if width == SIZES[0][0]:
                events = log.events(0)
                first = min(event.start for event in events)
                took = max(event.end for event in events) - first
                assert abs(took - total) < NEAR * total, (took, total)
                counted = f"{1e6 * took:,.0f}"
            rows.append(
                f"{width:5}  {tokens:6}  {name:10}{1e6 * alone:10,.0f}"
                f"{1e6 * quarter:11,.0f}{1e6 * message:9,.0f}{1e6 * total:11,.0f}"
                f"{counted:>9}"
            )
    return "\n".join([*rows, f"(times in µs, simulated {CARD}s)"])


def _computing(block, width, tokens, ranks, dtype) -> float:
    """Seconds of forward and backward of a rank's slices, without messages."""
    import torch
    from torch import nn

    import simgpu

    part = width // ranks
    with torch.device("meta"):
        mine = block(width, 16).to(dtype)
        for name in ("query", "key", "value"):
            setattr(mine, name, nn.Linear(width, part, dtype=dtype))
        mine.out = nn.Linear(part, width, dtype=dtype)
        mine.up = nn.Linear(width, 4 * part, dtype=dtype)
        mine.down = nn.Linear(4 * part, width, dtype=dtype)
        x = torch.empty(1, tokens, width, dtype=dtype, requires_grad=True)
    return simgpu.estimate(lambda: mine(x).sum().backward(), card=CARD).seconds
