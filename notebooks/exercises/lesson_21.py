"""The exercises of lesson 21: bytes of keys and values, parts joined, an even cut."""

import torch

from exercises.counted import counted, number
from exercises.exercise import Wrong, call, exercise, must_be_callable, solution
from exercises.results import equal, near, sequence, tensor


@exercise(
    "21.1",
    hints=(
        "How many tokens does a rank have, and how many numbers does a token have in "
        "its keys and values, if there are fewer heads for them than for the queries?",
        "In a ring, keys and values make one hop less than there are ranks. A rank "
        "sends its keys and its values, or those of another rank, in each hop.",
    ),
)
def kv_bytes(function) -> None:
    """Bytes that a rank sends in the forward pass of a block, for three jobs."""
    for job in (
        (8192, 1024, 16, 16, 4),
        (8192, 1024, 16, 2, 4),
        (65536, 4096, 32, 8, 8),
    ):
        tokens, width, heads, kv_heads, ranks = job
        what = f"{tokens:,} tokens of width {width:,}, {heads} heads, {kv_heads} of "
        what += f"keys and values, {ranks} ranks"
        found = number(call(function, *job), what)
        every = 2 * 2 * tokens * width * kv_heads // heads  # of all ranks
        right = every * (ranks - 1) // ranks
        mistakes = {
            right / 2: "count keys and values, and 2 bytes for each number",
            right * 2: "a number in bfloat16 has 2 bytes, and forward goes round once",
            right * heads / kv_heads: "keys and values have kv_heads heads, not heads",
            every: "the last hop would bring a rank its own keys: one hop less",
            every / ranks: "that is one hop; count all hops of the ring",
            every * (ranks - 1): "a rank has 1 / ranks of the tokens",
        }
        why = f"it is {right:,} bytes, not {found:,.0f}"
        counted(found, right, mistakes, why, what=what)


@solution("21.1")
def solution_1():
    """A head has width / heads numbers for each token.

    Keys have kv_heads such heads, and so have values. In bfloat16 each number has 2
    bytes. A rank has 1 / ranks of the tokens.

    A ring has ranks - 1 hops. In each of them, a rank sends the keys and values of one
    rank. An all-gather in a ring makes the same hops, so it sends the same bytes.
    """

    def kv_bytes(tokens, width, heads, kv_heads, ranks):
        numbers_of_a_token = 2 * width // heads * kv_heads  # keys and values
        bytes_of_a_rank = 2 * numbers_of_a_token * tokens // ranks
        return (ranks - 1) * bytes_of_a_rank

    return kv_bytes


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
