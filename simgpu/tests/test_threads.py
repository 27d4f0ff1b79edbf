"""The time of threads: each has a clock of its own, and waits as the program does."""

import functools
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import simgpu
from simgpu import _runtime as runtime
from simgpu._dispatch.mode import settle_streams
from support.limits import SHORT

pytestmark = pytest.mark.simulated_gpus(1)


def test_a_thread_starts_at_its_parents_time_and_join_waits_for_it(log):
    x = torch.ones(4, device=0)
    log.clear()
    x + 1
    begin, ends = log.host, []

    def work(count, done):
        for _ in range(count):
            x + 1
        ends.append(log.host)
        done.set()

    threads = []
    for count in (2, 5):  # the second starts when the first is done, but has not waited
        done = threading.Event()
        threads.append(threading.Thread(target=work, args=(count, done)))
        threads[-1].start()
        assert done.wait(SHORT)
    assert log.host == begin
    for thread in threads:
        thread.join(SHORT)
    assert ends == [pytest.approx(begin + count * 10e-6) for count in (2, 5)]
    launches = [event.launched for event in log.events]
    assert len(launches) == 8 and launches == sorted(launches)
    assert log.host == ends[1]


def test_threads_of_a_pool_do_not_work_in_the_past(log):
    x = torch.ones(4, device=0)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: x + 1).result(SHORT)
        for _ in range(20):
            x + 1
        pool.submit(lambda: x.cpu()).result(SHORT)
    assert log.copies[-1].launched >= 20 * 10e-6


def test_clear_and_stop_do_not_disturb_a_thread_that_runs(log):
    ready, go, done = threading.Event(), threading.Event(), []

    def work():
        torch.ones(4, device=0)
        ready.set()
        go.wait(SHORT)
        done.append(torch.ones(4, device=0 if simgpu.count() else "cpu").tolist())

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(SHORT)
    log.clear()
    simgpu.stop()
    go.set()
    thread.join(SHORT)
    assert done == [[1.0] * 4]


def test_who_asks_a_pool_for_a_result_waits_for_it(log):
    x = torch.ones(2**20, device=0)
    log.clear()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: x.cpu())
        future.result(SHORT)
        assert log.host >= log.copies[-1].end
        failed = pool.submit(lambda: x.cpu().no_such_thing)
        assert isinstance(failed.exception(SHORT), AttributeError)
        assert log.host >= log.copies[-1].end
        with pytest.raises(AttributeError):
            failed.result(SHORT)


def test_what_ended_before_clear_does_not_bring_its_time_back(log):
    x = torch.ones(2**20, device=0)
    thread = threading.Thread(target=x.cpu)
    thread.start()
    end = time.monotonic() + SHORT
    while thread.is_alive() and time.monotonic() < end:
        time.sleep(0.001)
    log.clear()
    thread.join(SHORT)
    assert log.host == 0


@pytest.fixture
def often():
    """Threads take turns as often as Python lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_collectives_come_and_go_beside_threads_that_ask_for_them(often):
    now = runtime.running
    clock, gpu, done = now.clock, now.gpus[0], threading.Event()

    def launch():
        for number in range(4000):
            stream = number % 8
            with clock.lock:  # as `collectives.launch` does it
                meeting = clock.meet(gpu, stream, stream, "", 4, 1e-6)
                meeting.settle = functools.partial(settle, meeting)

    def settle(meeting):
        with clock.lock:
            if meeting.end is None:
                clock.settled(meeting, meeting.ready, meeting.ready)

    def ask():
        while not done.is_set():
            settle_streams(now)
            clock.settle()
            clock.total()
            clock.keys()

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask) for _ in range(2)]
        try:
            pool.submit(launch).result(SHORT)
        finally:
            done.set()
        assert [future.result(SHORT) for future in asking] == [None, None]
    clock.settle()
    assert not clock.pending


class _Growing(dict):
    """One to which another thread adds a key wherever a key is looked up."""

    def get(self, key, default=None):
        self.others[len(self.others), 0] = []
        return default


def test_collectives_that_come_while_one_looks_do_no_harm(monkeypatch):
    now = runtime.running
    pending = {(0, 1): [], (0, 2): []}
    streams = _Growing()
    streams.others = pending
    monkeypatch.setattr(now.clock, "pending", pending)
    monkeypatch.setattr(now.clock, "settle", lambda keys: None)
    monkeypatch.setattr(now.thread, "streams", streams)
    settle_streams(now)
    assert len(pending) > 2
