"""The exercises of lesson 23: who reads which samples, an order of axes, a mesh."""

from itertools import permutations
from math import prod

from exercises.counted import number
from exercises.exercise import Wrong, call, exercise, solution

GPUS, NODES = 4, 2  # of the third exercise: on each node, and nodes
NVLINK, NETWORK = 200e9, 3e9  # bytes/s of a rank


# -- 23.1 ------------------------------------------------------------------------------

_DIVIDE = "dp", "replicate", "shard"  # ranks along them have samples of their own
_JOBS = (
    {"dp": 2, "tp": 4},
    {"replicate": 2, "shard": 4},
    {"pp": 2, "dp": 4},
    {"tp": 4, "dp": 2},
    {"pp": 2, "replicate": 2, "shard": 2, "tp": 2},
    {"dp": 2, "cp": 3, "tp": 2},
    {"pp": 2, "tp": 4},
)


def place_of(sizes: dict[str, int], rank: int) -> dict[str, int]:
    """A rank's place along each axis; neighbours are on the last one."""
    place = {}
    for name, size in reversed(sizes.items()):
        rank, place[name] = divmod(rank, size)
    return place


def _pair(found, job: str) -> tuple[int, int]:
    try:
        readers, which = found
    except (TypeError, ValueError):
        raise Wrong(f"{job}: return two numbers, not {found!r}") from None
    readers, which = number(readers, job), number(which, job)
    if not 0 <= which < readers:
        raise Wrong(f"{job}: with num_replicas={readers} there is no rank {which}")
    return readers, which


@exercise(
    "23.1",
    hints=(
        "For each axis, ask whether two ranks along it work on the same sequences "
        "together, or each on its own.",
        "A rank's place along the last axis is `rank % size`, and `rank // size` is "
        "what the axes before it number. Only the axes that divide the batch count in "
        "both results.",
    ),
)
def reads(function) -> None:
    """A function: sizes of the axes, a rank -> readers of the data, and which it is."""
    for sizes in _JOBS:
        readers = {}  # place along the axes that divide the batch -> rank, answer
        ranks = prod(sizes.values())
        for rank in range(ranks):
            job = f"rank {rank} of {sizes}"
            said = _pair(call(function, dict(sizes), rank, when=f"{job}:"), job)
            place = place_of(sizes, rank)
            mine = tuple(place[name] for name in sizes if name in _DIVIDE)
            first, told = readers.setdefault(mine, (rank, said))
            if told == said:
                continue
            apart = [n for n, at in place_of(sizes, first).items() if at != place[n]]
            raise Wrong(
                f"{sizes}: ranks {first} and {rank} differ along {' and '.join(apart)} "
                "only, so they compute the same sequences together, and you give them "
                "others"
            )
        seen: dict[tuple[int, int], int] = {}
        for rank, said in readers.values():
            if said in seen:
                raise Wrong(
                    f"{sizes}: ranks {seen[said]} and {rank} get the same samples, and "
                    "their gradients are averaged: they need samples of their own"
                )
            seen[said] = rank
        for parts, _ in seen:
            if parts != len(readers):
                raise Wrong(
                    f"{sizes}: with num_replicas={parts}, a step takes {len(readers)} "
                    f"of {parts} parts of the batch"
                )


@solution("23.1")
def solution_1():
    """Copies and shards have samples of their own; slices, stages and cut tokens not.

    A shard is gathered before it computes, so its rank is like a copy. Ranks of a TP
    group each compute a slice of the same layer, the stages of a pipeline pass the same
    sequences on, and ranks along `cp` have parts of the same sequences.

    From the last axis to the first, the remainder is the place along the axis. The
    places along those axes that divide the batch number the readers.
    """

    def reads(sizes, rank):
        readers, which = 1, 0
        for name, size in reversed(sizes.items()):
            rank, place = divmod(rank, size)
            if name in ("dp", "replicate", "shard"):
                which += place * readers
                readers *= size
        return readers, which

    return reads


# -- 23.2 ------------------------------------------------------------------------------

# sizes of three axes, MB that a rank sends along each in a step, GPUs of a node
MESHES = (
    ({"pp": 2, "dp": 2, "tp": 4}, {"pp": 1, "dp": 3, "tp": 9}, 8),
    ({"dp": 4, "cp": 2, "tp": 4}, {"dp": 6, "cp": 5, "tp": 10}, 8),  # dp cannot stay
    ({"pp": 2, "dp": 2, "tp": 16}, {"pp": 3, "dp": 5, "tp": 20}, 8),  # tp cannot
    ({"cp": 2, "dp": 4, "tp": 2}, {"cp": 4, "dp": 7, "tp": 4}, 4),  # one or two stay
    ({"pp": 2, "dp": 4, "tp": 2}, {"pp": 1, "dp": 9, "tp": 7}, 4),  # here, one
)


def leaving(order, sizes, gpus) -> list[str]:
    """The axes of a mesh in this order whose groups have ranks on several nodes."""
    found, together = [], 1
    for name in reversed(order):
        together *= sizes[name]  # neighbours up to here
        if together > gpus and sizes[name] > 1:
            found.append(name)
    return found


@exercise(
    "23.2",
    hints=(
        "Ranks are numbered row by row, so the last axes stay inside a node as long as "
        "the product of their sizes is at most `gpus`. All axes before them leave it.",
        "There are six orders: `itertools.permutations(sizes)`. From the last name to "
        "the first, multiply the sizes. Where the product is larger than `gpus`, the "
        "axis leaves the node. Add up what is sent along such axes.",
    ),
)
def place_axes(function) -> None:
    """A function: sizes, bytes along each axis, GPUs of a node -> names in order."""
    for sizes, sent, gpus in MESHES:
        job = f"{sizes} on nodes of {gpus}"
        found = call(function, dict(sizes), dict(sent), gpus)
        if isinstance(found, str) or not isinstance(found, (tuple, list)):
            raise Wrong(f"return a tuple of names, not {found!r}")
        if sorted(map(str, found)) != sorted(sizes):
            raise Wrong(f"{job}: each name once, not {found!r}")

        def total(order, sizes=sizes, sent=sent, gpus=gpus):
            return sum(sent[name] for name in leaving(order, sizes, gpus))

        least = min(map(total, permutations(sizes)))
        if total(found) == least:
            continue
        if sizes is MESHES[0][0] and total(found[::-1]) == least:
            raise Wrong(f"{job}: neighbours are on the last axis, not on the first")
        axes = " and ".join(leaving(found, sizes, gpus))
        why = f"with {found!r}, {axes} leave the node: {total(found)} of {sent}"
        raise Wrong(f"{job}: {why}; {least} is possible")


@solution("23.2")
def solution_2():
    """There are six orders, so try them all.

    The axis with the most bytes is not always the one for the inside of a node. It may
    be too large for a node, and two small axes that fit in together may send more than
    one large one.
    """
    from itertools import permutations

    def place_axes(sizes, sent, gpus):
        def leaving(order):
            total, together = 0, 1
            for name in reversed(order):
                together *= sizes[name]
                if together > gpus:
                    total += sent[name]
            return total

        return min(permutations(sizes), key=leaving)

    return place_axes


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
