"""Answers to the exercises of lesson 21: right ones, and planted wrong ones."""

import torch


def by_ranks(heads, kv_heads, ranks):
    possible = heads % ranks == kv_heads % ranks == 0
    return "heads" if possible and ranks > 1 + heads / kv_heads else "ring"


def without_limit(heads, kv_heads, ranks):
    return "heads" if ranks > 1 + heads / kv_heads else "ring"


def queries_alone_divide(heads, kv_heads, ranks):
    return "ring" if heads % ranks else without_limit(heads, kv_heads, ranks)


def enough_heads(heads, kv_heads, ranks):
    return "ring" if kv_heads < ranks else without_limit(heads, kv_heads, ranks)


def no_fewer_heads_for_keys(heads, kv_heads, ranks):
    return "ring" if kv_heads % ranks or heads % ranks else "heads"


def keys_and_values_alone(heads, kv_heads, ranks):
    return "heads" if kv_heads % ranks == 0 and ranks > 1 else "ring"


def no_fewer_tokens(heads, kv_heads, ranks):
    return "ring"  # 2 g is never more than 2 + 2 g


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


def relative_to(reference):
    """Weighs the parts by exponentials relative to `reference(lse1, lse2)`."""

    def merge(out1, lse1, out2, lse2):
        most = reference(lse1, lse2)
        one, two = (lse1 - most).exp(), (lse2 - most).exp()
        out = (out1 * one[..., None] + out2 * two[..., None]) / (one + two)[..., None]
        return out, most + (one + two).log()

    return merge


def single_tokens(x, ranks):
    rows = x.unflatten(1, (-1, 2 * ranks))
    return [
        torch.stack([rows[:, :, r], rows[:, :, 2 * ranks - 1 - r]], 2).flatten(1)
        for r in range(ranks)
    ]


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


def tail_first(x, ranks):
    return [torch.cat(part.chunk(2, 1)[::-1], 1) for part in by_index(x, ranks)]


def neighbours(x, ranks):
    chunks = x.chunk(2 * ranks, 1)
    return [torch.cat([chunks[r], chunks[r + ranks]], 1) for r in range(ranks)]


def joins_in_order(parts):
    return torch.cat(parts, 1)


def joins_tails_in_order(parts):
    halves = [part.chunk(2, 1) for part in parts]
    return torch.cat([half[0] for half in halves] + [half[1] for half in halves], 1)


RIGHT = {
    "ring_or_heads": [by_ranks],
    "merge": [by_sigmoid],
    "even_work": [(by_index, back_by_index)],
}

WRONG = {
    "ring_or_heads": [
        (without_limit, "do not divide"),
        (queries_alone_divide, "do not divide"),
        (enough_heads, "do not divide"),
        (no_fewer_heads_for_keys, "0.375 a with the ring, and 0.469 a with heads"),
        (keys_and_values_alone, "0.375 a with the ring"),
        (no_fewer_tokens, "1.500 a with the ring"),
        (lambda heads, kv_heads, ranks: heads, "return"),
    ],
    "merge": [
        (averaged, "have weights"),
        (overflows, "not finite"),
        (weighs_by_lse, "not that of attention"),
        (adds_lse, "lse is not"),
        (subtracts_one_for_all, "not finite"),
        (
            relative_to(lambda lse1, lse2: torch.maximum(lse1.max(), lse2.max())),
            "not finite",
        ),
        (
            relative_to(lambda lse1, lse2: torch.where(lse1.isinf(), lse2, lse1)),
            "not finite",
        ),
        (lambda out1, lse1, out2, lse2: by_sigmoid(out1, lse1, out2, lse2)[0], "not"),
    ],
    "even_work": [
        ((lambda x, ranks: list(x.chunk(ranks, 1)), joins_in_order), "not the same"),
        (
            (
                lambda x, ranks: [x[:, rank::ranks] for rank in range(ranks)],
                joins_in_order,
            ),
            "not the same",
        ),
        ((neighbours, joins_in_order), "not the same"),
        ((tail_first, joins_in_order), "order of the sequence"),
        ((single_tokens, joins_in_order), "should get chunk 0"),
        (
            (lambda x, ranks: by_index(x, ranks)[::-1], joins_in_order),
            "should get chunk 0",
        ),
        ((lambda x, ranks: by_index(x, 4), back_by_index), "raised"),
        (
            (
                lambda x, ranks: [
                    part.reshape(2, -1) for part in x.flatten().chunk(ranks)
                ],
                joins_in_order,
            ),
            "",
        ),
        ((by_index, joins_in_order), "bring back"),
        ((by_index, joins_tails_in_order), "bring back"),
    ],
}
