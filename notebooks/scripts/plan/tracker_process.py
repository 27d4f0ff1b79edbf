"""The process in which `tracker.py` runs a training step, with tensors without memory.

    python -m scripts.plan.tracker_process PARENT < runs.json > moments.json

It makes a process group of which only this rank exists, shards the model with
`fully_shard`, trains one step, and reads PyTorch's FSDPMemTracker at each moment. It
ends when the process PARENT is gone.
"""

import json
import os
import sys
import threading
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from scripts.plan import torch_private
from scripts.plan.memory import PARTS
from scripts.plan.model import Llama, Model, build
from scripts.plan.run import Run

PART_OF_KIND = {  # FSDPMemTracker's kind of memory: our part
    "SHARDED_PARAM": "weights",
    "SHARDED_GRAD": "gradients",
    "OPT": "optimizer",
    "ACT": "activations",
    "TEMP": "activations",
    "INP": "activations",
    "BUFFER": "activations",
    "UNSHARDED_PARAM": "other",
    "UNSHARDED_GRAD": "other",
    "ALL_GATHER": "other",
    "REDUCE_SCATTER": "other",
}


def main() -> None:
    """Read runs from standard input, and write the moments of each."""
    parent = int(sys.argv[1])
    threading.Thread(target=_exit_with, args=[parent], daemon=True).start()
    runs = json.load(sys.stdin)
    print(json.dumps([track(run) for run in runs]), flush=True)
    os._exit(0)  # a fake process group cannot be torn down


def _exit_with(parent: int) -> None:
    """End this process when the one that started it is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def track(run: dict) -> "dict[str, dict[str, int]]":
    """Bytes by part at the peak of each moment of one step.

    Args:
        run: the fields of a `Run`, and "layers": how many blocks to track.
    """
    layers = run.pop("layers")
    run = Run(**run | {"model": Model(**run["model"])})
    torch_private.fake_group(run.gpus)
    try:
        with torch.device("meta"):
            model = build(run.model, layers, bool(run.checkpointing))
        shard(model, init_device_mesh("cpu", (run.gpus,)))
        with torch_private.fake_tensors():
            # on "cpu": a build without CUDA cannot differentiate fakes on "cuda"
            model.to_empty(device="cpu")
            optimizer = _LocalAdamW(model.parameters())
            x, y = torch.randint(0, 2, (2, run.batch, run.tokens))
            peaks = torch_private.Peaks(model, optimizer, (x, y))
            _mark_blocks(model.blocks, peaks.mark)
            with peaks:
                _step(model, optimizer, x, y, peaks.mark)
    finally:
        dist.destroy_process_group()
    moments = {name: _parts(kinds) for name, kinds in peaks.moments.items()}
    # never the largest: forward ends with more, and these lie between their neighbours
    for name in ("start", "blocks between"):
        moments.pop(name, None)
    return moments


def shard(model: Llama, mesh) -> None:
    """Each block by itself, then the rest."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # cos and sin stay float32
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


class _LocalAdamW(torch.optim.Optimizer):
    """AdamW's bytes on the local shards: two moments, no temporaries, as if fused.

    PyTorch's own on sharded parameters works out shapes with whole, fake matrices,
    which the tracker would count.
    """

    def __init__(self, parameters):
        super().__init__(parameters, {})
        for p in self.param_groups[0]["params"]:
            for name in ("exp_avg", "exp_avg_sq"):
                self.state[p][name] = torch.zeros_like(p.to_local())

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            weight, gradient, state = p.to_local(), p.grad.to_local(), self.state[p]
            state["exp_avg"].lerp_(gradient, 0.1)
            state["exp_avg_sq"].addcmul_(gradient, gradient, value=0.05)
            weight.addcdiv_(state["exp_avg"], state["exp_avg_sq"], value=-1e-3)


def _mark_blocks(blocks, mark) -> None:
    """Mark when backward reaches a block's output: what came after it has ended."""
    between = ["blocks between"] * (len(blocks) - 4)
    names = ["second block", *between, "last block but one", "last block", "head"]
    blocks[-1].register_forward_pre_hook(lambda block, args: mark("start"))
    for block, name in zip(blocks, names, strict=True):

        def reached(block, args, output, name=name):
            output.register_hook(lambda gradient: mark(name))

        block.register_forward_hook(reached)


def _step(model, optimizer, x, y, mark) -> None:
    """One step of training."""
    logits = model(x).flatten(0, 1).float()
    loss = F.cross_entropy(logits, y.flatten())
    del logits
    loss.backward()
    mark("first block")
    optimizer.step()
    mark("update")
    optimizer.zero_grad()


def _parts(kinds: "dict[str, int]") -> dict[str, int]:
    parts = dict.fromkeys(PARTS, 0)
    for kind, nbytes in kinds.items():
        if kind != "Total":
            parts[PART_OF_KIND[kind]] += nbytes
    return parts


if __name__ == "__main__":
    main()
