"""The exercises of lesson 06: races between streams, and their cures."""

import torch
from torch.cuda._sanitizer import CUDASanitizerErrors

import simgpu
from exercises.exercise import Wrong, exercise, solution
from exercises.results import a, equal, sequence, tensor
from exercises.streams import called, check_overlap, check_waits, clear, race


@exercise(
    "06.1",
    hints=(
        "Which stream reads something that another stream writes? That stream has to "
        "wait, and the line says its name first.",
        "A wait stops what is launched after it. Between which two lines of the "
        "function must it stand? And to which stream does the memory of `batch` "
        "belong, when Python drops it at the `return`?",
    ),
)
def doubled_on_side(function) -> None:
    """A batch that is copied on one stream and used on another."""
    x = torch.arange(256.0 * 256).reshape(256, 256).pin_memory()
    copier = torch.cuda.Stream()
    clear()
    result = called(function, x, copier)
    try:
        with torch.cuda.stream(copier):
            torch.zeros(256, 256, device="cuda")  # takes the memory that is free
    except CUDASanitizerErrors as errors:
        raise race(errors) from errors
    tensor(result, "it returns", x.shape)
    if result.device.type != "cuda":
        raise Wrong("it returns a tensor that is not on the GPU")
    check_waits()
    if simgpu.is_running():
        copies = [event for event in simgpu.timeline().copies if event.source == "cpu"]
        if not copies or {event.stream for event in copies} == {0}:
            raise Wrong("the copy must stay on `copier`")
    if not equal(result, 2 * x):
        raise Wrong("wrong values")


@solution("06.1")
def solution_1():
    """The stream that reads waits for the stream that writes.

    The copy is launched on `copier`, and `2 * batch` is launched on the current stream.
    So the current stream waits, after the copy is launched and before it reads.

    The memory of `batch` belongs to `copier`. `record_stream` keeps it until the
    current stream is done with it, although Python drops `batch` at the `return`.

    A wait back is as right: `copier.wait_stream(here)`, after the doubling is launched
    and before the `return`. Then all later work on `copier` waits for it.
    """

    def doubled_on_side(x, copier):
        with torch.cuda.stream(copier):
            batch = x.cuda(non_blocking=True)
        torch.cuda.current_stream().wait_stream(copier)
        batch.record_stream(torch.cuda.current_stream())
        return 2 * batch

    return doubled_on_side


@exercise(
    "06.2",
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
        clear()
        result = called(function, x)
        if not isinstance(result, float):
            raise Wrong(f"it returns {a(type(result).__name__)}, not a number")
        expected = x.double().var(unbiased=False).item()
        if not abs(result - expected) <= 1e-3:
            raise Wrong(f"it returns {result:.3f}, the variance is {expected:.3f}")
        if not simgpu.is_running():
            continue
        check_waits()
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


@solution("06.2")
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
    "06.3",
    hints=(
        "Each buffer goes round: a copy writes it, the work reads it, the next copy "
        "writes it again. Which two moments must be marked by events, and which "
        "stream reaches each of them?",
        "The second copy into a buffer must wait until the work with the first is "
        "done. On which stream is *free* recorded, and which stream waits for it? An "
        "event that was never recorded is done at once.",
    ),
)
def two_buffers(function) -> None:
    """Copies into two buffers, beside the work, in order by events."""
    generator = torch.Generator().manual_seed(6)
    parts = [
        torch.randint(0, 3, (512, 512), generator=generator).float().pin_memory()
        for _ in range(6)
    ]

    def work(x):
        return (x @ x).sum()

    for count in (6, 1):
        buffers = [torch.zeros(512, 512, device="cuda") for _ in range(2)]
        torch.cuda.synchronize()
        clear()
        found = called(function, parts[:count], buffers, work)
        found = sequence(found, "it returns")
        if simgpu.is_running():
            check_waits()
            copies = [e for e in simgpu.timeline().copies if e.source == "cpu"]
            if len(copies) != count:
                raise Wrong(f"{count} parts, but {len(copies)} copies to the GPU")
            if count > 1:
                check_overlap()
        if len(found) != count:
            raise Wrong(f"{count} parts went in, {len(found)} results came out")
        for i, (y, part) in enumerate(zip(found, parts, strict=False), 1):
            if float(y) != float(work(part)):
                raise Wrong(f"result {i} of {count} has a wrong value")


@solution("06.3")
def solution_3():
    """Two flags for each buffer: it is full, it is free.

    `full` is recorded on `copier` behind the copy, and the work waits for it. `free` is
    recorded on the current stream behind the work, and the next copy into the same
    buffer waits for it. The other buffer is filled meanwhile.

    The buffers were written on the current stream before the function began, so
    `copier` waits for that stream once. An event that was never recorded is done, so
    the first wait for each `free` passes at once.
    """

    def two_buffers(parts, buffers, work):
        here = torch.cuda.current_stream()
        copier = torch.cuda.Stream()
        copier.wait_stream(here)
        full = [torch.cuda.Event(), torch.cuda.Event()]
        free = [torch.cuda.Event(), torch.cuda.Event()]
        results = []
        for i, part in enumerate(parts):
            b = i % 2
            with torch.cuda.stream(copier):
                copier.wait_event(free[b])
                buffers[b].copy_(part, non_blocking=True)
                full[b].record(copier)
            here.wait_event(full[b])
            results.append(work(buffers[b]))
            free[b].record(here)
        return results

    return two_buffers
