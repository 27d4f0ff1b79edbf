"""The pictures of agents that meet, and of a job that is killed, from their SVG."""

from types import SimpleNamespace

from helpers import draw


def started(agents: dict[int, int], first: int, end: int) -> list[dict]:
    """Ranks with their agents that do some steps."""
    who = [
        {"rank": rank, "ranks": len(agents), "agent": agent, "pid": 10 * agent + first}
        for rank, agent in agents.items()
    ]
    log = [{**w, "event": "loaded", "step": first} for w in who]
    for step in range(first, end):
        log += [{**w, "event": "step", "step": step, "rows": []} for w in who]
    return log


LOG = [
    *started({0: 100, 1: 101}, 0, 7),
    {"event": "kill node", "node": 1},
    *started({0: 100}, 5, 8),
]
NODES = [SimpleNamespace(pid=100 + n, number=n) for n in (0, 1)]


def test_steps_done_in_vain_are_white_and_dashed():
    svg = draw.elastic_job(LOG, NODES, every=5)._repr_svg_()
    assert svg.count("stroke-dasharray") == 2 * 2 + 1  # two of both ranks; and the key
    for words in ("2 ranks, from 0", "1 rank, from 5", "✕ node", "node 1"):
        assert words in svg
    assert "2 ranks from step 0 to 6; 1 rank from step 5 to 7" in svg


def test_a_bar_stands_after_each_checkpoint():
    bars = [
        draw.elastic_job(LOG, NODES, every=every)._repr_svg_().count('width="2"')
        for every in (5, 100)
    ]
    assert bars == [2 + 1, 1]  # of two ranks; the key has one


def test_which_rank_a_node_has_and_who_notes_first_change_nothing():
    """torchrun numbers the nodes of one address by their process: by chance."""
    rest = LOG[LOG.index({"event": "kill node", "node": 1}) :]
    swapped = [*started({1: 100, 0: 101}, 0, 7), *rest]
    late = [*started({1: 101, 0: 100}, 0, 7), *rest]
    pictures = {
        draw.elastic_job(log, NODES, every=5)._repr_svg_()
        for log in (LOG, swapped, late)
    }
    assert len(pictures) == 1


def test_each_node_has_an_agent_and_its_workers():
    svg = draw.agents_meet(nodes=3, ranks=2)._repr_svg_()
    assert svg.count("agent (torchrun)") == 3
    for rank in range(6):
        assert f"worker, rank {rank}" in svg
