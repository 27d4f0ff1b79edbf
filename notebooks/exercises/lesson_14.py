"""The exercises of lesson 14: memory that processes share, and memory they do not."""

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

from exercises.counted import counted, listed, number, word
from exercises.exercise import NotYet, Wrong, call, exercise, must_be_callable, solution
from exercises.results import tensor

ROWS = 11  # of the accuracy: a prime number, so that parts cannot be equal
ASKS = 10  # seconds in which a producer must have done something with `received`
STAYS = 2  # seconds for which it must then stay, though all was fetched
ENDS = 6  # seconds that it may go on after `received` is set


def _yes_or_no(answer) -> str | None:
    if isinstance(answer, bool):
        return "yes" if answer else "no"
    return word(answer) if word(answer) in ("yes", "no") else None


@exercise(
    "14.1",
    hints=(
        "Ask two questions about each program. Into which memory does the child "
        "write its ones, and is that the memory that the notebook calls `x`?",
        "A fork copies its arguments with everything else, while the arguments of a "
        "spawned process and the contents of queues and pipes are sent. Sending "
        "shares the storage of the very tensor that is sent. Look twice where a new "
        "tensor is made.",
    ),
)
def who_sees(*answers) -> None:
    """Whether the notebook sees the writes of six programs."""
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
    )
    say = 'answer "yes" or "no"'
    listed(answers, programs, what="answers", read=_yes_or_no, say=say)


@solution("14.1")
def solution_1():
    """The notebook sees a write if the child writes into memory that the notebook has.

    A fork copies the whole process. What the child does with its copy of `x` stays in
    the child, even if it moves the copy into shared memory (1) or has got `x` as an
    argument (2).

    Sending a tensor moves its storage into shared memory. The arguments of a spawned
    process are sent (3). What goes through a queue is sent too, and a slice takes along
    the whole storage that it belongs to (4). In 5 the clone is sent and shared, and `x`
    has other memory.

    In 6 `x` is shared before the process starts. However, `x + 1` is a new tensor,
    which only the child calls `x`.
    """
    answers = [
        "no",  # 1: shared too late, after the fork
        "no",  # 2: a fork sends no argument
        "yes",  # 3: a spawned process is sent its arguments
        "yes",  # 4: a slice shares the storage
        "no",  # 5: a clone has its own storage
        "no",  # 6: x + 1 is a new tensor
    ]
    return (*answers,)


MUST_WAIT = "with the default sharing strategy it must wait for `received`"


@exercise(
    "14.2",
    hints=(
        "Two things go wrong, one inside of the loop and one after it. What does "
        "`put` send of a tensor, and what must still be there when the consumer "
        "fetches the tensor?",
        "All four handles lead to the storage of `tensor`, and the loop writes into "
        "it again. With the default strategy a producer must live until the "
        "consumer has everything. How can the producer learn when to end, without "
        "guessing a number of seconds?",
    ),
)
def delivers_all(produce) -> None:
    """A producer (queue, received) of four tensors that stays until they are there."""
    must_be_callable(produce)
    with _Producer(produce) as producer:
        producer.let_it_work()
        _check_tensors([producer.take(number) for number in range(4)])
        producer.must_stay()
        producer.must_end()


@solution("14.2")
def solution_2():
    """Each tensor needs memory of its own, and the producer must live long enough.

    `put` sends a handle to the storage and no numbers. With one storage for four
    handles, the consumer finds one number four times. `clone()` makes a new
    storage each time.

    With the default strategy, the consumer fetches the memory behind a handle from the
    process that has sent the handle. The producer therefore waits until the consumer
    sets `received`. A sleep would only guess how slow the consumer is.
    """

    def produce(queue, received):
        tensor = torch.zeros(3)
        for i in range(4):
            tensor.fill_(i)
            queue.put(tensor.clone())
        received.wait()

    return produce


def _check_tensors(tensors: list[torch.Tensor]) -> None:
    """They hold 0, 1, 2 and 3, also when the producer has had time to write more."""
    time.sleep(0.3)
    values = [tensor[0].item() for tensor in tensors]
    if len(set(values)) == 1:
        raise Wrong(
            f"all four tensors are full of {values[0]:g}: `put` sends a handle "
            "to one memory, and you write into it again; put a clone"
        )
    if values != [0.0, 1.0, 2.0, 3.0]:
        raise Wrong(f"the tensors are full of {', '.join(f'{v:g}' for v in values)}")


class _Producer:
    """The learner's producer in a process of its own, and what its consumer sees.

    Behind the `with` block it has ended, whatever it does.
    """

    def __init__(self, produce):
        fork = mp.get_context("fork")
        self._queue, self._errors = fork.Queue(), fork.SimpleQueue()
        self._received, self._asked = fork.Event(), fork.Event()
        self._process = fork.Process(target=self._work, args=(produce,))
        self._ended_early = False

    def _work(self, produce) -> None:
        """In the process: call what the learner has written."""
        torch.set_num_threads(1)
        try:
            produce(self._queue, _Noted(self._received, self._asked))
        except BaseException as error:
            self._errors.put(f"{type(error).__name__}: {error}")

    def __enter__(self) -> "_Producer":
        self._process.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._received.set()
        self._empty()
        self._process.kill()
        self._process.join()

    def _empty(self) -> None:
        """Take what is left: memory that is sent by name stays until it is fetched."""
        for _ in range(100):  # a producer may go on and on
            if self._queue.empty():
                return
            with contextlib.suppress(Exception):  # of whatever the learner has sent
                self._queue.get(timeout=1)

    def let_it_work(self) -> None:
        """Wait until it asks `received` or ends, and then a little, as if busy."""
        # On a busy machine the clock does not tell how far the producer has come.
        limit = time.monotonic() + ASKS
        while not self._asked.is_set() and time.monotonic() < limit:
            self._process.join(0.05)
            if not self._process.is_alive():
                break
        self._process.join(0.5)  # the slow consumer
        self._ended_early = not self._process.is_alive()
        if not self._errors.empty():
            raise Wrong(f"your code raised {self._errors.get()}")
        if self._process.exitcode:
            number = -self._process.exitcode
            raise Wrong(f"the producer was ended by signal {number}")
        if self._ended_early and self._queue.empty():
            raise NotYet("your function puts nothing so far")

    def take(self, number: int) -> torch.Tensor:
        """The tensor of this number."""
        try:
            item = self._queue.get(timeout=3)
        except queues.Empty:
            raise Wrong(f"{number} tensors arrive, not four") from None
        except (OSError, EOFError) as error:
            raise Wrong(
                f"fetching a tensor raised {type(error).__name__}: the producer has "
                f"ended, and its memory cannot be asked for; {MUST_WAIT}"
            ) from None
        tensor(item, "what arrives is")
        if item.shape != (3,) or len(set(item.tolist())) != 1:
            raise Wrong(f"a tensor arrives that holds {item.tolist()}")
        if self._ended_early:
            why = "the producer ends before its tensors are fetched"
            raise Wrong(f"{why}; {MUST_WAIT}")
        return item

    def must_stay(self) -> None:
        """It puts nothing more, and lives because it waits for `received`."""
        self._process.join(STAYS)
        with contextlib.suppress(queues.Empty, OSError, EOFError):
            self._queue.get(timeout=0.2)
            raise Wrong("more than four tensors arrive")
        if not self._process.is_alive():
            raise Wrong(f"the producer ended before `received` was set; {MUST_WAIT}")
        if not self._asked.is_set():
            raise Wrong("the producer never asks `received`; a sleep only guesses")

    def must_end(self) -> None:
        """It ends soon after `received` is set."""
        self._received.set()
        self._process.join(ENDS)
        if self._process.is_alive():
            raise Wrong("the producer goes on after `received` is set; let it end")


class _Noted:
    """An event; `asked` is set once anybody does anything with it."""

    def __init__(self, event, asked):
        self._event, self._asked = event, asked

    def __getattr__(self, name: str):
        self._asked.set()
        return getattr(self._event, name)


NO_ANSWER = (
    "no answer within 60 s; do your processes wait for each other, or does a fork "
    "compute before its `torch.set_num_threads(1)`?"
)
NOTICES = 60  # seconds in which a killed worker must have been noticed
COPY_OF_WEIGHTS = 100_000 * 100 * 4  # bytes


class _Scores(nn.Module):
    """Ten scores for a row of words; notes who computed, and with what memory.

    When there is a file `victim`, the first worker that computes takes its name away
    and is killed.
    """

    def __init__(self, notes: str):
        super().__init__()
        self.notes, self.victim, self.caller = notes, f"{notes}-victim", os.getpid()
        self.words = nn.EmbeddingBag(100_000, 100)
        self.scores = nn.Linear(100, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.getpid() != self.caller:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self.victim)
                os.kill(os.getpid(), signal.SIGKILL)
        own = _own_bytes(self.words.weight)
        with contextlib.suppress(FileNotFoundError):  # the check is over
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


@exercise(
    "14.3",
    hints=(
        "What can a forked worker read without getting it sent, and where must it "
        "write so that the notebook sees the result? *One memory, two processes* "
        "shows both. Which ways of *Who notices a dead worker?* tell you of a kill?",
        "Write down what a worker reports if its part has two rows and another "
        "worker's part has three. Why is the mean of their accuracies not the "
        "accuracy of all five rows? And what does a worker report that was killed?",
    ),
)
def parallel_accuracy(function) -> None:
    """A function (model, x, y) -> accuracy, by several processes, one model.

    When a worker is killed, it raises an error.
    """
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        torch.manual_seed(0)
        model = _Scores(str(notes))
        x = torch.randint(0, 100_000, (ROWS, 8))
        with torch.no_grad():
            best = model(x).argmax(1)
        right_rows = torch.tensor([0, 3, 9])
        y = (best + 1) % 10
        y[right_rows] = best[right_rows]
        notes.write_text("")
        with _within(60, NO_ANSWER):
            result = _accuracy(function, model, x, y)
        _check_accuracy(result, notes.read_text())
        Path(model.victim).touch()
        _must_notice(function, model, x, y)


@solution("14.3")
def solution_3():
    """Each worker counts the right rows of its part, and the division comes at the end.

    `share_memory()` moves the weights into shared memory before the workers start, so
    no worker has a copy. The workers are forks, so they find `model`, `x` and `y`
    without being sent anything. A forked worker computes with one thread, because
    PyTorch's other threads were not copied.

    Only the worker itself sees what it writes into ordinary memory. `right_rows` is in
    shared memory, too. Each worker writes into an element of its own, so no update can
    be lost, and no lock is needed.

    The parts may differ in size. A mean of accuracies would give a row in a small part
    more weight, and a sum of counts does not.

    A killed worker leaves its zero in `right_rows`, and `join()` says nothing about it.
    Without a look at the exit codes, the share would be too small, silently.
    """

    def parallel_accuracy(model, x, y):
        fork = mp.get_context("fork")
        count = 4
        model.share_memory()
        right_rows = torch.zeros(count, dtype=torch.int64).share_memory_()

        def work(i):
            torch.set_num_threads(1)
            with torch.no_grad():
                scores = model(x[i::count])
            right_rows[i] = (scores.argmax(1) == y[i::count]).sum()

        workers = [fork.Process(target=work, args=(i,)) for i in range(count)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            raise RuntimeError("a worker has died")
        return right_rows.sum().item() / len(x)

    return parallel_accuracy


def _accuracy(function, *args) -> float:
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
    return number(result, "it returns no share")


def _must_notice(function, *args) -> None:
    """It raises an error, of any kind, in time, when a worker is killed."""
    late = f"one worker was killed, and after {NOTICES} s there is no error"
    late += "; a `Pool` and a pipe wait for ever for its answer"
    try:
        with _within(NOTICES, late):
            result = function(*args)
    except Wrong:
        raise
    except Exception:
        return
    told = f"one worker was killed, and you return {result}"
    raise Wrong(f"{told}; look at exit codes, and raise an error")


def _check_accuracy(result: float, notes: str) -> None:
    calls = [tuple(map(int, line.split())) for line in notes.splitlines()]
    workers = {pid for pid, _, _ in calls}
    rows = sum(count for _, _, count in calls)
    if os.getpid() in workers:
        raise Wrong("the notebook's own process computes; leave that to workers")
    if len(workers) < 2:
        raise Wrong(f"processes that compute: {len(workers)}; start several")
    if rows != ROWS:
        raise Wrong(f"the workers compute {rows} rows of {ROWS}")
    own = sum({pid: nbytes for pid, nbytes, _ in calls}.values())
    # A mapping may hold more than the weights: about 1 MB in each forked worker.
    if own > COPY_OF_WEIGHTS / 2:
        raise Wrong(
            f"the workers hold {own / 1e6:.0f} MB of weights of their own; share the "
            "model before they start, and send no copy of it"
        )
    mistakes = {
        0: "0: the workers wrote into memory of their own; share what they write "
        "into, or send it back",
        3: "that is the number of right rows; divide by all rows",
    }
    why = (
        f"{result:.3f} is not the share of right rows, {3 / ROWS:.3f}; parts differ in "
        "size, so add up right rows and divide once"
    )
    counted(result, 3 / ROWS, mistakes, why, near=3e-4)
