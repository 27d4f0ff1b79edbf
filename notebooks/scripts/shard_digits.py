"""Train a network on handwritten digits, its weights and Adam's state split over ranks.

    torchrun --standalone --nproc-per-node=4 shard_digits.py --steps 30 --save FOLDER
    torchrun --standalone --nproc-per-node=2 shard_digits.py --steps 30 --load FOLDER

`--batch` counts the rows of all ranks together, so 1, 2 or 4 ranks take the same steps.
What 4 ranks have saved, 2 can load. Used in 18-shard-everything.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy


class Block(nn.Module):
    """The part of a transformer's layer that follows attention, without the norm."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):  # (rows, width)
        return x + self.down(torch.relu(self.up(x)))


def make_model(width: int = 128, blocks: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    middle = [Block(width) for _ in range(blocks)]
    return nn.Sequential(nn.Linear(64, width), *middle, nn.Linear(width, 10))


def device() -> str:
    """Of this rank; it reads "cpu:gloo,cuda:nccl" where both are there."""
    on_gpus = dist.is_initialized() and "nccl" in dist.get_backend()
    return "cuda" if on_gpus else "cpu"


def mesh_of_all():
    return init_device_mesh(device(), (dist.get_world_size(),))


def shard(model: nn.Sequential, **options) -> nn.Sequential:
    mesh = mesh_of_all()
    for block in model[1:-1]:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)  # takes the first and last layer


def rows_of(step: int, batch: int = 128) -> slice:
    """This rank's rows of a batch; all of them in a program without ranks."""
    start = batch * (step % (1437 // batch))
    rank, size = 0, 1
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    return slice(start + rank, start + batch, size)


def loss_of(model, data, rows):
    return cross_entropy(model(data.x[rows].to(device())), data.y[rows].to(device()))


def train(model, optimizer, data, steps, batch: int = 128) -> None:
    for step in steps:
        loss_of(model, data, rows_of(step, batch)).backward()
        optimizer.step()
        optimizer.zero_grad()


def save(folder, model, optimizer, step: int) -> None:
    weights, state = get_state_dict(model, optimizer)
    everything = {"model": weights, "optimizer": state, "step": step}
    dcp.save(everything, checkpoint_id=folder)  # every rank writes its shards


def load(folder, model, optimizer) -> int:
    weights, state = get_state_dict(model, optimizer)
    found = {"model": weights, "optimizer": state, "step": 0}
    dcp.load(found, checkpoint_id=folder)  # into the shards that this rank has
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return found["step"]


@torch.no_grad()
def accuracy(model, data) -> float:
    """Each rank tests its share; all call the model equally often, since it gathers."""
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    guess = model(data.test_x[mine].to(device())).argmax(1)
    right = (guess == data.test_y[mine].to(device())).sum()
    dist.all_reduce(right)
    model.reshard()  # the root stays whole after a forward pass without backward
    return right.item() / len(data.test_y)


def whole_weights(model) -> list[torch.Tensor]:
    """Every rank must call it, since it gathers."""
    weights = []
    for p in model.parameters():
        w = p.detach()
        weights.append((w.full_tensor() if isinstance(w, DTensor) else w).cpu())
    return weights


def train_and_test(data, steps=30, batch=128, load_from=None, save_to=None):
    """What was done, in words, and the weights at the end."""
    model = shard(make_model())
    optimizer = torch.optim.Adam(model.parameters())  # made after the shards
    first = load(load_from, model, optimizer) if load_from else 0
    taken = range(first, first + steps)
    train(model, optimizer, data, taken, batch)
    if save_to:
        save(save_to, model, optimizer, taken.stop)
    words = f"{dist.get_world_size()} ranks, steps {taken.start} to {taken.stop}"
    return f"{words}: {accuracy(model, data):.2%} right", whole_weights(model)


def load_digits():
    """Rank 0 reads the data and sends them to the others."""
    box = [None]
    if dist.get_rank() == 0:
        from helpers import digits

        box = [digits()]
    dist.broadcast_object_list(box)
    return box[0]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train on digits with fully_shard.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=128, help="rows of all ranks")
    parser.add_argument("--save", metavar="FOLDER", help="where all ranks write")
    parser.add_argument("--load", metavar="FOLDER", help="go on from there")
    args = parser.parse_args(arguments)
    size = int(os.environ["WORLD_SIZE"])
    if args.batch % size:
        parser.error(f"--batch {args.batch} cannot be split over {size} ranks")

    gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    options = args.steps, args.batch, args.load, args.save
    words, _ = train_and_test(load_digits(), *options)
    if dist.get_rank() == 0:
        print(words)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # A thread of gloo may still hold a tensor while Python shuts down, which aborts
    # the process ("terminate called without an active exception"). So leave at once.
    sys.stdout.flush()
    os._exit(0)
