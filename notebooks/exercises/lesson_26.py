"""The exercises of lesson 26: how long a run takes, where it fits, what hides."""

import math

from exercises.counted import counted, is_near, number
from exercises.exercise import Wrong, call, exercise, solution

_ROOM = 60e9  # bytes of each GPU
_EACH = 8  # GPUs of a machine
_DAY = 24 * 3600


@exercise(
    "26.1",
    hints=(
        "How many tokens do all GPUs together train on in a second?",
        "Divide all tokens by the tokens of a second. A day has 24 * 3600 seconds.",
    ),
)
def training_days(function) -> None:
    """Tokens over tokens per second, in days."""
    for tokens, gpus, rate in ((15e12, 1024, 400.0), (2e12, 64, 8000.0)):
        what = f"with {tokens:.0e} tokens, {gpus} GPUs and {rate:g} tokens/s each"
        found = number(call(function, tokens, gpus, rate, when=what), what)
        right = tokens / (gpus * rate) / _DAY
        mistakes = {
            right * _DAY: "that is in seconds",
            right * 24: "that is in hours",
            right * gpus: "`rate` is of one GPU, and all of them work",
            right / gpus: "divide by the number of GPUs once",
            right * 60: "an hour has 3600 seconds",
            math.ceil(right): "do not round to full days",
            math.floor(right): "do not round to full days",
        }
        why = f"{found:.4g} days; divide the tokens by those of one second"
        counted(found, right, mistakes, why, what=what, near=1e-3)


@solution("26.1")
def solution_1():
    """All GPUs together train on `gpus * rate` tokens in a second.

    The result leaves out what a long run loses to failures and restarts.
    """

    def training_days(tokens, gpus, rate):
        return tokens / (gpus * rate) / (24 * 3600)

    return training_days


def _needs(machines: int, sequences: int) -> float:
    """Bytes of each GPU for 70B on so many machines."""
    from scripts.plan_run import MODELS, Plan, peak_bytes

    gpus = _EACH * machines
    return sum(
        peak_bytes(MODELS["70B"], Plan(gpus, gpus, sequences=sequences)).values()
    )


def _fewest(sequences: int) -> int:
    machines = 1
    while _needs(machines, sequences) > _ROOM:
        machines += 1
    return machines


@exercise(
    "26.2",
    hints=(
        "`peak_bytes(model, plan)` returns parts. When do they add up to 60e9 or less?",
        "With FSDP over everything, `shard` is the number of GPUs. Three sequences "
        "keep more activations on each GPU, so search again from the beginning.",
    ),
)
def machines_needed(one_sequence, three_sequences) -> None:
    """Machines of eight GPUs with 60 GB each, for 70B."""
    answers = {"one sequence": (1, one_sequence), "three": (3, three_sequences)}
    for name, (sequences, answer) in answers.items():
        answer = number(answer, name)
        right = _fewest(sequences)
        if answer == right:
            continue
        if answer < 1:
            raise Wrong(f"{name}: at least one machine is needed, not {answer:g}")
        if answer == _EACH * right:
            raise Wrong(f"{name}: machines are asked for, of eight GPUs each")
        if answer != int(answer):
            raise Wrong(f"{name}: a machine is there or it is not; round up")
        needs = _needs(int(answer), sequences) / 1e9
        if answer > right:
            raise Wrong(
                f"{name}: {answer:g} machines are enough, with {needs:.1f} GB on each "
                "GPU, but fewer are as well"
            )
        why = f"{name}: on {answer:g} machines each GPU needs {needs:.1f} GB"
        if answer == STATES_ALONE:
            why += "; the states alone would fit"
        if sequences == 3 and answer == _fewest(1):
            why += "; three sequences have three times the activations"
        raise Wrong(why)


STATES_ALONE = 3  # machines on which the states of 70B fit into 60 GB


@solution("26.2")
def solution_2():
    """Add one machine after the other until a GPU needs no more than 60 GB.

    More machines make the shards of the states smaller. Activations and what is
    gathered for a moment stay as they are. These parts grow with the sequences, so the
    second search begins anew.

    The states alone would fit on 3 machines: 16 · 70.6 / 24 = 47 GB.
    """
    from scripts.plan_run import MODELS, Plan, peak_bytes

    def machines_needed(sequences):
        machines = 1
        while True:
            gpus = 8 * machines
            plan = Plan(gpus, shard=gpus, sequences=sequences)
            if sum(peak_bytes(MODELS["70B"], plan).values()) <= 60e9:
                return machines
            machines += 1

    return machines_needed(1), machines_needed(3)


@exercise(
    "26.3",
    hints=(
        "Write down two times for a model of P parameters: the seconds that the "
        "messages need, and the seconds that a GPU computes. Which letters cancel "
        "if the two are equal?",
        "A network's rate is in bits and a message is in bytes. The ring goes through "
        "all GPUs, and it leaves each machine once, so do not divide the rate by the "
        "eight GPUs of a machine.",
    ),
)
def tokens_that_hide(function) -> None:
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
            right
            * 8: "the network of a machine carries the ring once, not once for each "
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


@solution("26.3")
def solution_3():
    """Set the network's time equal to the time of computing, and solve for the tokens.

    For each parameter a machine sends

        (2 + 2 + 4) · (gpus - 1) / gpus

    bytes in a step: weights in bfloat16 twice, gradients in float32 once. For each
    parameter and token a GPU computes 6 + 2 operations.

    Both times are proportional to the number of parameters. The argument that is
    missing is therefore the size of the model: a larger one needs as many tokens.
    """

    def tokens_that_hide(gpus, gigabit, flops):
        sent_for_a_parameter = (2 + 2 + 4) * (gpus - 1) / gpus
        bytes_per_second = gigabit * 1e9 / 8
        seconds_of_the_network = sent_for_a_parameter / bytes_per_second
        seconds_of_a_token = (6 + 2) / flops
        return seconds_of_the_network / seconds_of_a_token

    return tokens_that_hide


def tokens(gpus, gigabit, flops):
    return flops * (gpus - 1) / gpus / (gigabit * 1e9 / 8)
