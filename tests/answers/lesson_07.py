"""Answers to the exercises of lesson 07: right ones, and planted wrong ones."""

import statistics
import time

import torch

from exercises.lesson_07 import solution_3
from helpers import host_seconds

one_mark_a_part = solution_3.function()


def timing_event():
    return torch.cuda.Event(enable_timing=True)


def medians(times, parts):
    return [statistics.median(times[i :: len(parts)]) for i in range(len(parts))]


def two_marks_a_part(parts, n):
    pairs = []
    for part in n * parts:
        begin, end = timing_event(), timing_event()
        begin.record()
        part()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return medians([begin.elapsed_time(end) for begin, end in pairs], parts)


def each_part(clock, wait=lambda: None):
    """The host's time of each part, read from this clock."""

    def times(parts, n):
        found = []
        wait()
        for part in n * parts:
            start = clock()
            part()
            wait()
            found.append(1e3 * (clock() - start))
        return medians(found, parts)

    return times


def between_marks(read):
    """One mark before all parts and one behind each, then `read(marks)`."""

    def times(parts, n):
        marks = [timing_event() for _ in range(n * len(parts) + 1)]
        marks[0].record()
        for part, mark in zip(n * parts, marks[1:], strict=True):
            part()
            mark.record()
        return medians(read(marks), parts)

    return times


def without_waiting(marks):
    return [a.elapsed_time(b) for a, b in zip(marks[:-1], marks[1:], strict=True)]


def from_the_first(marks):
    marks[-1].synchronize()
    return [marks[0].elapsed_time(mark) for mark in marks[1:]]


def no_timing(parts, n):
    begin, end = torch.cuda.Event(), torch.cuda.Event()
    begin.record()
    parts[0]()
    end.record()
    end.synchronize()
    return [begin.elapsed_time(end)]


def means(parts, n):
    marks = [timing_event() for _ in range(n * len(parts) + 1)]
    marks[0].record()
    for part, mark in zip(n * parts, marks[1:], strict=True):
        part()
        mark.record()
    marks[-1].synchronize()
    times, count = without_waiting(marks), len(parts)
    return [statistics.mean(times[i::count]) for i in range(count)]


def warm_up(parts, n):
    parts[0]()
    return one_mark_a_part(parts, n)


def alone(before=True, after=True, clock=host_seconds, unit=1):
    """A stopwatch that waits before its first and its last reading, or does not."""

    def seconds(work):
        if before:
            torch.cuda.synchronize()
        start = clock()
        work()
        if after:
            torch.cuda.synchronize()
        return unit * (clock() - start)

    return seconds


def alone_by_events(work):
    begin, end = timing_event(), timing_event()
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def reported(step=statistics.median, rate=lambda left, _: max(map(sum, left)), of=sum):
    """Of all samples and the milliseconds that `rate` makes of the times."""

    def report(times, samples, warm_up):
        left = [of_rank[warm_up:] for of_rank in times]
        counted = of(samples) * len(left[0])
        return step(left[0]), 1e3 * counted / rate(left, times)

    return report


def usual_steps(left, times):
    return len(left[0]) * max(statistics.median(of_rank) for of_rank in left)


RIGHT = {
    "seconds_alone": [alone(), alone_by_events],
    "report": [reported(), lambda *given: list(reported()(*given))],
    "part_times": [one_mark_a_part, two_marks_a_part],
}

WRONG = {
    "seconds_alone": [
        (alone(before=False, after=False), "is the launch"),
        (alone(after=False), "before the last reading"),
        (alone(before=False), "before the first reading"),
        (alone(unit=1e3), "milliseconds"),
        (alone(clock=lambda: 1e6 * time.perf_counter()), "another clock"),
        (lambda work: "now", "give a number"),
        (lambda work: 0.0, "is the launch"),
    ],
    "report": [
        (reported(step=statistics.mean), "is the mean"),
        (reported(step=min), "a usual step of rank 0 takes 1.25 ms, not 1;"),
        (reported(rate=usual_steps), "slow steps take time, too"),
        (
            reported(
                rate=lambda left, times: (
                    max(map(sum, times)) * len(left[0]) / len(times[0])
                )
            ),
            "only warm up",
        ),
        (reported(rate=lambda left, _: sum(left[0])), "the time of rank 0"),
        (
            reported(rate=lambda left, _: statistics.mean(map(sum, left))),
            "the mean time of the ranks",
        ),
        (reported(of=lambda samples: samples[0]), "the samples of rank 0 only"),
        (reported(rate=lambda left, _: 1e3 * max(map(sum, left))), "a millisecond"),
        (lambda times, samples, warm_up: (1.25, 1.0), "and it is"),
        (lambda times, samples, warm_up: 1.25, "it returns"),
        (lambda times, samples, warm_up: (1.25, 1.0, 4.0), "two numbers, not 3"),
    ],
    "part_times": [
        (each_part(time.perf_counter), "you say"),
        (each_part(host_seconds), "is the launch"),
        (each_part(host_seconds, torch.cuda.synchronize), "the host waits 6 times"),
        (between_marks(without_waiting), "must be completed"),
        (no_timing, "enable_timing=True"),
        (between_marks(from_the_first), "begins at the first part"),
        (means, "these are means"),
        (warm_up, "it calls the parts [0, 0, 1,"),
        (
            lambda parts, n: [one_mark_a_part([part], n)[0] for part in parts],
            "it calls the parts [0, 0, 0, 1,",
        ),
        (lambda parts, n: [t / 1e3 for t in one_mark_a_part(parts, n)], "seconds"),
        (lambda parts, n: [1e3 * t for t in one_mark_a_part(parts, n)], "too much"),
        (lambda parts, n: sum(one_mark_a_part(parts, n)), "not a float"),
        (lambda parts, n: one_mark_a_part(parts, n)[1:], "2 parts gave 1 times"),
    ],
}
