"""ignite: its engines and metrics on two ranks, from torchrun or spawned by itself.

torchrun --nproc-per-node=2 -m simgpu ignite_loop.py
python -m simgpu --gpus 2 ignite_loop.py spawn
"""

import sys

import digits
import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.metrics import Accuracy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(rank: int) -> None:
    assert idist.device() == torch.device("cuda", rank)
    data = TensorDataset(*digits.data())
    loader = idist.auto_dataloader(data, batch_size=8, shuffle=False)
    model = idist.auto_model(digits.network())
    optimizer = idist.auto_optim(
        torch.optim.SGD(model.parameters(), lr=digits.LEARNING_RATE)
    )

    def step(engine, batch):
        samples, classes = (part.to(idist.device()) for part in batch)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(samples), classes)
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(step)
    evaluator = create_supervised_evaluator(
        model, metrics={"accuracy": Accuracy()}, device=idist.device()
    )

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine):
        evaluator.run(DataLoader(data, batch_size=16))

    trainer.run(loader, max_epochs=1)
    alone = digits.trained_alone(8)
    samples, classes = digits.data()
    right = float((alone(samples).argmax(1) == classes).float().mean())
    assert abs(evaluator.state.metrics["accuracy"] - right) < 1e-6
    if idist.get_rank() == 0:
        digits.compare(model.module.state_dict(), batch=8)


if __name__ == "__main__":
    spawned = {"nproc_per_node": 2} if "spawn" in sys.argv else {}
    with idist.Parallel(backend="nccl", **spawned) as parallel:
        parallel.run(train)
