"""What lesson 24 shows of a job: what was computed, said and lost; its command."""

import datetime
import os
import sys
import textwrap
import types
from pathlib import Path
from unittest import mock

import pytest

from helpers import RankError, elastic
from tests.launching import NOTEBOOKS, prose_of, shown, text_of

sys.path.insert(0, str(NOTEBOOKS))
from scripts import elastic_watch as watch  # noqa: E402
from scripts import train_elastic as script  # noqa: E402

LESSON = "24-survive-failures.ipynb"
LINE = "I1121 {} 64 torch/distributed/elastic/agent.py:254] {}"


def diary(*starts, marks=()) -> list[dict]:
    """Of starts, each with ranks, first step and end; a mark follows a start."""
    log: list[dict] = [{"event": "add node", "node": 0}]
    for i, (ranks, first, end) in enumerate(starts):
        who = [
            {"rank": r, "ranks": ranks, "pid": 10 * i + r, "agent": 100 + r}
            for r in range(ranks)
        ]
        log += [{**w, "event": "loaded", "step": first} for w in reversed(who)]
        for step in range(first, end):
            rows = script.rows_of_step(step, watch.BATCH, watch.ROWS)
            mine = {"event": "step", "step": step, "loss": (i + 1) * watch.BATCH}
            log += [{**w, **mine, "rows": rows[w["rank"] :: ranks]} for w in who]
        log += [{"event": event, "node": node} for j, event, node in marks if i == j]
    return [{**e, "rows": list(map(int, e.get("rows", [])))} for e in log]


def node(number: int = 0, *lines: tuple[str, str]) -> types.SimpleNamespace:
    """Its agent has said these lines, each at a time of day."""
    agent = types.SimpleNamespace(pid=100 + number)
    words = "\n".join(LINE.format(*line) for line in lines)
    return types.SimpleNamespace(number=number, agent=agent, words=words)


# -- what ranks have noted -------------------------------------------------------------


def test_the_log_is_cut_where_ranks_start_anew():
    log = diary((1, 0, 7), (2, 5, 12), (2, 10, 22), marks=[(1, "kill node", 1)])
    runs = watch.runs_of(log)
    assert [(run.ranks, run.first) for run in runs] == [(1, 0), (2, 5), (2, 10)]
    assert watch.starts(log[:20]) == "1 rank from step 0; 2 ranks from step 5"
    assert runs[1].steps == {0: list(range(5, 12)), 1: list(range(5, 12))}
    (mark,) = runs[1].marks
    assert (mark["event"], mark["node"], mark["step"]) == ("kill node", 1, 12)
    assert watch.steps_again(log) == [2, 2]


def test_a_start_without_a_step_and_a_job_without_accident():
    assert watch.steps_again(diary((2, 0, 7), (1, 5, 5), (2, 5, 22))) == [2, 0]
    assert watch.steps_again(diary((2, 0, 22))) == []


def test_rows_are_checked(capsys):
    watch.check_rows(diary((2, 0, 12), (2, 10, 22)))
    assert "in vain: 2\n" in capsys.readouterr().out
    lost = diary((2, 0, 22))
    lost[30]["rows"].pop()
    with pytest.raises(AssertionError, match="rows of step 13"):
        watch.check_rows(lost)
    with pytest.raises(AssertionError):  # counted twice: nobody has loaded again
        watch.check_rows(diary((2, 0, 22)) + [diary((2, 0, 22))[-1]])


def test_losses_are_of_all_ranks_and_of_the_last_time(capsys):
    found = watch.losses(diary((2, 0, 12), (2, 10, 22)))
    assert found == {step: 2 if step < 10 else 4 for step in range(22)}
    assert capsys.readouterr().out == "loss of steps 0, 11, 21: 2.00, 4.00, 4.00\n"


def test_what_a_killed_writer_leaves_is_passed_over(tmp_path: Path):
    assert watch.read(tmp_path) == []
    (tmp_path / "log.jsonl").write_text('{"time": 2}\n{"time": 1}\n{"ti')
    assert watch.read(tmp_path) == [{"time": 1}, {"time": 2}]


def test_the_reason_of_a_rank_or_of_all():
    two = RankError("rank 0: lost another rank\nrank 1: killed\n  rank 1")
    assert watch.reason(two) == "rank 1: killed"
    assert watch.reason(two, rank=0) == "rank 0: lost another rank"
    for words in ("ranks 0, 1: NameError: no", "these ranks are closed; open new ones"):
        assert watch.reason(RankError(words)) == words


# -- the picture -----------------------------------------------------------------------


def test_the_picture_does_not_depend_on_who_was_faster():
    log = diary((2, 0, 12), (2, 10, 22))
    other = [log[0], log[2], log[1], *log[3:]]
    first = watch.picture(log, "it")._repr_svg_()
    assert first == watch.picture(other, "it")._repr_svg_()
    assert first.count('stroke-dasharray="4 3"') == 4 + 1  # and in the key
    assert "2 ranks from step 0 to 11; 2 ranks from step 10 to 21" in first
    assert "have met" not in first


def test_the_picture_has_who_met_and_who_waited():
    nodes = [node(0), node(1)]
    kill, add = (0, "kill node", 1), (0, "add node", 2)

    def drawn(*marks) -> str:
        log = diary((2, 0, 12), (2, 10, 22), marks=marks)
        return watch.picture(log, "it", [*nodes, node(2)])._repr_svg_()

    assert "node 1" in drawn() and "nodes have met" in drawn()
    assert "waits" not in drawn() + drawn(kill) + drawn(add)
    assert drawn(kill, add).count(">waits<") == 1  # node 0, not the dead one
    assert "a node waits for another; 2 ranks from step 10" in drawn(kill, add)


# -- what agents have said -------------------------------------------------------------


def test_what_an_agent_has_said():
    lines = [
        "[default] Rendezvous'ing worker group",
        "  group_world_size=1",
        "[default] Detected 1 new nodes from group_rank=0; will restart worker group",
        "  group_world_size=1",
        "[default] Detected 1 new nodes from group_rank=0; will restart worker group",
        "  group_world_size=2",
        "[default] Worker group FAILED. 3/3 attempts left; will restart worker group",
    ]
    it = node(0, *(("14:48:53.054000", line) for line in lines))
    assert watch.said(it)[0] == (53333.054, "Rendezvous'ing worker group")
    assert watch.diary(it) == [
        "rendezvous complete, group_world_size=1",
        "Detected 1 new nodes; will restart worker group",
        "rendezvous complete, group_world_size=2",
        "Worker group FAILED. 3/3 attempts left; will restart worker group",
    ]


def test_the_end_of_a_failed_job_without_what_changes():
    words = """Failures: of somebody else
Failures:
[1]:
  time      : 2026-11-21_17:15:44
  rank      : 1 (local_rank: 1)
  traceback : Traceback (most recent call last):
  RuntimeError: Connection closed by peer
------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  ValueError: a bad row in step 12
"""
    assert watch.summary(types.SimpleNamespace(words=words)).splitlines() == [
        "Failures:",
        "  rank      : 1 (local_rank: 1)",
        "Root Cause (first observed failure):",
        "  rank      : 0 (local_rank: 0)",
        "  ValueError: a bad row in step 12",
    ]


@pytest.mark.parametrize("start", ["12:00:00", "23:59:58"])
def test_where_the_seconds_of_a_recovery_went(start, capsys):
    """Also around midnight: agents tell the time of the day only."""
    begin = datetime.datetime.fromisoformat(f"2026-11-21T{start}")

    def said(seconds: float, words: str) -> tuple[str, str]:
        at = begin + datetime.timedelta(seconds=seconds)
        return f"{at:%H:%M:%S.%f}", words

    log = diary((1, 0, 2), (2, 0, 3), marks=[(0, "add node", 1)])
    now, after = begin.timestamp(), {"loaded": 5.0, 0: 5.1, 1: 5.2, 2: 6.0}
    for entry in log:
        late = entry.get("pid", 0) >= 10
        what = entry["step"] if entry["event"] == "step" else entry["event"]
        entry["time"] = now + after[what] if late else now
    for event, seconds in (("begin", 2.5), ("imported", 3.0), ("joined", 4.0)):
        for pid, more in ((10, 0), (11, 0.25)):
            log.append({"event": event, "pid": pid, "time": now + seconds + more})
    nodes = [
        node(0, said(-1, "Rendezvous'ing worker group"),
             said(-1, "Rendezvous complete"), said(1.25, "Rendezvous'ing worker group"),
             said(2, "Rendezvous complete")),
        node(1, said(1, "Rendezvous'ing worker group"), said(2, "Rendezvous complete")),
    ]  # fmt: skip
    (parts,) = watch.recoveries(types.SimpleNamespace(log=log, nodes=nodes))
    expected = (1, 1, 0.75, 0.5, 1, 0.75, 0.2)
    assert parts == pytest.approx(expected, abs=1e-3)
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["ranks", *watch.Recovery._fields, "all"]
    assert table[1].split()[:5] == ["add", "node,", "1", "->", "2"]
    assert len(table) == 2 and len(table[0]) == len(table[1]) <= 88


# -- the lesson ------------------------------------------------------------------------


def test_the_writer_of_a_fatal_file_is_killed(tmp_path: Path):
    child = os.fork()
    if child == 0:
        with watch.fatal(1000)(tmp_path / "file", "wb") as file:
            for _ in range(100):
                file.write(b"x" * 300)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    assert (tmp_path / "file").stat().st_size == 1000


def test_the_lesson_shows_the_script_as_it_is():
    text, prose = text_of("train_elastic.py"), prose_of(LESSON)
    reads = text[text.index("    box = [None]\n") : text.index("    step = 0\n")]
    assert shown(prose, textwrap.dedent(reads))
    ends = text[text.index("    dist.init_process_group(") :]
    assert f"```python\n{ends}```" in prose


def test_the_lesson_shows_the_command_of_its_first_job():
    with (
        watch.start("--hold", "7", "13", "16", nodes="1:2") as job,
        mock.patch.object(elastic.subprocess, "Popen") as agent,
    ):
        job.add()
        job.nodes.clear()  # nothing was started
    (command,), _ = agent.call_args
    words = " ".join(["torchrun", *command[3:]])
    for name, value in (
        ("FOLDER", job.folder), ("PORT", job.port), ("NAME", job.name),
    ):  # fmt: skip
        words = words.replace(str(value), name)
    blocks = prose_of(LESSON).split("```")
    (block,) = [b for b in blocks if b.startswith("\ntorchrun\n")]
    assert block.split() == words.split()
