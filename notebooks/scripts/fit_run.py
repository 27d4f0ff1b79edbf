"""Will a training run fit? The memory of each GPU by formulas, before you rent one.

    python fit_run.py 70B --gpus=64 --tokens=8192 --recompute
    python fit_run.py config.json --gpus=64 --tokens=8192 --recompute

`config.json` describes a model like Llama, as Hugging Face writes it. Tokens are those
that a GPU computes at once: sequences times tokens of a sequence.

Counts FSDP with AdamW, computed in bfloat16; parameters, reduced gradients and AdamW's
numbers in float32; fused attention; a loss over all logits at once. With HSDP, `--gpus`
are those that share the states. Leaves out what the allocator wastes and the memory of
CUDA and NCCL: rent with up to 75 % of a card, and dry-run your script above. Put your
model and your card between the two lines of dashes. Lesson 26 explains each function.
The first line that it prints is your model for `plan_run.py`.
"""

import argparse
import json
import sys
from dataclasses import dataclass, replace

GIB = 2**30
USABLE = 0.75  # of a card, by formulas: 0.9 for a dry run, divided by 1.22 for gaps


@dataclass(frozen=True)
class Model:
    layers: int
    dim: int  # numbers of a token between two blocks
    heads: int
    kv_heads: int  # heads of keys and values
    hidden: int  # numbers of a token inside the feed-forward network
    vocab: int
    tied: bool = False  # the embedding is also the last matrix
    gated: bool = True  # three matrices in the feed-forward network, as in Llama
    head: int = 0  # numbers of a head, if they are not dim / heads


# -- your model, your card -------------------------------------------------------------
MODELS = {
    "1B": Model(16, 2048, 32, 8, 8192, 128256, tied=True),  # Llama 3.2
    "7B": Model(32, 4096, 32, 32, 11008, 32000),  # Llama 2
    "8B": Model(32, 4096, 32, 8, 14336, 128256),  # Llama 3
    "70B": Model(80, 8192, 64, 8, 28672, 128256),  # Llama 3
    "405B": Model(126, 16384, 128, 8, 53248, 128256),  # Llama 3.1
}
# GiB, in PyTorch's out-of-memory error
CARDS = {"A100": 79.25, "H100": 79.19, "H200": 139.81, "B200": 178.35, "L40S": 44.52}
# --------------------------------------------------------------------------------------


def widths(model):
    head = model.head or model.dim // model.heads
    return head * model.heads, head * model.kv_heads  # of queries, of keys


def block_parameters(model):
    q_dim, kv_dim = widths(model)
    attention = 2 * model.dim * (q_dim + kv_dim)
    feed_forward = (3 if model.gated else 2) * model.dim * model.hidden
    return attention + feed_forward + 2 * model.dim


def outside_parameters(model):
    matrices = 1 if model.tied else 2
    return matrices * model.vocab * model.dim + model.dim


def parameters(model):
    return model.layers * block_parameters(model) + outside_parameters(model)


def state_bytes(model, gpus):
    return 16 * parameters(model) / gpus


def block_bytes(model):
    q_dim, kv_dim = widths(model)
    norms = (16 if model.gated else 8) * model.dim + 8
    attention = 4 * q_dim + 4 * kv_dim + 4 * model.heads
    feed_forward = (8 if model.gated else 4) * model.hidden
    return norms + attention + feed_forward


def kept_bytes(model, tokens, recompute):
    of_a_token = 2 * model.dim if recompute else block_bytes(model)
    return model.layers * tokens * of_a_token


def moments(model, tokens, recompute):
    block = 10 * block_parameters(model) + 2 * model.vocab * model.dim
    block += 4 * tokens * model.hidden
    if recompute:
        block += tokens * block_bytes(model)
    return {
        "in the loss": 12 * tokens * model.vocab,
        "in a block": block,
        "at the end": 4 * outside_parameters(model),
    }


def moment_bytes(model, tokens, recompute):
    largest = max(moments(model, tokens, recompute).values())
    return 2 * outside_parameters(model) + largest


def peak_bytes(model, gpus, tokens, recompute):
    return {
        "states": state_bytes(model, gpus),
        "activations": kept_bytes(model, tokens, recompute),
        "for a moment": moment_bytes(model, tokens, recompute),
    }


def most_tokens(model, gpus, recompute, room):
    tokens = 0
    while sum(peak_bytes(model, gpus, tokens + 1024, recompute).values()) <= room:
        tokens += 1024
    return tokens


# -- the command line ------------------------------------------------------------------

# Parts of a key that stand for what no formula here counts
NOT_KNOWN = ("lora_rank", "mamba", "ssm", "linear_", "cross_attention", "quantization")


def from_file(name, plain=False):
    """The sizes of a model like Llama, from Hugging Face's `config.json`."""
    with open(name, encoding="utf-8") as file:
        whole = json.load(file)
    config = whole | whole.get("text_config", {})  # of a model that also sees images
    if any("experts" in key and value for key, value in config.items()):
        sys.exit(f"fit_run.py: {name} has experts: write them into plan_run.py")
    for key, value in config.items():
        if value and any(words in key for words in NOT_KNOWN):
            sys.exit(f"fit_run.py: {name} has {key}, which no formula here knows")
    keys = ["num_hidden_layers", "hidden_size", "num_attention_heads"]
    keys += ["intermediate_size", "vocab_size"]
    if missing := [key for key in keys if not config.get(key)]:
        why = f"{name} has no {missing[0]}, so it is not like Llama"
        sys.exit(f"fit_run.py: {why}: write a line between the dashes")
    layers, dim, heads, hidden, vocab = (config[key] for key in keys)
    kv_heads = config.get("num_key_value_heads") or heads
    is_gemma = "gemma" in config.get("model_type", "")  # tied, and does not say so
    tied = config.get("tie_word_embeddings", is_gemma)
    head = config.get("head_dim") or 0
    function = config.get("hidden_act") or "silu"
    if not (plain or is_gemma or function == "silu"):
        how = "--plain, or with a gate a line between the dashes"
        sys.exit(f"fit_run.py: {name} has {function}, so perhaps no gate: {how}")
    if "vision_config" in config:
        print(f"fit_run.py: only the text model of {name} is counted", file=sys.stderr)
    return Model(layers, dim, heads, kv_heads, hidden, vocab, tied, head=head)


def model_of(name, plain=False):
    if name in MODELS:
        return MODELS[name]
    try:
        return from_file(name, plain)
    except (OSError, ValueError, AttributeError) as error:
        known = ", ".join(MODELS)
        sys.exit(f"fit_run.py: {name} is none of {known}, and no config.json ({error})")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a name of MODELS, or a config.json")
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--tokens", type=int, default=8192, help="of a GPU at once")
    parser.add_argument("--recompute", action="store_true", help="blocks, in backward")
    parser.add_argument("--plain", action="store_true", help="no gate, as in a GPT")
    parser.add_argument("--card", choices=CARDS, default="H100")
    args = parser.parse_args()
    if args.gpus < 1 or args.tokens < 1:
        sys.exit("fit_run.py: --gpus and --tokens are at least 1")
    model = model_of(args.model, args.plain)
    model = replace(model, gated=model.gated and not args.plain)
    card = CARDS[args.card] * GIB
    room = USABLE * card
    parts = peak_bytes(model, args.gpus, args.tokens, args.recompute)
    print(model)
    print(f"{parameters(model):,} parameters on {args.gpus} {args.card}")
    for name, nbytes in parts.items():
        print(f"{name:14}{nbytes / GIB:8.2f} GiB")
    total = sum(parts.values())
    fits = "is close: dry-run it" if total <= card else "does not fit by formulas"
    if total <= room:
        fits = "fits"
    print(f"{'in all':14}{total / GIB:8.2f} GiB of {card / GIB:.2f}: {fits}")
    for recompute, how in ((False, "not recomputed"), (True, "blocks recomputed")):
        most = most_tokens(model, args.gpus, recompute, room)
        print(f"most tokens at once, {how}: {most:,}")


if __name__ == "__main__":
    main()
