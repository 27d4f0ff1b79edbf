"""Programs that use well-known packages, on simulated GPUs; the packages are optional.

Each program compares what it has learned with one process on the CPU, and prints "ok".
Where its packages are not installed, it is skipped. All of them, for a table:

    python -m pytest -m packages tests/test_simgpu_packages.py
"""

from pathlib import Path

import pytest

from support import programs

pytestmark = pytest.mark.packages
SCRIPTS = Path(__file__).parent / "scripts" / "packages"
GPUS = "-m simgpu --gpus 2"
RANKS = "-m torch.distributed.run --nproc-per-node=2 -m simgpu"
# a program -> what stands before it, and its arguments
COMMANDS = {
    "accelerate_loop": [
        *((RANKS, words) for words in ("", "bf16", "fp16", "no fsdp2")),
        (f"{GPUS} accelerate launch --num_processes 2", ""),
        (f"{GPUS} -m accelerate.commands.launch --num_processes 2", ""),
        (GPUS, "no notebook"), ("", "no notebook start"),
    ],
    "ignite_loop": [(RANKS, ""), (GPUS, "spawn")],
    "lightning_trainer": [
        *((RANKS, how) for how in ("ddp", "ddp bf16-mixed", "ddp 16-mixed", "fsdp")),
        (f"{GPUS} torchrun --nproc-per-node=2", "ddp"), (f"{GPUS} --children", "ddp"),
        (GPUS, "ddp_spawn"), (GPUS, "ddp_notebook"),
        (f"{GPUS} --children --no-compile", "ddp 32-true compile"),
    ],
    "lightning_fabric": [
        (RANKS, words) for words in ("ddp 32-true", "ddp bf16-mixed", "fsdp 32-true")
    ],
    "lightning_tensor_parallel": [(RANKS, "")],
    "timm_train": [(RANKS, "")],
    "torchvision_train": [(GPUS, "")],
    "transformers_trainer": [(RANKS, ""), (RANKS, "--bf16"), (RANKS, "--fp16")],
    "transformers_dispatch": [(GPUS, "")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("program", "before", "words"),
    [(program, *command) for program, its in COMMANDS.items() for command in its],
)
def test_a_program_agrees_with_one_process(tmp_path, program, before, words):
    pytest.importorskip(program.split("_")[0], exc_type=ImportError)
    command = *before.split(), SCRIPTS / f"{program}.py", *words.split()
    done = programs.in_new_python(tmp_path, *command)
    assert done.status == 0, done.stderr
    assert "ok" in done.stdout.split(), done.stdout + done.stderr
