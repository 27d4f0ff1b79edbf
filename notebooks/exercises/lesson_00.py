"""The exercises of lesson 00: copied bytes, pieces on GPUs, the best number of GPUs."""

import torch

from exercises.counted import counted, number
from exercises.exercise import Wrong, call, exercise, solution
from exercises.results import equal, sequence, tensor

IMAGES = 16384 * 64 * 4  # bytes
SCORES = 16384 * 10 * 4
PARAMETERS = 64 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 10 + 10
MODEL = PARAMETERS * 4


@exercise(
    "00.1",
    hints=(
        "The formula under *Predict the copies* has three terms. Which of them "
        "changes with the number of GPUs, and which do not?",
        "Follow one GPU through `score`: the images that it gets, the model that it "
        "needs, and the scores that go back. Count bytes, not elements.",
    ),
)
def copied_bytes(answer) -> None:
    """Bytes that the lesson's `score` copies with two GPUs."""
    right = IMAGES + 2 * MODEL + SCORES
    mistakes = {
        IMAGES + SCORES: "the model goes to each GPU, too",
        IMAGES + 2 * MODEL: "the scores come back to the CPU",
        IMAGES + MODEL + SCORES: "every GPU needs its own copy of the model",
        IMAGES + 4 * MODEL + SCORES: "that is for four GPUs; this time there are two",
        2 * right: "a GPU gets only its part of the images",
        2 * (IMAGES + MODEL + SCORES): "a GPU gets only its part of the images",
        right // 4: "that is the count of numbers; a float32 has 4 bytes",
    }
    why = "count the images once, the model once for each GPU, and the scores once"
    counted(answer, right, mistakes, why, unit=1)


@solution("00.1")
def solution_1():
    """Images are divided among the GPUs, and the model is not.

    However many GPUs there are, each image goes to one of them, and its ten scores come
    back once. Every GPU needs a copy of the full model, so only the model's term grows
    with the number of GPUs. In the lesson, one line is enough:
    `answer = 4 * (N * 64 + 2 * P + N * 10)`.
    """
    parameters = 1_126_410  # P in the lesson
    answer = 4 * (16384 * 64 + 2 * parameters + 16384 * 10)
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
    for rows, gpus in ((8, 4), (6, 2), (5, 3), (5, 4)):
        x = torch.arange(rows * 2.0).reshape(rows, 2)
        pieces = sequence(call(function, x, gpus), "return a list of pieces")
        if len(pieces) != gpus:
            raise Wrong(f"{gpus} GPUs need {gpus} pieces, not {len(pieces)}")
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


# The seconds of a model's copy, of computing, the GPUs, and the best number of them
RACES = (
    (0.4, 11.0, 8, 5),
    (0.4, 11.0, 4, 4),
    (1.0, 0.5, 8, 1),
    (0.0, 3.0, 6, 6),
    (1.0, 9.0, 16, 3),
    (3.0, 20.0, 8, 3),
    (1.0, 6.1, 8, 3),
)


@exercise(
    "00.3",
    hints=(
        "Write T(g) with the two numbers that you get: what grows with g, and what "
        "shrinks? Then compute it for 1 GPU, 2 GPUs, 3 GPUs ...",
        "A loop over `range(1, gpus + 1)` tries every number of GPUs. Remember the "
        "smallest time so far, and the number that gave it.",
    ),
)
def best_number(function) -> None:
    """A function (seconds of a model's copy, of computing, GPUs) -> how many to use."""
    for model, compute, gpus, best in RACES:
        found = number(call(function, model, compute, gpus), "the function returns")
        about = f"with {model} s to copy, {compute} s to compute and {gpus} GPUs"
        if found == best:
            continue
        if abs(found - (best * model + compute / best)) < 1e-9:
            raise Wrong("that is the time; return the number of GPUs")
        if found != int(found) or not 1 <= found <= gpus:
            raise Wrong(f"{about} it returns {found}, not a number from 1 to {gpus}")

        def seconds(count, model=model, compute=compute):
            return count * model + compute / count

        took = f"{found} take {seconds(found):.2f} s, but {best} take"
        raise Wrong(f"{about}, {took} {seconds(best):.2f} s")


@solution("00.3")
def solution_3():
    """Copying grows with the number of GPUs, and computing shrinks.

    T(g) = g * model_seconds + compute_seconds / g. The loop tries every number of GPUs
    that the machine has and keeps the best one.

    The formula alone gives the best number near the square root of compute_seconds /
    model_seconds. A machine may have fewer GPUs, and their number must be whole, so
    trying is safer.
    """

    def best_number(model_seconds, compute_seconds, gpus):
        best = 1
        best_time = model_seconds + compute_seconds
        for count in range(2, gpus + 1):
            time = count * model_seconds + compute_seconds / count
            if time < best_time:
                best = count
                best_time = time
        return best

    return best_number
