"""Lightning's Trainer on two GPUs: its own launcher, torchrun's ranks, or spawned ones.

python -m simgpu --gpus 2 --children lightning_trainer.py ddp
torchrun --nproc-per-node=2 -m simgpu lightning_trainer.py fsdp
"""

import sys

import digits
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = digits.network()

    def training_step(self, batch, index):
        samples, classes = batch
        assert (
            samples.device
            == self.device
            == torch.device("cuda", self.trainer.local_rank)
        )
        loss = nn.functional.cross_entropy(self.network(samples), classes)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        samples, classes = batch
        right = (self.network(samples).argmax(dim=1) == classes).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def train_dataloader(self):
        data = TensorDataset(*digits.data())
        rank = self.trainer.global_rank
        sampler = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=False)
        return DataLoader(data, batch_size=4, sampler=sampler)

    def val_dataloader(self):
        return self.train_dataloader()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=digits.LEARNING_RATE)

    def on_train_end(self):
        # with a spawning strategy the ranks, and not the program, have the weights
        weights = self.trainer.strategy.model.state_dict()
        weights = {name.split("network.")[-1]: w for name, w in weights.items()}
        full = {
            name: w.full_tensor() if hasattr(w, "full_tensor") else w
            for name, w in weights.items()
        }
        tolerance = 1e-5 if self.trainer.precision == "32-true" else 2e-2
        if self.trainer.is_global_zero:
            digits.compare(full, batch=8, tolerance=tolerance)


def main() -> None:
    strategy = sys.argv[1]
    precision = sys.argv[2] if len(sys.argv) > 2 else "32-true"
    trainer = L.Trainer(
        accelerator="gpu", devices=2, strategy=strategy, precision=precision,
        max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    model = Classifier()
    trainer.fit(torch.compile(model) if "compile" in sys.argv else model)


if __name__ == "__main__":
    main()
