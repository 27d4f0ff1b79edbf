"""Judges of the exercises of lesson 01."""

import contextlib
import re
from unittest import mock

import torch

from helpers.check import Wrong, call, exercise


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
            result = call(function, model, batch)
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
