"""The instruments of 24-survive-failures: what breaks, what was done, and for how long.

    train(folder, save, load, accident)  # in a rank, with the lesson's own checkpoints
    job = start("--hold", "7", nodes=2)  # of torchrun; then job.add(), job.reach(6) …
    check_rows(job.log)                  # no row lost or counted twice
    picture(job.log, title, job.nodes)   # what was computed, by whom, in vain or not
    recoveries(job)                      # seconds, by the logs of ranks and agents

Not a program to launch. `torchrun` launches `train_elastic.py`.
"""

import io
import os
import re
import signal
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

from helpers import Job, RankError, digits, draw, ranks
from helpers.elastic import noted
from scripts import train_elastic as script

STEPS, BATCH, EVERY = 22, 120, 5  # two epochs of 11 steps, a checkpoint after every 5th
ROWS = 1437

# -- jobs ------------------------------------------------------------------------------


def train(folder, save=None, load=None, accident=None) -> list[torch.Tensor]:
    """Train in a rank, as `train_elastic.py` does, with other people's checkpoints.

    Args:
        folder: of the checkpoints and the diary.
        save: called with the folder and what a checkpoint must have.
        load: called with the folder; returns that, or None.
        accident: called with the folder and a step, before the step.

    Returns:
        The weights.
    """
    folder, data = Path(folder), digits()
    log, rank, size = script.Log(folder), dist.get_rank(), dist.get_world_size()
    model, step = script.make_model(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if load and (state := load(folder)):
        step = state["step"]
        model.load_state_dict(state["model"])
        if "optimizer" in state:
            optimizer.load_state_dict(state["optimizer"])
    log("loaded", step=step)
    parallel = DDP(model)
    while step < STEPS:
        if accident:
            accident(folder, step)
        rows = script.rows_of_step(step, BATCH, ROWS)[rank::size]
        losses = cross_entropy(parallel(data.x[rows]), data.y[rows], reduction="none")
        optimizer.zero_grad()
        script.mean_over_ranks(losses, BATCH).backward()
        optimizer.step()
        log("step", step=step, rows=rows.tolist(), loss=losses.sum().item())
        step += 1
        if save and rank == 0 and step % EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save(folder, {**state, "step": step})
    return [p.detach() for p in model.parameters()]


def start(*arguments: str, last_call: int = 3, **options) -> Job:
    """A job of torchrun, still without agents, that takes as many steps as `train`.

    A last call of a second is too short on a busy machine: then a node may be late.
    Ends all `Ranks`, with the process that forks them, because a job needs memory.
    """
    ranks.close()
    conf = {"last_call_timeout": last_call}
    words = ["--folder={folder}", f"--steps={STEPS}", f"--every={EVERY}", *arguments]
    job = Job("scripts/train_elastic.py", *words, conf=conf, **options)
    job.environ["LOGLEVEL"] = "INFO"  # the agents tell what they do: see `said`
    return job


def reason(error: RankError, rank: int = 1) -> str:
    """What the error says of a rank, in one line."""
    lines = str(error).splitlines()  # the first may be of several ranks, or of all
    return next((w for w in lines if w.startswith(f"rank {rank}:")), lines[0])


def kill(job: Job, node: int, pid: int) -> None:
    """Kill a worker whose agent is dead, and note it."""
    job.mark("kill worker", node)
    os.kill(pid, signal.SIGKILL)


def read(folder) -> list[dict]:
    """What ranks have noted in a folder, by time."""
    return sorted(noted(Path(folder)), key=lambda entry: entry["time"])


def check_rows(log: list[dict]) -> None:
    """Assert that no row of an epoch was lost or counted twice; print what was in vain.

    Raises:
        AssertionError: naming the step.
    """
    steps = script.rows_that_count(log)
    for step in range(STEPS):
        expected = script.rows_of_step(step, BATCH, ROWS)
        assert steps[step] == sorted(expected.tolist()), f"rows of step {step}"
    epoch = ROWS // BATCH
    for first in range(0, STEPS, epoch):
        rows = [row for step in range(first, first + epoch) for row in steps[step]]
        assert len(set(rows)) == len(rows) == epoch * BATCH, f"epoch of step {first}"
    again = " + ".join(map(str, steps_again(log))) or "none"
    print(f"every row counts once in each epoch; steps done in vain: {again}")


def losses(log: list[dict]) -> dict[int, float]:
    """Print some, return all: step -> the mean loss of its rows, when it counted."""
    steps: dict[int, float] = {}
    for entry in log:
        if entry["event"] == "loaded":
            steps = {step: loss for step, loss in steps.items() if step < entry["step"]}
        elif entry["event"] == "step":
            mine = entry["loss"] / BATCH
            steps[entry["step"]] = steps.get(entry["step"], 0) + mine
    some = (0, STEPS // 2, STEPS - 1)
    words = ", ".join(f"{steps[step]:.2f}" for step in some)
    print(f"loss of steps {', '.join(map(str, some))}: {words}")
    return steps


# -- accidents -------------------------------------------------------------------------


def now(folder, step: int, at: int = 12, rank: int = 1) -> bool:
    """Whether the accident is now: once, in one rank, after the step before.

    Waits until all have noted it, or the log would depend on who is faster.
    """
    if (step, dist.get_rank()) != (at, rank):
        return False
    try:
        (Path(folder) / "accident").touch(exist_ok=False)
    except FileExistsError:
        return False
    late = time.monotonic() + 60
    while time.monotonic() < late:
        ranks_there = {e["rank"] for e in read(folder) if e.get("step") == at - 1}
        if len(ranks_there) == dist.get_world_size():
            return True
        time.sleep(0.005)
    raise TimeoutError(f"not every rank has noted step {at - 1} within 60 s")


def spoils(folder, step: int) -> None:
    """The newest checkpoint loses its end; then the rank is killed."""
    if now(folder, step):
        path = Path(folder) / "step-000010.pt"
        path.write_bytes(path.read_bytes()[:-100])
        os.kill(os.getpid(), signal.SIGKILL)


def hangs(folder, step: int) -> None:
    """The rank is stopped: it is there, and does nothing."""
    if now(folder, step):
        os.kill(os.getpid(), signal.SIGSTOP)


def fatal(at: int):
    """Opens a file whose writer is killed (-9) when it has written so many bytes."""

    class Fatal(io.FileIO):
        def write(self, content) -> int:
            content, here = bytes(content), self.tell()
            super().write(content[: at - here])
            if here + len(content) >= at:
                os.kill(os.getpid(), signal.SIGKILL)
            return len(content)

    return Fatal


def _two_saves(save, folder, at: int) -> None:
    if dist.get_rank() == 0:
        state = {"model": script.make_model().state_dict()}
        save(Path(folder), {"step": 10, **state})
        save(Path(folder), {"step": 15, **state}, fatal(at))


def after_a_kill(its_ranks, at: int, save, load) -> str:
    """What can be loaded when a rank was killed in its second save, of step 15."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            its_ranks.run(_two_saves, save, folder, at)
        except RankError:
            pass  # rank 0 was killed
        try:
            return f"step {load(Path(folder))['step']}"
        except (RuntimeError, EOFError, OSError):
            return "nothing, an error"


# -- what was computed -----------------------------------------------------------------


class Run(NamedTuple):
    """From one start of the ranks to the next."""

    ranks: int
    first: int  # step
    steps: dict[int, list[int]]  # rank -> the steps that it has done
    agents: dict[int, int]  # rank -> the process that has started it
    pids: dict[int, int]  # rank -> its own process
    marks: list[dict]  # what was done to the job meanwhile, with the step to come


def runs_of(log: list[dict]) -> list[Run]:
    """The log, cut where the ranks started anew."""
    runs: list[Run] = []
    for entry in log:
        rank = entry.get("rank")
        if entry["event"] == "loaded":
            last = runs[-1] if runs else None
            if not last or rank in last.steps or last.ranks != entry["ranks"]:
                runs.append(Run(entry["ranks"], entry["step"], {}, {}, {}, []))
            runs[-1].steps[rank] = []
            runs[-1].agents[rank], runs[-1].pids[rank] = entry["agent"], entry["pid"]
        elif entry["event"] == "step":
            runs[-1].steps[rank].append(entry["step"])
        elif "node" in entry and runs:
            done = [steps[-1] + 1 for steps in runs[-1].steps.values() if steps]
            step = max(done, default=runs[-1].first)
            runs[-1].marks.append({**entry, "step": step})
    return runs


def starts(log: list[dict]) -> str:
    """How many ranks began, and where, for each start so far."""
    return "; ".join(f"{_ranks(run)} from step {run.first}" for run in runs_of(log))


def steps_again(log: list[dict]) -> list[int]:
    """For each start but the first: how many steps had been done in vain."""
    runs = runs_of(log)
    ends = [
        max((steps[-1] + 1 for steps in run.steps.values() if steps), default=run.first)
        for run in runs[:-1]
    ]
    return [end - run.first for end, run in zip(ends, runs[1:], strict=True)]


def picture(log: list[dict], title: str, nodes=(), every: int = EVERY) -> draw.Picture:
    """A row for each node, or rank; a box for each step, in the order of computing.

    A box has its row's colour, or is white if the step was done again later. A bar
    follows a step after which a checkpoint was written (`every=0`: none was). Nodes
    that have met are joined by a line, before their ranks start. There are no seconds
    in it, so it is the same on each machine.
    """
    runs = runs_of(log)
    row_of = {node.agent.pid: node.number for node in nodes}
    names = [f"node {node.number}" for node in nodes]
    if not nodes:
        names = [f"rank {rank}" for rank in range(max(run.ranks for run in runs))]
    firsts = [run.first for run in runs[1:]]
    columns = [_columns(run) for run in runs]
    waits = [[], *(_have_waited(run, row_of) for run in runs[:-1])]  # before each run
    left, tall, top = 62, 46 if nodes else 34, 52
    meet, start, wait = 14 if nodes else 0, 34, 44
    wide = draw.WIDEST - left - 14 - (meet + start) * len(runs)
    wide -= wait * sum(map(bool, waits))
    wide /= sum(map(len, columns))
    spoken = "; ".join(
        "a node waits for another; " * bool(waiting)
        + f"{_ranks(run)} from step {run.first} to {max(c, default=run.first)}"
        for waiting, run, c in zip(waits, runs, columns, strict=True)
    )
    it = draw.Picture(draw.WIDEST, top + tall * len(names) + 34, f"{title}. {spoken}")
    it.text(8, 18, title, 14, weight="bold")
    for row, name in enumerate(names):
        it.text(8, top + tall * row + 19, name, 13)
    x = left
    for i, (run, steps) in enumerate(zip(runs, columns, strict=True)):
        for row in waits[i]:
            it.box(x, top + tall * row, wait - 4, 26, draw.HOST)
            it.text(x + wait / 2 - 2, top + tall * row + 17, "waits", 11, "middle")
        x += wait * bool(waits[i])
        it.text(x, top - 8, _ranks(run), 12)
        if nodes:
            rows = [row_of[agent] for agent in run.agents.values()]
            _meeting(it, x + 4, [top + tall * row + 13 for row in sorted(rows)])
        x += meet
        for rank, done in sorted(run.steps.items()):
            row = row_of[run.agents[rank]] if nodes else rank
            y = top + tall * row
            it.box(x, y, start - 4, 26, draw.HOST)
            it.text(x + start / 2 - 2, y + 17, "start", 11, "middle")
            for step in done:
                at = x + start + wide * steps.index(step)
                again = any(step >= first for first in firsts[i:])
                fill = "white" if again else draw.COLOURS[row]
                it.box(at, y, wide - 2, 26, fill, dashed=again)
                size = 10 if wide > 17 else 9
                it.text(at + wide / 2 - 1, y + 17, step, size, "middle")
                if every and (step + 1) % every == 0:
                    it.box(at + wide - 2.5, y - 3, 2, 32, draw.INK)
        for mark in run.marks:
            at = x + start + wide * (mark["step"] - run.first)
            y = top + tall * mark["node"]
            words = f"{mark['event'].replace('kill', '✕').replace('add', '+')}"
            it.text(at - 5, y + 39, words, 12)
        x += start + wide * len(steps)
    _key(it, left, it.height - 20, bool(nodes), bool(every))
    return it


def _key(it: draw.Picture, left: int, y: int, nodes: bool, every: bool) -> None:
    key = [("done", draw.COLOURS[0]), ("done in vain", "white")]
    for at, (words, fill) in zip((left, left + 80), key, strict=True):
        it.box(at, y, 14, 14, fill, dashed=fill == "white")
        it.text(at + 20, y + 12, words, 12)
    if every:
        it.box(left + 194, y - 2, 2, 18, draw.INK)
        it.text(left + 206, y + 12, "checkpoint written", 12)
    if nodes:
        it.text(left + 340, y + 12, "✕ killed", 12)
        _meeting(it, left + 420, [y + 1, y + 13])
        it.text(left + 432, y + 12, "nodes have met", 12)


def _meeting(it: draw.Picture, x: float, rows: list[float]) -> None:
    it.line(x, min(rows), x, max(rows))
    for y in rows:
        it.box(x - 4, y - 4, 8, 8, draw.INK)


def _have_waited(run: Run, row_of: dict[int, int]) -> list[int]:
    """Nodes that waited after the run, because one was killed until one was added.

    Had they been enough, they would have started again before it was there.
    """
    events = [mark["event"] for mark in run.marks]
    if "kill node" not in events:
        return []
    killed = events.index("kill node")
    if "add node" not in events[killed:]:
        return []
    dead = run.marks[killed]["node"]
    return sorted(
        {row_of[a] for a in run.agents.values() if row_of.get(a, dead) != dead}
    )


def _ranks(run: Run) -> str:
    return f"{run.ranks} rank{'s' * (run.ranks > 1)}"


def _columns(run: Run) -> list[int]:
    return sorted({step for steps in run.steps.values() for step in steps})


# -- where the time went ---------------------------------------------------------------

DAY = 86400  # seconds
_LINE = re.compile(r"[IWE]\d{4} (\d\d:\d\d:\d\d\.\d+) \d+ \S+\] (.*)")
_TELLING = ("Detected", "FAILED.", "finished.")


def said(node) -> list[tuple[float, str]]:
    """What an agent has logged, with the second of the day (needs LOGLEVEL=INFO)."""
    found = []
    for time_of_day, words in map(re.Match.groups, _LINE.finditer(node.words)):
        at = datetime.strptime(time_of_day, "%H:%M:%S.%f")
        seconds = at.hour * 3600 + at.minute * 60 + at.second + at.microsecond / 1e6
        found.append((seconds, words.removeprefix("[default]").strip()))
    return found


def diary(node) -> list[str]:
    """What an agent has logged of rendezvous and restarts, a line for each.

    A round that ended as the one before it is left out: somebody was late for it.
    """
    lines: list[str] = []
    for _, words in said(node):
        if words.startswith("group_world_size="):
            lines.append(f"rendezvous complete, {words}")
        elif any(telling in words for telling in _TELLING):
            lines.append(re.sub(" from group_rank=[0-9]+", "", words))
        match lines[-3:]:
            case [old, middle, new] if old == new and middle.startswith("Detected"):
                del lines[-2:]
    return lines


def summary(node) -> str:
    """The end of what torchrun says of a failed job; no times, paths, traces."""
    lines = node.words[node.words.rindex("Failures:") :].splitlines()
    keep = ("Failures", "Root Cause", "  rank ", "  ValueError")
    return "\n".join(line for line in lines if line.startswith(keep))


class Recovery(NamedTuple):
    """Seconds from an accident until the job is where it was."""

    noticed: float  # by the first agent, which then goes to a rendezvous
    met: float  # the nodes
    started: float  # new processes, which log their first moment
    imports: float  # PyTorch, in the new processes
    joined: float  # the ranks
    loaded: float  # model, optimizer and checkpoint
    again: float  # the steps that were lost


def recoveries(*jobs: Job) -> list[Recovery]:
    """Print where the seconds went after each accident of finished jobs."""
    names = (*Recovery._fields, "all")
    print(f"{'ranks':>20}", *(f"{name:>8}" for name in names), sep="")
    found = []
    for job in jobs:
        runs = runs_of(job.log)
        for before, after in zip(runs, runs[1:], strict=False):
            marks = [m for m in before.marks if m["event"] != "kill agent"]
            if not marks:  # a node was late for the last call
                continue
            mark = marks[0]
            parts = recovery(job, before, after, mark)
            words = f"{mark['event']}, {before.ranks} -> {after.ranks}"
            seconds = "".join(f"{s:8.2f}" for s in (*parts, sum(parts)))
            print(f"{words:20}{seconds}")
            found.append(parts)
    return found


def recovery(job: Job, before: Run, after: Run, mark: dict) -> Recovery:
    """Where the time went between two runs, by the logs of all."""
    log = job.log
    start = datetime.fromtimestamp(mark["time"])
    start_of_day = start - datetime.combine(start, datetime.min.time())

    def agents(words: str) -> list[float]:
        """When agents said it, in seconds since the accident."""
        lines = [line for n in job.nodes for line in said(n)]
        times = [t - start_of_day.total_seconds() for t, line in lines if words in line]
        return sorted((t + DAY / 2) % DAY - DAY / 2 for t in times)

    def those(name: str, step: int | None = None) -> float:
        """When all new ranks had noted it, in seconds since the accident."""
        times = [e for e in log if e.get("pid") in after.pids.values()]
        times = [e for e in times if e["event"] == name]
        times = [e for e in times if step in (None, e.get("step"))]
        return max(e["time"] for e in times) - mark["time"]

    met = max(t for t in agents("Rendezvous complete") if t < those("begin"))
    noticed = min(t for t in agents("Rendezvous'ing") if t > 0)
    reached = max(steps[-1] for steps in before.steps.values())
    ends = [0.0, noticed, met, *map(those, ("begin", "imported", "joined", "loaded"))]
    ends.append(those("step", reached))
    return Recovery(*(b - a for a, b in zip(ends, ends[1:], strict=False)))
