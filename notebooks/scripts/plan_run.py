"""Plan a training run on GPUs that you do not have: memory, messages, seconds.

    python plan_run.py 70B --gpus=64 --shard=64 --sequences=2 --network=400
    python plan_run.py 70B --gpus=64 --network=400 --choose --total=2e12 --price=3.99

The first line judges one plan. The second one tries many, and prints the fastest of
each kind that fits, with the days and dollars of a training.

Models: a Llama (or a GPT, which has no gate), computed in bfloat16 with its states in
float32, and one step of AdamW. Leaves out: what the allocator wastes, memory of CUDA
and NCCL, data loading, slow GPUs, failures. Put your model and your card between the
two lines of dashes. Lessons 26 and 27 of the course explain each function.
"""

import argparse
import sys
from dataclasses import dataclass, fields, replace
from itertools import product


@dataclass(frozen=True)
class Model:
    layers: int
    dim: int  # numbers of a token between two blocks
    heads: int
    kv_heads: int  # heads of keys and values
    hidden: int  # numbers of a token inside the feed-forward network
    vocab: int
    tied: bool = False  # the embedding is also the last matrix
    gated: bool = True  # three matrices in the feed-forward network, as in Llama
    experts: int = 1
    active: int = 1  # experts that a token uses
    head: int = 0  # numbers of a head, if they are not dim / heads


@dataclass(frozen=True)
class Plan:
    gpus: int
    shard: int = 1  # GPUs that share the states: 1 is DDP, all is FSDP
    tp: int = 1  # GPUs that share each matrix
    pp: int = 1  # stages of the pipeline
    cp: int = 1  # GPUs that share a sequence
    ep: int = 1  # GPUs that share the experts
    sequences: int = 1  # of a micro-batch
    microbatches: int = 1  # of a step
    tokens: int = 4096  # of a sequence
    again: float = 1.0  # share of the blocks that are computed twice
    reshard: bool = True  # gather weights for each micro-batch, twice
    chunks: int = 1  # parts of a stage (interleaved schedule)
    card: str = "H100"
    network: float = 0.0  # Gbit/s from machine to machine for each GPU; 0: not known
    numbers: str = "bfloat16"
    compiled: bool = False
    host: str = "fast"  # one of HOSTS


# -- your model, your card -------------------------------------------------------------
MODELS = {
    "1B": Model(16, 2048, 32, 8, 8192, 128256, tied=True),  # Llama 3.2
    "7B": Model(32, 4096, 32, 32, 11008, 32000),  # Llama 2
    "8B": Model(32, 4096, 32, 8, 14336, 128256),  # Llama 3
    "70B": Model(80, 8192, 64, 8, 28672, 128256),  # Llama 3
    "405B": Model(126, 16384, 128, 8, 53248, 128256),  # Llama 3.1
}
# FLOP/s in bfloat16; bytes/s of memory and of NVLink; bytes of memory (datasheets)
CARDS = {
    "A100": (312e12, 2.039e12, 300e9, 85e9),
    "H100": (989.4e12, 3.35e12, 450e9, 85e9),
}
# The shares of the peak that matmuls and attention reach, and the share of the
# memory's bandwidth: fitted to published runs. They absorb all that no formula here
# knows, so they say little about a kernel alone. A new card needs a line here, too
REACHED = {"A100": (0.75, 0.32), "H100": (0.60, 0.17)}
OF_MEMORY = 0.58
# Seconds of the host for a launch (a kernel) and for a call (a collective). Fitted to a
# 1B model in nanotron on H100 (slow) and a GPT in Megatron-LM on A100 (fast)
HOSTS = {"fast": (36e-6, 79e-6), "slow": (36e-6, 256e-6)}
# --------------------------------------------------------------------------------------
USABLE = 0.9  # of a card, by a plan that you try before you rent more
GIB = 2**30
MACHINE = 8  # GPUs joined by NVLink
# Shares of their bandwidth that messages reach, and seconds of each message, of a hop
# to the next GPU, and to the next machine. Fitted to messages of nccl-tests from 1 to
# 512 MiB: NVLINK, START, HOP. Measured over EFA: CABLE; InfiniBand has no recording.
# Assumed: NETWORK
NVLINK, NETWORK = 0.57, 0.9
START, HOP, CABLE = 15e-6, 0.8e-6, 27e-6
# Kernels of a block, forward; backward launches as many. Counted in dry runs
LAUNCHES = 24
# Bytes that a token moves forward beside matmuls and attention, in plain PyTorch. For
# each of `dim`: two norms with copies in float32, 2 x 36 (fused: 2 x 4); rotary
# positions, 20; two sums, 12. For each of `hidden`: SiLU and a product, 10 (GELU: 4).
# Backward moves twice as many. `moved_bytes` adds the loss, 36 for each word of the
# vocabulary; and for each parameter and micro-batch FSDP's two gathers, which write and
# copy weights (2 x 6), and its scatter, which copies and reads gradients (10)
PASSES = {True: (104, 10), False: (20, 4)}


def widths(model):
    head = model.head or model.dim // model.heads
    return head * model.heads, head * model.kv_heads  # of queries, of keys


def matrices(model):
    q_dim, kv_dim = widths(model)
    attention = 2 * model.dim * (q_dim + kv_dim)
    feed_forward = (3 if model.gated else 2) * model.dim * model.hidden
    return attention, feed_forward


def parameters(model):
    attention, feed_forward = matrices(model)
    router = model.dim * model.experts if model.experts > 1 else 0
    block = attention + model.experts * feed_forward + router + 2 * model.dim
    outside = (1 if model.tied else 2) * model.vocab * model.dim + model.dim
    return model.layers * block + outside


def pieces(model, plan):
    attention, feed_forward = matrices(model)
    block = attention + feed_forward * model.experts / plan.ep
    matrices_outside = 1 if model.tied or plan.pp > 1 else 2
    outside = matrices_outside * model.vocab * model.dim
    return model.layers / plan.pp, block / plan.tp, outside / plan.tp


def state_bytes(model, plan):
    layers, block, outside = pieces(model, replace(plan, ep=1))
    return 16 * (layers * block + outside) / plan.shard


def block_bytes(model, plan):
    q_dim, kv_dim = widths(model)
    tensors = 2 * model.dim + model.hidden * model.active
    cut = (8 if model.gated else 4) * tensors + 4 * kv_dim + 4 * model.heads + 8
    cut += 4 * (q_dim - model.dim)
    rows = plan.sequences * plan.tokens / plan.cp
    return rows * (4 * model.dim + cut / plan.tp)


def kept_bytes(model, plan):
    rows = plan.sequences * plan.tokens / plan.cp
    inputs = 2 * rows * model.dim / plan.tp
    each = plan.again * inputs + (1 - plan.again) * block_bytes(model, plan)
    most = plan.pp + (plan.pp - 1) / plan.chunks * (plan.chunks > 1)  # interleaved
    in_flight = min(most, plan.microbatches)
    return each * model.layers / plan.pp * in_flight


def moment_bytes(model, plan):
    layers, block, outside = pieces(model, plan)
    rows = plan.sequences * plan.tokens / plan.cp
    stays = 2 * outside
    in_turn = 2 * model.vocab * model.dim / plan.tp + 10 * block
    if plan.shard == 1 or not plan.reshard:
        stays = (2 if plan.shard == 1 else 6) * (layers * block + outside)
        in_turn = 0
    loss = 12 * rows * model.vocab / plan.tp
    again = block_bytes(model, plan) if plan.again else 0
    wide = 4 * rows * model.hidden * model.active / plan.tp
    return stays + max(loss, in_turn + again + wide, 4 * outside)


def peak_bytes(model, plan):
    return {
        "states": state_bytes(model, plan),
        "activations": kept_bytes(model, plan),
        "for a moment": moment_bytes(model, plan),
    }


def flops(model, plan):
    attention, feed_forward = matrices(model)
    block = attention + model.active * feed_forward
    matmuls = 2 * (model.layers * block + model.vocab * model.dim)
    scores = 2 * model.layers * plan.tokens * widths(model)[0]
    return matmuls, scores


def moved_bytes(model, plan):
    for_dim, for_hidden = PASSES[model.gated]
    block = for_dim * model.dim + for_hidden * model.hidden * model.active
    of_a_token = (3 + plan.again) * model.layers * block + 36 * model.vocab
    return of_a_token, 22 * parameters(model)


def compute_seconds(model, plan):
    peak, bandwidth, *_ = CARDS[plan.card]
    of_matmuls, of_attention = REACHED[plan.card]
    matmuls, scores = flops(model, plan)
    of_a_token, of_weights = moved_bytes(model, plan)
    tokens = plan.sequences * plan.tokens / plan.cp
    seconds = tokens * (3 + plan.again) * matmuls / (peak * of_matmuls)
    seconds += tokens * (3.5 + plan.again) * scores / (peak * of_attention)
    seconds += (tokens * of_a_token + of_weights) / (bandwidth * OF_MEMORY)
    return seconds / (plan.tp * plan.pp)


def ring(nbytes, ranks):
    return nbytes * (ranks - 1) / ranks


def weight_messages(model, plan):
    layers, block, outside = pieces(model, plan)
    stage = layers * block + outside
    turns, passes = (plan.microbatches, 2) if plan.reshard else (1, 1)
    weights = turns * (passes * layers * block + outside)
    copies = plan.gpus // (plan.tp * plan.pp * plan.shard)
    gather = 2 * ring(weights, plan.shard)
    scatter = 4 * turns * ring(stage, plan.shard)
    far, hsdp = plan.tp * plan.shard, plan.shard > 1  # HSDP: in each backward, hidden
    times = turns if hsdp else 1
    average = times * 2 * 4 * ring(state_bytes(model, plan) / 16, copies)
    gathers, calls = turns * (passes * layers + 1), turns * (layers + 1)
    return [  # name, bytes, calls, ranks, apart, hidden
        ("gather weights", gather, gathers, plan.shard, plan.tp, True),
        ("scatter gradients", scatter, calls, plan.shard, plan.tp, True),
        ("average copies", average, times * (layers + 1), copies, far, hsdp),
    ]


def token_messages(model, plan):
    numbers = 2 * plan.sequences * plan.tokens / plan.cp * model.dim
    keys = 2 * numbers * plan.cp * widths(model)[1] / model.dim / plan.tp
    passes = (2 + plan.again) * plan.microbatches * model.layers / plan.pp
    slices = 4 * passes * ring(numbers, plan.tp)
    gathered = passes * ring(keys, plan.cp)
    experts = 2 * passes * ring(numbers * model.active, plan.ep)
    hops, far = 2 * plan.microbatches * plan.chunks, plan.gpus // plan.pp
    return [
        ("slices of layers", slices, 4 * passes, plan.tp, 1, False),
        ("keys and values", gathered, passes, plan.cp, plan.tp, False),
        ("tokens to experts", experts, 2 * passes, plan.ep, plan.tp, False),
        ("to next stage", hops * numbers / plan.tp, hops, min(plan.pp, 2), far, True),
    ]


def message_seconds(plan, nbytes, calls, ranks, apart):
    bandwidth = NVLINK * CARDS[plan.card][2]
    latency = START + HOP * (ranks - 1)
    if ranks * apart > MACHINE:
        cards = max(1, MACHINE // apart)
        network = NETWORK * plan.network * 1e9 / 8 * cards
        bandwidth = min(bandwidth, network)
        leaving = ranks * min(apart, MACHINE) / MACHINE  # hops between machines
        latency += leaving * CABLE
    return nbytes / bandwidth + calls * latency


def host_seconds(model, plan):
    launch, call = HOSTS[plan.host]
    passes = plan.microbatches * (2 + plan.again) + 1  # and the update
    launches = LAUNCHES * passes * (model.layers / plan.pp + 1)
    calls = sum(calls for _, _, calls, *_ in messages(model, plan))
    return launches * launch + calls * call


def bubble(plan):
    return (plan.pp - 1) / (plan.microbatches * plan.chunks)


def not_known(model, plan):
    found = {
        "the network between machines": plan.gpus > MACHINE and not plan.network,
        f"the card {plan.card}": plan.card not in CARDS,
        f"the shares that {plan.card} reaches": plan.card not in REACHED,
        f"the speed in {plan.numbers}": plan.numbers != "bfloat16",
        "the speed of compiled kernels": plan.compiled,
        f"the host {plan.host}": plan.host not in HOSTS,
        "how evenly the router fills the experts": model.experts > 1,
        f"sequences of {plan.tokens:,} tokens": not 512 <= plan.tokens <= 65536,
    }
    return [what for what, is_missing in found.items() if is_missing]


def step_seconds(model, plan):
    if missing := not_known(model, plan):
        raise ValueError("not known: " + "; ".join(missing))
    computing = plan.microbatches * compute_seconds(model, plan)
    exposed = exposed_seconds(model, plan, computing)
    host = max(0.0, host_seconds(model, plan) - computing - exposed)
    update = 28 * state_bytes(model, plan) / 16 / CARDS[plan.card][1]
    idle = bubble(plan) * (computing + exposed + host)
    found = dict(computing=computing, messages=exposed, host=host)
    return found | dict(bubble=idle, update=update)


def exposed_seconds(model, plan, computing):
    hidden = exposed = 0.0
    for _, *message, is_hidden in messages(model, plan):
        seconds = message_seconds(plan, *message)
        hidden += seconds * is_hidden
        exposed += seconds * (not is_hidden)
    return exposed + max(0.0, hidden - computing)


def messages(model, plan):
    found = weight_messages(model, plan) + token_messages(model, plan)
    return [message for message in found if message[3] > 1]


def rate(model, plan):
    sequences = plan.sequences * plan.microbatches
    tokens = sequences * plan.tokens / (plan.cp * plan.tp * plan.pp)
    per_second = tokens / sum(step_seconds(model, plan).values())
    matmuls, scores = flops(model, plan)
    mfu = 3 * (matmuls + 2 * scores) * per_second / CARDS[plan.card][0]
    return per_second, mfu


def choices(model, gpus, sequences, usable=USABLE, **options):
    """Plans for so many sequences in a step that fit: the fastest, then the smallest.

    Returns:
        ((tokens/s of a GPU, MFU), plan) of each.
    """
    found = {}
    degrees = product((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 8, 32, 64, 1024), (1, 2, 4))
    for tp, pp, shard, batch in degrees:
        data, idle = divmod(gpus, tp * pp)
        shard = min(shard, data)
        turns, rest = divmod(sequences, data * batch) if data else (0, 0)
        if not turns or rest or idle or model.kv_heads % tp or data % shard:
            continue
        ways = product((0.0, 0.5, 1.0), (True, False), (1, 2, 4, 8) if pp > 1 else (1,))
        for again, reshard, chunks in ways:
            if model.layers < pp * chunks or (chunks > 1 and turns % pp):
                continue
            plan = Plan(gpus, shard, tp=tp, pp=pp, sequences=batch, again=again,
                        microbatches=turns, reshard=reshard, chunks=chunks,
                        **options)  # fmt: skip
            memory = sum(peak_bytes(model, plan).values())
            if memory < usable * CARDS[plan.card][3]:
                found[plan] = rate(model, plan), -memory
    return [
        (found[plan][0], plan)
        for plan in sorted(found, key=lambda plan: found[plan], reverse=True)
    ]


# -- the command line ------------------------------------------------------------------


def bill(gpus, per_second, total, price):
    """Days and dollars of a training, at a price for an hour of a GPU."""
    days = total / (gpus * per_second) / (24 * 3600)
    return days, days * 24 * gpus * price


def print_choices(name, gpus, total, price, batch=1024, **options):
    """The fastest plans that fit: of all, of those with slices, with stages, with both.

    Args:
        total: tokens of the training.
        price: dollars for an hour of a GPU.
        batch: sequences of a step.
        options: fields of `Plan`, such as `network`.
    """
    model, found = MODELS[name], {}
    for (per_second, _), plan in choices(model, gpus, batch, **options):
        found.setdefault(kind_of(plan), (per_second, plan))
    if not found:
        every = choices(model, gpus, batch, float("inf"), **options)
        needs = [sum(peak_bytes(model, plan).values()) / GIB for _, plan in every]
        why = f"the least is {min(needs):.0f} GiB" if needs else "change --batch"
        sys.exit(f"plan_run.py: nothing fits {name} on {gpus} GPUs: {why}")
    print(f"{f'{name} on {gpus:,} GPUs':23}tokens/s   days     dollars  GiB")
    for kind in sorted(found, key=lambda kind: (kind.count("+"), kind)):
        per_second, plan = found[kind]
        days, dollars = bill(gpus, per_second, total, price)
        memory = sum(peak_bytes(model, plan).values()) / GIB
        copies = plan.gpus // (plan.shard * plan.tp * plan.pp)
        split = f"{copies} x " * (copies > 1)
        split += f"{plan.shard} x tp {plan.tp} x pp {plan.pp}"
        rows = f"{plan.microbatches} x {plan.sequences}"
        more = f", {plan.chunks} parts" * (plan.chunks > 1)
        more += "" if plan.reshard else ", kept"
        costs = f"{per_second:6,.0f} {days:6,.0f} {dollars:11,.0f} {memory:4.0f}"
        print(f"{kind:25}{costs}  {split}, {rows}, {plan.again:.0%} twice{more}")


def kind_of(plan):
    """HSDP has copies of the states; with slices or stages, FSDP stands for both."""
    if plan.tp == plan.pp == 1 < plan.gpus // plan.shard:
        return "HSDP" if plan.shard > 1 else "DDP"
    return "FSDP" + " + slices" * (plan.tp > 1) + " + stages" * (plan.pp > 1)


def check(model, plan):
    """Refuse what does not divide, and what is less than one."""
    for field in fields(Plan):
        if field.type is int and getattr(plan, field.name) < 1:
            sys.exit(f"plan_run.py: --{field.name} must be 1 or more")
    if not 0 <= plan.again <= 1:
        sys.exit("plan_run.py: --again is a share of the blocks, from 0 to 1")
    if plan.network < 0:
        sys.exit("plan_run.py: --network is in Gbit/s, 0 if it is not known")
    if plan.chunks > 1 and (plan.pp == 1 or plan.microbatches % plan.pp):
        sys.exit("plan_run.py: --chunks needs --pp, which divides --microbatches")
    if plan.pp * plan.chunks > model.layers + 2:  # embedding and last matrix count, too
        sys.exit(f"plan_run.py: {model.layers} blocks are too few for --pp x --chunks")
    for number, by, what in (
        (plan.gpus, plan.tp * plan.pp * plan.shard, "--gpus by --tp x --pp x --shard"),
        (plan.gpus, MACHINE if plan.gpus > MACHINE else 1, "--gpus into machines"),
        (plan.shard, plan.cp, "--shard by --cp: it counts the GPUs of a sequence"),
        (plan.shard, plan.ep, "--shard by --ep: it counts the GPUs of the experts"),
        (model.heads, plan.tp, "the heads by --tp"),
        (plan.tokens, plan.cp, "--tokens by --cp"),
        (model.experts, plan.ep, "the experts by --ep"),
    ):
        if number % by:
            sys.exit(f"plan_run.py: {number} cannot be divided by {by} ({what})")


def yes_or_no(text):
    """Whether an option is set; argparse refuses what raises a `ValueError`."""
    words = ["0", "no", "false", "1", "yes", "true"]
    return words.index(text.lower()) > 2


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    for field in fields(Plan):
        kind = yes_or_no if field.type is bool else field.type
        required = field.name == "gpus"
        default = None if required else field.default
        parser.add_argument(
            f"--{field.name}", type=kind, default=default, required=required
        )
    parser.add_argument("--choose", action="store_true", help="try many plans")
    parser.add_argument("--batch", type=int, default=1024, help="sequences of a step")
    parser.add_argument("--total", type=float, default=1e12, help="tokens to train on")
    parser.add_argument("--price", type=float, default=0.0, help="$ an hour of a GPU")
    options = vars(parser.parse_args(arguments))
    name = options.pop("model")
    choose, batch = options.pop("choose"), options.pop("batch")
    wanted, price = options.pop("total"), options.pop("price")
    model = MODELS[name]
    plan = Plan(**options)
    if choose:
        kept = ("gpus", "tokens", "card", "network", "host")
        if others := [name for name in options.keys() - kept
                      if options[name] != getattr(Plan(1), name)]:  # fmt: skip
            given = ", ".join(f"--{name}" for name in sorted(others))
            sys.exit(f"plan_run.py: --choose tries its own {given}: leave out one")
    check(model, plan)
    if choose:
        if missing := not_known(model, plan):
            sys.exit("plan_run.py: not known: " + "; ".join(missing))
        options = {field: options[field] for field in kept[1:]}
        return print_choices(name, plan.gpus, wanted, price, batch, **options)
    print(f"{parameters(model):,} parameters on {plan.gpus} {plan.card}")
    memory = peak_bytes(model, plan)
    for name, nbytes in memory.items():
        print(f"{name:18} {nbytes / GIB:9.2f} GiB")
    total = sum(memory.values())
    print(f"{'memory of a GPU':18} {total / GIB:9.2f} GiB", end="")
    if plan.card in CARDS:
        room = CARDS[plan.card][3]
        fits = "fits" if total < USABLE * room else "does not fit"
        print(f" of {room / GIB:.0f}: {fits}")
    else:
        print("; room of the card: not known")
    for name, nbytes, calls, *_ in messages(model, plan):
        print(f"{name:18} {nbytes / 1e9:9.2f} GB in {calls:,.0f} messages a step")
    if missing := not_known(model, plan):
        print("seconds of a step: not known:", "; ".join(missing))
        return
    for name, seconds in step_seconds(model, plan).items():
        print(f"{name:18} {seconds:9.3f} s")
    per_second, mfu = rate(model, plan)
    print(f"tokens/s of a GPU  {per_second:9,.0f}, MFU {mfu:.1%}")
    days, dollars = bill(plan.gpus, per_second, wanted, price)
    print(f"{wanted:.3g} tokens    {days:9,.1f} days, {dollars:,.0f} dollars")


if __name__ == "__main__":
    main()
