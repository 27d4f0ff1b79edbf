"""Answers to the exercises of lesson 12: right ones, and planted wrong ones."""

from torch import nn
from torch.nn.functional import cross_entropy

from exercises.lesson_12 import Base, Undivided


def scored_by(loss, returned=lambda loss, scores, total: loss[None]):
    """A class whose loss is `loss(scores, y, total)`, and what is returned of it."""

    class Answer(Base):
        def forward(self, x, y, total):
            scores = self.model(x)
            return returned(loss(scores, y, total), scores, total)

    return Answer


def summed(scores, y, total):
    return cross_entropy(scores, y, reduction="sum") / total


def weighted(scores, y, total):
    return cross_entropy(scores, y) * len(y) / total


def each(scores, y, total):
    return cross_entropy(scores, y, reduction="none") / total


def mean(scores, y, total):
    return cross_entropy(scores, y)


def a_quarter(scores, y, total):
    return cross_entropy(scores, y) / 4


def as_it_is(loss, scores, total):
    return loss


RIGHT = {
    "sent_by_one_gpu": [(700, 100, 175), (700.0, 100.0, 175.0)],
    "fair_loss": [scored_by(summed), scored_by(weighted), scored_by(each, as_it_is)],
    "sizes_of_parts": [
        [362, 562, 562, 562],
        ((369, 560, 560, 559),),
        [355, 565, 564, 564],
        [373, 559, 558, 558],
    ],
}

WRONG = {
    "sent_by_one_gpu": [
        ((1400, 100, 175), "gradients it receives"),
        ((800, 100, 175), "to itself"),
        ((175, 100, 175), "4 bytes"),
        ((100, 100, 175), "to each other GPU"),
        ((5, 100, 175), "receives all gradients"),
        ((700, 200, 175), "gradients it receives"),
        ((700, 700, 175), "to its neighbour only"),
        ((700, 175, 175), "all-reduce in a ring"),
        ((700, 25, 175), "4 bytes"),
        ((700, 5, 175), "its neighbour, once"),
        ((700, 100, 700), "to one neighbour"),
        ((700, 100, 87.5), "the first of two rounds"),
        ((700, 100, 100), "hands over"),
        ((700, 100, 1400), "all ranks send together"),
        ((700, 100, 200), "keeps one chunk in each round"),
        ((700, 100, 1), "in a ring of N ranks"),
        ((700e6, 100, 175), "these are bytes; give MB"),
        ((700, 100, 175_000_000), "these are bytes; give MB"),
        ((667.6, 95.4, 166.9), "these are MiB, of 2**20 bytes; give MB"),
        ((None, None, None), "give a number"),
        (("700", "100", "175"), "give a number"),
        (([700], [100], [175]), "give a number"),
        (({}, 100, 175), "give a number"),
    ],
    "fair_loss": [
        (scored_by(mean), "divided by the rows of the whole batch"),
        (scored_by(a_quarter), "must weigh less"),
        (Undivided, "not divided"),
        (scored_by(mean, lambda loss, scores, total: scores), "come back"),
        (
            scored_by(mean, lambda loss, *_: loss.item()),
            "forward returns a float, not a tensor",
        ),
        (scored_by(summed, lambda loss, *_: loss[None].detach()), "no gradient"),
        (scored_by(summed, as_it_is), "a scalar"),
        (nn.Identity, "your code raised"),
    ],
    "sizes_of_parts": [
        ([512] * 4, "equal parts"),
        ([2, 682, 682, 682], "too few rows"),
        ([600, 482, 483, 483], "too many rows"),
        ([300, 583, 583, 582], "too few rows"),
        ([320, 576, 576, 576], "too few rows"),
        ([341, 569, 569, 569], "too few rows"),
        ([386, 554, 554, 554], "too many rows"),
        ([369, 570, 560, 549], "share alike"),
        ([363, 885, 400, 400], "share alike"),
        ([256] * 4, "not 2048"),
        ([2048, 0, 0, 0], "at least 1"),
        ("363", "a list of four"),
    ],
}
