"""Right and wrong answers into the exercises of lesson 01."""

import copy

import torch


def fastest():
    """The accelerator, or the CPU where there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found or torch.device("cpu")


def place(model, batch):
    return model.to(fastest()), batch.to(fastest())


def place_in_the_older_way(model, batch):
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    model.to(device)
    return model, batch.to(device)


def place_by_counting(model, batch):
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


DEVICES = ("cuda:1", "cpu", "cuda:1", "cuda:2", "cuda:0")


def but(number: int, device) -> tuple:
    """The right devices, but for the one of that number."""
    return (*DEVICES[: number - 1], device, *DEVICES[number:])


RIGHT = {
    "five_devices": [lambda: DEVICES, lambda: tuple(map(torch.device, DEVICES))],
    "place": [
        lambda: (place,),
        lambda: (place_in_the_older_way,),
        lambda: (place_by_counting,),
    ],
    "visible_devices": [lambda: ("3,1",), lambda: ("3, 1",)],
}

WRONG = {
    "five_devices": [
        (lambda: but(1, "cpu"), "stays where its input lives"),
        (lambda: but(2, "cuda:1"), "only numbers"),
        (lambda: but(3, "cpu"), "_like"),
        (lambda: but(4, "cuda:1"), "a is copied"),
        (lambda: but(5, "cuda:2"), "not the current GPU"),
        (lambda: but(5, "cpu"), "not the current GPU"),
        (lambda: but(5, "cuda"), "say which GPU"),
        (lambda: but(1, 1), "name of a device"),
        (lambda: DEVICES[:4], "five devices"),
    ],
    "place": [
        (lambda: (lambda model, batch: (model.cuda(), 3),), "came back as int"),
        (lambda: (throws_the_batch_away,), "keep what .to() returns"),
        (lambda: (forgets_the_model,), "the model stays on cpu"),
        (lambda: (hard_codes_cuda,), "without a GPU the model goes to cuda"),
        (lambda: (does_not_check,), "check_available"),
        (lambda: (always_on_the_cpu,), "the model stays on cpu"),
        (lambda: (uses_two_gpus,), "the batch on cuda:1"),
        (lambda: (copies_the_model,), "a copy of the model"),
        (lambda: (returns_the_model_only,), "return two things"),
        (lambda: (swaps_them,), "the model comes first"),
        (lambda: (makes_another_batch,), "keep its values"),
        (lambda: (mixes_up,), "AttributeError"),
    ],
    "visible_devices": [
        (lambda: ("4,2",), "from 0"),
        (lambda: ("1,3",), "the order counts"),
        (lambda: ("3",), "cuda:0 is card 3"),
        (lambda: ("3,1,0,2",), "more cards"),
        (lambda: ("0,1",), "cuda:0 is card 0"),
        (lambda: ("cuda:3,cuda:1",), "nothing but the numbers"),
        (lambda: ("",), "nothing but the numbers"),
        (lambda: ([3, 1],), "is text"),
        (lambda: (3,), "is text"),
    ],
}
