"""Answers to the exercises of lesson 06: right ones, and wrong ones with the reason."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from helpers import digits
from helpers.judges.lesson_06 import lost_shares


def forward(model, x, y, enabled=True):
    with torch.autocast("cuda", dtype=torch.float16, enabled=enabled):
        return cross_entropy(model(x), y)


def right_step(model, optimizer, scaler, x, y):
    optimizer.zero_grad()
    loss = forward(model, x, y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss


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


def in_order(*lines, amp=True, norm=1.0, leave=False):
    """A step whose lines after the loss come in this order."""

    def step(model, optimizer, scaler, x, y):
        loss = forward(model, x, y, amp)
        actions = {
            "scale": lambda: scaler.scale(loss).backward(),
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


def only_if_finite(also_zero):
    """Leaves out more than the step when a gradient is infinite."""

    def step(model, optimizer, scaler, x, y):
        loss = forward(model, x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        if norm.isfinite():
            scaler.step(optimizer)
            scaler.update()
        if norm.isfinite() or also_zero:
            optimizer.zero_grad()
        return loss

    return step


def keeps_infinite(model, optimizer, scaler, x, y):
    loss = forward(model, x, y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if norm.isfinite():
        optimizer.zero_grad()
    return loss


def own_scaler(model, optimizer, scaler, x, y):
    return right_step(model, optimizer, torch.amp.GradScaler("cuda"), x, y)


def throws_away(model, optimizer, scaler, x, y):
    scaler.scale(forward(model, x, y))
    return in_order("backward", "unscale", "clip", "step", "update")(
        model, optimizer, scaler, x, y
    )


def divides_twice(model, optimizer, scaler, x, y):
    loss = forward(model, x, y)
    (scaler.scale(loss) / 100).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss


def turns_back(model, optimizer, scaler, x, y):
    loss = forward(model, x, y)
    scaler.scale(-loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss


def repairs_inf(model, optimizer, scaler, x, y):
    loss = right_step(model, optimizer, scaler, x, y)
    if scaler.get_scale() > 2**30:  # "so that no step is lost"
        loss.detach()
        with torch.no_grad():
            model[0].weight.add_(1e-3)
    return loss


def trained():
    data = digits()
    x, y = data.x.cuda(), data.y.cuda()
    torch.manual_seed(0)
    layers = nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()
    model = nn.Sequential(*layers, nn.Linear(64, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(30):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def scale(more=0, exponent=True):
    """The arguments of exercise 3, with the right exponent plus `more`."""
    model = trained()
    shares = lost_shares(model)
    power = next(i for i, share in enumerate(shares) if share < 0.03)
    return (power + more if exponent else 2**power), model


RIGHT = {
    "held_after_forward": [lambda: (7.2, 4.4), lambda: (7.2, 4.401)],
    "clipped_step": [lambda: (right_step,), lambda: (with_upcast,)],
    "rescuing_scale": [lambda: scale()],
}
WRONG = {
    "held_after_forward": [
        (lambda: (7.2, 3.6), "half of everything"),
        (lambda: (7.2, 4.2), "casts of the weights are missing"),
        (lambda: (7.2, 4.0), "masters stay in float32, and so does Adam's"),
        (lambda: (7.2e9 / 2**30, 4.4e9 / 2**30), "float32: these are GiB"),
        (lambda: (7.2, 7.4), "float16: half"),
        (lambda: (7.2, 4.8), "no gradients"),
        (lambda: (7.2, 4.6), "2 bytes a weight"),
        (lambda: (6.4, 4.4), "Adam's state is missing"),
        (lambda: (6.8, 4.4), "two numbers for each"),
        (lambda: (7.6, 4.4), "no gradients"),
        (lambda: (7.2e9, 4.4e9), "in GB"),
        (lambda: (1, 2), "add up"),
        (lambda: ("7.2", 4.4), "give a number, not '7.2'"),
    ],
    "clipped_step": [
        (lambda: (in_order("scale", "clip", "step", "update"),), "unscale_ first"),
        (lambda: (in_order("scale", "clip", "unscale", "step", "update"),),
         "clip after it"),
        (lambda: (in_order("scale", "unscale", "step", "clip", "update"),),
         "before it"),
        (lambda: (in_order("scale", "unscale", "clip", "step"),), "update() is miss"),
        (lambda: (in_order("backward", "clip", "optimizer"),), "not scaled"),
        (lambda: (in_order("scale", "unscale", "clip", "optimizer", "update"),),
         "which can skip"),
        (lambda: (in_order(*WHOLE, amp=False),), "ran in torch.float32"),
        (lambda: (in_order(*WHOLE, norm=0.1),), "clip to a norm of 1"),
        (lambda: (in_order(*WHOLE, leave=True),), "leaves gradients behind"),
        (lambda: (in_order("scale", "update", "unscale", "clip", "step"),), "code"),
        (lambda: (in_order("unscale", "scale", "clip", "step", "update"),),
         "after backward()"),
        (lambda: (only_if_finite(True),), "as large as before"),
        (lambda: (only_if_finite(False),), "as large as before"),
        (lambda: (keeps_infinite,), "leaves gradients behind when"),
        (lambda: (own_scaler,), "scaler that it is given"),
        (lambda: (throws_away,), "is not the scaled one"),
        (lambda: (divides_twice,), "clip to a norm of 1"),
        (lambda: (turns_back,), "not those after one step"),
        (lambda: (repairs_inf,), "reached the weights"),
        (lambda: (lambda *args: 0.0,), "does not call model(x)"),
        (lambda: (lambda model, optimizer, scaler, x, y:
                  right_step(model, optimizer, scaler, x, y) * 0,), "the loss is"),
    ],
    "rescuing_scale": [
        (lambda: scale(-1), "still loses"),
        (lambda: scale(1), "is, too"),
        (lambda: scale(exponent=False), "answer with its exponent"),
        (lambda: (8.5, trained()), "a whole number"),
        (lambda: (8, trained().half()), "no longer float32"),
        (lambda: (99, trained()), "look between"),
    ],
}  # fmt: skip
