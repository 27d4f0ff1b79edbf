"""Training runs that others have published, each beside what `plan_run.py` predicts.

    python published_runs.py

prints a line for each of them. `runs` reads the two tables in `tests/recordings` and
adds the runs written down here. They are split by model: the shares `REACHED` of the
planner were fitted to the runs of `FITTED`, and all others judge it. Used in
lessons 26 and 27.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from scripts.plan_run import (
    CARDS,
    MODELS,
    Model,
    Plan,
    choices,
    flops,
    message_seconds,
    messages,
    not_known,
    parameters,
    rate,
)

RECORDINGS = Path(__file__).resolve().parents[2] / "tests" / "recordings"
FITTED = ("MPT 1b", "MPT 30b", "Llama 2 13B")
# Gbit/s for each GPU where the publisher does not say: those of NVIDIA's DGX
ASSUMED = {"A100": 200, "H100": 400}
_LLAMA2_70B = replace(MODELS["70B"], vocab=32000)
_MODELS = {
    "Llama 2 7B": MODELS["7B"],
    "Llama 2 13B": Model(40, 5120, 40, 40, 13824, 32000),
    "Llama 2 70B": _LLAMA2_70B,
    "Llama 3 8B": MODELS["8B"],
    "Llama 3 70B": MODELS["70B"],
    "Llama 3 405B": MODELS["405B"],
}
_SHARDS = {"no_shard": 1, "hybrid_shard": 8}  # GPUs that share the states; else all


class Run(NamedTuple):
    """A published run. `rate` is in tokens/s of each GPU, `memory` in bytes."""

    name: str
    source: str
    model: Model
    plan: Plan
    rate: float
    is_fitted: bool = False
    mfu: float | None = None  # as its publisher counts
    memory: float | None = None
    note: str = ""


_TITAN = "https://github.com/pytorch/torchtitan/"
_TITAN_A100 = (
    f"{_TITAN}blob/041336434916bdc0f88c1f89fda176fd3c2092e4/docs/performance.md"
)
_TITAN_H100 = f"{_TITAN}blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
_IBM = "https://pytorch.org/blog/maximizing-training/"
_MEGATRON = "https://arxiv.org/abs/2104.04473"  # Narayanan and others, 2021, table 1
_LLAMA3 = "https://arxiv.org/abs/2407.21783"  # Llama 3, 2024, table 4
_SLOW = "H100 with 96 GB and slower memory; half of the blocks stand for chosen kernels"


def _written_down() -> list[Run]:
    """The runs that are in no table of `tests/recordings`."""
    llama8, llama70, llama7 = MODELS["8B"], MODELS["70B"], MODELS["7B"]
    half = dict(tokens=8192, again=0.5)
    two = dict(sequences=2, tokens=8192)
    a100, fast = dict(card="A100", network=200), dict(network=400)
    found = [
        ("torchtitan 8B", _TITAN_A100, llama8, Plan(64, 64, **half, **a100), 2904),
        ("torchtitan 70B", _TITAN_A100, llama70,
         Plan(64, 64, tokens=8192, **a100), 331),
        ("torchtitan 8B", _TITAN_H100, llama8, Plan(8, 8, again=0.5, **two), 5762),
        ("torchtitan 8B", _TITAN_H100, llama8,
         Plan(128, 128, again=0.5, **two, **fast), 5605),
        ("torchtitan 405B", f"{_TITAN}commits/main/docs/performance.md",
         MODELS["405B"], Plan(128, 16, tp=8, **two, **fast), 109),
        ("IBM 7B", _IBM, llama7,
         Plan(128, 128, sequences=2, again=0, card="A100", network=50), 3700),
        ("IBM 7B", _IBM, llama7, Plan(96, 96, sequences=2, again=0, network=100), 7500),
        ("IBM 70B", _IBM, _LLAMA2_70B,
         Plan(128, 128, sequences=2, card="A100", network=50), 370),
        ("IBM 70B", _IBM, _LLAMA2_70B, Plan(96, 96, sequences=2, network=100), 800),
    ]  # fmt: skip
    runs = [Run(name, *others) for name, *others in found]
    runs[0] = runs[0]._replace(mfu=0.568)
    runs[1] = runs[1]._replace(mfu=0.517)
    runs[2] = runs[2]._replace(memory=82.4 * 2**30, note=_SLOW)
    runs[3] = runs[3]._replace(memory=67.0 * 2**30, note=_SLOW)
    runs[4] = runs[4]._replace(mfu=0.29)
    return runs + _megatron() + _llama3()


def _megatron() -> list[Run]:
    """Pipelines on A100: heads, dim, layers, tp, pp, GPUs, sequences, 10^12 FLOP/s.

    Assumed: micro-batches of one sequence, stages in one part.
    """
    table = (
        (24, 2304, 24, 1, 1, 32, 512, 137), (32, 3072, 30, 2, 1, 64, 512, 138),
        (32, 4096, 36, 4, 1, 128, 512, 142), (48, 6144, 40, 8, 1, 256, 1024, 135),
        (64, 8192, 48, 8, 2, 512, 1536, 138), (80, 10240, 60, 8, 4, 1024, 1792, 140),
        (96, 12288, 80, 8, 8, 1536, 2304, 148),
        (128, 16384, 96, 8, 16, 1920, 2160, 155),
        (128, 20480, 105, 8, 35, 2520, 2520, 163),
        (160, 25600, 128, 8, 64, 3072, 3072, 163),
    )  # fmt: skip
    billions = "1.7", "3.6", "7.5", "18.4", "39.1", "76.1", "145.6", "310.1", "529.6"
    runs = []
    for row, size in zip(table, (*billions, "1008"), strict=True):
        heads, dim, layers, tp, pp, gpus, sequences, measured = row
        model = Model(layers, dim, heads, heads, 4 * dim, 51200, True, False)
        turns = sequences * tp * pp // gpus
        split = dict(tp=tp, pp=pp, microbatches=turns, tokens=2048)
        plan = Plan(gpus, **split, card="A100", network=200)
        # their count: blocks twice forward and attention without a mask
        outside = 1 + 2048 / (6 * dim) + 51200 / (16 * layers * dim)
        each = 96 * layers * dim**2 * outside
        rate_ = measured * 1e12 / each
        runs.append(Run(f"Megatron {size}B", _MEGATRON, model, plan, rate_))
    return runs


def _llama3() -> list[Run]:
    """Llama 3 405B: GPUs, GPUs of FSDP, sequences, 10^12 FLOP/s, MFU (its table 4).

    Assumed: stages in eight parts, weights gathered once a step, no block twice.
    """
    model, runs = MODELS["405B"], []
    table = (8192, 64, 32, 430, 0.43), (16384, 128, 16, 400, 0.41)
    for gpus, shard, turns, measured, mfu in table:
        plan = Plan(
            gpus, shard, tp=8, pp=16, microbatches=turns, tokens=8192, again=0,
            reshard=False, chunks=8, network=400,
        )  # fmt: skip
        matmuls, scores = flops(model, plan)
        rate_ = measured * 1e12 / (3 * (matmuls + 2 * scores))
        runs.append(Run("Llama 3 405B", _LLAMA3, model, plan, rate_, mfu=mfu))
    return runs


# -- tables of recordings --------------------------------------------------------------


def read(recording: dict) -> tuple[list[Run], list[tuple[str, str]]]:
    """The runs of a table, and its rows of which the planner knows nothing, with why.

    Args:
        recording: `train_llmfoundry.json` or `train_other.json`, parsed.
    """
    runs, left_out = [], []
    for row in recording.get("rows", []):
        try:
            runs.append(_run_of(row, recording))
        except (TypeError, ValueError, KeyError, ZeroDivisionError) as error:
            left_out.append((str(row), str(error)))
    return runs, left_out


def _run_of(row: list, recording: dict) -> Run:
    if len(row) == 10:
        run = _of_llm_foundry(row, recording.get("models", {}))
    elif len(row) == 11:
        run = _of_others(row)
    else:
        raise ValueError(f"{len(row)} columns; 10 or 11 are known")
    if not run.rate > 0:
        raise ValueError(f"{run.rate} tokens/s")
    if missing := not_known(run.model, run.plan):
        raise ValueError("not known: " + "; ".join(missing))
    if run.plan.gpus > 8 and run.plan.gpus % 8:
        raise ValueError(f"{run.plan.gpus} GPUs are not whole machines of 8")
    return run


def _of_llm_foundry(row: list, models: dict) -> Run:
    """MPT: the blocks of GPT."""
    card, name, tokens, gpus, sequences, turns, again, sharding, measured, _ = row
    if name not in models:
        raise ValueError(f"not known: the sizes of {name!r}")
    dim, layers, heads = models[name]
    model = Model(layers, dim, heads, heads, 4 * dim, 50368, True, False)
    plan = Plan(
        gpus, _SHARDS.get(sharding.lower(), gpus), sequences=sequences,
        microbatches=turns, tokens=tokens, again=float(again), card=card,
        reshard=sharding != "SHARD_GRAD_OP", network=ASSUMED.get(card, 0),
    )  # fmt: skip
    name = f"MPT {name}"
    source = "https://github.com/mosaicml/llm-foundry"
    return Run(name, source, model, plan, measured, name in FITTED)


def _of_others(row: list) -> Run:
    """Llama, of torchtitan, IBM and others."""
    whose, card, gpus, name, strategy, sequences, tokens, again, network = row[:9]
    compiled, measured = row[9:]
    words = f"{whose} {strategy}".lower()
    if strategy.lower() != "fsdp" and "fp8" not in words and "float8" not in words:
        raise ValueError(f"not known: the strategy {strategy!r}")
    if name not in _MODELS:
        raise ValueError(f"not known: the sizes of {name!r}")
    numbers = "float8" if "fp8" in words or "float8" in words else "bfloat16"
    plan = Plan(
        gpus, gpus, sequences=sequences, tokens=tokens, again=again, card=card,
        network=network or ASSUMED.get(card, 0), numbers=numbers, compiled=compiled,
    )  # fmt: skip
    return Run(name, whose, _MODELS[name], plan, measured, name in FITTED)


def runs() -> list[Run]:
    """All published runs: those to which the planner was fitted first."""
    found = []
    for name in ("train_llmfoundry", "train_other"):
        text = (RECORDINGS / f"{name}.json").read_text("utf-8")
        found += read(json.loads(text))[0]
    found += _written_down()
    return sorted(found, key=lambda run: not run.is_fitted)


def mfu_as_published(run: Run, tokens_per_second: float) -> float:
    """The share of the peak as torchtitan (2024) and LLM Foundry count it.

    For each token 6 operations for every parameter, those of the embedding included,
    and 12 x dim x tokens in each block for attention without a mask.
    """
    model = run.model
    learned = 0 if model.gated else run.plan.tokens * model.dim  # positions
    operations = 6 * (parameters(model) + learned)
    operations += 12 * model.layers * model.dim * run.plan.tokens
    return operations * tokens_per_second / CARDS[run.plan.card][0]


def short(run: Run) -> str:
    """A run in few words."""
    plan = run.plan
    ways = [f"{name}{getattr(plan, name)}" for name in ("tp", "pp")]
    ways = [way for way in ways if not way.endswith("p1")] or [f"{plan.tokens} tokens"]
    return f"{run.name}, {plan.gpus} {plan.card}, {' '.join(ways)}"


def line(run: Run) -> str:
    """Its model and card, as a picture has them: Megatron-LM's ten models are one."""
    name = "Megatron-LM" if run.name.startswith("Megatron") else run.name
    return f"{name}, {run.plan.card}"


def ratios() -> list[tuple[Run, float]]:
    """Each run, and its predicted tokens/s as a multiple of the published."""
    return [(run, rate(run.model, run.plan)[0] / run.rate) for run in runs()]


def table_of_growth(rows: list[tuple[Run, float]]) -> None:
    """Print runs that differ in the number of GPUs alone: what is missing, and latency.

    `missing` is the published time of a step without the predicted one. `latency` is
    how long the step's messages take without their bytes, which the planner hides.

    Args:
        rows: what `ratios` returns.
    """
    print("model, H100      error  missing s  latency s")
    for run, ratio in sorted(
        rows, key=lambda row: (row[0].model.dim, row[0].plan.gpus)
    ):
        plan = run.plan
        if not run.name.startswith("MPT") or plan.gpus < 128:
            continue
        tokens = plan.sequences * plan.microbatches * plan.tokens
        missing = tokens / run.rate * (1 - 1 / ratio)
        found = messages(run.model, plan)
        latency = sum(message_seconds(plan, 0, *rest) for _, _, *rest, _ in found)
        name = f"{run.name}, {plan.gpus}"
        print(f"{name:14} {ratio - 1:+7.0%} {missing:10.3f} {latency:10.3f}")


# -- what trainings cost ---------------------------------------------------------------

# model, card, GPUs of our plan, tokens of a sequence, tokens in all, GPU hours; the
# cards of Llama 2 and Llama 3.1 (meta-llama/llama-models on GitHub) have the hours.
# They do not say how many GPUs there were: 1,024 are assumed, and the published layout
# for 405B. 15e12 stands for "15T+" and "~15 trillion"
HOURS = (
    ("Llama 2 7B", "A100", 1024, 4096, 2e12, 184_320),
    ("Llama 2 13B", "A100", 1024, 4096, 2e12, 368_640),
    ("Llama 2 70B", "A100", 1024, 4096, 2e12, 1_720_320),
    ("Llama 3 8B", "H100", 1024, 8192, 15e12, 1_460_000),
    ("Llama 3 70B", "H100", 1024, 8192, 15e12, 7_000_000),
    ("Llama 3 405B", "H100", 16384, 8192, 15e12, 30_840_000),
)


def table_of_hours() -> None:
    """Print GPU hours of whole trainings, planned and published."""
    print("                     tokens  planned GPU hours  published  times the plan")
    for name, card, gpus, tokens, total, published in HOURS:
        model = _MODELS[name]
        if name == "Llama 3 405B":
            per_second, _ = rate(model, _llama3()[1].plan)
        else:
            (per_second, _), _ = choices(
                model, gpus, 1024, card=card, tokens=tokens, network=ASSUMED[card]
            )[0]
        hours = total / per_second / 3600
        shown = f"{name}, {card}"
        print(
            f"{shown:19}{total:8.1e} {hours:18,.0f} {published:10,}"
            f" {published / hours:15.2f}"
        )


def main() -> None:
    for run, ratio in ratios():
        kind = "fitted" if run.is_fitted else "judged"
        said = f"{run.rate:9,.0f}{ratio * run.rate:9,.0f}{ratio - 1:+7.0%} {kind}"
        plan = run.plan
        batch = f"{plan.microbatches} x {plan.sequences} x {plan.tokens}"
        print(f"{short(run):40}{batch:14}{said}")


if __name__ == "__main__":
    main()
