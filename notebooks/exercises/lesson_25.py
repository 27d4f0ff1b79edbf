"""The exercises of lesson 25: which GPU a rank takes, which node is first, bytes."""

from exercises import ring
from exercises.counted import counted, number
from exercises.exercise import Wrong, call, exercise, solution


@exercise(
    "25.1",
    hints=(
        "torchrun tells each process its rank, its node and its number on this node. "
        "A node numbers its GPUs from 0. Which of the variables counts from 0 on every "
        "node?",
        "The values of an environment are words: `int` makes a number of one.",
    ),
)
def my_gpu(function) -> None:
    """The GPU of several ranks, from what torchrun has told them."""
    for rank, local, node in ((0, 0, 0), (11, 3, 1), (17, 1, 2)):
        environ = {
            "RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(node),
            "WORLD_SIZE": "24", "LOCAL_WORLD_SIZE": "8",
        }  # fmt: skip
        when = f"for rank {rank} on node {node}"
        found = call(function, environ, when=when)
        if isinstance(found, str):
            raise Wrong(f"{when}: {found!r} is a word; the number of a GPU is wanted")
        found = number(found, when)
        if found == local:
            continue
        why = f"{when} it is GPU {local}, not {found:g}"
        if found == rank:
            why += ": that is RANK, and this node has no such GPU"
        elif found == node:
            why += ": that is the number of the node"
        raise Wrong(why)


@solution("25.1")
def solution_1():
    """`LOCAL_RANK` counts the processes of a node, as CUDA counts its GPUs."""

    def my_gpu(environ):
        return int(environ["LOCAL_RANK"])

    return my_gpu


@exercise(
    "25.2",
    hints=(
        "Which node is node 0? Addresses are compared as words: look at `meet`.",
        "Sort the addresses. The first one has the ranks from 0 to `gpus` - 1, and "
        "each later one begins where the one before it has ended.",
    ),
)
def ranks_of_nodes(function) -> None:
    """Address -> ranks, for addresses whose order as words is not that of numbers."""
    jobs = (
        (["10.0.0.1", "10.0.0.2"], 4),
        (["10.0.0.9", "10.0.0.10"], 2),
        (["node2", "node10", "node1"], 8),
    )
    for addresses, gpus in jobs:
        given = list(addresses)
        found = call(function, given, gpus, when=f"for {addresses}")
        if not isinstance(found, dict):
            raise Wrong(f"a dict is wanted, not {type(found).__name__}")
        if set(found) != set(addresses):
            raise Wrong(f"for {addresses} the keys are {list(found)}")
        right = by_node(sorted(addresses), gpus)
        try:
            mine = {address: list(ranks) for address, ranks in found.items()}
        except TypeError:
            raise Wrong("each value is a list of ranks") from None
        if mine == right:
            continue
        first = min(addresses)
        why = f"with {gpus} GPUs on each of {addresses}, {first!r} has the ranks "
        why += f"{right[first]}, not {mine[first]}"
        if mine == by_node(addresses, gpus):
            why += ": addresses are sorted as words, whoever is named first"
        raise Wrong(why)


def by_node(addresses: list[str], gpus: int) -> dict[str, list[int]]:
    """Consecutive ranks for each address, in this order."""
    return {
        address: list(range(node * gpus, (node + 1) * gpus))
        for node, address in enumerate(addresses)
    }


@solution("25.2")
def solution_2():
    """The place of an address among the sorted ones is the number of its node.

    Node n has the ranks from n · gpus on, as many as it has GPUs.
    """

    def ranks_of_nodes(addresses, gpus):
        found = {}
        for node, address in enumerate(sorted(addresses)):
            first = node * gpus
            found[address] = list(range(first, first + gpus))
        return found

    return ranks_of_nodes


@exercise(
    "25.3",
    hints=(
        "Look at HSDP under *What the network carries*. Take one GPU first: how large "
        "is its part of the gradients, and how many ranks are in its ring?",
        "All GPUs of a machine share its cards, and each of them takes part in a ring "
        "of its own. Gathers of weights stay inside the machine.",
    ),
)
def hybrid_bytes(function) -> None:
    """An all-reduce of each GPU's part, over the machines; eight share the cards."""
    for parameters, machines, each in ((7e9, 3, 8), (10**9, 16, 4), (10**6, 2, 2)):
        what = f"with {parameters:.0e} parameters, {machines} machines of {each} GPUs"
        found = number(call(function, parameters, machines, each, when=what), what)
        right = ring.sent(machines, 4 * parameters)
        one_ring = ring.sent(machines * each, 4 * parameters)
        mistakes = {
            right / each: "that is one GPU's part; all of a machine share its cards",
            right / 2: "an all-reduce sends 2 (n - 1) / n of a tensor, and float32 has "
            "4 bytes",
            4 * parameters: "in a ring of n an all-reduce sends 2 (n - 1) / n",
            8 * parameters: "a ring of n sends 2 (n - 1) / n, not twice the whole",
            one_ring: "that is one ring through all GPUs; here gathers stay inside, "
            "and a ring has one GPU of each machine",
            right + 4 * parameters: "weights are gathered inside a machine; nothing of "
            "that passes the card",
            right * machines / each: "that is one GPU's part, and a ring of m carries "
            "2 (m - 1) / m of it; all of a machine share its cards",
            one_ring / each: "that is one GPU's part in a ring through all GPUs; its "
            "ring has one GPU of each machine, and all of a machine share its cards",
            right * each: "each GPU has a part of the gradients only, not all",
            right * machines: "of one machine, not of all together",
        }
        why = (
            f"{found:.4g} bytes; think of the ring of one GPU and its partners, what "
            "it carries, and how many such rings leave a machine"
        )
        counted(found, right, mistakes, why, what=what, near=1e-3)


@solution("25.3")
def solution_3():
    """Only the rings of the gradients leave a machine, one ring for each of its GPUs.

    FSDP inside the machine leaves each GPU with one part of the averaged gradients. The
    GPUs that have the same part, one on each machine, form a ring and all-reduce it.
    A ring of m ranks sends from each rank

        2 · (m - 1) / m · bytes of the part

    All GPUs of a machine do so at the same time through the same cards, so the parts
    add up to the whole gradient again. The number of GPUs in a machine cancels.
    """

    def hybrid_bytes(parameters, machines, each):
        gradients = 4 * parameters
        part_of_a_gpu = gradients / each
        sent_by_a_gpu = 2 * (machines - 1) / machines * part_of_a_gpu
        return each * sent_by_a_gpu

    return hybrid_bytes
