"""Answers to the exercises of lesson 22: right ones, and planted wrong ones."""

import torch

from exercises.lesson_22 import EXPERTS, solution_3

two_best = solution_3.function()


def kept_by_a_loop(chosen, weight, capacity):
    found = torch.zeros(len(chosen), dtype=torch.bool)
    for expert in range(EXPERTS):
        mine = (chosen == expert).nonzero()[:, 0]
        best = weight[mine].topk(min(capacity, len(mine))).indices
        found[mine[best]] = True
    return found


def of_all_experts(chosen, weight, capacity):
    found = torch.zeros(len(chosen), dtype=torch.bool)
    found[weight.topk(min(EXPERTS * capacity, len(chosen))).indices] = True
    return found


def first_tokens(chosen, weight, capacity):
    counts, found = {}, []
    for expert in chosen.tolist():
        counts[expert] = counts.get(expert, 0) + 1
        found.append(counts[expert] <= capacity)
    return torch.tensor(found)


def in_sorted_order(chosen, weight, capacity):
    order = weight.argsort(descending=True)
    return kept_by_a_loop(chosen, weight, capacity)[order]


def one_less(chosen, weight, capacity):
    return kept_by_a_loop(chosen, weight, capacity - 1)


def as_numbers(chosen, weight, capacity):
    return kept_by_a_loop(chosen, weight, capacity).int()


def all_experts(router, experts, tokens):
    probabilities, numbers = router(tokens).softmax(-1).topk(2)
    weights = probabilities / probabilities.sum(-1, keepdim=True)
    every = torch.stack([expert(tokens) for expert in experts], 1)
    rows = torch.arange(len(tokens))[:, None]
    return (every[rows, numbers] * weights[..., None]).sum(1)


def not_divided(router, experts, tokens):
    best = router(tokens).softmax(-1).topk(2)[0]
    return two_best(router, experts, tokens) * best.sum(-1, keepdim=True)


def only_the_best(router, experts, tokens):
    chosen = router(tokens).argmax(-1)
    return torch.stack(
        [experts[i](t[None])[0] for i, t in zip(chosen, tokens, strict=True)]
    )


def without_gradient(router, experts, tokens):
    with torch.no_grad():
        values = two_best(router, experts, tokens)
    return values + 0 * tokens.clone().requires_grad_()


def detached_experts(router, experts, tokens):
    return two_best(
        router, [lambda rows, e=e: e(rows).detach() for e in experts], tokens
    )


def detached_divisor(router, experts, tokens):
    best = router(tokens).softmax(-1).topk(2)[0].sum(-1, keepdim=True)
    return two_best(router, experts, tokens) * best / best.detach()


def one_by_one(router, experts, tokens):
    probabilities, numbers = router(tokens).softmax(-1).topk(2)
    weights = probabilities / probabilities.sum(-1, keepdim=True)
    rows = []
    for token, weight, two in zip(tokens, weights, numbers, strict=True):
        both = zip(weight, two.tolist(), strict=True)
        rows.append(sum(w * experts[n](token) for w, n in both))
    return torch.stack(rows)


RIGHT = {
    "sent_elsewhere": [
        lambda chosen, rank: sum(1 for expert in chosen.tolist() if expert != rank)
    ],
    "kept": [kept_by_a_loop],
    "top_two": [two_best, one_by_one],
}

WRONG = {
    "sent_elsewhere": [
        (lambda chosen, rank: (chosen == rank).sum(), "how many leave"),
        (lambda chosen, rank: len(chosen), "need not travel"),
        (lambda chosen, rank: (chosen != rank).sum() + 1, "it should be"),
        (3, "give a function"),
    ],
    "kept": [
        (of_all_experts, "it should be 3"),
        (first_tokens, "a smaller weight"),
        (in_sorted_order, "expert 0 keeps"),
        (
            lambda chosen, weight, capacity: kept_by_a_loop(chosen, -weight, capacity),
            "a smaller weight",
        ),
        (one_less, "it should be 3"),
        (as_numbers, "return booleans"),
    ],
    "top_two": [
        (all_experts, "two a token are enough"),
        (not_divided, "divide the two weights"),
        (only_the_best, "the values differ"),
        (without_gradient, "the router gets no gradient"),
        (detached_experts, "an expert gets another gradient"),
        (detached_divisor, "the router gets another gradient"),
    ],
}
