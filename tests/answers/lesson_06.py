"""Answers to the exercises of lesson 06: right ones, and planted wrong ones."""

import torch


def _doubled(x, copier, before=None, after=None, on_copier=True, record=True):
    here = torch.cuda.current_stream()
    if before:
        before(here, copier)
    with torch.cuda.stream(copier if on_copier else here):
        batch = x.cuda(non_blocking=True)
    if after:
        after(here, copier)
    if record:
        batch.record_stream(here)
    return 2 * batch


def doubled_and_waited_for(x, copier, back_first=False):
    here = torch.cuda.current_stream()
    with torch.cuda.stream(copier):
        batch = x.cuda(non_blocking=True)
    here.wait_stream(copier)
    if back_first:
        copier.wait_stream(here)
    result = 2 * batch
    if not back_first:
        copier.wait_stream(here)
    return result


def _flagged(parts, buffers, work, waits=("full", "free"), side=True, one=False):
    here = torch.cuda.current_stream()
    copier = torch.cuda.Stream() if side else here
    copier.wait_stream(here)
    full = [torch.cuda.Event() for _ in buffers]
    free = [torch.cuda.Event() for _ in buffers]
    results = []
    for i, part in enumerate(parts):
        b = 0 if one else i % 2
        with torch.cuda.stream(copier):
            if "free" in waits:
                copier.wait_event(free[b])
            buffers[b].copy_(part, non_blocking=True)
            full[b].record(copier)
        if "full" in waits:
            here.wait_event(full[b])
        if "host" in waits:
            torch.cuda.synchronize()
        results.append(work(buffers[b]))
        free[b].record(here)
    return results


def in_turn(x):
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x = x.to("cuda", non_blocking=True)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        mean_of_squares = (x**2).mean()
    here.wait_stream(side)
    mean = x.mean()
    return (mean_of_squares - mean**2).item()


def _means(x, before=None, after=None, sides=True):
    here = torch.cuda.current_stream()
    side = torch.cuda.Stream() if sides else here
    x = x.to("cuda", non_blocking=True)
    if before:
        before(here, side)
    with torch.cuda.stream(side):
        mean_of_squares = (x**2).mean()
    mean = x.mean()
    if after:
        after(here, side)
    return (mean_of_squares - mean**2).item()


def _side_waits(here, side):
    side.wait_stream(here)


def _here_waits(here, side):
    here.wait_stream(side)


def _by_event(here, side):
    here.wait_event(side.record_event())


def _host_waits(here, side):
    torch.cuda.synchronize()


RIGHT = {
    "doubled_on_side": [
        lambda x, copier: _doubled(x, copier, after=_here_waits),
        lambda x, copier: _doubled(x, copier, after=_by_event),
        doubled_and_waited_for,
    ],
    "variance": [
        lambda x: _means(x, _side_waits, _here_waits),
        lambda x: _means(x, _side_waits, _by_event),
    ],
    "two_buffers": [lambda parts, buffers, work: _flagged(parts, buffers, work)],
}

WRONG = {
    "doubled_on_side": [
        (_doubled, "nothing makes it wait"),
        (
            lambda x, copier: _doubled(x, copier, after=_here_waits, record=False),
            "given back or filled again too early",
        ),
        (
            lambda x, copier: doubled_and_waited_for(x, copier, back_first=True),
            "given back or filled again too early",
        ),
        (
            lambda x, copier: _doubled(x, copier, before=_here_waits),
            "nothing makes it wait",
        ),
        (
            lambda x, copier: _doubled(x, copier, after=_side_waits),
            "nothing makes it wait",
        ),
        (lambda x, copier: _doubled(x, copier, after=_host_waits), "held up"),
        (lambda x, copier: _doubled(x, copier, on_copier=False), "stay on `copier`"),
        (lambda x, copier: 2 * x, "not on the GPU"),
        (lambda x, copier: _doubled(x, copier, after=_here_waits) + 1, "wrong values"),
    ],
    "variance": [
        (lambda x: _means(x, _side_waits), "nothing makes it wait"),
        (lambda x: _means(x, _here_waits), "nothing makes it wait"),
        (lambda x: _means(x, _side_waits, _side_waits), "nothing makes it wait"),
        (lambda x: _means(x, _side_waits, _host_waits), "held up"),
        (lambda x: _means(x, sides=False), "on one stream"),
        (in_turn, "the second mean waits for the first"),
        (lambda x: x.var().item() + 1, "the variance is"),
        (lambda x: x.var(), "not a number"),
    ],
    "two_buffers": [
        (
            lambda *given: _flagged(*given, waits=("full",)),
            "given back or filled again too early",
        ),
        (lambda *given: _flagged(*given, waits=("free",)), "nothing makes it wait"),
        (lambda *given: _flagged(*given, waits=("full", "host")), "held up"),
        (lambda *given: _flagged(*given, side=False), "they take turns"),
        (lambda *given: _flagged(*given, one=True), "copies and work overlap for"),
        (lambda *given: _flagged(*given)[:-1], "results came out"),
        (lambda parts, buffers, work: [], "copies to the GPU"),
        (lambda *given: [2 * y for y in _flagged(*given)], "wrong value"),
    ],
}
