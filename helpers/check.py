"""Oracles, and exercises that check themselves.

An oracle compares two results that must agree and prints one line on how well they
do. An exercise is a function of the learner's answers that says not yet, wrong and
why, or right. Its judge raises `Wrong` with a reason, or returns.
"""

import contextlib
import copy
import functools
import re
from collections.abc import Callable
from unittest import mock

import torch

from helpers import simgpu
from helpers.gpus import count_copies

# -- oracles ---------------------------------------------------------------------------


def same(result, reference, tolerance: float = 0.0) -> None:
    """Assert that two tensors, or lists of them, hold the same values.

    Devices may differ: that is what most lessons are about. Prints the largest
    difference.

    Args:
        result: a tensor or a list of tensors.
        reference: what it must equal; same shapes and dtypes.
        tolerance: the largest absolute difference that counts as equal.

    Raises:
        AssertionError: naming the first tensor that differs, and by how much.

    Taught in 00-start-here.
    """
    results = [result] if isinstance(result, torch.Tensor) else list(result)
    references = [reference] if isinstance(reference, torch.Tensor) else list(reference)
    if not results:
        raise AssertionError("there is nothing to compare")
    if len(results) != len(references):
        raise AssertionError(f"{len(results)} tensors against {len(references)}")
    worst = 0.0
    for i, (a, b) in enumerate(zip(results, references, strict=True)):
        a, b = a.detach().cpu(), b.detach().cpu()
        if a.shape != b.shape or a.dtype != b.dtype:
            raise AssertionError(
                f"tensor {i}: {tuple(a.shape)} {a.dtype} against "
                f"{tuple(b.shape)} {b.dtype}"
            )
        if torch.equal(a, b):
            continue
        wide = torch.complex128 if a.is_complex() else torch.float64
        gap = (a.to(wide) - b.to(wide)).abs().max().item()
        if not 0 < gap <= tolerance:  # refuses nan, and what float64 cannot tell apart
            raise AssertionError(
                f"tensor {i} differs by {gap:.1e}, more than {tolerance:.1e}"
            )
        worst = max(worst, gap)
    count = "1 tensor" if len(results) == 1 else f"{len(results)} tensors"
    how = "exactly" if worst == 0 else f"within {tolerance:.0e}"
    print(f"same: {count} equal {how}")


def predicted(prediction: float, actual: float, unit: str, tolerance: float = 0.0):
    """Print a prediction beside what was counted or measured, and the error.

    Args:
        prediction: the number that the lesson's arithmetic gives.
        actual: the number that the machine gives.
        unit: of both, for the printed line.
        tolerance: the largest relative error that passes; 0.01 is 1 %.

    Raises:
        AssertionError: if the error is larger.

    Taught in 00-start-here.
    """
    error = abs(prediction - actual) / abs(actual) if actual else abs(prediction)
    if not error <= tolerance:
        raise AssertionError(
            f"predicted {prediction:,.6g} {unit}, but it is {actual:,.6g}: "
            f"{error:.1%} off"
        )
    a, b = (
        f"{x:,}" if isinstance(x, int) else f"{x:,.3f}" for x in (prediction, actual)
    )
    how = "counted" if simgpu.count() else "measured"
    print(f"predicted {a} {unit}, {how} {b} {unit}: error {error:.1%}")


# -- exercises -------------------------------------------------------------------------


class NotYet(Exception):
    """The answer is still missing."""


class Wrong(Exception):
    """The answer is wrong; the message says why."""


class Verdict:
    """What an exercise says of an answer."""

    def __init__(self, exercise: str, state: str, why: str = ""):
        self.exercise, self.state, self.why = exercise, state, why

    def __repr__(self) -> str:
        why = f": {self.why}" if self.why else ""
        return f"exercise {self.exercise}: {self.state}{why}"


EXERCISES: dict[str, Callable] = {}  # name of the check -> the check


def exercise(number: str):
    """Make a judge of answers into exercise `number`, such as "01.2"."""

    def register(judge: Callable) -> Callable:
        @functools.wraps(judge)
        def check(*answers) -> Verdict:
            try:
                if any(answer is ... for answer in answers):
                    raise NotYet("replace the ... with your answer")
                judge(*answers)
            except NotYet as reason:
                return Verdict(number, "not yet", str(reason))
            except Wrong as reason:
                return Verdict(number, "wrong", str(reason))
            except Exception as error:  # the learner's own code
                why = f"your code raised {type(error).__name__}: {error}"
                return Verdict(number, "wrong", why)
            return Verdict(number, "right")

        check.number = number
        EXERCISES[judge.__name__] = check
        return check

    return register


def _call(function: Callable, *args, when: str = ""):
    """The result of the learner's function; None means that it is not written yet.

    Args:
        function: the learner's.
        args: for it.
        when: said in front of the error that it raises.
    """
    try:
        result = function(*args)
    except Exception as error:
        what = f"{when} your code raised {type(error).__name__}: {error}"
        raise Wrong(what.strip()) from error
    if result is None:
        raise NotYet("your function returns nothing so far")
    return result


# -- lesson 00 -------------------------------------------------------------------------


@exercise("00.1")
def copied_bytes(answer) -> None:
    """Bytes that the four-line program copies with two GPUs."""
    there, weights, back = 2048 * 1024 * 4, 1024 * 1024 * 4, 2048 * 1024 * 4
    if answer == there + back:  # also X and twice W
        raise Wrong("X goes there, W goes to each GPU, and the result comes back")
    if answer == there + weights + back:
        raise Wrong("every GPU needs its own copy of W")
    if answer == there + 4 * weights + back:
        raise Wrong("that is for four GPUs; this time there are two")
    if answer == (there + 2 * weights + back) // 4:
        raise Wrong("that is the count of numbers; a float32 has 4 bytes")
    if answer != there + 2 * weights + back:
        raise Wrong("count X once, W once for each GPU, and the result once")


@exercise("00.2")
def spread(function) -> None:
    """A function (x, n) -> n pieces of x, piece i on GPU i."""
    for rows, number in ((8, 4), (6, 2), (5, 3), (5, 4)):
        x = torch.arange(rows * 2.0).reshape(rows, 2)
        pieces = list(_call(function, x, number))
        if len(pieces) != number:
            raise Wrong(f"{number} GPUs need {number} pieces, not {len(pieces)}")
        for i, piece in enumerate(pieces):
            if piece.device != torch.device("cuda", i):
                raise Wrong(f"piece {i} is on {piece.device}, not on cuda:{i}")
        together = torch.cat([piece.cpu() for piece in pieces])
        if together.shape != x.shape or not torch.equal(together, x):
            raise Wrong(f"the pieces of {rows} rows put together are not x")


# -- lesson 01 -------------------------------------------------------------------------


@exercise("01.1")
def five_devices(*answers) -> None:
    """The devices of five expressions with a tensor `a` on cuda:1."""
    if len(answers) != 5:
        raise Wrong(f"five devices are asked for, not {len(answers)}")
    hints = (
        ("cuda:1", "a result stays where its input lives"),
        ("cpu", "a.shape is only numbers, so nothing says where"),
        ("cuda:1", "..._like takes the device of its argument as well"),
        ("cuda:2", "the block changes what the bare .cuda() means, and a is copied"),
        (
            "cuda:0",
            'the default device is not the current GPU, which is what "cuda" means',
        ),
    )
    for number, (answer, (right, hint)) in enumerate(
        zip(answers, hints, strict=True), 1
    ):
        name = str(answer).lower()
        if name == "cuda":
            raise Wrong(f"number {number}: say which GPU, such as cuda:0")
        if not re.fullmatch(r"cpu|cuda:\d+", name):
            raise Wrong(f"number {number}: write the name of a device, such as cuda:0")
        if name != right:
            raise Wrong(f"number {number} is not on {name}: {hint}")


@contextlib.contextmanager
def _no_gpus():
    """A machine whose PyTorch is built for CUDA, but finds no GPU."""

    def current_accelerator(check_available: bool = False):
        return None if check_available else torch.device("cuda")

    with contextlib.ExitStack() as stack:
        for module in (torch.cuda, torch.accelerator):
            for name, answer in (("is_available", False), ("device_count", 0)):
                replaced = mock.patch.object(module, name, return_value=answer)
                stack.enter_context(replaced)
        replaced = mock.patch.object(
            torch.accelerator, "current_accelerator", current_accelerator
        )
        stack.enter_context(replaced)
        yield


@exercise("01.2")
def place(function) -> None:
    """A function (model, batch) -> both on the best device, with and without GPUs."""
    for here, there, world in (
        ("on this machine", "cuda", contextlib.nullcontext()),
        ("on a machine without a GPU", "cpu", _no_gpus()),
    ):
        model, batch = torch.nn.Linear(3, 2), torch.arange(12.0).reshape(4, 3)
        with world:
            result = _call(function, model, batch)
        if not isinstance(result, tuple) or len(result) != 2:
            raise Wrong("return two things: return model, batch")
        if not isinstance(result[0], torch.nn.Module):
            raise Wrong("the model comes first, then the batch")
        if not isinstance(result[1], torch.Tensor):
            raise Wrong(f"the batch came back as {type(result[1]).__name__}")
        _check_placed(model, batch, result, here, there)


def _check_placed(model, batch, result, here: str, there: str) -> None:
    """Both are on one device of the type `there`, and are what they were."""
    weight = result[0].weight.device
    for what, device in (("model", weight), ("batch", result[1].device)):
        if there == "cpu" and device.type != there:
            raise Wrong(
                f"{here} the {what} goes to {device}: ask whether there is one "
                "(current_accelerator needs check_available=True for that)"
            )
        if device.type != there:
            why = "; keep what .to() returns" if what == "batch" else ""
            raise Wrong(f"{here} the {what} stays on {device}{why}")
    if weight != result[1].device:
        raise Wrong(f"the model is on {weight}, the batch on {result[1].device}")
    if result[0] is not model:
        raise Wrong(
            "this is a copy of the model, and an optimizer made before would train "
            "the other one; a module moves in place"
        )
    if not torch.equal(result[1].cpu(), batch):
        raise Wrong("the batch must keep its values")


@exercise("01.3")
def visible_devices(answer) -> None:
    """CUDA_VISIBLE_DEVICES that makes card 3 cuda:0 and card 1 cuda:1."""
    if not isinstance(answer, str):
        raise Wrong('an environment variable is text, such as "0,2"')
    cards = [entry.strip() for entry in answer.split(",")]
    if not all(card.isdigit() for card in cards):
        raise Wrong("write nothing but the numbers of cards, with commas between")
    if cards in (["4", "2"], ["2", "4"]):
        raise Wrong("CUDA counts cards from 0: the fourth is 3")
    if cards == ["1", "3"]:
        raise Wrong("the order counts: the first in the list becomes cuda:0")
    if cards[:2] == ["3", "1"] and len(cards) > 2:
        raise Wrong("this shows the script more cards than the two")
    if cards != ["3", "1"]:
        names = ", ".join(f"cuda:{i} is card {card}" for i, card in enumerate(cards))
        raise Wrong(f"with this, counted from 0, {names}")


# -- lesson 02 -------------------------------------------------------------------------


@exercise("02.1")
def bytes_of_the_loop(answer) -> None:
    """Bytes that 100 steps of `seen[rows] += 1` and one `if` copy."""
    steps, rows, index = 100, 10, 8
    reasons = {
        rows * index + 1: "`rows` travels to be read and to be written, in int64",
        rows * index: "two indexings a step, and an `if` that needs an answer",
        2 * rows * index: "Python's `if` asks the GPU for its answer",
        2 * rows * index + 4: "the comparison is made on the GPU; a boolean comes back",
        2 * rows * index + 1 + 4: "only the answer comes back, not the minimum",
    }
    if answer in reasons or answer == 2 * rows * index + 1:
        raise Wrong("that is one step; the loop makes 100")
    for bytes_a_step, reason in reasons.items():
        if answer == steps * bytes_a_step:
            raise Wrong(reason)
    if answer == 2 * rows * index * steps + 1:
        raise Wrong("the `if` is asked in every step, not only when it is true")
    if answer != steps * (2 * rows * index + 1):
        raise Wrong("a step copies 10 indices for each indexing, and what `if` needs")


@exercise("02.2")
def noise_like(function) -> None:
    """A function x -> normal random numbers beside x."""
    for device, dtype in (
        ("cuda:1", torch.float32),
        ("cuda:3", torch.float64),
        ("cpu", torch.float16),
        ("cuda:2", torch.int64),
        ("cuda:0", torch.bool),
    ):
        x = torch.ones(40, 50, dtype=dtype, device=device)
        if dtype.is_floating_point:
            x.requires_grad_(True)
        beside = f"beside an x of {dtype} on {device}"
        with count_copies() as copies:
            noise = _call(function, x, when=beside)
        wanted = dtype if dtype.is_floating_point else torch.float32
        if not isinstance(noise, torch.Tensor):
            raise Wrong(f"it returns a {type(noise).__name__}, not a tensor")
        if noise.device != x.device:
            raise Wrong(f"{beside} the noise is on {noise.device}")
        if noise.shape != x.shape:
            raise Wrong(f"the noise is {tuple(noise.shape)}, x is {tuple(x.shape)}")
        if noise.dtype != wanted:
            raise Wrong(f"{beside} the noise is {noise.dtype}, not {wanted}")
        if copies:
            raise Wrong(f"{beside} it copies {copies.nbytes:,} bytes; make it there")
        if noise.requires_grad:
            raise Wrong("the noise wants a gradient; new random numbers have none")
        if not bool((x == 1).all()):
            raise Wrong("it writes its numbers into x")
        numbers = noise.cpu().double()
        if torch.equal(numbers, function(x).detach().cpu().double()):
            raise Wrong("two calls give the same numbers")
        if abs(numbers.mean()) > 0.2 or abs(numbers.std() - 1) > 0.2:
            raise Wrong(
                f"mean {numbers.mean():.1f} and deviation {numbers.std():.1f} are not "
                "those of normal numbers, 0 and 1"
            )
        if numbers.abs().max() < 2:  # of 2000 normal numbers, 90 are beyond
            raise Wrong("no number is beyond 2, so they are not normal ones")


@exercise("02.3")
def hide_padding(module_class) -> None:
    """A module (x, lengths) -> x with zeros from each sequence's length on."""
    module = module_class()
    for device, dtype, shape, lengths in (
        ("cuda:0", torch.float32, (3, 5, 2), (5, 0, 2)),
        ("cuda:2", torch.float64, (2, 7, 3), (1, 6)),
        ("cuda:3", torch.float16, (4, 3, 1), (3, 2, 1, 0)),
        ("cpu", torch.float32, (2, 4, 2), (3, 4)),
    ):
        values = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
        expected = values.clone()
        for row, length in enumerate(lengths):
            expected[row, length:] = 0
        x = values.to(device, dtype)
        beside = torch.tensor(lengths, device=device)
        replica = copy.deepcopy(module).to(device)
        with count_copies() as copies:
            result = _call(replica, x, beside)
        about = f"with x on {device} as {dtype}"
        if not isinstance(result, torch.Tensor) or result.device != x.device:
            where = getattr(result, "device", type(result).__name__)
            raise Wrong(f"{about} the result is on {where}")
        if result.dtype != dtype:
            raise Wrong(f"{about} the result is {result.dtype}: a mask has changed it")
        if result.shape != x.shape:
            raise Wrong(f"the result is {tuple(result.shape)}, x is {tuple(x.shape)}")
        if not torch.equal(x.cpu(), values.to(dtype)):
            raise Wrong("it changes its input; make a new tensor")
        if not torch.equal(result.cpu(), expected.to(dtype)):
            raise Wrong(f"{about} a wrong element is hidden; lengths {lengths}")
        if copies:
            raise Wrong(
                f"{about} it copies {copies.nbytes} bytes; compare positions made "
                "beside x with all lengths at once"
            )
