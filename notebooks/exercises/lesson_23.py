"""The exercises of lesson 23: who has the same shard, bytes of a network, a mesh."""

from exercises.counted import counted, number
from exercises.exercise import Wrong, call, exercise, solution

GPUS, NODES = 4, 2  # of the third exercise: on each node, and nodes
NVLINK, NETWORK = 200e9, 3e9  # bytes/s of a rank


@exercise(
    "23.1",
    hints=(
        "Write down the grid of 2 x 4 ranks. Ranks of a row have different shards. "
        "Which ranks are in the same column as rank 6?",
        "The column of a rank is `rank % shards`, and its column has every "
        "`shards`-th rank.",
    ),
)
def same_shard(function) -> None:
    """A function: a rank, the sizes of an HSDP mesh -> ranks with the same shard."""
    for copies, shards in ((2, 4), (3, 2), (1, 4)):
        for rank in range(copies * shards):
            found = call(function, rank, copies, shards)
            where = f"rank {rank} of a mesh of {copies} x {shards}"
            try:
                found = sorted(int(other) for other in found)
            except (TypeError, ValueError):
                raise Wrong(f"return a list of ranks, not {found!r}") from None
            right = list(range(rank % shards, copies * shards, shards))
            first = rank // shards * shards
            if found == right:
                continue
            if found == list(range(first, first + shards)):
                raise Wrong(f"{where}: {found} is its row, which has all shards once")
            if found == [other for other in right if other != rank]:
                raise Wrong(f"{where}: the rank itself belongs to the list, too")
            raise Wrong(f"{where}: it is {right}, not {found}")


@solution("23.1")
def solution_1():
    """Ranks are numbered row by row, and a column has the same shard in each row.

    The column of a rank is its remainder by the number of shards. From there, every
    `shards`-th rank is in the same column.
    """

    def same_shard(rank, copies, shards):
        return list(range(rank % shards, copies * shards, shards))

    return same_shard


@exercise(
    "23.2",
    hints=(
        "In a ring over all nodes, one link leaves each node, and each link carries "
        "what a rank sends. With HSDP, there is a ring for each GPU of a node.",
        "FSDP sends three times (N - 1) / N of the bytes, for N ranks. With HSDP, only "
        "an all-reduce of each rank's shard uses the network: a shard is 1/gpus of the "
        "bytes, there are `gpus` rings, and each ring has one rank of each node.",
    ),
)
def network_bytes(function) -> None:
    """A function: bytes, nodes, GPUs of a node -> what leaves a node, two ways."""
    for nbytes, nodes, gpus in ((6_400_000, 2, 4), (48_000_000, 4, 8)):
        found = call(function, nbytes, nodes, gpus)
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            raise Wrong(f"return two numbers, FSDP's and HSDP's, not {found!r}")
        fsdp, hsdp = number(found[0], "FSDP"), number(found[1], "HSDP")
        total = nodes * gpus
        ring = (total - 1) / total * nbytes
        column = 2 * (nodes - 1) / nodes * nbytes
        mistakes = {
            2 * ring: "that is DDP's all-reduce; FSDP gathers twice and reduces once",
            3 * nbytes: "a ring of N ranks sends (N - 1) / N of a tensor",
            3 * gpus * ring: "one ring over all ranks leaves each node by one link",
        }
        why = f"it is {3 * ring:,.0f} bytes, not {fsdp:,.0f}"
        counted(fsdp, 3 * ring, mistakes, why, what="FSDP", near=1e-7)
        mistakes = {
            column / gpus: "that is one rank; all GPUs of a node send their shards",
            column / 2: "an all-reduce makes two passes around the ring",
            column * gpus: "a rank sends its shard, 1/gpus of the bytes",
            2 * ring: "the all-reduce joins one rank of each node, not all ranks",
            3 * (nodes - 1) / nodes * nbytes: "the gathers stay inside the node",
        }
        why = f"it is {column:,.0f} bytes, not {hsdp:,.0f}"
        counted(hsdp, column, mistakes, why, what="HSDP", near=1e-7)


@solution("23.2")
def solution_2():
    """Only messages whose group has ranks on several nodes use the network.

    FSDP: all groups have all N ranks. One link of the ring leaves each node, and each
    link carries two all-gathers and a reduce-scatter.

    HSDP: gathers and reduce-scatters stay inside the node. What leaves it is the
    all-reduce of each rank's shard, in a ring with one rank of each node. There are as
    many rings as GPUs on a node, and each has 1/gpus of the bytes, so that `gpus`
    cancels out.
    """

    def network_bytes(nbytes, nodes, gpus):
        total = nodes * gpus
        fsdp = 3 * (total - 1) / total * nbytes
        shard = nbytes / gpus
        hsdp = gpus * 2 * (nodes - 1) / nodes * shard
        return fsdp, hsdp

    return network_bytes


# -- the third exercise ----------------------------------------------------------------

JOBS = (  # parameters, blocks, width, tokens of a batch, bytes of memory
    (10_000_000, 8, 512, 1_000_000, 40e9),  # many tokens: DDP alone
    (100_000_000, 8, 1024, 500_000, 40e9),  # in between: pairs
    (10_000_000, 8, 1024, 131_072, 40e9),  # DDP alone, by a little
    (10_000_000, 8, 512, 1_000_000, 160e6),  # fits exactly
    (400_000_000, 24, 1024, 16_384, 40e9),  # few tokens: slices in a whole node
    (6_000_000_000, 32, 4096, 16_384, 40e9),  # fits in quarters only
    (10_000_000_000, 48, 4096, 4_096, 24e9),  # fits in eighths only
    (400_000_000, 24, 1024, 2_000_000, 4e9),  # DDP alone is faster, and does not fit
)


def seconds(parameters, blocks, width, tokens, tp) -> float:
    """Of all messages of a rank in a step, with DDP along the other axis."""
    dp = NODES * GPUS // tp
    activations = tokens / dp * width * 4
    link = NVLINK if tp <= GPUS else NETWORK
    slices = 4 * blocks * 2 * (tp - 1) / tp * activations / link
    return slices + 2 * (dp - 1) / dp * 4 * parameters / tp / NETWORK


def fitting(parameters, memory) -> list[int]:
    return [tp for tp in (1, 2, 4, 8) if 16 * parameters / tp <= memory]


@exercise(
    "23.3",
    hints=(
        "Try every size of the axis `tp` that fits into the memory, compute the "
        "seconds of all messages, and take the smallest.",
        "With `dp = 8 // tp`, a rank has tokens / dp tokens. Slices: 4 * blocks "
        "all-reduces of tokens / dp * width * 4 bytes over NVLink, or over the network "
        "if tp is 8. Gradients: one all-reduce of 4 * parameters / tp bytes over the "
        "network. An all-reduce of n ranks sends 2 (n - 1) / n of its bytes.",
    ),
)
def choose_tp(function) -> None:
    """A function: a job -> the size of the axis tp that fits and is fastest."""
    for parameters, blocks, width, tokens, memory in JOBS:
        job = f"{parameters:,} parameters, {tokens:,} tokens, {memory / 1e9:.0f} GB"
        found = call(function, parameters, blocks, width, tokens, memory)
        found = number(found, job)
        if found not in (1, 2, 4, 8):
            raise Wrong(f"{job}: return 1, 2, 4 or 8, not {found}")
        if 16 * parameters / found > memory:
            need = 16 * parameters / found / 1e9
            raise Wrong(f"{job}: with tp = {found} a rank stores {need:.0f} GB")
        times = {
            tp: seconds(parameters, blocks, width, tokens, tp)
            for tp in fitting(parameters, memory)
        }
        best = min(times, key=times.get)
        if found != best:
            raise Wrong(
                f"{job}: tp = {found} takes {times[found]:.3f} s of messages, and "
                f"tp = {best} takes {times[best]:.3f} s"
            )


@solution("23.3")
def solution_3():
    """There are four choices, so compute them all.

    A larger `tp` divides what a rank stores and the gradients that it sends. A smaller
    `tp` divides the tokens among more ranks, and each all-reduce of the slices is
    smaller. With few tokens, slices in a node win. With many tokens, DDP wins, if the
    model fits. With `tp = 8` the slices cross the network, which is right only if
    nothing else fits, or if there are very few tokens.
    """

    def choose_tp(parameters, blocks, width, tokens, memory):
        times = {}
        for tp in (1, 2, 4, 8):
            if 16 * parameters / tp > memory:
                continue
            dp = 8 // tp
            link = 200e9 if tp <= 4 else 3e9
            activations = tokens / dp * width * 4
            slices = 4 * blocks * 2 * (tp - 1) / tp * activations / link
            gradients = 2 * (dp - 1) / dp * 4 * parameters / tp / 3e9
            times[tp] = slices + gradients
        return min(times, key=times.get)

    return choose_tp
