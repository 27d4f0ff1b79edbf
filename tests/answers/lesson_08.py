"""Answers to the exercises of lesson 08: right ones, and planted wrong ones."""

import torch
from torch.autograd import DeviceType
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode


def measured(step, *, warm=True, of_time=1e-3, of_kernels=1e-6, wait=True):
    """Seconds of a step and of its kernels, and its FLOPs, measured right or wrong."""
    if warm:
        step()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    if wait:
        torch.cuda.synchronize()
    took = of_time * begin.elapsed_time(end)
    with profile() as profiler:
        step()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == DeviceType.CUDA]
    busy = of_kernels * sum(event.self_device_time_total for event in events)
    with FlopCounterMode(display=False) as counter:
        step()
    return took, busy, counter.get_total_flops()


def judge(share=0.8, of_peak=0.5, **how):
    """A function of `step` and `peak`."""

    def answer(step, peak):
        took, busy, flops = measured(step, **how)
        if busy < share * took:
            return "launch"
        return "arithmetic" if flops / busy > of_peak * peak else "memory"

    return answer


def by_flops(step, peak):
    took, busy, flops = measured(step)
    if busy < 0.8 * took:
        return "launches"
    return "compute" if flops else "memory"


def busy_or_not(step, peak):
    took, busy, _ = measured(step)
    return "launches" if busy < 0.8 * took else "compute"


def graph_of(copied_in=True, copied_out=True, replayed=True, again=False):
    """A function of `function` and `x` that captures, right or wrong."""

    def answer(function, x):
        read, graph = x.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            written = function(read)

        def replay(new):
            if copied_in:
                read.copy_(new)
            if replayed:
                graph.replay()
            if again:
                return function(new)
            return written.clone() if copied_out else written

        return replay

    return answer


def by_pytorch(function, x):
    graphed = torch.cuda.make_graphed_callables(function, (x,))
    return lambda new: graphed(new).clone()


RIGHT = {
    "five_bounds": [
        ("compute", "memory", "memory", "launches", "memory"),
        ("Arithmetic", "memory", "memory", "launch", "memory"),
    ],
    "what_binds": [judge()],
    "graphed": [graph_of(), by_pytorch],
}

WRONG = {
    "five_bounds": [
        (("memory", "memory", "memory", "launches", "memory"), "number 1"),
        (("arithmetic",) * 5, "number 2"),
        (("arithmetic", "memory", "arithmetic", "memory", "memory"), "mber 3"),
        (("arithmetic", "memory", "memory", "memory", "memory"), "number 4"),
        (("arithmetic", "memory", "memory", "launches", "arithmetic"), "number 5"),
        (("bytes", "memory", "memory", "launches", "memory"), "say launches"),
        (("arithmetic", "memory"), "5 answers are asked for, not 2"),
    ],
    "what_binds": [
        (lambda step, peak: "memory", "hundred products of 10,000 numbers: you say"),
        (judge(share=0), "run for a small part of the time"),
        (judge(of_time=1e-6), "run for a small part of the time"),
        (judge(of_kernels=1e-9), "the profiler's in microseconds"),
        (judge(wait=False), "your code raised"),
        (busy_or_not, "no FLOP is counted"),
        (by_flops, "a matmul, but far from the peak"),
        (judge(warm=False), "run the step once before you measure"),
        (judge(of_peak=1), "above half of the peak"),
        (lambda step, peak: "the host", "say launches, memory or compute"),
    ],
    "graphed": [
        (lambda function, x: 3, "return a function, not an int"),
        (lambda function, x: function, "is not called, so nothing is captured"),
        (graph_of(again=True), "with all its launches"),
        (graph_of(copied_in=False), "it gives what `x` gives"),
        (graph_of(copied_in=False, copied_out=False), "it gives what `x` gives"),
        (graph_of(copied_out=False), "writes over the result of the first"),
        (graph_of(replayed=False), "does not give what `function` gives"),
    ],
}
