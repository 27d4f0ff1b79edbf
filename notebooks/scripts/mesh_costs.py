"""A table of lesson 23: bytes on eight GPUs, predicted and counted.

The small GPT has two blocks of width 128, and a step has 32 sequences of 64 tokens. Two
nodes have four A100s each, and a network of 50 Gbit/s. Bytes are those of rings. Used
in lesson 23.
"""

import re

WIDTH, BLOCKS, NODE = 128, 2, 4

BLOCK, ENDS = 12 * WIDTH**2 + 13 * WIDTH, 194 * WIDTH + 64  # parameters
SLICED = (12 * WIDTH**2 + 7 * WIDTH) // NODE + 6 * WIDTH  # of a block, on four ranks
ALL, SLICES = BLOCKS * BLOCK + ENDS, BLOCKS * SLICED + ENDS
STAGE, SLICED_STAGE = BLOCK + 128 * WIDTH, SLICED + 128 * WIDTH  # the first ones
ACTIVATIONS = 16 * 64 * WIDTH * 4  # bytes of 16 sequences between two blocks
FSDP, FSDP_SLICES = 12 * ALL - 4 * ENDS, 12 * SLICES - 4 * ENDS  # gathered, reduced

PREDICTED = {  # way -> bytes: stored by a rank, over NVLink, over the network
    "DDP": (16 * ALL, 21 * ALL, 7 * ALL),
    "FSDP": (2 * ALL, 21 / 8 * FSDP, 7 / 8 * FSDP),
    "HSDP": (4 * ALL, 3 * FSDP, 4 * ALL),
    "FSDP x TP": (8 * SLICES, 48 * ACTIVATIONS, 2 * FSDP_SLICES),
    "TP x PP": (16 * SLICED_STAGE, 48 * ACTIVATIONS, 8 * ACTIVATIONS),
    "DDP x PP": (16 * STAGE, 24 * STAGE, 2 * ACTIVATIONS),
    "swapped": (8 * SLICES, 24 * ACTIVATIONS + 2 * FSDP_SLICES, 24 * ACTIVATIONS),
}


def mesh_bytes(stored: dict[str, int], logs: dict) -> str:
    """A row for each way: what a rank stores, what node 0 sends on both links.

    Args:
        stored: way -> bytes that rank 0 stores at the end of backward.
        logs: way -> `ranks.timeline()` of one step.
    """
    rows = [
        "MB            stored by rank 0      NVLink, node 0     network, node 0",
        "             predicted  counted  predicted  counted  predicted  counted",
    ]
    for name, log in logs.items():
        counted = (stored[name], *_sent(log))
        pairs = zip(PREDICTED[name], counted, strict=True)
        words = [f"{a / 1e6:11.2f}{b / 1e6:9.2f}" for a, b in pairs]
        rows.append(f"{name:11}" + "".join(words))
    return "\n".join(rows)


def _sent(log) -> list[int]:
    """Bytes that ranks 0 to 3 send to node 0, and to node 1."""
    sent = [0, 0]
    for rank in range(NODE):
        for event in log.events(rank):
            if event.kind != "collective" or event.name.startswith("recv"):
                continue
            words = event.group.partition("(")[0]
            members = [int(n) for n in re.findall(r"\d+", words)] or [*range(2 * NODE)]
            size, share = len(members), 1
            if not event.name.startswith("send"):
                passes = 2 if "all_reduce" in event.name else 1
                share = passes * (size - 1) / size
            to = members[(members.index(rank) + 1) % size]
            sent[to // NODE] += int(event.nbytes * share)
    return sent
