"""The exercises of lesson 21: ring or heads, parts joined, an even cut."""

import torch

from exercises.exercise import Wrong, call, exercise, must_be_callable, solution
from exercises.results import equal, near, sequence, tensor


@exercise(
    "21.1",
    hints=(
        "Take the formulas of the table. Only keys and values become smaller with "
        "fewer heads. Which of the four tensors that *heads* sends are these?",
        "With g = kv_heads / heads, the ring sends 2 g, and heads (2 + 2 g) / ranks, "
        "each times the same. Before you compare: can each rank get as many heads as "
        "any other?",
    ),
)
def ring_or_heads(function) -> None:
    """The way that sends less, if it is possible, for nine models."""
    must_be_callable(function)
    for heads, kv_heads, ranks in (
        (16, 16, 4),
        (32, 8, 4),
        (32, 8, 8),
        (8, 4, 4),
        (64, 8, 8),
        (32, 8, 16),
        (12, 12, 8),
        (24, 12, 8),
        (48, 16, 3),
    ):
        case = f"{heads} heads, {kv_heads} for keys and values, {ranks} ranks"
        found = call(function, heads, kv_heads, ranks)
        if found not in ("ring", "heads"):
            raise Wrong(f'{case}: return "ring" or "heads", not {found!r}')
        if found == "heads" and (heads % ranks or kv_heads % ranks):
            raise Wrong(f"{case}: heads do not divide among the ranks")
        share = kv_heads / heads
        ring, swap = 2 * share, (2 + 2 * share) / ranks
        possible = heads % ranks == kv_heads % ranks == 0
        if found != ("heads" if possible and swap < ring else "ring"):
            each = (ranks - 1) / ranks
            raise Wrong(
                f"{case}: a rank sends {each * ring:.3f} a with the ring, and "
                f"{each * swap:.3f} a with heads"
            )


@solution("21.1")
def solution_1():
    """Both send (N - 1) / N of something, so compare only the rest.

    The ring sends keys and values: 2 g, with g = kv_heads / heads. Heads send queries
    and results, which have all heads, and keys and values, but an N-th of each.

    Heads send less if N is larger than 1 + 1 / g. But then, N may be larger than the
    number of heads for keys and values.
    """

    def ring_or_heads(heads, kv_heads, ranks):
        if heads % ranks or kv_heads % ranks:
            return "ring"
        share = kv_heads / heads
        by_ring = 2 * share
        by_heads = (2 + 2 * share) / ranks
        return "heads" if by_heads < by_ring else "ring"

    return ring_or_heads


# -- 21.2 ------------------------------------------------------------------------------


def _attend(q, k, v) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of all queries to these keys: output, and logarithm of the sum."""
    scores = q @ k.mT
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def _merged(function, first, second) -> tuple[torch.Tensor, torch.Tensor]:
    """What the learner's function makes of two parts."""
    result = call(function, *(x.clone() for x in (*first, *second)))
    found = sequence(result, "return output and lse")
    if len(found) != 2:
        raise Wrong(f"return output and lse, not {len(found)} things")
    out = tensor(found[0], "the output is", first[0].shape)
    return out, tensor(found[1], "the lse is", first[1].shape)


@exercise(
    "21.2",
    hints=(
        "The denominator of a part is exp(lse), and its numerator is out · exp(lse). "
        "What are numerator and denominator of both parts together?",
        "exp of a large lse overflows. Only the ratios of the two denominators count, "
        "so subtract the larger lse first, for each query. lse has no last dimension.",
    ),
)
def merge(function) -> None:
    """Two parts of attention, joined: also with large scores and with masked parts."""
    generator = torch.Generator().manual_seed(21)
    q, k, v = (torch.randn(2, 3, 12, 8, generator=generator) for _ in range(3))
    wanted = _attend(q, k, v)
    parts = [_attend(q, k[:, :, some], v[:, :, some]) for some in _HALVES]
    out, lse = _merged(function, *parts)
    if near(out, (parts[0][0] + parts[1][0]) / 2, atol=1e-5):
        raise Wrong("the two outputs have weights: the sums of their exponentials")
    if not near(out, wanted[0], atol=1e-5):
        raise Wrong("the output is not that of attention to all keys")
    if not near(lse, wanted[1], atol=1e-4):
        raise Wrong("the output is right, but lse is not that of all keys")
    for shift in (200.0, -200.0):
        large = [(one[0], one[1] + shift) for one in parts]
        out, lse = _merged(function, *large)
        if not out.isfinite().all() or not lse.isfinite().all():
            raise Wrong(
                f"with scores around {shift:g} it is not finite: exp overflows, or is "
                "0 in both parts; subtract the larger lse first"
            )
        good = near(out, wanted[0], atol=1e-3)
        if not good or not near(lse, wanted[1] + shift, atol=1e-3):
            raise Wrong(f"with scores around {shift:g} it is another result")
    for first, second in _uneven(parts):
        out, lse = _merged(function, first, second)
        wanted = _joined(first, second)
        if not out.isfinite().all() or not lse.isfinite().all():
            raise Wrong(
                "where scores of one query or of one part are around 200, it is not "
                "finite: subtract the larger lse of the two, for each query"
            )
        if not near(out, wanted[0], atol=1e-3) or not near(lse, wanted[1], atol=1e-3):
            raise Wrong(
                "where scores of one query or of one part are around 200, it is "
                "another result"
            )
    masked = torch.zeros_like(parts[1][0]), torch.full_like(parts[1][1], -torch.inf)
    for order in ((parts[0], masked), (masked, parts[0])):
        out, lse = _merged(function, *order)
        if not near(out, parts[0][0], atol=1e-5) or not near(lse, parts[0][1]):
            raise Wrong(
                "where one part is masked and its lse is -inf, the other part should "
                "be the result"
            )


_HALVES = slice(0, 5), slice(5, 12)


def _uneven(parts) -> list:
    """Both parts with one query around 200, and one part around 200, in both orders."""
    one_query = torch.zeros_like(parts[0][1])
    one_query[..., 0] = 200.0
    pairs = [tuple((out, lse + one_query) for out, lse in parts)]
    (out1, lse1), second = parts
    large = out1, lse1 + 200.0
    return [*pairs, (large, second), (second, large)]


def _joined(first, second) -> tuple[torch.Tensor, torch.Tensor]:
    (out1, lse1), (out2, lse2) = first, second
    lse = torch.logaddexp(lse1, lse2)
    weights = (lse1 - lse).exp(), (lse2 - lse).exp()
    return out1 * weights[0][..., None] + out2 * weights[1][..., None], lse


@solution("21.2")
def solution_2():
    """exp(lse) is a part's denominator, so it says how much the part counts.

    Relative to the larger of the two, no exponential is above 1, and none overflows. A
    masked part has lse = -inf, so its weight is exp(-inf) = 0.

    `logaddexp` adds two numbers that are given by their logarithms, and takes care of
    the larger one itself.
    """

    def merge(out1, lse1, out2, lse2):
        lse = torch.logaddexp(lse1, lse2)
        weight1 = (lse1 - lse).exp()[..., None]
        weight2 = (lse2 - lse).exp()[..., None]
        return out1 * weight1 + out2 * weight2, lse

    return merge


# -- 21.3 ------------------------------------------------------------------------------


def _work(places: torch.Tensor) -> int:
    """Pairs of a query at these places and a key that it may see."""
    return int((places + 1).sum())


def _parts(function, x: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """What the learner's function gives to each rank."""
    found = sequence(call(function, x.clone(), ranks), "cut returns a list of tensors")
    if len(found) != ranks:
        raise Wrong(f"for {ranks} ranks, cut returns {len(found)} parts")
    shape = x.shape[0], x.shape[1] // ranks
    return [tensor(p, f"the part of rank {r} is", shape) for r, p in enumerate(found)]


@exercise(
    "21.3",
    hints=(
        "Cut the tokens into twice as many chunks as there are ranks. Which two chunks "
        "does rank r get?",
        "To join, cut each rank's part into its two halves again. The first halves, in "
        "the order of the ranks, are the first half of the sequence. In which order "
        "follow the second halves?",
    ),
)
def even_work(cut, join) -> None:
    """A cut with equal work for all ranks, and its inverse."""
    must_be_callable(cut)
    must_be_callable(join)
    for ranks in (4, 1, 2, 3, 8):
        places = torch.arange(6 * ranks).expand(2, -1)
        rows = places + 1000 * torch.arange(2)[:, None]
        parts = _parts(cut, rows, ranks)
        mine = [part[0] for part in parts]
        if not equal(torch.cat(mine).sort().values, places[0]):
            raise Wrong(f"for {ranks} ranks, a token is lost or there twice")
        if not all(equal(part[1], part[0] + 1000) for part in parts):
            raise Wrong("cut every sequence at the same places, along dimension 1")
        work = [_work(part) for part in mine]
        if min(work) != max(work):
            said = ", ".join(map(str, work))
            raise Wrong(f"the ranks have {said} pairs of query and key: not the same")
        for part in mine:
            if not equal(part, part.sort().values):
                raise Wrong("the tokens of a rank are not in the order of the sequence")
        chunks = places[0].chunk(2 * ranks)
        for rank, part in enumerate(mine):
            tail = 2 * ranks - 1 - rank
            if not equal(part, torch.cat([chunks[rank], chunks[tail]])):
                raise Wrong(
                    f"the work is equal, but rank {rank} of {ranks} should get chunk "
                    f"{rank} from the head and chunk {tail} from the tail"
                )
        back = call(join, [part.clone() for part in parts])
        if not equal(tensor(back, "join returns", rows.shape), rows):
            raise Wrong(f"for {ranks} ranks, join does not bring back the sequence")


@solution("21.3")
def solution_3():
    """Rank r gets an early chunk, r, and a late one, 2 N - 1 - r.

    A token at place p may look at p + 1 tokens. What a rank gets too much with its
    late chunk, it gets too little with its early one, so all sums are the same.

    Joining takes the early chunks from rank 0 upwards, and then the late ones from the
    last rank down to rank 0.
    """

    def cut(x, ranks):
        chunks = x.chunk(2 * ranks, dim=1)
        return [
            torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], dim=1)
            for rank in range(ranks)
        ]

    def join(parts):
        halves = [part.chunk(2, dim=1) for part in parts]
        early = [half[0] for half in halves]
        late = [half[1] for half in reversed(halves)]
        return torch.cat(early + late, dim=1)

    return cut, join
