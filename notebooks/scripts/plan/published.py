"""Training runs that others measured and published, each beside our prediction.

`PUBLISHED` has single runs, `predict_published` reads tables of them. They are split by
model: constants were fitted to the runs of `FITTED`, and all others judge them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from scripts.plan.memory import bytes_per_gpu
from scripts.plan.model import MODELS, Model, find_model, parameters
from scripts.plan.step_time import step_seconds
from simgpu.device.cards import find_card

# `kernels.SUSTAINED` and the share of old kernels in `kernels.FLASH` are fitted to the
# runs of these models, chosen before any run was predicted: both cards, three widths,
# three publishers. No run of another model is fitted, whoever measured it. Those are
# judged, but not blind: which kernels and passes a step has was settled with all
# runs in sight.
FITTED = ("MPT 1b", "MPT 30b", "Llama 2 13B")


@dataclass(frozen=True)
class Published:
    """A training run that somebody measured, and where it is published."""

    name: str
    run: dict  # arguments of `step_seconds`, most of `bytes_per_gpu` as well
    source: str
    tokens_per_second: float  # of each GPU
    mfu: float | None = None  # as `mfu_as_published` counts
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
_IBM_NOTE = (
    "Gbit/s between machines taken as those of 8 GPUs together; their MFU is left out: "
    "we know no definition that gives all four from tokens/s"
)
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
        _IBM, 3700, note=_IBM_NOTE,
    ),
    Published(
        "IBM 7B, 96 H100",
        dict(model="7B", gpus=96, batch=2, checkpointing=False, network=100),
        _IBM, 7500, note=_IBM_NOTE,
    ),
    Published(
        "IBM 70B, 128 A100",
        dict(model=_LLAMA2_70B, gpus=128, card="A100", batch=2, network=50),
        _IBM, 370, note=_IBM_NOTE,
    ),
    Published(
        "IBM 70B, 96 H100",
        dict(model=_LLAMA2_70B, gpus=96, batch=2, network=100),
        _IBM, 800, note=_IBM_NOTE,
    ),
    Published(
        "Lambda 405B, 64 H100",
        dict(model="405B", gpus=64, strategy="fsdp offload"),
        _LAMBDA, 4096 / 30, memory=52.9e9,
        note="gradients scattered in bfloat16 (6.4 GB less), embedding sharded by "
        "itself (4.2 GB less); about 30 s a step",
    ),
)  # fmt: skip


def mfu_as_published(
    model: "str | Model", card: str, tokens: int, tokens_per_second: float
) -> float:
    """The share of a card's peak, as torchtitan (2024) and LLM Foundry count it.

    For each token 6 operations for every parameter, those of the embedding included,
    and 12 x dim x tokens in each block for attention without a mask. LLM Foundry's
    models, which have no gate, have learned positions as well. `Step.mfu` counts no
    embedding, since it is looked up.

    Sources: `get_num_flop_per_token` of torchtitan, with all parameters; "MFU" in
    scripts/train/benchmarking/README.md of llm-foundry.
    """
    model = find_model(model)
    count = parameters(model) + (0 if model.gated else tokens * model.dim)
    operations = 6 * count + 12 * model.layers * model.dim * tokens
    return operations * tokens_per_second / find_card(card).flops["bfloat16"]


def compare() -> list[dict]:
    """Each run of `PUBLISHED` beside ours: one set of assumptions for all.

    Returns:
        dicts with "name", "fitted" (see `FITTED`), "tokens/s", "MFU" and "GB": each of
        these three (published, predicted), or None where nothing is published.
    """
    rows = []
    for row in PUBLISHED:
        model, card = find_model(row.run["model"]), row.run.get("card", "H100")
        rate = step_seconds(**row.run).tokens_per_second
        mfu = mfu_as_published(model, card, row.run.get("tokens", 4096), rate)
        asked = {k: v for k, v in row.run.items() if k not in ("card", "network")}
        found = {"name": row.name, "fitted": model.name in FITTED}
        found["tokens/s"] = row.tokens_per_second, rate
        found["MFU"] = row.mfu and (row.mfu, mfu)
        found["GB"] = row.memory and (
            row.memory / 1e9, bytes_per_gpu(**asked).total / 1e9
        )  # fmt: skip
        rows.append(found)
    return rows


# -- tables of runs --------------------------------------------------------------------

_LLAMA_13B = Model("Llama 2 13B", 40, 5120, 40, 40, 13824, 32000)
_MODELS = {  # as tables name them, in small letters and without spaces
    "llama27b": MODELS["7B"],
    "llama213b": _LLAMA_13B,
    "llama234b": Model("Llama 2 34B", 48, 8192, 64, 8, 22016, 32000),
    "llama270b": _LLAMA2_70B,
    "llama321b": MODELS["1B"],
    "llama38b": MODELS["8B"],
    "llama318b": MODELS["8B"],
    "llama370b": MODELS["70B"],
    "llama3170b": MODELS["70B"],
    "llama31405b": MODELS["405B"],
    "llama3405b": MODELS["405B"],
    # config.json of allenai/OLMo-2-0425-1B, OLMo-2-1124-7B, OLMo-2-1124-13B and
    # OLMo-2-0325-32B on huggingface.co
    "olmo21b": Model("OLMo 2 1B", 16, 2048, 16, 16, 8192, 100352),
    "olmo27b": Model("OLMo 2 7B", 32, 4096, 32, 32, 11008, 100352),
    "olmo213b": Model("OLMo 2 13B", 40, 5120, 40, 40, 13824, 100352),
    "olmo232b": Model("OLMo 2 32B", 64, 5120, 40, 8, 27648, 100352),
}
_STRATEGIES = {  # as PyTorch and tables name them
    "full_shard": "fsdp",
    "shard_grad_op": "fsdp gathered once",
    "no_shard": "ddp",
    "hybrid_shard": "hsdp",
    "fsdp+tp8": "fsdp + tensor 8",
    "2d": "fsdp + tensor 8",
}
_MPT_VOCAB = 50368


def predict_published(recording: dict) -> list[tuple[str, float, float, bool]]:
    """Predictions for a table of published runs, one for each row that can be read.

    Args:
        recording: a file of `tests/recordings` with runs of LLM Foundry
            (`train_llmfoundry.json`) or of others (`train_other.json`).

    Returns:
        (label, predicted tokens/s of each GPU, recorded, whether its model is fitted).
    """
    return [found for _, found, _ in _read(recording) if found is not None]


def left_out(recording: dict) -> list[tuple[str, str]]:
    """The rows for which `predict_published` says nothing: (row, why)."""
    return [(row, why) for row, found, why in _read(recording) if found is None]


def _read(recording: dict) -> Iterator[tuple[str, tuple | None, str]]:
    """Each row, what `predict_published` has of it or None, and why None."""
    for row in recording.get("rows", []):
        try:
            if len(row) == 10:
                run, recorded = _of_llm_foundry(row, recording.get("models", {}))
            elif len(row) == 11:
                run, recorded = _of_others(row)
            else:
                raise ValueError(f"{len(row)} columns; 10 or 11 are known")
            if not recorded > 0:
                raise ValueError(f"{recorded} tokens/s")
            rate = step_seconds(**run).tokens_per_second
        except (TypeError, ValueError, AttributeError) as error:
            yield str(row), None, str(error)
        else:
            fitted = run["model"].name in FITTED
            yield str(row), (_label(run), rate, recorded, fitted), ""


def _label(run: dict) -> str:
    """A run in words."""
    again = float(run["checkpointing"])
    return (
        f"{run['model'].name}: {run['gpus']} {run['card']} with {run['strategy']}, "
        f"{run['microbatches']} x {run['batch']} x {run['tokens']} tokens, "
        f"{again:.0%} computed twice"
    )


def _of_llm_foundry(row: list, models: dict) -> tuple[dict, float]:
    """MPT: the blocks of GPT, kernels of attention of 2023."""
    card, name, tokens, gpus, batch, microbatches, again, sharding, recorded, _ = row
    if name not in models:
        raise ValueError(f"unknown model {name!r}: the file does not say its sizes")
    dim, layers, heads = models[name]
    model = Model(
        f"MPT {name}", layers, dim, heads, heads, 4 * dim, _MPT_VOCAB,
        tied=True, gated=False,
    )  # fmt: skip
    return dict(
        model=model, gpus=gpus, card=card, strategy=_strategy(sharding), batch=batch,
        tokens=tokens, checkpointing=again, microbatches=microbatches, flash=1,
    ), recorded  # fmt: skip


def _of_others(row: list) -> tuple[dict, float]:
    """Llama and its like, of torchtitan, IBM and others."""
    whose, card, gpus, name, strategy, batch, tokens, again, network = row[:9]
    compiled, recorded = row[9:]
    words = f"{whose} {name} {strategy}".lower()
    if "float8" in words or "fp8" in words:
        raise ValueError("float8 is not modelled")
    if compiled:
        raise ValueError("compiled kernels are not modelled")
    key = "".join(letter for letter in name.lower() if letter.isalnum())
    if key not in _MODELS:
        raise ValueError(f"unknown model {name!r}")
    return dict(
        model=_MODELS[key], gpus=gpus, card=card, strategy=_strategy(strategy),
        batch=batch, tokens=tokens, checkpointing=again, network=network,
        microbatches=1,
    ), recorded  # fmt: skip


def _strategy(name: str) -> str:
    return _STRATEGIES.get(name.lower(), name.lower())
