"""The exercises of lesson 05: copies that run beside the work."""

import torch
from torch.cuda._sanitizer import CUDASanitizerErrors

from exercises.counted import counted, number
from exercises.exercise import Wrong, call, exercise, solution
from exercises.results import a, tensor
from exercises.streams import called, check_overlap, check_waits, clear, race
from simgpu import CARDS
from simgpu.costs import COPY_LATENCY, OF_PEAK_BYTES


def _loop(function, batches: list[torch.Tensor], reads_loss: bool) -> None:
    """A loop over `function(batches)`; its values, and how far it reads ahead."""
    taken, sums = 0, []

    def source():
        nonlocal taken
        for batch in batches:
            taken += 1
            yield batch

    here = torch.cuda.current_stream()
    loaded = called(function, source())
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
        raise race(errors) from errors
    except RuntimeError as error:
        if "StopIteration" not in str(error):
            raise
        raise Wrong(f"`next` found no batch left; there were {len(batches)}") from error
    if len(sums) != len(batches):
        raise Wrong(f"{len(batches)} batches went in, {len(sums)} came out")
    for number, (y, batch) in enumerate(zip(sums, batches, strict=True), 1):
        if float(y) != float((batch @ batch).sum()):
            raise Wrong(f"batch {number} of {len(batches)} has wrong values")


@exercise(
    "05.1",
    hints=(
        "On one stream, each batch is copied and then computed. How long do n of them "
        "take, and what does the lesson's formula say for two streams?",
        "One way is to subtract. The other is to ask which of the two times is hidden, "
        "and how often: does the first copy have a step beside it?",
    ),
)
def time_saved(function) -> None:
    """What n batches take less if their copies run beside the steps."""
    for n, copy, compute in ((8, 190, 490), (8, 490, 190), (1, 30, 50), (3, 70, 70)):
        found = number(call(function, n, copy, compute))
        right = (n - 1) * min(copy, compute)
        two = copy + (n - 1) * max(copy, compute) + compute
        mistakes = {
            two: "that is the time of two streams; what do they save?",
            n * (copy + compute): "that is the time of one stream; what is saved?",
            -right: "that is two streams minus one",
            n * min(copy, compute): "the first copy and the last step have nothing "
            "beside them",
            (n - 1) * max(copy, compute): "the slower of the two is never hidden",
            (n - 1) * copy: "where copies are slower, a step hides a part of one only",
        }
        why = f"n={n}, copy={copy}, compute={compute} gives {found:g}, not {right}"
        mistakes = {value: f"{why}: {what}" for value, what in mistakes.items()}
        counted(found, right, mistakes, why)


@solution("05.1")
def solution_1():
    """The faster of the two, once for each batch but one.

    One stream takes n * (copy + compute). Subtract the time of two streams,
    copy + (n - 1) * max(copy, compute) + compute. What is left is (n - 1) times
    copy + compute - max(copy, compute), which is the smaller of the two: while the
    slower one runs, the faster one is hidden.

    So a second stream can at best halve the time, where both take equally long.
    """

    def time_saved(n, copy, compute):
        return (n - 1) * min(copy, compute)

    return time_saved


@exercise(
    "05.2",
    hints=(
        "The formula of the lesson holds for parts as it does for batches. "
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


@solution("05.2")
def solution_2():
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


@exercise(
    "05.3",
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
        clear()
        _loop(function, batches[:count], reads_loss=False)
        check_waits()
    clear()
    _loop(function, batches, reads_loss=True)
    check_waits()
    check_overlap()


@solution("05.3")
def solution_3():
    """Launch the next copy before you yield this batch.

    Whoever loops over the generator comes back only when the work with this batch has
    been launched, and perhaps waited for. By then the next copy must be under way
    already, so it is launched before the `yield`.

    The order of the lines before it matters. `wait_stream` makes `here` wait for all
    that is on `copier` at that moment, so it comes before the next copy. If it came
    after, this batch would wait for the next one, and nothing would overlap.

    Each batch is made on `copier` and used on `here`. A later copy may get the memory
    of a batch that the caller has dropped, so each copy waits for the work launched so
    far. `record_stream` is right, too, but then dropped batches stay in memory until
    the GPU is done with them, and a Python that runs ahead piles them up.

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
            copier.wait_stream(here)
            with torch.cuda.stream(copier):
                return batch.to("cuda", non_blocking=True)

        following = load()
        while following is not None:
            current = following
            here.wait_stream(copier)
            following = load()
            yield current

    return prefetch
