"""Random programs of three streams: a race is reported where there is one, only there.

What must be reported is worked out here from sets: which accesses are certainly done.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.cuda._sanitizer import CUDASanitizerErrors

import simgpu
from support.side_streams import main_stream, side_stream


@pytest.fixture(autouse=True)
def stopped():
    yield
    simgpu.stop()


class Order:
    """Which accesses are done before which, by their numbers.

    Args:
        streams: how many there are.
    """

    def __init__(self, streams: int):
        self.before = [set() for _ in range(streams)]  # what a stream does next
        self.events = [set() for _ in range(streams)]
        self.host: set[int] = set()
        self.accesses: list[tuple[set, bool]] = []  # (elements, whether it writes)

    def races(self, stream: int, elements: set, writes: bool) -> bool:
        """Add an access; whether it races with one before it."""
        before = self.before[stream]
        before |= self.host
        found = any(
            elements & others and (writes or wrote)
            for number, (others, wrote) in enumerate(self.accesses)
            if number not in before
        )
        before.add(len(self.accesses))
        self.accesses.append((elements, writes))
        return found


VIEWS = [
    lambda x: x,
    lambda x: x[:5],
    lambda x: x[4:],
    lambda x: x[::2],
    lambda x: x[1::2],
    lambda x: x[3],
    lambda x: x.view(3, 4)[:, 1],
    lambda x: x.view(3, 4).T[2:, 1:],
    lambda x: x[5:6].expand(3),  # PyTorch writes to nothing that is expanded
]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["read", "read", "write", "write", "item", "wait", "record", "wait event",
             "synchronize event", "synchronize stream", "synchronize"]
        ),
        st.integers(0, 2), st.integers(0, 2), st.sampled_from(VIEWS),
    ),
    min_size=4, max_size=24,
)  # fmt: skip


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(STEPS)
def test_a_race_is_reported_exactly_where_there_is_one(steps):
    simgpu.stop()
    simgpu.start(1)
    x, places = torch.zeros(12, device="cuda"), torch.arange(12)
    streams = [main_stream(), side_stream(), side_stream()]
    torch.cuda.synchronize()
    events, order = [torch.cuda.Event() for _ in streams], Order(3)
    for what, a, b, view in steps:
        stream, event, races = streams[a], events[b], False
        if what == "item":
            view = VIEWS[5]
        elif what == "write" and view is VIEWS[-1]:
            view = VIEWS[0]
        if what in ("read", "write", "item"):
            elements = set(view(places).flatten().tolist())
            races = order.races(a, elements, what == "write")
        try:
            with torch.cuda.stream(stream):
                if what == "read":
                    view(x) + 1
                elif what == "write":
                    view(x).add_(1)
                elif what == "item":
                    view(x).item()
                    order.host |= order.before[a]
                elif what == "wait":
                    stream.wait_stream(streams[b])
                    order.before[a] |= order.before[b]
                elif what == "record":
                    event.record()
                    order.events[b] = order.before[a] | order.host
                elif what == "wait event":
                    event.wait()
                    order.before[a] |= order.events[b]
                elif what == "synchronize event":
                    event.synchronize()
                    order.host |= order.events[b]
                elif what == "synchronize stream":
                    stream.synchronize()
                    order.host |= order.before[a]
                else:
                    torch.cuda.synchronize()
                    order.host.update(*order.before)
        except CUDASanitizerErrors as error:
            assert races, f"false alarm: {error}"
            return
        assert not races, "a race that is not reported"
