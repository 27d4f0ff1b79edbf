"""The exercises of lesson 22: tokens that travel, a capacity, two experts a token."""

import torch
from torch import nn

from exercises.counted import number
from exercises.exercise import Wrong, call, exercise, solution
from exercises.results import near, tensor

TOKENS, WIDTH, EXPERTS = 40, 8, 4


def _chosen() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(EXPERTS, (TOKENS,), generator=generator)


@exercise(
    "22.1",
    hints=(
        "Which tokens stay? Those whose expert has the number of the rank.",
        "`chosen != rank` is a tensor of booleans. What does `sum()` do with it?",
    ),
)
def sent_elsewhere(function) -> None:
    """A function: experts of the tokens, a rank -> tokens for other ranks."""
    chosen = _chosen()
    for rank in range(EXPERTS):
        found = number(call(function, chosen, rank))
        stay = int((chosen == rank).sum())
        if found == stay != TOKENS - stay:
            raise Wrong(f"{found} tokens stay with rank {rank}; how many leave it?")
        if found == TOKENS:
            raise Wrong("tokens for the rank's own expert need not travel")
        if found != TOKENS - stay:
            raise Wrong(f"rank {rank} sends {found}; it should be {TOKENS - stay}")


@solution("22.1")
def solution_1():
    """A token leaves the rank if its expert has another number.

    `chosen != rank` is True for these tokens, and `sum` counts True as 1.
    """

    def sent_elsewhere(chosen, rank):
        return (chosen != rank).sum().item()

    return sent_elsewhere


@exercise(
    "22.2",
    hints=(
        "Sort the tokens by their weights, the largest first. In this order, the first "
        "tokens of each expert are those to keep.",
        "`order = weight.argsort(descending=True)`. Count places as `kept_of` does, "
        "but for `chosen[order]`. Place `i` is then that of token `order[i]`.",
    ),
)
def kept(function) -> None:
    """A function: experts, weights, a capacity -> which tokens are kept."""
    chosen = _chosen()
    weight = torch.rand(TOKENS, generator=torch.Generator().manual_seed(1))
    for capacity in (3, 8, TOKENS):
        result = call(function, chosen.clone(), weight.clone(), capacity)
        found = tensor(result, "it returns", [TOKENS])
        if found.dtype != torch.bool:
            raise Wrong(f"return booleans, not {found.dtype}")
        for expert in range(EXPERTS):
            mine = chosen == expert
            some = min(capacity, int(mine.sum()))
            about = f"with a capacity of {capacity}, expert {expert} keeps"
            if (found & mine).sum() != some:
                number = int((found & mine).sum())
                raise Wrong(f"{about} {number} tokens; it should be {some}")
            dropped = weight[mine & ~found]
            if len(dropped) and dropped.max() > weight[mine & found].min():
                raise Wrong(f"{about} a token with a smaller weight than one it drops")


@solution("22.2")
def solution_2():
    """In the order of the weights, a running count gives every token its place.

    `cumsum` adds up the column of an expert, so at a token of this expert it says how
    many of its tokens came up to here. `found[order]` takes the answers back to the
    tokens' own order. No loop over the tokens is needed.
    """
    import torch
    from torch.nn.functional import one_hot

    def kept(chosen, weight, capacity):
        order = weight.argsort(descending=True)
        places = one_hot(chosen[order]).cumsum(0)
        place = places.gather(1, chosen[order, None])[:, 0]
        found = torch.empty_like(chosen, dtype=torch.bool)
        found[order] = place <= capacity
        return found

    return kept


class _Counting(nn.Linear):
    """An expert that knows how many tokens it was given."""

    given = 0

    def forward(self, x):
        self.given += x.numel() // x.shape[-1]
        return super().forward(x)


@exercise(
    "22.3",
    hints=(
        "Begin with the layer of the lesson, and with `topk(2)` in place of `max`. "
        "Both results have two columns now. What changes in the loop?",
        "A token may choose an expert first or second. Loop over the experts and over "
        "the two columns, and *add* each result to the rows of its tokens.",
    ),
)
def top_two(function) -> None:
    """A function: router, experts, tokens -> the sum of each token's two experts."""
    torch.manual_seed(0)
    router = nn.Linear(WIDTH, EXPERTS, bias=False)
    experts = nn.ModuleList(_Counting(WIDTH, WIDTH) for _ in range(EXPERTS))
    tokens = torch.randn(TOKENS, WIDTH)
    wanted = solution_3.function()(router, experts, tokens)
    modules = nn.ModuleList([router, experts])
    right = torch.autograd.grad(wanted.square().sum(), list(modules.parameters()))
    wanted = wanted.detach()
    for expert in experts:
        expert.given = 0
    result = call(function, router, experts, tokens)
    found = tensor(result, "it returns", [TOKENS, WIDTH])
    given = sum(expert.given for expert in experts)
    best = router(tokens).softmax(-1).topk(2)[0]
    if near(found, wanted * best.sum(-1, keepdim=True), atol=1e-5):
        raise Wrong("divide the two weights by their sum: together they should be 1")
    if not near(found, wanted, atol=1e-5):
        raise Wrong("the values differ from the weighted sum of the two best experts")
    if given != 2 * TOKENS:
        raise Wrong(f"the experts computed {given} tokens; two a token are enough")
    found.square().sum().backward()
    if router.weight.grad is None:
        raise Wrong("the router gets no gradient: its weights must be in the result")
    for (name, p), gradient in zip(modules.named_parameters(), right, strict=True):
        if p.grad is None or not near(p.grad, gradient, atol=1e-4):
            part = "the router" if name.startswith("0.") else "an expert"
            raise Wrong(f"the result is right, and {part} gets another gradient")


@solution("22.3")
def solution_3():
    """Each expert computes the tokens that chose it first, then those second.

    The two probabilities are divided by their sum, so that a token's weights add up to
    1. `index_add` adds to rows that may have a result of the other expert already.
    """
    import torch

    def top_two(router, experts, tokens):
        probabilities, numbers = router(tokens).softmax(-1).topk(2)
        weights = probabilities / probabilities.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(experts):
            for column in range(2):
                rows = (numbers[:, column] == index).nonzero()[:, 0]
                part = weights[rows, column, None] * expert(tokens[rows])
                out = out.index_add(0, rows, part)
        return out

    return top_two
