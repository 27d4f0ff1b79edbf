"""The exercises of lesson 21: bytes of keys and values, parts joined, an even cut."""

import torch

from exercises.counted import is_near, number
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
    must_be_callable(function)
    for job in (
        (8192, 1024, 16, 16, 4),
        (8192, 1024, 16, 2, 4),
        (65536, 4096, 32, 8, 8),
    ):
        tokens, width, heads, kv_heads, ranks = job
        found = number(call(function, *job), "the bytes")
        every = 2 * 2 * tokens * width * kv_heads // heads  # of all ranks
        right = every * (ranks - 1) // ranks
        mistakes = {
            right / 2: "count keys and values, and 2 bytes for each number",
            2
            * right: "a number in bfloat16 has 2 bytes, and forward has one way round",
            right * heads / kv_heads: "keys and values have kv_heads heads, not heads",
            every: "the last hop would bring a rank its own keys: one hop less",
            every / ranks: "that is one hop; count all hops of the ring",
            every * (ranks - 1): "a rank has 1 / ranks of the tokens",
        }
        if not is_near(found, right, 1e-9):
            why = [
                words for wrong, words in mistakes.items() if is_near(found, wrong, 0)
            ]
            because = f": {why[0]}" if why else ""
            raise Wrong(
                f"for {tokens:,} tokens of width {width:,}, {heads} heads, {kv_heads} "
                f"of keys and values, and {ranks} ranks it is {right:,} bytes, not "
                f"{found:,.0f}{because}"
            )


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
    must_be_callable(function)
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


# -- answers ---------------------------------------------------------------------------


def in_one_line(tokens, width, heads, kv_heads, ranks):
    return 4 * (ranks - 1) * (tokens // ranks) * (width // heads) * kv_heads


def without_groups(tokens, width, heads, kv_heads, ranks):
    return in_one_line(tokens, width, heads, heads, ranks)


def keys_only(*job):
    return in_one_line(*job) // 2


def in_float32(*job):
    return 2 * in_one_line(*job)


def one_hop_more(tokens, width, heads, kv_heads, ranks):
    return 4 * tokens * (width // heads) * kv_heads


def one_hop(tokens, width, heads, kv_heads, ranks):
    return one_hop_more(tokens, width, heads, kv_heads, ranks) // ranks


def all_tokens(tokens, width, heads, kv_heads, ranks):
    return one_hop_more(tokens, width, heads, kv_heads, ranks) * (ranks - 1)


def by_sigmoid(out1, lse1, out2, lse2):
    second = torch.sigmoid(lse2 - lse1)[..., None]
    return out1 + second * (out2 - out1), torch.logaddexp(lse1, lse2)


def averaged(out1, lse1, out2, lse2):
    return (out1 + out2) / 2, torch.logaddexp(lse1, lse2)


def overflows(out1, lse1, out2, lse2):
    one, two = lse1.exp()[..., None], lse2.exp()[..., None]
    return (out1 * one + out2 * two) / (one + two), (lse1.exp() + lse2.exp()).log()


def weighs_by_lse(out1, lse1, out2, lse2):
    one, two = lse1[..., None], lse2[..., None]
    return (out1 * one + out2 * two) / (one + two), torch.logaddexp(lse1, lse2)


def adds_lse(out1, lse1, out2, lse2):
    return by_sigmoid(out1, lse1, out2, lse2)[0], lse1 + lse2


def subtracts_one_for_all(out1, lse1, out2, lse2):
    most = torch.maximum(lse1, lse2)
    gap = lse1 - lse2  # -inf - -inf is no number, and neither is inf * 0
    one = gap.exp()[..., None]
    return (out1 * one + out2) / (1 + one), most + (
        (lse1 - most).exp() + (lse2 - most).exp()
    ).log()


def largest_of_all_queries(out1, lse1, out2, lse2):
    most = torch.maximum(lse1.max(), lse2.max())
    one, two = (lse1 - most).exp(), (lse2 - most).exp()
    out = (out1 * one[..., None] + out2 * two[..., None]) / (one + two)[..., None]
    return out, most + (one + two).log()


def relative_to_the_first(out1, lse1, out2, lse2):
    most = torch.where(lse1.isinf(), lse2, lse1)
    one, two = (lse1 - most).exp(), (lse2 - most).exp()
    out = (out1 * one[..., None] + out2 * two[..., None]) / (one + two)[..., None]
    return out, most + (one + two).log()


def single_tokens(x, ranks):
    rows = x.unflatten(1, (-1, 2 * ranks))
    return [
        torch.stack([rows[:, :, r], rows[:, :, 2 * ranks - 1 - r]], 2).flatten(1)
        for r in range(ranks)
    ]


def ranks_reversed(x, ranks):
    return by_index(x, ranks)[::-1]


def output_alone(out1, lse1, out2, lse2):
    return by_sigmoid(out1, lse1, out2, lse2)[0]


def by_index(x, ranks):
    length = x.shape[1] // (2 * ranks)
    numbers = torch.arange(x.shape[1]).view(2 * ranks, length)
    return [
        x[:, torch.cat([numbers[r], numbers[2 * ranks - 1 - r]])] for r in range(ranks)
    ]


def back_by_index(parts):
    numbers = torch.arange(parts[0].shape[1] * len(parts))[None]
    order = torch.cat(by_index(numbers, len(parts)), 1)[0]
    return torch.cat(parts, 1)[:, order.argsort()]


def contiguous(x, ranks):
    return list(x.chunk(ranks, 1))


def striped(x, ranks):
    return [x[:, rank::ranks] for rank in range(ranks)]


def tail_first(x, ranks):
    return [torch.cat(part.chunk(2, 1)[::-1], 1) for part in by_index(x, ranks)]


def neighbours(x, ranks):
    chunks = x.chunk(2 * ranks, 1)
    return [torch.cat([chunks[r], chunks[r + ranks]], 1) for r in range(ranks)]


def for_four(x, ranks):
    return by_index(x, 4)


def along_dimension_0(x, ranks):
    return [part.reshape(2, -1) for part in x.flatten().chunk(ranks)]


def joins_in_order(parts):
    return torch.cat(parts, 1)


def joins_tails_in_order(parts):
    halves = [part.chunk(2, 1) for part in parts]
    return torch.cat([half[0] for half in halves] + [half[1] for half in halves], 1)


RIGHT = {
    "kv_bytes": [in_one_line],
    "merge": [by_sigmoid],
    "even_work": [(by_index, back_by_index)],
}
WRONG = {
    "kv_bytes": [
        (without_groups, "kv_heads heads"),
        (keys_only, "keys and values"),
        (in_float32, "bfloat16"),
        (one_hop_more, "one hop less"),
        (one_hop, "count all hops"),
        (all_tokens, "1 / ranks of the tokens"),
        (lambda *job: 7, "not 7"),
    ],
    "merge": [
        (averaged, "have weights"),
        (overflows, "not finite"),
        (weighs_by_lse, "not that of attention"),
        (adds_lse, "lse is not"),
        (subtracts_one_for_all, "not finite"),
        (largest_of_all_queries, "not finite"),
        (relative_to_the_first, "not finite"),
        (output_alone, "not"),
    ],
    "even_work": [
        ((contiguous, joins_in_order), "not the same"),
        ((striped, joins_in_order), "not the same"),
        ((neighbours, joins_in_order), "not the same"),
        ((tail_first, joins_in_order), "order of the sequence"),
        ((single_tokens, joins_in_order), "should get chunk 0"),
        ((ranks_reversed, joins_in_order), "should get chunk 0"),
        ((for_four, back_by_index), "raised"),
        ((along_dimension_0, joins_in_order), ""),
        ((by_index, joins_in_order), "bring back"),
        ((by_index, joins_tails_in_order), "bring back"),
    ],
}
