"""Programs for several GPUs, as PyTorch's tutorials have them, on simulated ones.

Each compares what it computes with one process, by itself, and ends with a line "ok".
"""

from pathlib import Path

import pytest

from tests import programs

SCRIPTS = Path(__file__).parent / "scripts" / "cluster"
RUNS = [  # a program, its ranks, its arguments
    ("collectives", 4),
    ("exchanges", 4),
    ("groups", 4),
    ("functional", 4),
    ("ddp_all", 4),
    ("ddp_edges", 4),
    ("gpt", 4, "--dtype=float32"),
    ("gpt", 4, "--dtype=bfloat16"),
    ("gpt", 4, "--dtype=float16"),
    ("zero", 4),
    ("fsdp1", 4),
    ("fsdp2", 4),
    ("fsdp2", 4, "--reshard=no", "--prefetch"),
    ("fsdp2", 4, "--reshard=2", "--clip=100"),
    ("fsdp2_mixed", 4),
    ("tensor_parallel", 4),
    ("tensor_parallel", 2, "--loss-parallel"),
    ("tensor_parallel", 4, "--sequence", "--loss-parallel"),
    ("two_d", 4),
    ("two_d", 8, "--replicas=2"),
    ("three_d", 8),
    ("fsdp2_tp_gpt", 8, "--steps=3"),
    ("pipeline", 4),
    ("ring_attention", 4),
    ("context_parallel", 4, "--kernel=efficient"),
    ("context_parallel", 4, "--kernel=flash"),
    ("experts", 4),
    ("memory", 2),
]


def run(folder: Path, name: str, ranks: int, *arguments: str) -> None:
    done = programs.in_ranks(folder, ranks, SCRIPTS / f"{name}.py", *arguments)
    assert done.status == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"ok {name}: "), done.stdout


@pytest.mark.parametrize("program", RUNS, ids=lambda run: " ".join(map(str, run)))
def test_a_program_for_many_gpus_agrees_with_one_process(tmp_path, program):
    run(tmp_path, *program)


def test_a_checkpoint_of_four_ranks_is_loaded_by_two(tmp_path):
    run(tmp_path, "checkpoint", 4, "--save=.")
    run(tmp_path, "checkpoint", 2, "--load=.")
