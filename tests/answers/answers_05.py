"""Answers to the exercises of lesson 05: right ones, and wrong ones with the reason."""

import time

import torch

from helpers import host_seconds


def _event():
    return torch.cuda.Event(enable_timing=True)


def one_mark_a_step(step, n):
    marks = [_event() for _ in range(n + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    marks[-1].synchronize()
    return [a.elapsed_time(b) for a, b in zip(marks[:-1], marks[1:], strict=True)]


def two_marks_a_step(step, n):
    begins, ends = [_event() for _ in range(n)], [_event() for _ in range(n)]
    for begin, end in zip(begins, ends, strict=True):
        begin.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(begins, ends, strict=True)]


def as_given(step, n):
    times = []
    for _ in range(n):
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def host_clock(step, n):
    times = []
    for _ in range(n):
        start = host_seconds()
        step()
        times.append(1e3 * (host_seconds() - start))
    return times


def waits_each_time(step, n):
    times = []
    torch.cuda.synchronize()
    for _ in range(n):
        start = host_seconds()
        step()
        torch.cuda.synchronize()
        times.append(1e3 * (host_seconds() - start))
    return times


def event_waits_each_time(step, n):
    times = []
    for _ in range(n):
        begin, end = _event(), _event()
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def never_waits(step, n):
    marks = [_event() for _ in range(n + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    return [a.elapsed_time(b) for a, b in zip(marks[:-1], marks[1:], strict=True)]


def no_timing(step, n):
    begin, end = torch.cuda.Event(), torch.cuda.Event()
    begin.record()
    step()
    end.record()
    end.synchronize()
    return [begin.elapsed_time(end)]


def from_the_first(step, n):
    marks = [_event() for _ in range(n + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    marks[-1].synchronize()
    return [marks[0].elapsed_time(mark) for mark in marks[1:]]


def mean(step, n):
    total = sum(one_mark_a_step(step, n))
    return [total / n] * n


def warm_up(step, n):
    step()
    return one_mark_a_step(step, n)


RIGHT = {
    "step_times": [lambda: (one_mark_a_step,), lambda: (two_marks_a_step,)],
    "five_bounds": [
        lambda: ("arithmetic", "memory", "memory", "launches", "memory"),
        lambda: ("Arithmetic", "memory", "memory", "launch", "memory"),
    ],
    "break_even": [lambda: (103,), lambda: (100,), lambda: (102.5,)],
}
WRONG = {
    "step_times": [
        (lambda: (as_given,), "you say"),
        (lambda: (host_clock,), "is the launch"),
        (lambda: (waits_each_time,), "the host waits 4 times"),
        (lambda: (event_waits_each_time,), "the host waits 4 times"),
        (lambda: (never_waits,), "must be completed"),
        (lambda: (no_timing,), "enable_timing=True"),
        (lambda: (from_the_first,), "begins at the first step"),
        (lambda: (mean,), "you say"),
        (lambda: (warm_up,), "it runs 5 steps"),
        (lambda: (lambda s, n: [t / 1e3 for t in one_mark_a_step(s, n)],), "seconds"),
        (lambda: (lambda s, n: [1e3 * t for t in one_mark_a_step(s, n)],), "too much"),
        (lambda: (lambda s, n: sum(one_mark_a_step(s, n)),), "not a float"),
        (lambda: (lambda s, n: one_mark_a_step(s, n)[1:],), "4 steps gave 3 times"),
    ],
    "five_bounds": [
        (lambda: ("memory", "memory", "memory", "launches", "memory"), "number 1"),
        (lambda: ("arithmetic",) * 5, "number 2"),
        (lambda: ("arithmetic", "memory", "arithmetic", "memory", "memory"), "mber 3"),
        (lambda: ("arithmetic", "memory", "memory", "memory", "memory"), "number 4"),
        (
            lambda: ("arithmetic", "memory", "memory", "launches", "arithmetic"),
            "number 5",
        ),
        (lambda: ("compute", "memory", "memory", "launches", "memory"), "say launches"),
        (lambda: ("arithmetic", "memory"), "five answers"),
    ],
    "break_even": [
        (lambda: (57,), "count the copies"),
        (lambda: (83,), "travels back"),
        (lambda: (64,), "fixed 15"),
        (lambda: (88,), "are launched"),
        (lambda: (119,), "travels once"),
        (lambda: (500,), "it is smaller"),
        (lambda: (10,), "it is larger"),
        (lambda: ("a hundred",), "is a number"),
    ],
}
