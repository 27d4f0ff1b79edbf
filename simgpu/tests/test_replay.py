"""The allocator's model against recorded events of real ones, and against its own."""

import copy
import json
import random
from pathlib import Path

import pytest

from recorded.replay import FREE, SEGMENT, SEGMENT_FREE, UNIT, replay
from simgpu._device.allocator import CachingAllocator
from simgpu._device.cards import GIB, MIB

RECORDINGS = Path(__file__).parent / "recordings"
KINDS = {"free_requested": FREE, "segment_alloc": SEGMENT, "segment_free": SEGMENT_FREE}


def recorded(name: str) -> dict:
    return json.loads((RECORDINGS / f"{name}.json").read_text())


@pytest.mark.parametrize(
    "name, blocks", [("alloc_inference", 1004), ("alloc_training", 568)]
)
def test_every_block_of_a_real_allocator_is_at_its_place(name, blocks):
    assert replay(recorded(name)) == (blocks, blocks, 0)


def record(seed: int, before: int, events: int) -> dict:
    """What the model does in a random program, as recordings have it.

    Args:
        seed: of the program.
        before: steps before the recording begins.
        events: steps of it.
    """
    draw, memory, live = random.Random(seed), CachingAllocator(0, 8 * GIB), []
    largest = draw.choice([2000, MIB, 30 * MIB])

    def step() -> None:
        kind = draw.random()
        if kind < 0.55 or not live:
            live.append(memory.malloc(1 + int(draw.random() ** 2 * largest)))
        elif kind < 0.98:
            memory.free(live.pop(draw.randrange(len(live))))
        else:
            memory.empty_cache()

    for _ in range(before):
        step()
    segments = memory.history.snapshot()
    segments.sort(key=lambda segment: memory.segments[segment["address"]].counter)
    memory.history.record(10**6, None)
    for _ in range(events):
        step()
    after = memory.reserved
    events = [e for e in memory.history.events if e["action"] != "free_completed"]
    return {
        "segments": [[s["address"] // UNIT, s["total_size"] // UNIT,
                      s["segment_type"] == "small"] for s in segments],
        "blocks": [[b["address"] // UNIT, b["size"] // UNIT, b["requested_size"]]
                   for s in segments for b in s["blocks"] if b["state"] != "inactive"],
        "rows": [row_of(event) for event in events], "reserved_after": after,
    }  # fmt: skip


def row_of(event: dict) -> list[int]:
    place = event["addr"] // UNIT
    if event["action"] == "alloc":
        return [event["size"], place]
    kind = KINDS[event["action"]]
    return [kind, place] if kind == FREE else [kind, place, event["size"] // UNIT]


@pytest.mark.parametrize("seed", range(12))
def test_what_the_model_recorded_it_repeats(seed):
    recording = record(seed, before=300 * (seed % 3), events=600)
    at_place, blocks, reserved = replay(recording)
    assert at_place == blocks == sum(row[0] > 0 for row in recording["rows"]) > 200
    assert reserved == 0


def test_a_block_elsewhere_and_a_segment_that_only_the_card_needed_are_counted():
    recording = recorded("alloc_inference")
    rows = recording["rows"]
    freed = {row[1] for row in rows if row[0] == FREE}
    moved = next(row for row in reversed(rows) if row[0] > 0 and row[1] not in freed)
    moved[1] = 10**9
    assert replay(recording) == (1003, 1004, 0)
    recording["rows"].insert(0, [SEGMENT, 10**9, 4096])
    recording["reserved_after"] += 4096 * UNIT
    assert replay(recording) == (1002, 1004, -4096 * UNIT)


def test_a_segment_that_only_the_model_needs_or_of_another_size_is_counted():
    recording = recorded("alloc_training")
    rows = [row for row in recording["rows"] if row[0] != SEGMENT]
    at_place, blocks, reserved = replay({**recording, "rows": rows})
    assert at_place < blocks == 568 and reserved == 0
    (row,) = [row for row in recording["rows"] if row[0] == SEGMENT]
    row[2] += 4096
    at_place, blocks, _ = replay(recording)
    assert at_place < blocks


def test_freed_segments_are_freed():
    recording = {
        "segments": [[0, 4096, 1], [4096, 40960, 0]], "blocks": [[0, 1, 4]],
        "rows": [[SEGMENT_FREE, 4096, 40960], [FREE, 0], [512, 0]],
        "reserved_after": 4096 * UNIT,
    }  # fmt: skip
    assert replay(recording) == (1, 1, 0)


@pytest.mark.parametrize(
    "rows, message",
    [
        ([[512, 1], [512, 1]], "row 1: a block in use begins at 1"),
        ([[FREE, 3]], "row 0: no block in use begins at 3"),
        ([[512, 1], [-7, 1]], "row 1 is no event"),
        ([[512, 1.5]], "row 0 is no event"),
        ([[0, 1]], "row 0 is no event"),
        ([[]], "row 0 is no event"),
        ([[SEGMENT, 1]], "row 0 has 2 numbers"),
        ([[512, 1, 0]], "row 0 has 3 numbers"),
    ],
)
def test_rows_that_cannot_be_are_refused(rows, message):
    recording = {
        "segments": [[0, 4096, 1]], "blocks": [[0, 1, 4]], "reserved_after": 0,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        replay({**recording, "rows": rows})


def test_a_state_that_cannot_be_is_refused():
    whole = recorded("alloc_inference")
    for key in ("segments", "blocks", "rows", "reserved_after"):
        with pytest.raises(ValueError, match=key):
            replay({name: value for name, value in whole.items() if name != key})
    for blocks, message in (
        ([[5000, 1, 4]], "no segment holds the block at 5000"),
        ([[4095, 2, 4]], "a block at 4095 is not in its segment"),
        ([[0, 2, 4], [1, 2, 4]], "a block at 1 is not in its segment"),
    ):
        recording = {**copy.deepcopy(whole), "segments": [[0, 4096, 1]]}
        with pytest.raises(ValueError, match=message):
            replay({**recording, "blocks": blocks, "rows": []})
    with pytest.raises(ValueError, match="the segment at 1 begins inside another"):
        replay({**whole, "segments": [[0, 4096, 1], [1, 4096, 1]], "blocks": []})
