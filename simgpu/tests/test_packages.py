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
COMMANDS = {
    "accelerate": [
        f"{RANKS} accelerate_loop.py",
        f"{RANKS} accelerate_loop.py bf16",
        f"{RANKS} accelerate_loop.py fp16",
        f"{RANKS} accelerate_loop.py no fsdp2",
        f"{GPUS} accelerate launch --num_processes 2 accelerate_loop.py",
        f"{GPUS} -m accelerate.commands.launch --num_processes 2 accelerate_loop.py",
        f"{GPUS} accelerate_loop.py no notebook",
        "accelerate_loop.py no notebook start",
    ],
    "ignite": [f"{RANKS} ignite_loop.py", f"{GPUS} ignite_loop.py spawn"],
    "lightning": [
        f"{RANKS} lightning_trainer.py ddp",
        f"{RANKS} lightning_trainer.py ddp bf16-mixed",
        f"{RANKS} lightning_trainer.py ddp 16-mixed",
        f"{RANKS} lightning_trainer.py fsdp",
        f"{GPUS} torchrun --nproc-per-node=2 lightning_trainer.py ddp",
        f"{GPUS} --children lightning_trainer.py ddp",
        f"{GPUS} lightning_trainer.py ddp_spawn",
        f"{GPUS} lightning_trainer.py ddp_notebook",
        f"{GPUS} --children --no-compile lightning_trainer.py ddp 32-true compile",
        f"{RANKS} lightning_fabric.py ddp 32-true",
        f"{RANKS} lightning_fabric.py ddp bf16-mixed",
        f"{RANKS} lightning_fabric.py fsdp 32-true",
        f"{RANKS} lightning_tensor_parallel.py",
    ],
    "timm": [f"{RANKS} timm_train.py"],
    "torchvision": [f"{GPUS} torchvision_train.py"],
    "transformers": [
        f"{RANKS} transformers_trainer.py",
        f"{RANKS} transformers_trainer.py --bf16",
        f"{RANKS} transformers_trainer.py --fp16",
        f"{GPUS} transformers_dispatch.py",
    ],
}


@pytest.mark.parametrize(
    ("package", "command"),
    [(package, command) for package, its in COMMANDS.items() for command in its],
)
def test_a_program_agrees_with_one_process(tmp_path, package, command):
    pytest.importorskip(package, exc_type=ImportError)
    words = [
        SCRIPTS / word if word.endswith(".py") else word for word in command.split()
    ]
    done = programs.in_new_python(tmp_path, *words)
    assert done.status == 0, done.stderr
    assert "ok" in done.stdout.split(), done.stdout + done.stderr
