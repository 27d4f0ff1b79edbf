"""Programs for several GPUs, as PyTorch's tutorials have them, on simulated ones.

Each compares what it computes with one process, by itself, and ends with a line "ok".
More of them run in `test_dry_twins.py`, beside a dry run.
"""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from simgpu._ranks.run_ranks import RanksFailed
from support import programs

SCRIPTS = Path(__file__).parent / "scripts" / "cluster"
RUNS = [  # a program, its ranks, its arguments
    ("collectives", 4), ("exchanges", 4), ("groups", 4), ("functional", 4),
    ("ddp_edges", 4), ("zero", 4), ("experts", 4),
]  # fmt: skip


def run(folder: Path, name: str, ranks: int, *arguments: str) -> None:
    done = programs.in_ranks(folder, ranks, SCRIPTS / f"{name}.py", *arguments)
    assert done.status == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"ok {name}: "), done.stdout


@pytest.mark.parametrize("program", RUNS, ids=lambda run: " ".join(map(str, run)))
@pytest.mark.slow
def test_a_program_for_many_gpus_agrees_with_one_process(tmp_path, program):
    run(tmp_path, *program)


@pytest.mark.slow
def test_a_checkpoint_of_four_ranks_is_loaded_by_two(tmp_path):
    run(tmp_path, "checkpoint", 4, "--save=.")
    run(tmp_path, "checkpoint", 2, "--load=.")


def step_with_an_overflow_on_rank_1() -> tuple[bool, float]:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False).cuda()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    before = model.weight.full_tensor().clone()
    scaler.scale(model(torch.ones(2, 4, device="cuda")).sum()).backward()
    if rank == 1:
        model.weight.grad.to_local()[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    return torch.equal(before, model.weight.full_tensor()), scaler.get_scale()


def test_an_overflow_in_one_shard_skips_the_step_on_all_ranks(simulated_ranks):
    assert simulated_ranks(step_with_an_overflow_on_rank_1, 2) == [(True, 4.0)] * 2


def fill_rank_1() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    mine = torch.ones(2**22 if rank else 1, device="cuda")  # 16 MiB on rank 1
    dist.all_reduce(torch.ones(1, device="cuda"))
    if rank == 1:
        mine = torch.cat([mine] * 8)  # the line that is too much
    dist.barrier()


def test_memory_runs_out_on_the_rank_and_line_where_it_would(simulated_ranks):
    with pytest.raises(RanksFailed) as caught:
        simulated_ranks(fill_rank_1, 2, memory="128MB")
    first = next(iter(caught.value.failures))
    text = caught.value.failures[first]
    assert first == 1 and "torch.OutOfMemoryError: CUDA out of memory." in text
    assert "mine = torch.cat([mine] * 8)  # the line that is too much" in text
