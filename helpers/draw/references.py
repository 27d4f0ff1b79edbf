"""Names of a program, the tensors that they refer to, and where these are."""

import torch

from simgpu.pictures import Picture, colour

_LEFT, _WIDE, _LINE, _GAP = 190, 200, 24, 12  # pixels: names, a device, a name, between


def references(names: dict[str, torch.Tensor]) -> Picture:
    """An arrow from each name to its tensor, in the column of the tensor's device.

    A tensor shows the average of its numbers. Names of one and the same object lead to
    one box.

    Args:
        names: what is written in the program, and the parameter or buffer that it
            refers to.

    Taught in 01-choose-a-device.
    """
    tensors = list({id(tensor): tensor for tensor in names.values()}.values())
    called = [
        [name for name, each in names.items() if each is tensor] for tensor in tensors
    ]
    devices = sorted({str(tensor.device) for tensor in tensors})  # the CPU first
    width = _LEFT + len(devices) * (_WIDE + _GAP)
    height = 40 + _LINE * len(names) + _GAP * (len(tensors) + 1)
    says = [_say(tensor) for tensor in tensors]
    said = [
        f"{' and '.join(found)}: one {what} on {tensor.device}"
        for found, what, tensor in zip(called, says, tensors, strict=True)
    ]
    picture = Picture(width, height, f"Names and tensors. {'; '.join(said)}")
    for column, device in enumerate(devices):
        x = _LEFT + column * (_WIDE + _GAP)
        picture.box(x, 4, _WIDE, height - 8, "#F7F7F7")
        picture.box(x, 4, _WIDE, _LINE, colour(device))
        picture.text(x + _WIDE / 2, 21, device, 14, "middle", "bold")
    y = 40
    for found, what, tensor in zip(called, says, tensors, strict=True):
        high = _LINE * len(found)
        x = _LEFT + devices.index(str(tensor.device)) * (_WIDE + _GAP) + 8
        picture.box(x, y, _WIDE - 16, high)
        picture.text(x + 8, y + high / 2 + 5, what, 13)
        for row, name in enumerate(found):
            middle = y + _LINE * (row + 0.5)
            picture.text(_LEFT - 34, middle + 5, name, 14, "end")
            picture.line(_LEFT - 28, middle, x, middle, arrow=True)
        y += high + _GAP
    return picture


def _say(tensor: torch.Tensor) -> str:
    kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
    return f"{kind}, average {tensor.detach().mean().item():.2f}"
