"""The exercises of lesson 09: lost gradients, what is held, a clipped step."""

import copy

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from exercises.counted import counted, is_near, number
from exercises.exercise import Wrong, call, exercise, solution
from exercises.learning import weights
from exercises.results import equal
from helpers import digits


@exercise(
    "09.1",
    hints=(
        "In which order does a step do it: first the scale, or first the rounding to "
        "float16? And which gradients can be lost at all?",
        "`there = gradients[gradients != 0]` leaves out those that were 0 before. "
        "`.half()` rounds, and the mean of `(... == 0).float()` is a share.",
    ),
)
def share_lost(function) -> None:
    """A function (float32 gradients, scale) -> the share that float16 makes 0."""
    gradients = _gradients()
    there = gradients[gradients != 0]
    for scale in (1.0, 16.0):
        found = float(number(call(function, gradients.clone(), scale), "the share"))
        scaled = there * scale
        right = _share(scaled.half() == 0)
        mistakes = {
            _share((gradients * scale).half() == 0):
                "gradients that were 0 before cannot be lost; leave them out",
            _share(there.half() * scale == 0):
                "scale first, then round: what is 0 stays 0",
            _share(scaled.half() != 0): "this is the share of those that are kept",
            _share(scaled.abs() < torch.finfo(torch.float16).tiny):
                "below tiny float16 loses digits; 0 comes only far below: many "
                "gradients are smaller than tiny and not 0",
            _share(scaled.bfloat16() == 0): "round to float16, with .half()",
            _share(gradients * scale == 0): "nothing is rounded; call .half()",
        }  # fmt: skip
        if not 0 <= found <= 1:
            raise Wrong(f"{found:g} is no share between 0 and 1")
        if is_near(found, right, 1e-5):
            continue
        for wrong, why in mistakes.items():
            if abs(found - wrong) < 1e-5:
                raise Wrong(why)
        raise Wrong(f"with a scale of {scale:g} it says {found:.3f}, not {right:.3f}")


def _gradients() -> torch.Tensor:
    """Of many sizes, and a tenth of them 0."""
    generator = torch.Generator().manual_seed(0)
    powers = -40 + 34 * torch.rand(4000, generator=generator)
    powers[:100] = -140.0
    gradients = 2.0**powers
    gradients[::2] *= -1
    gradients[-400:] = 0
    return gradients


def _share(flags: torch.Tensor) -> float:
    return flags.float().mean().item()


@solution("09.1")
def solution_1():
    """Scale, round, and count the zeros among those that were not 0.

    The multiplication happens in float32 here, as in the scaled loss. `.half()` rounds.
    A gradient that was 0 before has nothing to lose, so it is left out.
    """

    def share_lost(gradients, scale):
        there = gradients[gradients != 0]
        rounded = (there * scale).half()
        return (rounded == 0).float().mean().item()

    return share_lost


# weights, bytes that float32 keeps, and whether a LayerNorm is before each ReLU
_PLANS = ((100e6, 6e9, False), (100e6, 6e9, True), (1e9, 1e9, False))


@exercise(
    "09.2",
    hints=(
        "The table under *How much memory?* has a row for each thing that fills a GPU. "
        "Which rows count at this moment, and which of them does mixed precision "
        "change?",
        "The weights and Adam's two numbers for each weight stay in float32, and casts "
        "come on top. For activations, add up the columns of the second table: what "
        "becomes of 8 bytes with a LayerNorm, and of 4 without one?",
    ),
)
def held_after_forward(function) -> None:
    """A function (weights, activations, normed, mixed) -> bytes."""
    for weights_, kept, normed in _PLANS:
        for mixed in (False, True):
            found = call(function, weights_, kept, normed, mixed)
            norm = "LayerNorm, " if normed else ""
            kind = "mixed" if mixed else "float32"
            what = f"{weights_:.0e} weights, {norm}{kind}"
            _check_held(found, weights_, kept, normed, mixed, what)


def _check_held(found, count, kept, normed, mixed, what: str) -> None:
    always = 12 * count  # in float32: the weights, and Adam's two numbers for each
    if not mixed:
        mistakes = {
            always + kept - 8 * count:
                "Adam's state is missing: two numbers for each weight",
            always + kept - 4 * count: "Adam has two numbers for each weight",
            always + kept + 4 * count: "at this moment there are no gradients",
            always + kept * 10 / 8: "without autocast, LayerNorm makes no copy",
            always + kept + 2 * count: "in float32 nothing is cast",
        }  # fmt: skip
        why = "add up the weights, two numbers of Adam for each, and the activations"
        counted(found, always + kept, mistakes, why, what=what, near=0.005, unit=1)
        return
    halved = always + 2 * count + kept / 2
    more = always + 2 * count + kept * 10 / 8
    right = more if normed else halved
    mistakes = {
        (always + kept) / 2:
            "that is half of everything; the weights and Adam's state stay in float32",
        right - 2 * count: "the casts of the weights are missing",
        right - 4 * count: "the weights stay in float32; casts come on top",
        right + 4 * count: "at this moment there are no gradients",
        right + 2 * count: "a cast is 2 bytes a weight",
        always + 2 * count + kept:
            "autocast changes what the forward pass keeps: look at both tables",
        halved: "with LayerNorm nothing is halved: 8 bytes become 4 + 4 + 2",
        more: "without LayerNorm, what lies between matmuls is halved",
    }  # fmt: skip
    if number(found, what) == always + kept:
        raise Wrong(f"{what}: this is what float32 holds")
    why = "add up weights, Adam's state, casts and activations"
    counted(found, right, mistakes, why, what=what, near=0.005, unit=1)


@solution("09.2")
def solution_2():
    """Only the activations can become smaller, and only some of them.

    After the first step, Adam has two numbers for each weight. Right after the second
    forward pass there are no gradients. The weights and Adam's state are float32 in
    both ways: 12 bytes for each weight.

    Mixed precision adds a cast of 2 bytes for each weight. What lies between matmuls
    is halved. With a LayerNorm before each ReLU, 8 bytes become 10.

    So mixed precision holds less for 100 million weights and 6 GB without LayerNorm:
    4.4 GB in place of 7.2. With LayerNorm it holds 8.9 GB. And for a billion weights
    with a small batch, 1 GB, it holds 14.5 GB in place of 13: the casts are larger than
    what is saved.
    """

    def held(weights, activations, normed, mixed):
        always = 4 * weights + 8 * weights  # the weights, and Adam's state
        if not mixed:
            return always + activations
        casts = 2 * weights
        if normed:
            return always + casts + activations * 10 / 8
        return always + casts + activations / 2

    return held


class _Watch(torch.amp.GradScaler):
    """A scaler that notes what is asked of it, and the norms that it meets."""

    def __init__(self, model: nn.Module, scale: float):
        super().__init__("cuda", init_scale=scale)
        self.model = model
        self.calls: list[str] = []
        self.norms: dict[str, float] = {}

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
    scaler = _Watch(model, 2.0**40 if overflow else 2.0**12)
    data = digits()
    return model, optimizer, scaler, 8 * data.x[:64].cuda(), data.y[:64].cuda()


def _leaves_gradients(model: nn.Module) -> bool:
    return any(p.grad is not None and p.grad.any() for p in model.parameters())


@exercise(
    "09.3",
    hints=(
        "Begin with the program at the top of the lesson. At which "
        "place in it are the gradients complete, but not yet used by the optimizer?",
        "At that place the gradients are still multiplied by the scale, and "
        "`clip_grad_norm_` cannot know that. Which call divides them first, and do "
        "your last lines also run if the scaler skips the step?",
    ),
)
def clipped_step(function) -> None:
    """A function (model, optimizer, scaler, x, y) -> loss: one clipped step."""
    model, optimizer, scaler, x, y = _job(overflow=False)
    types = []
    hook = model[0].register_forward_hook(lambda *a: types.append(a[2].dtype))
    before = copy.deepcopy(model)
    loss = call(function, model, optimizer, scaler, x, y)
    hook.remove()
    _check_loss(loss, before, x, y, types)
    _check_calls(scaler)
    if _leaves_gradients(model):
        raise Wrong("it leaves gradients behind, to which the next step would add")
    cross_entropy(before(x), y).backward()
    clip_grad_norm_(before.parameters(), 1.0)
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        if not torch.allclose(p, q - 0.1 * q.grad, atol=1e-3):
            raise Wrong("the weights are not those after one step with these gradients")
    model, optimizer, scaler, x, y = _job(overflow=True)
    before = weights(model)
    call(function, model, optimizer, scaler, x, y, when="with an infinite gradient")
    if not equal(weights(model), before):
        raise Wrong("an infinite gradient has reached the weights")
    if scaler.get_scale() >= 2.0**40:
        raise Wrong(
            "after an infinite gradient the scale is as large as before: call "
            "scaler.update() after each step, also after a skipped one"
        )
    if _leaves_gradients(model):
        raise Wrong("it leaves gradients behind when one of them is infinite")


@solution("09.3")
def solution_3():
    """Clip gradients only after they have been divided by the scale.

    Forward pass and loss are inside of `autocast`, and `backward()` is outside. The
    loss is scaled, so after `backward()` all gradients are too large by the scale.
    `unscale_` divides them, and only then does a norm of 1 mean what it should.

    `scaler.step` knows that the gradients have been divided, and does not divide them
    again. If one of them is infinite it skips the step, so nothing infinite reaches the
    weights. `scaler.update` then makes the scale smaller. Both `update` and
    `zero_grad` must run in a skipped step as well, so neither depends on a condition.
    """

    def clipped_step(model, optimizer, scaler, x, y):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return clipped_step


def _check_loss(loss, before, x, y, types) -> None:
    if not types:
        raise Wrong("it does not call model(x)")
    if types[0] != torch.float16:
        raise Wrong(f"model(x) ran in {types[0]}: use torch.autocast with float16")
    with torch.no_grad():
        right = cross_entropy(before(x), y).item()
    value = number(loss, "the loss")
    if not is_near(value, right, 0.05):
        raise Wrong(f"it returns {value}, and the loss is {right:.2f}")


def _check_calls(scaler: _Watch) -> None:
    """The scaler was used for all it is for, in order."""
    calls = scaler.calls
    if "scale" not in calls:
        raise Wrong(
            "the loss is not scaled by the scaler that it is given: "
            "scaler.scale(loss).backward()"
        )
    if "step" not in calls:
        raise Wrong(
            "call scaler.step(optimizer), which can skip a step; optimizer.step() "
            "cannot"
        )
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
    norm = scaler.norms["step"]
    if norm > 1.01:
        raise Wrong(f"the norm was {norm:.2f} when scaler.step came: clip to 1 first")
    if norm < 0.9:
        raise Wrong(
            f"clip to a norm of 1, not {norm:.2g}; or the loss that goes backward is "
            "not the scaled one"
        )
