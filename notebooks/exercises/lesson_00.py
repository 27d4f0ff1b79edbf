"""The exercises of lesson 00: copied bytes, pieces on GPUs, many batches."""

import copy

import torch
from torch import nn

from exercises.counted import counted
from exercises.exercise import Wrong, call, exercise, solution
from exercises.results import equal, near, sequence, tensor
from helpers.gpus import Copy, count_copies

IMAGES = 16384 * 64 * 4  # bytes
SCORES = 16384 * 10 * 4
LABELS = 16384 * 8  # int64
PARAMETERS = 64 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 10 + 10
MODEL = PARAMETERS * 4


@exercise(
    "00.1",
    hints=(
        "The formula under *Predict a race* has three terms. Which of them stay as "
        "they are, and which becomes another one?",
        "Follow one GPU: the images that it gets, the model that it needs, and what "
        "goes back for each image. Count bytes: a float32 has 4, an int64 has 8.",
    ),
)
def copied_bytes(answer) -> None:
    """Bytes that two GPUs copy if only the labels come back."""
    right = IMAGES + 2 * MODEL + LABELS
    mistakes = {
        IMAGES
        + 2 * MODEL
        + SCORES: "one label comes back for an image, not ten scores",
        IMAGES + 2 * MODEL + LABELS // 2: "a label is an int64, of 8 bytes",
        IMAGES + 2 * MODEL + 10 * LABELS: "one label comes back for an image, not ten",
        IMAGES + LABELS: "the model goes to each GPU, too",
        IMAGES + 2 * MODEL: "the labels come back to the CPU",
        IMAGES + MODEL + LABELS: "every GPU needs its own copy of the model",
        IMAGES + 4 * MODEL + LABELS: "that is for four GPUs; this time there are two",
        2 * (IMAGES + MODEL + LABELS): "a GPU gets only its part of the images",
        (IMAGES + 2 * MODEL) // 4 + LABELS: "a float32 has 4 bytes",
        (IMAGES + 2 * MODEL) // 4 + LABELS // 8: "count bytes, not numbers",
    }
    why = "count the images once, the model once for each GPU, and the labels once"
    counted(answer, right, mistakes, why, unit=1)


@solution("00.1")
def solution_1():
    """Images and labels are divided among the GPUs, and the model is not.

    Each image goes to one GPU, and one label of 8 bytes comes back instead of ten
    scores of 4 bytes. That is a fifth of the bytes. Only the model's term grows with
    the number of GPUs. In the lesson, one line is enough:
    `answer = 4 * (N * 64 + 2 * P) + 8 * N`.

    Send back what you need, not all that you have: for a language model, a row of
    scores has a number for each word that it knows.
    """
    parameters = 1_126_410  # P in the lesson
    answer = 4 * (16384 * 64 + 2 * parameters) + 8 * 16384
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


ROWS = 5, 5, 5, 5, 5, 5, 2  # of the batches


def _model() -> nn.Module:
    """Tensors of 96 and 12 bytes; a batch of 5 rows has 160, its scores have 60."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Linear(8, 3)


@exercise(
    "00.3",
    hints=(
        "Make the replicas before the loop, with `deepcopy`. Which line of the loop "
        "lets the host wait until a GPU is done? It must not come right after the "
        "batch was scored.",
        "Keep the scores that are still on the GPUs in a list, the oldest first. Once "
        "the list has an entry for each GPU, the oldest is on the GPU that gets the "
        "next batch: fetch it first. What is left in the list after the loop?",
    ),
)
def score_batches(function) -> None:
    """A function (model, batches, gpus) -> all scores in order, on the CPU."""
    generator = torch.Generator().manual_seed(4)
    for rows, count in ((ROWS, 3), (ROWS[-2:], 3), (ROWS, 1)):
        gpus = [f"cuda:{index}" for index in range(count)]
        batches = [torch.randn(n, 8, generator=generator) for n in rows]
        model = _model()
        with count_copies() as copies:
            scores = call(function, model, batches, gpus)
        if next(model.parameters()).device.type != "cpu":
            raise Wrong("this moves the model itself; give each GPU a deepcopy of it")
        with torch.no_grad():
            expected = model(torch.cat(batches))
        if tensor(scores, "it returns").device.type != "cpu":
            raise Wrong(f"the scores are on {scores.device}; fetch them with .cpu()")
        if scores.shape != expected.shape:
            shapes = f"{tuple(scores.shape)}, not {tuple(expected.shape)}"
            raise Wrong(f"the scores of {len(rows)} batches are {shapes}")
        if not near(scores.detach(), expected, atol=1e-5):
            raise Wrong("the scores are not those of the batches, in their order")
        if scores.requires_grad:
            raise Wrong("use torch.no_grad(): else each GPU keeps what backward needs")
        _check_order(copies, count, len(rows))


def _check_order(copies: list[Copy], gpus: int, batches: int) -> None:
    """Each model travels once, all GPUs have work at once, and none has two batches."""
    sent, fetched = [0] * gpus, [0] * gpus
    weights = [copied for copied in copies if copied.nbytes == 96]
    if len(weights) > gpus:
        raise Wrong(f"the weight travels {len(weights)} times to {gpus} GPUs")
    for copied in copies:
        if copied.source != "cpu":
            index = int(copied.source[-1])
            if 0 in sent[: min(gpus, batches)]:
                raise Wrong(
                    f"cuda:{index} must give its scores back while cuda:"
                    f"{sent.index(0)} has no batch yet: .cpu() makes the host wait, "
                    "so the GPUs work one after the other"
                )
            fetched[index] += 1
        elif copied.nbytes in (160, 64):
            index = int(copied.target[-1])
            sent[index] += 1
            if sent[index] > fetched[index] + 1:
                raise Wrong(
                    f"cuda:{index} gets its batch number {sent[index]} while scores of "
                    "an earlier one are still there; many batches would fill its memory"
                )


@solution("00.3")
def solution_3():
    """Fetch the oldest scores, and only then send the next batch to that GPU.

    `.cpu()` waits for all work in the queue of its GPU. Right after the call of the
    replica, the host would wait, and the other GPUs would have nothing to do. Here, the
    scores stay on their GPU until it is that GPU's turn again. By then, all others have
    work, and the host waits only for the oldest.

    The list never has more entries than there are GPUs, so the memory that the scores
    take does not grow with the number of batches. `score_all.py`, at the end of the
    lesson, works in this way.
    """

    @torch.no_grad()
    def score_batches(model, batches, gpus):
        replicas = [copy.deepcopy(model).to(gpu) for gpu in gpus]
        on_gpus, scores = [], []
        for number, batch in enumerate(batches):
            turn = number % len(gpus)
            if len(on_gpus) == len(gpus):
                scores.append(on_gpus.pop(0).cpu())
            on_gpus.append(replicas[turn](batch.to(gpus[turn])))
        for last in on_gpus:
            scores.append(last.cpu())
        return torch.cat(scores)

    return score_batches
