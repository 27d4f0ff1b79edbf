"""The exercises of lesson 26: states, a plan in machines, and a loss in parts."""

import math

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from exercises.counted import GIB, MIB, counted, number
from exercises.exercise import Wrong, call, exercise, run, solution
from exercises.learning import flat, must_equal
from exercises.results import tensor

_ROOM = 60 * GIB  # bytes of each GPU
_EACH = 8  # GPUs of a machine


@exercise(
    "26.1",
    hints=(
        "What does AdamW carry from step to step for a parameter that it updates? And "
        "what is left of this for one that stays as it is?",
        "Divide the bytes of both kinds together by the room of one GPU. A GPU is "
        "there or it is not: `math.ceil` rounds up.",
    ),
)
def gpus_for_states(function) -> None:
    """16 bytes for each trained parameter, 4 for each other one, shared, rounded up."""
    for trained, frozen, room in (
        (2_000_000_000, 70_553_706_496, 3e9),
        (8_030_261_248, 0, 16e9),
    ):
        what = f"with {trained:,} trained, {frozen:,} frozen and {room:.0e} bytes"
        found = number(call(function, trained, frozen, room, when=what), what)
        exact = (16 * trained + 4 * frozen) / room
        mistakes = {
            exact: "a GPU is there or it is not; round up",
            math.floor(exact): "with so few GPUs, a share is larger than the room",
            math.ceil(16 * trained / room): "frozen parameters are there, too",
            math.ceil(16 * (trained + frozen) / room): "what is frozen has neither "
            "a gradient nor AdamW's numbers",
            math.ceil((16 * trained + 8 * frozen) / room): "what is frozen needs no "
            "gradient",
            math.ceil((16 * trained + 2 * frozen) / room): "what is frozen is in "
            "float32, too",
            math.ceil(4 * (trained + frozen) / room): "that is for the parameters "
            "alone; gradients and AdamW's two numbers are states, too",
            math.ceil((12 * trained + 4 * frozen) / room): "a parameter that is "
            "trained has 4 + 4 + 8 bytes of states",
            math.ceil((8 * trained + 4 * frozen) / room): "AdamW has two numbers for "
            "each parameter, in float32",
            math.ceil(16 * trained / room) + math.ceil(4 * frozen / room): "round up "
            "once: a GPU has shares of both",
            1 / exact: "upside down: more room needs fewer GPUs",
        }
        mistakes.pop(math.ceil(exact), None)
        why = f"{found:g} GPUs; divide the bytes of all states by the room of one GPU"
        counted(found, math.ceil(exact), mistakes, why, what=what)


@solution("26.1")
def solution_1():
    """A parameter, its gradient and AdamW's two numbers are 4 + 4 + 8 = 16 bytes.

    A frozen parameter has 4 bytes and no more. FSDP divides all of them among all GPUs.
    A share must fit, so round up.

    For 70B with adapters of 2 billion parameters and 3 GB for states, these are 105
    GPUs. If everything were trained, they would be 387.
    """
    import math

    def gpus_for_states(trained, frozen, room):
        return math.ceil((16 * trained + 4 * frozen) / room)

    return gpus_for_states


# -- machines --------------------------------------------------------------------------


def _needs(machines: int, tokens: int) -> float:
    """Bytes of each GPU for 70B on so many machines."""
    from scripts.fit_run import MODELS, peak_bytes

    return sum(peak_bytes(MODELS["70B"], _EACH * machines, tokens, True).values())


def _fewest(tokens: int) -> int:
    machines = 1
    while _needs(machines, tokens) > _ROOM:
        machines += 1
    return machines


STATES_ALONE = 3  # machines on which the states of 70B fit into 60 GiB


@exercise(
    "26.2",
    hints=(
        "`peak_bytes(model, gpus, tokens, recompute)` returns parts. When do they add "
        "up to 60 GiB or less?",
        "Try one machine after the other. More tokens keep more activations on each "
        "GPU, so search again from the beginning for 12,288.",
    ),
)
def machines_needed(few_tokens, many_tokens) -> None:
    """Machines of eight GPUs with 60 GiB each, for 70B."""
    answers = {"4,096 tokens": (4096, few_tokens), "12,288": (12288, many_tokens)}
    for name, (tokens, answer) in answers.items():
        answer = number(answer, name)
        right = _fewest(tokens)
        if answer == right:
            continue
        if answer < 1:
            raise Wrong(f"{name}: at least one machine is needed, not {answer:g}")
        if answer == _EACH * right:
            raise Wrong(f"{name}: machines are asked for, of eight GPUs each")
        if answer != int(answer):
            raise Wrong(f"{name}: a machine is there or it is not; round up")
        needs = _needs(int(answer), tokens) / GIB
        if answer > right:
            raise Wrong(
                f"{name}: {answer:g} machines are enough, with {needs:.1f} GiB on each "
                "GPU, but fewer are as well"
            )
        why = f"{name}: on {answer:g} machines each GPU needs {needs:.1f} GiB"
        if answer == STATES_ALONE:
            why += "; the states alone would fit"
        if tokens == 12288 and answer == _fewest(4096):
            why += "; three times the tokens have three times the activations"
        raise Wrong(why)


@solution("26.2")
def solution_2():
    """Add one machine after the other until a GPU needs no more than 60 GiB.

    More machines make the shares of the states smaller. Activations and what is there
    for a moment stay as they are. These parts grow with the tokens, so the second
    search begins anew.

    The states alone would fit on 3 machines: 16 · 70.6 · 10⁹ / 24 bytes are 43.8 GiB.
    """
    from scripts.fit_run import MODELS, peak_bytes

    def machines_needed(tokens):
        machines = 1
        while True:
            parts = peak_bytes(MODELS["70B"], 8 * machines, tokens, recompute=True)
            if sum(parts.values()) <= 60 * 2**30:
                return machines
            machines += 1

    return machines_needed(4096), machines_needed(12288)


# -- a loss in parts -------------------------------------------------------------------

TOKENS, DIM, WORDS, PARTS = 500, 64, 2048, 10  # 50 tokens of a part
UNEVEN = 8  # parts of 63 tokens, and a last one of 59
MOST_MIB = 3.5  # a loss in one part has about 12


def case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the last norm returns, the last matrix, and the right words."""
    torch.manual_seed(0)
    x = torch.randn(TOKENS, DIM).cuda().requires_grad_()
    weight = (torch.randn(WORDS, DIM) / 8).cuda().requires_grad_()
    return x, weight, torch.randint(0, WORDS, (TOKENS,)).cuda()


def _plain(x, weight, targets):
    return F.cross_entropy((x @ weight.T).float(), targets)


@exercise(
    "26.3",
    hints=(
        "Chunk `x` and `targets`, and add up the sums of the losses "
        '(`reduction="sum"`). The mean needs one division at the end. Loss and '
        "gradients are right now, and the peak is not: what does autograd save in "
        "each part?",
        "`checkpoint(function, some_x, weight, some_targets, use_reentrant=False)` "
        "saves the arguments only, and computes the logits of a part again in "
        "`backward()`.",
    ),
)
def loss_in_parts(function) -> None:
    """Loss and gradients of a cross entropy in one part, with less memory."""
    ones = torch.ones(4, 4).cuda().requires_grad_()
    (ones @ ones).sum().backward()  # cuBLAS takes its workspaces
    for parts in (PARTS, UNEVEN):
        x, weight, targets = case()
        what = f"with {parts} parts"
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = call(function, x, weight, targets, parts, when=what)
        loss = tensor(loss, f"{what}: it returns", ())
        if not loss.requires_grad:
            raise Wrong(f"{what}: the loss has no gradient")
        run(loss.backward, when=what)
        peak = (torch.cuda.max_memory_allocated() - before) / MIB
        found = flat(_grad(p, name) for p, name in ((x, "x"), (weight, "weight")))
        _compare(loss, found, parts, what)
        if peak > MOST_MIB:
            raise Wrong(
                f"{what}: the loss is right, and its peak is {peak:.1f} MiB; "
                f"{MOST_MIB} are enough, if the logits of a part are gone before the "
                "next part, and computed again in backward()"
            )


def _grad(p: torch.Tensor, name: str) -> torch.Tensor:
    if p.grad is None:
        raise Wrong(f"{name} gets no gradient")
    return p.grad


def _compare(loss, found, parts: int, what: str) -> None:
    x, weight, targets = case()
    right = _plain(x, weight, targets)
    right.backward()
    value, wanted = loss.item(), right.item()
    mistakes = {
        wanted * TOKENS: "that is the sum of all losses; return their mean",
        wanted * parts: "that is the sum of the parts' means",
        wanted / parts: "the mean was divided by the parts once more",
    }
    if not math.isclose(value, wanted, rel_tol=1e-5):
        for mistake, why in mistakes.items():
            if math.isclose(value, mistake, rel_tol=1e-2):
                raise Wrong(f"{what}: {why}")
        if math.isclose(value, wanted, rel_tol=1e-2):
            raise Wrong(f"{what}: parts of different length must not weigh the same")
        raise Wrong(f"{what}: the loss is {value:.4f}, in one part {wanted:.4f}")
    gradients = flat([x.grad, weight.grad])
    must_equal(found, gradients, 1e-4, {}, f"{what}: the gradient")


@solution("26.3")
def solution_3():
    """Compute the logits of one part at a time, and again in `backward()`.

    A plain loop over parts does not help: autograd saves what each part needs for
    `backward()`, and the parts add up. `checkpoint` saves only the arguments of a part,
    which exist anyway. Parts can have different lengths, so add up sums, and divide
    once. The price is one more matmul with the last matrix.
    """
    import torch.nn.functional as F
    from torch.utils.checkpoint import checkpoint

    def sum_of_a_part(x, weight, targets):
        return F.cross_entropy((x @ weight.T).float(), targets, reduction="sum")

    def loss_in_parts(x, weight, targets, parts):
        total = 0
        for some, right in zip(x.chunk(parts), targets.chunk(parts), strict=True):
            total = total + checkpoint(
                sum_of_a_part, some, weight, right, use_reentrant=False
            )
        return total / len(targets)

    return loss_in_parts


def in_parts(reduction="sum", again=True, divisor="tokens"):
    """A loss in parts, for tests: with a mistake or without."""

    def part(x, weight, targets):
        return F.cross_entropy((x @ weight.T).float(), targets, reduction=reduction)

    def function(x, weight, targets, parts):
        total = 0
        for some, right in zip(x.chunk(parts), targets.chunk(parts), strict=True):
            if again:
                loss = checkpoint(part, some, weight, right, use_reentrant=False)
            else:
                loss = part(some, weight, right)
            total = total + loss
        return total / {"tokens": len(targets), "parts": parts, "one": 1}[divisor]

    return function
