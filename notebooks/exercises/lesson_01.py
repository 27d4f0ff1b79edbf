"""The exercises of lesson 01: visible GPUs, the best device, where a tensor is."""

import contextlib
import re
from unittest import mock

import torch

from exercises.counted import listed, word
from exercises.exercise import Wrong, call, exercise, solution
from exercises.results import equal, tensor


def _device(answer) -> str | None:
    name = word(answer)
    return name if re.fullmatch(r"cpu|cuda:\d+", name) else None


@exercise(
    "01.1",
    hints=(
        "Look at program B under *Choose GPUs from outside*, which got the cards "
        "`2,3,4,5`. Which of these cards was its `cuda:0`, and why that one?",
        "CUDA counts the cards of the machine from 0. Then put them in the order in "
        "which the script counts them, which need not be ascending.",
    ),
)
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


@solution("01.1")
def solution_1():
    """The position in the list becomes the index in the process.

    The first card of `CUDA_VISIBLE_DEVICES` is `cuda:0`, the second is `cuda:1`, and
    cards that are not in the list do not exist for the script. The list may be in any
    order.

    The numbers in the list are those of the machine, which begin at 0. The fourth card
    has the number 3 and comes first, because the script trains on `cuda:0`. The second
    card has the number 1.
    """
    card_for_training = 4 - 1  # the fourth, counted from 0
    card_for_evaluation = 2 - 1
    visible = f"{card_for_training},{card_for_evaluation}"
    return visible


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


@exercise(
    "01.2",
    hints=(
        "The first program of the lesson asks once which device there is. What does "
        "`current_accelerator` say on a machine that has CUDA in its PyTorch, but no "
        "GPU?",
        "A module moves in place, and a tensor does not. What does "
        "`batch.to(device)` return, and does your function return the same thing?",
    ),
)
def place(function) -> None:
    """A function (model, batch) -> both on the best device, with and without GPUs."""
    for here, there, world in (
        ("on this machine", "cuda", contextlib.nullcontext()),
        ("on a machine without a GPU", "cpu", _no_gpus()),
    ):
        model, batch = torch.nn.Linear(3, 2), torch.arange(12.0).reshape(4, 3)
        with world:
            result = call(function, model, batch)
        if not isinstance(result, tuple) or len(result) != 2:
            raise Wrong("return two things: return model, batch")
        if not isinstance(result[0], torch.nn.Module):
            raise Wrong("the model comes first, then the batch")
        tensor(result[1], "the batch came back as")
        _check_placed(model, batch, result, here, there)


@solution("01.2")
def solution_2():
    """Ask once which device there is, and send both to it.

    `current_accelerator` names the kind of GPU that this PyTorch was built for. Only
    with `check_available=True` does it look whether there is one, and return None if
    there is not. Then the CPU is the best device.

    `model.to(device)` changes the parameters of the same model, so an optimizer that
    was made before refers to the right ones (its own tensors, such as momentum, stay
    where they are). `batch.to(device)` changes nothing and returns a copy, so the
    result needs a name.
    """

    def place(model, batch):
        device = torch.accelerator.current_accelerator(check_available=True)
        device = device or torch.device("cpu")
        model.to(device)
        batch = batch.to(device)
        return model, batch

    return place


def _check_placed(model, batch, result, here: str, there: str) -> None:
    """Both are on one device of the type `there`, and are what they were."""
    if result[0] is not model:
        raise Wrong(
            "this is a copy of the model, and an optimizer made before would train "
            "the other one; a module moves in place"
        )
    weight = model.weight.device
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
    if not equal(result[1], batch):
        raise Wrong("the batch must keep its values")


@exercise(
    "01.3",
    hints=(
        "Ask of each line whether it computes with a tensor, makes a new one, or "
        "moves one. Which rule under *Where results live*, and which row of the "
        "table of the two settings, belongs to it?",
        "`a.shape` is only a size, without a device. Does a module that moves keep its "
        "buffers, or does it get new ones? And which of the two `with` blocks changes "
        "what `cuda` without an index means?",
    ),
)
def five_devices(*answers) -> None:
    """The devices of five expressions with a tensor `a` on cuda:1."""
    expected = (
        ("cuda:1", "a result stays where its input lives"),
        ("cpu", "a.shape is only numbers, so nothing says where"),
        ("cpu", "the module gets a new buffer, and `mean` is the old one"),
        ("cuda:2", "the block changes what the bare .cuda() means, and a is copied"),
        (
            "cuda:0",
            'the default device is not the current GPU, which is what "cuda" means',
        ),
    )
    say = "write the name of a device, and say which GPU, such as cuda:0"
    listed(answers, expected, what="devices", read=_device, say=say)


@solution("01.3")
def solution_3():
    """There is one rule for each kind of line.

    A result stays where its inputs are, so `a.sum()` is on `cuda:1`. A new tensor goes
    to the CPU if nobody says otherwise. `a.shape` says nothing, because a size has no
    device.

    A module that moves keeps its parameters and gets new buffers. `mean` is the old
    buffer, which stayed on the CPU.

    The last two lines move a tensor to `cuda` without an index, which means the current
    GPU. `torch.cuda.device(2)` makes GPU 2 the current one, so `a` is copied there.
    `torch.device("cuda:2")` changes only where new tensors are made: `ones` begins on
    `cuda:2`, and then moves to the current GPU, which is still 0.
    """
    a = torch.ones(3, device="cuda:1")
    total = a.sum()
    from_shape = torch.rand(a.shape)
    norm = torch.nn.BatchNorm1d(3)
    mean = norm.running_mean
    norm.to("cuda:3")
    with torch.cuda.device(2):
        to_current_gpu = a.cuda()
    with torch.device("cuda:2"):
        from_default_device = torch.ones(3).to("cuda")
    results = [total, from_shape, mean, to_current_gpu, from_default_device]
    answers = [str(result.device) for result in results]
    return (*answers,)
