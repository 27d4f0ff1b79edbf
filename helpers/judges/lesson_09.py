"""Judges of the exercises of lesson 09."""

import contextlib
import os
import queue as queues
import signal
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch
import torch.multiprocessing as mp
from torch import nn

from helpers.check import NotYet, Wrong, call, exercise


@exercise("09.1")
def who_sees(*answers) -> None:
    """Whether the notebook sees the writes of seven programs."""
    programs = (
        ("no", "the fork moves its own copy into shared memory, after the fork"),
        ("no", "an argument of a forked process is not sent but copied with the rest"),
        (
            "yes",
            "an argument of a spawned process is sent, and sending a tensor shares",
        ),
        ("yes", "sending shares the storage, and a slice has no storage of its own"),
        ("no", "the clone is sent and shared; `x` has other memory"),
        ("no", "`x + 1` is a new tensor, and the child gives it the name `x`"),
        ("no", "a global travels with the function's code, as a copy; pass it instead"),
    )
    if len(answers) != len(programs):
        raise Wrong(f"seven answers are asked for, not {len(answers)}")
    for number, (answer, (right, why)) in enumerate(
        zip(answers, programs, strict=True), 1
    ):
        said = str(answer).strip().lower()
        if isinstance(answer, bool):
            said = "yes" if answer else "no"
        if said not in ("yes", "no"):
            raise Wrong(f'number {number}: answer "yes" or "no"')
        if said != right:
            raise Wrong(f"number {number}: {why}")


@contextlib.contextmanager
def _within(seconds: int, why: str):
    """Raise Wrong when the block takes longer, where Python has alarms."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_):
        raise Wrong(why)

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class _Noted:
    """An event; `asked` is set once anybody does anything with it."""

    def __init__(self, event, asked):
        self._event, self._asked = event, asked

    def __getattr__(self, name: str):
        self._asked.set()
        return getattr(self._event, name)


MUST_WAIT = "with the default sharing strategy it must wait for `received`"


@exercise("09.2")
def delivers_all(produce) -> None:
    """A producer (queue, received) of four tensors that stays until they are there."""
    if not callable(produce):
        raise Wrong(f"give a function, not {produce!r}")
    fork = mp.get_context("fork")
    queue, errors = fork.Queue(), fork.SimpleQueue()
    received, asked = fork.Event(), fork.Event()

    def work():
        torch.set_num_threads(1)
        try:
            produce(queue, _Noted(received, asked))
        except BaseException as error:
            errors.put(f"{type(error).__name__}: {error}")

    producer = fork.Process(target=work)
    producer.start()
    try:
        # On a busy machine the clock does not tell how far the producer has come.
        limit = time.monotonic() + 10
        while not asked.is_set() and producer.is_alive() and time.monotonic() < limit:
            producer.join(0.05)
        producer.join(0.5)  # the slow consumer
        ended = not producer.is_alive()
        if not errors.empty():
            raise Wrong(f"your code raised {errors.get()}")
        if producer.exitcode:
            raise Wrong(f"the producer was ended by signal {-producer.exitcode}")
        if ended and queue.empty():
            raise NotYet("your function puts nothing so far")
        tensors = [_take(queue, number, ended) for number in range(4)]
        time.sleep(0.3)  # what the producer writes now must not change them
        values = [tensor[0].item() for tensor in tensors]
        if len(set(values)) == 1:
            raise Wrong(
                f"all four tensors are full of {values[0]:g}: `put` sends a handle "
                "to one memory, and you write into it again; put a clone"
            )
        if values != [0.0, 1.0, 2.0, 3.0]:
            raise Wrong(
                f"the tensors are full of {', '.join(f'{v:g}' for v in values)}"
            )
        producer.join(2)
        with contextlib.suppress(queues.Empty, OSError, EOFError):
            queue.get(timeout=0.2)
            raise Wrong("more than four tensors arrive")
        if not producer.is_alive():
            raise Wrong(f"the producer ended before `received` was set; {MUST_WAIT}")
        if not asked.is_set():
            raise Wrong("the producer never asks `received`; a sleep only guesses")
        received.set()
        producer.join(6)
        if producer.is_alive():
            raise Wrong("the producer goes on after `received` is set; let it end")
    finally:
        received.set()
        _empty(queue)
        producer.kill()
        producer.join()


def _empty(queue) -> None:
    """Take what is left: memory that is sent by name stays until it is fetched."""
    for _ in range(100):  # a producer may go on and on
        if queue.empty():
            return
        with contextlib.suppress(Exception):  # of whatever the learner has sent
            queue.get(timeout=1)


def _take(queue, number: int, ended: bool) -> torch.Tensor:
    """The next tensor."""
    try:
        tensor = queue.get(timeout=3)
    except queues.Empty:
        raise Wrong(f"{number} tensors arrive, not four") from None
    except (OSError, EOFError) as error:
        raise Wrong(
            f"fetching a tensor raised {type(error).__name__}: the producer has ended, "
            f"and its memory cannot be asked for; {MUST_WAIT}"
        ) from None
    if not isinstance(tensor, torch.Tensor):
        raise Wrong(f"a {type(tensor).__name__} arrives, not a tensor")
    if tensor.shape != (3,) or len(set(tensor.tolist())) != 1:
        raise Wrong(f"a tensor arrives that holds {tensor.tolist()}")
    if ended:
        raise Wrong(f"the producer ends before its tensors are fetched; {MUST_WAIT}")
    return tensor


class _Scores(nn.Module):
    """Ten scores for a row of words; notes who computed, and with what memory."""

    def __init__(self, notes: str):
        super().__init__()
        self.notes = notes
        self.words = nn.EmbeddingBag(100_000, 100)
        self.scores = nn.Linear(100, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = _own_bytes(self.words.weight)
        with open(self.notes, "a") as file:
            file.write(f"{os.getpid()} {own} {len(x)}\n")
        time.sleep(0.3)  # so that one worker does not do all
        return self.scores(self.words(x))


def _own_bytes(tensor: torch.Tensor) -> int:
    """Bytes around a tensor that only this process has; 0 where nobody can tell."""
    if not hasattr(psutil.Process, "memory_maps"):
        return 0
    address = tensor.data_ptr()
    for mapping in psutil.Process().memory_maps(grouped=False):
        first, _, last = mapping.addr.partition("-")
        if int(first, 16) <= address < int(last, 16):
            return mapping.private_clean + mapping.private_dirty
    return 0


@exercise("09.3")
def parallel_accuracy(function) -> None:
    """A function (model, x, y) -> accuracy, by several processes, one model."""
    if not callable(function):
        raise Wrong(f"give a function, not {function!r}")
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        torch.manual_seed(0)
        model = _Scores(str(notes))
        x = torch.randint(0, 100_000, (10, 8))
        with torch.no_grad():
            best = model(x).argmax(1)
        right_rows = torch.tensor([0, 3, 9])
        y = (best + 1) % 10
        y[right_rows] = best[right_rows]
        notes.write_text("")
        with _within(60, "no answer within 60 s; do your processes wait?"):
            result = _number(function, model, x, y)
        _judge_accuracy(result, notes.read_text())


def _number(function, *args) -> float:
    """What the learner's function returns."""
    try:
        result = call(function, *args)
    except Wrong as wrong:
        gone = EOFError, FileNotFoundError, ConnectionError
        if isinstance(wrong.__cause__, gone):
            raise Wrong(
                f"{wrong}; perhaps a worker had ended before its tensor was fetched: "
                "send a number (.item())"
            ) from None
        raise
    try:
        if isinstance(result, str):
            raise TypeError
        return float(result)
    except (TypeError, ValueError, RuntimeError):
        what = type(result).__name__
        raise Wrong(f"return one number, not a {what}") from None


def _judge_accuracy(result: float, notes: str) -> None:
    calls = [tuple(map(int, line.split())) for line in notes.splitlines()]
    workers = {pid for pid, _, _ in calls}
    rows = sum(count for _, _, count in calls)
    if os.getpid() in workers:
        raise Wrong("the notebook's own process computes; leave that to workers")
    if len(workers) < 2:
        raise Wrong(f"processes that compute: {len(workers)}; start several")
    if rows != 10:
        raise Wrong(f"the workers compute {rows} rows of 10")
    own = sum({pid: nbytes for pid, nbytes, _ in calls}.values())
    if own > 4e6:
        raise Wrong(
            f"the workers hold {own / 1e6:.0f} MB of weights of their own; share the "
            "model before they start, and send no copy of it"
        )
    if result == 0:
        raise Wrong(
            "0: the workers wrote into memory of their own; share what they write "
            "into, or send it back"
        )
    if abs(result - 3) < 1e-4:
        raise Wrong("that is the number of right rows; divide by all rows")
    if abs(result - 0.3) > 1e-4:
        raise Wrong(
            f"{result:.3f} is not the share of right rows, 0.300; parts differ in "
            "size, so add up right rows and divide once"
        )
