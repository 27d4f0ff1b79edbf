"""The exercises of lesson 25: who meets, a slow node, and a log."""

import re

from exercises.counted import number
from exercises.exercise import Wrong, call, exercise, solution


@exercise(
    "25.1",
    hints=(
        "Which agents meet? Both words must be the same: the endpoint and the id. How "
        "many must be there before the job begins?",
        "Sort the addresses of a job as texts. The ranks of a machine begin where "
        "those of the machine before it end, so count up its GPUs.",
    ),
)
def first_ranks(function) -> None:
    """The first rank of each machine whose job begins."""
    for name, (nnodes, agents) in _MEETINGS.items():
        when = f"for {name},"
        given = [dict(zip(_WORDS, agent, strict=True)) for agent in agents]
        found = call(function, given, nnodes, when=when)
        if not isinstance(found, dict):
            raise Wrong(f"{when} a dict is wanted, not {type(found).__name__}")
        right = begun(agents, nnodes)
        if found == right:
            continue
        mistakes = (
            (begun(agents, 1), "with too few machines, a job waits"),
            (begun([(a, "", i, g) for a, _, i, g in agents], nnodes), "two endpoints "
             "are two stores"),
            (begun([(a, e, "", g) for a, e, _, g in agents], nnodes), "only agents "
             "with the same id meet"),
            (begun(agents, nnodes, by=_as_numbers), "addresses are sorted as words"),
            (begun([(*a, 8) for *a, _ in agents], nnodes), "not each machine has 8 "
             "GPUs"),
            (begun([(*a, 1) for *a, _ in agents], nnodes), "RANK counts processes, "
             "one for each GPU"),
        )  # fmt: skip
        why = next((why for wrong, why in mistakes if found == wrong), "")
        raise Wrong(f"{when} it is {right}, not {found}" + (why and f": {why}"))


def begun(agents: list[tuple], nnodes: int, by=str) -> dict[str, int]:
    """By address, the first rank of each machine whose job begins.

    Args:
        agents: address, endpoint, id and GPUs of each, in the order of arrival.
        nnodes: machines that a job needs.
        by: what addresses are sorted by.
    """
    jobs: dict[tuple, list] = {}
    for address, endpoint, job, gpus in agents:
        jobs.setdefault((endpoint, job), []).append((address, gpus))
    found = {}
    for machines in jobs.values():
        rank = 0
        for address, gpus in sorted(machines, key=lambda machine: by(machine[0])):
            if len(machines) >= nnodes:
                found[address] = rank
            rank += gpus
    return found


def _as_numbers(address: str) -> list[int]:
    return [int(part) for part in address.split(".")]


_WORDS = ("address", "endpoint", "id", "gpus")
_MEETINGS = {  # machines that a job needs, and each agent
    "two machines": (2, [("10.0.0.9", "host0:29500", "my-job", 8),
                         ("10.0.0.10", "host0:29500", "my-job", 8)]),
    "an id with a typing error": (2, [("10.0.0.12", "host0:29500", "my-job", 8),
                                      ("10.0.0.13", "host0:29500", "my-jop", 8),
                                      ("10.0.0.11", "host0:29500", "my-job", 8)]),
    "two endpoints": (2, [("10.0.0.8", "host0:29500", "my-job", 8),
                          ("10.0.0.9", "host1:29500", "my-job", 8)]),
    "two jobs": (2, [("10.0.0.1", "host0:29500", "mine", 4),
                     ("10.0.0.3", "host0:29500", "yours", 8),
                     ("10.0.0.20", "host0:29500", "mine", 8),
                     ("10.0.0.100", "host0:29500", "yours", 2)]),
    "three machines": (3, [("10.0.0.30", "host0:29500", "my-job", 2),
                           ("10.0.0.4", "host0:29500", "my-job", 4),
                           ("10.0.0.5", "host0:29500", "my-job", 8)]),
}  # fmt: skip


@solution("25.1")
def solution_1():
    """Agents meet if they ask the same store for the same job, and wait to be complete.

    The endpoint says which store, and the id which job. All other agents might as well
    not be there. Those that have met sort their addresses as words. Each machine then
    numbers its processes from where the machine before it has ended.
    """

    def first_ranks(agents, nnodes):
        jobs = {}
        for agent in agents:
            name = agent["endpoint"], agent["id"]
            jobs.setdefault(name, []).append(agent)
        found = {}
        for machines in jobs.values():
            if len(machines) < nnodes:
                continue
            rank = 0
            for agent in sorted(machines, key=lambda agent: agent["address"]):
                found[agent["address"]] = rank
                rank += agent["gpus"]
        return found

    return first_ranks


@exercise(
    "25.2",
    hints=(
        "A pair that is slow has two suspects. Which pairs say that a node is good?",
        "Take the nodes that are in every slow pair, and in no fast pair. If one is "
        "left, it is the answer.",
    ),
)
def slow_node(function) -> None:
    """The one node that is in all slow pairs and in no fast one, or -1."""
    for pairs, right, why in _PAIRS:
        given = dict(pairs)
        found = number(call(function, given, 100, when=f"for {pairs}"), f"for {pairs}")
        if found != right:
            what = f"node {right}" if right >= 0 else "-1"
            raise Wrong(f"for {pairs} it is {what}, not {found:g}: {why}")


_PAIRS = (
    ({(1, 2): 180, (3, 4): 90, (1, 3): 181}, 4, "3 is fast with 1"),
    ({(0, 1): 179, (2, 3): 92, (0, 3): 91, (1, 2): 180}, 3, "2 is fast with 1"),
    ({(1, 2): 60, (1, 3): 61, (2, 3): 183}, 1, "2 and 3 are fast with each other"),
    ({(5, 6): 93, (5, 7): 95, (8, 9): 182}, 5, "only 5 is in both slow pairs"),
    ({(1, 2): 180, (3, 4): 90}, -1, "it may be 3 or 4"),
    ({(1, 2): 180, (3, 4): 179}, -1, "no pair is slow"),
)


@solution("25.2")
def solution_2():
    """A fast pair clears two nodes, and a slow pair clears all others.

    Exactly one node is slow. So it is in every slow pair, and in no fast one. If more
    than one node is left, more pairs have to be measured: a suspect with a node that is
    known to be good.
    """

    def slow_node(pairs, least):
        suspects = {node for pair in pairs for node in pair}
        for pair, busbw in pairs.items():
            if busbw < least:
                suspects = suspects & set(pair)
            else:
                suspects = suspects - set(pair)
        return suspects.pop() if len(suspects) == 1 else -1

    return slow_node


@exercise(
    "25.3",
    hints=(
        "Only lines with `via NET/` are about another node. Those of them without "
        "`GDRDMA` are the ones to look for. A line with `[send]` is of the rank before "
        "the arrow, one with `[receive]` of the rank behind it.",
        'Split the line at " : ", then at " -> ", and that at "[": in `12[4]`, 12 is '
        "the rank, and 4 is its GPU. A set keeps each rank once, `int` makes numbers, "
        "and `sorted` puts them in order.",
    ),
)
def slow_ranks(function) -> None:
    """Which ranks talk to another node, and not from a GPU's own memory."""
    for name, log in LOGS.items():
        when = f"for the {name} log"
        found = call(function, log, when=when)
        if not isinstance(found, list):
            raise Wrong(f"{when}: a list is wanted, not {type(found).__name__}")
        right = ranks_of(log, slow)
        if found == right:
            continue
        if any(isinstance(rank, str) for rank in found):
            raise Wrong(f"{when}: ranks are numbers here, not words: {found}")
        raise Wrong(f"{when} it is {right}, not {found}{_mistake(log, found, right)}")


def _mistake(log: str, found: list, right: list) -> str:
    """What a wrong list has in common with others that are easily taken."""
    if sorted(set(found)) == right:
        return ": each rank once, in order"
    wrong = {
        "P2P is inside a node": ranks_of(log, lambda way: "GDRDMA" not in way),
        "GDRDMA is the fast way": ranks_of(log, lambda way: "NET/" in way),
        "NET/IB without GDRDMA goes through the host's memory, too": ranks_of(
            log, lambda way: "Socket" in way
        ),
        "a line with [receive] is of the rank behind the arrow": ranks_of(
            log, slow, lambda sender, receiver, sends: sender
        ),
        "a line with [send] is of the rank before the arrow": ranks_of(
            log, slow, lambda sender, receiver, sends: receiver
        ),
        "in brackets is the GPU, not the rank": sorted(
            {int(gpu) for line, gpu in _gpus(log) if slow(line)}
        ),
    }
    for why, ranks in wrong.items():
        if sorted(set(found)) == ranks:
            return f": {why}"
    return ""


def slow(way: str) -> bool:
    """Whether a connection leaves the node otherwise than from a GPU's memory."""
    return "NET/" in way and "GDRDMA" not in way


_LINE = re.compile(r"(\d+)\[(\d+)\] -> (\d+)\[(\d+)\] (\[send\]|\[receive\]|)(.*)")


def ranks_of(log: str, wanted, whose=None) -> list[int]:
    """The ranks of the connections that are wanted, each once, in order.

    Args:
        log: the text.
        wanted: of the way that a connection takes, such as "via NET/IB/9".
        whose: of sender, receiver and whether the line is the sender's: the rank.
    """
    found = set()
    for sender, _, receiver, _, kind, way in _LINE.findall(log):
        sends = kind != "[receive]"
        if wanted(way):
            rank = (
                whose(sender, receiver, sends) if whose else (receiver, sender)[sends]
            )
            found.add(int(rank))
    return sorted(found)


def _gpus(log: str) -> list[tuple[str, str]]:
    """The way of each connection, and the GPU of the rank whose line it is."""
    return [
        (way, theirs if kind == "[receive]" else mine)
        for _, mine, _, theirs, kind, way in _LINE.findall(log)
    ]


@solution("25.3")
def solution_3():
    """A line says who, to whom, and which way; three questions pick the ranks.

    Does the message leave the node (`via NET/`)? Does it start or end in a GPU's memory
    (`GDRDMA`)? Whose line is it: `[send]` stands on the sender's, `[receive]` on the
    receiver's?
    """

    def slow_ranks(log):
        found = set()
        for line in log.splitlines():
            if "via NET/" in line and "GDRDMA" not in line:
                sender, receiver = line.split(" : ")[1].split(" -> ")
                mine = sender if "[send]" in line else receiver
                found.add(int(mine.split("[")[0]))
        return sorted(found)

    return slow_ranks


# Made up in the form of NCCL 2.25's; two nodes of eight GPUs.
LOGS = {
    "healthy": """\
node0:63:63 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.8<0>
node0:63:105 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0
node0:63:105 [0] NCCL INFO Using network IB
node0:63:201 [0] NCCL INFO Channel 00/0 : 9[1] -> 0[0] [receive] via NET/IB/0/GDRDMA
node0:63:201 [0] NCCL INFO Channel 00/0 : 0[0] -> 7[7] via P2P/CUMEM/read
node1:68:203 [5] NCCL INFO Channel 04/0 : 13[5] -> 4[4] [send] via NET/IB/4/GDRDMA
""",
    "slow": """\
node0:63:63 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.8<0>
node0:63:105 [0] NCCL INFO Using network IB
node0:63:201 [0] NCCL INFO Channel 00/0 : 9[1] -> 0[0] [receive] via NET/IB/0/GDRDMA
node0:65:203 [2] NCCL INFO Channel 02/0 : 2[2] -> 11[3] [send] via NET/Socket/0
node1:66:204 [3] NCCL INFO Channel 02/0 : 2[2] -> 11[3] [receive] via NET/Socket/0
node1:67:205 [4] NCCL INFO Channel 04/0 : 12[4] -> 11[3] via P2P/CUMEM/read
node1:67:205 [4] NCCL INFO Channel 06/0 : 12[4] -> 5[5] [send] via NET/IB/5
node1:67:205 [4] NCCL INFO Channel 14/0 : 12[4] -> 5[5] [send] via NET/IB/5
node0:68:206 [5] NCCL INFO Channel 06/0 : 12[4] -> 5[5] [receive] via NET/IB/5/GDRDMA
node0:69:207 [6] NCCL INFO Channel 07/0 : 6[6] -> 15[7] [send] via NET/IB/7/GDRDMA
""",
}
