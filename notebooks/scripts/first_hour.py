"""The first hour on rented GPUs: are they all there, are they fast, what holds here?

    torchrun --standalone --nproc-per-node=gpu first_hour.py --price 2.50

On several machines, start it on each, with `--nnodes` and a rendezvous (lesson 25). It
needs PyTorch, 2.6 or newer, and nothing else. Parts, which `--parts` chooses:

    gpus      each GPU is there, of one kind and free; versions
    speed     matmuls, memory and copies from the host, beside the datasheet; with
              `--load 60`, also under a minute of load
    links     all-reduce, all-gather, all-to-all, pairs of GPUs, pairs of nodes
    ddp fsdp  steps of a real model, beside what you have predicted (--predicted)
    claims    five claims about several GPUs, judged by one criterion

Each part runs in processes of its own, with a time limit: if one fails, the report says
what to do, and the others still run. The exit status is 0 only if nothing was found
that should be looked into. Lesson 30 of the course explains each part.
"""

import argparse
import faulthandler
import functools
import json
import math
import os
import pickle
import signal
import socket
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

try:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
except ImportError:
    sys.exit(f"first_hour.py needs PyTorch 2.6 or newer; this is {torch.__version__}")

HAS_FORK = hasattr(os, "fork")  # not on Windows
PARTS = ("gpus", "speed", "links", "ddp", "fsdp", "claims")
RANK = int(os.environ.get("RANK", 0))
RANKS = int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
LOCAL_RANKS = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
# torchrun's numbers: a node that has lost a GPU has fewer ranks than the others
NODE = int(os.environ.get("GROUP_RANK", 0))
NODES = int(os.environ.get("GROUP_WORLD_SIZE", 1))


class Card(NamedTuple):
    """What a datasheet promises; dense rates, links in one direction."""

    bfloat16: float  # TFLOP/s; where there is none, as float32
    tf32: float
    float32: float
    memory: float  # GB/s
    nvlink: float  # GB/s; 0 where there is none
    pcie: float  # GB/s
    watts: float


# NVIDIA's datasheets: T4 (2019), V100 (2020), A100 (2021), H100 (2023), L40S (2023),
# H200 (2024), HGX B200 (2025); RTX 4090: its Ada whitepaper (2022). Add your card here.
CARDS = {
    "Tesla T4": Card(8.1, 8.1, 8.1, 320, 0, 16, 70),
    "Tesla V100-SXM2-16GB": Card(15.7, 15.7, 15.7, 900, 150, 16, 300),
    "Tesla V100-SXM2-32GB": Card(15.7, 15.7, 15.7, 900, 150, 16, 300),
    "NVIDIA A100-SXM4-40GB": Card(312, 156, 19.5, 1555, 300, 32, 400),
    "NVIDIA A100-SXM4-80GB": Card(312, 156, 19.5, 2039, 300, 32, 400),
    "NVIDIA A100-PCIE-40GB": Card(312, 156, 19.5, 1555, 0, 32, 250),
    "NVIDIA A100 80GB PCIe": Card(312, 156, 19.5, 1935, 0, 32, 300),
    "NVIDIA H100 80GB HBM3": Card(989, 495, 67, 3350, 450, 64, 700),
    "NVIDIA H200": Card(989, 495, 67, 4800, 450, 64, 700),
    "NVIDIA B200": Card(2250, 1100, 75, 7700, 900, 64, 1000),
    "NVIDIA L40S": Card(362, 183, 91.6, 864, 0, 32, 350),
    "NVIDIA GeForce RTX 4090": Card(165, 82.6, 82.6, 1008, 0, 32, 450),
}
LOW = 0.4  # of the datasheet: no machine that was recorded is below (T4: 0.49)
# of the datasheet: recorded matmuls of 4,096 and more reach 0.62 (A100, H100, H200 and
# B200; L40S: 0.47), collectives over NVLink 0.64
USUAL = 0.6
ALIKE, PAIRS_ALIKE = 0.9, 0.75  # of the fastest GPU, of the fastest pair
TAKEN = 2.0  # GiB of a GPU in use before anything runs; CUDA itself takes about 0.5
PATIENCE = 10.0  # seconds for the other ranks of a part, once one has failed
FAR = 1.3  # a measured figure is this much above or below its prediction

# -- put your model here ---------------------------------------------------------------


class Sizes(NamedTuple):
    width: int
    layers: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int
    tokens: int  # of a row


# "real" has the sizes of TinyLlama, 1.1 billion parameters
SIZES = {
    "small": Sizes(128, 2, 4, 2, 384, 64, 16),
    "real": Sizes(2048, 22, 32, 4, 5632, 32_000, 2048),
}


class Block(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.head = sizes.width // sizes.heads
        keys = self.head * sizes.key_heads
        self.norm1, self.norm2 = nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)
        self.query = nn.Linear(sizes.width, sizes.width, bias=False)
        self.key = nn.Linear(sizes.width, keys, bias=False)
        self.value = nn.Linear(sizes.width, keys, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (
            layer(y).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.place = nn.Embedding(sizes.tokens, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model(size):
    """ "small" is compared with one GPU, in float32; "real" is timed."""
    return Llama(SIZES[size])


def blocks_of(model):
    """What FSDP shards one by one."""
    return model.blocks


def make_batch(size, rows):
    """What all ranks together have: a tensor, or tensors in a tuple or a dictionary.

    The rows are along the first dimension of each.
    """
    text = torch.randint(SIZES[size].vocabulary, (rows, SIZES[size].tokens + 1))
    return {"inputs": text[:, :-1], "targets": text[:, 1:]}


def tokens_of(batch):
    """How many the report counts: tokens, or rows."""
    return batch["inputs"].numel()


def loss_of(model, batch):
    """A mean over the rows, so that equal shares may be averaged."""
    scores = model(batch["inputs"]).flatten(0, 1).float()
    return F.cross_entropy(scores, batch["targets"].flatten())


# -- what is shared --------------------------------------------------------------------


def each(change, batch):
    """A batch with each of its tensors changed, in any container."""
    if isinstance(batch, Mapping):
        return {name: each(change, part) for name, part in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(each(change, part) for part in batch)
    return change(batch) if isinstance(batch, torch.Tensor) else batch


def over_ranks(number, operation=dist.ReduceOp.MAX, group=None):
    """The largest number of all ranks: the slowest one counts."""
    if RANKS == 1:
        return number
    number = torch.tensor(number, dtype=torch.float64, device="cuda")
    dist.all_reduce(number, operation, group=group)
    return number.item()


def meet():
    if RANKS > 1:
        dist.barrier(device_ids=[LOCAL_RANK])


def milliseconds(run, calls=1):
    """Of one call, between two events, on this GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls


def median_ms(run, args, seconds=5.0, group=None, together=False):
    """The median of several repeats of several calls, after a warm-up.

    How many there are must be the same on all ranks of a collective (`together`): the
    time of the first call on the slowest rank says it.
    """
    run()
    if args.quick:
        return milliseconds(run)
    once = milliseconds(run)
    if together:
        once = over_ranks(once, group=group)
    calls = 1 if once > 100 else 5
    repeats = max(2, min(10, int(1e3 * seconds / once / calls)))
    return statistics.median(milliseconds(run, calls) for _ in range(repeats))


def card_of(name):
    """The datasheet of a card, or None. A simulator may add words in brackets."""
    return CARDS.get(name.partition(" (")[0])


VERSIONS = ("torch", "CUDA", "NCCL")

# -- gpus ------------------------------------------------------------------------------


def own_uuid():
    return str(torch.cuda.get_device_properties(LOCAL_RANK).uuid).removeprefix("GPU-")


def smi(*fields):
    """What nvidia-smi says of this GPU, as words; empty where it is not there."""
    command = f"nvidia-smi --query-gpu=uuid,{','.join(fields)} --format=csv"
    try:
        text = subprocess.run(
            f"{command},noheader,nounits".split(),
            capture_output=True, text=True, timeout=20, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(", ") for line in text.splitlines()]
    return next((w for uuid, *w in rows if uuid.removeprefix("GPU-") == own_uuid()), [])


def as_number(words):
    """The first of nvidia-smi's words, if it is a number."""
    return float(words[0]) if words and words[0].replace(".", "", 1).isdigit() else None


def measure_gpus(args):
    free, total = torch.cuda.mem_get_info()
    return {
        "name": torch.cuda.get_device_name(),
        "uuid": own_uuid(),
        "watts": as_number(smi("power.limit")),
        "host": socket.gethostname(),
        "node": NODE,
        "total GiB": total / 2**30,
        "taken GiB": (total - free) / 2**30,
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
    }


def report_gpus(ranks, args):
    lines, wrong = [f"rank node  {'GPU':34} {'GiB':>6} {'taken':>6} {'watts':>6}"], []
    for rank, gpu in enumerate(ranks):
        watts, taken = gpu.get("watts"), gpu["taken GiB"]
        power = f"{watts:6.0f}" if watts else f"{'?':>6}"
        lines.append(
            f"{rank:4} {gpu['node']:4}  {gpu['name']:34} {gpu['total GiB']:6.1f} "
            f"{taken:6.1f} {power}"
        )
        card = card_of(gpu["name"])
        if card and watts and watts < card.watts:
            wrong.append(f"rank {rank}: limited to {watts:.0f} of {card.watts:.0f} W")
        if taken > TAKEN:
            wrong.append(f"rank {rank}: {taken:.1f} GiB are in use; by whom?")
    first = ranks[0]
    if card_of(first["name"]) is None:
        lines.append(f"{first['name']} is not in CARDS: compare with its datasheet")
    for what in ("name", *VERSIONS):
        if len({gpu[what] for gpu in ranks}) > 1:
            seen = Counter(gpu[what] for gpu in ranks)
            wrong.append(f"{what} differs: {dict(seen)}")
    for (uuid, node), count in Counter((g["uuid"], g["node"]) for g in ranks).items():
        if count > 1:
            wrong.append(f"node {node}: {count} ranks share the GPU {uuid}")
    sizes = Counter(gpu["node"] for gpu in ranks)
    for node, size in sizes.items():
        if size < max(sizes.values()):
            wrong.append(f"node {node}: {size} ranks, others {max(sizes.values())}")
    return lines, wrong, {}


# -- speed -----------------------------------------------------------------------------


def matmul_tflops(n, dtype, precision, args):
    torch.set_float32_matmul_precision(precision)
    a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    ms = median_ms(lambda: torch.mm(a, b, out=out), args)
    return 2 * n**3 / ms / 1e9


def under_load(n, args):
    """Matmuls on all GPUs for some time: a card that gets hot lowers its clock."""
    a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    out, rates = torch.empty_like(a), []
    calls, end = 1 if args.quick else 200, time.monotonic() + args.load
    while time.monotonic() < end or len(rates) < 2:
        ms = milliseconds(lambda: torch.mm(a, a, out=out), calls)
        rates.append(2 * n**3 / ms / 1e9)
    for _ in range(2 * calls):  # it still computes while nvidia-smi looks
        torch.mm(a, a, out=out)
    fields = "clocks.sm", "clocks.max.sm", "temperature.gpu"
    said = smi(*fields, "clocks_throttle_reasons.active")
    return {"first": rates[0], "last": rates[-1], "smi": said}


def measure_speed(args):
    """All GPUs at the same time, as in training, and each by itself."""
    meet()
    sides, nbytes = SIDES[args.quick], 2**25 if args.quick else 2**30
    loaded = under_load(sides["bfloat16"], args) if args.load else None
    found = {
        "bfloat16": matmul_tflops(sides["bfloat16"], torch.bfloat16, "high", args),
        "tf32": matmul_tflops(sides["tf32"], torch.float32, "high", args),
        "float32": matmul_tflops(sides["float32"], torch.float32, "highest", args),
    }
    source = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    ms = median_ms(lambda: target.copy_(source), args)
    found["memory"] = 2 * nbytes / ms / 1e6  # read and written
    pinned = torch.zeros(nbytes // 4, dtype=torch.uint8).pin_memory()
    part = target[: nbytes // 4]
    ms = median_ms(lambda: part.copy_(pinned, non_blocking=True), args)
    found["pcie"] = len(part) / ms / 1e6
    return found | {"name": torch.cuda.get_device_name(), "load": loaded}


# of the matmuls, with --quick and without; bfloat16 is slow on a CPU
SIDES = {True: {"bfloat16": 512, "tf32": 1024, "float32": 1024},
         False: {"bfloat16": 8192, "tf32": 8192, "float32": 4096}}  # fmt: skip
# bits of nvidia-smi's reasons for a low clock (NVML's names)
REASONS = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat",
           0x80: "power brake"}  # fmt: skip


def report_load(ranks):
    lines, wrong = [], []
    for rank, found in enumerate(ranks):
        first, last = found["load"]["first"], found["load"]["last"]
        line = f"rank {rank} under load: {first:.1f}, at the end {last:.1f} TFLOP/s"
        why = ""
        if found["load"]["smi"]:
            clock, most, heat, bits = found["load"]["smi"]
            bits = int(bits, 16) if bits.startswith("0x") else 0
            why = ", ".join(dict.fromkeys(w for b, w in REASONS.items() if bits & b))
            line += f", {clock} of {most} MHz, {heat} °C, {why or 'no throttling'}"
        lines.append(line)
        if last < ALIKE * first:
            wrong.append(f"rank {rank}: {last / first:.0%} of its speed under load")
    return lines, wrong


UNITS = {"bfloat16": "TFLOP/s", "tf32": "TFLOP/s", "float32": "TFLOP/s",
         "memory": "GB/s", "pcie": "GB/s"}  # fmt: skip


def report_speed(ranks, args):
    lines = [f"{'rank':10}" + "".join(f"{what:>11}" for what in UNITS)]
    lines.append(f"{'':10}" + "".join(f"{unit:>11}" for unit in UNITS.values()))
    sides = "".join(f"{side:>11,}" for side in SIDES[args.quick].values())
    lines.append(f"{'matrix of':10}{sides}")
    card = card_of(ranks[0]["name"])
    wrong, figures = [], {}
    for rank, found in enumerate(ranks):
        lines.append(f"{rank:<10}" + "".join(f"{found[what]:11.1f}" for what in UNITS))
    if card:
        promised = {what: getattr(card, what) for what in UNITS}
        lines.append("datasheet " + "".join(f"{promised[w]:11.1f}" for w in UNITS))
    for what, unit in UNITS.items():
        best = max(found[what] for found in ranks)
        figures[f"{what} {unit}"] = min(found[what] for found in ranks)
        for rank, found in enumerate(ranks):
            if found[what] < ALIKE * best:
                share = found[what] / best
                wrong.append(f"rank {rank}: {what} at {share:.0%} of the fastest GPU")
        share = best / promised[what] if card and not args.quick else 1
        if share < LOW:
            wrong.append(f"{what}: {share:.0%} of the datasheet on all GPUs")
        elif what == "bfloat16" and share < USUAL:
            lines.append(f"low: {what} at {share:.0%}; most cards reach {USUAL:.0%}")
    if ranks[0].get("load"):
        more = report_load(ranks)
        return [*lines, *more[0]], [*wrong, *more[1]], figures
    return lines, wrong, figures


# -- links -----------------------------------------------------------------------------


def bus_bandwidth(name, nbytes, size, group, args):
    """GB/s over the busiest link, as nccl-tests counts; the slowest rank's time."""
    each = nbytes // 4 // size * size
    whole = torch.zeros(each, device="cuda")
    part, other = torch.zeros(each // size, device="cuda"), torch.empty_like(whole)
    run = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }[name]
    ms = over_ranks(median_ms(run, args, group=group, together=True), group=group)
    factor = (2 if name == "all_reduce" else 1) * (size - 1) / size
    return factor * 4 * each / ms / 1e6


def pair_bandwidth(other, nbytes, args):
    """GB/s that this rank sends to another one, which sends as much."""
    out, into = (torch.zeros(nbytes // 4, device="cuda") for _ in range(2))

    def run():
        ends = [dist.P2POp(dist.isend, out, other), dist.P2POp(dist.irecv, into, other)]
        for work in dist.batch_isend_irecv(ends):
            work.wait()

    for _ in range(2):
        run()
    repeats = 2 if args.quick else 5  # a fixed number: both must call equally often
    return nbytes / statistics.median(milliseconds(run) for _ in range(repeats)) / 1e6


def measure_links(args):
    if RANKS == 1:
        return {}
    nbytes, found = 2**24 if args.quick else 2**29, {}
    nodes = [NODE] * RANKS
    dist.all_gather_object(nodes, NODE)
    members = [[r for r in range(RANKS) if nodes[r] == n] for n in range(NODES)]
    groups = {f"all {RANKS}": (None, RANKS)}
    if NODES > 1 and min(map(len, members)) > 1:
        inside = [dist.new_group(ranks) for ranks in members]
        groups[f"{LOCAL_RANKS} of a node"] = (inside[NODE], LOCAL_RANKS)
    for where, (group, size) in groups.items():
        for name in ("all_reduce", "all_gather", "all_to_all"):
            found[f"{name}, {where}"] = bus_bandwidth(name, nbytes, size, group, args)
            meet()
    pairs, most = {}, max(map(len, members))
    for one in range(most):  # inside each node, one pair after the other
        for two in range(one + 1, most):
            if LOCAL_RANK in (one, two) and two < LOCAL_RANKS:
                other = members[NODE][two if LOCAL_RANK == one else one]
                pairs[other] = pair_bandwidth(other, nbytes // 4, args)
            meet()
    for start in (0, 1):  # nodes 0 and 1, 2 and 3, …; then 1 and 2, 3 and 4, …
        node = NODE + 1 if NODE % 2 == start else NODE - 1
        if 0 <= node < NODES and LOCAL_RANK < min(LOCAL_RANKS, len(members[node])):
            other = members[node][LOCAL_RANK]  # all ranks of a node at the same time
            pairs[other] = pair_bandwidth(other, nbytes // 4, args)
        meet()
    name = torch.cuda.get_device_name()
    return found | {"pairs": pairs, "name": name, "node": NODE}


def report_links(ranks, args):
    if RANKS == 1:
        return ["one GPU has no links to others"], [], {}
    card, wrong = card_of(ranks[0]["name"]), []
    figures = {what: min(f.get(what, math.inf) for f in ranks)
               for found in ranks for what in found if "," in what}  # fmt: skip
    lines = [f"{what:26} {speed:8.1f} GB/s" for what, speed in figures.items()]
    if card and card.nvlink:
        lines.append(f"{'datasheet: NVLink':26} {card.nvlink:8.1f} GB/s each way")
        where = f"all {RANKS}" if NODES == 1 else f"{LOCAL_RANKS} of a node"
        reached = figures.get(f"all_reduce, {where}", card.nvlink) / card.nvlink
        if reached < LOW and not args.quick:
            wrong.append(f"all-reduce inside a node: {reached:.0%} of NVLink")
        elif reached < USUAL and not args.quick:
            lines.append(f"low: {reached:.0%} of NVLink; most reach {USUAL:.0%}")
    elif card:  # how much of it several GPUs reach is up to the host
        lines.append(f"{'datasheet: PCIe':26} {card.pcie:8.1f} GB/s each way")
    near, far = {}, Counter()
    for one, found in enumerate(ranks):
        for two, speed in found["pairs"].items():
            nodes = found["node"], ranks[int(two)]["node"]
            if nodes[0] == nodes[1]:
                near[one, int(two)] = speed
            else:
                far[nodes] += speed
    if near:
        least, best = min(near.values()), max(near.values())
        lines.append(f"pairs inside a node: {least:.1f} to {best:.1f} GB/s each way")
        for (one, two), speed in near.items():
            if one < two and speed < PAIRS_ALIKE * best:
                wrong.append(f"ranks {one} and {two}: {speed:.1f} of {best:.1f} GB/s")
    if far:
        best = max(far.values())
        figures["between nodes GB/s"] = min(far.values())
        for (one, two), speed in far.items():
            if one < two:
                bits, who = 8 * speed, f"node {one} to {two}"
                lines.append(f"{who}: {speed:.1f} GB/s, {bits:.0f} Gbit/s")
                if args.network and bits < LOW * args.network:
                    share, all_of_it = bits / args.network, f"{args.network:.0f} Gbit/s"
                    wrong.append(f"{who}: {share:.0%} of {all_of_it}")
                elif speed < PAIRS_ALIKE * best:
                    wrong.append(f"{who}: {speed:.1f} of {best:.1f} GB/s")
    return lines, wrong, figures


# -- ddp, fsdp -------------------------------------------------------------------------


def with_ddp(model, **options):
    options = {"gradient_as_bucket_view": True, **options}
    return DDP(model.cuda(), device_ids=[LOCAL_RANK], **options)


def with_fsdp(model, blocks=None, **options):
    model.cuda()
    for block in blocks or blocks_of(model):
        fully_shard(block, **options)
    return fully_shard(model, **options)


HALF = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)


def measure_steps(way, args):
    """Steps in bfloat16, with `rows` rows on each GPU."""
    size, rows = ("small", 4) if args.quick else ("real", args.rows)
    torch.manual_seed(0)
    with torch.device("cuda"):  # where its weights are drawn, too
        model = make_model(size)
    parameters = sum(p.numel() for p in model.parameters())
    if way == "ddp":
        model = (
            with_ddp(model, bucket_cap_mb=args.bucket) if RANKS > 1 else model.cuda()
        )
    else:
        model = with_fsdp(model, mp_policy=HALF)
    autocast = torch.autocast("cuda", torch.bfloat16) if way == "ddp" else nullcontext()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = each(torch.Tensor.cuda, make_batch(size, rows))

    def step():
        with autocast:
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3 if args.quick else 5):  # DDP makes its buckets in the second one
        step()
    torch.cuda.reset_peak_memory_stats()
    meet()
    times = [milliseconds(step) for _ in range(1 if args.quick else 10)]
    own = statistics.median(times)
    return {
        "ms": over_ranks(own),
        "peak GiB": over_ranks(torch.cuda.max_memory_allocated() / 2**30),
        "tokens": tokens_of(batch),
        "parameters": parameters,
        "name": torch.cuda.get_device_name(),
    }


def report_steps(way, ranks, args):
    found = ranks[0]
    speed = found["tokens"] / found["ms"] * 1e3
    lines = [
        f"{found['parameters']:,} parameters, {found['tokens']:,} tokens on each GPU",
        f"a step takes {found['ms']:.1f} ms, peak {found['peak GiB']:.2f} GiB: "
        f"{speed:,.0f} tokens/s of a GPU",
    ]
    card = card_of(found["name"])
    if card and not args.quick:
        reached = 6 * found["parameters"] * speed / 1e12
        lines.append(
            f"6 FLOPs for a parameter and a token: {reached:.1f} TFLOP/s, "
            f"{reached / card.bfloat16:.1%} of the datasheet"
        )
    figures = {f"{way} ms": found["ms"], f"{way} peak GiB": found["peak GiB"]}
    return lines, [], figures | {f"{way} tokens/s": speed}


# -- claims: the criterion -------------------------------------------------------------

SAME = 1e-4  # of the largest number: float32's rounding stays below
# of the model's largest gradient: one that is smaller may be rounding alone, as that of
# a bias on the keys of attention, which is zero
LEAST = 1e-3
NEAR = 0.05  # of a count: allocators round, and claims leave out small parts


def is_same(difference):  # values
    return difference < SAME


def is_as_claimed(ratio):  # bytes: counted / claimed
    return abs(ratio - 1) < NEAR


def is_faster(ratios, factor):
    """Time: the other way's / this way's, one of each round."""
    sure = math.ceil(0.9 * len(ratios))
    if sum(ratio > factor for ratio in ratios) >= sure:
        return True
    return False if sum(ratio < 1 / factor for ratio in ratios) >= sure else None


def verdict(cases):
    held = [name for name, holds in cases.items() if holds]
    if held and False in cases.values():
        return "true when " + ", or ".join(held)
    if None in cases.values():
        return "cannot be judged here"
    return "true" if held else "false"


# -- claims: values --------------------------------------------------------------------


def off_by(found, right, least=0.0):
    """The largest difference on any rank, as a share of its tensor's largest number.

    Also which of the tensors it is on this rank. `least` counts as the largest number
    where that is smaller.
    """
    worst = []
    for name, b in right.items():
        share = (found[name] - b).abs().max() / b.abs().max().clamp(min=least + 1e-12)
        worst.append((share.nan_to_num(nan=math.inf).item(), name))
    share, name = max(worst)
    return over_ranks(share), name


def gradients_off_by(model, loss, batch, shares, plant=False):
    """DDP's gradients with these shares, beside those of one GPU with all rows."""
    model = model.cuda()
    model.zero_grad()
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    loss(model, each(torch.Tensor.cuda, batch)).backward()
    used = {name: p for name, p in model.named_parameters() if p.grad is not None}
    whole = {name: p.grad.clone() for name, p in used.items()}
    model.zero_grad()
    ddp = DDP(model, device_ids=[LOCAL_RANK])
    mine = each(lambda tensor: tensor.split(shares)[RANK].cuda(), batch)
    loss(model if plant else ddp, mine).backward()
    largest = max(grad.abs().max().item() for grad in whole.values())
    found = {name: p.grad for name, p in used.items()}
    return off_by(found, whole, LEAST * largest)


def equal_and_unequal():
    """Two ways to share the rows; of the second, rank r has r + 1 parts."""
    return [4 * (RANKS + 1)] * RANKS, [8 * (rank + 1) for rank in range(RANKS)]


def claim_values(args):
    equal, unequal = equal_and_unequal()
    torch.manual_seed(0)
    x = torch.randn(sum(equal), 64)
    batch = x, x[:, :10].argmax(1)

    def mean(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def total(model, batch):
        return len(batch[0]) * mean(model, batch)

    def layers(*norm):
        bias = not norm  # which a norm would take away again
        first = nn.Linear(64, 32, bias=bias)
        return nn.Sequential(first, *norm, nn.GELU(), nn.Linear(32, 10))

    yours = make_model("small"), loss_of, make_batch("small", 2 * RANKS), [2] * RANKS
    your_model, worst = gradients_off_by(*yours, plant=args.plant)
    blind = is_same(gradients_off_by(*yours, plant=True)[0])  # of rows that are alike
    norm = nn.BatchNorm1d(32)
    cases = {
        "your model": your_model,
        "mean loss": gradients_off_by(layers(), mean, batch, equal)[0],
        "summed loss": gradients_off_by(layers(), total, batch, equal)[0],
        "unequal shares": gradients_off_by(layers(), mean, batch, unequal)[0],
        "BatchNorm": gradients_off_by(layers(norm), mean, batch, equal)[0],
    }
    planted, _ = gradients_off_by(layers(), mean, batch, equal, plant=True)
    return cases, is_same, planted, worst, blind


def norm_off_by(Norm, shares):
    """Of outputs, running values and all gradients, also the norm's own weights'."""
    torch.manual_seed(0)
    rows = sum(shares)
    x = (torch.randn(rows, 8) + torch.linspace(0, 3, rows)[:, None]).cuda()
    whole, norm = nn.BatchNorm1d(8), Norm(8)
    nn.init.normal_(whole.weight)
    norm.load_state_dict(whole.state_dict())
    whole.cuda(), norm.cuda()
    mine = x.split(shares)[RANK].clone().requires_grad_()
    x.requires_grad_()
    right = whole(x)
    right.pow(3).sum().backward()  # of a plain sum, the gradient would be zero
    ddp = DDP(norm, device_ids=[LOCAL_RANK])  # without a name, its hooks would be gone
    found = ddp(mine)
    found.pow(3).sum().backward()
    averaged = [RANKS * p.grad for p in norm.parameters()]  # DDP divides by the ranks
    expected = [t.split(shares)[RANK] for t in (right.detach(), x.grad)]
    expected += [whole.running_mean, whole.running_var]
    expected += [p.grad for p in whole.parameters()]
    found = [found.detach(), mine.grad, norm.running_mean, norm.running_var, *averaged]
    return off_by(dict(enumerate(found)), dict(enumerate(expected)))[0]


def claim_norm(args):
    equal, unequal = equal_and_unequal()
    rest = (sum(equal) - 1) // (RANKS - 1)
    cases = {
        "equal shares": norm_off_by(nn.SyncBatchNorm, equal),
        "unequal shares": norm_off_by(nn.SyncBatchNorm, unequal),
        "one sample": norm_off_by(nn.SyncBatchNorm, [1] + [rest] * (RANKS - 1)),
    }
    return cases, is_same, norm_off_by(nn.BatchNorm1d, equal)


# -- claims: bytes ---------------------------------------------------------------------


def sent_bytes(entries):
    """What a rank sends in a ring, of the collectives that a flight recorder has."""
    sizes = {"Float": 4, "Half": 2, "BFloat16": 2, "Int": 4, "Long": 8, "Byte": 1}
    total = 0
    for entry in entries:
        name = entry["profiling_name"].removeprefix("nccl:")
        side = "output" if "all_gather" in name else "input"
        count = sum(math.prod(shape) for shape in entry[f"{side}_sizes"])
        passes = 2 if "all_reduce" in name else 1
        total += passes * count * sizes.get(entry[f"{side}_dtypes"][0], 4)
    return total * (RANKS - 1) / RANKS


def recorded():
    """The collectives so far, as PyTorch's flight recorder has them."""
    dump = torch._C._distributed_c10d._dump_nccl_trace(includeStackTraces=False)
    return pickle.loads(dump)["entries"]


@functools.cache
def small_step(way, parts=1, steps=2, **options):
    """Bytes stored behind backward, at the peak, and sent, of the last step."""
    torch.manual_seed(0)
    x = torch.randn(512, 512, device="cuda")
    before = torch.cuda.memory_allocated()
    layers = [nn.Linear(512, 512) for _ in range(4)]
    if way is with_fsdp:
        options["blocks"] = layers
    model = way(nn.Sequential(*layers), **options)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        known = len(recorded())
        torch.cuda.reset_peak_memory_stats()
        for part in range(parts):
            last = part == parts - 1
            if way is with_fsdp:
                model.set_requires_gradient_sync(last)
            model(x).square().mean().backward()
        torch.cuda.synchronize()
        sent = sent_bytes(recorded()[known:])
        stored = torch.cuda.memory_allocated() - before
        optimizer.step()
        optimizer.zero_grad(set_to_none=way is with_fsdp)
    return stored, torch.cuda.max_memory_allocated() - before, sent


def claim_memory(args):
    ddp, fsdp = small_step(with_ddp), small_step(with_fsdp)
    cases = {"stored": RANKS * fsdp[0] / ddp[0], "peak": RANKS * fsdp[1] / ddp[1]}
    return cases, is_as_claimed, RANKS  # DDP in FSDP's place


def claim_bytes(args):
    half = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16)
    ddp = small_step(with_ddp)[2]  # no more with several parts: no_sync
    sent = {
        "float32": small_step(with_fsdp)[2],
        "bfloat16": small_step(with_fsdp, steps=1, mp_policy=half)[2],
        "bfloat16, sums in float32": small_step(with_fsdp, steps=1, mp_policy=HALF)[2],
        "float32, 2 parts": small_step(with_fsdp, steps=1, parts=2)[2],
    }
    cases = {case: number / ddp / 1.5 for case, number in sent.items()}
    return cases, is_as_claimed, 1 / 1.5  # DDP in FSDP's place


# -- claims: time ----------------------------------------------------------------------


def in_turn(first, second, args):
    """The first way's time / the second's in each round; the slowest rank counts."""
    rounds, ratios = (1 if args.quick else 10), []
    for number in range(rounds + 2):
        times = []
        for way in (first, second):
            meet()
            times.append(over_ranks(milliseconds(way, 1 if args.quick else 5)))
        if number >= 2:  # two to warm up: DDP makes its buckets in the second
            ratios.append(times[0] / times[1])
    return ratios


def layers_step(samples, width, depth, **options):
    """A step of some layers; in DDP, each rank has its share of the samples."""
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)]).cuda()
    if options:
        model, samples = with_ddp(model, **options), samples // RANKS
    x = torch.randn(samples, width, device="cuda")
    return lambda: model(x).square().mean().backward()


def claim_faster(args):
    cases = {}
    for samples, width in ((64, 512), (3072, 512) if args.quick else (8192, 2048)):
        one = layers_step(samples, width, 4) if RANK == 0 else list  # does nothing
        many = layers_step(samples, width, 4, bucket_cap_mb=25)
        cases[f"{samples:,} samples, 4 x {width}"] = in_turn(one, many, args)
    return cases, None, None


CLAIMS = {
    "1. N ranks compute what one does": claim_values,
    "2. SyncBatchNorm is BatchNorm of all ranks": claim_norm,
    "3. FSDP needs 1/N of DDP's memory": claim_memory,
    "4. FSDP sends 1.5 times as much as DDP": claim_bytes,
    "5. N GPUs are faster than one": claim_faster,
}


def measure_claims(args):
    if RANKS == 1:
        return {}
    simulated = "(simulated)" in torch.cuda.get_device_name()
    factor = args.factor or (1.69 if simulated else 1.02)
    found = {"factor": factor}
    for claim, measure in CLAIMS.items():
        # values are compared: no TF32
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        cases, holds, planted, *worst = measure(args)
        torch.cuda.empty_cache()
        judged = {}
        for case, number in cases.items():
            if holds is None:
                judged[case] = statistics.median(number), is_faster(number, factor)
            else:
                judged[case] = number, bool(holds(number))
        found[claim] = {"cases": judged, "planted": planted, "worst": worst}
        if planted is not None:
            found[claim]["refused"] = not holds(planted)
    return found


def report_claims(ranks, args):
    if RANKS == 1:
        return ["the claims are about several GPUs"], [], {}
    lines = [
        f"criterion: values within {SAME:g} of the largest; bytes within {NEAR:.0%}; "
        f"times: {ranks[0]['factor']:g} in 9 of 10 rounds"
    ]
    wrong = []
    for claim in CLAIMS:
        found = ranks[0][claim]
        cases = {case: holds for case, (_, holds) in found["cases"].items()}
        lines.append(f"{claim}: {verdict(cases)}")
        for case, (number, holds) in found["cases"].items():
            word = {True: "holds", False: "fails", None: "open"}[holds]
            shown = f"{number:9.3f}" if number > SAME else f"  <{SAME:.4f}"
            lines.append(f"{shown}  {word}  {case}")
        if found["planted"] is not None:
            word = "refused" if found["refused"] else "NOT FOUND"
            lines.append(f"{found['planted']:9.3f}  {word}  a planted mistake")
            if not found["refused"]:
                wrong.append(f"claim {claim[0]}: its test passes a planted mistake")
        if cases.get("your model") is False:
            off, name = found["cases"]["your model"][0], found["worst"][0]
            wrong.append(f"your model: {name} is {off:.3f} away from one GPU's")
        elif "your model" in cases and found["worst"][1]:
            wrong.append(
                "your model: claim 1 holds even if nothing is averaged; in make_batch, "
                "let rows differ"
            )
    return lines, wrong, {}


# -- run a part ------------------------------------------------------------------------

MEASURE = {
    "gpus": measure_gpus,
    "speed": measure_speed,
    "links": measure_links,
    "ddp": lambda args: measure_steps("ddp", args),
    "fsdp": lambda args: measure_steps("fsdp", args),
    "claims": measure_claims,
}
REPORT = {
    "gpus": report_gpus,
    "speed": report_speed,
    "links": report_links,
    "ddp": lambda ranks, args: report_steps("ddp", ranks, args),
    "fsdp": lambda ranks, args: report_steps("fsdp", ranks, args),
    "claims": report_claims,
}
TO_DO = (
    ("out of memory", "not enough memory: --rows 1, or a smaller model"),
    ("is not simulated", "the simulator lacks this call: use real GPUs"),
    ("invalid device ordinal", "fewer GPUs than ranks: see nvidia-smi -L"),
    ("NCCL", "the ranks cannot talk: run it with NCCL_DEBUG=INFO (lesson 25)"),
    ("time limit", "somebody waited too long: run it with NCCL_DEBUG=INFO"),
)


def advice(error, part):
    for word, what in TO_DO:
        if word.lower() in error.lower():
            return what
    return f"run it alone, with --parts {part}, and read its traceback"


def connect(master=False):
    """A client of torchrun's store, or the store itself."""
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = int(os.environ.get("MASTER_PORT", 0))
    return dist.TCPStore(host, port, is_master=master, timeout=timedelta(minutes=5))


def join(part, args, store):
    """Make the process group of a part; without a store, by torchrun's variables."""
    where = {}
    if store is None and RANKS == 1:
        store = dist.HashStore()
    if store is not None:
        store = dist.PrefixStore(part, store)
        where = {"store": store, "rank": RANK, "world_size": RANKS}
    device = torch.device("cuda", LOCAL_RANK)
    limit = timedelta(seconds=args.limit)
    dist.init_process_group("nccl", timeout=limit, device_id=device, **where)


def do(part, args, store=None):
    """Measure a part in this process; without a store, returns what each rank found."""
    faulthandler.dump_traceback_later(args.limit, exit=True)
    warnings.simplefilter("ignore", FutureWarning)  # names that are about to change
    warnings.filterwarnings("ignore", "FSDP2-wrapped")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives are recorded
    try:
        torch.cuda.set_device(LOCAL_RANK)
        if RANKS > 1 or part == "fsdp":
            join(part, args, store)
        found = MEASURE[part](args)
        if store is None:
            found, own = [found] * RANKS, found
            if RANKS > 1:
                dist.all_gather_object(found, own)
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:
        if store is None:
            raise
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}".strip().splitlines()[0]}
    finally:
        faulthandler.cancel_dump_traceback_later()
    return found


def in_a_child(part, args, store):
    """The same in a process of its own, which may crash or hang."""
    key = f"{part} of rank {RANK}"
    child = os.fork()
    if child == 0:
        try:
            os.environ["MASTER_PORT"] = str(store.port)
            own = connect()
            own.set(key, json.dumps(do(part, args, own)))
        finally:
            sys.stdout.flush()
            os._exit(0)
    what = f"no result, perhaps at its time limit of {args.limit} s"
    since = None  # another rank has failed; this one may notice by itself
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.1)
        if since is None and store.check([f"{part} failed"]):
            since = time.monotonic()
        if since is not None and time.monotonic() - since > PATIENCE:
            os.kill(child, signal.SIGKILL)
            what = "ended, since another rank had failed"
    if not store.check([key]):
        store.set(key, json.dumps({"error": what}))
    found = json.loads(store.get(key))
    if "error" in found:
        store.set(f"{part} failed", "yes")
    return found


def run_part(part, args, store):
    """What each rank has found."""
    if store is None:  # the only part, in this process: for a debugger, or a dry run
        return do(part, args)
    if HAS_FORK:
        in_a_child(part, args, store)
    else:
        store.set(f"{part} of rank {RANK}", json.dumps(do(part, args, store)))
    names = [f"{part} of rank {rank}" for rank in range(RANKS)]
    store.wait(names, timedelta(seconds=args.limit + 60))
    return [json.loads(store.get(name)) for name in names]


# -- the report ------------------------------------------------------------------------


def read_predictions(args):
    """Name of a figure -> what you expect, from a file of JSON."""
    if not args.predicted:
        return {}
    with open(args.predicted, encoding="utf-8") as file:
        return json.load(file)


def compare(predicted, figures):
    """Measured over predicted, for each prediction that was measured."""
    lines, known = [], ""
    for name, expected in predicted.items():
        if name in figures:
            ratio = figures[name] / expected
            far = "" if 1 / FAR <= ratio <= FAR else "  <- look into it"
            numbers = f"{expected:10.3f} {figures[name]:10.3f} {ratio:7.2f}"
            lines.append(f"{name:24} {numbers}{far}")
        else:
            lines.append(f"{name:24} {expected:10.3f}  not measured")
            known = ", ".join(figures)
    if known:
        lines.append(f"figures that were measured: {known}")
    return lines


def bill(seconds, args):
    lines = [f"{part:8} {took:7.1f} s" for part, took in seconds.items()]
    total = sum(seconds.values())
    words = f"{total:.0f} s on {RANKS} GPUs"
    if args.price:
        dollars = total * RANKS * args.price / 3600
        words += f" at {args.price:.2f} an hour each: {dollars:.2f}"
    return [*lines, words]


def show(title, lines, wrong=()):
    if RANK == 0:
        print(f"== {title}", *lines, sep="\n")
        for line in wrong:
            print(f"LOOK: {line}")
        print(flush=True)


def options(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--quick", action="store_true", help="small sizes, for simulated GPUs")
    add("--rows", type=int, default=4, help="of 2,048 tokens, on each GPU")
    add("--bucket", type=float, default=25, help="MB of a bucket of DDP")
    names = '"bfloat16 TFLOP/s", "between nodes GB/s", "ddp ms", "fsdp tokens/s", …'
    add("--predicted", metavar="FILE", help=f"JSON: {names} -> your number")
    add("--load", type=float, default=0, help="seconds of matmuls before the speed")
    add("--network", type=float, help="Gbit/s that a node was promised")
    add("--factor", type=float, help="by which times must differ")
    add("--plant", action="store_true", help="average nothing: claim 1 must fail")
    add("--price", type=float, help="of a GPU, for an hour")
    add("--limit", type=int, default=180, help="seconds for a part")
    add("--json", metavar="FILE", help="write all that was found")
    return parser.parse_args(words)


def main():
    args = options()
    predicted = read_predictions(args)
    store = None
    if len(args.parts) > 1:
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = connect(master=RANK == 0 and not agent)
    if predicted:
        rows = [f"{name:24} {number:10.3f}" for name, number in predicted.items()]
        show("predicted, before anything was measured", rows)
    report, figures, seconds, wrong = {}, {}, {}, []
    for part in args.parts:
        start = time.monotonic()
        ranks = run_part(part, args, store)
        seconds[part] = time.monotonic() - start
        failed = {
            r: found["error"] for r, found in enumerate(ranks) if "error" in found
        }
        if failed:
            lines = [f"rank {rank}: {error}" for rank, error in failed.items()]
            bad = [f"{part} failed: {advice(' '.join(lines), part)}"]
        else:
            lines, bad, found = REPORT[part](ranks, args)
            figures |= found
        report[part] = {"ranks": ranks, "lines": lines, "look": bad}
        wrong += bad
        show(part, lines, bad)
        if part == "gpus" and not failed:
            show("versions", [f"{what} {ranks[0][what]}" for what in VERSIONS])
    if predicted:
        head = f"{'':24} {'predicted':>10} {'measured':>10} {'ratio':>7}"
        show("your predictions", [head, *compare(predicted, figures)])
    show("bill", bill(seconds, args))
    show("to look into", wrong or ["nothing"])
    if RANK == 0 and args.json:
        whole = {"parts": report, "figures": figures, "predicted": predicted}
        whole |= {"seconds": seconds, "look": wrong, "ranks": RANKS, "nodes": NODES}
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(whole, file, indent=1)
    if store is not None:  # which may be rank 0's
        store.set(f"end of rank {RANK}", "")
        ends = [f"end of rank {rank}" for rank in range(RANKS)]
        store.wait(ends, timedelta(minutes=5))
    sys.exit(1 if wrong and RANK == 0 else 0)


if __name__ == "__main__":
    main()
