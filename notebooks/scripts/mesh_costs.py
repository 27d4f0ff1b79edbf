"""Two tables of lesson 23: bytes and times on eight GPUs, predicted and counted.

The small GPT has two blocks of width 128, and a step has 32 sequences of 64 tokens. Two
nodes have four A100s each, and a network of 50 Gbit/s. Bytes are those of rings. The
bounds of a time come from the simulator, as the counted times do. Used in
lesson 23.
"""

import re

WIDTH, BLOCKS, NODE, MICRO_BATCHES = 128, 2, 4, 4
NETWORK = 6.25e9  # bytes/s of a node
LAUNCH = 10  # µs of a kernel on the host
NEAR = 0.03  # by how much a counted time may leave its bounds

BLOCK, ENDS = 12 * WIDTH**2 + 13 * WIDTH, 194 * WIDTH + 64  # parameters
SLICED = (12 * WIDTH**2 + 7 * WIDTH) // NODE + 6 * WIDTH  # of a block, on four ranks
ALL, SLICES = BLOCKS * BLOCK + ENDS, BLOCKS * SLICED + ENDS
STAGE, SLICED_STAGE = BLOCK + 128 * WIDTH, SLICED + 128 * WIDTH  # the first ones
TENSORS = 16 * BLOCKS + 6
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


def mesh_times(logs: dict, gpt: type, stage: type) -> str:
    """A row for each way: bounds of a step's time, and what the timeline says.

    Args:
        logs: way -> `ranks.timeline()` of one step.
        gpt: the class of the model.
        stage: the class of one of its two halves: model, whether the first -> module.

    Raises:
        AssertionError: if a time is not between its bounds.
    """
    rows = ["µs (simulated) compute  messages   predicted      counted"]
    one_gpu, computing = _alone(gpt(BLOCKS, WIDTH), 32), _alone(gpt(BLOCKS, WIDTH), 4)
    half = _alone(stage(gpt(BLOCKS, WIDTH), False), 8, MICRO_BATCHES)
    rows.append(f"{'one GPU':13}{one_gpu:9,.0f}")
    for name, log in logs.items():
        pipeline = "PP" in name
        compute = half if pipeline else computing
        if name == "DDP":  # it scales each gradient
            compute += LAUNCH * TENSORS
        kinds = _messages(name)
        low = max(compute, *kinds.values())
        high = compute * (1 + pipeline / MICRO_BATCHES) + sum(kinds.values())
        counted = _step(log)
        assert low * (1 - NEAR) < counted < high * (1 + NEAR), (name, counted)
        bounds = f"{low:9,.0f} to {high:5,.0f}"
        sent = sum(kinds.values())
        rows.append(f"{name:13}{compute:9,.0f}{sent:10,.0f}{bounds}{counted:9,.0f}")
    return "\n".join(rows)


def _step(log) -> float:
    """µs from the first kernel or message of any rank to the last."""
    events = [e for r in log.ranks for e in log.events(r) if e.kind != "copy"]
    return 1e6 * (max(e.end for e in events) - min(e.start for e in events))


def _alone(model, rows: int, micro_batches: int = 1) -> float:
    """µs of a step of one rank without messages."""
    import torch
    from torch.nn.functional import cross_entropy

    import simgpu

    model = model.to("meta")
    tokens = torch.zeros(rows, 64, dtype=torch.long, device="meta")
    x = tokens
    if micro_batches > 1:  # the second half of the model
        x = torch.zeros(rows, 64, WIDTH, device="meta")
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        for _ in range(micro_batches):
            cross_entropy(model(x).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes the optimizer's state
    return 1e6 * simgpu.estimate(step, card="A100").seconds


def _messages(name: str) -> dict[str, float]:
    """Kind of message -> µs of all of them in a step, one after the other."""
    a, block, sliced = ACTIVATIONS, 4 * BLOCK, 4 * SLICED
    if name == "DDP":
        return {"all_reduce": _us("all_reduce", 4 * ALL, 8, True)}
    if name == "FSDP":
        return _gathers(block, 8, True)
    if name == "HSDP":
        average = BLOCKS * _us("all_reduce", 2 * ALL // NODE, 2, True)
        return {**_gathers(block, 4, False), "all_reduce": average}
    if name == "FSDP x TP":
        slices = 8 * _us("all_reduce", a, 4, False)
        return {**_gathers(sliced, 2, True), "all_reduce": slices}
    if name == "swapped":
        slices = 8 * _us("all_reduce", a, 4, True)
        return {**_gathers(sliced, 2, False), "all_reduce": slices}
    if name == "TP x PP":
        sends = MICRO_BATCHES * _us("send", a // 2, 2, True)
        slices = 16 * _us("all_reduce", a // 2, 4, False)
        return {"send": sends, "receive": sends, "all_reduce": slices}
    sends = MICRO_BATCHES * _us("send", a // 8, 2, True)
    average = _us("all_reduce", 4 * STAGE, 4, False)
    return {"send": sends, "receive": sends, "all_reduce": average}


def _gathers(block: int, size: int, far: bool) -> dict[str, float]:
    """FSDP: two all-gathers of each block and one of the rest, and reduce-scatters."""
    return {
        kind: times * _us(kind, block, size, far) + _us(kind, 4 * ENDS, size, far)
        for kind, times in (("all_gather", 2 * BLOCKS), ("reduce_scatter", BLOCKS))
    }


def _us(kind: str, nbytes: int, size: int, far: bool) -> float:
    """µs of a message; over the network, each rank has a quarter of its node's."""
    import simgpu

    where = {"nodes": 2, "network": NETWORK * size / 2 / NODE} if far else {}
    return 1e6 * simgpu.estimate_collective(kind, nbytes, size, "A100", **where).seconds
