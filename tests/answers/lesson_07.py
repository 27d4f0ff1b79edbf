"""Answers to the exercises of lesson 07: right ones, and planted wrong ones."""

import statistics
import time

import torch

from exercises.lesson_07 import solution_3
from helpers import host_seconds

one_mark_a_step = solution_3.function()


def timing_event():
    return torch.cuda.Event(enable_timing=True)


def two_marks_a_step(step, n):
    begins = [timing_event() for _ in range(n)]
    ends = [timing_event() for _ in range(n)]
    for begin, end in zip(begins, ends, strict=True):
        begin.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(begins, ends, strict=True)]


def each_step(clock, wait=lambda: None):
    """The host's time of each step, read from this clock."""

    def times(step, n):
        found = []
        wait()
        for _ in range(n):
            start = clock()
            step()
            wait()
            found.append(1e3 * (clock() - start))
        return found

    return times


def event_waits_each_time(step, n):
    times = []
    for _ in range(n):
        begin, end = timing_event(), timing_event()
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def between_marks(read):
    """One mark before all steps and one behind each, then `read(marks)`."""

    def times(step, n):
        marks = [timing_event() for _ in range(n + 1)]
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        return read(marks)

    return times


def without_waiting(marks):
    return [a.elapsed_time(b) for a, b in zip(marks[:-1], marks[1:], strict=True)]


def from_the_first(marks):
    marks[-1].synchronize()
    return [marks[0].elapsed_time(mark) for mark in marks[1:]]


def no_timing(step, n):
    begin, end = torch.cuda.Event(), torch.cuda.Event()
    begin.record()
    step()
    end.record()
    end.synchronize()
    return [begin.elapsed_time(end)]


def mean(step, n):
    total = sum(one_mark_a_step(step, n))
    return [total / n] * n


def warm_up(step, n):
    step()
    return one_mark_a_step(step, n)


def reads_at_once():
    return host_seconds()


def reads_too_early():
    now = host_seconds()
    torch.cuda.synchronize()
    return now


def own_cpu():
    torch.cuda.synchronize()
    return 1e6 + time.perf_counter()


def waits():
    torch.cuda.synchronize()
    return host_seconds()


def waits_by_an_event():
    end = torch.cuda.Event()
    end.record()
    end.synchronize()
    return host_seconds()


def _of(times):
    return statistics.median(times), min(times), max(times)


RIGHT = {
    "clock_after_the_gpu": [waits, waits_by_an_event],
    "report": [
        lambda times, warm_up: _of(times[warm_up:]),
        lambda times, warm_up: list(_of(sorted(times[warm_up:]))),
    ],
    "step_times": [one_mark_a_step, two_marks_a_step],
}

WRONG = {
    "clock_after_the_gpu": [
        (reads_at_once, "still busy"),
        (reads_too_early, "still busy"),
        (own_cpu, "another clock"),
        (lambda: "now", "give a number"),
    ],
    "report": [
        (lambda times, warm_up: _of(times), "does not count"),
        (
            lambda times, warm_up: (statistics.mean(times[warm_up:]), 1.0, 4.0),
            "is the mean",
        ),
        (lambda times, warm_up: _of(sorted(times)[warm_up:]), "does not count"),
        (lambda times, warm_up: (1.3, 1.0, 4.0), "it is (1.25, 1.0, 4.0)"),
        (lambda times, warm_up: statistics.median(times[warm_up:]), "it returns"),
        (lambda times, warm_up: times[warm_up:], "return three numbers, not 5"),
    ],
    "step_times": [
        (each_step(time.perf_counter), "you say"),
        (each_step(host_seconds), "is the launch"),
        (each_step(host_seconds, torch.cuda.synchronize), "the host waits 4 times"),
        (event_waits_each_time, "the host waits 4 times"),
        (between_marks(without_waiting), "must be completed"),
        (no_timing, "enable_timing=True"),
        (between_marks(from_the_first), "begins at the first step"),
        (mean, "you say"),
        (warm_up, "it runs 5 steps"),
        (lambda s, n: [t / 1e3 for t in one_mark_a_step(s, n)], "seconds"),
        (lambda s, n: [1e3 * t for t in one_mark_a_step(s, n)], "too much"),
        (lambda s, n: sum(one_mark_a_step(s, n)), "not a float"),
        (lambda s, n: one_mark_a_step(s, n)[1:], "4 steps gave 3 times"),
    ],
}
