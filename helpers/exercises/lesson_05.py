"""The exercises of lesson 05: copies that run beside the work, and races."""

import torch
from torch.cuda._sanitizer import AccessType, CUDASanitizerErrors

import simgpu
from helpers.exercises.counted import counted, number
from helpers.exercises.exercise import Wrong, call, exercise, solution
from helpers.exercises.results import a, tensor
from simgpu.device.cards import CARDS
from simgpu.timing.cost import COPY_LATENCY, OF_PEAK_BYTES


def _race(errors: CUDASanitizerErrors) -> Wrong:
    """What two streams did to the same memory, as a reason."""
    now, before = errors.errors[0].current_access, errors.errors[0].previous_access
    new, old = (
        access.operator.partition("(")[0].removeprefix("aten::").partition(".")[0]
        for access in (now, before)
    )
    if now.type is AccessType.WRITE:
        return Wrong(
            f"a race: `{new}` writes into memory that `{old}` on another stream still "
            "uses; it was given back or filled again too early"
        )
    return Wrong(
        f"a race: `{new}` reads what `{old}` on another stream writes, and nothing "
        "makes it wait"
    )


def _called(function, *args):
    """What the learner's function returns; a race in it is a reason of its own."""
    try:
        return call(function, *args)
    except Wrong as wrong:
        if isinstance(wrong.__cause__, CUDASanitizerErrors):
            raise _race(wrong.__cause__) from wrong
        raise


def _check_waits() -> None:
    """The host may wait only for values that it asked for."""
    for wait in simgpu.timeline().waits:
        if not wait.name.endswith(" to cpu"):
            raise Wrong(f"the host is held up ({wait.name}); let streams wait instead")


def _clear() -> None:
    if simgpu.is_running():
        torch.cuda.synchronize()
        simgpu.timeline().clear()


def _loop(function, batches: list[torch.Tensor], reads_loss: bool) -> None:
    """A loop over `function(batches)`; its values, and how far it reads ahead."""
    taken, sums = 0, []

    def source():
        nonlocal taken
        for batch in batches:
            taken += 1
            yield batch

    here = torch.cuda.current_stream()
    loaded = _called(function, source())
    try:
        loaded = iter(loaded)
    except TypeError:
        what = a(type(loaded).__name__)
        raise Wrong(f"it returns {what}; yield each batch") from None
    try:
        for number, x in enumerate(loaded, 1):
            if torch.cuda.current_stream() != here:
                torch.cuda.set_stream(here)
                raise Wrong(
                    "the caller's current stream has changed: close "
                    "`with torch.cuda.stream(...)` before you `yield`"
                )
            if x is None:
                raise Wrong("it yields None; yield nothing where there is no batch")
            if not isinstance(x, torch.Tensor) or x.device.type != "cuda":
                raise Wrong("it yields something that is not a tensor on the GPU")
            if taken > number + 2:
                raise Wrong(
                    f"{taken} batches were taken when batch {number} was yielded; "
                    "take at most two ahead"
                )
            tensor(x, "it yields", batches[0].shape)
            y = (x @ x).sum()
            sums.append(y.item() if reads_loss else y)
    except CUDASanitizerErrors as errors:
        raise _race(errors) from errors
    except RuntimeError as error:
        if "StopIteration" not in str(error):
            raise
        raise Wrong(f"`next` found no batch left; there were {len(batches)}") from error
    if len(sums) != len(batches):
        raise Wrong(f"{len(batches)} batches went in, {len(sums)} came out")
    for number, (y, batch) in enumerate(zip(sums, batches, strict=True), 1):
        if float(y) != float((batch @ batch).sum()):
            raise Wrong(f"batch {number} of {len(batches)} has wrong values")


def _check_overlap() -> None:
    """At least half of what could overlap does."""
    log = simgpu.timeline()
    copies = [event for event in log.copies if event.source == "cpu"]
    work = [event for event in log.events if event.kind == "kernel"]
    if {event.stream for event in copies} <= {event.stream for event in work}:
        raise Wrong("the copies are on the stream of the work, so they take turns")
    possible = min(
        sum(event.end - event.start for event in es) for es in (copies, work)
    )
    overlap = log.totals()[copies[0].device].overlap
    if overlap < possible / 2:
        raise Wrong(
            f"copies and work overlap for {1e6 * overlap:.0f} of {1e6 * possible:.0f} "
            "µs; hand the next copy out before you yield this batch, and let the work "
            "wait for its own batch only"
        )


@exercise(
    "05.1",
    hints=(
        "In a generator, the lines before `yield` run before the work with this "
        "batch, and the lines behind it run after that work. Where must the copy of "
        "the next batch be launched, if it is to travel during the work?",
        "`here.wait_stream(copier)` waits for everything that has been launched on "
        "`copier` by then, and that may include the copy of the next batch. Before "
        "which line must the wait be, so that the work waits for its own batch only? "
        "What else does a tensor need that was made on one stream and is used on "
        "another?",
    ),
)
def prefetch(function) -> None:
    """A generator that copies the next batch while this one is worked on."""
    generator = torch.Generator().manual_seed(4)
    batches = [
        torch.randint(0, 3, (512, 512), generator=generator).float().pin_memory()
        for _ in range(6)
    ]
    for count in (6, 1, 0):
        _clear()
        _loop(function, batches[:count], reads_loss=False)
        if simgpu.is_running():
            _check_waits()
    _clear()
    _loop(function, batches, reads_loss=True)
    if simgpu.is_running():
        _check_waits()
        _check_overlap()


@solution("05.1")
def solution_1():
    """Launch the next copy before you yield this batch.

    Whoever loops over the generator comes back only when the work with this batch has
    been launched, and perhaps waited for. By then the next copy must be under way
    already, so it is launched before the `yield`.

    The order of the lines before it matters. `wait_stream` makes `here` wait for all
    that is on `copier` at that moment, so it comes before the next copy. If it came
    after, this batch would wait for the next one, and nothing would overlap.

    Each batch is made on `copier` and used on `here`. `record_stream` tells the
    allocator of the second use. Otherwise a later copy could get the memory while the
    work still reads it.

    The `with` block is closed before the `yield`. Otherwise the caller would run inside
    of it, on your stream.
    """

    def prefetch(batches):
        here = torch.cuda.current_stream()
        copier = torch.cuda.Stream()
        batches = iter(batches)

        def load():
            batch = next(batches, None)
            if batch is None:
                return None
            with torch.cuda.stream(copier):
                return batch.to("cuda", non_blocking=True)

        following = load()
        while following is not None:
            current = following
            here.wait_stream(copier)
            following = load()
            current.record_stream(here)
            yield current

    return prefetch


@exercise(
    "05.2",
    hints=(
        "For each tensor in the function, write down which stream writes it and "
        "which streams read it. Which tensor is read on another stream than the one "
        "that writes it, without a wait between the two?",
        "The last line runs on `here` and reads both means. A wait stops only what "
        "is launched on that stream after it, so where must the wait be if both "
        "means are to run at the same time?",
    ),
)
def variance(function) -> None:
    """The variance of a pinned tensor, from two means on two streams."""
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randint(0, 5, (2048, 1024), generator=generator).float().pin_memory()
        _clear()
        result = _called(function, x)
        if not isinstance(result, float):
            raise Wrong(f"it returns {a(type(result).__name__)}, not a number")
        expected = x.double().var(unbiased=False).item()
        if not abs(result - expected) <= 1e-3:
            raise Wrong(f"it returns {result:.3f}, the variance is {expected:.3f}")
        if not simgpu.is_running():
            continue
        _check_waits()
        work = [event for event in simgpu.timeline().events if event.kind == "kernel"]
        means = [event for event in work if event.name == "mean"]
        if len({event.stream for event in means}) < 2:
            raise Wrong("the two means are on one stream")
        one, two = sorted(means, key=lambda event: event.start)[:2]
        if two.start >= one.end:
            raise Wrong(
                "right numbers, but the second mean waits for the first; put the wait "
                "behind both"
            )


@solution("05.2")
def solution_2():
    """Each tensor that crosses from one stream to another needs a wait.

    `x` crosses from `here` to `side`, and `side.wait_stream(here)` is there.
    `mean_of_squares` crosses back: `side` writes it, and the last line reads it on
    `here`. Without a second wait the difference may be computed before the mean is
    there.

    The wait belongs behind `mean = x.mean()`. In front of that line it would make the
    second mean wait for the first, and the two could not run at the same time.
    """

    def variance(x):
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()
        x = x.to("cuda", non_blocking=True)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            mean_of_squares = (x**2).mean()
        mean = x.mean()
        here.wait_stream(side)
        return (mean_of_squares - mean**2).item()

    return variance


@exercise(
    "05.3",
    hints=(
        "`overlap_time` under *Cost* is the formula for 8 MiB and for other work. "
        "With the numbers of this exercise, which takes longer for one part, the "
        "copy or the work, and does the answer depend on the number of parts?",
        "If the copies are the slower side, the GPU works behind them, and only the "
        "work of the last part comes after the last copy. Each further part costs "
        "another 10 µs for its copy, so what does it make shorter, and by how much?",
    ),
)
def best_parts(parts, microseconds) -> None:
    """16 MiB over PCIe, overlapped with 1000 µs of work, both in equal parts."""
    latency = 1e6 * COPY_LATENCY  # µs
    copied = 2**24 / (OF_PEAK_BYTES * CARDS["T4"].pcie_bandwidth) * 1e6

    def time(n: int) -> float:
        copy, work = latency + copied / n, 1000 / n
        return copy + (n - 1) * max(copy, work) + work

    best = min(range(1, 100), key=time)
    parts = number(parts, "parts")
    if parts == 1:
        raise Wrong("in one part nothing overlaps")
    if parts != int(parts) or not 1 < parts < 100:
        raise Wrong("a whole number, and less than 100: their latency is 1000 µs alone")
    if parts != best:
        why = (
            "more parts shorten the last part's work by more than the 10 µs of a copy"
            if parts < best
            else "each further copy costs 10 µs more"
        )
        raise Wrong(f"{parts} parts take {time(parts):.0f} µs; {why}")
    mistakes = {
        copied + latency * best + 1000: "that is one after the other",
        copied + latency * best: "each copy has its 10 µs, and the last part has its "
        "work",
        latency + copied / best + 1000: "the copies are the slower side, not the work",
    }
    why = "the parts are right; the time is all copies and one part's work"
    counted(microseconds, time(best), mistakes, why, what="microseconds", near=0.005)


@solution("05.3")
def solution_3():
    """The copies are the slower side, so the time is all copies and one part's work.

    16 MiB take 1311 µs to copy, and each copy has 10 µs more. The work takes 1000 µs.
    In any number of parts a copy is longer than the work of a part, so the work of
    every part but the last one is hidden. For n parts that makes

        time(n) = 1311 + 10 n + 1000 / n

    where 1311 are the bytes, 10 n the fixed costs of n copies, and 1000 / n the work of
    the last part. One more part adds 10 µs and shortens the last term. The two are in
    balance where 10 n = 1000 / n, and that is at n = 10.
    """
    nbytes = 16 * 2**20
    bytes_per_microsecond = 12_800  # pinned memory
    fixed_for_each_copy = 10  # µs
    work_in_all = 1000  # µs

    def total_time(n):
        copy = fixed_for_each_copy + nbytes / n / bytes_per_microsecond
        work = work_in_all / n
        return copy + (n - 1) * max(copy, work) + work

    number_of_parts = round((work_in_all / fixed_for_each_copy) ** 0.5)
    microseconds = total_time(number_of_parts)
    return number_of_parts, microseconds


# -- answers ---------------------------------------------------------------------------


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


def in_turn(x):
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


def both_waits(x):
    return _means(x, _side_waits, _here_waits)


def by_event(x):
    return _means(x, _side_waits, _by_event)


RIGHT = {
    "prefetch": [ahead, with_next, two_buffers],
    "variance": [both_waits, by_event],
    "best_parts": [(10, 1510.72), (10, 1511)],
}
WRONG = {
    "prefetch": [
        (plain, "the host is held up"),
        (yields_inside, "before you `yield`"),
        (ends_with_none, "it yields None"),
        (not_blocking, "on the stream of the work"),
        (as_in_the_lesson, "before you yield"),
        (waits_for_the_next, "its own batch only"),
        (waits_for_nothing, "nothing makes it wait"),
        (records_nothing, "given back or filled again too early"),
        (one_buffer, "given back or filled again too early"),
        (holds_the_host, "the host is held up (wait for cuda:0)"),
        (all_at_once, "at most two ahead"),
        (loses_the_last, "6 batches went in, 5 came out"),
        (never_ends, "no batch left; there were 0"),
        (doubles, "wrong values"),
        (lambda batches: batches, "not a tensor on the GPU"),
    ],
    "variance": [
        (lambda x: _means(x, _side_waits), "nothing makes it wait"),
        (lambda x: _means(x, _here_waits), "nothing makes it wait"),
        (
            lambda x: _means(x, _side_waits, _side_waits),
            "nothing makes it wait",
        ),
        (lambda x: _means(x, _side_waits, _host_waits), "held up"),
        (lambda x: _means(x, sides=False), "on one stream"),
        (in_turn, "the second mean waits for the first"),
        (lambda x: x.var().item() + 1, "the variance is"),
        (lambda x: x.var(), "not a number"),
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
}
