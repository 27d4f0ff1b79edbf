"""Answers to the exercises of lesson 01: right ones, and planted wrong ones."""

import copy

import torch


def fastest():
    """The accelerator, or the CPU where there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found or torch.device("cpu")


def to_fastest(model, batch):
    return model.to(fastest()), batch.to(fastest())


def in_the_older_way(model, batch):
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    model.to(device)
    return model, batch.to(device)


def by_counting(model, batch):
    if torch.cuda.device_count():
        return model.cuda(), batch.cuda()
    return model, batch


def throws_the_batch_away(model, batch):
    model.to(fastest())
    batch.to(fastest())
    return model, batch


def forgets_the_model(model, batch):
    return model, batch.to(fastest())


def hard_codes_cuda(model, batch):
    return model.to("cuda"), batch.to("cuda")


def does_not_check(model, batch):
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if device.type == "cpu":  # this PyTorch is built without CUDA
        device = torch.device("cuda")
    return model.to(device), batch.to(device)


def always_on_the_cpu(model, batch):
    return model.cpu(), batch.cpu()


def uses_two_gpus(model, batch):
    if not torch.cuda.is_available():
        return model, batch
    return model.to("cuda:0"), batch.to("cuda:1")


def copies_the_model(model, batch):
    return copy.deepcopy(model).to(fastest()), batch.to(fastest())


def returns_the_model_only(model, batch):
    return model.to(fastest())


def swaps_them(model, batch):
    return batch.to(fastest()), model.to(fastest())


def makes_another_batch(model, batch):
    return model.to(fastest()), torch.zeros_like(batch, device=fastest())


def mixes_up(model, batch):
    return model.to(fastest()), batch.too(fastest())


DEVICES = ("cuda:1", "cpu", "cpu", "cuda:2", "cuda:0")


def but(number: int, device) -> tuple:
    """The right devices, but for the one of that number."""
    return (*DEVICES[: number - 1], device, *DEVICES[number:])


RIGHT = {
    "five_devices": [DEVICES, tuple(map(torch.device, DEVICES))],
    "place": [to_fastest, in_the_older_way, by_counting],
    "visible_devices": ["3,1", "3, 1"],
}

WRONG = {
    "five_devices": [
        (but(1, "cpu"), "stays where its input lives"),
        (but(2, "cuda:1"), "only numbers"),
        (but(3, "cuda:3"), "`mean` is the old one"),
        (but(4, "cuda:1"), "a is copied"),
        (but(5, "cuda:2"), "not the current GPU"),
        (but(5, "cpu"), "not the current GPU"),
        (but(5, "cuda"), "say which GPU"),
        (but(1, 1), "name of a device"),
        (DEVICES[:4], "5 devices are asked for, not 4"),
    ],
    "place": [
        (lambda model, batch: (model.cuda(), 3), "came back as an int"),
        (throws_the_batch_away, "keep what .to() returns"),
        (forgets_the_model, "the model stays on cpu"),
        (hard_codes_cuda, "without a GPU the model goes to cuda"),
        (does_not_check, "check_available"),
        (always_on_the_cpu, "the model stays on cpu"),
        (uses_two_gpus, "the batch on cuda:1"),
        (copies_the_model, "a copy of the model"),
        (returns_the_model_only, "return two things"),
        (swaps_them, "the model comes first"),
        (makes_another_batch, "keep its values"),
        (mixes_up, "AttributeError"),
    ],
    "visible_devices": [
        ("4,2", "from 0"),
        ("1,3", "the order counts"),
        ("3", "cuda:0 is card 3"),
        ("3,1,0,2", "more cards"),
        ("0,1", "cuda:0 is card 0"),
        ("cuda:3,cuda:1", "nothing but the numbers"),
        ("", "nothing but the numbers"),
        ([3, 1], "is text"),
        (3, "is text"),
    ],
}
