"""The exercises of lesson 25: plans for several machines, by arithmetic."""

import math

import numpy as np
import torch

from helpers.exercises import ring
from helpers.exercises.counted import (
    counted,
    is_near,
    number,
)
from helpers.exercises.exercise import (
    Wrong,
    call,
    exercise,
    solution,
)

_ROOM = 60e9  # bytes of each GPU
_EACH = 8  # GPUs of a machine


def _needs(machines: int, batch: int) -> float:
    """Bytes of each GPU for 70B on so many machines."""
    from scripts import plan

    return plan.bytes_per_gpu("70B", _EACH * machines, batch=batch).total


def _fewest(batch: int) -> int:
    machines = 1
    while _needs(machines, batch) > _ROOM:
        machines += 1
    return machines


@exercise(
    "25.1",
    hints=(
        "`plan.bytes_per_gpu` takes a number of GPUs, and the `total` of its result "
        "is in bytes. How do you find the first number of machines with which the "
        "total is small enough?",
        "`bytes_by_hand` leaves out what is whole for a moment only, so take the "
        "function of the plan. Three sequences keep more activations on each GPU, "
        "so search again from the beginning.",
    ),
)
def fewest_machines(one_sequence, three_sequences) -> None:
    """Machines of eight GPUs with 60 GB each, for 70B."""
    answers = {"one sequence": (1, one_sequence), "three": (3, three_sequences)}
    for name, (batch, answer) in answers.items():
        answer = number(answer, name)
        right = _fewest(batch)
        if answer == right:
            continue
        if answer < 1:
            raise Wrong(f"{name}: at least one machine is needed, not {answer:g}")
        if answer == _EACH * right:
            raise Wrong(f"{name}: machines are asked for, of eight GPUs each")
        if answer != int(answer):
            raise Wrong(f"{name}: a machine is there or it is not; round up")
        needs = _needs(int(answer), batch) / 1e9
        if answer > right:
            raise Wrong(
                f"{name}: {answer:g} machines are enough, with {needs:.1f} GB on each "
                "GPU, but fewer are as well"
            )
        why = f"{name}: on {answer:g} machines each GPU needs {needs:.1f} GB"
        if batch == 1 and answer == right - 1:
            why += "; the count by hand left out what is whole for a moment"
        if batch == 3 and answer == _fewest(1):
            why += "; three sequences have three times the activations"
        raise Wrong(why)


@solution("25.1")
def solution_1():
    """Add one machine after the other until a GPU needs no more than 60 GB.

    More machines make the shards of weights, gradients and Adam's state smaller. What
    a GPU has for itself stays: activations, logits, and the blocks that are gathered
    for a moment. These parts grow with the sequences, so the second search begins anew.

    `bytes_by_hand` would say 3 machines for one sequence, because it leaves out what is
    gathered or computed again for a moment.
    """
    from scripts import plan

    gpus_of_a_machine = 8
    room = 60 * 10**9

    def fewest_machines(batch):
        machines = 1
        while True:
            gpus = machines * gpus_of_a_machine
            needed = plan.bytes_per_gpu("70B", gpus, batch=batch).total
            if needed <= room:
                return machines
            machines += 1

    one_sequence = fewest_machines(batch=1)
    three_sequences = fewest_machines(batch=3)
    return one_sequence, three_sequences


@exercise(
    "25.2",
    hints=(
        "Look at the third point under *Cost: a cable that is slow for real*, which "
        "has hybrid sharding on two hosts. Take one GPU first: how large "
        "is its part of the gradients, and how many ranks are in its ring?",
        "All GPUs of a machine share its cards, and each of them takes part in a ring "
        "of its own. Gathers of weights stay inside the machine.",
    ),
)
def hybrid_bytes(function) -> None:
    """An all-reduce of each GPU's part, over the machines; eight share the cards."""
    for parameters, machines, each in ((7e9, 3, 8), (10**9, 16, 4), (10**6, 2, 2)):
        what = f"with {parameters:.0e} parameters, {machines} machines of {each} GPUs"
        found = number(call(function, parameters, machines, each, when=what), what)
        right = ring.sent(machines, 4 * parameters)
        one_ring = ring.sent(machines * each, 4 * parameters)
        mistakes = {
            right / each: "that is one GPU's part; all of a machine share its cards",
            right / 2: "an all-reduce sends 2 (n - 1) / n of a tensor, and float32 has "
            "4 bytes",
            4 * parameters: "in a ring of n an all-reduce sends 2 (n - 1) / n",
            8 * parameters: "a ring of n sends 2 (n - 1) / n, not twice the whole",
            one_ring: "that is one ring through all GPUs; here gathers stay inside, "
            "and a ring has one GPU of each machine",
            right + 4 * parameters: "weights are gathered inside a machine; nothing of "
            "that passes the card",
            right * machines / each: "that is one GPU's part, and a ring of m carries "
            "2 (m - 1) / m of it; all of a machine share its cards",
            one_ring / each: "that is one GPU's part in a ring through all GPUs; its "
            "ring has one GPU of each machine, and all of a machine share its cards",
            right * each: "each GPU has a part of the gradients only, not all",
            right * machines: "of one machine, not of all together",
        }
        why = (
            f"{found:.4g} bytes; think of the ring of one GPU and its partners, what "
            "it carries, and how many such rings leave a machine"
        )
        counted(found, right, mistakes, why, what=what, near=1e-3)


@solution("25.2")
def solution_2():
    """Only the rings of the gradients leave a machine, one ring for each of its GPUs.

    FSDP inside the machine leaves each GPU with one part of the averaged gradients. The
    GPUs that have the same part, one on each machine, form a ring and all-reduce it.
    A ring of m ranks sends from each rank

        2 · (m - 1) / m · bytes of the part

    All GPUs of a machine do so at the same time through the same cards, so the parts
    add up to the whole gradient again. The number of GPUs in a machine cancels.
    """

    def hybrid_bytes(parameters, machines, each):
        gradients = 4 * parameters
        part_of_a_gpu = gradients / each
        sent_by_a_gpu = 2 * (machines - 1) / machines * part_of_a_gpu
        return each * sent_by_a_gpu

    return hybrid_bytes


@exercise(
    "25.3",
    hints=(
        "Write down two times for a model of P parameters, as in *What passes the "
        "card?*: the seconds that the card needs, and the seconds that a GPU "
        "computes. Which letters cancel if the two are equal?",
        "A network's rate is in bits and a message is in bytes. The ring goes through "
        "all GPUs, and it leaves each machine once, so do not divide the rate by the "
        "eight GPUs of a machine.",
    ),
)
def tokens_to_hide(function) -> None:
    """8 P (n - 1) / n bytes in the time of 8 P tokens FLOP: P cancels."""
    for gpus, gigabit, flops in (
        (128, 400, 400e12),
        (64, 400, 400e12),
        (16, 100, 150e12),
        (1024, 25, 3e14),
    ):
        what = f"with {gpus} GPUs, {gigabit} Gbit/s and {flops:.0e} FLOP/s"
        found = number(call(function, gpus, gigabit, flops, when=what), what)
        right = tokens(gpus, gigabit, flops)
        if is_near(found, right, 5e-3):  # rounded is right as well
            continue
        mistakes = {
            right / 8: "a byte has 8 bits",
            right * 8: "the cards of a machine carry the ring once, not once for each "
            "GPU behind them",
            right / 64: "a byte has 8 bits, and `gigabit` is of the whole machine, not "
            "of each GPU",
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


@solution("25.3")
def solution_3():
    """Set the card's time equal to the time of computing, and solve for the tokens.

    For each parameter the card sends

        (2 + 2 + 4) · (gpus - 1) / gpus

    bytes in a step: weights in bfloat16 twice, gradients in float32 once. For each
    parameter and token a GPU computes 6 + 2 operations.

    Both times are proportional to the number of parameters. The argument that is
    missing is therefore the size of the model: a larger one needs as many tokens.
    """

    def tokens_to_hide(gpus, gigabit, flops):
        sent_for_a_parameter = (2 + 2 + 4) * (gpus - 1) / gpus
        bytes_per_second = gigabit * 1e9 / 8
        seconds_of_the_card = sent_for_a_parameter / bytes_per_second
        seconds_of_a_token = (6 + 2) / flops
        return seconds_of_the_card / seconds_of_a_token

    return tokens_to_hide


# -- answers ---------------------------------------------------------------------------


def ring_of_machines(parameters, machines, each):
    return 2 * (machines - 1) / machines * 4 * parameters


def all_rings(parameters, machines, each):
    part = 4 * parameters / each
    return round(each * 2 * part * (machines - 1) / machines)


def tokens(gpus, gigabit, flops):
    return flops * (gpus - 1) / gpus / (gigabit * 1e9 / 8)


def tokens_up(gpus, gigabit, flops):
    return math.ceil(tokens(gpus, gigabit, flops))


def tokens_of_the_lesson(gpus, gigabit, flops):
    return tokens(gpus, gigabit, flops) * (8192 * 1.06 / 1.10) / tokens(64, 400, 4e14)


RIGHT = {
    "fewest_machines": [
        (np.int64(4), torch.tensor(6)),
        (4.0, np.float32(6)),
    ],
    "hybrid_bytes": [ring_of_machines, all_rings],
    "tokens_to_hide": [
        tokens,
        tokens_up,
        lambda g, n, f: round(tokens(g, n, f), -1),
        tokens_of_the_lesson,
    ],
}
WRONG = {
    "fewest_machines": [
        ((3, 6), "whole for a moment"),
        ((32, 48), "of eight GPUs each"),
        ((2, 6), "85.6 GB"),
        ((5, 6), "fewer are as well"),
        ((4, 4), "three times the activations"),
        ((4, 5), "61.2 GB"),
        ((3.5, 6), "round up"),
        (("4", 6), "give a number, not '4'"),
        ((True, 6), "not a bool"),
        ((0, 6), "at least one machine"),
        ((4, -1), "at least one machine"),
        ((math.inf, 6), "not inf"),
        ((4, math.nan), "not nan"),
        ((torch.ones(2), 6), "not a Tensor"),
    ],
    "hybrid_bytes": [
        (lambda p, m, e: ring_of_machines(p, m, e) / e, "one GPU's part"),
        (lambda p, m, e: 4 * p, "2 (n - 1) / n"),
        (lambda p, m, e: 8 * p, "not twice the whole"),
        (lambda p, m, e: 8 * p * (m * e - 1) / (m * e), "one GPU of each"),
        (lambda p, m, e: ring_of_machines(p, m, e) / 2, "4 bytes"),
        (lambda p, m, e: ring_of_machines(p, m, e) + 4 * p, "gathered"),
        (lambda p, m, e: ring_of_machines(p, m, e) * e, "a part of the"),
        (lambda p, m, e: 8 * p * (m - 1) / e, "carries 2 (m - 1) / m of it"),
        (lambda p, m, e: 8 * p * (m - 1), "of one machine"),
        (
            lambda p, m, e: 8 * p * (m * e - 1) / (m * e) / e,
            "part in a ring through all",
        ),
        (lambda p, m, e: 5.5 * p, "how many such rings"),
        (lambda p, m, e: "many", "give a number, not 'many'"),
        (lambda p, m, e: 1 / 0, "ZeroDivisionError"),
    ],
    "tokens_to_hide": [
        (lambda g, n, f: tokens(g, n, f) / 8, "8 bits"),
        (lambda g, n, f: tokens(g, n, f) * 8, "the ring once"),
        (lambda g, n, f: tokens(g, n, f) / 64, "of the whole machine"),
        (lambda g, n, f: f / (n * 1e9 / 8), "(n - 1) / n of a message"),
        (
            lambda g, n, f: f * (g - 8) / g / (n * 1e9 / 8),
            "not one of each machine",
        ),
        (lambda g, n, f: tokens(g, n, f) * 4 / 3, "computed again"),
        (lambda g, n, f: tokens(g, n, f) * g, "not of all"),
        (lambda g, n, f: tokens(g, n, f) * 1e9, "10⁹ bits"),
        (lambda g, n, f: 8192, "what cancels"),
        (lambda g, n, f: [1], "not a list"),
    ],
}
