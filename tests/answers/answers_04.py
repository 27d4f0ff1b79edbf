"""Answers to the exercises of lesson 04: right ones, and wrong ones with the reason."""

import torch


def _load(copier, batch):
    with torch.cuda.stream(copier):
        return batch.to("cuda", non_blocking=True)


def ahead(batches):
    copier, here = torch.cuda.Stream(), torch.cuda.current_stream()
    following = None
    for batch in batches:
        current = following
        here.wait_stream(copier)
        following = _load(copier, batch)
        if current is not None:
            yield current
            current.record_stream(here)
    if following is not None:
        here.wait_stream(copier)
        yield following


def with_next(batches):
    copier, here, batches = (
        torch.cuda.Stream(),
        torch.cuda.current_stream(),
        iter(batches),
    )

    def load():
        batch = next(batches, None)
        return None if batch is None else _load(copier, batch)

    following = load()
    while following is not None:
        here.wait_stream(copier)
        current, following = following, load()
        current.record_stream(here)
        yield current


def two_buffers(batches):
    copier, here = torch.cuda.Stream(), torch.cuda.current_stream()
    buffers, used = [None, None], [here.record_event() for _ in range(2)]
    ready = []
    for i, batch in enumerate(batches):
        b = i % 2
        if buffers[b] is None:
            buffers[b] = torch.empty_like(batch, device="cuda")
            copier.wait_stream(here)
        with torch.cuda.stream(copier):
            copier.wait_event(used[b])
            buffers[b].copy_(batch, non_blocking=True)
            ready.append((b, copier.record_event()))
        if i:
            a, arrived = ready.pop(0)
            here.wait_event(arrived)
            yield buffers[a]
            used[a].record(here)
    for a, arrived in ready:
        here.wait_event(arrived)
        yield buffers[a]


def plain(batches):
    for batch in batches:
        yield batch.to("cuda")


def not_blocking(batches):
    for batch in batches:
        yield batch.to("cuda", non_blocking=True)


def as_in_the_lesson(batches):
    copier, here = torch.cuda.Stream(), torch.cuda.current_stream()
    for batch in batches:
        x = _load(copier, batch)
        here.wait_stream(copier)
        x.record_stream(here)
        yield x


def waits_for_the_next(batches):
    copier, here = torch.cuda.Stream(), torch.cuda.current_stream()
    following = None
    for batch in batches:
        current, following = following, _load(copier, batch)
        here.wait_stream(copier)
        if current is not None:
            current.record_stream(here)
            yield current
    if following is not None:
        yield following


def waits_for_nothing(batches):
    copier, following = torch.cuda.Stream(), None
    for batch in batches:
        current, following = following, _load(copier, batch)
        if current is not None:
            current.record_stream(torch.cuda.current_stream())
            yield current
    if following is not None:
        yield following


def records_nothing(batches):
    copier, here, following = torch.cuda.Stream(), torch.cuda.current_stream(), None
    for batch in batches:
        current = following
        here.wait_stream(copier)
        following = _load(copier, batch)
        if current is not None:
            yield current
    if following is not None:
        here.wait_stream(copier)
        yield following


def one_buffer(batches):
    copier, here, buffer = torch.cuda.Stream(), torch.cuda.current_stream(), None
    for batch in batches:
        if buffer is None:
            buffer = torch.empty_like(batch, device="cuda")
            copier.wait_stream(here)
        with torch.cuda.stream(copier):
            buffer.copy_(batch, non_blocking=True)
        here.wait_stream(copier)
        yield buffer


def holds_the_host(batches):
    for x in ahead(batches):
        torch.cuda.synchronize()
        yield x


def all_at_once(batches):
    copier = torch.cuda.Stream()
    loaded = [_load(copier, batch) for batch in batches]
    torch.cuda.current_stream().wait_stream(copier)
    yield from loaded


def loses_the_last(batches):
    copier, here, following = torch.cuda.Stream(), torch.cuda.current_stream(), None
    for batch in batches:
        current = following
        here.wait_stream(copier)
        following = _load(copier, batch)
        if current is not None:
            current.record_stream(here)
            yield current


def never_ends(batches):
    copier, here, batches = (
        torch.cuda.Stream(),
        torch.cuda.current_stream(),
        iter(batches),
    )
    following = _load(copier, next(batches))
    while following is not None:
        here.wait_stream(copier)
        batch = next(batches, None)
        current, following = following, batch if batch is None else _load(copier, batch)
        current.record_stream(here)
        yield current


def yields_inside(batches):
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()
    for batch in batches:
        with torch.cuda.stream(side):
            x = batch.to("cuda", non_blocking=True)
            here.wait_stream(side)
            yield x


def ends_with_none(batches):
    yield from ahead(batches)
    yield None


def variance_in_turn(x):
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x = x.to("cuda", non_blocking=True)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        mean_of_squares = (x**2).mean()
    here.wait_stream(side)
    mean = x.mean()
    return (mean_of_squares - mean**2).item()


def doubles(batches):
    for x in ahead(batches):
        yield 2 * x


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


def variance(x):
    return _means(x, _side_waits, _here_waits)


def variance_by_event(x):
    return _means(x, _side_waits, _by_event)


RIGHT = {
    "prefetch": [lambda: (ahead,), lambda: (with_next,), lambda: (two_buffers,)],
    "variance": [lambda: (variance,), lambda: (variance_by_event,)],
    "best_parts": [lambda: (10, 1510.72), lambda: (10, 1511)],
}
WRONG = {
    "prefetch": [
        (lambda: (plain,), "the host is held up"),
        (lambda: (yields_inside,), "before you `yield`"),
        (lambda: (ends_with_none,), "it yields None"),
        (lambda: (not_blocking,), "on the stream of the work"),
        (lambda: (as_in_the_lesson,), "before you yield"),
        (lambda: (waits_for_the_next,), "its own batch only"),
        (lambda: (waits_for_nothing,), "nothing makes it wait"),
        (lambda: (records_nothing,), "given back or filled again too early"),
        (lambda: (one_buffer,), "given back or filled again too early"),
        (lambda: (holds_the_host,), "the host is held up (wait for cuda:0)"),
        (lambda: (all_at_once,), "at most two ahead"),
        (lambda: (loses_the_last,), "6 batches went in, 5 came out"),
        (lambda: (never_ends,), "no batch left; there were 0"),
        (lambda: (doubles,), "wrong values"),
        (lambda: (lambda batches: batches,), "not a tensor on the GPU"),
    ],
    "variance": [
        (lambda: (lambda x: _means(x, _side_waits),), "nothing makes it wait"),
        (lambda: (lambda x: _means(x, _here_waits),), "nothing makes it wait"),
        (
            lambda: (lambda x: _means(x, _side_waits, _side_waits),),
            "nothing makes it wait",
        ),
        (lambda: (lambda x: _means(x, _side_waits, _host_waits),), "held up"),
        (lambda: (lambda x: _means(x, sides=False),), "on one stream"),
        (lambda: (variance_in_turn,), "the second mean waits for the first"),
        (lambda: (lambda x: x.var().item() + 1,), "the variance is"),
        (lambda: (lambda x: x.var(),), "not a number"),
    ],
    "best_parts": [
        (lambda: (1, 2320.72), "nothing overlaps"),
        (lambda: (1000, 11000), "a whole number"),
        (lambda: (8, 1515.72), "more than the 10 µs of a copy"),
        (lambda: (16, 1533.2), "10 µs more"),
        (lambda: (10, 2410.72), "one after the other"),
        (lambda: (10, 1410.72), "has its work"),
        (lambda: (10, 1141.07), "slower side"),
        (lambda: (10, 9), "the parts are right"),
    ],
}
