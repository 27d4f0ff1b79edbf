"""The loss scale explorer: which gradients float16 can hold, by the scale."""

import torch
from torch import nn

from helpers import draw
from helpers.explore.explorer import Explorer, slider

LEAST, MOST = -48, 24  # powers of two that the picture shows
ZERO = 2.0**-25  # and below: float16 rounds to 0
LARGEST = 65520.0  # and above: float16 rounds to inf


def loss_scale(gradients: torch.Tensor | None = None) -> Explorer:
    """Gradients, multiplied by a scale and rounded to float16.

    Taught in 09-mix-precision.

    Args:
        gradients: in float32; None takes those of the classifier's first step.
    """
    found = (classifier_gradients() if gradients is None else gradients).cpu()

    def picture(power: int) -> draw.Picture:
        return loss_scale_picture(found, power)

    return Explorer(picture, power=slider("scale = 2 to the power", 0, 0, 40))


def classifier_gradients(large: int = 2**18) -> torch.Tensor:
    """The classifier's gradients, as in a batch `large` times as large."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)
        model, x = nn.Sequential(*layers), torch.randn(128, 64)
    loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(1)) / large
    found = torch.autograd.grad(loss, [*model.parameters()])
    return torch.cat([gradient.flatten() for gradient in found])


def loss_scale_shares(gradients: torch.Tensor, power: int) -> tuple[float, float]:
    """The shares of the gradients other than 0 that become 0, and that become inf."""
    there = gradients[gradients != 0]
    half = (there * 2.0**power).half()
    return (half == 0).float().mean().item(), half.isinf().float().mean().item()


def loss_scale_picture(gradients: torch.Tensor, power: int) -> draw.Picture:
    """How many gradients have which size after scaling, and what float16 does then.

    Each gradient is scaled and then rounded. In a real step, sums inside of
    `backward()` are rounded as well, and may overflow earlier.
    """
    lost, infinite = loss_scale_shares(gradients, power)
    title = f"scale 2^{power}: {lost:.0%} become 0, {infinite:.0%} become inf"
    picture = draw.Picture(draw.WIDEST, 250, f"Gradients in float16, {title}")
    picture.text(8, 20, title, 14, weight="bold")
    exponents = (gradients[gradients != 0].abs() * 2.0**power).log2().floor()
    exponents = exponents.clamp(LEAST, MOST - 1).int()
    counts = torch.bincount(exponents - LEAST, minlength=MOST - LEAST)
    left, each, bottom = 20, (draw.WIDEST - 40) / (MOST - LEAST), 196
    zones = ((LEAST, -25, draw.COLOURS[3], "becomes 0"),
             (-25, -14, draw.COLOURS[4], "loses digits"),
             (-14, 16, draw.COLOURS[2], "all digits of float16"),
             (16, MOST, draw.COLOURS[5], "becomes inf"))  # fmt: skip
    for low, high, fill, words in zones:
        x, width = left + (low - LEAST) * each, (high - low) * each
        picture.box(x, 32, width, 18, fill)
        size = 11 if width < 110 else 12
        picture.text(x + width / 2, 45, words, size, "middle")
        for exponent in range(low, high):
            height = round(136 * counts[exponent - LEAST].item() / counts.max().item())
            if height:
                at = left + (exponent - LEAST) * each
                picture.box(at, bottom - height, each, height, fill)
    picture.line(left, bottom, draw.WIDEST - 20, bottom)
    for exponent in range(LEAST, MOST + 1, 8):
        at = left + (exponent - LEAST) * each
        picture.text(at, bottom + 18, f"2^{exponent}", 11, "middle")
    words = "size of a gradient times the scale; bars: how many (values are real)"
    picture.text(draw.WIDEST / 2, bottom + 40, words, 12, "middle")
    return picture
