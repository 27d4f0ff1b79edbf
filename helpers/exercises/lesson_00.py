"""The exercises of lesson 00: copied bytes, and a tensor spread over GPUs."""

import torch

from helpers.exercises.counted import counted
from helpers.exercises.exercise import Wrong, call, exercise, solution
from helpers.exercises.results import equal, sequence, tensor

X, W = 2560 * 1024 * 4, 1024 * 1024 * 4  # bytes of each matrix


@exercise(
    "00.1",
    hints=(
        "The prediction under *Cost* counts the bytes for four GPUs. Which of its "
        "three terms changes with the number of GPUs, and which do not?",
        "Follow one GPU through `program`: the rows that it gets, the layer that it "
        "needs, and the result that goes back. Count bytes, not elements.",
    ),
)
def copied_bytes(answer) -> None:
    """Bytes that the four-line program copies with two GPUs."""
    right = 2 * X + 2 * W
    mistakes = {
        2 * X: "X goes there, W goes to each GPU, and the result comes back",
        2 * X + W: "every GPU needs its own copy of W",
        2 * X + 4 * W: "that is for four GPUs; this time there are two",
        right // 4: "that is the count of numbers; a float32 has 4 bytes",
    }
    why = "count X once, W once for each GPU, and the result once"
    counted(answer, right, mistakes, why, unit=1)


@solution("00.1")
def solution_1():
    """Rows are divided among the GPUs, and the layer is not.

    However many GPUs there are, each row of `X` goes to one of them, and each row of
    the result comes back once. But every row meets the whole of `W`, so every GPU
    needs its own copy of it.

    The copies of `W` are therefore the only part that grows with the number of GPUs.
    """
    gpus = 2
    bytes_per_element = 4  # float32
    bytes_of_x = 2560 * 1024 * bytes_per_element
    bytes_of_w = 1024 * 1024 * bytes_per_element
    bytes_of_result = bytes_of_x
    answer = bytes_of_x + gpus * bytes_of_w + bytes_of_result
    return answer


@exercise(
    "00.2",
    hints=(
        "Two methods cut the rows of a tensor, `chunk` and `tensor_split`. What does "
        "each of them return for 5 rows and `n = 4`?",
        "The pieces of a tensor are still on the device of that tensor. Which call "
        "gives you piece `i` on GPU `i`, and where do you keep what the call returns?",
    ),
)
def spread(function) -> None:
    """A function (x, n) -> n pieces of x, piece i on GPU i."""
    for rows, number in ((8, 4), (6, 2), (5, 3), (5, 4)):
        x = torch.arange(rows * 2.0).reshape(rows, 2)
        pieces = sequence(call(function, x, number), "return a list of pieces")
        if len(pieces) != number:
            raise Wrong(f"{number} GPUs need {number} pieces, not {len(pieces)}")
        for i, piece in enumerate(pieces):
            if tensor(piece, f"piece {i} is").device != torch.device("cuda", i):
                raise Wrong(f"piece {i} is on {piece.device}, not on cuda:{i}")
        alike = all(piece.shape[1:] == x.shape[1:] for piece in pieces)
        if not alike or not equal(torch.cat([p.cpu() for p in pieces]), x):
            raise Wrong(f"the pieces of {rows} rows put together are not x")


@solution("00.2")
def solution_2():
    """Cut the rows first, then move each piece.

    `tensor_split(n)` always returns `n` pieces, whose sizes differ by one row at most.
    `chunk(n)` rounds the size of a piece up instead, so 5 rows in 4 chunks become 2, 2
    and 1, and the last GPU gets nothing.

    The pieces are views of `x`, on the device of `x`. `to` returns a copy on the GPU,
    and the copy is what belongs in the list.
    """

    def spread(x, n):
        pieces = []
        for index, piece in enumerate(x.tensor_split(n)):
            pieces.append(piece.to(f"cuda:{index}"))
        return pieces

    return spread


# -- answers ---------------------------------------------------------------------------


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
    "copied_bytes": [2 * X + 2 * W],
    "spread": [in_turn],
}
WRONG = {
    "copied_bytes": [
        (2 * X, "W goes to each GPU"),
        (2 * X + W, "its own copy of W"),
        (2 * X + 4 * W, "there are two"),
        ((2 * X + 2 * W) // 4, "a float32 has 4 bytes"),
        (17, "count X once"),
        ("many", "give a number"),
    ],
    "spread": [
        (all_on_the_first, "not on cuda:1"),
        (too_few, "need 4 pieces"),
        (chunked, "need 4 pieces, not 3"),
        (not_moved, "is on cpu"),
        (rest_dropped, "put together"),
        (raises, "AcceleratorError"),
        (lambda x, n: list(torch.zeros(n)), "is on cpu"),
    ],
}
