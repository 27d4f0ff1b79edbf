"""Answers to the exercises of lesson 05: right ones, and planted wrong ones."""

import torch


def _load(copier, batch):
    with torch.cuda.stream(copier):
        return batch.to("cuda", non_blocking=True)


def one_ahead(waits="before", records=True, last=True):
    """Loads a batch while another one is computed.

    Args:
        waits: for the copy of this batch, "before" the next one is begun; "after" it,
            which is a wait for both; or never.
        records: that the batch is used on another stream.
        last: whether the last batch is yielded.
    """

    def prefetch(batches):
        copier, here = torch.cuda.Stream(), torch.cuda.current_stream()
        following = None
        for batch in batches:
            current = following
            if waits == "before":
                here.wait_stream(copier)
            following = _load(copier, batch)
            if waits == "after":
                here.wait_stream(copier)
            if current is not None:
                if records:
                    current.record_stream(here)
                yield current
        if following is not None and last:
            if waits == "before":
                here.wait_stream(copier)
            yield following

    return prefetch


ahead = one_ahead()


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


def never_ends(batches):
    copier, here = torch.cuda.Stream(), torch.cuda.current_stream()
    batches = iter(batches)
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


def doubles(batches):
    for x in ahead(batches):
        yield 2 * x


def one_minus_two(n, copy, compute):
    return n * (copy + compute) - (copy + (n - 1) * max(copy, compute) + compute)


RIGHT = {
    "time_saved": [one_minus_two, lambda n, *both: min(both) * (n - 1)],
    "best_parts": [(10, 1510.72), (10, 1511)],
    "prefetch": [ahead, two_buffers],
}

WRONG = {
    "time_saved": [
        (lambda n, copy, compute: n * (copy + compute), "time of one stream"),
        (lambda n, copy, compute: n * max(copy, compute) + copy, "two streams"),
        (
            lambda n, copy, compute: -one_minus_two(n, copy, compute),
            "two streams minus",
        ),
        (lambda n, copy, compute: n * min(copy, compute), "nothing beside them"),
        (lambda n, copy, compute: (n - 1) * max(copy, compute), "never hidden"),
        (lambda n, copy, compute: (n - 1) * copy, "a part of one only"),
        (lambda n, copy, compute: "4.1 ms", "give a number"),
        (lambda n, copy, compute: copy, "gives 190"),
    ],
    "best_parts": [
        ((1, 2320.72), "nothing overlaps"),
        ((1000, 11000), "a whole number"),
        ((8, 1515.72), "more than the 10 µs of a copy"),
        ((16, 1533.2), "10 µs more"),
        ((10, 2410.72), "one after the other"),
        ((10, 1410.72), "has its work"),
        ((10, 1141.07), "slower side"),
        ((10, 9), "the parts are right"),
    ],
    "prefetch": [
        (plain, "the host is held up"),
        (yields_inside, "before you `yield`"),
        (ends_with_none, "it yields None"),
        (not_blocking, "on the stream of the work"),
        (
            one_ahead(waits="after"),
            "before you yield or use this batch, and let the work wait for its own "
            "batch only",
        ),
        (one_ahead(waits="never"), "nothing makes it wait"),
        (one_ahead(records=False), "given back or filled again too early"),
        (one_buffer, "given back or filled again too early"),
        (holds_the_host, "the host is held up (wait for cuda:0)"),
        (all_at_once, "at most two ahead"),
        (one_ahead(last=False), "6 batches went in, 5 came out"),
        (never_ends, "no batch left; there were 0"),
        (doubles, "wrong values"),
        (lambda batches: batches, "not a tensor on the GPU"),
    ],
}
