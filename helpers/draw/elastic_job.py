"""Agents of torchrun that meet at a store; a job that is killed and restarted."""

from helpers.job_log import runs_of
from simgpu.pictures import COLOURS, HOST, INK, WIDEST, Picture, plural

LEFT, TOP, ROW, START, MEET = 58, 62, 50, 34, 14  # pixels


def agents_meet(nodes: int = 2, ranks: int = 2) -> Picture:
    """Machines with an agent and its ranks each, and the store where the agents meet.

    Args:
        nodes: how many machines.
        ranks: on each.

    Taught in 24-survive-failures.
    """
    words = f"{plural(nodes, 'node')}: an agent on each starts {plural(ranks, 'rank')}"
    found = Picture(WIDEST, 252, f"{words}; the agents meet at a store on node 0")
    wide = (WIDEST - 16 - 20 * (nodes - 1)) / nodes
    found.box(8, 8, WIDEST - 16, 40, "#F7F7F7")
    found.text(20, 33, "Store: who is there, who is which rank, who is alive")
    found.text(WIDEST - 20, 33, "hosted by node 0", 12, "end")
    for node in range(nodes):
        x = 8 + (wide + 20) * node
        middle = x + wide / 2
        found.box(x, 84, wide, 160, "#F7F7F7")
        found.text(x + 12, 104, f"node {node}", weight="bold")
        found.line(middle, 112, middle, 50, arrow=True)
        found.text(middle + 8, 72, "meet, keep-alive", 12)
        found.box(middle - 70, 112, 140, 32, HOST)
        found.text(middle, 133, "agent (torchrun)", 13, "middle")
        for local in range(ranks):
            number = ranks * node + local
            left = x + 12 + (wide - 24) / ranks * local
            width = (wide - 24) / ranks - 8
            found.line(middle, 146, left + width / 2, 184, arrow=True)
            found.box(left, 186, width, 46, COLOURS[number % len(COLOURS)])
            found.text(left + width / 2, 205, f"worker, rank {number}", 13, "middle")
            found.text(left + width / 2, 223, f"GPU {local}", 12, "middle")
        for line, words in enumerate(("starts,", "watches,", "stops")):
            found.text(middle + 76, 121 + 14 * line, words, 12)
    return found


def elastic_job(log: list[dict], nodes: list, every: int) -> Picture:
    """A lane for each node: the steps of its rank, in the order of computing.

    A box has its node's colour, or is white and dashed if its step was done again
    later. A bar follows a step after which a checkpoint was written: after every few
    steps, at the end, and where the ranks were asked to end. Nodes that have met are
    joined by a line, before their ranks start. There are no seconds in it, so that the
    picture is the same on each machine.

    Args:
        log: of a `helpers.Job`.
        nodes: of this job.
        every: steps from one checkpoint to the next.

    Taught in 24-survive-failures.
    """
    runs = runs_of(log)
    lane_of = {node.pid: node.number for node in nodes}
    spoken = "; ".join(
        f"{plural(run.ranks, 'rank')} from step {run.first} to {run.end - 1}"
        for run in runs
    )
    height = TOP + ROW * len(nodes) + 34
    found = Picture(WIDEST, height, f"Steps in the order of computing. {spoken}")
    found.text(8, 20, "Steps in the order of computing", 14, weight="bold")
    for node in nodes:
        found.text(8, TOP + ROW * node.number + 19, f"node {node.number}", 13)
    steps = sum(run.end - run.first for run in runs)
    wide = (WIDEST - LEFT - 14 - (MEET + START) * len(runs)) / max(steps, 1)
    x = LEFT
    for number, run in enumerate(runs):
        again = min((later.first for later in runs[number + 1 :]), default=10**9)
        saved = {later.first for later in runs[number + 1 :]} | {runs[-1].end}
        # by node: which rank a node has, and who notes first, differs from run to run
        lanes = sorted((lane_of[agent], rank) for rank, agent in run.agents.items())
        found.text(x, TOP - 12, f"{plural(run.ranks, 'rank')}, from {run.first}", 12)
        _meeting(found, x + 4, [TOP + ROW * lane + 13 for lane, _ in lanes])
        x += MEET
        for lane, rank in lanes:
            y = TOP + ROW * lane
            found.box(x, y, START - 4, 26, HOST)
            found.text(x + START / 2 - 2, y + 17, "start", 11, "middle")
            for step in run.steps[rank]:
                at = x + START + wide * (step - run.first)
                lost = step >= again
                fill = "white" if lost else COLOURS[lane % len(COLOURS)]
                found.box(at, y, wide - 1, 26, fill, dashed=lost)
                found.text(at + wide / 2, y + 17, step, 8, "middle")
                if (step + 1) % every == 0 or step + 1 in saved:
                    found.box(at + wide - 1.5, y - 3, 2, 32, INK)
                if (step + 1) % every and step + 1 in saved - {runs[-1].end}:
                    found.text(at + wide, y + 40, "saved on SIGTERM", 11, "end")
        for mark in run.marks:
            words = mark["event"].replace("kill", "✕").replace("add", "+")
            at = x + START + wide * (mark["step"] - run.first)
            y = TOP + ROW * mark["node"] + 40
            anchor = "end" if at > WIDEST - 60 else "middle"
            found.text(at, y, words, 12, anchor)
        x += START + wide * (run.end - run.first)
    _key(found, found.height - 18)
    return found


def _key(found: Picture, y: float) -> None:
    for x, fill, words in ((LEFT, COLOURS[0], "done"), (120, "white", "done in vain")):
        found.box(x, y - 8, 14, 14, fill, dashed=fill == "white")
        found.text(x + 20, y + 4, words, 12)
    found.box(236, y - 10, 2, 18, INK)
    found.text(246, y + 4, "checkpoint written", 12)
    found.text(376, y + 4, "✕ killed", 12)
    _meeting(found, 456, [y - 8, y + 4])
    found.text(468, y + 4, "these nodes have met", 12)


def _meeting(found: Picture, x: float, heights: list[float]) -> None:
    found.line(x, min(heights), x, max(heights))
    for y in heights:
        found.box(x - 4, y - 4, 8, 8, INK)
