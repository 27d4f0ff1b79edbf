#!/usr/bin/env python3
"""DDP against FSDP on a slow link between two hosts: seconds and bytes of a step.

    sudo python tests/benchmarks/two_hosts_link.py [--rounds 5] [--output FILE]

The hosts, the link and the ranks are those of _host_ranks.py. First one rank on each
host, then two. Each way of training takes a few steps at each rate; all do the same
work on the same rows, and so differ in their messages only:

* `alone`: no messages. What is left is the computing.
* `ddp`: an all-reduce of the gradients. `ddp-bf16`: of half as many bytes (a hook).
* `fsdp`: FSDP2, each layer by itself: all-gather, all-gather again, reduce-scatter.
* `fsdp-half`: so with a reduce-scatter that sends each rank only its part. gloo's own
  sends as much as an all-reduce does (NCCL's does not).
* `hsdp`: FSDP2 inside a host, all-reduce of the parts between the hosts (2 ranks each).

Beside what was measured stands what was predicted. Bytes: what the ring of each
message sends over the link from host 0 (`RING`). Seconds: those of `alone`, and the
bytes with the headers of TCP over the rate; so messages do not overlap with computing.

Seconds are the median of a round's steps, and the best of all rounds, because other
programs on the machine only ever add. Bytes are those that host 0's card has counted.
It writes the file that lesson 25-leave-one-machine reads. A round takes about 50
seconds.
"""

import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from _host_ranks import (
    BATCH,
    NOTEBOOKS,
    Ranks,
    TwoHosts,
    best,
    hardware,
    options,
    training_step,
    write,
)  # fmt: skip
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

RATES = (100, 300, 1000, None)  # Mbit/s each way; None: as it is
STEPS = 4  # of each way at each rate
WIDTH, DEPTH = 512, 4
WAYS = {  # ranks of a host -> ways
    1: ("alone", "ddp", "ddp-bf16", "fsdp", "fsdp-half"),
    2: ("alone", "ddp", "fsdp", "hsdp"),
}
# Bytes from host 0 to host 1 in a step, per byte of the parameters, for 1 and 2 ranks
# on a host. In a ring of n ranks each passes (n-1)/n of a tensor in an all-gather or a
# reduce-scatter, and twice that in an all-reduce; one rank's neighbour is over there.
RING = {
    1: {"alone": 0, "ddp": 1, "ddp-bf16": 1 / 2, "fsdp": 2, "fsdp-half": 3 / 2},
    2: {"alone": 0, "ddp": 3 / 2, "fsdp": 3, "hsdp": 1},
}
# A full frame carries 1448 bytes and has 66 of headers; so has an acknowledgement, one
# for every second frame that comes from over there.
HEADERS = (1448 + 66 + 66 / 2) / 1448
OUTPUT = NOTEBOOKS / "scripts" / "two_hosts.json"
training = {}  # of this rank: what to call for one step


# -- a rank ----------------------------------------------------------------------------


def network() -> nn.Sequential:
    """Digits in, ten classes out, hidden layers between."""
    torch.manual_seed(0)
    hidden = [nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]
    layers = []
    for layer in [nn.Linear(64, WIDTH), *hidden]:
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def in_bf16(state, bucket) -> torch.futures.Future[torch.Tensor]:
    """torch's own hook under another name: by its own, DDP refuses it without CUDA."""
    return bf16_compress_hook(state, bucket)


class HalfReduceScatter:
    """Each rank sends every other its part, and adds up what it gets."""

    def allocate(self, size, *, dtype, device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False) -> None:
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(dist.get_world_size(group), -1), dim=0, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(dist.get_world_size(group))


def parallel(model: nn.Sequential, way: str) -> nn.Module:
    """The model as this way trains it."""
    if way == "alone":
        return model
    if way.startswith("ddp"):
        model = DistributedDataParallel(model)
        if way == "ddp-bf16":
            model.register_comm_hook(None, in_bf16)
        return model
    size = dist.get_world_size()
    shape, names = (size,), ("shard",)
    if way == "hsdp":
        shape, names = (2, size // 2), ("hosts", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    linear = [layer for layer in model if isinstance(layer, nn.Linear)]
    for module in (*linear, model):  # the model itself has no parameters left
        fully_shard(module, mesh=mesh)
        if way == "fsdp-half" and module is not model:
            module.set_custom_reduce_scatter(HalfReduceScatter())
    return model


def prepare(way: str) -> None:
    """Make a model and take two steps: the first ones do more than the others."""
    rows = BATCH // dist.get_world_size()
    step = training["step"] = training_step(parallel(network(), way), rows)
    for _ in range(2):
        step()
    dist.barrier()


def steps(count: str) -> list[float]:
    """Seconds of each of so many steps."""
    seconds = []
    for _ in range(int(count)):
        begin = time.perf_counter()
        training["step"]()
        seconds.append(time.perf_counter() - begin)
    dist.barrier()
    return seconds


def carries(count: str) -> float:
    """Mbit/s that an all-reduce of 8 MiB gets from the link, the best of some."""
    many, found, size = torch.ones(2**21), [], dist.get_world_size()
    for _ in range(int(count)):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(many)
        found.append(time.perf_counter() - begin)
    return 2 * (size - 1) / size * many.nbytes * 8 / 1e6 / min(found)


TASKS = {"prepare": prepare, "steps": steps, "carries": carries}


# -- both hosts ------------------------------------------------------------------------


def measure(each: int) -> list[dict]:
    """Every way at every rate, with so many ranks on each host."""
    found = []
    with tempfile.TemporaryDirectory() as folder, TwoHosts() as hosts:
        ranks = Ranks(hosts, __file__, folder, each)
        free = ranks.ask("carries 5")
        for way in WAYS[each]:
            hosts.limit(None)
            ranks.ask(f"prepare {way}")
            for rate in RATES:
                hosts.limit(rate)
                before = hosts[0].sent
                seconds = ranks.ask(f"steps {STEPS}")
                found.append({
                    "ranks": 2 * each, "way": way, "mbit": rate or round(free),
                    "limited": rate is not None,
                    "seconds": statistics.median(seconds),
                    "sent": (hosts[0].sent - before) / STEPS,
                })  # fmt: skip
                print(found[-1], flush=True)
    return found


def summary(rounds: list[list[dict]]) -> dict:
    """What the file holds."""
    size = sum(p.numel() for p in network().parameters())
    alone = {}  # ranks -> seconds; the rate of the link does not matter to it
    runs = []
    for same in zip(*rounds, strict=True):
        run = same[0] | {"seconds": best([each["seconds"] for each in same])}
        run["sent"] = round(statistics.median(each["sent"] for each in same))
        run["mbit"] = max(each["mbit"] for each in same)
        ranks, way = run["ranks"], run["way"]
        if way == "alone":
            alone[ranks] = min(alone.get(ranks, run["seconds"]), run["seconds"])
            continue
        run["predicted_sent"] = round(RING[ranks // 2][way] * 4 * size)
        wire = run["predicted_sent"] * 8 / 1e6 / run["mbit"]
        wire *= HEADERS if run["limited"] else 1  # `carries` is without headers
        run["predicted_seconds"] = round(alone[ranks] + wire, 6)
        runs.append(run)
    return {
        "hardware": hardware(), "torch": torch.__version__, "backend": "gloo",
        "link": "veth between two network namespaces, tc qdisc tbf",
        "how": "python tests/benchmarks/two_hosts_link.py",
        "rounds": len(rounds), "steps": STEPS, "threads": 1, "batch": BATCH,
        "width": WIDTH, "hidden": DEPTH, "parameters": size,
        "alone": {str(ranks): seconds for ranks, seconds in alone.items()},
        "runs": runs,
    }  # fmt: skip


def main() -> None:
    args = options("DDP and FSDP over a slow link.", OUTPUT, 5, TASKS)
    rounds = [measure(1) + measure(2) for _ in range(args.rounds)]
    write(args.output, summary(rounds))


if __name__ == "__main__":
    main()
