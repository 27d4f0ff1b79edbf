"""Answers to the exercises of lesson 00: right ones, and wrong ones with the reason."""

import torch

X, W = 2048 * 1024 * 4, 1024 * 1024 * 4  # bytes


def in_turn(x, n):
    return [piece.to(f"cuda:{i}") for i, piece in enumerate(x.tensor_split(n))]


def all_on_the_first(x, n):
    return [piece.to("cuda") for piece in x.tensor_split(n)]


def too_few(x, n):
    return [piece.to(i) for i, piece in enumerate(x.chunk(n - 1))]


def chunked(x, n):
    return [piece.to(i) for i, piece in enumerate(x.chunk(n))]


def not_moved(x, n):
    return x.tensor_split(n)


def rest_dropped(x, n):
    rows = len(x) // n
    return [x[rows * i : rows * (i + 1)].to(i) for i in range(n)]


def raises(x, n):
    return [x.to(n)]


RIGHT = {
    "copied_bytes": [lambda: (2 * X + 2 * W,)],
    "spread": [lambda: (in_turn,)],
}
WRONG = {
    "copied_bytes": [
        (lambda: (2 * X,), "W goes to each GPU"),
        (lambda: (2 * X + W,), "its own copy of W"),
        (lambda: (2 * X + 4 * W,), "there are two"),
        (lambda: ((2 * X + 2 * W) // 4,), "a float32 has 4 bytes"),
        (lambda: (17,), "count X once"),
        (lambda: ("many",), "count X once"),
    ],
    "spread": [
        (lambda: (all_on_the_first,), "not on cuda:1"),
        (lambda: (too_few,), "need 4 pieces"),
        (lambda: (chunked,), "need 4 pieces, not 3"),
        (lambda: (not_moved,), "is on cpu"),
        (lambda: (rest_dropped,), "put together"),
        (lambda: (raises,), "AcceleratorError"),
        (lambda: (lambda x, n: list(torch.zeros(n)),), "is on cpu"),
    ],
}
