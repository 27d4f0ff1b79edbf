"""The exercises of lesson 01: visible GPUs, the best device, a module that moves."""

import contextlib
from unittest import mock

import torch
from torch import nn

from exercises.exercise import NotYet, Wrong, call, exercise, solution
from exercises.results import a, equal, near, tensor
from helpers.gpus import count_copies


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
        "A module moves in place, a tensor does not, and a dictionary has no `to`. So "
        "make a new one; `isinstance(value, torch.Tensor)` says which values move.",
    ),
)
def place(function) -> None:
    """A function (model, dictionary) -> both on the best device, also without GPUs."""
    for here, there, world in (
        ("on this machine", "cuda", contextlib.nullcontext()),
        ("on a machine without a GPU", "cpu", _no_gpus()),
    ):
        model, ids = nn.Linear(3, 2), ["a", "b", "c", "d"]
        x, mask = torch.arange(12.0).reshape(4, 3), torch.tensor([True, True, False])
        batch = {"x": x, "ids": ids, "mask": mask}
        with world:
            result = call(function, model, batch)
        if not isinstance(result, tuple) or len(result) != 2:
            raise Wrong("return two things: return model, batch")
        if not isinstance(result[0], nn.Module):
            raise Wrong("the model comes first, then the batch")
        if not isinstance(result[1], dict):
            raise Wrong(f"the batch came back as {a(type(result[1]).__name__)}")
        if sorted(result[1]) != ["ids", "mask", "x"] or result[1]["ids"] != ids:
            raise Wrong("the batch must keep all its entries, the text as it is")
        for name, sent in (("x", x), ("mask", mask)):
            found = tensor(result[1][name], f"{name} came back as")
            _check_placed(model, sent, (result[0], found), here, there)


@solution("01.2")
def solution_2():
    """Ask once which device there is, and send both to it.

    `current_accelerator` names the kind of GPU that this PyTorch was built for. Only
    with `check_available=True` does it look whether there is one, and return None if
    there is not. Then the CPU is the best device.

    `model.to(device)` changes the parameters of the same model, so an optimizer that
    was made before refers to the right ones (its own tensors, such as momentum, stay
    where they are). `value.to(device)` changes nothing and returns a copy, so the copy
    goes into a new dictionary. Text has no device and stays as it is.
    """

    def place(model, batch):
        device = torch.accelerator.current_accelerator(check_available=True)
        device = device or torch.device("cpu")
        model.to(device)
        placed = {}
        for name, value in batch.items():
            is_tensor = isinstance(value, torch.Tensor)
            placed[name] = value.to(device) if is_tensor else value
        return model, placed

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


class _Stem(nn.Module):
    """The module of the exercise, which works on the CPU only."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.mean = self.norm.running_mean
        self.scale = torch.linspace(1, 2, 8)

    def forward(self, x):
        places = torch.arange(len(x))
        return self.norm(x) * self.scale + self.mean + places[:, None]


@exercise(
    "01.3",
    hints=(
        "Three tensors are in the wrong place after `to`: one is neither parameter nor "
        "buffer, one is made in each `forward`, and one is a kept reference. Which is "
        "which, and what does the lesson say of each?",
        "Read the help of `register_buffer`: its third parameter says whether a buffer "
        "is part of the `state_dict`. And what does `forward` read if nobody keeps a "
        "reference to `norm.running_mean`?",
    ),
)
def movable(module_class) -> None:
    """A class like `Stem` that works wherever it is moved, with the same state_dict."""
    generator = torch.Generator().manual_seed(5)
    right, module = _Stem(), call(module_class)
    if not isinstance(module, nn.Module):
        raise Wrong(f"give a class of modules; this makes {a(type(module).__name__)}")
    if type(module).forward is nn.Module.forward:
        raise NotYet("your class has no forward so far")
    keys, wanted = set(module.state_dict()), set(right.state_dict())
    if keys != wanted:
        which = f"has {', '.join(sorted(keys - wanted))} too"
        if not wanted <= keys:
            which = f"lacks {', '.join(sorted(wanted - keys))}"
        raise Wrong(f"old checkpoints do not load: the state_dict {which}")
    module.load_state_dict(right.state_dict())
    for device in ("cpu", "cuda:1", "cuda:2", "cpu"):
        x = 5 + torch.randn(6, 8, generator=generator)
        there, when = x.to(device), f"on {device}"
        module.to(device)
        with count_copies() as copies:
            found = call(module, there, when=when)
        found = tensor(found, f"{when} forward returns")
        if str(found.device) != device:
            raise Wrong(f"{when} the result is on {found.device}")
        if not near(found, right(x), atol=1e-4):
            raise Wrong(
                f"{when} the result is another one: does `mean` still follow the "
                "module's running_mean after `to`?"
            )
        if copies:
            raise Wrong(
                f"{when} each forward copies {copies.nbytes} bytes from "
                f"{copies[0].source}: let `to` move the tensor once, or make it on "
                "x.device"
            )


@solution("01.3")
def solution_3():
    """A buffer that is not saved, a device for what is made, and no kept reference.

    `scale` is neither parameter nor buffer, so `to` leaves it on the CPU. As a buffer
    it moves. It is always the same and was not in the old checkpoints:
    `persistent=False` keeps it out of the `state_dict`.

    `places` is made in each `forward`, so it is made where the input is. `mean` was a
    second reference to a buffer of `norm`, which is a new tensor after `to`. No error
    says so if `mean` is registered as a buffer, too: then it moves, but only the buffer
    of `norm` is updated. Read it from `norm` each time.
    """

    class Stem(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(8)
            scale = torch.linspace(1, 2, 8)
            self.register_buffer("scale", scale, persistent=False)

        def forward(self, x):
            places = torch.arange(len(x), device=x.device)
            normed = self.norm(x) * self.scale
            return normed + self.norm.running_mean + places[:, None]

    return Stem
