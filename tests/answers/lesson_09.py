"""Answers to the exercises of lesson 09: right ones, and planted wrong ones."""

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_


def forward(model, x, y, enabled=True):
    with torch.autocast("cuda", dtype=torch.float16, enabled=enabled):
        return cross_entropy(model(x), y)


def with_upcast(model, optimizer, scaler, x, y):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = cross_entropy(model(x).float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm=1)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=False)
    return loss.item()


def in_order(*lines, amp=True, norm=1.0, leave=False, of_loss=lambda loss: loss):
    """A step whose lines after the loss come in this order.

    Args:
        lines: their names.
        amp: whether the forward pass is under autocast.
        norm: to clip to.
        leave: the gradients, for the next step to find.
        of_loss: what is made of the loss, or of the scaled loss, before `backward()`.
    """

    def step(model, optimizer, scaler, x, y):
        loss = forward(model, x, y, amp)
        actions = {
            "scale": lambda: of_loss(scaler.scale(loss)).backward(),
            "scale only": lambda: scaler.scale(loss),
            "backward": lambda: loss.backward(),
            "unscale": lambda: scaler.unscale_(optimizer),
            "clip": lambda: clip_grad_norm_(model.parameters(), norm),
            "step": lambda: scaler.step(optimizer),
            "optimizer": lambda: optimizer.step(),
            "update": lambda: scaler.update(),
        }
        for line in lines:
            actions[line]()
        if not leave:
            optimizer.zero_grad()
        return loss

    return step


WHOLE = ("scale", "unscale", "clip", "step", "update")
right_step = in_order(*WHOLE)


def only_if_finite(*lines):
    """Leaves out these lines when a gradient is infinite."""

    def step(model, optimizer, scaler, x, y):
        loss = forward(model, x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        finite = clip_grad_norm_(model.parameters(), 1.0).isfinite()
        if finite or "step" not in lines:
            scaler.step(optimizer)
        if finite or "update" not in lines:
            scaler.update()
        if finite or "zero_grad" not in lines:
            optimizer.zero_grad()
        return loss

    return step


def repairs_inf(model, optimizer, scaler, x, y):
    loss = right_step(model, optimizer, scaler, x, y)
    if scaler.get_scale() > 2**30:  # "so that no step is lost"
        loss.detach()
        with torch.no_grad():
            model[0].weight.add_(1e-3)
    return loss


def lost(gradients, scale):
    there = gradients[gradients != 0]
    return ((there * scale).half() == 0).float().mean()


def lost_counted(gradients, scale):
    zeros = (gradients != 0) & ((gradients * scale).half() == 0)
    return zeros.sum().item() / (gradients != 0).sum().item()


def of_all(gradients, scale):
    return ((gradients * scale).half() == 0).float().mean()


def rounded_first(gradients, scale):
    there = gradients[gradients != 0]
    return (there.half() * scale == 0).float().mean()


def never_rounded(gradients, scale):
    return (gradients * scale == 0).float().mean()


def kept(gradients, scale):
    return 1 - lost(gradients, scale)


def in_bfloat16(gradients, scale):
    there = gradients[gradients != 0]
    return ((there * scale).bfloat16() == 0).float().mean()


def below_tiny(gradients, scale):
    there = gradients[gradients != 0].abs() * scale
    return (there < torch.finfo(torch.float16).tiny).float().mean()


def held(masters=4, adam=8, gradients=0, cast=2, halved=1 / 2, normed_to=10 / 8):
    """Counts these bytes for each weight, and these shares of what is kept."""

    def answer(weights, activations, normed, mixed):
        always = (masters + adam + gradients) * weights
        if not mixed:
            return always + activations
        share = normed_to if normed else halved
        return always + cast * weights + share * activations

    return answer


def in_units_of(size):
    return lambda *plan: held()(*plan) / size


def float32_held(weights, activations, normed, mixed):
    return 12 * weights + activations


def half_of_all(weights, activations, normed, mixed):
    return float32_held(weights, activations, normed, mixed) / (2 if mixed else 1)


def norm_always_copies(weights, activations, normed, mixed):
    kept = activations * 10 / 8 if normed and not mixed else activations
    return 12 * weights + kept if not mixed else held()(weights, kept, normed, mixed)


def casts_always(weights, activations, normed, mixed):
    return 2 * weights * (not mixed) + held()(weights, activations, normed, mixed)


def no_masters_in_mixed(weights, activations, normed, mixed):
    return held()(weights, activations, normed, mixed) - 4 * weights * mixed


RIGHT = {
    "share_lost": [lost, lost_counted],
    "held_after_forward": [held()],
    "clipped_step": [right_step, with_upcast],
}

WRONG = {
    "share_lost": [
        (of_all, "were 0 before"),
        (rounded_first, "scale first"),
        (never_rounded, "nothing is rounded"),
        (kept, "that are kept"),
        (in_bfloat16, "round to float16"),
        (below_tiny, "smaller than tiny"),
        (lambda gradients, scale: 2.0, "no share"),
    ],
    "held_after_forward": [
        (half_of_all, "half of everything"),
        (held(cast=0), "casts of the weights are missing"),
        (no_masters_in_mixed, "the weights stay in float32"),
        (in_units_of(2**30), "these are GiB"),
        (in_units_of(10**9), "these are GB"),
        (held(halved=1), "look at both tables"),
        (float32_held, "this is what float32 holds"),
        (held(gradients=4), "no gradients"),
        (held(cast=4), "2 bytes a weight"),
        (held(adam=0), "Adam's state is missing"),
        (held(adam=4), "Adam has two numbers for each"),
        (held(normed_to=1 / 2), "with LayerNorm nothing is halved"),
        (held(normed_to=1), "look at both tables"),
        (held(halved=10 / 8), "without LayerNorm, what lies"),
        (norm_always_copies, "without autocast, LayerNorm makes no copy"),
        (casts_always, "in float32 nothing is cast"),
        (lambda *plan: 1, "add up"),
        (lambda *plan: "7.2", "give a number, not '7.2'"),
    ],
    "clipped_step": [
        (in_order("scale", "clip", "step", "update"), "unscale_ first"),
        (in_order("scale", "clip", "unscale", "step", "update"),
         "clip after it"),
        (in_order("scale", "unscale", "step", "clip", "update"),
         "clip to 1 first"),
        (in_order("scale", "unscale", "clip", "step"), "update() is miss"),
        (in_order("backward", "clip", "optimizer"),
         "not scaled by the scaler that it is given"),
        (in_order("scale", "unscale", "clip", "optimizer", "update"),
         "which can skip"),
        (in_order(*WHOLE, amp=False), "ran in torch.float32"),
        (in_order(*WHOLE, norm=0.1), "clip to a norm of 1"),
        (in_order(*WHOLE, leave=True), "leaves gradients behind"),
        (in_order("scale", "update", "unscale", "clip", "step"), "code"),
        (in_order("unscale", "scale", "clip", "step", "update"),
         "after backward()"),
        (only_if_finite("step", "update"), "as large as before"),
        (only_if_finite("step", "update", "zero_grad"), "as large as before"),
        (only_if_finite("zero_grad"), "leaves gradients behind when"),
        (in_order("scale only", "backward", *WHOLE[1:]), "is not the scaled one"),
        (in_order(*WHOLE, of_loss=lambda loss: loss / 100), "clip to a norm of 1"),
        (in_order(*WHOLE, of_loss=lambda loss: -loss), "not those after one step"),
        (repairs_inf, "reached the weights"),
        (lambda *args: 0.0, "does not call model(x)"),
        (lambda model, optimizer, scaler, x, y:
                  right_step(model, optimizer, scaler, x, y) * 0, "the loss is"),
    ],
}  # fmt: skip
