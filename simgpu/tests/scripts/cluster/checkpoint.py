"""Distributed checkpoints of an FSDP2 model, saved by some ranks, loaded by others.

torchrun --nproc-per-node=4 checkpoint.py --save=FOLDER
torchrun --nproc-per-node=2 checkpoint.py --load=FOLDER
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import GPT, adamw, agree, agree_on, batches, join, leave, loss_of
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--save", type=Path)
parser.add_argument("--load", type=Path)
args = parser.parse_args()
folder = args.save or args.load

rank, ranks, device = join()
data = batches(4, 8, device=device)
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Training(Stateful):
    """A model in shards, its optimizer and the number of steps."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = GPT().to(device)
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = adamw(self.model)
        self.steps = 0

    def state_dict(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "steps": self.steps}

    def load_state_dict(self, state: dict) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.steps = state["steps"]

    def step(self) -> None:
        loss_of(self.model, data[self.steps].chunk(ranks)[rank]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1


def reference(steps: int) -> tuple[GPT, torch.optim.AdamW]:
    """The same steps in one process."""
    torch.manual_seed(0)
    model = GPT().to(device)
    optimizer = adamw(model)
    for batch in data[:steps]:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def check(what: str, training: Training) -> None:
    """Parameters and moments after so many steps."""
    model, optimizer = reference(training.steps)
    agree_on(what, training.model, model)
    pairs = zip(training.model.parameters(), model.parameters(), strict=True)
    for mine, theirs in pairs:
        state, expected = training.optimizer.state[mine], optimizer.state[theirs]
        for name in ("step", "exp_avg", "exp_avg_sq"):
            agree(f"{what}: {name}", state[name].to(device), expected[name].to(device))


if args.save:
    training = Training(seed=0)
    training.step()
    training.step()
    dcp.save({"training": training}, checkpoint_id=folder / "sync")
    background = dist.new_group(backend="gloo")  # for a thread of its own
    saving = dcp.async_save(
        {"training": training},
        checkpoint_id=folder / "async",
        process_group=background,
    )
    state = {
        "model": get_model_state_dict(training.model, options=WHOLE),
        "optimizer": get_optimizer_state_dict(
            training.model, training.optimizer, options=WHOLE
        ),
    }
    assert bool(state["model"]) == (rank == 0)
    if rank == 0:
        assert all(value.device.type == "cpu" for value in state["model"].values())
        torch.save(state, folder / "whole.pt")
    training.step()  # what is being saved stays as it was
    saving.result()
    check("after saving", training)
else:
    for name in ("sync", "async"):
        training = Training(seed=1)
        dcp.load({"training": training}, checkpoint_id=folder / name)
        assert training.steps == 2
        check(f"{name}, loaded", training)
        training.step()
        training.step()
        check(f"{name}, after more steps", training)

    training = Training(seed=2)
    state = torch.load(folder / "whole.pt") if rank == 0 else {"model": {}}
    state.setdefault("optimizer", {})
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(training.model, state["model"], options=spread)
    set_optimizer_state_dict(
        training.model, training.optimizer, state["optimizer"], options=spread
    )
    training.steps = 2
    check("whole.pt, loaded", training)
    training.step()
    check("whole.pt, after a step", training)

dist.barrier(device_ids=[rank])
leave(f"checkpoint: {'saved' if args.save else 'loaded'} by {ranks} ranks")
