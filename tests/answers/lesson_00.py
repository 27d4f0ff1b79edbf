"""Answers to the exercises of lesson 00: right ones, and planted wrong ones."""

import copy
from collections import deque

import torch

from exercises.lesson_00 import IMAGES, LABELS, MODEL, SCORES


def in_turn(x, n):
    return [piece.to(f"cuda:{i}") for i, piece in enumerate(x.tensor_split(n))]


def rest_dropped(x, n):
    rows = len(x) // n
    return [x[rows * i : rows * (i + 1)].to(i) for i in range(n)]


@torch.no_grad()
def oldest_first(model, batches, gpus):
    replicas = [copy.deepcopy(model).to(gpu) for gpu in gpus]
    on_gpus, scores = deque(), []
    for i, batch in enumerate(batches):
        if len(on_gpus) == len(gpus):
            scores.append(on_gpus.popleft().cpu())
        gpu = i % len(gpus)
        on_gpus.append(replicas[gpu](batch.to(gpus[gpu])))
    return torch.cat([*scores, *(part.cpu() for part in on_gpus)])


@torch.no_grad()
def in_rounds(model, batches, gpus):
    replicas = [copy.deepcopy(model).to(gpu) for gpu in gpus]
    scores = []
    for first in range(0, len(batches), len(gpus)):
        now = enumerate(batches[first : first + len(gpus)])
        found = [replicas[i](batch.to(gpus[i])) for i, batch in now]
        scores += [part.cpu() for part in found]
    return torch.cat(scores)


@torch.no_grad()
def only_those_that_get_a_batch(model, batches, gpus):
    return in_rounds(model, batches, gpus[: len(batches)])


def with_gradients(model, batches, gpus):
    with torch.enable_grad():
        return in_rounds.__wrapped__(model, batches, gpus)


@torch.no_grad()
def all_at_the_end(model, batches, gpus):
    replicas = [copy.deepcopy(model).to(gpu) for gpu in gpus]
    n = len(gpus)
    scores = [replicas[i % n](b.to(gpus[i % n])) for i, b in enumerate(batches)]
    return torch.cat([part.cpu() for part in scores])


@torch.no_grad()
def a_model_for_each_batch(model, batches, gpus):
    scores = []
    for i, batch in enumerate(batches):
        gpu = gpus[i % len(gpus)]
        scores.append(copy.deepcopy(model).to(gpu)(batch.to(gpu)))
        if len(scores) >= len(gpus):
            scores[1 - len(gpus) - 1] = scores[-len(gpus)].cpu()
    return torch.cat([part.cpu() for part in scores])


@torch.no_grad()
def by_gpu(model, batches, gpus):
    n = len(gpus)
    mine = [torch.cat(batches[i::n]) for i in range(n) if batches[i::n]]
    return oldest_first(model, mine, gpus)


@torch.no_grad()
def first_gpu_only(model, batches, gpus):
    return oldest_first(model, batches, gpus[:1])


@torch.no_grad()
def moves_the_model(model, batches, gpus):
    return torch.cat([model.to(gpus[0])(batch.to(gpus[0])).cpu() for batch in batches])


@torch.no_grad()
def left_on_the_gpu(model, batches, gpus):
    return oldest_first(model, batches, gpus).to(gpus[0])


RIGHT = {
    "copied_bytes": [IMAGES + 2 * MODEL + LABELS],
    "spread": [in_turn],
    "score_batches": [oldest_first, in_rounds, only_those_that_get_a_batch],
}

WRONG = {
    "copied_bytes": [
        (IMAGES + 2 * MODEL + SCORES, "not ten scores"),
        (IMAGES + 2 * MODEL + LABELS // 2, "of 8 bytes"),
        (IMAGES + 2 * MODEL + 10 * LABELS, "not ten"),
        (IMAGES + LABELS, "goes to each GPU"),
        (IMAGES + 2 * MODEL, "come back"),
        (IMAGES + MODEL + LABELS, "its own copy"),
        (IMAGES + 4 * MODEL + LABELS, "there are two"),
        (2 * (IMAGES + MODEL + LABELS), "only its part"),
        ((IMAGES + 2 * MODEL) // 4 + LABELS, "a float32 has 4 bytes"),
        ((IMAGES + 2 * MODEL) // 4 + LABELS // 8, "count bytes"),
        (17, "count the images once"),
        ("many", "give a number"),
    ],
    "spread": [
        (
            lambda x, n: [piece.to("cuda") for piece in x.tensor_split(n)],
            "not on cuda:1",
        ),
        (
            lambda x, n: [piece.to(i) for i, piece in enumerate(x.chunk(n))],
            "need 4 pieces, not 3",
        ),
        (rest_dropped, "put together"),
        (lambda x, n: [x.to(n)], "AcceleratorError"),
        (lambda x, n: list(torch.zeros(n)), "is on cpu"),
    ],
    "score_batches": [
        (
            first_gpu_only,
            "cuda:0 must give its scores back while cuda:1 has no batch yet",
        ),
        (all_at_the_end, "cuda:0 gets its batch number 2 while scores"),
        (a_model_for_each_batch, "the weight travels 7 times to 3 GPUs"),
        (by_gpu, "in their order"),
        (with_gradients, "use torch.no_grad()"),
        (moves_the_model, "a deepcopy"),
        (left_on_the_gpu, "fetch them with .cpu()"),
        (
            lambda model, batches, gpus: oldest_first(model, batches[:-1], gpus),
            "(30, 3), not (32, 3)",
        ),
        (
            lambda model, batches, gpus: [oldest_first(model, batches, gpus)],
            "it returns a list, not a tensor",
        ),
        (lambda model, batches, gpus: model(batches), "TypeError"),
    ],
}
