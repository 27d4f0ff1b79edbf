"""Judges of the exercises of lesson 17: plans, by arithmetic."""

import math

from helpers.check import Wrong, call, exercise, name_mistake, number

# -- 17.1 ------------------------------------------------------------------------------

_ROOM = 60e9  # bytes of each GPU
_EACH = 8  # GPUs of a machine


def _needs(machines: int, batch: int) -> float:
    """Bytes of each GPU for 70B on so many machines."""
    from helpers import plan

    return plan.bytes_per_gpu("70B", _EACH * machines, batch=batch).total


def _fewest(batch: int) -> int:
    machines = 1
    while _needs(machines, batch) > _ROOM:
        machines += 1
    return machines


@exercise("17.1")
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


# -- 17.2 ------------------------------------------------------------------------------


@exercise("17.2")
def hybrid_bytes(function) -> None:
    """An all-reduce of each GPU's part, over the machines; eight share the cards."""
    for parameters, machines, each in ((7e9, 3, 8), (10**9, 16, 4), (10**6, 2, 2)):
        ranks = machines * each
        when = f"with {parameters:.0e} parameters, {machines} machines of {each} GPUs:"
        found = number(
            call(function, parameters, machines, each, when=when), when.rstrip(":")
        )
        right = 2 * (machines - 1) / machines * 4 * parameters
        if math.isclose(found, right, rel_tol=1e-3):
            continue
        mistakes = {
            right / each: "that is one GPU's part; all of a machine share its cards",
            right / 2: "an all-reduce sends 2 (n - 1) / n of a tensor, and float32 has "
            "4 bytes",
            4 * parameters: "in a ring of n an all-reduce sends 2 (n - 1) / n",
            8 * parameters: "a ring of n sends 2 (n - 1) / n, not twice the whole",
            8 * (ranks - 1) / ranks * parameters: "that is one ring through all GPUs; "
            "here gathers stay inside, and a ring has one GPU of each machine",
            right + 4 * parameters: "weights are gathered inside a machine; nothing of "
            "that passes the card",
            right * machines / each: "that is one GPU's part, and a ring of m carries "
            "2 (m - 1) / m of it; all of a machine share its cards",
            8 * (ranks - 1) / ranks * parameters / each: "that is one GPU's part in a "
            "ring through all GPUs; its ring has one GPU of each machine, and all of a "
            "machine share its cards",
            right * each: "each GPU has a part of the gradients only, not all",
            right * machines: "of one machine, not of all together",
        }
        name_mistake(found, mistakes, 1e-3, when)
        raise Wrong(
            f"{when} {found:.4g} bytes; think of the ring of one GPU and its partners, "
            "what it carries, and how many such rings leave a machine"
        )


# -- 17.3 ------------------------------------------------------------------------------


@exercise("17.3")
def tokens_to_hide(function) -> None:
    """8 P (n - 1) / n bytes in the time of 8 P tokens FLOP: P cancels."""
    for gpus, gigabit, flops in (
        (128, 400, 400e12),
        (64, 400, 400e12),
        (16, 100, 150e12),
        (1024, 25, 3e14),
    ):
        when = f"with {gpus} GPUs, {gigabit} Gbit/s and {flops:.0e} FLOP/s:"
        found = number(
            call(function, gpus, gigabit, flops, when=when), when.rstrip(":")
        )
        right = flops * (gpus - 1) / gpus / (gigabit * 1e9 / 8)
        if abs(found - right) <= 5e-3 * right:  # rounded is right as well
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
            right
            * 4
            / 3: "blocks are computed again: 8 FLOP for a token and parameter",
            right * gpus: "tokens of each GPU, not of all",
            right / gpus: "each GPU computes its own tokens; do not divide by the GPUs",
            1 / right: "upside down: more FLOP/s need more tokens",
        }
        name_mistake(found, mistakes, 1e-3, when)
        raise Wrong(
            f"{when} {found:.4g} tokens; write both times down for P parameters, set "
            "them equal, and see what cancels"
        )
