"""Lightning Fabric on the ranks of torchrun: a loop of one's own, with DDP or FSDP.

torchrun --nproc-per-node=2 -m simgpu lightning_fabric.py ddp bf16-mixed
"""

import sys

import digits
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    strategy, precision = sys.argv[1:3]
    if strategy == "fsdp":
        strategy = FSDPStrategy(state_dict_type="full")
    fabric = Fabric(
        accelerator="cuda", devices=2, strategy=strategy, precision=precision
    )
    fabric.launch()
    model = digits.network()
    model = fabric.setup_module(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=digits.LEARNING_RATE)
    optimizer = fabric.setup_optimizers(optimizer)
    loader = fabric.setup_dataloaders(
        DataLoader(TensorDataset(*digits.data()), batch_size=4)
    )
    model.train()
    for samples, classes in loader:
        loss = nn.functional.cross_entropy(model(samples), classes)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1e3)
        optimizer.step()
        optimizer.zero_grad()
        everyone = fabric.all_gather(loss.detach())
        assert everyone.shape == (2,) and everyone.is_cuda, everyone
    tolerance = 1e-5 if precision == "32-true" else 2e-2
    fabric.save("checkpoint.pt", {"model": model})
    fabric.barrier()
    if fabric.is_global_zero:
        saved = torch.load("checkpoint.pt", weights_only=True)["model"]
        digits.compare(saved, batch=8, tolerance=tolerance)


main()
