"""Answers to the exercises of lesson 26: right ones, and planted wrong ones."""

import math

import numpy as np
import torch
import torch.nn.functional as F

from exercises.lesson_26 import STATES_ALONE, in_parts


def gpus(trained, frozen, room):
    return -(-(16 * trained + 4 * frozen) // int(room))


def by_hand(x, weight, targets, parts):
    """Another right way: each part is an autograd function of its own."""

    class Part(torch.autograd.Function):
        @staticmethod
        def forward(ctx, some, matrix, right):
            ctx.save_for_backward(some, matrix, right)
            logits = some @ matrix.T
            return F.cross_entropy(logits, right, reduction="sum")

        @staticmethod
        def backward(ctx, gradient):
            some, matrix, right = ctx.saved_tensors
            scores = (some @ matrix.T).softmax(-1)
            scores[torch.arange(len(right)), right] -= 1
            scores *= gradient
            return scores @ matrix, scores.T @ some, None

    pieces = zip(x.chunk(parts), targets.chunk(parts), strict=True)
    losses = [Part.apply(some, weight, right) for some, right in pieces]
    return torch.stack(losses).sum() / len(targets)


RIGHT = {
    "gpus_for_states": [
        gpus,
        lambda p, q, room: float(math.ceil(p * 16 / room + q * 4 / room)),
    ],
    "machines_needed": [(np.int64(4), torch.tensor(6)), (float(4), np.float32(6))],
    "loss_in_parts": [in_parts(), by_hand],
}

WRONG = {
    "gpus_for_states": [
        (lambda p, q, room: (16 * p + 4 * q) / room, "round up"),
        (lambda p, q, room: (16 * p + 4 * q) // room, "larger than the room"),
        (lambda p, q, room: math.ceil(16 * p / room), "are there, too"),
        (lambda p, q, room: gpus(p + q, 0, room), "neither a gradient"),
        (lambda p, q, room: gpus(p, 2 * q, room), "needs no gradient"),
        (lambda p, q, room: gpus(p, q / 2, room), "in float32, too"),
        (lambda p, q, room: gpus(0, p + q, room), "the parameters alone"),
        (lambda p, q, room: gpus(p * 12 / 16, q, room), "4 + 4 + 8 bytes"),
        (lambda p, q, room: gpus(p / 2, q, room), "two numbers"),
        (lambda p, q, room: gpus(p, 0, room) + gpus(0, q, room), "round up once"),
        (lambda p, q, room: room / (16 * p + 4 * q), "upside down"),
        (lambda p, q, room: 64, "room of one GPU"),
        (lambda p, q, room: "19", "not '19'"),
    ],
    "machines_needed": [
        ((STATES_ALONE, 6), "the states alone would fit"),
        ((32, 48), "of eight GPUs each"),
        ((5, 6), "fewer are as well"),
        ((4, 4), "three times the activations"),
        ((3.5, 6), "round up"),
        (("4", 6), "give a number, not '"),
        ((True, 6), "not a bool"),
        ((0, 6), "at least one machine"),
        ((4, math.nan), "not nan"),
        ((torch.ones(2), 6), "not a Tensor"),
    ],
    "loss_in_parts": [
        (in_parts(again=False), "its peak is"),
        (lambda x, w, t, parts: F.cross_entropy(x @ w.T, t), "its peak is"),
        (in_parts(divisor="one"), "the sum of all losses"),
        (in_parts("mean", divisor="one"), "the sum of the parts' means"),
        (in_parts("mean", divisor="parts"), "must not weigh the same"),
        (lambda x, w, t, parts: in_parts()(x.detach(), w, t, parts), "x gets no"),
        (lambda x, w, t, parts: in_parts()(x, w.detach(), t, parts), "weight gets"),
        (lambda x, w, t, parts: 2.5 * in_parts()(x, w, t, parts), "in one part"),
        (lambda x, w, t, parts: in_parts()(x, w, t, parts).item(), "not a tensor"),
    ],
}
