"""Lightning Fabric with tensor parallelism: DTensor's plan for a small network.

torchrun --nproc-per-node=2 -m simgpu lightning_tensor_parallel.py
"""

import digits
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


def split(model: nn.Module, mesh) -> nn.Module:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, mesh["tensor_parallel"], plan)


def main() -> None:
    strategy = ModelParallelStrategy(
        split, data_parallel_size=1, tensor_parallel_size=2
    )
    fabric = Fabric(accelerator="cuda", devices=2, strategy=strategy)
    fabric.launch()
    with fabric.init_module(empty_init=False):
        model = digits.network()
    model = fabric.setup(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=digits.LEARNING_RATE)
    optimizer = fabric.setup_optimizers(optimizer)
    samples, classes = (part.to(fabric.device) for part in digits.data())
    for start in range(0, digits.SAMPLES, 8):
        here = slice(start, start + 8)
        loss = nn.functional.cross_entropy(model(samples[here]), classes[here])
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    full = {
        name: weight.full_tensor() if isinstance(weight, DTensor) else weight
        for name, weight in model.state_dict().items()
    }
    if fabric.is_global_zero:
        digits.compare(full, batch=8)


main()
