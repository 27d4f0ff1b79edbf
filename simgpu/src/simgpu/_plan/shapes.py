"""The model that is planned: sizes of a decoder like Llama's, and their numbers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Latent(NamedTuple):
    """Attention over vectors that queries, keys and values of a token are made from.

    As in DeepSeek's models (MLA). Sizes are numbers of elements.
    """

    queries: int  # of the vector for queries; 0: they are made from the token itself
    keys: int  # of that for keys and values
    plain: int  # of a head's queries and keys, without positions
    turned: int  # the others, with positions; all heads' keys share these
    values: int  # of a head


class Shape(NamedTuple):
    """Sizes are numbers of elements; a block has gated MLPs: one, or experts."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int  # of an expert, if there are some
    vocab: int
    tied: bool = False  # the head has the embedding's weights
    head_norms: bool = False  # queries and keys are normalized, head by head
    name: str = ""
    experts: int = 0  # of a block; 0: one MLP for all tokens
    chosen: int = 0  # experts of a token
    biases: bool = False  # of queries, keys and values
    shared: int = 0  # of an MLP beside the experts, for all tokens
    dense: int = 0  # first blocks, which have an MLP in place of experts
    dense_size: int = 0  # of that
    latent: Latent | None = None

    @property
    def block(self) -> int:
        """Parameters of a block, of one with experts if there are some."""
        return self._block(self.experts or 1)

    @property
    def dense_block(self) -> int:
        """Parameters of one of the first `dense` blocks."""
        return self._attention + (3 * self.dense_size + 2) * self.hidden

    def _block(self, mlps: int) -> int:
        inner = 3 * (self.intermediate * mlps + self.shared) + self.experts
        return self._attention + (inner + 2) * self.hidden  # and two norms

    @property
    def _attention(self) -> int:
        if self.latent is None:
            columns = (self.heads + 2 * self.kv_heads) * self.head_size
            norms = 2 * self.head_size * self.head_norms
            inner = columns + self.heads * self.head_size
            return inner * self.hidden + norms + columns * self.biases
        its = self.latent
        made = self.heads * (its.plain + its.turned)  # queries
        queries = made * (its.queries or self.hidden)
        if its.queries:
            queries += (self.hidden + 1) * its.queries
        keys = (its.keys + its.turned) * self.hidden + its.keys
        keys += its.keys * self.heads * (its.plain + its.values)
        return queries + keys + self.heads * its.values * self.hidden

    @property
    def widths(self) -> tuple[int, int]:
        """Of a head: of queries and keys, and of values."""
        if self.latent is None:
            return self.head_size, self.head_size
        return self.latent.plain + self.latent.turned, self.latent.values

    @property
    def turned(self) -> int:
        """Of a head's queries and keys, those with positions."""
        return self.latent.turned if self.latent else self.head_size

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        ends = (1 if self.tied else 2) * self.embedding + self.hidden
        return self._blocks(self.experts or 1) + ends

    def _blocks(self, mlps: int) -> int:
        others = self.layers - self.dense
        return self.dense * self.dense_block + others * self._block(mlps)

    @property
    def active(self) -> int:
        """Parameters that a token meets."""
        ends = self.parameters - self._blocks(self.experts or 1)
        return self._blocks(self.chosen or 1) + ends

    def flops(self, tokens: int) -> float:
        """Floating-point operations that a token costs, forward and backward.

        Attention counts in full, though a causal mask leaves half of it out, as in
        `simgpu dry-run` and in what trainers print.

        Args:
            tokens: of a sequence.
        """
        products = self._blocks(self.chosen or 1) + self.embedding
        scores = self.layers * self.heads * sum(self.widths) * tokens
        return 6.0 * (products + scores)


def _llama(name: str, *sizes: int, tied: bool = False, norms: bool = False,
           experts: tuple[int, int] = (0, 0), **more: Any) -> Shape:  # fmt: skip
    return Shape(*sizes, tied, norms, name, *experts, **more)


# layers, width, heads, heads of keys and values, size of a head, width of the MLP,
# vocabulary: as in each model's own config.json. Without the layers that DeepSeek V3
# has to predict a second token
MODELS = {its.name: its for its in (
    _llama("llama2-7b", 32, 4096, 32, 32, 128, 11_008, 32_000),
    _llama("llama2-70b", 80, 8192, 64, 8, 128, 28_672, 32_000),
    _llama("llama3-1b", 16, 2048, 32, 8, 64, 8192, 128_256, tied=True),
    _llama("llama3-3b", 28, 3072, 24, 8, 128, 8192, 128_256, tied=True),
    _llama("llama3-8b", 32, 4096, 32, 8, 128, 14_336, 128_256),
    _llama("llama3-70b", 80, 8192, 64, 8, 128, 28_672, 128_256),
    _llama("llama3-405b", 126, 16_384, 128, 8, 128, 53_248, 128_256),
    _llama("mistral-7b", 32, 4096, 32, 8, 128, 14_336, 32_768),
    _llama("mixtral-8x7b", 32, 4096, 32, 8, 128, 14_336, 32_000, experts=(8, 2)),
    _llama("mixtral-8x22b", 56, 6144, 48, 8, 128, 16_384, 32_768, experts=(8, 2)),
    _llama("qwen3-8b", 36, 4096, 32, 8, 128, 12_288, 151_936, norms=True),
    _llama("qwen3-14b", 40, 5120, 40, 8, 128, 17_408, 151_936, norms=True),
    _llama("qwen3-32b", 64, 5120, 64, 8, 128, 25_600, 151_936, norms=True),
    _llama("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 151_936, norms=True,
           experts=(128, 8)),
    _llama("qwen3-235b-a22b", 94, 4096, 64, 4, 128, 1536, 151_936, norms=True,
           experts=(128, 8)),
    _llama("moonlight-16b-a3b", 27, 2048, 16, 16, 128, 1408, 163_840, experts=(64, 6),
           shared=2 * 1408, dense=1, dense_size=11_264,
           latent=Latent(0, 512, 128, 64, 128)),
    _llama("deepseek-v3", 61, 7168, 128, 128, 128, 2048, 129_280, experts=(256, 8),
           shared=2048, dense=3, dense_size=18_432,
           latent=Latent(1536, 512, 128, 64, 128)),
    _llama("kimi-k2", 61, 7168, 64, 64, 128, 2048, 163_840, experts=(384, 8),
           shared=2048, dense=1, dense_size=18_432,
           latent=Latent(1536, 512, 128, 64, 128)),
)}  # fmt: skip
# model_type of a config.json
_FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe",
             "deepseek_v3", "kimi_k2")  # fmt: skip
_DEEPSEEK = _FAMILIES[-2:]
_SIZES = {
    "layers": "num_hidden_layers", "hidden": "hidden_size",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
    "head_size": "head_dim", "intermediate": "intermediate_size",
    "vocab": "vocab_size",
}  # fmt: skip
_NEEDED = ("layers", "hidden", "heads", "intermediate", "vocab")
_OF_EXPERTS = {"experts": ("num_local_experts", "n_routed_experts", "num_experts"),
               "chosen": ("num_experts_per_tok",)}  # fmt: skip
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
           "v_head_dim")  # fmt: skip


def shape_of(model: str | Mapping[str, Any] | Shape) -> Shape:
    """The sizes of a model.

    Args:
        model: a key of `MODELS`; the path of a Hugging Face config.json, or of the
            folder that it lies in; what such a file holds; or sizes as text:
            "layers=32,hidden=4096,heads=32,kv_heads=8,intermediate=14336,vocab=128256",
            with `head_size`, `tied=1`, and `experts` and `chosen` (of a token), where
            they are needed.

    Raises:
        ValueError: for a model that is not known, a family that is not planned, and
            sizes that are missing or cannot be.
    """
    if isinstance(model, Shape):
        return _checked(model)
    if isinstance(model, Mapping):
        return _of_config(model, "the config")
    if model.lower() in MODELS:
        return MODELS[model.lower()]
    if "=" in model and not Path(model).exists():
        return _of_text(model)
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"no model is called {model!r}, and no file; there are "
            f"{', '.join(MODELS)}, or give a config.json, or sizes: "
            "layers=32,hidden=4096,heads=32,intermediate=14336,vocab=128256"
        )
    try:
        return _of_config(json.loads(path.read_text(encoding="utf-8")), str(path))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None


def _of_config(config: Any, where: str) -> Shape:
    if not isinstance(config, Mapping):
        raise ValueError(f"{where} is no config of a model: it holds no names")
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise ValueError(
            f"{where} is of model_type {family!r}; what is planned is "
            f"{', '.join(_FAMILIES)}"
        )
    sizes = {name: config.get(theirs) for name, theirs in _SIZES.items()}
    more = _of_deepseek(config, where) if family in _DEEPSEEK else {}
    if family in ("mixtral", "qwen3_moe", *_DEEPSEEK):
        for name, theirs in _OF_EXPERTS.items():
            sizes[name] = next((config[its] for its in theirs if its in config), None)
            if sizes[name] is None:
                raise ValueError(f"{where} lacks {theirs[-1]}")
        sizes["intermediate"] = config.get("moe_intermediate_size",
                                           sizes["intermediate"])  # fmt: skip
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            raise ValueError(f"{where} has blocks without experts: not planned")
    shape = _of_sizes(sizes, bool(config.get("tie_word_embeddings")),
                      family.startswith("qwen3"), Path(where).parent.name)  # fmt: skip
    return shape._replace(biases=family == "qwen2", **more)


def _of_deepseek(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What only such models have."""
    names = (*_LATENT[1:], "moe_intermediate_size", "intermediate_size")
    if missing := [name for name in names if not isinstance(config.get(name), int)]:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    if config.get("moe_layer_freq", 1) != 1:
        raise ValueError(f"{where} has blocks without experts: not planned")
    width, count = config["moe_intermediate_size"], config.get("n_shared_experts") or 0
    return {
        "latent": Latent(*(config.get(name) or 0 for name in _LATENT)),
        "shared": count * width, "dense": config.get("first_k_dense_replace") or 0,
        "dense_size": config["intermediate_size"],
    }  # fmt: skip


def _of_text(text: str) -> Shape:
    sizes: dict[str, Any] = {}
    for pair in text.split(","):
        name, _, value = (its.strip() for its in pair.partition("="))
        known = (*_SIZES, "tied", *_OF_EXPERTS)
        if name not in known:
            raise ValueError(f"a model has no size {name!r}; there are "
                             f"{', '.join(known)}")  # fmt: skip
        try:
            sizes[name] = int(value)
        except ValueError:
            raise ValueError(f"{name}={value!r} is no whole number") from None
    return _of_sizes(sizes, bool(sizes.pop("tied", 0)), False, "")


def _of_sizes(sizes: Mapping[str, Any], tied: bool, norms: bool, name: str) -> Shape:
    missing = [size for size in _NEEDED if sizes.get(size) is None]
    if missing:
        names = ", ".join(f"{size} ({_SIZES[size]})" for size in missing)
        raise ValueError(f"the model lacks {names}")
    its = dict(sizes)
    its["kv_heads"] = its.get("kv_heads") or its["heads"]
    its["head_size"] = its.get("head_size") or 1
    shape = _checked(Shape(**its, tied=tied, head_norms=norms, name=name))
    if sizes.get("head_size"):
        return shape
    return shape._replace(head_size=shape.hidden // shape.heads)


def _checked(shape: Shape) -> Shape:
    for name in _SIZES:
        size = getattr(shape, name)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}; it must be a whole number above 0")
    if shape.heads % shape.kv_heads:
        raise ValueError(
            f"{shape.heads} heads cannot share {shape.kv_heads} of keys and values"
        )
    if not 0 <= shape.chosen <= shape.experts or (shape.experts and not shape.chosen):
        raise ValueError(
            f"a token cannot choose {shape.chosen} of {shape.experts} experts"
        )
    return shape
