"""The exercises of lesson 27: offers of GPUs, a pipeline's batch, tokens that hide."""

import math

from exercises.counted import counted, is_near, number
from exercises.exercise import Wrong, call, exercise, solution

_DAY = 24 * 3600
_TOKENS = 2e12
_OFFERS = (  # GPUs, tokens/s of each, dollars for an hour of each
    (1024, 740.0, 3.05),
    (64, 760.0, 2.5),
    (512, 650.0, 2.8),
    (256, 730.0, 3.0),
)


@exercise(
    "27.1",
    hints=(
        "How many tokens do all GPUs of an offer train on in a day? So how many days "
        "do you plan, and how many are there with a third more?",
        "Leave out the offers that take too long. What do you pay for each of the "
        "others: days, hours of a day, GPUs, and the price?",
    ),
)
def cheapest_offer(function) -> None:
    """The position of the least dollars among those in time."""
    for days in (700, 180, 150, 100):
        what = f"with {_TOKENS:.0e} tokens and {days} days"
        found = number(call(function, list(_OFFERS), _TOKENS, days, when=what), what)
        if found not in range(len(_OFFERS)):
            raise Wrong(f"{what}: return the position of an offer, from 0 on")
        offer, right = _OFFERS[int(found)], _OFFERS[cheapest(_OFFERS, _TOKENS, days)]
        gpus, takes = offer[0], days_of(offer, _TOKENS)
        if takes > days:
            why = f"that of {gpus} GPUs takes {takes:.0f} days"
            if takes * 3 / 4 <= days:
                why += " with a third more than planned"
            raise Wrong(f"{what}: {why}")
        if offer != right:
            paid = (_TOKENS / rate / 3600 * price for _, rate, price in (offer, right))
            mine, least = (f"{dollars / 1e6:.2f}" for dollars in paid)
            raise Wrong(
                f"{what}: that of {gpus} GPUs costs {mine} million dollars, and one "
                f"that is in time {least}; what does a token cost?"
            )


@solution("27.1")
def solution_1():
    """All GPUs together train on `gpus * rate` tokens in a second.

    More GPUs need fewer hours, so their number cancels in the price of a token. It is
    `price / rate` of one GPU: neither the cheapest hour nor the smallest bill for an
    hour. The number of GPUs decides about the days only.
    """

    def cheapest_offer(offers, tokens, days):
        in_time = {}
        for position, (gpus, rate, price) in enumerate(offers):
            hours = tokens / (gpus * rate) / 3600
            if hours / 24 * 4 / 3 <= days:
                in_time[position] = hours * gpus * price
        return min(in_time, key=in_time.get)

    return cheapest_offer


def days_of(offer, tokens):
    """With a third more than planned."""
    gpus, rate, _ = offer
    return tokens / (gpus * rate) / _DAY * 4 / 3


def cheapest(offers, tokens, days):
    in_time = [i for i, offer in enumerate(offers) if days_of(offer, tokens) <= days]
    return min(in_time, key=lambda i: offers[i][2] / offers[i][1])


@exercise(
    "27.2",
    hints=(
        "Solve bubble <= share for the number of micro-batches. They are whole.",
        "A step of one copy of the pipeline has that many micro-batches. How many "
        "copies are there, and how many sequences does a micro-batch have?",
    ),
)
def fewest_sequences(function) -> None:
    """Micro-batches from the bubble, rounded up, times copies and sequences."""
    for gpus, tp, pp, chunks, sequences, share in (
        (1024, 8, 16, 1, 1, 0.1),
        (64, 4, 8, 2, 2, 0.05),
        (512, 8, 8, 1, 2, 0.15),
        (16, 1, 4, 1, 1, 0.25),
    ):
        what = (
            f"with {gpus} GPUs, tp {tp}, pp {pp}, chunks {chunks}, {sequences} "
            f"sequences at once and a bubble of {share:g}"
        )
        given = gpus, tp, pp, chunks, sequences, share
        found = number(call(function, *given, when=what), what)
        right = fewest(*given)
        copies = gpus // (tp * pp)
        turns = right // (copies * sequences)
        exact = (pp - 1) / (share * chunks)
        mistakes = {
            right / copies: "each copy of the pipeline has micro-batches of its own",
            right * tp: "GPUs that share slices work on the same sequences",
            right / sequences: "a micro-batch has several sequences",
            turns * gpus * sequences: "a copy has tp x pp GPUs, not one",
            exact * copies * sequences: "a micro-batch is there or it is not; round up",
            math.floor(exact) * copies * sequences: "round up: with fewer, the bubble "
            "is larger than it may be",
            math.ceil(pp / (share * chunks)) * copies * sequences: "the bubble has "
            "pp - 1 in it, not pp",
            math.ceil((pp - 1) / share) * copies * sequences: "parts of a stage make "
            "the bubble shorter",
            math.ceil(exact * (1 - share)) * copies * sequences: "the share is of the "
            "work, not of the whole step",
        }
        mistakes.pop(right, None)
        why = f"{found:.4g} sequences; begin with (pp - 1) / (micro-batches * chunks)"
        counted(found, right, mistakes, why, what=what)


@solution("27.2")
def solution_2():
    """The bubble is (pp - 1) / (micro-batches · chunks) of the work.

    So there must be at least (pp - 1) / (share · chunks) micro-batches in each copy.
    A small number is taken away before rounding up, because 0.15 and its like are not
    exact in floating point.

    With 1,024 GPUs, tp 8 and pp 16, these are 150 micro-batches in 8 copies: 1,200
    sequences, or 4.9 million tokens. More GPUs need a larger batch, and a batch that
    is too large trains worse.
    """
    import math

    def fewest_sequences(gpus, tp, pp, chunks, sequences, share):
        microbatches = math.ceil((pp - 1) / (share * chunks) - 1e-9)
        copies = gpus // (tp * pp)
        return microbatches * copies * sequences

    return fewest_sequences


def fewest(gpus, tp, pp, chunks, sequences, share):
    turns = math.ceil((pp - 1) / (share * chunks) - 1e-9)
    return turns * (gpus // (tp * pp)) * sequences


@exercise(
    "27.3",
    hints=(
        "Write down two times for a model of P parameters: the seconds that the "
        "messages need, and the seconds that a GPU computes. Which letters cancel "
        "if the two are equal?",
        "A network's rate is in bits and a message is in bytes. The ring goes through "
        "all GPUs, and it leaves each machine once, through eight network cards at "
        "once.",
    ),
)
def tokens_that_hide(function) -> None:
    """8 P (n - 1) / n bytes in the time of 8 P tokens FLOP: P cancels."""
    for gpus, gigabit, flops in (
        (128, 400, 400e12),
        (64, 50, 400e12),
        (16, 12.5, 150e12),
        (1024, 3.125, 3e14),
    ):
        what = f"with {gpus} GPUs, {gigabit} Gbit/s and {flops:.0e} FLOP/s"
        found = number(call(function, gpus, gigabit, flops, when=what), what)
        right = tokens(gpus, gigabit, flops)
        if is_near(found, right, 5e-3):  # rounded is right as well
            continue
        mistakes = {
            right / 8: "a byte has 8 bits",
            right * 8: "`gigabit` is for each GPU, and a machine has eight",
            right * 64: "`gigabit` is for each GPU, and a machine has eight; the ring "
            "leaves each machine once, not once for each GPU",
            right * gpus / (gpus - 1): "a ring of n carries (n - 1) / n of a message",
            right * (gpus - 8) / (gpus - 1): "the ring has all GPUs, not one of each "
            "machine",
            right * 1e9: "a Gbit is 10⁹ bits",
            right * 4 / 3: "blocks are computed again: 8 FLOP for a token and "
            "parameter",
            right * gpus: "tokens of each GPU, not of all",
            right / gpus: "each GPU computes its own tokens; do not divide by the GPUs",
            1 / right: "upside down: more FLOP/s need more tokens",
        }
        why = (
            f"{found:.4g} tokens; write both times down for P parameters, set them "
            "equal, and see what cancels"
        )
        counted(found, right, mistakes, why, what=what, near=1e-3)


@solution("27.3")
def solution_3():
    """Set the network's time equal to the time of computing, and solve for the tokens.

    For each parameter a machine sends

        (2 + 2 + 4) · (gpus - 1) / gpus

    bytes in a step: weights in bfloat16 twice, gradients in float32 once. For each
    parameter and token a GPU computes 6 + 2 operations.

    Both times are proportional to the number of parameters. The argument that is
    missing is therefore the size of the model: a larger one needs as many tokens.

    With 400 Gbit/s for each GPU and 400 TFLOP/s, these are about 1,000 tokens: remember
    this number.
    """

    def tokens_that_hide(gpus, gigabit, flops):
        sent_for_a_parameter = (2 + 2 + 4) * (gpus - 1) / gpus
        bytes_per_second = 8 * gigabit * 1e9 / 8  # eight cards; bits to bytes
        seconds_of_the_network = sent_for_a_parameter / bytes_per_second
        seconds_of_a_token = (6 + 2) / flops
        return seconds_of_the_network / seconds_of_a_token

    return tokens_that_hide


def tokens(gpus, gigabit, flops):
    return flops * (gpus - 1) / gpus / (8 * gigabit * 1e9 / 8)
