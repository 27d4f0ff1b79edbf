"""What the log of an elastic job says: who trained when, from which step to which.

Ranks note in `log.jsonl` of the job's folder that they have loaded and that they have
done a step; `helpers.Job` adds what was done to them. Reads files only. Used by
`helpers.elastic`, and by the picture of lesson 24.
"""

import contextlib
import json
import re
import time
from pathlib import Path
from typing import NamedTuple


def noted(folder: Path) -> list[dict]:
    """What ranks have noted in a folder, but for lines whose writer was killed."""
    path, entries = folder / "log.jsonl", []
    if path.exists():
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                entries.append(json.loads(line))
    return entries


class Run(NamedTuple):
    """From one start of the ranks to the next."""

    ranks: int
    first: int  # step
    steps: dict[int, list[int]]  # rank -> the steps that it has done
    agents: dict[int, int]  # rank -> the process that has started it
    pids: list[int]  # of the ranks
    marks: list[dict]  # what was done to the job meanwhile, with the step to come

    @property
    def end(self) -> int:
        """The step after the last one that was done."""
        return max((s[-1] + 1 for s in self.steps.values() if s), default=self.first)


def runs_of(log: list[dict]) -> list[Run]:
    """The log, cut where the ranks started anew."""
    runs: list[Run] = []
    for entry in log:
        rank = entry.get("rank")
        if entry["event"] == "loaded":
            last = runs[-1] if runs else None
            if not last or rank in last.steps or last.ranks != entry["ranks"]:
                runs.append(Run(entry["ranks"], entry["step"], {}, {}, [], []))
            runs[-1].steps[rank] = []
            runs[-1].agents[rank] = entry["agent"]
            runs[-1].pids.append(entry["pid"])
        elif entry["event"] == "step":
            runs[-1].steps[rank].append(entry["step"])
        elif "node" in entry and runs:
            runs[-1].marks.append({**entry, "step": runs[-1].end})
    return runs


_MET = re.compile(r"I\d{4} (\d\d):(\d\d):(\d\d\.\d+) .*Rendezvous complete")


def meetings(words: str) -> list[float]:
    """When an agent said that the nodes have met: seconds of the epoch.

    Args:
        words: what it has printed, with LOGLEVEL=INFO.
    """
    midnight = time.mktime((*time.localtime()[:3], 0, 0, 0, 0, 0, -1))
    found = []
    for hours, minutes, seconds in _MET.findall(words):
        at = midnight + 3600 * int(hours) + 60 * int(minutes) + float(seconds)
        found.append(at - 86400 if at > time.time() else at)  # yesterday
    return found
