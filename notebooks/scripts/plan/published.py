"""Training runs that others measured and published, each beside our prediction."""

from dataclasses import dataclass, replace

from scripts.plan.memory import bytes_per_gpu
from scripts.plan.model import MODELS
from scripts.plan.step_time import step_seconds


@dataclass(frozen=True)
class Published:
    """A training run that somebody measured, and where it is published."""

    name: str
    run: dict  # arguments of `step_seconds`, most of `bytes_per_gpu` as well
    source: str
    tokens_per_second: float | None = None  # of each GPU
    mfu: float | None = None
    memory: float | None = None  # bytes
    note: str = ""


_TITAN = "https://github.com/pytorch/torchtitan/"
# the page as it was in 2024
_TITAN_A100 = (
    f"{_TITAN}blob/041336434916bdc0f88c1f89fda176fd3c2092e4/docs/performance.md"
)
_TITAN_2D = f"{_TITAN}commits/main/docs/performance.md"  # November 2024
_TITAN_H100 = f"{_TITAN}blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
_IBM = "https://pytorch.org/blog/maximizing-training/"
_LAMBDA = (
    "https://github.com/LambdaLabsML/distributed-training-guide/tree/"
    "059cf08cb61ed64d4337980b6b6bf83514a9619c/06-training-llama-405b"
)
_LLAMA2_70B = replace(MODELS["70B"], name="Llama 2 70B", vocab=32000)
_SLOW = "H100 with 96 GB, 2.4 TB/s and at most 500 W, slower than the one assumed"
_IBM_NOTE = "Gbit/s between machines taken as those of 8 GPUs together"
PUBLISHED = (
    Published(
        "torchtitan 8B, 64 A100",
        dict(model="8B", gpus=64, card="A100", tokens=8192, checkpointing=0.5),
        _TITAN_A100, 2904, 0.568,
        note="every second block computed twice; the network is not published",
    ),
    Published(
        "torchtitan 70B, 64 A100",
        dict(model="70B", gpus=64, card="A100", tokens=8192),
        _TITAN_A100, 331, 0.517,
        note="the network is not published",
    ),
    Published(
        "torchtitan 8B, 8 H100",
        dict(model="8B", gpus=8, batch=2, tokens=8192, checkpointing=0.5),
        _TITAN_H100, 5762, memory=82.4 * 2**30,
        note=f"{_SLOW}; chosen operations computed twice, here half the blocks; "
        "memory reserved, not allocated",
    ),
    Published(
        "torchtitan 8B, 128 H100",
        dict(model="8B", gpus=128, batch=2, tokens=8192, checkpointing=0.5),
        _TITAN_H100, 5605, memory=67.0 * 2**30,
        note="as with 8",
    ),
    Published(
        "torchtitan 405B, 128 H100",
        dict(
            model="405B", gpus=128, strategy="fsdp + tensor 8", batch=2, tokens=8192
        ),
        _TITAN_2D, 109, 0.29,
        note="H100 of 94 GB; the network is not published",
    ),
    Published(
        "IBM 7B, 128 A100",
        dict(
            model="7B", gpus=128, card="A100", batch=2, checkpointing=False, network=50
        ),
        _IBM, 3700, 0.57, note=_IBM_NOTE,
    ),
    Published(
        "IBM 7B, 96 H100",
        dict(model="7B", gpus=96, batch=2, checkpointing=False, network=100),
        _IBM, 7500, 0.37, note=_IBM_NOTE,
    ),
    Published(
        "IBM 70B, 128 A100",
        dict(model=_LLAMA2_70B, gpus=128, card="A100", batch=2, network=50),
        _IBM, 370, 0.50, note=_IBM_NOTE,
    ),
    Published(
        "IBM 70B, 96 H100",
        dict(model=_LLAMA2_70B, gpus=96, batch=2, network=100),
        _IBM, 800, 0.34, note=_IBM_NOTE,
    ),
    Published(
        "Lambda 405B, 64 H100",
        dict(model="405B", gpus=64, strategy="fsdp offload"),
        _LAMBDA, 4096 / 30, memory=52.9e9,
        note="gradients scattered in bfloat16 (6.4 GB less), embedding sharded by "
        "itself (4.2 GB less); about 30 s a step",
    ),
)  # fmt: skip


def compare() -> list[dict]:
    """Each published figure beside ours: one set of assumptions for all.

    Returns:
        dicts with "name", "figure" ("tokens/s", "MFU" or "GB"), "published",
        "predicted" and "error", which is predicted over published, less 1.
    """
    rows = []
    for row in PUBLISHED:
        step = step_seconds(**row.run)
        asked = {k: v for k, v in row.run.items() if k not in ("card", "network")}
        figures = (
            ("tokens/s", row.tokens_per_second, step.tokens_per_second),
            ("MFU", row.mfu, step.mfu),
            ("GB", row.memory and row.memory / 1e9, bytes_per_gpu(**asked).total / 1e9),
        )
        for figure, published, predicted in figures:
            if published is not None:
                rows.append({
                    "name": row.name, "figure": figure, "published": published,
                    "predicted": predicted, "error": predicted / published - 1,
                })  # fmt: skip
    return rows
