"""Programs that use well-known packages, on simulated GPUs; the packages are optional.

Each program is run by a command, and prints "ok" and numbers, which must be those of
the same training in one process on the CPU. Where a package is not installed, its
programs are skipped: install lightning and accelerate, and

    python -m pytest -m packages tests/test_simgpu_packages.py
"""

import re
import textwrap
from pathlib import Path

import pytest

from tests import programs

pytestmark = pytest.mark.packages


def numbers(done: programs.Done) -> set[tuple[float, ...]]:
    """What the lines with "ok" say, rounded; ranks that agree say it once."""
    assert done.status == 0, done.stderr
    # several ranks may write one line
    found = re.findall(r"ok((?: -?\d+\.\d+(?=[ \n]))+)", done.stdout)
    assert found, done.stdout + done.stderr
    return {tuple(round(float(word), 4) for word in line.split()) for line in found}


def check(folder: Path, program: str, on_cpu: str, *ways: str) -> None:
    """Run a program in several ways: the same numbers as on the CPU.

    Args:
        folder: an empty one.
        program: the text of a script.
        on_cpu: the script's arguments for one process without GPUs.
        ways: commands as behind `python`, with {} for the script's path.
    """
    path = folder / "program.py"
    path.write_text(textwrap.dedent(program), encoding="utf-8")
    expected = numbers(programs.in_new_python(folder, path, *on_cpu.split()))
    assert len(expected) == 1
    for way in ways:
        words = way.format(path).split()
        assert numbers(programs.in_new_python(folder, *words)) == expected, way


# -- Lightning -------------------------------------------------------------------------

LIGHTNING = """
    import sys, warnings
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    import lightning as L

    warnings.simplefilter("ignore")

    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))

        def training_step(self, batch, _):
            x, y = batch
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("loss", loss, on_epoch=True, sync_dist=True)
            return loss

        def train_dataloader(self):
            ranks, rank = self.trainer.world_size, self.trainer.global_rank
            mine = DistributedSampler(data, ranks, rank, shuffle=False)
            return DataLoader(data, 16 // ranks, sampler=mine)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))

    if __name__ == "__main__":
        accelerator, devices, strategy = sys.argv[1:4]
        net = Net()
        trainer = L.Trainer(
            accelerator=accelerator, devices=int(devices), strategy=strategy,
            max_epochs=2, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False,
        )
        trainer.fit(torch.compile(net) if "compile" in sys.argv else net)
        total = sum(p.abs().sum() for p in net.parameters()).item()
        loss = trainer.callback_metrics["loss_epoch"].item()
        print(f"ok {total:.5f} {loss:.5f}\\n", end="", flush=True)
"""


@pytest.mark.parametrize(
    "way",
    [
        "-m simgpu --gpus 2 --children {} gpu 2 ddp",
        "-m simgpu --gpus 2 {} gpu 2 ddp_spawn",
        "-m simgpu --gpus 2 {} gpu 2 ddp_notebook",
        "-m simgpu --gpus 2 torchrun --nproc-per-node=2 {} gpu 2 ddp",
        "-m torch.distributed.run --nproc-per-node=2 -m simgpu {} gpu 2 ddp",
        "-m simgpu --gpus 1 --no-compile {} gpu 1 auto compile",
    ],
)
def test_lightning_starts_its_ranks_in_every_way(way, tmp_path):
    pytest.importorskip("lightning")
    check(tmp_path, LIGHTNING, "cpu 1 auto", way)


# -- accelerate ------------------------------------------------------------------------

ACCELERATE = """
    import sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    def train(ranks):
        from accelerate import Accelerator

        accelerator = Accelerator()
        assert accelerator.num_processes == ranks
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        data = TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))
        loader = DataLoader(data, 16 // ranks)
        net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
        for _ in range(2):
            for x, y in loader:
                loss = nn.functional.cross_entropy(net(x), y)
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
        total = sum(p.abs().sum() for p in net.parameters()).item()
        loss = accelerator.reduce(loss.detach(), "mean").item()
        print(f"ok {total:.5f} {loss:.5f}\\n", end="", flush=True)
        accelerator.end_training()

    if __name__ == "__main__":
        ranks = int(sys.argv[1])
        if "notebook" in sys.argv:
            from accelerate import notebook_launcher

            if "start" in sys.argv:
                import simgpu

                simgpu.start(2)
            notebook_launcher(train, (ranks,), num_processes=ranks)
        else:
            train(ranks)
"""


@pytest.mark.parametrize(
    "way",
    [
        "-m simgpu --gpus 2 accelerate launch --num_processes 2 {} 2",
        "-m simgpu --gpus 2 -m accelerate.commands.launch --num_processes 2 {} 2",
        "-m simgpu --gpus 2 {} 2 notebook",
        "{} 2 notebook start",
    ],
)
def test_accelerate_starts_its_ranks_in_every_way(way, tmp_path):
    pytest.importorskip("accelerate")
    check(tmp_path, ACCELERATE, "1", way)
