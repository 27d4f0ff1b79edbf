"""Train a small network on handwritten digits, each batch split over the ranks.

    torchrun --standalone --nproc-per-node=4 ddp_digits.py --epochs 5

`--batch` counts the rows of all ranks together, so 1, 2 or 4 ranks take the same steps
and reach the same accuracy. Used in lesson 25.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from simgpu import Messages

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the course's folder

from helpers import digits  # noqa: E402


def make_model(width: int = 512) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 10),
    )  # fmt: skip


def wrap(model: nn.Module, compress: str = "none") -> DDP:
    """The model in DDP; compressed, it sends halves, or matrices of rank 2."""
    # PowerSGD sends three messages a bucket, one after the other. On gloo those of two
    # buckets may cross, and the program aborts: make one bucket of all.
    model = DDP(model, bucket_cap_mb=100 if compress == "powersgd" else None)
    if compress == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if compress == "powersgd":
        model.power = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=10
        )
        model.register_comm_hook(model.power, powerSGD_hook.powerSGD_hook)
    return model


def train(data, epochs=5, batch=128, rate=0.1, compress="none") -> DDP:
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    rows = TensorDataset(data.x.to(device), data.y.to(device))
    sampler = DistributedSampler(rows, drop_last=True)
    each = batch // dist.get_world_size()
    loader = DataLoader(rows, each, sampler=sampler, drop_last=True)
    model = wrap(make_model().to(device), compress)
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # a new order
        for x, y in loader:
            cross_entropy(model(x), y).backward()  # and averages
            optimizer.step()
            optimizer.zero_grad()
    return model


@torch.no_grad()
def accuracy(model: nn.Module, data) -> float:
    """Each rank tests its share of the images; the counts are added up."""
    device = next(model.parameters()).device
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    right = model(data.test_x[mine].to(device)).argmax(1) == data.test_y[mine].to(
        device
    )
    count = right.sum()
    dist.all_reduce(count)
    return count.item() / len(data.test_y)


def bytes_of_a_step(model: DDP) -> int:
    """Counted in one more backward()."""
    x = next(model.parameters()).new_ones(1, 64)
    power = getattr(model, "power", None)
    before = power.total_numel_after_compression if power else 0
    with Messages() as messages:
        model(x).sum().backward()
    if power:  # it sends from a thread that Messages does not see, and counts itself
        return 4 * (power.total_numel_after_compression - before)
    return messages.total()


def train_and_test(data, **options) -> tuple[float, int, dict[str, torch.Tensor]]:
    """The accuracy, the bytes that a rank hands over in a step, and the weights."""
    model = train(data, **options)
    weights = {name: w.detach().cpu() for name, w in model.module.state_dict().items()}
    return accuracy(model.module, data), bytes_of_a_step(model), weights


def load_digits():
    """Rank 0 reads the data and sends them to the others."""
    box = [None]
    if dist.get_rank() == 0:
        box = [digits()]
    dist.broadcast_object_list(box)
    return box[0]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train on digits with DDP.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128, help="rows of all ranks")
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate")
    parser.add_argument(
        "--compress", default="none", choices=("none", "fp16", "powersgd")
    )
    parser.add_argument("--save", metavar="FILE", help="where rank 0 puts the weights")
    args = parser.parse_args(arguments)
    size = int(os.environ["WORLD_SIZE"])
    if args.batch % size:
        parser.error(f"--batch {args.batch} cannot be split over {size} ranks")

    gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if gpus:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    options = {"batch": args.batch, "rate": args.rate, "compress": args.compress}
    data = load_digits()
    share, nbytes, weights = train_and_test(data, epochs=args.epochs, **options)
    if dist.get_rank() == 0:
        print(f"{size} ranks: accuracy {share:.2%}, {nbytes:,} bytes a step")
        if args.save:
            torch.save(weights, args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # A thread of gloo may still hold a tensor while Python shuts down, which aborts
    # the process ("terminate called without an active exception"). So leave at once.
    sys.stdout.flush()
    os._exit(0)
