"""Plants defects one at a time, and says whether the tests find them.

    python -m tests.tools.planted            # all: ten minutes
    python -m tests.tools.planted ring hook  # those whose names have one of these words

Each defect is one that somebody could make: an off-by-one, a wait that is missing, a
value that is stored and no longer true. It is planted in a temporary copy of the files
that git knows, never here, and the tests run there that must find it. First they run
in a copy without any defect, where they must pass. What this cannot show: defects of
other kinds, and what tests find that are not named.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from support import checkout
from support.limits import LONG

ROOT = Path(__file__).resolve().parents[2]
SIMGPU = "simgpu/src/simgpu"
ON_PATH = ("simgpu/src", ".", "notebooks", "simgpu/tests")
# options of pytest: the first failure is enough, and it is named
PYTEST = ["-q", "-x", "-rfE", "--color=no", "-p", "no:cacheprovider"]
FOUND, PASSED = 1, 0  # exit statuses of pytest; others mean that no test was run
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+(?: \S+)*?)(?: - .*)?$", re.MULTILINE)


class Defect(NamedTuple):
    """One change of one place.

    Attributes:
        name: what is wrong then, in words.
        file: the source, from the root.
        old: its text there, which occurs once.
        new: what is planted in its place.
        tests: words for pytest: of the tests that must find it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


DEFECTS = {
    "allocator and clock": [
        Defect(
            "a multiple of 512 bytes takes 512 more",
            f"{SIMGPU}/_device/blocks.py",
            "return max(-(-nbytes // ROUND), 1) * ROUND",
            "return (nbytes // ROUND + 1) * ROUND",
            "simgpu/tests/test_allocator.py",
        ),
        Defect(
            "a freed block waits for one of the streams that use it",
            f"{SIMGPU}/_device/waiting.py",
            "for stream in sorted(streams)]",
            "for stream in sorted(streams)[:1]]",
            "simgpu/tests/test_allocator.py",
        ),
        Defect(
            "who waits for an event does not wait for collectives before it",
            f"{SIMGPU}/_timing/clock.py",
            "            self.stream_waits_for(key, meeting)\n",
            "            pass\n",
            "simgpu/tests/test_one_clock.py -k event_behind",
        ),
        Defect(
            "the host does not wait for a non-blocking copy of pageable memory",
            f"{SIMGPU}/_timing/clock.py",
            "elif wait or not pinned:",
            "elif wait:",
            "simgpu/tests/test_clock.py -k slowest_link",
        ),
        Defect(
            "a copy looks once for a time at which both of its engines are free",
            f"{SIMGPU}/_timing/engine.py",
            "    while (later :=",
            "    if (later :=",
            "simgpu/tests/test_clock.py -k two_engines",
        ),
    ],
    "collectives": [
        Defect(
            "the average of whole numbers is rounded down, not towards zero",
            f"{SIMGPU}/_distributed/exchange.py",
            'total.div_(len(values), rounding_mode="trunc")',
            'total.div_(len(values), rounding_mode="floor")',
            "simgpu/tests/test_nccl.py -k average",
        ),
        Defect(
            "an uneven reduce-scatter is as large as this rank's part makes it",
            f"{SIMGPU}/_distributed/exchange.py",
            'return given if self.name == "reduce_scatter"',
            'return taken if self.name == "reduce_scatter"',
            "simgpu/tests/test_nccl.py -k as_large",
        ),
        Defect(
            "a ring has one hop fewer",
            f"{SIMGPU}/_timing/collective_cost.py",
            "return _Work(steps - far, far, near,",
            "return _Work(steps - far - 1, far, near,",
            "simgpu/tests/test_collective_cost.py",
        ),
        Defect(
            "memory of a collective that has not ended is used again",
            f"{SIMGPU}/_distributed/collective.py",
            "self.is_settled and self.clock.reached(self.position):",
            "self.is_settled:",
            "simgpu/tests/test_distributed.py -k nobody_waits",
        ),
        Defect(
            "buckets of a module on two GPUs go in the order of forward",
            f"{SIMGPU}/_distributed/ddp.py",
            "found.sort(key=lambda bucket: min(bucket[0]), reverse=True)",
            "found.sort(key=lambda bucket: min(bucket[0]))",
            "simgpu/tests/test_distributed.py -k two_gpus_of_a_rank",
        ),
    ],
    "dry runs": [
        Defect(
            "gradients that Megatron-LM adds up count as activations",
            f"{SIMGPU}/_dry/memory.py",
            'self._tag_gradients([leaf.grad, getattr(leaf, "main_grad", None)])',
            "self._tag_gradients([leaf.grad])",
            "simgpu/tests/test_dry_memory.py",
        ),
        Defect(
            "every rank takes rank 0's part of a reduce-scatter",
            f"{SIMGPU}/_dry/peers.py",
            "return total.chunk(size)[me] if",
            "return total.chunk(size)[0] if",
            "simgpu/tests/test_dry_values.py -k whole_numbers",
        ),
        Defect(
            "of several kinds, what the one with the highest peak reserves is told",
            f"{SIMGPU}/_dry/report.py",
            "reserved_bytes=max(its.reserved_bytes for its in kinds),",
            "reserved_bytes=highest.reserved_bytes,",
            "simgpu/tests/test_dry_run.py -k several_kinds",
        ),
        Defect(
            "a layout that is as large along one axis is not smaller",
            f"{SIMGPU}/_dry/sweep.py",
            "all(its <= mine for its, mine in pairs)",
            "all(its < mine for its, mine in pairs)",
            "simgpu/tests/test_sweep.py -k larger_ones",
        ),
        Defect(
            "compiled code computes again what it reads from five tensors",
            f"{SIMGPU}/_fusing/fusing.py",
            "_REUSED = 4  #",
            "_REUSED = 5  #",
            "simgpu/tests/test_dry_fuse.py",
        ),
    ],
    "lessons": [
        Defect(
            "a stored number has another last digit",
            "notebooks/04-count-memory.ipynb",
            "MiB: P 12.3, moments 24.6, R 16.8",
            "MiB: P 12.3, moments 24.6, R 16.9",
            "notebooks/04-count-memory.ipynb",
        ),
        Defect(
            "a stored answer is the other one",
            "notebooks/01-choose-a-device.ipynb",
            "the same object as on_gpu: True",
            "the same object as on_gpu: False",
            "notebooks/01-choose-a-device.ipynb",
        ),
        Defect(
            "two ranks have one seed in the solution that is shown",
            "notebooks/exercises/lesson_17.py",
            "torch.manual_seed(row * dist.get_world_size() + dist.get_rank())",
            "torch.manual_seed(row + dist.get_rank())",
            "tests/test_check.py -k seed_this_rank",
        ),
        Defect(
            "an exercise takes a frozen parameter's gradient for right",
            "notebooks/exercises/lesson_04.py",
            "if found == bytes_of_all + 4 * trained:",
            "if found in (bytes_of_all + 4 * trained, 5 * bytes_of_all):",
            "tests/test_check.py -k peak_of_step",
        ),
        Defect(
            "a copy between two GPUs keeps one of them busy",
            "helpers/stages.py",
            "for start, end in between) * 2 / len(stages)",
            "for start, end in between) / len(stages)",
            "notebooks/13-split-the-model.ipynb",
        ),
    ],
}


@contextmanager
def copied(defect: Defect | None) -> Iterator[Path]:
    """A copy of the project, with a defect or without, as long as it is needed."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        root = Path(folder)
        for path in checkout.files(ROOT):
            target = root / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        if defect is not None:
            file = root / defect.file
            text = file.read_text(encoding="utf-8")
            file.write_text(planted(text, defect), encoding="utf-8")
        yield root


def planted(text: str, defect: Defect) -> str:
    """The text of its file with a defect.

    Raises:
        ValueError: where its place is no more, or is not the only one.
    """
    if (times := text.count(defect.old)) != 1:
        raise ValueError(f"{defect.file} has {times} times: {defect.old!r}")
    return text.replace(defect.old, defect.new)


def run(root: Path, tests: str) -> tuple[int, str]:
    """pytest's exit status in a copy, and the test that failed first."""
    paths = os.pathsep.join(str(root / name) for name in ON_PATH)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *PYTEST, *tests.split()],
        cwd=root, env={**os.environ, "PYTHONPATH": paths},
        capture_output=True, text=True, timeout=LONG,
    )  # fmt: skip
    failed = FAILED.search(done.stdout)
    last = (done.stdout + done.stderr).strip().splitlines()[-1:]
    return done.returncode, failed[1] if failed else "".join(last)


def find(defect: Defect) -> bool:
    """Plant one; whether its tests have found it is printed, and by which."""
    begin = time.monotonic()
    with copied(defect) as root:
        status, test = run(root, defect.tests)
    words = {FOUND: f"found by {test}", PASSED: "MISSED"}
    took = f"{time.monotonic() - begin:.0f} s"
    said = words.get(status, f"NOT RUN: {test}")
    print(f"  {defect.name}: {said} ({took})", flush=True)
    return status == FOUND


def passes_without(tests: Sequence[str]) -> bool:
    """Whether tests pass where nothing is planted; those that do not are printed."""
    fails = []
    with copied(None) as root:
        for words in dict.fromkeys(tests):
            status, test = run(root, words)
            if status != PASSED:
                fails.append(f"  fails without a defect: {words}: {test}")
    print("\n".join(fails) or "all of these tests pass without a defect", flush=True)
    return not fails


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.planted",
        description="Plants defects, and says whether the tests find them.",
    )
    parser.add_argument("names", nargs="*", metavar="WORD", help="in the names; none: "
                        "all defects")  # fmt: skip
    asked = parser.parse_args(words).names
    chosen = {
        area: [d for d in defects if not asked or any(w in d.name for w in asked)]
        for area, defects in DEFECTS.items()
    }
    every = [defect for defects in chosen.values() for defect in defects]
    if not every:
        parser.error(f"no defect has {' or '.join(asked)} in its name")
    if not passes_without([defect.tests for defect in every]):
        return 1
    found = []
    for area, defects in chosen.items():
        if defects:
            print(f"{area}:", flush=True)
        found += [find(defect) for defect in defects]
    print(f"{sum(found)} of {len(found)} found")
    return int(not all(found))


if __name__ == "__main__":
    sys.exit(main())
