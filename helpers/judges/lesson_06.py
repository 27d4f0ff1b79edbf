"""Judges of the exercises of lesson 06."""

import copy
import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from helpers.check import Wrong, call, exercise, name_mistake, number
from helpers.data import digits

_NEAR = 0.005


@exercise("06.1")
def held_after_forward(float32, mixed) -> None:
    """GB of weights, Adam's state and what the forward pass keeps, in both ways."""
    weights, state, kept = 0.4, 0.8, 6.0
    casts = weights / 2
    right = (weights + state + kept, weights + casts + state + kept / 2)
    answers = number(float32, "float32"), number(mixed, "mixed")
    reasons = [
        {
            weights + kept: "Adam's state is missing: two numbers for each weight",
            weights + state / 2 + kept: "Adam has two numbers for each weight",
            2 * weights + state + kept: "at this moment there are no gradients",
        },
        {
            right[0] / 2: "that is half of everything, which is what the belief says; "
            "the masters and Adam's state stay in float32",
            right[1] - casts: "the casts of the weights are missing",
            right[1] - weights: "the masters stay in float32, and so does Adam's "
            "state; casts come on top",
            right[1] + kept / 2: "what the forward pass keeps between products is "
            "float16: half",
            right[1] + weights: "at this moment there are no gradients",
            right[1] + casts: "a cast is 2 bytes a weight",
        },
    ]
    for name, answer, good, known in zip(
        ("float32", "mixed"), answers, right, reasons, strict=True
    ):
        if math.isclose(answer, good, rel_tol=_NEAR):
            continue
        units = {
            good * 1e9: "these are bytes; the answer is in GB",
            good * 1e9 / 2**30: "these are GiB, of 2**30 bytes; a GB has 10**9",
        }
        name_mistake(answer, units | known, _NEAR, f"{name}:")
        raise Wrong(
            f"{name}: add up 100 million weights, two numbers of Adam for each, and "
            "what the forward pass keeps"
        )


class _Watch(torch.amp.GradScaler):
    """A scaler that notes what is asked of it, and the norms that it meets."""

    def __init__(self, **options):
        super().__init__("cuda", **options)
        self.model: nn.Module | None = None
        self.calls: list[str] = []
        self.norms: dict[str, float] = {}
        self.within = False  # step() itself divides where nobody has

    def _norm(self) -> float:
        """Of all gradients; 0 where there are none yet."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return sum(g.float().norm().item() ** 2 for g in grads) ** 0.5

    def scale(self, outputs):
        self.calls.append("scale")
        return super().scale(outputs)

    def unscale_(self, optimizer):
        self.calls.append("unscale_")
        self.norms["unscale_"] = self._norm()
        if not self.norms["unscale_"]:
            raise RuntimeError("unscale_ finds no gradients: it comes after backward()")
        return super().unscale_(optimizer)

    def step(self, optimizer, *args, **kwargs):
        self.calls.append("step")
        self.norms["step"] = self._norm()
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale=None):
        self.calls.append("update")
        return super().update(new_scale)


def _job(overflow: bool):
    """A model with its optimizer, a scaler that watches, and a batch."""
    torch.manual_seed(0)
    layers = nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = _Watch(init_scale=2.0**40 if overflow else 2.0**12)
    scaler.model = model
    data = digits()
    return model, optimizer, scaler, 8 * data.x[:64].cuda(), data.y[:64].cuda()


@exercise("06.2")
def clipped_step(function) -> None:
    """A function (model, optimizer, scaler, x, y) -> loss: one clipped step."""
    model, optimizer, scaler, x, y = _job(overflow=False)
    types = []
    hook = model[0].register_forward_hook(lambda *a: types.append(a[2].dtype))
    before = copy.deepcopy(model)
    loss = call(function, model, optimizer, scaler, x, y)
    hook.remove()
    _judge_loss(loss, before, x, y, types)
    calls = scaler.calls
    if "scale" not in calls:
        raise Wrong(
            "the loss is not scaled by the scaler that it is given: "
            "scaler.scale(loss).backward()"
        )
    if "step" not in calls:
        raise Wrong("call scaler.step(optimizer), which can skip a step; "
                    "optimizer.step() cannot")  # fmt: skip
    if "unscale_" not in calls[: calls.index("step")]:
        raise Wrong(
            "scaler.unscale_(optimizer) is missing before the step: whoever clips "
            "sees gradients that are still multiplied by the scale; unscale_ first"
        )
    if "update" not in calls:
        raise Wrong("scaler.update() is missing: without it the scale never changes")
    if calls.index("update") < calls.index("step"):
        raise Wrong("scaler.update() comes after scaler.step(optimizer)")
    if scaler.norms["unscale_"] < 1.01:
        raise Wrong("they were clipped before unscale_ divided them: clip after it")
    if scaler.norms["step"] > 1.01:
        raise Wrong(
            f"the norm was {scaler.norms['step']:.2f} when scaler.step came: clip to 1 "
            "before it"
        )
    if scaler.norms["step"] < 0.9:
        raise Wrong(
            f"clip to a norm of 1, not {scaler.norms['step']:.2g}; or the loss that "
            "goes backward is not the scaled one"
        )
    if any(p.grad is not None and p.grad.any() for p in model.parameters()):
        raise Wrong("it leaves gradients behind, to which the next step would add")
    _judge_weights(model, before, x, y)
    model, optimizer, scaler, x, y = _job(overflow=True)
    before = copy.deepcopy(model)
    call(function, model, optimizer, scaler, x, y, when="with an infinite gradient")
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        if not torch.equal(p, q):
            raise Wrong("an infinite gradient has reached the weights")
    if scaler.get_scale() >= 2.0**40:
        raise Wrong(
            "after an infinite gradient the scale is as large as before: call "
            "scaler.update() after each step, also after a skipped one"
        )
    if any(p.grad is not None and p.grad.any() for p in model.parameters()):
        raise Wrong("it leaves gradients behind when one of them is infinite")


def _judge_loss(loss, before, x, y, types) -> None:
    if not types:
        raise Wrong("it does not call model(x)")
    if types[0] != torch.float16:
        raise Wrong(f"model(x) ran in {types[0]}: use torch.autocast with float16")
    with torch.no_grad():
        right = cross_entropy(before(x), y).item()
    value = loss.item() if isinstance(loss, torch.Tensor) else loss
    if not isinstance(value, float) or abs(value - right) > 0.05 * right:
        raise Wrong(f"it returns {value}, and the loss is {right:.2f}")


def _judge_weights(model, before, x, y) -> None:
    """One step of SGD with clipped gradients, from float32, within rounding."""
    cross_entropy(before(x), y).backward()
    nn.utils.clip_grad_norm_(before.parameters(), 1.0)
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        if not torch.allclose(p, q - 0.1 * q.grad, atol=1e-3):
            raise Wrong("the weights are not those after one step with these gradients")


@exercise("06.3")
def rescuing_scale(power, model) -> None:
    """The exponent of the smallest scale that loses less than 3 % of the gradients."""
    if not isinstance(power, int):
        raise Wrong("the answer is an exponent, a whole number")
    if any(p.dtype != torch.float32 for p in model.parameters()):
        raise Wrong(
            "the model is no longer float32: .half() changes the model itself. Run the "
            "cell of the oracle again, and use copy.deepcopy(model).half()"
        )
    shares = lost_shares(model)
    right = next(i for i, share in enumerate(shares) if share < 0.03)
    if power == right:
        return
    if power == 2**right:
        raise Wrong("this is the scale; answer with its exponent")
    if not 0 <= power < len(shares):
        raise Wrong(f"look between 0 and {len(shares) - 1}")
    if power < right:
        raise Wrong(f"2**{power} still loses {shares[power]:.1%}")
    raise Wrong(f"2**{power} is enough, but 2**{power - 1} is, too")


def lost_shares(model: nn.Module, powers: int = 33) -> list[float]:
    """For the scales 2**0, 2**1, ...: which share of the gradients becomes 0."""
    data = digits()
    x, y = data.x[:256].cuda(), data.y[:256].cuda()

    def gradients(net, scale=1.0):
        scores = net(x.to(net[0].weight.dtype)).float()
        loss = cross_entropy(scores, y) / 2**14 * scale
        grads = torch.autograd.grad(loss, [*net.parameters()])
        return torch.cat([g.flatten() for g in grads])

    there = gradients(model) != 0
    half = copy.deepcopy(model).half()
    return [
        (gradients(half, 2.0**power)[there] == 0).float().mean().item()
        for power in range(powers)
    ]
